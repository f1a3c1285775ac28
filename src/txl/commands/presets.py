"""`txl presets`: list of the named configurations."""

from __future__ import annotations

import argparse

from txl.commands.options import shared
from txl.commands.output import print_json, print_table
from txl.commands.parser import Parser
from txl.files import JsonObject


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "presets",
        help="list the named configurations",
        example="txl presets",
        description="List the named configurations: the paper's models, those it compares with, and small "
        "ones for a CPU.",
    )
    shared(parser, "json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the presets with their sizes and published results; sources, vocabularies and widths with --json."""
    from txl.presets import named_presets

    groups: dict[str, list[JsonObject]] = {group: [] for group in named_presets()}
    for group, members in named_presets().items():
        for preset in members:
            config = preset.make()
            row: JsonObject = {
                "name": preset.name,
                "description": preset.description,
                "n_layer": config.model.n_layer,
                "d_model": config.model.d_model,
                "parameters": config.model.parameter_count(preset.vocab_size),
                "vocabulary_size": preset.vocab_size,
                "train": f"{config.train.segment} / {config.model.mem_len}",
                "test": f"{config.eval.segment} / {config.eval.mem_len}",
                "published": preset.published,
                "source": preset.source,
            }
            groups[group].append(row)
    if arguments.json:
        print_json({"presets": [row for rows in groups.values() for row in rows]})
        return
    for group, rows in groups.items():
        columns = {
            "preset": [row["name"] for row in rows],
            "layers": [str(row["n_layer"]) for row in rows],
            "parameters": [f"{row['parameters']:,}" for row in rows],
            "train": [row["train"].replace(" ", "") for row in rows],
            "test": [row["test"].replace(" ", "") for row in rows],
            "published": [row["published"] for row in rows],
        }
        if max(map(len, columns["preset"])) > 30:  # long names leave room only for columns in which ablations differ
            del columns["layers"], columns["test"]
        print_table(group, tuple(columns), list(zip(*columns.values(), strict=True)), text=("preset",))
        print()
    print("train, test: segment / memory in tokens; parameters at the published vocabulary")
    print("sources and more: txl presets --json; all of one: txl train NAME --dry-run")
