"""Dynamic evaluation: the weights of a copy of a model follow the text that it reads (Krause et al. 2018 and 2019).

A segment is scored first, by the weights as they are; then one step is taken along the gradient g of its mean loss. The
next segment is scored by the new weights. A token's probability therefore depends on the tokens before it alone.
Memory goes on across updates; its states were computed by earlier weights, and are not computed again.

With theta_0 the trained weights, eta the learning rate and lambda the decay, the rules are

    sgd         theta <- theta - eta g + lambda (theta_0 - theta)
    rms, mean   theta <- theta - eta g / (G + epsilon) + min(lambda D, 1) (theta_0 - theta)
    rms, sum    theta <- theta - eta g / (r + epsilon) + lambda r (theta_0 - theta)

where G is the square root of the mean, and r that of the sum, of g² over segments of the training split, element by
element, and D is G over the mean of the tensors' mean G. "mean" is Krause et al. 2018 (arXiv 1709.07432, Section 4 and
their code), "sum" is the code of Krause et al. 2019 (arXiv 1904.08378), which gave Transformer-XL's best numbers. Their
hyper-parameters have different scales, and only the first limits the decay.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from txl.config import AdaptationRule, AdaptedWeights, Limit, StatisticsName, same_length
from txl.errors import UserError
from txl.evaluation.perplexity import (
    EvaluationResult,
    Lanes,
    Progress,
    TokenIds,
    checked_ids,
    checked_segments,
    counted_over,
)
from txl.files import JsonObject
from txl.models.language_model import LanguageModel, State
from txl.models.layers import PositionwiseFeedForward


@dataclass(frozen=True)
class Adaptation:
    """The rule by which weights follow the text, and its hyper-parameters."""

    rule: str
    """"rms" divides each element's gradient by its size in training; "sgd" does not."""
    learning_rate: float
    """eta; 0 leaves the weights as they are."""
    decay: float = 0.0
    """lambda, towards the trained weights."""
    epsilon: float = 2e-5
    """Added to the size of each element's gradient; of rms alone."""
    statistics: str = "mean"
    """For rms: that size is the root of the "mean" of squares (2018) or of their "sum" (2019)."""
    weights: str = "all"
    """The weights that adapt: "all", the matrices and biases of "feed-forward" layers, or "biases" (with u and v of
    attention) and norms."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("rule", self.rule, get_args(AdaptationRule)),
            ("statistics", self.statistics, get_args(StatisticsName)),
            ("weights", self.weights, get_args(AdaptedWeights)),
        ):
            if value not in choices:
                raise UserError(f"{name} of the adaptation is {value!r}; expected one of {', '.join(choices)}")
        for name, value in (("learning rate", self.learning_rate), ("decay", self.decay)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} of the adaptation is {value}; expected 0 or more")
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon of the adaptation is {self.epsilon}; expected more than 0")
        if self.rule == "sgd" and self.decay > 1:
            raise UserError(f"decay of the adaptation is {self.decay}; expected at most 1 with sgd")


@dataclass(frozen=True)
class GradientStatistics:
    """Sums of squared gradients over segments of a training split."""

    squares: dict[str, Tensor]
    """By parameter. Parameters that never had a gradient are left out, and do not adapt."""
    segments: int
    """Segments that were read."""
    segment: int
    """Tokens of a lane in each."""
    batch_size: int
    """Lanes that each gradient is the mean of."""
    weights: str = "all"
    """The choice of weights, one of `AdaptedWeights`."""


def adapted_parameters(model: LanguageModel, weights: str = "all") -> dict[str, nn.Parameter]:
    """Return the parameters that adapt under a choice of `AdaptedWeights`, by name; a shared one once."""
    model = model.own_model
    chosen = dict(model.named_parameters())
    if weights == "feed-forward":
        layers = [(name, each) for name, each in model.named_modules() if isinstance(each, PositionwiseFeedForward)]
        inside = tuple(f"{name}.{part}." for name, _ in layers for part in ("inner", "outer"))
        chosen = {name: each for name, each in chosen.items() if name.startswith(inside)}
    elif weights == "biases":
        chosen = {
            name: each
            for name, each in chosen.items()
            if each.ndim == 1 or name.rpartition(".")[2] in ("u", "v")  # [H,D], added to queries
        }
    if not chosen:
        raise UserError(f"this model has no {weights} weights to adapt; choose all or biases")
    return chosen


class AdaptingModel:
    """A copy of a model that scores a segment, then adapts to it. The model given is not changed.

    Results depend on the weights, the settings and the segments alone: the same ones in the same order give the same
    numbers on the same machine with the same number of threads.

    Args:
        model: any language model. Of a continuous cache, the weights follow the inner model's loss. Decay pulls towards
            the model's weights, which must not change meanwhile.
        adaptation: the rule.
        statistics: `gradient_statistics` of the model's training split; rms needs them.
        dtype: "float32", or "bfloat16" for autocast.
        temperature: as `txl.evaluate`; the loss that is followed has it too.
    """

    model: LanguageModel
    """The copy. Between calls it is an ordinary model in evaluation mode, with the weights as they are now."""

    def __init__(
        self,
        model: LanguageModel,
        adaptation: Adaptation,
        statistics: GradientStatistics | None = None,
        *,
        dtype: str = "float32",
        temperature: float = 1.0,
    ):
        self.adaptation, self.dtype, self.temperature = adaptation, dtype, temperature
        trained = adapted_parameters(model, adaptation.weights)
        if adaptation.rule == "rms":
            if statistics is None:
                raise UserError("rms needs gradient statistics of the training split; sgd does not")
            if statistics.weights not in ("all", adaptation.weights):
                raise UserError(
                    f"the statistics are of {statistics.weights} weights; {adaptation.weights} are to adapt"
                )
            trained = {name: each for name, each in trained.items() if name in statistics.squares}
            if any(each.shape != statistics.squares[name].shape for name, each in trained.items()):
                raise UserError("the gradient statistics are of a model of another shape; take them of this one")
        self.model = _copied(model, trained)
        current = dict(self.model.own_model.named_parameters())
        self._current = [current[name] for name in trained]
        self._trained = [each.detach() for each in trained.values()]
        self._scales: Sequence[Tensor | float] = [adaptation.learning_rate] * len(trained)
        self._pulls: Sequence[Tensor | float] = [adaptation.decay] * len(trained)
        if adaptation.rule == "rms":
            assert statistics is not None
            self._scales, self._pulls = _rms_rates(adaptation, statistics, list(trained))

    def score_then_adapt(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: State,
        counted: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Score each target with the weights as they are, and only then update the weights by the mean loss.

        Args:
            tokens, targets: of several lanes, which share the weights.
            state: as the model's `nll` takes it; `self.model.init_state` makes the first.
            counted: targets that count in the loss that is followed; None: all.

        Returns:
            the losses in nats and the next state, both without gradient.
        """
        scored, gradients, state = _gradients(
            self.model, self._current, tokens, targets, state, counted, self.dtype, self.temperature
        )
        if gradients is not None:
            self._update(gradients)
        return scored, state

    @torch.no_grad()
    def _update(self, gradients: list[Tensor | None]) -> None:
        """Take one step of the rule."""
        for weight, trained, gradient, scale, pull in zip(
            self._current, self._trained, gradients, self._scales, self._pulls, strict=True
        ):
            change = torch.zeros_like(weight) if gradient is None else gradient * -scale
            if self.adaptation.decay > 0:
                change += (trained - weight) * pull
            weight += change  # in place, so that whoever keeps what the weights projected sees that they changed

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to the trained weights."""
        for weight, trained in zip(self._current, self._trained, strict=True):
            weight.copy_(trained)


def _rms_rates(
    adaptation: Adaptation, statistics: GradientStatistics, names: list[str]
) -> tuple[list[Tensor], list[Tensor | float]]:
    """Return the factors of each tensor's gradient, and of its distance from the trained weights."""
    count = statistics.segments if adaptation.statistics == "mean" else 1
    sizes = [(statistics.squares[name] / count).sqrt() for name in names]
    scales = [adaptation.learning_rate / (size + adaptation.epsilon) for size in sizes]
    if adaptation.decay == 0:
        return scales, [0.0] * len(names)
    if adaptation.statistics == "sum":
        return scales, [adaptation.decay * size for size in sizes]
    mean = torch.stack([size.mean() for size in sizes]).mean()
    if mean == 0:
        raise UserError("the training split's gradients are 0 everywhere; there is nothing to adapt")
    return scales, [(adaptation.decay * size / mean).clamp(max=1) for size in sizes]


