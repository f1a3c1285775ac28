"""Measurements of a trained model for each kind of table, and those of Table 9 as in `txl bench table9`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from txl.config import RunConfig, TransformerXLConfig
from txl.data.corpora import Corpus
from txl.data.prepared import Tokens
from txl.evaluation.effective_context import spread_targets
from txl.evaluation.perplexity import EvaluationResult, Settings, evaluate
from txl.evaluation.sliding import evaluate_sliding, losses_at_contexts, sliding_losses
from txl.files import JsonObject
from txl.minutes.timing import training_workload
from txl.models.family import FamilyModel
from txl.presets import find_preset
from txl.training.budget import peak_bytes
from txl.units import is_character_unit, quality
from txl_lab.paper.configuring import attention_lengths
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Kind, Row
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.table9 import slowdown
from txl_lab.speed.workloads import Beside, reading_workload, timed_in_pairs

Say = Callable[[str], None]
Measurement = JsonObject
WINDOWS = 64
"""Number of windows that a sliding evaluation computes at once."""


def measure(kind: Kind, model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return the measurements of one trained model for a kind of table, ready for JSON."""
    if kind == "attention":
        return measure_attention(model, run, corpus, scale, say)
    if kind == "context":
        return measure_context(model, run, corpus, scale, say)
    return measure_quality(model, run, corpus, scale, say)


def least_tokens(kind: Kind, scale: Scale) -> dict[str, int]:
    """Return the least number of tokens of each split that a measurement needs."""
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
    """Return perplexity at the training segment's length and at the best attention length (Table 6).

    Every length is tried on the validation split. The best is the shortest length with the lowest perplexity, rounded
    to two decimals as in the paper's table (bits per character: to three). The test split is read at the training
    segment's length and at the best length.
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
    """Return the context lengths for `measure_context`, half a step apart (an odd step stays whole).

    Claims only count two lengths as different if a tried length lies between them. With half steps, this is true of two
    lengths a whole step apart.
    """
    step = scale.context_step // 2 if scale.context_step % 2 == 0 else scale.context_step
    return range(step, scale.longest_context + 1, step)


def context_targets(corpus: Corpus, scale: Scale) -> range:
    """Return the test targets whose losses `measure_context` computes."""
    lengths = context_lengths(scale)
    return spread_targets(len(corpus.tokens("test")), lengths[-1], scale.targets, lengths.step)


def measure_context(model: FamilyModel, run: RunConfig, corpus: Corpus, scale: Scale, say: Say) -> Measurement:
    """Return the losses of the same test targets at every context length (Appendix C)."""
    tokens, lengths = corpus.tokens("test"), context_lengths(scale)
    targets = context_targets(corpus, scale)
    say(f"test split, {len(targets):,} targets behind {lengths[0]} to {lengths[-1]} tokens of context")
    # At distances beyond those of training, losses are noise, and the metric would count some of that noise as gains.
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
    """Return the mean loss of all tokens except the first, at an attention length.

    A model that was trained with memory gets a memory and a window of this length. A model that was trained without
    memory reads windows of this length that slide by one token. A recurrent network carries its state and needs no
    length.

    If only part of the split is read, it is read in one lane. Several lanes would each begin with an empty memory, and
    in short lanes a long memory would never fill, whereas a sliding window always has its full length.
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
    """Return the mean loss of all tokens except the first, with the given lengths and the run's other test settings."""
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
    """Return True if all numbers of a measurement are finite."""
    if isinstance(measured, dict):
        return all(is_finite(each) for each in measured.values())
    if isinstance(measured, list):
        return all(is_finite(each) for each in measured)
    return not isinstance(measured, float) or math.isfinite(measured)


SEGMENT = 128
"""Number of tokens that Transformer-XL reads at once in Table 9."""


def speed_length(row: Row, scale: Scale) -> int:
    """Return the attention length at which a row of Table 9 is measured at a scale."""
    assert row.length is not None
    return max(1, round(row.length * scale.speed_lengths))


def measure_cost(run: RunConfig, peer: RunConfig, vocab_size: int, pairs: int, device: str) -> JsonObject:
    """Return training time per token, training memory and reading time per token, relative to another configuration.

    Steps of both configurations are timed alternately, in `pairs` pairs. The states of the caller's random generators
    are preserved.
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
    # Full attention lengths need the full model, because only their results are compared with the paper's.
    whole = scale.speed_lengths == 1
    shape = transformer_xl_of(published.make() if whole else scale.base("character"))
    length, dtype = speed_length(row, scale), scale.dtype or "float32"
    found = slowdown(shape, published.vocab_size, length, SEGMENT, scale.speed_steps, device, dtype)
    return {"slower": found.ratio, **found.to_dict()}
