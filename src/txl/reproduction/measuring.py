"""Measurements of a trained model, by the kind of table, and of Table 9, as `txl bench table9` makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from txl.benchmarking import transformer_xl_of
from txl.benchmarking.table9 import slowdown
from txl.benchmarking.workloads import Beside, reading_workload, timed_in_pairs, training_workload
from txl.config import RunConfig, TransformerXLConfig
from txl.data.corpora import Corpus
from txl.data.prepared import Tokens
from txl.evaluation.effective_context import spread_targets
from txl.evaluation.perplexity import EvaluationResult, Settings, evaluate
from txl.evaluation.sliding import evaluate_sliding, losses_at_contexts, sliding_losses
from txl.files import JsonObject
from txl.models.family import FamilyModel
from txl.presets import find_preset
from txl.reproduction.configuring import attention_lengths
from txl.reproduction.scales import Scale
from txl.reproduction.schema import Kind, Row
from txl.training.budget import peak_bytes
from txl.units import is_character_unit, quality

Say = Callable[[str], None]
Measurement = JsonObject
WINDOWS = 64
"""Windows of a sliding evaluation that are computed at once."""


def measure(kind: Kind, model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return the figures of one trained model, ready for JSON."""
    if kind == "attention":
        return measure_attention(model, run, corpus, scale, say)
    if kind == "context":
        return measure_context(model, run, corpus, scale, say)
    return measure_quality(model, run, corpus, scale, say)


def least_tokens(kind: Kind, scale: Scale) -> dict[str, int]:
    """Return by split how many tokens it must have to be measured."""
    if kind == "context":
        return {"test": scale.longest_context + 1}
    if kind == "attention":
        return {"valid": 2, "test": 2}
    return {"test": 2}


