"""Surprisal for a reading-time study: from a text and reading times per word to a regression and a plot.

    python examples/reading_times.py runs/mine article.txt --times times.tsv --out study
    python examples/reading_times.py runs/mine article.txt --simulate 20 --out study

`times.tsv` has a header and the columns `word` (number of the word in the text, from 0, words being what lies between
white space), `reader` and `milliseconds`, separated by tabs, commas or semicolons, as Excel and R write them. Rows
without a number (empty, `NA`, `NaN`) are left out. `--simulate N` draws N readers instead, whose times depend
on surprisal by 4 ms per bit: a check that the analysis finds what is there, not a finding.

Predictors of a word's reading time: its surprisal and that of the word before it (readers spill over), its length, and
its log frequency in the text. Coefficients are those of least squares on times with each reader's mean taken out;
intervals are from a bootstrap over readers.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import txl

PREDICTORS = ("surprisal", "surprisal of the word before", "length", "log frequency")
FEWEST = 10  # reading times that a fit and its plot need
UNITS = ("bit", "bit", "character", "unit of the logarithm")


@dataclass
class Word:
    """A word of the text: its number, its characters, its surprisal in bits."""

    number: int
    text: str
    surprisal: float


@dataclass
class Times:
    """Reading times, one an observation: word's number [N], reader's number [N], milliseconds [N]."""

    word: np.ndarray
    reader: np.ndarray
    milliseconds: np.ndarray


def main() -> None:
    """Score the text, fit, plot."""
    options = read_options()
    times = None if options.times is None else read_times(options.times)
    model, vocabulary = txl.load(options.run)
    tested = txl.RunConfig.from_dict(json.loads(Path(options.run, "config.json").read_text(encoding="utf-8"))).eval
    words = score_words(model, vocabulary, options.text, tested.lengths.options())  # the lengths of `txl score`
    options.out.mkdir(parents=True, exist_ok=True)
    write_words(words, options.out / "words.tsv")

    table = predictors(words)
    rng = np.random.default_rng(options.seed)
    times = keep_predicted(simulate(table, options.simulate, rng) if times is None else times, table)
    if len(times.word) < FEWEST:
        raise txl.UserError(
            f"{len(times.word)} reading times belong to words whose surprisal and that of the word before are known; "
            f"expected {FEWEST} or more: check that column word counts the words of {options.text} from 0"
        )
    found = fit(table, times)
    intervals = bootstrap(table, times, rng)

    readers = len(np.unique(times.reader))
    print(f"{len(words):,} words, {len(times.word):,} reading times of {readers} readers")
    for name, unit, value, (low, high) in zip(PREDICTORS, UNITS, found, intervals, strict=True):
        print(f"{name:30} {value:7.2f} ms per {unit} [{low:.2f}, {high:.2f}]")
    plot(table, times, found, options.out / "reading_times.png")
    print(f"written: {options.out / 'words.tsv'}, {options.out / 'reading_times.png'}")


def score_words(model: txl.LanguageModel, vocabulary, path: Path, lengths) -> list[Word]:
    """Return the words of a text with their surprisal, for a memory length, window and clamp.

    `txl.surprisals` yields tokens, bytes or words or parts of them; at the last token of a word it gives the sum over
    all of its tokens. The first word of a text has none: its first token has nothing before it.
    """
    spelled: dict[int, bytes] = {}
    words = []
    for token in txl.surprisals(model, vocabulary, path, **lengths):
        if token.word is None:
            continue
        spelled[token.word] = spelled.get(token.word, b"") + token.text
        if token.word_surprisal is not None:
            text = spelled[token.word].decode("utf-8", errors="replace").strip()
            words.append(Word(token.word, text, token.word_surprisal))
    return words


def predictors(words: list[Word]) -> dict[int, np.ndarray]:
    """Return the predictors [4] of each word whose own and preceding word's surprisal is known, by its number."""
    frequency = Counter(word.text.lower() for word in words)
    surprisal = {word.number: word.surprisal for word in words}
    return {
        word.number: np.array(
            [
                word.surprisal,
                surprisal[word.number - 1],
                len(word.text),
                np.log(frequency[word.text.lower()] / len(words)),
            ]
        )
        for word in words
        if word.number - 1 in surprisal
    }


def simulate(table: dict[int, np.ndarray], readers: int, rng: np.random.Generator) -> Times:
    """Draw reading times of known dependence: 4 ms per bit, 2 ms for the word before, 6 ms per character, noise."""
    numbers = np.array(sorted(table))
    effect = np.stack([table[number] for number in numbers]) @ np.array([4.0, 2.0, 6.0, -3.0])
    word, reader, milliseconds = [], [], []
    for each in range(readers):
        pace = rng.normal(250, 40)
        word.append(numbers)
        reader.append(np.full(len(numbers), each))
        milliseconds.append(pace + effect + rng.normal(0, 30, len(numbers)))
    return Times(np.concatenate(word), np.concatenate(reader), np.concatenate(milliseconds))


