"""Export a run for transformers 5 (with code and tokenizer, so that it opens without this package) or as safetensors.

The module also reads its own exports, so that an export can be imported.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from pprint import pformat

import safetensors.torch
from safetensors import SafetensorError
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
from txl.files import JsonObject, absolute, check_new_directory, follow_umask, make_scratch, reason_of
from txl.interop.conversion import FREE, contradiction, floating, window_after
from txl.interop.original import read_weights, stated_config
from txl.native.sources import cpp_sources
from txl.runs.checkpoints import MODEL_FILE, VerifiedCheckpoint
from txl.runs.directory import RunDirectory

FORMATS = ("huggingface", "safetensors")
EXPORT_KIND = "transformer-xl"  # `format` in the config.json of a plain export
_MODULE = "txl_huggingface"


def export_run(path: Path, out: Path, kind: str, checkpoint: str | None = None) -> list[str]:
    """Write a run's model for other programs, and return notes for the user.

    Args:
        path: run directory.
        out: directory to write; must be missing or empty.
        kind: "huggingface" or "safetensors".
        checkpoint: "best", "latest" or the number of a step; None: best if it exists, else latest.

    Raises:
        UserError: if the run cannot be exported, or `out` cannot be written; created directories are then removed.
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
    notes = ["the run has no vocabulary: none was written"] if vocabulary is None else []
    # Memory length, window and clamp are those of the run's test settings.
    lengths = {"mem_len": run.eval.mem_len, "window": run.eval.window, "clamp_len": run.eval.clamp_len}
    model, tested, size = asdict(run.model) | lengths, asdict(run.eval), len(weights["softmax.bias"])
    files: dict[str, str] = {}
    if kind == "safetensors":
        config = {"format": EXPORT_KIND, "version": txl.__version__, "vocab_size": size, "model": model, "eval": tested}
    else:
        line_end = None if vocabulary is None else vocabulary.line_end_id()
        config = model | {
            "model_type": HUGGINGFACE_TYPE,
            "architectures": ["TransformerXLForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{_MODULE}.TransformerXLConfig",
                "AutoModel": f"{_MODULE}.TransformerXLModel",
                "AutoModelForCausalLM": f"{_MODULE}.TransformerXLForCausalLM",
            },
            "vocab_size": size,
            "bos_token_id": line_end,  # no token is the end of a text: generation goes on behind a line end
            "line_end_id": None if vocabulary is None or vocabulary.kind == "word" else line_end,
            "dtype": "float32",
            "tie_word_embeddings": False,
            "eval": tested,
        }
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
        files = flat_modules("txl.huggingface")
        try:
            files |= {} if vocabulary is None else tokenizer_files(vocabulary)
        except UserError as error:
            notes.append(f"no tokenizer was written: {error}")
    files["config.json"] = json.dumps(config, indent=1) + "\n"

    def fill(folder: Path) -> None:
        if vocabulary is not None:
            vocabulary.save(folder / "vocabulary.json")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        metadata = {"format": "pt"} if kind == "huggingface" else None
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata=metadata)
        follow_umask(folder / "model.safetensors")

    write_directory(out, fill)
    return notes


def write_directory(out: Path, fill: Callable[[Path], object]) -> None:
    """Fill a temporary directory beside `out` and rename it; if `out` exists, inside it, and move what it holds.

    An existing `out` stays, as a process may work in it, or another file system may be mounted there. If an error
    occurs, only what this call wrote is removed.
    """
    out = Path(absolute(str(out)))
    temporary, made = None, [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    moved: list[Path] = []
    try:
        exists = out.is_dir()
        if not exists:
            out.parent.mkdir(parents=True, exist_ok=True)
        temporary = make_scratch(out if exists else out.parent, out.name)
        fill(temporary)
        if exists:
            # config.json, which makes the directory a run or a model, comes last.
            for path in sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path)):
                os.rename(path, out / path.name)
                moved.append(out / path.name)
        else:
            os.rename(temporary, out)
    except BaseException as error:
        for path in moved:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        problem, remedy = f"cannot be written ({reason_of(error)})", "give a directory that can be written"
        raise UserError(problem, field="out", value=str(out), remedy=remedy) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if not out.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()


