"""`txl bench train | eval | table9 | budget`: speed relative to matrix products or to a vanilla Transformer.

`budget` finds the longest segment that trains in a given number of bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from txl.commands.options import add_config_options, base_config, config_options, numbers, pick_device, positive, shared
from txl.commands.output import print_json, say
from txl.commands.parser import Parser
from txl.config import RunConfig, validate, with_options
from txl.errors import Field, UserError
from txl.files import JsonObject

if TYPE_CHECKING:
    from txl_lab.speed.workloads import Speed


def add_parser(commands: Parser) -> None:
    """Add the command and its workloads to the command line."""
    parser = commands.add_command(
        "bench",
        help="compare speed with the machine's rate of matrix products",
        example="txl bench train",
        description="Compare speed with the machine's rate of matrix products, or with that of a vanilla Transformer; "
        "or find what fits into a given memory.",
    )
    parser.set_defaults(smaller="--vocabulary, model, batch, segment or memory")
    parser.add_commands("workload", "train|eval|table9|budget")
    for workload, what in (("train", "training steps"), ("eval", "evaluation in segments")):
        timing = parser.add_command(
            workload,
            help=f"time {what}",
            example=f"txl bench {workload} enwik8-12L --dtype float32",
            description=f"Time {what} on random tokens, and compare with the machine's rate of matrix products.",
            add_help=False,
        )
        _add_workload(timing)
        timing.add_argument("--steps", type=positive, default=8, metavar="N", help="steps to time (default: 8)")
        timing.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "both"),
            default="both",
            help="number format of matrix products (default: both)",
        )
        if workload == "train":
            timing.add_argument("--compile", action="store_true", help="time compiled layers too, and compare")
        add_config_options(timing, ("model", workload), "transformer-xl")
        timing.set_defaults(run=run)
    table = parser.add_command(
        "table9",
        help="time evaluation beside a vanilla Transformer's",
        example="txl bench table9 --lengths 800,1800",
        description="Measure how much slower a vanilla Transformer is to evaluate (Table 9), on random tokens.",
        add_help=False,
    )
    _add_workload(table)
    table.add_argument(
        "--lengths",
        type=numbers,
        default=[800, 1800, 2800, 3800],
        metavar="L,L,...",
        help="attention lengths (default: the paper's, 800,1800,2800,3800)",
    )
    table.add_argument(
        "--segment",
        type=positive,
        default=128,
        metavar="T",
        help="tokens that Transformer-XL reads at once (default: 128)",
    )
    table.add_argument(
        "--lanes", type=positive, default=1, metavar="B", help="lanes, and windows, that are read at once (default: 1)"
    )
    table.add_argument("--steps", type=positive, default=5, metavar="N", help="windows to time (default: 5)")
    shared(table, "dtype")
    add_config_options(table, ("model",), "transformer-xl")
    table.set_defaults(run=run_table9)
    budget = parser.add_command(
        "budget",
        help="find the longest segment that trains in a given memory",
        example="txl bench budget wt103-ablation --like wt103-ablation-no-memory",
        description="Find, by measurement, the longest segment that trains in as much memory as a reference "
        "configuration takes, or in a number of bytes (Table 10). Options of the configuration are for both.",
        add_help=False,
    )
    budget.add_argument("preset", metavar="PRESET", help="configuration whose segment is sought, or a run directory")
    budget.add_argument("--like", metavar="PRESET", help="configuration that may use as much memory as it takes")
    budget.add_argument("--bytes", type=positive, metavar="N", help="the memory itself, instead of --like")
    budget.add_argument(
        "--vocabulary", type=positive, metavar="V", help="tokens of the vocabulary (default: the corpus's)"
    )
    budget.add_argument(
        "--at-most", type=positive, default=1 << 14, metavar="T", help="try no longer segment (default: 16384)"
    )
    shared(budget, "data_dir", "device", "json")
    add_config_options(budget, ("model", "data", "train"))
    budget.set_defaults(run=run_budget)


def _add_workload(parser: Parser) -> None:
    """Add the options shared by the workloads on random tokens."""
    parser.add_argument(
        "preset",
        metavar="PRESET",
        nargs="?",
        default="enwik8-12L",
        help="a configuration by name (default: enwik8-12L)",
    )
    parser.add_argument(
        "--vocabulary", type=positive, default=204, metavar="V", help="tokens of its vocabulary (default: 204)"
    )
    shared(parser, "device", "json")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the speed of training or evaluation."""
    from txl.presets import preset
    from txl_lab.speed import transformer_xl_of

    if "train.dtype" in config_options(arguments):
        raise UserError("has no effect here", field="train.dtype", remedy=("use ", Field("dtype")))
    if "train.compile" in config_options(arguments):
        measured = ("use ", Field("compile"), ", which measures a step with and without")
        raise UserError("has no effect here", field="train.compile", remedy=measured)
    config = preset(arguments.preset)
    transformer_xl_of(config)
    if arguments.workload == "train":
        # Small enough for a CPU, and without dropout, so that matrix products dominate the time.
        config.model = dataclasses.replace(config.model, mem_len=128, dropout=0.0, dropatt=0.0, dropout_r=0.0)
        config.train = dataclasses.replace(config.train, batch_size=4, segment=128)
    else:
        config.eval = dataclasses.replace(config.eval, batch_size=1)  # one lane, as for a stream
    config = with_options(config, config_options(arguments))
    transformer_xl_of(config)
    validate(config)
    from txl.devices import keep_freed_memory
    from txl_lab.speed.workloads import bench_evaluation, bench_training

    device = pick_device(arguments.device)
    keep_freed_memory()

    results: list[Speed] = []
    for dtype in ("float32", "bfloat16") if arguments.dtype == "both" else (arguments.dtype,):
        for compiled in (False, True) if arguments.workload == "train" and arguments.compile else (False,):
            if arguments.workload == "train":
                config.train.dtype, config.train.compile = dtype, compiled
                speed = bench_training(config, arguments.vocabulary, arguments.steps, device)
            else:
                speed = bench_evaluation(config, arguments.vocabulary, arguments.steps, device, dtype)
            results.append(speed)
            if not arguments.json:
                layers = ", compiled layers" if speed.compiled else ""
                print(
                    f"{config.name} {speed.workload}, {dtype}, {speed.attention} attention{layers}, "
                    f"{speed.batch_size} lanes, segment {speed.segment}, memory {speed.mem_len}:\n"
                    f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.fraction:.0%} of the rate of matrix products "
                    f"({speed.matmul_rate / 1e9:,.0f} GFLOP/s)",
                    flush=True,
                )
    if arguments.json:
        _print_results(config, [result.to_dict() for result in results], device)
        return
    eager = [result for result in results if not result.compiled]
    for compiled, before in zip((result for result in results if result.compiled), eager, strict=False):
        gain = compiled.tokens_per_second / before.tokens_per_second
        print(f"compiled layers are {gain:.2f} times as fast as eager ones in {compiled.dtype}")
    if len(eager) == 2:
        ratio = eager[1].tokens_per_second / eager[0].tokens_per_second
        rate_ratio = eager[1].matmul_rate / eager[0].matmul_rate
        print(f"bfloat16 is {ratio:.2f} times as fast as float32, matrix products alone {rate_ratio:.2f} times")


