"""Estimated costs of a configuration: parameters by part, tokens per step, and memory.

Letters: B lanes of one micro-batch, T tokens of a segment, E d_model, V vocabulary, K softmaxes of a mixture; f = 4
bytes, which `train.dtype float64` doubles.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from txl.config import RunConfig, TrainConfig
from txl.data.benchmarks import BENCHMARKS
from txl.files import JsonObject
from txl.models import build_model
from txl.models.costs import dropout_copies
from txl.models.cross_entropy import MAX_LOGITS
from txl.models.family import FamilyModel
from txl.models.language_model import Objective

_LARGE_VOCABULARY = 16_384  # tokens above which `softmax_hint` may advise a smaller vocabulary


@dataclass(frozen=True)
class Costs:
    """Parameters, tokens per step and bytes of memory that training needs."""

    parameters: dict[str, int]
    tokens_per_step: int
    targets_per_step: int  # targets per step that have a loss
    memory_bytes: dict[str, int]

    @property
    def total_parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory_bytes.values())

    def to_dict(self) -> JsonObject:
        """Return all fields and totals as a dictionary for JSON."""
        return asdict(self) | {"total_parameters": self.total_parameters, "total_bytes": self.total_bytes}


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part (embedding, positions, attention ...) that the model has."""
    names_of_parts = ("embedding", "positions", "attention", "u and v", "feed-forward", "layer norm")
    names_of_parts += ("recurrent layers", "mixture", "softmax", "auxiliary")
    parts = dict.fromkeys(names_of_parts, 0)
    for name, parameter in model.named_parameters():
        names = name.split(".")
        if names[-1] in ("u", "v"):
            part = "u and v"
        elif names[-1] == "distances":
            part = "positions"
        elif names[-2:-1] and names[-2].endswith("norm"):
            part = "layer norm"
        elif "feed_forward" in names:
            part = "feed-forward"
        elif "attention" in names:
            part = "attention"
        elif "lstm" in names or "convolution" in names:
            part = "recurrent layers"
        else:
            part = names[0] if names[0] in parts else "softmax"
        parts[part] += parameter.numel()
    return {part: count for part, count in parts.items() if count}


def estimate(run: RunConfig, vocab_size: int, device: str | None = None) -> Costs:
    """Estimate parameters, tokens per step, and bytes of all tensors that exist at once during training.

    With P parameters:

    - weights f*P (and 2*P for their copies in bfloat16), gradients f*P, optimiser 2*f*P (Adam's two moments; Muon has
      one for each of its matrices), f*P (SGD's momentum) or nothing (plain SGD), f*P for averaged weights,
    - memory or state, activations and scratch of the layers: the model's `layer_costs`,
    - activations of the embedding and the softmax: `_states_at_ends` and `_logits`.

    A step of several segments keeps the activations of all of them. The backend that the attentions `auto` and
    `fastest` select depends on the device.

    The tests compare the estimate with measurements. Not counted are the interpreter and its libraries (0.3 GB), and
    memory lost to fragmentation in the allocator (on a CPU, where `txl.allocator` lets glibc keep freed memory, 0.1 to
    0.8 of the total was observed).
    """
    with torch.device("meta"):
        model = build_model(run.model, vocab_size, device, getattr(torch, run.train.dtype))
    parameters = parameters_by_part(model)
    total, train = sum(parameters.values()), run.train
    ends, logits = _states_at_ends(run), _logits(run, vocab_size, model.attention_name == "compiled")
    layers = model.layer_costs(train)
    if layers.beside_softmax:
        ends, scratch = ends + logits, layers.scratch
    else:
        scratch = max(logits, layers.scratch)  # the softmax's tensors are freed before the layers' backward pass
    memory = {
        "weights": (4 + (2 if train.dtype == "bfloat16" else 0)) * total,
        "gradients": 4 * total,
        "optimiser": 4 * _kept_by_optimiser(model, train),
        **({"averaged weights": 4 * total} if train.averages else {}),
        **({"recurrent memory": layers.state} if layers.state else {}),
        "activations": train.backprop_segments * layers.activations + ends,
        "scratch": scratch,
    }
    if train.capture:  # the recorded step keeps its own, beside those of steps that are not recorded
        memory["activations"] *= 2
    width = 2 if train.dtype == "float64" else 1
    return Costs(
        parameters,
        train.tokens_per_step,
        train.batch_size * train.backprop_segments * Objective(train.loss).counted(train.segment),
        {part: width * number for part, number in memory.items()},
    )


