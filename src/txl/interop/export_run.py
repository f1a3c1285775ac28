"""A run as a directory for other programs: transformers 5 (with its code, to be opened alone), or plain safetensors."""

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
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

import txl
from txl.config import RunConfig
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.files import follow_umask
from txl.interop.tokenizer_files import tokenizer_files
from txl.native.sources import cpp_sources
from txl.run_directory import RunDirectory
from txl.training.checkpoints import MODEL_FILE, read_tensors

FORMATS = ("huggingface", "safetensors")
EXPORT_KIND = "transformer-xl"
"""`format` in the config.json of a plain export."""
HUGGINGFACE_TYPE = "txl-transformer-xl"
_MODULE = "txl_huggingface"


def export_run(path: Path, out: Path, kind: str, checkpoint: str | None = None) -> list[str]:
    """Write a run's model for other programs.

    Args:
        path: a run directory.
        out: the directory to write; it must not hold anything.
        kind: "huggingface" or "safetensors".
        checkpoint: "best", "latest" or the number of a step; None: best, else latest.

    Returns:
        What the user should know.

    Raises:
        UserError: if there is no such run or checkpoint, or `out` cannot be written; nothing is then left of it.
    """
    if kind not in FORMATS:
        raise UserError(f"--format is {kind!r}; expected one of {', '.join(FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: not empty; give another directory")
    directory = RunDirectory(path)
    run = directory.config()
    if run.model.score_terms != "abcd":
        raise UserError(f"{path}: {run.model.chosen_by}; only Transformer-XL itself is exported")
    chosen = directory.checkpoint(checkpoint)
    weights, vocabulary = read_tensors(chosen, MODEL_FILE), directory.vocabulary()
    fill = _fill_huggingface if kind == "huggingface" else _fill_safetensors
    return _written(out, lambda folder: fill(folder, run, weights, vocabulary))


def _written(out: Path, fill: Callable[[Path], list[str]]) -> list[str]:
    """Fill a directory beside `out`, then let it take that name."""
    temporary = out.with_name(f".{out.name}.partial")
    made = [each for each in (out.parent, *out.parent.parents) if not each.exists()]
    try:
        temporary.mkdir(parents=True)
        notes = fill(temporary)
        if out.is_dir():
            out.rmdir()
        os.rename(temporary, out)
        return notes
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--out {out}: cannot be written ({reason}); give a directory that can be written") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
            for each in made:
                with suppress(OSError):
                    each.rmdir()


def _tested(run: RunConfig) -> dict[str, Any]:
    """The model's fields, with the lengths that the run is tested with."""
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
    config = _tested(run) | {
        "model_type": HUGGINGFACE_TYPE,
        "architectures": ["TransformerXLForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_MODULE}.TransformerXLConfig",
            "AutoModelForCausalLM": f"{_MODULE}.TransformerXLForCausalLM",
        },
        "vocab_size": len(weights["softmax.bias"]),
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
    """The source of a module of this package and of all of its that it imports, as files of one flat folder.

    transformers opens such a folder by itself: `from txl.models.adaptive import X` becomes
    `from .txl_models_adaptive import X`.
    """
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        name = f"{module.replace('.', '_')}.py"
        if name in found:
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
        flat = re.sub(r"^(\s*)from (txl[\w.]*) import", _relative, source, flags=re.MULTILINE)
        found[name] = f"# {module} of transformer-xl {txl.__version__} (Apache-2.0), copied by txl export.\n{flat}"
    return found


def _with_texts(sources: dict[str, str]) -> str:
    """`txl.native.sources` for a place where only Python files come along."""
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