@torch.inference_mode(False)
def _copied(model: LanguageModel, adapted: dict[str, nn.Parameter]) -> LanguageModel:
    """Copy a model in evaluation mode; only the adapted parameters of the copy take gradients."""
    copied = copy.deepcopy(model).eval()
    for name, each in copied.own_model.named_parameters():
        each.requires_grad_(name in adapted)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.train()  # cuDNN has no gradients in evaluation mode; the module has no dropout of its own
    return copied


@torch.inference_mode(False)
def _gradients(
    model: LanguageModel,
    parameters: list[nn.Parameter],
    tokens: Tensor,
    targets: Tensor,
    state: State,
    counted: Tensor | None,
    dtype: str,
    temperature: float,
) -> tuple[Tensor, list[Tensor | None] | None, State]:
    """Return losses [B,T], the gradient of the mean of those that count (None if none does), and the next state."""
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.enable_grad(), autocast:
        scored, followed, state = model.nll_and_own(tokens, targets, state, temperature)
        if counted is not None:
            followed = followed[counted]
    # An autocast around us would keep this segment's weights, converted, for the next one.
    torch.clear_autocast_cache()
    if followed.numel() == 0:
        return scored.detach(), None, state.detach()
    gradients = torch.autograd.grad(followed.mean(), parameters, allow_unused=True)
    return scored.detach(), list(gradients), state.detach()


