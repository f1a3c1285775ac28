"""What commands of `txl` make of a trained model: Figures 5 to 7, samples, a continuous cache."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout

from txl.config import RunConfig
from txl.errors import UserError
from txl.reproduction.configuring import NotTrained
from txl.reproduction.definition import Definition
from txl.reproduction.scales import Scale


def command_words(definition: Definition, scale: Scale, run: str, out: str) -> list[str]:
    """The command of a definition of kind "command", as a user would type it after `txl`."""
    tokens = "all" if scale.eval_tokens is None else str(scale.eval_tokens)
    return [word.format(run=run, out=out, tokens=tokens) for word in definition.command]


def cache_words(scale: Scale, run: str) -> list[str]:
    """The command that tunes and measures a continuous cache, as a user would type it after `txl`."""
    limit = [] if scale.eval_tokens is None else ["--max-tokens", str(scale.eval_tokens)]
    return ["cache", run, "--batch", "1", *limit]  # a lane remembers nothing of the others


def run_command(words: list[str]) -> str:
    """Run a command of `txl` as a user would; what it prints is returned, since standard output is the caller's."""
    printed = io.StringIO()
    arguments = _parsed(words)
    with redirect_stdout(printed):
        arguments.run(arguments)
    return printed.getvalue()


def require_command(words: list[str]) -> None:
    """Nothing, if this version has a command.

    Raises:
        NotTrained: if it does not.
    """
    try:
        _parsed(words)
    except UserError as error:
        raise NotTrained("not in this version", f"txl {words[0]}: {str(error).partition(' (')[0]}") from None


def least_tokens_of(words: list[str], run: RunConfig) -> dict[str, int]:
    """By split, how many tokens a command must find to make anything.

    Args:
        words: the command.
        run: the configuration of the model that it is to be run on, whose test settings it has.

    Raises:
        UserError: if the command reads fewer by its own options.
    """
    arguments = _parsed(words)
    if words[0] == "samples":
        return {arguments.split: arguments.context + arguments.max_tokens + arguments.count - 1}
    if words[0] == "attention":
        # A token that sees all of the memory, and the one that it predicts.
        least = (run.eval.window or run.eval.mem_len + 1) + 1
        if arguments.tokens is not None and arguments.tokens < least:
            raise UserError(
                f"--eval-tokens is {arguments.tokens}, but only after {least:,} tokens does one see all of the memory; "
                f"expected {least:,} or more"
            )
        return {arguments.split: least}
    return {}


def _parsed(words: list[str]) -> argparse.Namespace:
    from txl.cli import build_parser

    return build_parser().parse_args(words)
