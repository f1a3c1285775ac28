"""`txl reproduce table6 ...`: repeat the comparison of a table or figure, and write a page about it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.options import add_config_options, add_out, config_options, pick_device, shared
from txl.commands.output import print_json, say
from txl.commands.parser import Parser
from txl.config import DataConfig, RunConfig, validate, with_options
from txl.errors import CommandFailed, Field, UserError

if TYPE_CHECKING:
    from txl_lab.paper.scales import Scale
    from txl_lab.paper.schema import Definition


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "reproduce",
        help="run a table or figure of the paper again, at a scale you choose",
        example="txl reproduce table6 --scale tiny --dry-run",
        description="Train and measure every row of a table or figure of the paper again, and write one page with the "
        "results and the paper's numbers. The same command resumes one that was stopped.",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="table1 ... table10, figure3 ... figure7, samples, memory-depth or gradients-into-memory",
    )
    add_out(parser, "DIR", "folder of the runs and the page (default: runs/reproduce/...)")
    parser.add_argument("--scale", default="tiny", metavar="NAME", help="tiny, small or paper (default: tiny)")
    parser.add_argument(
        "--corpus", metavar="NAME", help="a corpus by name, or a file, folder or glob (default: the scale's)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each model (default: the scale's)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of every model (default: the scale's)")
    parser.add_argument(
        "--eval-tokens", type=int, metavar="N", help="tokens of each split to measure (default: the scale's)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="number format of training (default: the scale's)"
    )
    parser.add_argument(
        "--until-converged",
        action="store_true",
        help="train each model until its validation loss no longer improves, at the best of a few learning rates; "
        "--steps is then the largest number of steps (default: four times the scale's)",
    )
    parser.add_argument("--reuse", metavar="PATH", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="only show what would be trained")
    parser.add_argument(
        "--so-far", action="store_true", help="train nothing; write the page of the models that are finished"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_config_options(parser, ("data",))
    shared(parser, "data_dir", "device", "json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train and measure the rows that are not done yet, and write the page."""
    from txl_lab.paper.catalogue import find_definition
    from txl_lab.paper.converging import UntilConverged
    from txl_lab.paper.scales import find_scale

    definition = find_definition(arguments.what)
    if arguments.reuse:
        copied = f"copy the record to {definition.name}.json in an empty folder, and give that folder to "
        raise UserError("is gone", field="reuse", remedy=(copied, Field("out")))
    rules = UntilConverged() if arguments.until_converged else None
    scale = find_scale(arguments.scale).changed(arguments.steps, arguments.eval_tokens, arguments.dtype, rules)
    seeds = arguments.seeds
    if seeds is None:
        seeds = scale.seeds if definition.measurement.has_numbers else 1
    if seeds < 1:
        raise UserError(field="seeds", value=seeds, expected="1 or more")
    data = _data(arguments, definition, scale)
    quiet = arguments.quiet or arguments.json
    if arguments.so_far and arguments.dry_run:
        raise UserError(
            (Field("so_far"), " and ", Field("dry_run"), " were both given"), remedy="leave one of them out"
        )
    if arguments.dry_run:
        from txl_lab.paper.configuring import plan, plan_lines

        planned = plan(definition, scale, data, arguments.data_dir, quiet)
        if arguments.json:
            print_json(
                {"what": definition.name, "scale": scale.name, "seeds": seeds, "rows": [asdict(row) for row in planned]}
            )
        else:
            print(
                "\n".join([f"{definition.title}, scale {scale.name}: {scale.about}", "", *plan_lines(planned, seeds)])
            )
        return
    from txl.devices import keep_freed_memory
    from txl.processes import process_count
    from txl_lab.paper.experiment import Experiment, circumstances, default_folder
    from txl_lab.paper.outcome import gather, markdown
    from txl_lab.paper.page import write_outcome

    if process_count() > 1:
        raise UserError("txl reproduce trains each model in one process; start it without torchrun")
    keep_freed_memory()
    device = pick_device(arguments.device)
    out = Path(arguments.out) if arguments.out else default_folder(definition, scale, data)
    experiment = Experiment(
        definition, scale, data, out, seeds, device, arguments.data_dir, quiet, so_far=arguments.so_far
    )
    rows = experiment.run()
    outcome = gather(definition, scale, seeds, data.corpus, data.unit, rows, experiment.changed_text)
    record = write_outcome(outcome, out, ["txl", *sys.argv[1:]], circumstances(out, device))
    if arguments.json:
        print_json(record)
    else:
        print(markdown(outcome))
        say(f"page: {out / definition.name}.html")
    if outcome.failed:
        names = ", ".join(result.row.key for result in outcome.failed)
        raise CommandFailed(
            f"{len(outcome.failed)} of {len(rows)} rows failed ({names}); the same command tries them again"
        )


def _data(arguments: argparse.Namespace, definition: Definition, scale: Scale) -> DataConfig:
    """Return the corpus configuration: that of the options, else the scale's for this table."""
    from txl.data.corpora import absolute_path, refuse_unused
    from txl_lab.paper.scales import named_data

    options = config_options(arguments)
    given = arguments.corpus
    if given is not None and "data.corpus" in options:
        raise UserError((Field("corpus"), " and ", Field("data.corpus"), " were both given"), expected="one of them")
    corpus = given if given is not None else options.pop("data.corpus", None)
    base = scale.data(definition.corpus, definition.unit)
    if corpus is not None:
        base = named_data(absolute_path(corpus), definition.unit, scale.max_words)
    config = with_options(RunConfig(data=base), options)
    validate(config)
    refuse_unused(config.data, options)
    return config.data