def softmax_hint(run: RunConfig, vocab_size: int, parameters: dict[str, int], device: str) -> str | None:
    """Return advice if the softmax takes most of the arithmetic on a CPU, else None.

    Args:
        run: configuration of the run.
        vocab_size: size V of the vocabulary.
        parameters: number of parameters of the model, by part.
        device: device that the run trains on.
    """
    model = run.model
    if device != "cpu" or model.cutoffs or vocab_size <= _LARGE_VOCABULARY:
        return None
    softmax = vocab_size * (model.d_embed or model.d_model) * model.n_softmax  # products per target
    layers = sum(parameters.get(part, 0) for part in ("attention", "feed-forward", "recurrent layers", "mixture"))
    if softmax < layers:
        return None
    adaptive = f"model.cutoffs {vocab_size // 10},{vocab_size // 3} (adaptive softmax) keeps all"
    smaller = {"word": "data.max_words 8000 keeps the most frequent", "bpe": "data.vocab_size 4096 makes fewer"}
    ways = [adaptive]
    if run.data.unit in smaller and run.data.corpus not in BENCHMARKS:
        ways.insert(0, smaller[run.data.unit])
    return (
        f"{softmax / (softmax + layers):.0%} of a step's products are the softmax over {vocab_size:,} tokens, which is "
        f"slow on a CPU; {', '.join(ways)}"
    )


def _kept_by_optimiser(model: FamilyModel, train: TrainConfig) -> int:
    """Return how many numbers the optimiser's state holds."""
    total = sum(parameter.numel() for parameter in model.parameters())
    if train.optimizer == "sgd":
        return total if train.momentum > 0 else 0
    matrices = model.layer_matrices() if train.optimizer == "muon" else {}
    return 2 * total - sum(model.get_parameter(name).numel() for name in matrices)


def _states_at_ends(run: RunConfig) -> int:
    """Return the bytes of the hidden states before and after the layers.

    f*B*T*(2 + m + m')*E, where m and m' are 1 if the dropout of the embedding and that of the final states keep a mask,
    and f*B*T*K*(2 + d + m'')*E for the states of a mixture, whose dropout keeps d products and m'' masks
    (`dropout_copies`).
    """
    model, train = run.model, run.train
    copies = 2 + sum(dropout_copies(model, rate)[1] for rate in (model.dropout_embed, model.dropout_out))
    if model.n_softmax > 1:
        copies += model.n_softmax * (2 + sum(dropout_copies(model, model.dropout_latent)))
    tokens = train.tokens_per_step // train.micro_batches
    return 4 * tokens * copies * model.d_model


def _logits(run: RunConfig, vocab_size: int, compiled: bool) -> int:
    """Return the bytes of the tensors of the softmax.

    The bytes are f*3*B*T*V for logits, log-probabilities and their gradient, K times as much for a mixture;
    log-probabilities count for each segment of a step. A compiled loss has no log-probabilities, and its f is that of
    the matrix products. With half or last losses T is the number of positions that count; with cutoffs V is the
    shortlist. If B*T*V*K is above `txl.models.cross_entropy.MAX_LOGITS`, 2 * MAX_LOGITS replaces 3*B*T*V*K. Each
    classifier of auxiliary losses adds f*B*T*V.
    """
    model, train = run.model, run.train
    tokens = train.batch_size // train.micro_batches * Objective(train.loss).counted(train.segment)
    head = model.cutoffs[0] if model.cutoffs else vocab_size
    number = tokens * head * model.n_softmax
    classifiers = 4 * model.n_auxiliary * tokens * head  # their loss is never compiled
    if number > MAX_LOGITS:  # in chunks; the forward pass frees its chunks before the backward pass
        return classifiers + 4 * 2 * max(MAX_LOGITS, head)
    width = 2 if compiled and train.dtype == "bfloat16" else 4
    return classifiers + width * number * (train.backprop_segments + (1 if compiled else 2))
