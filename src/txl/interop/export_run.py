"""Export a run for transformers 5 (with code and tokenizer, so that it opens without this package) or as safetensors.

The module also reads its own exports, so that an export can be imported.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import safetensors.torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

import txl
from txl.config import MODEL_FIELDS, EvalConfig, RunConfig, TransformerXLConfig, model_from_dict
from txl.config.transformer_xl import HUGGINGFACE_TYPE
from txl.data.bpe import BpeVocabulary, byte_symbols
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.pieces import BYTE_ORDER_MARK
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import EOS, JOINER, UNK, marks
from txl.errors import UserError
from txl.files import JsonObject, check_new_directory, follow_umask
from txl.interop.conversion import FREE, contradiction, floating
from txl.interop.huggingface_checkpoint import read_weights, stated_config
from txl.interop.new_directory import write_directory
from txl.interop.source import window_after
from txl.native.sources import cpp_sources
from txl.runs.checkpoints import MODEL_FILE, VerifiedCheckpoint
from txl.runs.directory import RunDirectory

FORMATS = ("huggingface", "safetensors")
EXPORT_KIND = "transformer-xl"
"""`format` in the config.json of a plain export."""
_MODULE = "txl_huggingface"


def export_run(path: Path, out: Path, kind: str, checkpoint: str | None = None) -> list[str]:
    """Write a run's model for other programs.

    Args:
        path: run directory.
        out: directory to write; must be missing or empty.
        kind: "huggingface" or "safetensors".
        checkpoint: "best", "latest" or the number of a step; None: best if it exists, else latest.

    Returns:
        Notes for the user.

    Raises:
        UserError: if the run or checkpoint does not exist or cannot be exported, or if `out` cannot be written; created
            directories are then removed.
    """
    if kind not in FORMATS:
        raise UserError(field="format", value=kind, expected=f"one of {', '.join(FORMATS)}")
    check_new_directory(out)
    directory = RunDirectory(path)
    run = directory.config()
    if run.model.score_terms != "abcd":
        raise UserError(f"{path}: {run.model.chosen_by}; only Transformer-XL itself is exported")
    chosen = VerifiedCheckpoint(directory.checkpoint(checkpoint))
    chosen.check_belongs(asdict(run.model), path / "vocabulary.json")
    weights, vocabulary = chosen.tensors(MODEL_FILE), directory.vocabulary()
    fill = _fill_huggingface if kind == "huggingface" else _fill_safetensors
    return write_directory(out, lambda folder: fill(folder, run, weights, vocabulary))


def _tested(run: RunConfig) -> JsonObject:
    """Return the model's fields, with memory length, window and clamp from the run's test settings."""
    lengths = {"mem_len": run.eval.mem_len, "window": run.eval.window, "clamp_len": run.eval.clamp_len}
    return asdict(run.model) | lengths


def _write_weights(weights: dict[str, Tensor], folder: Path, metadata: dict[str, str]) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(weights, path, metadata=metadata or None)
    follow_umask(path)


def _fill_safetensors(
    folder: Path, run: RunConfig, weights: dict[str, Tensor], vocabulary: Vocabulary | None
) -> list[str]:
    size = len(weights["softmax.bias"])
    config = {"format": EXPORT_KIND, "version": txl.__version__, "vocab_size": size, "model": _tested(run)}
    config["eval"] = asdict(run.eval)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    _write_weights(weights, folder, {})
    if vocabulary is None:
        return ["the run has no vocabulary: none was written"]
    vocabulary.save(folder / "vocabulary.json")
    return []


def _fill_huggingface(
    folder: Path, run: RunConfig, weights: dict[str, Tensor], vocabulary: Vocabulary | None
) -> list[str]:
    line_end = None if vocabulary is None else vocabulary.line_end_id()
    config = _tested(run) | {
        "model_type": HUGGINGFACE_TYPE,
        "architectures": ["TransformerXLForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_MODULE}.TransformerXLConfig",
            "AutoModel": f"{_MODULE}.TransformerXLModel",
            "AutoModelForCausalLM": f"{_MODULE}.TransformerXLForCausalLM",
        },
        "vocab_size": len(weights["softmax.bias"]),
        "bos_token_id": line_end,  # no token is the end of a text: generation goes on behind a line end
        "line_end_id": None if vocabulary is None or vocabulary.kind == "word" else line_end,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "eval": asdict(run.eval),
    }
    notes = []
    if vocabulary is not None:
        vocabulary.save(folder / "vocabulary.json")
        try:
            for name, text in tokenizer_files(vocabulary).items():
                (folder / name).write_text(text, encoding="utf-8")
        except UserError as error:
            notes.append(f"no tokenizer was written: {error}")
    else:
        notes.append("the run has no vocabulary: no tokenizer was written")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    _write_weights(named, folder, {"format": "pt"})
    for name, text in flat_modules("txl.huggingface").items():
        (folder / name).write_text(text, encoding="utf-8")
    return notes


def flat_modules(start: str) -> dict[str, str]:
    """Return the source of a module and of all modules of this package that it imports, as files of one flat folder.

    transformers can open such a folder without this package: `from txl.models.adaptive import X` becomes
    `from .txl_models_adaptive import X`. Imports of jaxtyping are removed: annotations are never evaluated, and
    jaxtyping may not be installed where the export is opened.
    """
    files: dict[str, str] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        name = f"{module.replace('.', '_')}.py"
        if name in files:
            continue
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        if module == "txl.native.sources":
            source = _with_texts(cpp_sources())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "txl":
                waiting.append(node.module)
        flat = re.sub(r"^from jaxtyping import .*\n", "", source, flags=re.MULTILINE)
        flat = re.sub(r"^(\s*)from (txl[\w.]*) import", _relative, flat, flags=re.MULTILINE)
        files[name] = f"# {module} of transformer-xl {txl.__version__} (Apache-2.0), copied by txl export.\n{flat}"
    return files


def _with_texts(sources: dict[str, str]) -> str:
    """Return the source of a `txl.native.sources` that contains the C++ texts, for a folder of only Python files."""
    lines = ['"""The C++ sources of the compiled library."""', "", "", "def cpp_sources() -> dict[str, str]:"]
    lines += ['    """Texts by file name."""', "    return {"]
    for name, text in sources.items():
        lines += [
            f"        {name!r}: (",
            *(f"            {line!r}" for line in text.splitlines(keepends=True)),
            "        ),",
        ]
    return "\n".join([*lines, "    }", ""])


def _relative(line: re.Match[str]) -> str:
    return f"{line[1]}from .{line[2].replace('.', '_')} import"


PADDING = "<|pad|>"
"""Token whose id follows those of the vocabulary; it is no token of the model."""
LINE_END = "<|endoftext|>"
"""Token after `PADDING`, which the exported model reads as the line end of a vocabulary without `<eos>`."""
_CASED = r"[\p{Cased}&&[^\p{Case_Ignorable}]]"
_FINAL_SIGMA = normalizers.Replace(Regex(rf"(?<={_CASED}\p{{Case_Ignorable}}*)Σ(?!\p{{Case_Ignorable}}*{_CASED})"), "ς")
"""Lower case of a final capital sigma as in Python; the library's `Lowercase` gives σ everywhere."""
_UNKNOWN = "<|unk|>"
"""Spelling of `<unk>` in a tokenizer of characters, where `<unk>` in a text is five characters."""


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json; the tokenizer encodes to the vocabulary's ids.

    Decoding joins words and line ends by spaces, and punctuation marks as the joiners in the tokens state. Both the
    beginning and the end of a text are declared to be a line end.
    """
    tokenizer = _tokenizer(vocabulary)
    before = [normalizers.Replace(Regex(rf"\A{BYTE_ORDER_MARK}"), ""), normalizers.Replace("\r\n", "\n")]
    if vocabulary.normalise:
        after = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([*before, *after])  # pyright: ignore[reportAttributeAccessIssue]
    padding, begin, unknown = _free(PADDING, tokenizer), None, _UNKNOWN
    tokenizer.add_special_tokens([padding])
    if isinstance(vocabulary, WordVocabulary):
        begin, unknown = vocabulary.eos, vocabulary.unk
        if unknown is not None:  # transformers would find it where it touches other characters
            tokenizer.add_special_tokens([AddedToken(unknown, normalized=True)])
    elif vocabulary.line_end_id() is not None:
        begin = _free(LINE_END, tokenizer)
        tokenizer.add_special_tokens([begin])
    config: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 10**9,
        "pad_token": padding,
        "bos_token": begin,
        "eos_token": begin or padding,  # never None, because of the idiom `pad_token = eos_token`
    }
    if vocabulary.unk_id is not None:
        config["unk_token"] = unknown
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }


def _free(name: str, tokenizer: Tokenizer) -> str:
    """Return a name that no token has: GPT-2's vocabulary, for instance, has `<|endoftext|>`."""
    while tokenizer.token_to_id(name) is not None:
        name = f"<{name}>"
    return name


