"""`txl train PRESET --out DIR`, or `--minutes N` without a preset: train a model, or resume a stopped run."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from txl.commands import options
from txl.commands.output import print_json, say
from txl.commands.parser import Parser, flag, option
from txl.config import RunConfig, TransformerXLConfig, chosen_family, leaf_fields, planned_name, shown, with_options
from txl.config.values import require
from txl.data.benchmarks import BENCHMARKS
from txl.errors import Field, UserError
from txl.runs.directory import RunDirectory

# Fields with a short form, which most users set: text, size, steps.
_SHORT = (
    *("data.corpus", "data.unit", "model.n_layer", "model.d_model", "model.mem_len", "train.steps"),
    *("train.batch_size", "train.segment", "train.learning_rate"),
)
_MOST_MINUTES = 366 * 24 * 60
# What --minutes excludes: it chooses the model and its steps, for a text of the user's own.
_CHOSEN = ("preset", "init_from", "fork", "extend", "train.steps", "train.planned_minutes", "data.source")


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "train",
        help="train a model, or resume a run",
        example="txl train stdlib-bpe --out runs/mine --corpus my.txt --steps 600",
        description="Train a model. The same command resumes a run that was stopped. On an NVIDIA GPU, a preset trains "
        "with the number format, recorded steps and attention that are fast there, unless options set them. "
        "txl train PRESET --help shows the options of that preset's models, with its values in brackets.",
        add_help=False,
    )
    about = (
        "a preset (txl presets) or a run directory; leave it out to go on with the run in --out, with --minutes, or to "
        "take the configuration of --init-from"
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help=about)
    first = parser.add_argument_group("what matters most")
    options.add_out(first, "DIR", "the run directory; needed unless --dry-run")
    minutes = "instead of a preset: choose a model that this machine can train on --corpus in N minutes"
    option(first, "--minutes", "N", minutes, float)
    place = parser.add_argument_group("this run")
    start = "start from the weights and vocabulary of another run; without PRESET, with its configuration too"
    option(place, "--init-from", "DIR", start)
    flag(place, "--extend", "go on beyond the run's end, to a larger --steps")
    flag(place, "--fork", "if --out DIR holds another run, start a new run in DIR-fork-N from its weights")
    flag(place, "--dry-run", "only show the configuration and what it costs")
    flag(place, "--quiet", "show no progress")
    options.shared(place, "data_dir", "device", "json")
    options.add_config_options(parser, ("data", "model", "train", "eval"), short=_SHORT, first=first)
    parser.exclude("fork", "extend", "init_from")
    parser.exclude("minutes", *_CHOSEN)
    parser.need("minutes", "data.corpus")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train a model; with --dry-run, only print the configuration and its costs."""
    began, quiet = time.perf_counter(), arguments.quiet or arguments.json
    if arguments.out is None and not arguments.dry_run:
        raise UserError("missing", field="out", remedy="name the directory that the run is written to")
    config = options.run_config(_base(arguments, began), options.config_options(arguments))
    from txl.training.starting import check_out, has_checkpoint

    out = None if arguments.out is None else RunDirectory(arguments.out)
    if arguments.fork and out is not None and not out.config_path.exists():
        problem = f"{out.path} holds no run to take the weights of"
        raise UserError(problem, field="fork", remedy="leave it out to start one")
    if arguments.init_from is not None and (out is None or not has_checkpoint(out)):
        RunDirectory(options.existing_run(arguments.init_from, "init_from")).config()
    # Only a preset's own values are open: those of a run directory, or of a run that goes on, are as they were.
    is_open = _names_preset(arguments) and (out is None or not has_checkpoint(out))
    if arguments.dry_run:
        _dry_run(config, arguments, is_open)
        return
    assert out is not None
    if os.environ.get("RANK", "0") == "0" and not arguments.fork:
        check_out(out.path, config, arguments.extend)
    from txl.training.trainer import Trainer, fork_of

    device, path, init_from = options.pick_device(arguments.device), out.path, arguments.init_from
    if is_open and device.startswith("cuda"):
        config, note = _fast(config, arguments, device)
        if note and not quiet and os.environ.get("RANK", "0") == "0":
            say(f"note: {note}")
    if arguments.fork:
        path, init_from = fork_of(config, path, device, arguments.data_dir)
        if init_from is not None:
            config.train.planned_minutes = None  # planned for the steps of the run in --out
    data_dir, extend = arguments.data_dir, arguments.extend
    trainer = Trainer(config, path, device=device, data_dir=data_dir, init_from=init_from, extend=extend, quiet=quiet)
    if path != out.path and not arguments.quiet:
        say(f"note: --fork: {path} starts from the weights of {out.path}")
    outcome = trainer.fit()
    if arguments.json:
        print_json(outcome)