def read_times(path: Path) -> Times:
    """Read a table of reading times; readers may have any names."""
    columns = ("word", "reader", "milliseconds")
    words: list[int] = []
    readers: list[str] = []
    times: list[float] = []
    left_out = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # Excel writes a byte order mark
            header = file.readline()
            separator = max("\t,;", key=header.count)
            file.seek(0)
            rows = csv.DictReader(file, delimiter=separator)
            for column in columns:
                if column not in (rows.fieldnames or ()):
                    raise txl.UserError(
                        f"{path}: no column {column!r} in its first line, {header.strip()!r}; expected the columns "
                        f"{', '.join(columns)}"
                    )
            for row in rows:
                word, reader, milliseconds = (str(row[column] or "").strip() for column in columns)
                if any(each.lower() in ("", "na", "nan") for each in (word, reader, milliseconds)):
                    left_out += 1
                    continue
                if separator == ";":  # where a comma divides the decimals
                    milliseconds = milliseconds.replace(",", ".")
                try:
                    words.append(int(word.removesuffix(".0")))
                    times.append(float(milliseconds))
                    readers.append(reader)
                except ValueError as error:
                    raise txl.UserError(f"{path}, line {rows.line_num}: {error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise txl.UserError(f"{path}: not a table in UTF-8 ({error}); save it as CSV in UTF-8") from None
    if left_out:
        print(f"{left_out:,} rows without a number were left out")
    return Times(np.array(words, dtype=np.int64), np.unique(readers, return_inverse=True)[1], np.array(times))


def keep_predicted(times: Times, table: dict[int, np.ndarray], most: float = 3000) -> Times:
    """Return the times of words that have predictors; longer ones than `most` milliseconds are taken for pauses."""
    kept = np.array([number in table for number in times.word], dtype=bool) & (times.milliseconds < most)
    return Times(times.word[kept], times.reader[kept], times.milliseconds[kept])


def fit(table: dict[int, np.ndarray], times: Times) -> np.ndarray:
    """Return the coefficients [4] in milliseconds per unit, each reader's mean taken out of times and predictors."""
    x, y = np.stack([table[number] for number in times.word]), times.milliseconds
    return np.linalg.lstsq(centred(x, times.reader), centred(y[:, None], times.reader)[:, 0], rcond=None)[0]


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return values [N,K] minus the mean of their group [N]."""
    _, group = np.unique(group, return_inverse=True)
    sums = np.zeros((group.max() + 1, values.shape[1]))
    np.add.at(sums, group, values)
    return values - (sums / np.bincount(group)[:, None])[group]


def bootstrap(table: dict[int, np.ndarray], times: Times, rng: np.random.Generator, rounds: int = 200) -> np.ndarray:
    """Return intervals [4,2] that hold 95% of the coefficients over samples of readers, drawn with replacement."""
    of_reader = [np.flatnonzero(times.reader == each) for each in np.unique(times.reader)]
    found = []
    for _ in range(rounds):
        drawn = rng.integers(len(of_reader), size=len(of_reader))
        rows = np.concatenate([of_reader[each] for each in drawn])
        reader = np.repeat(np.arange(len(drawn)), [len(of_reader[each]) for each in drawn])
        found.append(fit(table, Times(times.word[rows], reader, times.milliseconds[rows])))
    return np.quantile(found, [0.025, 0.975], axis=0).T


def plot(table: dict[int, np.ndarray], times: Times, found: np.ndarray, path: Path) -> None:
    """Draw reading time against surprisal, the other predictors' share taken out, in tenths of the observations."""
    x = centred(np.stack([table[number] for number in times.word]), times.reader)
    y = centred(times.milliseconds[:, None], times.reader)[:, 0] - x[:, 1:] @ found[1:]
    surprisal = np.array([table[number][0] for number in times.word])
    parts = np.array_split(np.argsort(surprisal), 10)
    means = np.array([(surprisal[part].mean(), y[part].mean()) for part in parts])
    errors = [2 * y[part].std() / np.sqrt(len(part)) for part in parts]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(means[:, 0], means[:, 1], yerr=errors, fmt="o", label="a tenth of the observations")
    line = np.array([surprisal.min(), surprisal.max()])
    axes.plot(line, found[0] * (line - surprisal.mean()), label=f"fit: {found[0]:.2f} ms per bit")
    axes.set(xlabel="surprisal in bits", ylabel="reading time beside the reader's mean, in ms")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_words(words: list[Word], path: Path) -> None:
    """Write the words with their surprisal, for other programs."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["word", "text", "surprisal"])
        writer.writerows((word.number, word.text, f"{word.surprisal:.6f}") for word in words)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Relate reading times of words to their surprisal.")
    parser.add_argument("run", help="a run directory: of txl train, or of txl import")
    parser.add_argument("text", type=Path, help="the text that was read, in UTF-8")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--times", type=Path, help="reading times: columns word, reader, milliseconds")
    source.add_argument("--simulate", type=int, metavar="N", help="draw N readers instead")
    parser.add_argument("--out", type=Path, default=Path("study"), help="folder for table and plot (study)")
    parser.add_argument("--seed", type=int, default=1, help="of simulation and bootstrap (1)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (txl.UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
