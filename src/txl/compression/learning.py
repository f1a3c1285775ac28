"""A model that starts from seeded random weights and learns the file during coding (`--online`).

The method is that of NNCP (Bellard 2019, 2021): each segment is coded with the current weights, then encoder and
decoder train the weights on this segment identically. The model has to learn only what counts cannot predict, because
the probability of the next byte is

    softmax(log p_model + sum over k of w[m, k] log p_k)

with the distributions p_k of `Counts`, and learned weights w for every number m of contexts that occurred before.

Shapes: B lanes, T tokens of a segment, K distributions of counts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from txl.compression.counts import DISTRIBUTIONS, Counts
from txl.compression.predictors import ModelPredictor
from txl.config import ModelConfig, RecurrentConfig, model_from_dict
from txl.config.values import from_plain, require
from txl.files import JsonObject
from txl.models import build_model
from txl.models.language_model import State

_FIRST_WEIGHTS = [0.0] * (DISTRIBUTIONS - 4) + [0.2, 0.4, 0.4, 0.4]  # of the distributions, as in `Counts.predict`
_BELOW = {"segment": math.inf, "beta1": 1, "beta2": 1, "eps": math.inf, "halved_after": math.inf}


@dataclass(frozen=True)
class OnlineRecipe:
    """Configuration and training of a model that learns the file from scratch; the defaults were measured on text."""

    seed: int = 1
    segment: int = 16
    learning_rate: float = 4e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    warmup_steps: int = 50
    halved_after: int = 0  # n in the factor (1 + updates / n)^-1/2 of the rate; 0: constant after the warm-up
    counts: bool = True  # False: the model's probabilities are used alone
    weights_factor: float = 2.0  # learning rate of the weights of the counts, relative to that of the model
    model: ModelConfig = field(default_factory=lambda: RecurrentConfig(kind="lstm", n_layer=1, d_model=256))

    def __post_init__(self) -> None:
        for name, below in _BELOW.items():
            value, least = getattr(self, name), int(name == "segment")
            require(least <= value < below, f"online.{name}", value, f"at least {least}, below {below}")

    def to_plain(self) -> JsonObject:
        """Return all fields ready for JSON; for the model, its family and the settings that are not defaults."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "model"}
        general = type(self.model)()
        changed = {k: v for k, v in dataclasses.asdict(self.model).items() if v != getattr(general, k)}
        return plain | {"model": {"family": self.model.family, **changed}}

    @classmethod
    def from_plain(cls, values: object) -> OnlineRecipe:
        """Return the recipe that `to_plain` described."""
        return from_plain(cls, values, "online.", {ModelConfig: model_from_dict})


class OnlinePredictor(ModelPredictor):
    """Predictor of bytes by a model that learns during coding, and by counts; `start` is the byte before the text."""

    def __init__(self, recipe: OnlineRecipe, lanes: int, start: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = build_model(recipe.model, 256).eval()
        super().__init__(model, lanes, start, model.config.lengths(), recipe.segment, self._step)
        self._recipe, self._steps = recipe, 0
        self._weights = nn.Parameter(torch.tensor(_FIRST_WEIGHTS).expand(2 * DISTRIBUTIONS, -1).clone())
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.Adam(
            [{"params": self._parameters, "factor": 1.0}, {"params": [self._weights], "factor": recipe.weights_factor}],
            lr=0.0,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            fused=True,
        )
        self._counts = Counts(lanes) if recipe.counts else None
        self._distributions: list[tuple[Tensor, Tensor]] = []  # log p_k and m of each position of the segment

    def predict(self) -> Tensor:
        """Predict by the model and the counts."""
        log_probs = super().predict()
        if self._counts is None:
            return log_probs
        probabilities, met = self._counts.predict()
        self._distributions.append((torch.from_numpy(probabilities).log_(), torch.from_numpy(met)))
        with torch.no_grad():
            return self._mixed(log_probs, *self._distributions[-1])

    def read(self, tokens: Tensor, whole: bool) -> None:
        """Let the counts and the model read a token of every lane."""
        if self._counts is not None:
            self._counts.read(tokens.numpy())
        super().read(tokens, whole)

    def end_block(self) -> None:
        """End a block of the model and of the counts."""
        super().end_block()
        if self._counts is not None:
            self._counts.rotate()

    def _mixed(self, log_probs: Tensor, distributions: Tensor, met: Tensor) -> Tensor:
        """Mix log-probabilities of model and counts, given m: [...,256], [...,K,256] and [...] -> [...,256]."""
        weights = self._weights[met][..., None, :]
        return (log_probs + torch.matmul(weights, distributions).squeeze(-2)).log_softmax(dim=-1)

    def _step(self, tokens: Tensor, targets: Tensor, state: State) -> None:
        """Train the weights on a coded segment: tokens and targets int64 [B,T], and the state before the segment."""
        recipe, distributions = self._recipe, self._distributions[: tokens.shape[1]]
        log_probs, _ = self.model.log_probs(tokens, state)
        if distributions:
            log_probs = self._mixed(
                log_probs, *(torch.stack(columns, 1) for columns in zip(*distributions, strict=True))
            )
        (-log_probs.gather(-1, targets[..., None]).mean()).backward()
        nn.utils.clip_grad_norm_(self._parameters, recipe.clip)
        rate = recipe.learning_rate * min(1.0, (self._steps + 1) / max(1, recipe.warmup_steps))
        if recipe.halved_after:
            rate *= (1 + self._steps / recipe.halved_after) ** -0.5
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1

    def _update(self, length: int, following: Tensor) -> None:
        super()._update(length, following)
        self._distributions.clear()
