"""The rules that a model's fields must obey, whatever it is trained on and for how long."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

from txl.config.kinds import validate_kind
from txl.config.sections import EvalConfig, ModelConfig
from txl.config.values import require, shown
from txl.errors import UserError


def validate_model(model: ModelConfig) -> None:
    """The rules of a model's shape.

    Raises:
        UserError: naming the first field that breaks one.
    """
    most_of = {
        "n_layer": 10_000,
        "d_model": 2**20,
        "n_head": 2**12,
        "d_head": 2**16,
        "d_inner": 2**24,
        "div_val": 2**20,
    }
    for name, most in most_of.items():
        require(1 <= getattr(model, name) <= most, f"model.{name}", getattr(model, name), f"1 or more, at most {most}")
    even = model.d_model % 2 == 0 or model.kind != "transformer"
    require(even, "model.d_model", model.d_model, "an even number (R is half sines, half cosines)")
    if model.d_embed is not None:
        require(model.d_embed >= 1, "model.d_embed", model.d_embed, "1 or more, or none for d_model")
    rates = [item.name for item in dataclasses.fields(model) if item.name.startswith("drop")]
    for name in rates:
        rate: float | None = getattr(model, name)
        require(rate is None or 0 <= rate < 1, f"model.{name}", rate, "a probability from 0 up to but not including 1")
    for name in (
        "init_std", "proj_init_std", "activation_reg", "temporal_reg", "layer_norm_eps", "extra_target_weight"
    ):  # fmt: skip
        value = getattr(model, name)
        require(0 <= value < math.inf, f"model.{name}", value, "0 or more")
    _validate_clusters(model)
    validate_lengths(model.mem_len, model.window, model.clamp_len, "model.")
    require(model.max_segment >= 1, "model.max_segment", model.max_segment, "1 token or more")
    require(0 <= model.max_distance < 2**24, "model.max_distance", model.max_distance, "0 or more positions")
    if has_absolute_positions(model):
        require_no_memory(model, model, "model.")
    _validate_auxiliary(model)
    validate_kind(model)


def has_auxiliary_losses(model: ModelConfig) -> bool:
    """Whether it has classifiers that serve in training alone (`txl.models.auxiliary`)."""
    return model.layer_losses or model.n_target > 1


def _validate_auxiliary(model: ModelConfig) -> None:
    """The rules of Al-Rfou et al.'s auxiliary losses."""
    require(1 <= model.n_target <= 2**10, "model.n_target", model.n_target, "1 (the next token) or a few more")
    if not has_auxiliary_losses(model):
        return
    given = "model.layer_losses is true" if model.layer_losses else f"model.n_target is {model.n_target}"
    if not has_absolute_positions(model):
        raise UserError(
            f"{given}, but model.encoding is {model.encoding}: auxiliary losses are those of a vanilla Transformer; "
            f"expected the encoding learned or sinusoid"
        )
    if model.cutoffs:
        raise UserError(
            f"{given}, but model.cutoffs is {list(model.cutoffs)}: each auxiliary prediction has a plain softmax of "
            f"its own; expected no cutoffs"
        )


def has_absolute_positions(model: ModelConfig) -> bool:
    """Whether positions are those within a segment, so that no memory can be read beside it (Section 3.3)."""
    return model.encoding in ("learned", "sinusoid")


def require_no_memory(model: ModelConfig, lengths: ModelConfig | EvalConfig, prefix: str) -> None:
    """Absolute positions of two segments cannot be told apart (Section 3.3)."""
    for name, nothing in (("mem_len", 0), ("window", None), ("clamp_len", None)):
        if getattr(lengths, name) != nothing:
            raise UserError(
                f"{prefix}{name} is {getattr(lengths, name)}, but model.encoding is {model.encoding}: its positions "
                f"are absolute, and those of two segments could not be told apart (Section 3.3); expected "
                f"{shown(nothing)}"
            )


def longest_distance(model: ModelConfig, segment: int) -> int:
    """The largest distance between a query and a key that it sees, in segments of that many tokens."""
    farthest = model.mem_len + segment - 1
    limits = [farthest, *([] if model.window is None else [model.window - 1])]
    return min([*limits, *([] if model.clamp_len is None else [model.clamp_len])])


def _validate_clusters(model: ModelConfig) -> None:
    """The rules of an adaptive softmax that hold for every vocabulary."""
    if any(first >= second for first, second in pairwise((0, *model.cutoffs))):
        raise UserError(
            f"model.cutoffs is {list(model.cutoffs)}; expected numbers above 0 that increase strictly, or nothing"
        )
    d_embed = model.d_embed or model.d_model
    for cluster in range(len(model.cutoffs) + 1):
        if d_embed // model.div_val**cluster < 1:
            raise UserError(
                f"model.div_val is {model.div_val}: of {d_embed} embedding features cluster {cluster} would get none; "
                f"use a smaller div_val or fewer cutoffs"
            )


def validate_lengths(mem_len: int, window: int | None, clamp_len: int | None, prefix: str = "") -> None:
    """The rules of memory length, window and clamp.

    Raises:
        UserError: naming the first one that breaks a rule, with `prefix` in front of its name.
    """
    require(mem_len >= 0, f"{prefix}mem_len", mem_len, "0 (no memory) or more positions")
    if window is not None:
        require(window >= 1, f"{prefix}window", window, "1 (a query that sees itself) or more keys, or none")
        if mem_len < window - 1:
            raise UserError(
                f"{prefix}window {window} needs at least {window - 1} positions of memory, but {prefix}mem_len is "
                f"{mem_len}; raise mem_len or lower the window to at most {mem_len + 1}"
            )
    if clamp_len is not None:
        require(clamp_len >= 0, f"{prefix}clamp_len", clamp_len, "0 or more positions, or none")
