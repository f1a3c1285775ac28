"""Page of generated text: contexts, each with the model's and the true continuation, and measures of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from txl.analysis.mentions import KINDS
from txl.analysis.samples import Measures, Passage, Plan, Sample, pooled
from txl.files import JsonObject, write_whole
from txl.reporting.page import render
from txl.reporting.wording import counted, short_name
from txl.units import token_name


@dataclass(frozen=True)
class About:
    """Origin of the samples, as the page states it."""

    run: str
    checkpoint: str
    corpus: str
    split: str
    unit: str
    convention: str | None
    """Name of the tokenisation convention that was undone in the texts; None if none was."""
    settings: str
    """Sampling settings, memory length and window, in words."""
    training_tokens: int


def write_samples(samples: Sequence[Sample], about: About, plan: Plan, out: Path) -> tuple[JsonObject, list[Path]]:
    """Write samples.json, samples.md and samples.html into a folder.

    Returns:
        The content of samples.json without the samples, and the paths of the written files.
    """
    sampling = plan.sampling
    record: JsonObject = {
        "run": about.run,
        "checkpoint": about.checkpoint,
        "corpus": about.corpus,
        "split": about.split,
        "unit": about.unit,
        "detokenise": about.convention,
        "count": plan.count,
        "context": plan.context,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "temperature": sampling.temperature,
        **plan.lengths.options(),
        "training_tokens": about.training_tokens,
        "measures": {
            "generation": pooled([sample.generation_measures for sample in samples]),
            "reference": pooled([sample.reference_measures for sample in samples]),
        },
    }
    whole = json.dumps(record | {"samples": [sample.to_dict() for sample in samples]}, ensure_ascii=False, indent=1)
    texts = {
        "samples.json": whole + "\n",
        "samples.md": samples_markdown(samples, about),
        "samples.html": samples_page(samples, about),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(out / name, text)
    return record, [out / name for name in texts]


def settings_text(plan: Plan) -> str:
    """Return the sampling settings, the memory length and the window in words."""
    sampling, lengths = plan.sampling, plan.lengths.options()
    drawn = ["greedy"] if sampling.temperature == 0 else [f"temperature {sampling.temperature:g}"]
    if sampling.temperature:
        drawn += [f"top-k {sampling.top_k}"] if sampling.top_k is not None else []
        drawn += [f"top-p {sampling.top_p:g}"] if sampling.top_p is not None else []
    return ", ".join([*drawn, f"memory {lengths['mem_len']:,}, window {lengths['window']}"])


def samples_page(samples: Sequence[Sample], about: About) -> str:
    """Return the page as self-contained HTML."""
    values = {
        "title": f"Generated text: {short_name(about.run)} on {short_name(about.corpus)}",
        "lead": _lead(samples, about),
        "headings": HEADINGS,
        "summary": summary_rows(samples, about.unit),
        "caption": f"All {counted(len(samples), 'sample')} together",
        "samples": [_shown(number, sample, about) for number, sample in enumerate(samples, start=1)],
        "sentences": _sentences(about),
    }
    return render("samples.html", values)


def _shown(number: int, sample: Sample, about: About) -> dict[str, object]:
    """Return a sample as the page shows it, with the longest span copied from the training text marked."""
    made, true = sample.generation_measures, sample.reference_measures
    return {
        "number": number,
        "title": _title(number, sample, about),
        "context": _cut(sample.context, (0, 0)),
        "generation": _cut(sample.generation, made.longest_copy),
        "reference": _cut(sample.reference, true.longest_copy),
        "rows": _rows([made], [true], about.unit),
    }


def _cut(text: Passage, span: tuple[int, int]) -> tuple[str, str, str]:
    """Return a text before, inside and after a span, which is given as a first token and a number of tokens.

    White space at the edges of the span is moved out of it; white space at the edges of the text is dropped.
    """
    first, length = span
    parts = (slice(first), slice(first, first + length), slice(first + length, None))
    before, inside, after = ("".join(text.pieces[part]) for part in parts)
    marked = inside.strip()
    before += inside[: len(inside) - len(inside.lstrip())]
    after = inside[len(inside.rstrip()) :] + after if marked else after
    return before.lstrip(), marked, after.rstrip()


def samples_markdown(samples: Sequence[Sample], about: About) -> str:
    """Return the page as Markdown; each text is in a fence of more tildes than any run of tildes in the text."""
    lines = [f"# Generated text: {short_name(about.run)} on {short_name(about.corpus)}", "", _lead(samples, about), ""]
    lines += _markdown_table(HEADINGS, summary_rows(samples, about.unit))
    for number, sample in enumerate(samples, start=1):
        lines += [f"## {_title(number, sample, about)}", ""]
        for name, text in (
            ("Context", sample.context),
            ("Generation", sample.generation),
            ("Reference", sample.reference),
        ):
            fence = "~" * max(3, 1 + max((len(run) for run in re.findall("~+", text.text)), default=0))
            lines += [f"### {name}", "", fence, text.text.strip(), fence, ""]
        lines += _markdown_table(HEADINGS, _rows([sample.generation_measures], [sample.reference_measures], about.unit))
    lines += ["## What the measures say", "", *(f"- {sentence}" for sentence in _sentences(about))]
    return "\n".join(lines) + "\n"


HEADINGS = ("", "generation", "reference")


def summary_rows(samples: Sequence[Sample], unit: str) -> list[list[str]]:
    """Return table rows of the measures pooled over all generations and over all references, under `HEADINGS`."""
    return _rows(
        [sample.generation_measures for sample in samples], [sample.reference_measures for sample in samples], unit
    )


def _rows(generations: Sequence[Measures], references: Sequence[Measures], unit: str) -> list[list[str]]:
    made, true = pooled(generations), pooled(references)
    tokens = f"{token_name(unit)}s"

    def row(name: str, measure: str, key: int | str, form: Callable[[JsonObject], str]) -> list[str]:
        return [name, *(form(values[measure][key]) for values in (made, true))]

    rows = [row(f"repeated {n}-grams of words", "repeated", n, _share) for n in made["repeated"]]
    rows += [row(f"{n}-grams of {tokens} not in the training text", "novel", n, _share) for n in made["novel"]]
    rows.append([f"longest span copied from there, {tokens}", *(f"{text['longest_copy']:,}" for text in (made, true))])
    rows.append([f"mean span copied, {tokens}", *(f"{text['mean_copy']:.1f}" for text in (made, true))])
    rows += [row(f"{kind} of the context that the text repeats", "taken_up", kind, _count) for kind in KINDS]
    rows += [row(f"{kind} of the text that are in the context", "known", kind, _count) for kind in KINDS]
    return rows


def _share(measure: JsonObject) -> str:
    return "none" if measure["share"] is None else f"{measure['share']:.1%}"


def _count(measure: JsonObject) -> str:
    """Return hits and total as text; a percentage would hide that the counts are small."""
    return f"{measure['count']} of {measure['of']}" if measure["of"] else "none"


def _lead(samples: Sequence[Sample], about: About) -> str:
    first = samples[0]
    words = (
        f"{counted(len(samples), 'context')} of {counted(len(first.context.ids), token_name(about.unit))} from the "
        f"{about.split} split of {short_name(about.corpus)}, drawn by chance and not chosen, each continued by "
        f"{counted(len(first.generation.ids), token_name(about.unit))} by {about.checkpoint} of {about.run} "
        f"({about.settings}), beside what follows there in truth."
    )
    if about.convention is not None:
        words += f" The words are put together again ({about.convention}); the model read and wrote them apart."
    return words


def _title(number: int, sample: Sample, about: About) -> str:
    return f"Sample {number}: from {token_name(about.unit)} {sample.position:,}, seed {sample.seed}"


def _sentences(about: About) -> list[str]:
    token = token_name(about.unit)
    words = "words" if about.unit == "word" else "words (what stands between white space)"
    unknown = "A word that both know only as <unk> counts as the same. " if about.unit == "word" else ""
    return [
        f"Repeated n-grams: the share of a text’s n-grams of {words} that have occurred before in the same text "
        "(seq-rep-n of Welleck et al. 2020). The context does not count.",
        f"Not in the training text: the share of n-grams of {token}s that occur nowhere among the "
        f"{about.training_tokens:,} {token}s of the training split. The longest copied span, underlined in the "
        f"texts, is the longest run of {token}s that stands there word for word; the mean is over the runs that "
        f"begin at each {token}. {unknown}That a span is copied does not show that it was learned by heart: common "
        "phrases are in every text, as the reference shows.",
        "Headings are lines between `=`, without <unk>; names are two or more words in a row that begin with a "
        "capital; dates are a month with a day, a year or both; years are whole numbers from 1000 to 2099, those of "
        "dates too. “Of the context that the text repeats” counts those of the context that the continuation "
        "contains, letter by letter (a date also within a fuller one: July 1916 in 12 July 1916 and in July 12, "
        "1916). “Of the text that are in the context” counts those of the continuation that the context contains. "
        "Each counts once per text; “none” means that there are none.",
        "They do not tell whether what is said of a name or a date is true, or agrees with the context. A name that "
        "is shortened (Kershaw for Clayton Kershaw) is not seen, and a capital at the beginning of a sentence may be "
        "taken for a name’s. A text that moves on to another subject keeps nothing and may still be right: compare "
        "with the reference.",
        "A few samples say little: all of this differs by chance from text to text. Draw more (`--count`) before "
        "comparing models.",
    ]


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|---|" + "---:|" * (len(headings) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