def flat_modules(start: str) -> dict[str, str]:
    """Return the source of a module and of all modules of this package that it imports, as files of one flat folder.

    transformers can open such a folder without this package: `from txl.models.adaptive import X` becomes
    `from .txl_models_adaptive import X`. A module that is imported whole also gives a name, because transformers finds
    only such files. Imports of jaxtyping are removed: annotations are never evaluated, and jaxtyping may not be
    installed where the export is opened. The C++ sources become a dictionary of texts, for a folder of only Python
    files.
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
            texts = pformat(cpp_sources(), width=200, sort_dicts=False)
            source = f'"""The C++ sources."""\n\n\ndef cpp_sources() -> dict[str, str]:\n    return {texts}\n'
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "txl":
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                waiting += [name if _is_module(name) else node.module for name in whole]
        flat = re.sub(r"^from jaxtyping import .*\n", "", source, flags=re.MULTILINE)
        flat = re.sub(r"^(\s*)from (txl[\w.]*) import(?: (\w+)$)?", _flat_import, flat, flags=re.MULTILINE)
        files[name] = f"# {module} of transformer-xl {txl.__version__} (Apache-2.0), copied by txl export.\n{flat}"
    return files


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the name before the last dot is no package
        return False


def _flat_import(line: re.Match[str]) -> str:
    space, module, name = line.groups()
    if name is not None and _is_module(f"{module}.{name}"):
        file = f"{module}.{name}".replace(".", "_")
        return f"{space}from .{file} import __name__ as _; from . import {file} as {name}"
    return f"{space}from .{module.replace('.', '_')} import" + ("" if name is None else f" {name}")


PADDING = "<|pad|>"  # its id follows those of the vocabulary; it is no token of the model
LINE_END = (
    "<|endoftext|>"  # after `PADDING`; the exported model reads it as the line end of a vocabulary without `<eos>`
)
_CASED = r"[\p{Cased}&&[^\p{Case_Ignorable}]]"
# Lower case of a final capital sigma as in Python; the library's `Lowercase` gives σ everywhere.
_FINAL_SIGMA = normalizers.Replace(Regex(rf"(?<={_CASED}\p{{Case_Ignorable}}*)Σ(?!\p{{Case_Ignorable}}*{_CASED})"), "ς")
_UNKNOWN = "<|unk|>"  # `<unk>` in a tokenizer of characters, where `<unk>` in a text is five characters


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


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    if isinstance(vocabulary, WordVocabulary):
        return _word_tokenizer(vocabulary)
    if isinstance(vocabulary, BpeVocabulary):
        return Tokenizer.from_str(vocabulary.tokenizer.to_str())  # a copy, to which the padding token is added
    if isinstance(vocabulary, ByteVocabulary):
        if not vocabulary.is_text:
            raise UserError(f"the vocabulary has {len(vocabulary)} of the 256 bytes; the others would silently vanish")
        tokenizer = Tokenizer(models.BPE({symbol: value for value, symbol in enumerate(byte_symbols())}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    assert isinstance(vocabulary, CharVocabulary)
    symbols = [_UNKNOWN if number == vocabulary.unk_id else symbol for number, symbol in enumerate(vocabulary.symbols)]
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN) if _UNKNOWN in ids else models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_UNKNOWN, UNK), decoders.Fuse()])
    if vocabulary.lower:
        # The library makes two characters of this capital, which is one `<unk>`.
        lower = normalizers.Sequence([normalizers.Replace("İ", "\uffff"), normalizers.Lowercase()])
        tokenizer.normalizer = lower  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _word_tokenizer(vocabulary: WordVocabulary) -> Tokenizer:
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


def stated_by_export(folder: Path) -> JsonObject | None:
    """Return the config.json of an export, with the model's fields on its top level; None if `folder` holds none."""
    values = stated_config(folder) or {}
    if values.get("format") == EXPORT_KIND and isinstance(values.get("model"), dict):
        return {**{name: value for name, value in values.items() if name == "eval"}, **values["model"]}
    return values if values.get("model_type") == HUGGINGFACE_TYPE else None


def read_own_export(
    folder: Path, stated: JsonObject, options: JsonObject
) -> tuple[TransformerXLConfig, dict[str, Tensor], EvalConfig | None]:
    """Read configuration, weights and test settings (None if not stated) of an export.

    transformers' `save_pretrained` may have written it, after loading an export. `stated` is the result of
    `stated_by_export`; `options` are fields of `TransformerXLConfig` that the user states.
    """
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
    tested = RunConfig.from_dict({"eval": stated["eval"]}).eval if "eval" in stated else None
    return model, weights, tested
