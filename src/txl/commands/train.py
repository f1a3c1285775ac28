"""`txl train PRESET --out DIR`, or `--minutes N` without a preset: train a model, or resume a stopped run."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from txl.commands.arguments import check_corpus, existing_run, pick_device
from txl.commands.config_options import add_config_options, base_config, config_options
from txl.commands.options import add_data_dir, add_device, add_json, add_out
from txl.commands.output import print_json, say
from txl.commands.parser import Commands
from txl.config import (
    RunConfig,
    TransformerXLConfig,
    chosen_family,
    leaf_fields,
    planned_name,
    shown,
    validate,
    with_options,
)
from txl.config.values import require
from txl.errors import Field, UserError

# Fields with a short form, which most users set: text, size, steps.
_SHORT = (
    *("data.corpus", "data.unit", "model.n_layer", "model.d_model", "model.mem_len", "train.steps"),
    *("train.batch_size", "train.segment", "train.learning_rate"),
)
_MOST_MINUTES = 366 * 24 * 60
# Fields of a model that select its family.
_FAMILY_FIELDS = ("model.family", "model.kind", "model.encoding")
# Fields that a choice by minutes excludes, and the reasons.
_CHOSEN = {
    "train.steps": "the minutes determine the steps",
    "train.planned_minutes": "the minutes set it",
    "data.source": "a text of your own is not fetched from anywhere",
}


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a model, or resume a run",
        example="txl train stdlib-bpe --out runs/mine --corpus my.txt --steps 600",
        description="Train a model. The same command resumes a run that was stopped. txl train PRESET --help "
        "shows the options of that preset's models, with its values in brackets.",
        add_help=False,
    )
    parser.add_argument(
        "preset",
        nargs="?",
        metavar="PRESET",
        help="a preset (txl presets) or a run directory; leave it out to go on with the run in --out, with --minutes, "
        "or to take the configuration of --init-from",
    )
    first = parser.group("what matters most")
    add_out(first, "DIR", "the run directory; needed unless --dry-run")
    first.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="instead of a preset: choose a model that this machine can train on --corpus in N minutes",
    )
    this_run = parser.group("this run")
    this_run.add_argument(
        "--init-from",
        metavar="DIR",
        help="start from the weights and vocabulary of another run; without PRESET, with its configuration too",
    )
    this_run.add_argument("--extend", action="store_true", help="go on beyond the run's end, to a larger --steps")
    this_run.add_argument(
        "--fork",
        action="store_true",
        help="if --out DIR holds another run, start a new run in DIR-fork-N from its weights",
    )
    this_run.add_argument("--dry-run", action="store_true", help="only show the configuration and what it costs")
    this_run.add_argument("--quiet", action="store_true", help="show no progress")
    add_data_dir(this_run)
    add_device(this_run)
    add_json(this_run)
    add_config_options(parser, ("data", "model", "train", "eval"), short=_SHORT, first=first)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train a model; with --dry-run, only print the configuration and its costs."""
    from txl.data.corpora import refuse_unused, with_absolute_paths

    began = time.perf_counter()
    changes, base = config_options(arguments), _base(arguments, began)
    config = with_options(base, changes)
    if config.data.corpus != base.data.corpus and "data.source" not in changes:
        config.data.source = None  # the preset's source belongs to the preset's own corpus
    config.data = with_absolute_paths(config.data)
    validate(config)
    refuse_unused(config.data, changes)
    if os.environ.get("RANK", "0") == "0":  # so that only one process reports it
        check_corpus(config.data.corpus)
    _check_source(arguments)
    if arguments.dry_run:
        dry_run(config, arguments)
        return
    if arguments.out is None:
        raise _no_out()
    out, init_from = Path(arguments.out), arguments.init_from
    if os.environ.get("RANK", "0") == "0" and not arguments.fork:
        from txl.training.starting import check_out

        check_out(out, config, arguments.extend)
    from txl.devices import keep_freed_memory
    from txl.training.trainer import Trainer, fork_of

    keep_freed_memory()
    device = pick_device(arguments.device)
    if arguments.fork:
        out, init_from = fork_of(config, out, device, arguments.data_dir)
        if init_from is not None:
            config.train.planned_minutes = None  # planned for the steps of the run in --out
    trainer = Trainer(
        config,
        out,
        device=device,
        data_dir=arguments.data_dir,
        init_from=init_from,
        extend=arguments.extend,
        quiet=arguments.quiet or arguments.json,
    )
    if out != Path(arguments.out) and not arguments.quiet:
        say(f"note: --fork: {out} starts from the weights of {arguments.out}")
    outcome = trainer.fit()
    if arguments.json:
        print_json(outcome)


def _base(arguments: argparse.Namespace, began: float) -> RunConfig:
    """Return the configuration of the preset, of the run in --out or of --init-from, or one chosen for --minutes.

    Args:
        arguments: parsed arguments of the command.
        began: start of the command, in seconds of `time.perf_counter`.
    """
    from txl.runs.directory import RunDirectory
    from txl.training.starting import has_checkpoint, imported

    minutes, preset = arguments.minutes, arguments.preset
    out = None if arguments.out is None else RunDirectory(arguments.out)
    if minutes is not None:
        _check_minutes(arguments)
    elif preset is not None:
        return base_config(preset)
    elif arguments.init_from is not None and (out is None or not has_checkpoint(out)):
        return base_config(str(existing_run(arguments.init_from, "init_from")))
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
        if minutes is None or begun or (is_same and _is_of(stored, config_options(arguments))):
            return stored
        # The stored run has no checkpoint, and was chosen for other minutes, another text or other options.
    if minutes is None:
        choices = ("give a PRESET (see txl presets), ", Field("minutes", "N"), " or ", Field("init_from", "DIR"))
        raise UserError(("no preset is named, and ", Field("out"), " holds no run"), remedy=choices)
    return _chosen(arguments, began)


