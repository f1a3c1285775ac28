"""`txl samples DIR`: contexts of the test split continued by a model, beside what follows there (Appendix E)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from txl.commands.options import (
    add_checkpoint,
    add_config_options,
    add_data_dir,
    add_detokenise,
    add_device,
    add_json,
    add_memory_options,
    add_sampling_options,
    convention,
    existing_run,
    memory_settings,
    pick_device,
    print_json,
    progress_bar,
    writable_folder,
)
from txl.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("samples", help="continue contexts of the test split, beside what follows there")
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--out", metavar="DIR", help="folder for samples.html, .md and .json (default: DIR/samples)")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default: test)")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="contexts (default: 3)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of a context (default: 512)")
    parser.add_argument(
        "--max-tokens", type=int, default=500, metavar="N", help="tokens to make of each (default: 500, as the paper)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of contexts and texts (default: 0)")
    add_sampling_options(parser)
    add_detokenise(parser, default="auto")
    parser.add_argument("--no-compile", action="store_true", help="PyTorch alone, without the compiled step")
    add_memory_options(parser)
    add_config_options(parser, ("data",))
    add_checkpoint(parser)
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Generate, measure, write the three files, and print the measures."""
    for name in ("count", "context", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected 1 or more")
    if arguments.seed < 0:
        raise UserError(f"--seed is {arguments.seed}; expected 0 or more")
    from txl.allocator import keep_freed_memory
    from txl.analysis.samples import Plan, make_samples
    from txl.commands.evaluate import open_run_corpus, split_tokens
    from txl.generation import Sampling
    from txl.reporting.samples_page import About
    from txl.run_directory import RunDirectory

    sampling = Sampling(arguments.top_k, arguments.top_p, arguments.temperature)
    keep_freed_memory()
    directory = RunDirectory(existing_run(arguments.directory))
    lengths = memory_settings(arguments, directory.config())
    checkpoint = directory.checkpoint(arguments.checkpoint)
    model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    tokenised_as = convention(arguments.detokenise, vocabulary)
    corpus = open_run_corpus(directory, vocabulary, arguments)
    tokens, training = split_tokens(corpus, arguments.split), split_tokens(corpus, "train")
    assert vocabulary is not None  # open_run_corpus has refused None
    out = writable_folder(directory.path / "samples" if arguments.out is None else arguments.out)
    plan = Plan(arguments.count, arguments.context, arguments.max_tokens, arguments.seed, sampling, lengths)
    with _Progress(quiet=arguments.json) as progress:
        samples = make_samples(
            model,
            vocabulary,
            tokens,
            training,
            plan,
            convention=tokenised_as,
            compile=not arguments.no_compile,
            progress=progress,
        )
    about = About(
        str(arguments.directory),
        checkpoint.name,
        corpus.name,
        arguments.split,
        corpus.unit,
        tokenised_as,
        _settings_text(plan),
        len(training),
    )
    record = {
        "run": about.run,
        "checkpoint": about.checkpoint,
        "corpus": about.corpus,
        "split": about.split,
        "unit": about.unit,
        "detokenise": tokenised_as,
        "count": plan.count,
        "context": plan.context,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "temperature": sampling.temperature,
        **lengths,
        "training_tokens": len(training),
    }
    _write_and_print(out, samples, about, record, as_json=arguments.json)


def _write_and_print(out: Path, samples: list[Any], about: Any, record: dict[str, Any], as_json: bool) -> None:
    from txl.analysis.samples import pooled
    from txl.files import write_whole
    from txl.reporting.samples_page import HEADINGS, samples_markdown, samples_page, summary_rows

    record["measures"] = {
        "generation": pooled([each.generation_measures for each in samples]),
        "reference": pooled([each.reference_measures for each in samples]),
    }
    whole = json.dumps(record | {"samples": [each.to_dict() for each in samples]}, ensure_ascii=False, indent=1)
    texts = {
        "samples.json": whole + "\n",
        "samples.md": samples_markdown(samples, about),
        "samples.html": samples_page(samples, about),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(out / name, text)
    if as_json:
        print_json(record | {"files": [str(out / name) for name in texts]})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if column else "left")
    for row in summary_rows(samples, about.unit):
        table.add_row(*row)
    Console().print(table)
    for name in texts:
        print(out / name)


def _settings_text(plan: Any) -> str:
    sampling, lengths = plan.sampling, plan.lengths
    drawn = ["greedy"] if sampling.temperature == 0 else [f"temperature {sampling.temperature:g}"]
    if sampling.temperature:
        drawn += [f"top-k {sampling.top_k}"] if sampling.top_k is not None else []
        drawn += [f"top-p {sampling.top_p:g}"] if sampling.top_p is not None else []
    return ", ".join([*drawn, f"memory {lengths['mem_len']:,}, window {lengths['window']}"])


class _Progress:
    """One bar a part of the work."""

    def __init__(self, quiet: bool):
        self._quiet, self._what = quiet, ""
        self._bar: Any = None
        self._move: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.__exit__()
            self._what = what
            self._bar, self._move = progress_bar(what, self._quiet)
            self._bar.start()
        self._move(done, total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
