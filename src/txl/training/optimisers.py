"""Optimisers, all PyTorch's own, and their state as named tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from txl.config import TrainConfig
from txl.errors import UserError


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam or AdamW; weight decay acts on matrices only, not on biases, LayerNorms, u and v."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and name.rpartition(".")[2] not in ("u", "v")
        (matrices if is_matrix else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state; `load_optimizer_tensors` is the inverse."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": value for number, values in state.items() for key, value in values.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put the state back.

    Raises:
        UserError: if it belongs to another model.
    """
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        if number >= len(parameters) or values["exp_avg"].shape != parameters[number].shape:
            raise UserError("the optimiser's state in the checkpoint belongs to another model")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
