"""Starting from the weights of another run (`--init-from`)."""

from __future__ import annotations

from typing import Any

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.errors import UserError
from txl.run_directory import RunDirectory, load_weights
from txl.training.checkpoints import MODEL_FILE, read_tensors

WEIGHTS_DEPEND_ON = (
    "encoding",
    "n_layer",
    "d_model",
    "n_head",
    "d_head",
    "d_inner",
    "d_embed",
    "pre_norm",
    "layer_norm_eps",
    "untie_r",
    "cutoffs",
    "div_val",
    "tie_projections",
    "tie_embeddings",
    "kind",
    "d_hidden",
    "d_last",
    "kernel_sizes",
    "n_softmax",
)
"""Fields of the model without which weights mean something else; lengths and dropout may change."""

LENGTH_OF = {"learned": "max_segment", "shaw": "max_distance"}
"""Encodings with weights for every position or distance, and the field that is their number."""

_AUXILIARY = "auxiliary."
"""How the names of the weights begin that auxiliary losses alone need (`txl.models.auxiliary`)."""


def check_same_model(source: RunDirectory, run: RunConfig) -> None:
    """Refuse weights that would mean something else in this configuration.

    Raises:
        UserError: naming the fields that differ.
    """
    theirs, ours = source.config().model, run.model
    length = (LENGTH_OF[ours.encoding],) if theirs.encoding == ours.encoding in LENGTH_OF else ()
    changed = [
        f"model.{name} {_value(theirs, name)} -> {_value(ours, name)}"
        for name in (*WEIGHTS_DEPEND_ON, *length)
        if _value(theirs, name) != _value(ours, name)
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


def _value(model: Any, name: str) -> Any:
    return model.d_embed or model.d_model if name == "d_embed" else getattr(model, name)