@torch.inference_mode(False)
def gradient_statistics(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    weights: str = "all",
    segments: int | None = 500,
    segment: int = 128,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    batch_size: int = 1,
    dtype: str = "float32",
    temperature: float = 1.0,
    progress: Progress | None = None,
) -> GradientStatistics:
    """Sum the squared gradients that rms needs over the first segments of a training split, read in their order.

    Args:
        model: the trained model; it is not changed.
        tokens: the training split's tokens, or any one-dimensional array of token ids.
        weights: the weights that will adapt, one of `AdaptedWeights`.
        segments: number of segments to read; None, or more than there are: all. Krause et al. read all in 2018, in 100
            lanes, and a 5,000th in 2019, in one.
        segment, mem_len, window, clamp_len, batch_size, dtype, temperature: as in the evaluation to come.
        progress: called with the targets read so far and their number.
    """
    if segments is not None and segments < 1:
        raise UserError(f"segments for gradient statistics are {segments}; expected 1 or more")
    ids = checked_ids(tokens, None, dtype, segment=segment, temperature=temperature)
    lanes = Lanes.cut(len(ids), batch_size)
    parameters = adapted_parameters(model, weights)
    model = _copied(model, parameters).own_model
    copied = dict(model.named_parameters())
    state = model.init_state(batch_size, mem_len=mem_len, window=same_length(mem_len, window), clamp_len=clamp_len)
    squares: dict[str, Tensor] = {}
    n_target = min(lanes.n_target, lanes.n_target if segments is None else segments * segment * batch_size)
    read = done = 0
    for inputs, targets, _ in islice(checked_segments(model, lanes, ids, segment), segments):
        current = [copied[name] for name in parameters]
        _, gradients, state = _gradients(model, current, inputs, targets, state, None, dtype, temperature)
        assert gradients is not None  # every target counts
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                squares[name] = squares[name] + gradient.square() if name in squares else gradient.square()
        read, done = read + 1, done + targets.numel()
        if progress is not None:
            progress(done, n_target)
    return GradientStatistics(squares, read, segment, batch_size, weights)


@torch.inference_mode(False)
def evaluate_dynamically(
    model: LanguageModel,
    tokens: TokenIds,
    adaptation: Adaptation,
    statistics: GradientStatistics | None = None,
    *,
    segment: int = 128,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    batch_size: int = 1,
    max_tokens: int | None = None,
    exhaustive: bool = False,
    dtype: str = "float32",
    temperature: float = 1.0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return the mean loss of a copy of a model that adapts to a stream of tokens while it reads it.

    Args:
        model: any language model, or a continuous cache around one; it is not changed.
        tokens: a split's tokens, or any one-dimensional array or tensor of token ids. To report the result, do not use
            the tokens that the learning rate was tuned on.
        adaptation: the rule and its settings; `tune_dynamic` finds learning rate and decay.
        statistics: `gradient_statistics` of the training split, for rms.
        segment: tokens T that are scored between two updates; it changes the result.
        batch_size: lanes B, which share the weights and adapt them together: with more than one this is another
            algorithm than the published one.
        mem_len, window, clamp_len, max_tokens, exhaustive, dtype, temperature, progress: as `txl.evaluate`.

    Returns:
        as `txl.evaluate`, with the adaptation in `dynamic`. The loss is not a number if the weights diverged.
    """
    ids = checked_ids(tokens, max_tokens, dtype, segment=segment, temperature=temperature)
    lanes = Lanes.cut(len(ids), batch_size, exhaustive)
    start = time.perf_counter()
    adapting = AdaptingModel(model, adaptation, statistics, dtype=dtype, temperature=temperature)
    state = adapting.model.init_state(
        batch_size, mem_len=mem_len, window=same_length(mem_len, window), clamp_len=clamp_len
    )
    lengths = state.lengths
    device = next(model.parameters()).device
    total, done = torch.zeros((), dtype=torch.float64, device=device), 0
    for inputs, targets, counts in checked_segments(model, lanes, ids, segment):
        done += int(counts.sum())
        counts = counts.to(device)
        nll, state = adapting.score_then_adapt(inputs, targets, state, counts)
        total += nll.double().masked_fill(~counts, 0.0).sum()
        if progress is not None:
            progress(done, lanes.n_target)
    return EvaluationResult(
        nll=total.item() / done,
        tokens=done,
        dropped=len(ids) - 1 - done,
        seconds=time.perf_counter() - start,
        segment=segment,
        batch_size=batch_size,
        exhaustive=exhaustive,
        dtype=dtype,
        temperature=temperature,
        dynamic=described(adaptation, statistics),
        **counted_over(tokens, ids),
        **asdict(lengths),
        **model.cache_settings,
    )


def described(adaptation: Adaptation, statistics: GradientStatistics | None) -> JsonObject:
    """Return the settings of an adaptation that affect its result, ready for JSON."""
    settings = asdict(adaptation)
    if adaptation.rule == "sgd":
        return {name: value for name, value in settings.items() if name not in ("epsilon", "statistics")}
    assert statistics is not None
    read = {"statistics_segments": statistics.segments, "statistics_batch_size": statistics.batch_size}
    return settings | read