def _base(arguments: argparse.Namespace, began: float) -> RunConfig:
    """Return the configuration of the preset, of the run in --out or of --init-from, or one chosen for --minutes."""
    from txl.data.corpora import with_absolute_paths
    from txl.training.starting import as_begun, has_checkpoint, imported

    minutes, preset, changes = arguments.minutes, arguments.preset, options.config_options(arguments)
    out = None if arguments.out is None else RunDirectory(arguments.out)
    if minutes is not None:
        expected = f"a number above 0, at most {_MOST_MINUTES:,} (a year)"
        require(0 < minutes <= _MOST_MINUTES, "minutes", minutes, expected)
        model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
        if chosen_family(model) is not TransformerXLConfig:
            name = next(name for name in ("model.family", "model.kind", "model.encoding") if name in changes)
            supported = ("only transformer-xl is chosen by ", Field("minutes"))
            raise UserError(supported, field=name, value=changes[name], remedy="choose a preset")
    elif preset is not None:
        base = options.base_config(preset)
        return base if out is None or not _names_preset(arguments) else as_begun(base, out)
    elif arguments.init_from is not None and (out is None or not has_checkpoint(out)):
        return options.base_config(str(options.existing_run(arguments.init_from, "init_from")))
    if out is not None and out.config_path.exists():
        stored = out.config()
        if minutes is None and not arguments.fork and out.log().is_import:
            raise imported(out.path)
        is_same = minutes is None or stored.name == planned_name(minutes)
        begun = has_checkpoint(out) or not stored.is_planned
        if begun and not is_same:
            problem = (f"holds the run {stored.name}, which ", Field("minutes", f"{minutes:g}"), " did not choose")
            remedy = ("leave ", Field("minutes"), " out to go on with it, or give another directory")
            raise UserError(problem, field="out", value=arguments.out, remedy=remedy)
        changed = with_options(stored, changes)
        changed.data = with_absolute_paths(changed.data)
        if minutes is None or begun or (is_same and changed == stored):
            return stored
        # The stored run has no checkpoint, and was chosen for other minutes, another text or other options.
    if minutes is None:
        choices = ("give a PRESET (see txl presets), ", Field("minutes", "N"), " or ", Field("init_from", "DIR"))
        raise UserError(("no preset is named, and ", Field("out"), " holds no run"), remedy=choices)
    return _chosen(arguments, began)


def _names_preset(arguments: argparse.Namespace) -> bool:
    from txl.presets import presets

    return arguments.preset in presets()


def _fast(config: RunConfig, arguments: argparse.Namespace, device: str, times: bool = True) -> tuple[RunConfig, str]:
    """Return a preset's configuration with what is fast on this GPU, and a line that says so, often with its times.

    What the user's options set stays. `times` is False if nothing is to be timed.
    """
    from txl.processes import process_count
    from txl.training import defaults

    changes = defaults.fast_options(config, options.config_options(arguments), device)
    config = with_options(config, changes)

    def measure(run: RunConfig) -> float:
        return defaults.step_seconds(run, _vocabulary_size(config, arguments), device)

    # The processes of torchrun would not time alike.
    attention = defaults.chosen_attention(config, device, measure if times and process_count() == 1 else None)
    if attention is not None and attention.timed:
        config = with_options(config, {"model.attention": attention.name})
    return config, defaults.note(changes, attention, device)


def _chosen(arguments: argparse.Namespace, began: float) -> RunConfig:
    """Choose a configuration for the text, the machine and the minutes; print the choice and return it."""
    from txl.processes import process_count

    if process_count() > 1:
        remedy = "start the run without torchrun, then go on with it in several"
        raise UserError("measures one process", field="minutes", remedy=remedy)
    changes, quiet = options.config_options(arguments), arguments.quiet or arguments.json
    corpus = changes["data.corpus"]
    if corpus in BENCHMARKS:
        problem = "it has presets of its own (txl presets)"
        raise UserError(problem, field="data.corpus", value=corpus, expected="a text of your own, or stdlib")
    options.check_corpus(corpus)
    if not arguments.dry_run:  # before the text is prepared and the machine measured
        from txl.training.starting import check_out

        check_out(Path(arguments.out))
    from txl.minutes.measured import run_in_minutes

    device = options.pick_device(arguments.device)
    chosen = run_in_minutes(arguments.minutes, changes, device, arguments.data_dir, began=began, quiet=quiet)
    for line in () if quiet else chosen.lines:
        say(line)
    return chosen.run


def _vocabulary_size(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Return the vocabulary's size: of the run to resume, or of the run to start from, if there is one."""
    from txl.data.corpora import vocabulary_size

    out = arguments.out if arguments.preset is None and arguments.minutes is None else None
    runs = [RunDirectory(path) for path in (out, arguments.init_from) if path is not None]
    vocabularies = (run.vocabulary() for run in runs if run.config_path.exists())
    known = next((len(vocabulary) for vocabulary in vocabularies if vocabulary is not None), None)
    if known is not None:
        return known
    return vocabulary_size(config.data, arguments.data_dir, quiet=arguments.quiet or arguments.json)


def _dry_run(config: RunConfig, arguments: argparse.Namespace, is_open: bool) -> None:
    """Print the resolved configuration, the parameters by part, the tokens per step and an estimate of memory.

    If the configuration `is_open`, it is that of a run on this device, whose attention may still be timed.
    """
    from txl.training.estimate import estimate

    vocab_size, device = _vocabulary_size(config, arguments), options.pick_device(arguments.device)
    if is_open and device.startswith("cuda"):
        config, _ = _fast(config, arguments, device, times=False)
    costs = estimate(config, vocab_size, device)
    if arguments.json:
        print_json({"config": config.to_dict(), "vocabulary_size": vocab_size, **costs.to_dict()})
        return
    for name, _, _, value in leaf_fields(config):
        print(f"{name:26} {shown(value)}")
    print(f"\nparameters at a vocabulary of {vocab_size:,}")
    for part, count in costs.parameters.items():
        print(f"  {part:24} {count:>14,}")
    print(f"  {'total':24} {costs.total_parameters:>14,}")
    print(f"\ntokens per step            {costs.tokens_per_step:>14,}")
    if costs.targets_per_step != costs.tokens_per_step:
        print(f"of them with a loss        {costs.targets_per_step:>14,}")
    print("RAM or GPU memory in bytes, estimated")
    for part, count in costs.memory_bytes.items():
        print(f"  {part:24} {count:>14,}")
    print(f"  {'total':24} {costs.total_bytes:>14,}")