@functools.singledispatch
def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    raise NotImplementedError


@_tokenizer.register
def _(vocabulary: BpeVocabulary) -> Tokenizer:
    return Tokenizer.from_str(vocabulary.tokenizer.to_str())  # a copy, to which the padding token is added


@_tokenizer.register
def _(vocabulary: ByteVocabulary) -> Tokenizer:
    if not vocabulary.is_text:
        raise UserError(f"the vocabulary has {len(vocabulary)} of the 256 bytes; the others would silently vanish")
    tokenizer = Tokenizer(models.BPE({symbol: value for value, symbol in enumerate(byte_symbols())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@_tokenizer.register
def _(vocabulary: CharVocabulary) -> Tokenizer:
    ids = {
        _UNKNOWN if number == vocabulary.unk_id else symbol: number for number, symbol in enumerate(vocabulary.symbols)
    }
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN) if _UNKNOWN in ids else models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_UNKNOWN, UNK), decoders.Fuse()])
    if vocabulary.lower:
        # The library makes two characters of this capital, which is one `<unk>`.
        lower = normalizers.Sequence([normalizers.Replace("İ", "\uffff"), normalizers.Lowercase()])
        tokenizer.normalizer = lower  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


@_tokenizer.register
def _(vocabulary: WordVocabulary) -> Tokenizer:
    if vocabulary.boundary == "both":
        raise UserError("the vocabulary marks both ends of a sentence, which the tokenizers library cannot represent")
    words = dict(vocabulary.ids)
    tokenizer = Tokenizer(
        models.WordLevel(words) if vocabulary.unk is None else models.WordLevel(words, unk_token=vocabulary.unk)
    )
    separators = normalizers.Replace(Regex("[\x1c-\x1f]"), " ")  # white space in Python, not in the library
    in_lower = [_FINAL_SIGMA, normalizers.Lowercase()] if vocabulary.lower else []
    line_ends = normalizers.Replace("\n", " " if vocabulary.eos is None else f" {vocabulary.eos} ")
    if vocabulary.rule == "punctuation":
        apart, pieces = _marks()
    else:  # an `<unk>` that touches other characters is not this word
        rest = re.escape((vocabulary.unk or UNK)[1:])
        apart = [normalizers.Replace(Regex(f"(?i)<(?={rest}\\S)|(?<=\\S)<(?={rest})"), "<\x1c")]
        pieces = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Sequence([separators, *in_lower, *apart, line_ends])
    tokenizer.pre_tokenizer = pieces
    if vocabulary.rule == "punctuation":
        space, touching = decoders.WordPiece(prefix=JOINER, cleanup=False), decoders.Replace(Regex(f"{JOINER} ?"), "")
        tokenizer.decoder = decoders.Sequence([space, decoders.Fuse(), touching])
    if vocabulary.boundary is not None:
        assert vocabulary.eos_id is not None  # a boundary is a word
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{vocabulary.eos} $A", special_tokens=[(vocabulary.eos, vocabulary.eos_id)]
        )
    return tokenizer


