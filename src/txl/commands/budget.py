"""`txl bench budget PRESET --like REFERENCE`: the longest segment that trains in the same memory (Table 10)."""

from __future__ import annotations

import argparse
from typing import Any

from txl.commands.options import (
    add_config_options,
    add_data_dir,
    add_device,
    add_json,
    base_config,
    config_options,
    pick_device,
)
from txl.commands.output import print_json, say
from txl.config import RunConfig, with_options
from txl.errors import UserError


def add_workload(workloads: Any) -> None:
    """Add the workload to `txl bench`."""
    parser = workloads.add_parser(
        "budget",
        help="the longest segment that trains in a given memory",
        description="Find, by measurement, the longest segment whose training holds no more memory than a reference "
        "configuration's, or than a number of bytes (Table 10). Options of the configuration are for both.",
        add_help=False,
    )
    parser.add_argument(
        "preset", metavar="PRESET", help="the configuration whose segment is sought, or a run directory"
    )
    parser.add_argument("--like", metavar="REFERENCE", help="the configuration whose memory is the budget")
    parser.add_argument("--bytes", type=int, metavar="N", help="the budget itself")
    parser.add_argument("--vocabulary", type=int, metavar="V", help="tokens in it (default: the corpus's)")
    parser.add_argument("--at-most", type=int, default=1 << 14, metavar="T", help="no longer segment (default: 16384)")
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    add_config_options(parser, ("model", "data", "train"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    if (arguments.like is None) == (arguments.bytes is None):
        raise UserError("expected one of --like REFERENCE and --bytes N: the memory that may be used")
    for name in ("bytes", "vocabulary", "at_most"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected 1 or more")
    options = config_options(arguments)
    config = _configuration(arguments.preset, options)
    from txl.commands.train import vocabulary_size
    from txl.training.budget import longest_segment, peak_bytes, with_segment

    device = pick_device(arguments.device)
    vocab_size = arguments.vocabulary or vocabulary_size(config, arguments)
    reference: RunConfig | None = None
    if arguments.like is None:
        budget = arguments.bytes
    else:
        reference = _configuration(arguments.like, options)
        reference = with_segment(reference, reference.train.segment)  # options may have changed what it agrees with
        budget = peak_bytes(reference, vocab_size, device)
        say(f"{reference.name}, segments of {reference.train.segment}: {budget:,} bytes at most")
    fit = longest_segment(
        config,
        budget,
        vocab_size,
        device,
        arguments.at_most,
        on_measured=lambda segment, peak: say(f"{config.name}, segments of {segment}: {peak:,} bytes at most"),
    )
    if arguments.json:
        found = with_segment(config, fit.segment)
        print_json(
            {
                "preset": config.name,
                "reference": None
                if reference is None
                else {"name": reference.name, "segment": reference.train.segment},
                "vocabulary_size": vocab_size,
                "device": device,
                "config": found.to_dict(),
                **fit.to_dict(),
            }
        )
        return
    limit = ", the longest that was allowed" if fit.segment == arguments.at_most else ""
    print(
        f"{config.name}: segments of {fit.segment} tokens{limit}, {fit.peak_bytes:,} of {budget:,} bytes on {device}; "
        f"train with --train.segment {fit.segment}"
    )


def _configuration(name: str, options: dict[str, str]) -> RunConfig:
    """A configuration with the options set.

    Raises:
        UserError: for a segment that is none. What is measured has others, so that no later rule would see it.
    """
    config = with_options(base_config(name), options)
    if config.train.segment < 1:
        raise UserError(f"train.segment is {config.train.segment}; expected 1 or more")
    return config
