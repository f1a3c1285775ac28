"""Options for the fields of the configuration, `--model.mem-len` for `config.model.mem_len`, and its help."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from txl.commands.parser import Group, Parser
from txl.config import (
    MODEL_FAMILIES,
    DataConfig,
    RunConfig,
    chosen_family,
    leaf_fields,
    options,
    parsed_options,
    placeholder,
    shown,
    with_options,
)
from txl.errors import Field, UserError


def add_config_options(
    parser: Parser,
    sections: tuple[str, ...],
    help_of: str = "",
    short: Sequence[str] = (),
    first: Group | None = None,
    fields: Collection[str] = (),
) -> None:
    """Add the fields of the configuration's sections as options: ``--model.mem-len`` for ``config.model.mem_len``.

    Fields of the text also have a short form, ``--word-rule`` for ``data.word_rule``, unless the command itself has an
    option or an argument of this name.

    Args:
        parser: parser that gets the options, in one group for each section and each class of models.
        sections: sections to add: model, data, train, eval.
        help_of: family of models whose options the help shows. Empty: the family of the preset, if one precedes
            --help, else all families.
        short: other fields with a short form, ``--mem-len`` for ``model.mem_len``; these fields come first.
        first: group for the fields in `short`, instead of the group of their section.
        fields: the fields that get an option; empty: all of the sections.
    """
    groups: dict[str, Group] = {}
    for option in sorted(options(), key=lambda option: _place(option.name, short)):
        section, _, field = option.name.partition(".")
        if section not in sections or (fields and option.name not in fields):
            continue
        title = f"{section}.*, {option.owner.title}" if option.owner else _TITLES[section]
        is_free = field not in {action.dest for action in parser.arguments}
        has_short_form = option.name in short or (section == "data" and is_free)
        names = [field, option.name] if has_short_form else [option.name]
        # --model.pre-norm alone switches it on.
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if option.hint is bool else {}
        group = first if option.name in short else groups.get(title)
        if group is None:
            group = groups[title] = parser.group(title)
        group.add_argument(
            *(f"--{name.replace('_', '-')}" for name in names),
            dest=option.name,
            metavar=placeholder(option.hint),
            default=argparse.SUPPRESS,
            help=option.help,
            **switch,
        )
    if "model" in sections:
        has_preset = any(action.dest == "preset" for action in parser.arguments)
        about = "show this help, with the values of PRESET" if has_preset else "show this help"
        parser.add_argument("-h", "--help", action=_Help, nargs=0, family=help_of, help=about)


_TITLES = {
    "data": "data.*, the text",
    "model": "model.*",
    "train": "train.*",
    "eval": "eval.*, defaults of commands that evaluate",
}


def _place(name: str, short: Sequence[str]) -> tuple[int, int]:
    """Return the sort key of an option: first the order of `short`, then text, model, training, evaluation."""
    return (0, short.index(name)) if name in short else (1, list(_TITLES).index(name.partition(".")[0]))


class _Help(argparse.Action):
    """Action of `--help` that shows only the fields of one family of models, with the values of the preset."""

    def __init__(self, option_strings: list[str], dest: str, family: str, **settings: Any):
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **settings)
        self.family = family

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *value: Any) -> None:
        family = MODEL_FAMILIES.get(self.family)
        values: dict[str, str] = {}
        preset, changes = getattr(namespace, "preset", None), config_options(namespace)
        if preset is not None:
            with suppress(UserError):
                config = base_config(preset)
                of_model = {name.partition(".")[2]: value for name, value in parsed_options(changes).items()}
                family = family or chosen_family(of_model, config.model)
                fields = leaf_fields(with_options(config, changes))
                values = {name: shown(value) for name, _, _, value in fields if value != ()}
        assert isinstance(parser, Parser)
        for action in parser.arguments:
            section, _, field = action.dest.partition(".")
            if (
                section == "model"
                and family is not None
                and field not in {item.name for item in dataclasses.fields(family)}
            ):
                action.help = argparse.SUPPRESS
            elif action.dest in values:
                action.help = f"{action.help} [{values[action.dest]}]"
        parser.print_help()
        parser.exit()


def base_config(name: str) -> RunConfig:
    """Return the configuration of a preset, or of a run directory (such as an imported model, to fine-tune it)."""
    from txl.presets import preset, presets

    if name in presets() or not (Path(name) / "config.json").is_file():
        if name not in presets() and Path(name).is_file():
            remedy = ("give a text with ", Field("data.corpus", name))
            raise UserError("a file, not a preset", value=name, remedy=remedy)
        if os.sep in name:
            raise UserError("neither a preset nor a run directory (it has no config.json)", value=name)
        return preset(name)
    from txl.runs.directory import RunDirectory

    config = RunDirectory(name).config()
    config.train.planned_minutes = None  # planned for that run's text and steps
    return config


def config_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the given options of `add_config_options`: text by dotted field name."""
    return {name: value for name, value in vars(arguments).items() if "." in name}


def data_config(arguments: argparse.Namespace, base: DataConfig) -> DataConfig:
    """Return the corpus configuration `base` with the given ``--data.*`` options set, and with absolute paths."""
    from txl.data.corpora import with_absolute_paths

    return with_absolute_paths(with_options(RunConfig(data=base), config_options(arguments)).data)