def _marks() -> tuple[list[normalizers.Replace], pre_tokenizers.Sequence]:
    r"""Return normalisers that add joiners to marks, and a cutter into words (rule "punctuation", `txl.data.words`).

    An inserted character has the offsets of the character before it. So what joins a mark is inserted behind the mark:
    `￭` if the mark joins the next word, and \x1c, which no text holds at this point, if it joins the previous word.
    The cutter puts `￭` before every word (Metaspace: with the offsets of the word's first character), and removes it
    where there is no \x1c. A word that begins with `￭` would get none before it, so one is put there here.
    """
    mark, other = f"[{marks()}]", f"[^\\s{marks()}]"
    end = f"(?:eos|unk)>(?=[\\s{marks()}]|\\z)"  # of `<eos>` and `<unk>`, whose marks are no words
    rules = (
        (f"(?<!{other}){JOINER}", JOINER * 2),
        (f"(?<=\\A{mark}|\\s{mark})(?={other})(?!(?<=<){end})", JOINER),
        (f"(?<=\\S{mark})(?={other})", f"{JOINER}\x1c"),
        (f"(?<=\\S{mark})(?!{other})(?<!\\A{EOS}|\\s{EOS}|\\A{UNK}|\\s{UNK})", "\x1c"),
    )
    word = Regex(f"(?<!\\S)<{end}|{mark}{JOINER}?\x1c?|{other}+")
    cutter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(word, "removed", invert=True),
            pre_tokenizers.Metaspace(JOINER, "always", split=False),
            pre_tokenizers.Split(Regex(f"\\A{JOINER}(?![^\x1c]*\x1c)|\x1c"), "removed"),
        ]
    )
    return [normalizers.Replace(Regex(pattern), content) for pattern, content in rules], cutter


