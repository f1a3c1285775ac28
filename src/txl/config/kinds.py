"""Which fields of a model's configuration belong to which kind of model.

A field that a kind does not have must keep its default: a setting that does nothing is refused rather than ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from txl.errors import UserError

Kind = Literal["transformer", "lstm", "qrnn"]
RECURRENT = ("lstm", "qrnn")
"""The kinds that carry a state of constant size instead of positions of memory."""

_OF_RECURRENT_ALONE = frozenset({"d_hidden", "d_last", "weight_drop", "kernel_sizes", "zoneout"})
_OF_QRNN_ALONE = frozenset({"kernel_sizes", "zoneout"})
_OF_BOTH = frozenset(
    {
        *("kind", "n_layer", "d_model", "d_embed", "cutoffs", "div_val", "tie_projections", "tie_embeddings"),
        *("init_std", "proj_init_std", "activation_reg", "temporal_reg", "n_softmax"),
        *("dropout", "dropout_embed", "dropout_out", "dropout_words", "dropout_latent", "dropout_tail"),
        "locked_dropout",
    }
)
_LENGTHS = {"mem_len": 0, "window": None, "clamp_len": None}
"""Lengths of memory, and the only value that a recurrent model allows: see `validate_no_positions`."""


def validate_kind(model: Any) -> None:
    """The rules that depend on the kind of a model, given as `txl.config.ModelConfig`.

    Raises:
        UserError: naming the first field that breaks one.
    """
    for item in dataclasses.fields(model):
        value = getattr(model, item.name)
        if not has_field(model.kind, item.name) and value != item.default:
            raise UserError(
                f"model.{item.name} is {_shown(value)}, but model.kind is {model.kind}, which has no use for it; "
                f"leave it at its default, {_shown(item.default)}"
            )
    validate_no_positions(model.kind, model, "model.")
    for name in ("weight_drop", "zoneout"):
        if not 0 <= getattr(model, name) < 1:
            raise UserError(
                f"model.{name} is {getattr(model, name)}; expected a probability from 0 up to but not including 1"
            )
    for name in ("d_hidden", "d_last"):
        width = getattr(model, name)
        if width is not None and not 1 <= width <= 2**20:
            raise UserError(f"model.{name} is {width}; expected 1 or more, at most {2**20}, or none for d_model")
    _validate_kernels(model)
    _validate_softmax(model)


def has_field(kind: Kind, name: str) -> bool:
    """Whether models of a kind have a use for a field."""
    if kind not in RECURRENT:
        return name not in _OF_RECURRENT_ALONE
    applies = name in _OF_BOTH or name in _LENGTHS or name in _OF_RECURRENT_ALONE
    return applies and not (kind == "lstm" and name in _OF_QRNN_ALONE)


def validate_no_positions(kind: str, lengths: Any, prefix: str) -> None:
    """A recurrent model has no positions of memory to count: its state is carried whole.

    Raises:
        UserError: naming the length that is set.
    """
    if kind not in RECURRENT:
        return
    for name, nothing in _LENGTHS.items():
        if getattr(lengths, name) != nothing:
            raise UserError(
                f"{prefix}{name} is {getattr(lengths, name)}, but model.kind is {kind}: it carries a state of constant "
                f"size, which has no positions to count; expected {_shown(nothing)}"
            )


def kernel_sizes(model: Any) -> list[int]:
    """Tokens that the convolution of each layer of a QRNN reads."""
    given = list(model.kernel_sizes[: model.n_layer])
    return given + [given[-1]] * (model.n_layer - len(given))


def _validate_kernels(model: Any) -> None:
    sizes = model.kernel_sizes
    fits = 1 <= len(sizes) <= model.n_layer and all(1 <= size <= 1024 for size in sizes)
    if model.kind == "qrnn" and not fits:
        raise UserError(
            f"model.kernel_sizes is {list(sizes)}; expected 1 to {model.n_layer} numbers from 1 to 1024, one for each "
            f"layer (the last holds for all further ones)"
        )


def _validate_softmax(model: Any) -> None:
    if not 1 <= model.n_softmax <= 4096:
        raise UserError(f"model.n_softmax is {model.n_softmax}; expected 1 (no mixture) or more, at most 4096")
    if model.n_softmax == 1:
        for name, allowed in (("dropout_latent", (None,)), ("d_last", (None, model.d_model))):
            if getattr(model, name) not in allowed:
                raise UserError(
                    f"model.{name} is {getattr(model, name)}, but model.n_softmax is 1; expected "
                    f"{' or '.join(map(_shown, allowed))} without a mixture of softmaxes"
                )
    if model.dropout_tail > 0 and not model.cutoffs:
        raise UserError(
            f"model.dropout_tail is {model.dropout_tail}, but without model.cutoffs there are no tails; expected 0"
        )
    if model.tie_projections == "tails" and (model.d_embed or model.d_model) != model.d_model:
        raise UserError(
            f"model.tie_projections is tails, but model.d_embed is {model.d_embed} and model.d_model {model.d_model}; "
            f"expected the same: the shortlist's embeddings meet the hidden states without a projection"
        )


def _shown(value: Any) -> str:
    return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)
