"""Page of generated text: contexts, each with the model's and the true continuation, and measures of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from txl.analysis.mentions import KINDS
from txl.analysis.samples import Measures, Passage, Plan, Sample, pooled
from txl.files import JsonObject, write_whole
from txl.reporting.page import render
from txl.reporting.wording import counted, short_name
from txl.units import token_name

HEADINGS = ("", "generation", "reference")


@dataclass(frozen=True)
class About:
    """Origin of the samples, as the page states it."""

    run: str
    checkpoint: str
    corpus: str
    split: str
    unit: str
    convention: str | None  # name of the tokenisation convention that was undone in the texts; None if none was
    settings: str  # sampling settings, memory length and window, in words
    training_tokens: int


def write_samples(samples: Sequence[Sample], about: About, plan: Plan, out: Path) -> tuple[JsonObject, list[Path]]:
    """Write samples.json, samples.md and samples.html into a folder.

    Returns:
        The content of samples.json without the samples, and the paths of the written files.
    """
    sampling, lengths = plan.sampling, plan.lengths.options()
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
        **lengths,
        "training_tokens": about.training_tokens,
        "measures": {
            "generation": pooled([sample.generation_measures for sample in samples]),
            "reference": pooled([sample.reference_measures for sample in samples]),
        },
    }
    token = token_name(about.unit)
    lead = (
        f"{counted(len(samples), 'context')} of {counted(plan.context, token)} from the {about.split} split of "
        f"{short_name(about.corpus)}, drawn by chance, each continued by {counted(plan.max_tokens, token)} by "
        f"{about.checkpoint} of {about.run} ({about.settings}), beside what follows there in truth."
    )
    if about.convention is not None:
        lead += f" The words are put together again ({about.convention}); the model read and wrote them apart."
    values = {
        "title": f"Generated text: {short_name(about.run)} on {short_name(about.corpus)}",
        "lead": lead,
        "headings": HEADINGS,
        "summary": summary_rows(samples, about.unit),
        "caption": f"All {counted(len(samples), 'sample')} together",
        "samples": [
            {
                "title": f"Sample {number}: from {token} {sample.position:,}, seed {sample.seed}",
                "texts": [
                    ("Context", _cut(sample.context, (0, 0))),
                    ("Generation", _cut(sample.generation, sample.generation_measures.longest_copy)),
                    ("Reference", _cut(sample.reference, sample.reference_measures.longest_copy)),
                ],
                "rows": _rows([sample.generation_measures], [sample.reference_measures], about.unit),
            }
            for number, sample in enumerate(samples, start=1)
        ],
        "sentences": render("measures.md", {"about": about, "token": token}).strip().split("\n"),
    }
    whole = json.dumps(record | {"samples": [sample.to_dict() for sample in samples]}, ensure_ascii=False, indent=1)
    texts = {"json": whole + "\n", "md": render("samples.md", values), "html": render("samples.html", values)}
    out.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        write_whole(out / f"samples.{ending}", text)
    return record, [out / f"samples.{ending}" for ending in texts]


def settings_text(plan: Plan) -> str:
    """Return the sampling settings, the memory length and the window in words."""
    sampling, lengths = plan.sampling, plan.lengths.options()
    drawn = [f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"]
    if sampling.temperature:
        drawn += [f"top-k {sampling.top_k}"] if sampling.top_k is not None else []
        drawn += [f"top-p {sampling.top_p:g}"] if sampling.top_p is not None else []
    return ", ".join([*drawn, f"memory {lengths['mem_len']:,}, window {lengths['window']}"])


def _cut(text: Passage, span: tuple[int, int]) -> tuple[str, str, str]:
    """Return a text before, inside and after a span, which is given as a first token and a number of tokens."""
    first, end = span[0], span[0] + span[1]
    return "".join(text.pieces[:first]), "".join(text.pieces[first:end]), "".join(text.pieces[end:])


def summary_rows(samples: Sequence[Sample], unit: str) -> list[list[str]]:
    """Return table rows of the measures pooled over all generations and over all references, under `HEADINGS`."""
    made = [sample.generation_measures for sample in samples]
    return _rows(made, [sample.reference_measures for sample in samples], unit)


def _rows(generations: Sequence[Measures], references: Sequence[Measures], unit: str) -> list[list[str]]:
    both, tokens = (pooled(generations), pooled(references)), f"{token_name(unit)}s"
    rows = [("repeated", n, f"repeated {n}-grams of words") for n in both[0]["repeated"]]
    rows += [("novel", n, f"{n}-grams of {tokens} not in the training text") for n in both[0]["novel"]]
    shares = [
        [name, *("none" if text[kind][n]["share"] is None else f"{text[kind][n]['share']:.1%}" for text in both)]
        for kind, n, name in rows
    ]
    shares.append([f"longest span copied from there, {tokens}", *(f"{text['longest_copy']:,}" for text in both)])
    shares.append([f"mean span copied, {tokens}", *(f"{text['mean_copy']:.1f}" for text in both)])
    # Hits and total; a percentage would hide that the counts are small.
    for measure, name in (
        ("taken_up", "of the context that the text repeats"),
        ("known", "of the text that are in the context"),
    ):
        for kind in KINDS:
            counts = [text[measure][kind] for text in both]
            shares.append([f"{kind} {name}", *(f"{n['count']} of {n['of']}" if n["of"] else "none" for n in counts)])
    return shares
