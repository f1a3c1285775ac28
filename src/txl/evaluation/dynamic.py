"""Dynamic evaluation: a copy of a model adapts its weights to the text that it reads (Krause et al. 2018 and 2019).

Each segment is scored first, with the current weights. Then the weights take one step along the gradient g of the
segment's mean loss, and the next segment is scored with the new weights. The probability of a token therefore depends
only on the tokens before it. Memory is kept across updates: its hidden states come from earlier weights and are not
recomputed.

With theta_0 the trained weights, eta the learning rate and lambda the decay, the update rules are

    sgd         theta <- theta - eta g + lambda (theta_0 - theta)
    rms, mean   theta <- theta - eta g / (G + epsilon) + min(lambda D, 1) (theta_0 - theta)
    rms, sum    theta <- theta - eta g / (r + epsilon) + lambda r (theta_0 - theta)

where, element by element, G is the square root of the mean of g² over segments of the training split, and r is the
square root of the sum. D is G divided by the average of all tensors' mean G. "mean" is the rule of Krause et al. 2018
(arXiv 1709.07432, Section 4 and their code), "sum" that in the code of Krause et al. 2019 (arXiv 1904.08378), with
hyper-parameters of another scale.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from txl.config import AdaptationRule, AdaptedWeights, Limit, StatisticsName
from txl.errors import UserError
from txl.evaluation.recorded import RecordedChanges
from txl.evaluation.stream import EvaluationResult, Progress, Settings, TokenIds, read_lanes
from txl.models.language_model import LanguageModel, State
from txl.models.layers import PositionwiseFeedForward


@dataclass(frozen=True)
class Adaptation:
    """Update rule of dynamic evaluation, and its hyper-parameters."""

    rule: str  #: "rms" divides the gradient, element by element, by the size of training gradients; "sgd" does not
    learning_rate: float  #: eta; 0 leaves the weights unchanged
    decay: float = 0.0  #: lambda, the decay towards the trained weights
    epsilon: float = 2e-5  #: term added to the size of training gradients; used by rms only
    statistics: str = "mean"
    """Size of training gradients for rms: the root of the "mean" (2018) or of the "sum" (2019) of their squares."""
    weights: str = "all"
    """Weights that adapt: "all"; "feed-forward", the matrices and biases of feed-forward layers; or "biases", which
    include u and v of attention, and norms."""

    def __post_init__(self) -> None:
        for name, choices in (("rule", AdaptationRule), ("statistics", StatisticsName), ("weights", AdaptedWeights)):
            if getattr(self, name) not in get_args(choices):
                expected = f"one of {', '.join(get_args(choices))}"
                raise UserError(field=name, value=getattr(self, name), expected=expected)
        most = 1 if self.rule == "sgd" else math.inf
        for name, in_range, expected in (
            ("learning_rate", 0 <= self.learning_rate < math.inf, "0 or more"),
            ("decay", 0 <= self.decay <= most and self.decay < math.inf, "0 or more, with sgd at most 1"),
            ("epsilon", 0 < self.epsilon < math.inf, "more than 0"),
        ):
            if not in_range:
                raise UserError(field=name, value=getattr(self, name), expected=expected)


@dataclass(frozen=True)
class GradientStatistics:
    """Sums of squared gradients over segments of a training split."""

    squares: dict[str, Tensor]
    """Sums by parameter name. Parameters that never had a gradient are left out, and do not adapt."""
    segments: int  #: number of segments read
    segment: int  #: number of tokens of each lane in a segment
    batch_size: int  #: number of lanes; each gradient is that of the mean loss over all lanes
    weights: str = "all"  #: choice of weights, one of `AdaptedWeights`


def adapted_parameters(model: LanguageModel, weights: str = "all") -> dict[str, nn.Parameter]:
    """Return the parameters that `weights` (one of `AdaptedWeights`) selects by name, shared parameters only once."""
    model = model.own_model
    chosen = dict(model.named_parameters())
    if weights == "feed-forward":
        layers = [name for name, module in model.named_modules() if isinstance(module, PositionwiseFeedForward)]
        inside = tuple(f"{name}.{part}." for name in layers for part in ("inner", "outer"))
        chosen = {name: weight for name, weight in chosen.items() if name.startswith(inside)}
    elif weights == "biases":
        # u and v of attention [H,D] are added to queries, so they are biases in spite of their two dimensions.
        chosen = {
            name: weight for name, weight in chosen.items() if weight.ndim == 1 or name.rpartition(".")[2] in ("u", "v")
        }
    if not chosen:
        raise UserError(f"this model has no {weights} weights to adapt", expected="all or biases")
    return chosen


class AdaptingModel:
    """A copy of a model that scores each segment, then adapts to that segment. The original model is not changed.

    Results depend only on the weights, the settings and the segments: equal segments in the same order give the same
    numbers on the same machine with the same number of threads.

    Args:
        model: any language model. In a continuous cache, the weights adapt to the loss of the inner model. Decay pulls
            towards the weights of `model`, which must therefore not change while the copy is in use.
        adaptation: update rule and its hyper-parameters.
        statistics: result of `gradient_statistics` on the model's training split; required by rms.
        dtype: "float32", or "bfloat16" for autocast.
        temperature: softmax temperature as in `txl.evaluate`; it also applies to the loss whose gradient is used.
    """

    model: LanguageModel
    """The copy. Between calls it is an ordinary model in evaluation mode, with the current weights."""

    @torch.inference_mode(False)
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
                raise UserError("rms needs gradient statistics of the training split", remedy="or adapt by sgd")
            if statistics.weights not in ("all", adaptation.weights):
                raise UserError(f"the statistics are of {statistics.weights} weights, but {adaptation.weights} adapt")
            trained = {name: weight for name, weight in trained.items() if name in statistics.squares}
            if any(weight.shape != statistics.squares[name].shape for name, weight in trained.items()):
                raise UserError("the gradient statistics are of a model of another shape")
        # Weights adapt in place, and the caller's model must not change.
        self.model = copy.deepcopy(model).eval()
        current = dict(self.model.own_model.named_parameters())
        for name, weight in current.items():
            weight.requires_grad_(name in trained)
        for module in self.model.modules():
            # cuDNN computes no gradients of an LSTM in evaluation mode. The module itself has no dropout.
            if isinstance(module, nn.RNNBase):
                module.train()
        self._current = {name: current[name] for name in trained}
        # The trained weights themselves, not a copy: decay reads them at every step.
        self._trained = [weight.detach() for weight in trained.values()]
        # Factors of the gradients, and of the distances from the trained weights.
        self._scales: list[Tensor] | list[float] = [-adaptation.learning_rate] * len(trained)
        self._pulls: list[Tensor] | list[float] = [adaptation.decay] * len(trained)
        if statistics is not None and adaptation.rule == "rms":
            self._scales, self._pulls = _rms_rates(adaptation, statistics, list(trained))

    def score_then_adapt(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"],
        state: State,
        counted: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Score each target with the current weights, then update the weights by the gradient of the mean loss.

        All lanes share the weights. `self.model.init_state` makes the first state. Only `counted` targets (None: all)
        are in the mean loss of the update. Returns the loss of each target in nats and the next state, both without
        gradient.
        """
        scored, gradients, state = self._gradients(tokens, targets, state, counted)
        if gradients:
            self._update(gradients)
        return scored, state

    def _recordable(
        self, tokens: Tensor, targets: Tensor, state: State, counted: Tensor
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Compute `score_then_adapt` of a segment with at least one counted target, without waiting for the device."""
        scored, gradients, state = self._gradients(tokens, targets, state, counted, waits=False)
        self._update(gradients)
        return scored, state

    @torch.no_grad()
    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        weights: list[Tensor] = list(self._current.values())
        # A weight without a gradient in this segment still decays.
        given = [torch.zeros_like(old) if new is None else new for old, new in zip(weights, gradients, strict=True)]
        changes = torch._foreach_mul(given, self._scales)  # pyright: ignore[reportPrivateImportUsage]
        if self.adaptation.decay > 0:
            pulled = torch._foreach_sub(self._trained, weights)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(pulled, self._pulls)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(changes, pulled)  # pyright: ignore[reportPrivateImportUsage]
        # In place: caches of projected keys and values detect the change by the tensor's version.
        torch._foreach_add_(weights, changes)  # pyright: ignore[reportPrivateImportUsage]

    @torch.inference_mode(False)
    def _gradients(
        self, tokens: Tensor, targets: Tensor, state: State, counted: Tensor | None, waits: bool = True
    ) -> tuple[Tensor, Sequence[Tensor | None], State]:
        """Return losses [B,T], the gradients of the mean loss of counted targets, if there are any, and the state."""
        autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")
        # The memory carries no gradient: it was detached after the segment before.
        with torch.enable_grad(), autocast:
            # With a continuous cache, the score is that of the mixture, and the gradient that of the model inside.
            scored, followed, state = self.model.nll_and_own(tokens, targets, state, self.temperature)
            if counted is not None and waits:
                followed = followed[counted]
        # An enclosing autocast would otherwise use this segment's converted weights in the next segment too.
        torch.clear_autocast_cache()
        # Classifiers that serve training alone have no gradient here.
        weights = list(self._current.values())
        if not followed.numel():
            return scored.detach(), (), state.detach()
        mean = followed.mean()
        if counted is not None and not waits:  # how many count is known on the device alone
            some = followed.where(counted, 0.0).sum() / counted.sum()
            mean = torch.where(counted.all(), mean, some)
        gradients = torch.autograd.grad(mean, weights, allow_unused=True)
        return scored.detach(), gradients, state.detach()

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the trained weights."""
        for weight, trained in zip(self._current.values(), self._trained, strict=True):
            weight.copy_(trained)


def _rms_rates(
    adaptation: Adaptation, statistics: GradientStatistics, names: list[str]
) -> tuple[list[Tensor], list[Tensor] | list[float]]:
    """Return the factors of the gradients, and of the distances from the trained weights, one of each per tensor."""
    # The code of 2019 does not divide by the number of segments, so its learning rates depend on that number.
    count = statistics.segments if adaptation.statistics == "mean" else 1
    sizes = [(statistics.squares[name] / count).sqrt() for name in names]
    scales = [-(adaptation.learning_rate / (size + adaptation.epsilon)) for size in sizes]
    if adaptation.decay == 0:
        return scales, [0.0] * len(names)
    if adaptation.statistics == "sum":
        return scales, [adaptation.decay * size for size in sizes]
    # D compares G with the average of the tensors' means, so that a large tensor does not outweigh the others.
    mean = torch.stack([size.mean() for size in sizes]).mean()
    if mean == 0:
        raise UserError("the training split's gradients are 0 everywhere, so that there is nothing to adapt")
    # A pull above 1 would overshoot the trained weights.
    return scales, [(adaptation.decay * size / mean).clamp(max=1) for size in sizes]


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
    """Sum squared gradients, which rms needs, over the first segments of a training split in their order.

    Args:
        weights: choice of the weights that will adapt, one of `AdaptedWeights`.
        segments: number of segments to read; None, or more than the split has: all. Krause et al. read all segments in
            100 lanes in 2018, and one in 5,000 in a single lane in 2019.
        model, tokens, segment, mem_len, window, clamp_len, batch_size, dtype, temperature, progress: as for
            `txl.evaluate`, with the settings of the evaluation that will use the statistics.
    """
    settings = Settings(segment, mem_len, window, clamp_len, batch_size, dtype=dtype, temperature=temperature)
    if segments is not None and segments < 1:
        raise UserError(field="statistics_segments", value=segments, expected="1 or more")
    still = Adaptation("sgd", 0.0, weights=weights)
    # In a continuous cache, the gradients are those of the model inside.
    adapting = AdaptingModel(model.own_model, still, dtype=settings.dtype, temperature=settings.temperature)
    squares: dict[str, Tensor] = {}
    n_read = 0

    def add(inputs: Tensor, targets: Tensor, state: State, counted: Tensor) -> tuple[Tensor, State]:
        nll, gradients, state = adapting._gradients(inputs, targets, state, None)
        for name, gradient in zip(adapting._current, gradients, strict=True):
            if gradient is not None:
                # Element by element: each weight has a size of its own.
                squares[name] = squares[name].add_(gradient.square()) if name in squares else gradient.square()
        return nll, state

    recorded = RecordedChanges(adapting.model, add, settings.temperature)

    def count(*given: Any) -> tuple[Tensor, State]:
        nonlocal n_read
        n_read += 1
        return recorded(*given)

    read_lanes(adapting.model, tokens, settings, count, segments=segments, progress=progress)
    return GradientStatistics(squares, n_read, settings.segment, settings.batch_size, weights)


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
    """Return the mean loss over a stream of tokens, scored by a copy of a model that adapts while it reads.

    Args:
        model: any language model, or a continuous cache around a model; it is not changed.
        tokens: tokens as for `txl.evaluate`. For a result to report, do not use those on which the learning rate was
            tuned.
        adaptation: update rule and its hyper-parameters; `tune_dynamic` finds the learning rate and the decay.
        statistics: result of `gradient_statistics` on the training split; required by rms.
        segment: number of tokens T scored between two updates; it changes the result.
        batch_size: number of lanes B. All lanes share the weights and adapt them together, so more than one lane is a
            different algorithm than the published one.
        mem_len, window, clamp_len, max_tokens, exhaustive, dtype, temperature, progress: as for `txl.evaluate`.

    The adaptation is in the result's `dynamic`. The loss is not a number if the weights diverged.
    """
    settings = Settings(segment, mem_len, window, clamp_len, batch_size, max_tokens, exhaustive, dtype, temperature)
    return adapt_with(model, tokens, adaptation, statistics, settings, progress)


@torch.inference_mode(False)
def adapt_with(
    model: LanguageModel,
    tokens: TokenIds,
    adaptation: Adaptation,
    statistics: GradientStatistics | None,
    settings: Settings,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return the result of `evaluate_dynamically` for one value of settings."""
    adapting = AdaptingModel(model, adaptation, statistics, dtype=settings.dtype, temperature=settings.temperature)
    recorded = RecordedChanges(adapting.model, adapting.score_then_adapt, settings.temperature, adapting._recordable)
    result = read_lanes(adapting.model, tokens, settings, recorded, progress=progress)
    # Of the settings, those that affect the result.
    dynamic = asdict(adaptation)
    if adaptation.rule == "sgd" or statistics is None:
        del dynamic["epsilon"], dynamic["statistics"]
    else:
        dynamic |= {"statistics_segments": statistics.segments, "statistics_batch_size": statistics.batch_size}
    return replace(result, dynamic=dynamic)