def measure_quality(model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return the loss on the test split under the run's test settings."""
    length = run.train.segment if run.model.mem_len == 0 else run.eval.mem_len
    say(f"test split, {_described(run, length)}")
    if run.model.carries_state:
        lengths: Settings = {**run.eval.lengths.options()}
        result = _loss_with(model, run, corpus.tokens("test"), lengths, scale.eval_tokens)
    else:
        result = loss_at(model, run, corpus.tokens("test"), length, scale.eval_tokens)
    return {"quality": quality(result.nll, corpus.unit), "test": result.to_dict()}


def measure_attention(model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return perplexity at the training's attention length and at the best one (Table 6).

    Every length is tried on the validation split. The best is the shortest whose perplexity is the lowest to the two
    decimals of the paper's table (bits per character: three). The test split is read at the training's length and at
    the best one.
    """
    longest = model.context
    lengths = [length for length in attention_lengths(run, scale) if longest is None or length <= longest]
    losses, tokens = {}, corpus.tokens("valid")
    if run.model.carries_state:
        for length in lengths:
            say(f"validation split, {_described(run, length)}")
            losses[length] = loss_at(model, run, tokens, length, scale.eval_tokens).nll
    else:
        say(f"validation split, windows of {lengths[0]} to {lengths[-1]} tokens")
        losses = sliding_losses(model, tokens, contexts=lengths, batch_size=WINDOWS, max_tokens=scale.eval_tokens)
    curve = [{"length": length, "nll": nll, "quality": quality(nll, corpus.unit)} for length, nll in losses.items()]
    digits = 3 if is_character_unit(corpus.unit) else 2
    lowest = min(round(point["quality"], digits) for point in curve)
    best = next(point["length"] for point in curve if round(point["quality"], digits) == lowest)
    training = run.train.segment
    found = {
        length: loss_at(model, run, corpus.tokens("test"), length, scale.eval_tokens) for length in {training, best}
    }
    return {
        "init": quality(found[training].nll, corpus.unit),
        "quality": quality(found[best].nll, corpus.unit),
        "attention": best,
        "training length": training,
        "curve": curve,
        "test": {str(length): result.to_dict() for length, result in found.items()},
    }


def context_lengths(scale: Scale) -> range:
    """Return the context lengths that `measure_context` tries: half steps, so that lengths a step apart differ."""
    step = scale.context_step // 2 if scale.context_step % 2 == 0 else scale.context_step
    return range(step, scale.longest_context + 1, step)


def context_targets(corpus: Corpus, scale: Scale) -> range:
    """Return the test targets whose losses `measure_context` finds."""
    lengths = context_lengths(scale)
    return spread_targets(len(corpus.tokens("test")), lengths[-1], scale.targets, lengths.step)


def measure_context(model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return the losses of the same test targets at every context length (Appendix C)."""
    tokens, lengths = corpus.tokens("test"), context_lengths(scale)
    targets = context_targets(corpus, scale)
    say(f"test split, {len(targets):,} targets behind {lengths[0]} to {lengths[-1]} tokens of context")
    # At distances that no training taught, losses are noise, and the metric counts of it what looks like gains.
    trained = run.train.segment + run.model.mem_len if isinstance(run.model, TransformerXLConfig) else None
    losses = losses_at_contexts(
        model,
        tokens,
        contexts=lengths,
        targets=targets,
        batch_size=WINDOWS,
        window=trained or "none",
        clamp_len=run.eval.lengths.options()["clamp_len"],
    )
    return {
        "losses": {str(length): values.tolist() for length, values in losses.items()},
        "targets": len(targets),
        "window": trained,
        "longest_context": model.context,
    }


def loss_at(
    model: FamilyModel, run: RunConfig, tokens: Tokens, length: int, max_tokens: int | None
) -> EvaluationResult:
    """Return the loss of every token but the first, at an attention length.

    A model that was trained with memory has a memory and a window of that length; one that was trained without is
    given a window of it that slides by one token; a recurrent network carries its state and has no length.

    A part of a split is read as one stream. Each of several lanes begins with an empty memory, and where they are short
    a long one never fills, while a sliding window sees all of its length.
    """
    if not run.model.carries_state:
        return evaluate_sliding(model, tokens, context=length, batch_size=WINDOWS, max_tokens=max_tokens)
    settings: Settings = {"mem_len": 0} if run.model.constant_state else {"mem_len": length, "window": length}
    if run.eval.clamp_len is not None:
        settings["clamp_len"] = run.eval.clamp_len
    return _loss_with(model, run, tokens, settings, max_tokens)


def _loss_with(
    model: FamilyModel, run: RunConfig, tokens: Tokens, lengths: Settings, max_tokens: int | None
) -> EvaluationResult:
    """Return the loss of every token but the first under the run's test settings, but for the lengths."""
    return evaluate(
        model,
        tokens,
        segment=run.eval.segment,
        batch_size=run.eval.batch_size if max_tokens is None else 1,
        max_tokens=max_tokens,
        exhaustive=True,
        temperature=run.eval.temperature,
        **lengths,
    )


def _described(run: RunConfig, length: int) -> str:
    if run.model.constant_state:
        return "state carried along"
    return f"attention length {length}" + ("" if run.model.mem_len else ", sliding by one token")


def is_finite(measured: Measurement) -> bool:
    """Return whether all numbers of a measurement are finite."""
    if isinstance(measured, dict):
        return all(is_finite(each) for each in measured.values())
    if isinstance(measured, list):
        return all(is_finite(each) for each in measured)
    return not isinstance(measured, float) or math.isfinite(measured)


SEGMENT = 128
"""Tokens that Transformer-XL reads at once."""


def speed_length(row: Row, scale: Scale) -> int:
    """Return the attention length that stands for a row's at a scale."""
    assert row.length is not None
    return max(1, round(row.length * scale.speed_lengths))


def measure_cost(run: RunConfig, peer: RunConfig, vocab_size: int, pairs: int, device: str) -> JsonObject:
    """Return time a token and peak memory of training, and time a token of reading, over another configuration's.

    Steps of both are timed in turns, so many pairs of them. The caller's random numbers stay as they were.
    """
    both = run, peer
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        train, other = (training_workload(each, vocab_size, device)[1] for each in both)
        training = timed_in_pairs(train, other, pairs, device)
        read, other = (reading_workload(each, vocab_size, device)[2] for each in both)
        with torch.no_grad():
            reading = timed_in_pairs(read, other, pairs, device)
    bytes_of = [peak_bytes(each, vocab_size, device) for each in both]
    return {
        **_a_token("time", training, [each.train.tokens_per_step for each in both]),
        **_a_token("reading", reading, [each.eval.batch_size * each.eval.segment for each in both]),
        "memory": bytes_of[0] / bytes_of[1],
        "memory, bytes": bytes_of[0],
    }


def _a_token(name: str, timed: Beside, tokens: Sequence[int]) -> JsonObject:
    return {
        name: timed.ratio * tokens[1] / tokens[0],
        f"{name}, seconds a token": timed.ours / tokens[0],
        f"{name}, seconds a token beside": timed.theirs / tokens[1],
    }


def measure_speed(row: Row, scale: Scale, device: str) -> JsonObject:
    """Measure a row of Table 9 once."""
    assert row.preset is not None
    published = find_preset(row.preset)
    # The full attention lengths ask for the full model: only then are the paper's numbers beside ours.
    whole = scale.speed_lengths == 1
    shape = transformer_xl_of(published.make() if whole else scale.base("character"))
    length, dtype = speed_length(row, scale), scale.dtype or "float32"
    found = slowdown(shape, published.vocab_size, length, SEGMENT, scale.speed_steps, device, dtype)
    return {"slower": found.ratio, **found.to_dict()}