def _print_results(config: RunConfig, results: list[JsonObject], device: str) -> None:
    """Print measurements as JSON, with where they were made."""
    from txl.runs.environment import describe_hardware, describe_software

    about = {"preset": config.name, "config": config.to_dict(), "results": results}
    print_json(about | {"hardware": describe_hardware(device), "software": describe_software()})


def run_table9(arguments: argparse.Namespace) -> None:
    """Measure and print the slowdown at each attention length."""
    from txl.presets import preset
    from txl_lab.speed import transformer_xl_of

    if not arguments.lengths or min(arguments.lengths) < 1:
        raise UserError(field="lengths", value=arguments.lengths, expected="attention lengths of 1 or more")
    config = with_options(preset(arguments.preset), config_options(arguments))
    shape = transformer_xl_of(config)
    shape.validate()
    from txl.devices import keep_freed_memory
    from txl_lab.speed.table9 import slowdown

    device = pick_device(arguments.device)
    keep_freed_memory()
    rows = []
    for length in arguments.lengths:
        sizes = (length, arguments.segment, arguments.steps)
        row = slowdown(shape, arguments.vocabulary, *sizes, device, arguments.dtype, arguments.lanes)
        rows.append(row.to_dict())
        if not arguments.json:
            published = f", {rows[-1]['published']:,} in the paper (another machine)" if rows[-1]["published"] else ""
            print(
                f"{config.name}, attention length {length:,}, segments of {row.segment}, {row.dtype}:\n"
                f"  a vanilla Transformer takes {row.ratio:,.0f} times as long per token{published}",
                flush=True,
            )
    if arguments.json:
        _print_results(config, rows, device)


def run_budget(arguments: argparse.Namespace) -> None:
    """Find the segment by measurement, and print it."""
    if (arguments.like is None) == (arguments.bytes is None):
        raise UserError(expected=("one of ", Field("like"), " and ", Field("bytes"), ": the memory that may be used"))
    options = config_options(arguments)
    config = _configuration(arguments.preset, options)
    from txl.data.corpora import vocabulary_size
    from txl_lab.speed.budget import longest_segment, peak_bytes, with_segment

    device = pick_device(arguments.device)
    vocab_size = arguments.vocabulary or vocabulary_size(config.data, arguments.data_dir)
    reference: RunConfig | None = None
    if arguments.like is None:
        budget = arguments.bytes
    else:
        reference = _configuration(arguments.like, options)
        # Options may have changed the segment, or fields that have to agree with the segment.
        reference = with_segment(reference, reference.train.segment)
        budget = peak_bytes(reference, vocab_size, device)
        say(f"{reference.name}, segments of {reference.train.segment}: {budget:,} bytes at its peak")
    fit = longest_segment(
        config,
        budget,
        vocab_size,
        device,
        arguments.at_most,
        on_measured=lambda segment, peak: say(f"{config.name}, segments of {segment}: {peak:,} bytes at its peak"),
    )
    if arguments.json:
        like = None if reference is None else {"name": reference.name, "segment": reference.train.segment}
        about = {"preset": config.name, "reference": like, "vocabulary_size": vocab_size, "device": device}
        print_json(about | {"config": with_segment(config, fit.segment).to_dict(), **fit.to_dict()})
        return
    limit = ", the longest that was allowed" if fit.segment == arguments.at_most else ""
    print(
        f"{config.name}: segments of {fit.segment} tokens{limit}, {fit.peak_bytes:,} of {budget:,} bytes on {device}; "
        f"train with --train.segment {fit.segment}"
    )


def _configuration(name: str, options: dict[str, str]) -> RunConfig:
    config = with_options(base_config(name), options)
    # Only other segments are measured, so no later check sees an invalid one.
    if config.train.segment < 1:
        raise UserError(field="train.segment", value=config.train.segment, expected="1 or more")
    return config
