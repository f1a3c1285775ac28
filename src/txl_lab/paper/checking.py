"""Checks of results that a table is to be made from: of the same configuration, text, targets and kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.errors import UserError, cause
from txl.files import JsonObject
from txl.runs.directory import of_today
from txl_lab.paper.converging import at_rate, recipe_of
from txl_lab.paper.folder import changes, stored_json
from txl_lab.paper.measuring import context_lengths, context_targets
from txl_lab.paper.recorded import check_form, result_path
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition


def check_measured(
    result: JsonObject, path: str, remedy: str, config: JsonObject | None, seed: int, corpus: Corpus, scale: Scale
) -> None:
    """Refuse a stored or recorded result of another configuration, or of other targets.

    Args:
        result: measurements with the configuration of their run.
        path: name of the file for messages.
        remedy: advice that ends the messages.
        config: configuration of the row, at the learning rate of its recipe; None: the row is not trained.
        seed: seed of the run.
        corpus: corpus of the table.
        scale: scale of the table.
    """
    if config is None:
        return
    try:
        _check_configuration(result, path, remedy, config, seed, corpus, scale)
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged{cause(error)}; {remedy}") from None


def _check_configuration(
    result: JsonObject, path: str, remedy: str, config: JsonObject, seed: int, corpus: Corpus, scale: Scale
) -> None:
    losses = result.get("losses") or result.get("effective context", {}).get("curve")
    if losses is not None and not (
        "window" in result
        and result["targets"] == len(context_targets(corpus, scale))
        and list(losses) == [str(length) for length in context_lengths(scale)]
    ):
        raise UserError(f"{path} has losses of other targets or contexts, or of attention beyond training's; {remedy}")
    configured = RunConfig.from_dict(config)
    configured.train.seed = seed
    before = RunConfig.from_dict(of_today(result["config"]))
    if "rates" in result:  # the row has the rate of its recipe, the stored run the tuned rate
        if result["rates"]["recipe"] != recipe_of(configured):
            raise UserError(
                f"{path} has the learning rate of {result['rates']['recipe']}, but {recipe_of(configured)} is tuned "
                f"apart now; {remedy}"
            )
        configured = at_rate(configured, result["rates"]["factor"])
    before.data.corpus = configured.data.corpus  # the text is compared by identity; its path may have changed
    if "recorded" in result:  # measured on another machine, where other arithmetic may be fast
        before.train.dtype, before.data.source = configured.train.dtype, configured.data.source
    if changed := changes(before.to_dict(), configured.to_dict()):
        raise UserError(f"{path} is of another configuration: {', '.join(changed)}; {remedy}")


def check_stored(result: JsonObject, path: Path, needed: Sequence[str]) -> None:
    """Refuse a stored result that lacks something that a page is made from.

    Args:
        result: measurements of a row.
        path: its file.
        needed: names of the measures that it must have.
    """
    try:
        check_form(result, needed)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged{cause(error)}; delete it to measure anew") from None


def check_groups(folder: Path, definition: Definition, seed: int) -> None:
    """Refuse a model group of Table 8 of which only some results come from a record.

    Args:
        folder: folder of the reproduction.
        definition: definition of the table.
        seed: seed whose results are checked.
    """
    for group in dict.fromkeys(row.group for row in definition.rows):
        paths = [result_path(folder, row.key, seed) for row in definition.rows if row.group == group and row.trained]
        recorded = [path for path in paths if "effective context" in (stored_json(path) or {})]
        if recorded and len(recorded) < len(paths):
            raise UserError(
                f"{', '.join(map(str, recorded))}: from a record, which has no losses to compare the group's other "
                f"models with; delete these results to train their models, or give --reuse a record of all of them"
            )