def is_own_export(folder: Path) -> bool:
    """Return whether a directory was written by `txl export`."""
    return _stated(folder) is not None


def _stated(folder: Path) -> JsonObject | None:
    """Return the model's fields from config.json; None if `txl export` did not write the directory."""
    values = stated_config(folder)
    if values is None:
        return None
    if values.get("format") == EXPORT_KIND and isinstance(values.get("model"), dict):
        return values["model"]
    return values if values.get("model_type") == HUGGINGFACE_TYPE else None


def read_test_settings(folder: Path) -> EvalConfig | None:
    """Return the test settings of the exported run; None if the export does not state them."""
    values = stated_config(folder) or {}
    return RunConfig.from_dict({"eval": values["eval"]}).eval if "eval" in values else None


def read_own_export(folder: Path, options: JsonObject) -> tuple[TransformerXLConfig, dict[str, Tensor]]:
    """Read configuration and weights of an export.

    Args:
        folder: directory that `txl export` wrote, or transformers' `save_pretrained` after loading an export.
        options: fields of `TransformerXLConfig` that the user states.
    """
    stated = _stated(folder) or {}
    known = {name: value for name, value in stated.items() if name in MODEL_FIELDS}
    for name, value in options.items():
        if name not in FREE and name in known and known[name] != value:
            raise contradiction(name, value, f"{folder} says {known[name]}")
        known[name] = list(value) if isinstance(value, tuple) else value
    if "mem_len" in options and "window" in stated and "window" not in options:
        known["window"] = window_after(stated.get("mem_len"), stated["window"], options["mem_len"])
    model = model_from_dict(known)
    if not isinstance(model, TransformerXLConfig):
        raise UserError(f"{folder}: {model.chosen_by}; only Transformer-XL itself is exported and imported")
    weights = read_weights(folder)
    weights = {name.removeprefix("model."): floating(name, tensor) for name, tensor in weights.items()}
    if "softmax.bias" not in weights:
        raise UserError(f"{folder}: the tensor softmax.bias is missing")
    return model, weights
