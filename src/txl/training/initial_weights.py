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


def check_same_model(source: RunDirectory, run: RunConfig) -> None:
    """Refuse weights that would mean something else in this configuration.

    Raises:
        UserError: naming the fields that differ.
    """
    theirs, ours = source.config().model, run.model
    changed = [
        f"model.{name} {_value(theirs, name)} -> {_value(ours, name)}"
        for name in WEIGHTS_DEPEND_ON
        if _value(theirs, name) != _value(ours, name)
    ]
    if changed:
        raise UserError(
            f"--init-from {source.path}: its weights are of another model: {', '.join(changed)}; "
            f"set these fields to the weights' values"
        )


def load_initial_weights(source: RunDirectory, model: Any, corpus: Corpus) -> None:
    """Start from another run's best checkpoint, else its latest.

    Raises:
        UserError: if there is none, it is damaged, or its vocabulary has another size than the corpus's.
    """
    weights = read_tensors(source.checkpoint(), MODEL_FILE)
    size = len(weights.get("softmax.bias", ()))
    if size != model.vocab_size:
        raise UserError(
            f"--init-from {source.path}: its model has {size} tokens, {corpus.name} in {corpus.unit} "
            f"tokens has {model.vocab_size}; expected the same"
        )
    load_weights(model, weights, str(source.path))


def _value(model: Any, name: str) -> Any:
    return model.d_embed or model.d_model if name == "d_embed" else getattr(model, name)
