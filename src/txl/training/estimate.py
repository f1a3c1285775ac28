"""Estimated costs of a configuration: parameters by part, tokens per step, and memory."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl.attention import BACKENDS
from txl.config import ModelConfig, RunConfig, TrainConfig
from txl.files import JsonObject
from txl.models import build_model
from txl.models.loss import Objective, TailRows
from txl.native.attention import why_not_training


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
    inner = {"feed_forward": "feed-forward", "attention": "attention"}
    inner |= {"lstm": "recurrent layers", "convolution": "recurrent layers"}
    for name, parameter in model.named_parameters():
        names = name.split(".")
        if names[-1] in ("u", "v"):
            part = "u and v"
        elif names[-1] == "distances":
            part = "positions"
        elif names[-2:-1] and names[-2].endswith("norm"):
            part = "layer norm"
        else:
            part = next((inner[name] for name in names if name in inner), names[0])
            part = part if part in parts else "softmax"
        parts[part] += parameter.numel()
    return {part: count for part, count in parts.items() if count}


def estimate(run: RunConfig, vocab_size: int, device: str | None = None) -> Costs:
    """Estimate parameters, tokens per step, and bytes of all tensors that exist at once during training.

    One part of a training step is computed with tensors that have shapes and no numbers (`_measured`), and the sizes of
    these tensors are counted. Weights, gradients and the optimiser's state are counted from the parameters. The backend
    that the attentions `auto` and `fastest` select depends on the device.

    The tests compare the estimate with measurements. Not counted are the interpreter and its libraries (0.3 GB), and
    memory lost to fragmentation in the allocator (on a CPU, where `txl.devices` lets glibc keep freed memory, 0.1 to
    0.8 of the total was observed).
    """
    train, shape = run.train, run.model
    with torch.device("meta"):
        model = build_model(run.model, vocab_size, device, getattr(torch, train.dtype))
    parameters = parameters_by_part(model)
    total = sum(parameters.values())
    if model.attention_name in BACKENDS:
        # A backend that a CPU can trace, and that keeps as much: neither `compiled` nor `triton` keeps scores.
        compiled = "compiled" if why_not_training("cpu", torch.float32) is None else "shifted"
        stand_ins = {"compiled": compiled, "triton": compiled}
        attention = stand_ins.get(model.attention_name, model.attention_name)
        shape = dataclasses.replace(shape, attention=attention)  # pyright: ignore[reportCallIssue] (has backends)
    with torch.random.fork_rng(devices=[]):
        targets = ranked_tokens(vocab_size, train.batch_size // train.micro_batches, train.segment)
    rows = model.tail_rows(targets, train.loss)  # without them, sizes would depend on the numbers of tensors
    if shape.n_layer <= 3 or shape.constant_state:
        step = _measured(shape, train, vocab_size, rows)
    else:  # the layers of a Transformer are alike, and tracing one of them takes 0.1 s
        two, three = (_measured(dataclasses.replace(shape, n_layer=n), train, vocab_size, rows) for n in (2, 3))
        step = two + (shape.n_layer - 2) * (three - two)
    state, activations, peak = (int(number) for number in step)

    # oneDNN keeps activations and scratch of LSTMs in a workspace and not in tensors. Measured on a CPU: beside the
    # outputs, four gates for each token and unit; in the backward pass of one layer, nine numbers for each token and
    # unit, and two copies of its weights.
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    gates = [4 * (train.tokens_per_step // train.micro_batches) * lstm.hidden_size for lstm in lstms]
    weights = max((sum(weight.numel() for weight in lstm.parameters()) for lstm in lstms), default=0)
    scratch = 4 * (9 * max(gates, default=0) // 4 + 2 * weights)

    matrices = model.layer_matrices() if train.optimizer == "muon" else {}
    moments = 2 * total - sum(model.get_parameter(name).numel() for name in matrices)
    if train.optimizer == "sgd":
        moments = total if train.momentum > 0 else 0
    gradients = 4 * total
    # Autocast keeps them to the end of the forward pass.
    copies = 2 * total if train.dtype in ("bfloat16", "float16") else 0
    memory = {
        "weights": 4 * total + copies,
        "gradients": gradients,
        "optimiser": 4 * moments,
        **({"averaged weights": 4 * total} if train.averages else {}),
        **({"recurrent memory": state} if state else {}),
        "activations": max(0, activations - copies) + 4 * sum(gates),
        "scratch": max(0, peak - activations - gradients, scratch),
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


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of tensors that are made within its context and still exist; views count as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def ranked_tokens(vocab_size: int, batch_size: int, segment: int) -> Tensor:
    """Draw token ids in the proportions of Zipf's law, in random order: int64 [B,T].

    The proportions are exact instead of sampled, so that the memory of an adaptive softmax grows evenly with the
    length. Ids are ranks; half of all tokens are among the sqrt(V) most frequent ones.
    """
    n_token = batch_size * segment
    quantiles = (torch.randperm(n_token) + 0.5) / n_token
    return (vocab_size**quantiles).long().sub_(1).clamp_(0, vocab_size - 1).view(batch_size, segment)


def _measured(model: ModelConfig, train: TrainConfig, vocab_size: int, rows: TailRows | None) -> np.ndarray:
    """Measure one part of a step on fake tensors: the same code and the same shapes, without numbers and memory.

    Returns:
        Bytes of the states of all lanes before and after the step; bytes that the forward pass keeps for the backward
        pass; and the peak beside weights and states, which also holds gradients.
    """
    lanes = train.batch_size // train.micro_batches
    with FakeTensorMode(), LiveBytes() as live:
        built = build_model(model, vocab_size).train()
        weights = live.now
        state = built.init_state(lanes).filled_with_noise()
        before = live.now - weights
        tokens = torch.zeros(lanes, train.segment * train.backprop_segments, dtype=torch.int64)
        objective = Objective(train.loss, 0.0, rows, train.step_lengths)
        with torch.autocast("cpu", torch.bfloat16, enabled=train.dtype in ("bfloat16", "float16")):
            loss, penalty, state = built.training_terms(tokens, tokens, state, objective)
        kept = live.now - weights - before
        (loss + penalty).backward()
        storages = [tensor.untyped_storage() for tensor in state.to_tensors().values() if tensor.is_floating_point()]
        after = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return np.array([(before + after) * train.micro_batches, kept - after, live.peak - weights - before - after])
