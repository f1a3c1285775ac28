"""Reuse of models and learning rates from another table's folder, instead of training equal models again.

Tables share models: Transformer-XL itself is a row of Tables 6, 8 and 10. Two models are equal if their configurations
differ only in the name, the path of the text and the attention at test, and they were trained on the same text.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from txl.config import RunConfig
from txl.errors import UserError
from txl.files import JsonObject, write_whole
from txl.runs.directory import RunDirectory, of_today
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.folder import changes, stored_json
from txl_lab.paper.scales import Scale

_TRAINING = ("name", "steps", "dtype")
"""Entries of a scale's record that must agree; other differences in training show in the configurations."""


def check_source(source: Path, scale: Scale, text: str, separate_sentences: bool) -> None:
    """Refuse a folder whose models were trained at another scale, on another text, or in other segments.

    Args:
        source: folder of a reproduction.
        scale: scale of the models to train.
        text: identity of the training corpus.
        separate_sentences: as in the `Definition` of the table to train.
    """
    stored = stored_json(source / "experiment.json")
    if not isinstance(stored, dict):
        raise UserError(f"--reuse {source}: not a reproduction's folder (it has no experiment.json)")
    scale_there = of_today(stored).get("scale", {})
    if not isinstance(scale_there, dict):
        raise UserError(f"--reuse {source}: its experiment.json is damaged (no scale); give another folder")
    there, wanted = (
        {"scale": {name: values.get(name) for name in _TRAINING}, "text": identity}
        for values, identity in ((scale_there, stored.get("text")), (scale.to_dict(), text))
    )
    if changed := changes(there, wanted):
        raise UserError(f"--reuse {source} has models of another training: {', '.join(changed)}")
    name = stored.get("experiment")
    if separate_sentences != any(
        each.separate_sentences for each in definitions().values() if each.experiment_name == name
    ):
        raise UserError(
            f"--reuse {source} is of {name}; Tables 4 and 7 have text and segments of their own, and share models and "
            f"learning rates with each other alone"
        )


def take_run(source: Path, run: RunConfig, text: str, directory: Path) -> Path | None:
    """Copy the finished run of a configuration, if the folder has one and `directory` does not exist yet.

    Args:
        source: folder of a reproduction that `check_source` accepts.
        run: configuration of the run, including seed and learning rate.
        text: identity of the training corpus.
        directory: run directory for the copy.

    Returns:
        Directory of the run that was copied; None if no run was copied.
    """
    if directory.exists():
        return None
    wanted = _comparable(run)
    for result in sorted((source / "results").rglob("*.json")):  # a run with a result is finished
        there = RunDirectory(source / "runs" / result.stem)
        if not there.config_path.exists() or _comparable(there.config()) != wanted:
            continue
        if there.trained_on().get("identity") != text:
            continue
        copy = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(copy, ignore_errors=True)  # left by a process that was killed
        shutil.copytree(there.path, copy, ignore=shutil.ignore_patterns(".lock", "report.html"))
        RunDirectory(copy).write_config(run)
        os.replace(copy, directory)
        return there.path
    return None


def take_rate(source: Path, recipe: str, rates: Path, scale: Scale) -> None:
    """Copy the tuned learning rate of a recipe, if `source` has one of the same rules and `rates` has none."""
    about = of_today(stored_json(source / "experiment.json") or {})
    if about.get("scale", {}).get("until_converged") != scale.to_dict().get("until_converged"):
        return
    there, here = (folder / f"{recipe}.json" for folder in (source / "rates", rates))
    if there.exists() and not here.exists():
        rates.mkdir(parents=True, exist_ok=True)
        write_whole(here, there.read_text(encoding="utf-8"))


def _comparable(run: RunConfig) -> JsonObject:
    """Return what determines the trained weights: a configuration without its name and its attention at test.

    The path of the text is left out too, because the text is compared by identity.
    """
    values = run.to_dict()
    return values | {
        "name": "",
        "data": values["data"] | {"corpus": "", "source": None},
        "eval": values["eval"] | {"mem_len": None, "window": None},
    }
