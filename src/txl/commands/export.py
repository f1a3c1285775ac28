"""`txl export DIR --format F --out DIR2`: write a run's model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from txl.commands.arguments import run_to_read
from txl.commands.options import add_checkpoint, add_json, add_out
from txl.commands.output import print_json
from txl.commands.parser import Commands


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "export",
        help="write a model for other programs",
        example="txl export runs/mine --out exported",
        description="Write a run's model as a directory that transformers opens (AutoModelForCausalLM, AutoTokenizer), "
        "or as plain safetensors.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    add_out(parser, "DIR", "the directory to write", required=True)
    parser.add_argument(
        "--format", metavar="NAME", default="huggingface", help="huggingface or safetensors (default: huggingface)"
    )
    add_checkpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Export the model, and print how to open it."""
    directory, _, _ = run_to_read(arguments)
    from txl.interop.export_run import export_run

    out = Path(arguments.out)
    notes = export_run(directory.path, out, arguments.format, arguments.checkpoint)
    if arguments.json:
        print_json({"directory": str(out), "format": arguments.format, "notes": notes})
        return
    for note in notes:
        print(f"note: {note}")
    if arguments.format == "huggingface":
        print(f"exported; next: import txl.huggingface; AutoModelForCausalLM.from_pretrained({str(out)!r})")
    else:
        print(f"exported into {out}")