def _is_of(stored: RunConfig, changes: dict[str, str]) -> bool:
    """Return whether a stored configuration agrees with the given options."""
    from txl.data.corpora import with_absolute_paths

    changed = with_options(stored, changes)
    changed.data = with_absolute_paths(changed.data)
    return changed == stored


def _check_minutes(arguments: argparse.Namespace) -> None:
    """Refuse an invalid number of minutes, and options that exclude --minutes."""
    minutes, changes = arguments.minutes, config_options(arguments)
    expected = f"a number above 0, at most {_MOST_MINUTES:,} (a year)"
    require(0 < minutes <= _MOST_MINUTES, "minutes", minutes, expected)
    excluded = {"preset": "it names a configuration, and the minutes choose one", **_CHOSEN}
    excluded |= dict.fromkeys(("init_from", "fork", "extend"), "it keeps a run's model, and the minutes choose one")
    for name, why in excluded.items():
        if name in changes or getattr(arguments, name, None):
            value = changes.get(name) or getattr(arguments, name)
            raise UserError(why, field=name, value=value, remedy=("leave it or ", Field("minutes"), " out"))
    model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
    if chosen_family(model) is not TransformerXLConfig:
        name = next(name for name in _FAMILY_FIELDS if name in changes)
        supported = ("only transformer-xl is chosen by ", Field("minutes"))
        raise UserError(supported, field=name, value=changes[name], remedy="choose a preset")
    if "data.corpus" not in changes:
        remedy = ("give ", Field("data.corpus", "FILE"), ", a folder, or stdlib")
        raise UserError("needs a text", field="minutes", remedy=remedy)


def _chosen(arguments: argparse.Namespace, began: float) -> RunConfig:
    """Choose a configuration for the text, the machine and the minutes; print the choice and return it."""
    from txl.data.benchmarks import BENCHMARKS
    from txl.processes import process_count

    if process_count() > 1:
        remedy = "start the run without torchrun, then go on with it in several"
        raise UserError("measures one process", field="minutes", remedy=remedy)
    changes = config_options(arguments)
    corpus = changes["data.corpus"]
    if corpus in BENCHMARKS:
        problem = "it has presets of its own (txl presets)"
        raise UserError(problem, field="data.corpus", value=corpus, expected="a text of your own, or stdlib")
    check_corpus(corpus)
    if not arguments.dry_run:  # before the text is prepared and the machine measured
        if arguments.out is None:
            raise _no_out()
        from txl.training.starting import check_out

        check_out(Path(arguments.out))
    quiet = arguments.quiet or arguments.json
    from txl.devices import keep_freed_memory
    from txl.minutes.measured import run_in_minutes

    keep_freed_memory()
    device = pick_device(arguments.device)
    chosen = run_in_minutes(arguments.minutes, changes, device, arguments.data_dir, began=began, quiet=quiet)
    for line in () if quiet else chosen.lines:
        say(line)
    return chosen.run


def _no_out() -> UserError:
    return UserError("missing", field="out", remedy="name the directory that the run is written to")


def _check_source(arguments: argparse.Namespace) -> None:
    """Refuse contradictory uses of --fork and --init-from, and missing runs, before PyTorch is imported."""
    from txl.runs.directory import RunDirectory
    from txl.training.starting import has_checkpoint

    if arguments.fork and arguments.extend:
        problem = "a fork is a new run, with steps of its own"
        raise UserError(problem, field="fork", remedy=("leave it or ", Field("extend"), " out"))
    if arguments.fork and arguments.init_from is not None:
        problem = ("takes the weights of ", Field("out"))
        raise UserError(problem, field="fork", remedy=("leave it or ", Field("init_from"), " out"))
    out = None if arguments.out is None else RunDirectory(arguments.out)
    if arguments.fork and out is not None and not out.config_path.exists():
        problem = f"{out.path} holds no run to take the weights of"
        raise UserError(problem, field="fork", remedy="leave it out to start one")
    if arguments.init_from is not None and (out is None or not has_checkpoint(out)):
        RunDirectory(existing_run(arguments.init_from, "init_from")).config()


def _inherited_size(arguments: argparse.Namespace) -> int | None:
    """Return the vocabulary size of the run to resume, or of the run to start from; None without such a run."""
    from txl.runs.directory import RunDirectory

    out = arguments.out if arguments.preset is None and arguments.minutes is None else None
    runs = [RunDirectory(path) for path in (out, arguments.init_from) if path is not None]
    vocabularies = (run.vocabulary() for run in runs if run.config_path.exists())
    return next((len(vocabulary) for vocabulary in vocabularies if vocabulary is not None), None)


def dry_run(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Print the resolved configuration, the parameters by part, the tokens per step and an estimate of memory."""
    from txl.data.corpora import vocabulary_size
    from txl.training.estimate import estimate

    vocab_size = _inherited_size(arguments)
    if vocab_size is None:
        vocab_size = vocabulary_size(config.data, arguments.data_dir, quiet=arguments.quiet or arguments.json)
    costs = estimate(config, vocab_size, pick_device(arguments.device))
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
