"""`txl presets`: the configurations by name."""

from __future__ import annotations

import argparse
from typing import Any

from txl.commands.options import add_json, print_json


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("presets", help="list the configurations that have a name")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the presets with their sizes, published results and sources."""
    import torch

    from txl.models import build_model
    from txl.presets import presets

    rows = []
    for each in presets().values():
        config = each.make()
        with torch.device("meta"):
            model = build_model(config.model, each.vocab_size)
        rows.append(
            {
                "name": each.name,
                "description": each.description,
                "n_layer": config.model.n_layer,
                "d_model": config.model.d_model,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "vocabulary_size": each.vocab_size,
                "train": f"{config.train.segment} / {config.model.mem_len}",
                "test": f"{config.eval.segment} / {config.eval.mem_len}",
                "published": each.published,
                "source": each.source,
            }
        )
    if arguments.json:
        print_json({"presets": rows})
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title="Presets (segment / memory in tokens; parameters at the vocabulary size shown)")
    for heading in ("preset", "layers", "width", "parameters", "vocabulary", "train", "test", "published", "source"):
        right = heading in ("layers", "width", "parameters", "vocabulary")
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=heading == "preset")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["n_layer"]),
            str(row["d_model"]),
            f"{row['parameters']:,}",
            f"{row['vocabulary_size']:,}",
            row["train"],
            row["test"],
            row["published"],
            row["source"],
        )
    console = Console()
    # Into a file or a pipe, a row stays a line.
    (console if console.is_terminal else Console(width=200)).print(table)
