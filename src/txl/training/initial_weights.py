"""Starting from the weights of another run (`--init-from`)."""

from __future__ import annotations

from typing import Any

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.errors import UserError
from txl.run_directory import RunDirectory, load_weights
from txl.training.checkpoints import MODEL_FILE, read_tensors

_AUXILIARY = "auxiliary."
"""How the names of the weights begin that auxiliary losses alone need (`txl.models.auxiliary`)."""


def check_same_model(source: RunDirectory, run: RunConfig) -> None:
    """Refuse weights that would mean something else in this configuration.

    Raises:
        UserError: naming the fields that differ.
    """
    theirs, ours = source.config().model.weight_settings(), run.model.weight_settings()
    changed = [
        f"model.{name} {theirs[name]} -> {value}"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    if changed:
        raise UserError(
            f"--init-from {source.path}: its weights are of another model: {', '.join(changed)}; "
            f"set these fields to the weights' values"
        )


def load_initial_weights(source: RunDirectory, model: Any, corpus: Corpus) -> str | None:
    """Start from another run's best checkpoint, else its latest.

    Classifiers of auxiliary losses serve in training alone: those that `model` has no place for are left out, those
    that the weights lack stay as they began.

    Returns:
        What became of such classifiers, in a few words; None if both models have the same.

    Raises:
        UserError: if there is no checkpoint, it is damaged, or its vocabulary has another size than the corpus's.
    """
    weights = read_tensors(source.checkpoint(), MODEL_FILE)
    size = len(weights.get("softmax.bias", ()))
    if size != model.vocab_size:
        raise UserError(
            f"--init-from {source.path}: its model has {size} tokens, {corpus.name} in {corpus.unit} "
            f"tokens has {model.vocab_size}; expected the same"
        )
    ours = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(_AUXILIARY)}
    theirs = {name for name in weights if name.startswith(_AUXILIARY)}
    left_out, fresh = theirs - ours.keys(), ours.keys() - theirs
    weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
    load_weights(model, weights | {name: ours[name] for name in fresh}, str(source.path))
    said = [f"{_classifiers(left_out)} left out"] if left_out else []
    said += [f"{_classifiers(fresh)} begun anew"] if fresh else []
    return ", ".join(said) or None


def _classifiers(names: set[str]) -> str:
    count = len({name.rpartition(".")[0] for name in names})
    return f"{count} classifier{'s' if count > 1 else ''} of auxiliary losses"
