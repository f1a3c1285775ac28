"""Results and settings of evaluations in words."""

from __future__ import annotations

from unicodedata import category

from txl.config import ModelConfig
from txl.data.corpora import Corpus, is_named
from txl.data.pieces import WHOLE
from txl.data.user_text import is_cut
from txl.files import JsonObject
from txl.reporting.findings import tokens_read
from txl.runs.events import Evaluation, EvaluationFigures, SplitRecord


def plain(text: str) -> str:
    """Return text with backslash escapes for control, format, surrogate, private-use and unassigned characters.

    File names can contain such characters, which could break a page or reverse the direction of its text. Line ends
    and tabs stay.
    """
    return "".join(
        character if category(character)[0] != "C" or character in "\n\t" else repr(character)[1:-1]
        for character in text
    )


def short_name(corpus: str) -> str:
    """Return the name of a corpus; of a path, only the last part."""
    return corpus.replace("\\", "/").rstrip("/").rpartition("/")[2] or corpus


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 2,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def change_text(with_memory: float, without: float) -> str:
    """Return in words how memory changes the loss: "6.0% fewer bits" or "0.3% more bits"."""
    change = with_memory / without - 1
    digits = 1 if abs(change) >= 0.01 else 2
    return f"{abs(change):.{digits}%} {'fewer' if change < 0 else 'more'} bits"


def window_text(row: EvaluationFigures) -> str:
    """Return the window of an evaluation in words."""
    if row["window"] is None:
        return "no window"
    return f"window {counted(row['window'], 'key')} (a token’s own included)"


def manner_words(row: EvaluationFigures) -> list[str]:
    """Return in words the settings that differ from a plain evaluation: sliding, exhaustive, temperature, and so on."""
    words = [f"sliding window of {counted(row['segment'], 'token')}"] if row["sliding"] else []
    if row["exhaustive"] and not row["sliding"]:
        words.append("exhaustive")
    if row["temperature"] != 1:
        words.append(f"temperature {row['temperature']:g}")
    if row["cache_size"] is not None and row["cache_theta"] is not None and row["cache_lambda"] is not None:
        shown = f"theta {row['cache_theta']:g}, lambda {row['cache_lambda']:g}"
        words.append(f"continuous cache of {counted(row['cache_size'], 'token')} ({shown})")
    if (dynamic := row["dynamic"]) is not None:
        shown = f"{dynamic['rule']}, learning rate {dynamic['learning_rate']:g}, decay {dynamic['decay']:g}"
        words.append(f"dynamic evaluation ({shown})")
    return words


def arithmetic_words(row: EvaluationFigures) -> list[str]:
    """Return in words the clamp of an evaluation, if it has one, and the precision, if it is not float32."""
    words = [] if row["clamp_len"] is None else [f"distances clamped at {row['clamp_len']:,}"]
    return words if row["dtype"] == "float32" else [*words, f"computed in {row['dtype']}"]


def layers_text(model: ModelConfig) -> str:
    """Return the number of a model's layers and their width in words."""
    words, last = counted(model.n_layer, "layer"), model.last_width
    if model.n_layer == 1 or last == model.layer_width:
        return f"{words} of width {last}"
    return f"{words} of width {model.layer_width}, the last of {last}"


def split_text(split: str) -> str:
    """Return a split in words: "test split", or "whole text"."""
    return "whole text" if split == WHOLE else f"{split} split"


def settings_text(row: Evaluation, split: SplitRecord | None = None, memory: bool = True) -> str:
    """Return in words the split, targets, memory, window and segment of an evaluation, and its unusual settings.

    Which part was read is stated if counts of the split are given. Memory and window, which vary in a sweep, can be
    left out.
    """
    read, part = tokens_read(row), ""
    if split is not None and read < split["tokens"]:
        part = f"the first {read:,} of the {split['tokens']:,} tokens of "
    not_scored = f" ({row['dropped']:,} not scored: first token of each lane, and remainder)" if row["dropped"] else ""
    words = [f"{part}the {split_text(row['split'])} of {row['corpus']}"]
    words.append(f"{counted(row['tokens'], 'target')}, each scored once{not_scored}")
    if memory and not row["sliding"]:
        words.append(f"memory {row['mem_len']:,}, {window_text(row)}")
    if not row["sliding"]:
        words.append(f"segments of {row['segment']:,} in {counted(row['batch_size'], 'lane')}")
    return "; ".join([*words, *manner_words(row), *arithmetic_words(row), f"checkpoint {row['checkpoint']}"])


def adaptation_text(dynamic: JsonObject) -> str:
    """Return the settings of a dynamic evaluation in words."""
    words = []
    for name, value in dynamic.items():
        if name != "rule" and value is not None:
            words.append(f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}")
    return f"dynamic evaluation by {dynamic['rule']} ({', '.join(words)})"


def measured_part(corpus: Corpus, split: str, n_read: int) -> str:
    """Return in words the part of a corpus that consists of the first `n_read` tokens of a split."""
    sizes = {name: record["bytes"] for name, record in corpus.info()["splits"].items()}
    part = f"all of {corpus.name}, {sizes[split]:,} bytes"
    if split != WHOLE:
        cuts = {"train": "the first 90%", "valid": "the 5% behind the first 90%", "test": "the last 5%"}
        cut = not is_named(corpus.name) and is_cut(corpus.name)
        part = f"{cuts[split] if cut else f'the {split} split'} of {corpus.name}"
        part += f", {sizes[split]:,} of its {sum(sizes.values()):,} bytes"
    n_token = len(corpus.tokens(split))
    return part if n_read == n_token else f"the first {n_read:,} of {n_token:,} tokens of {part}"
