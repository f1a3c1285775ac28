"""Optimisers, all PyTorch's own, and their state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from txl.config import TrainConfig
from txl.errors import UserError


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD; weight decay acts on matrices only, not on biases, LayerNorms, u and v.

    Every group of parameters has an `lr_factor`, by which its learning rate differs from the schedule's.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and name.rpartition(".")[2] not in ("u", "v")
        decay = config.weight_decay if is_matrix else 0.0
        factor = config.embedding_lr_factor if name.startswith("embedding.tables.") else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    divided = [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        for (decay, factor), parameters in groups.items()
    ]
    if config.optimizer == "sgd":
        momentum, is_sharded = config.momentum, any(hasattr(each, "to_local") for each in model.parameters())
        return torch.optim.SGD(
            divided,
            lr=config.learning_rate,
            momentum=momentum,
            nesterov=momentum > 0,
            # PyTorch has no fused update of shards for this one, and none with momentum once a parameter has its first
            # gradient later than others (a tail cluster that no target was in). None: the best of its other ways.
            fused=(momentum == 0 and not is_sharded) or None,
        )
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(
        divided,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update, times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state, as PARAMETER/KEY; `load_optimizer_tensors` is the inverse."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the state back.

    Raises:
        UserError: if it belongs to another model.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        by_name.setdefault(name, {})[what] = value
    parameters = dict(model.named_parameters())
    for name, values in by_name.items():
        shapes = {value.shape for key, value in values.items() if key != "step"}  # which is a number
        alike = values.keys() == next(iter(by_name.values())).keys()
        if name not in parameters or not shapes <= {parameters[name].shape} or not alike:
            raise UserError("the optimiser's state in the checkpoint belongs to another model")
    # The optimiser counts parameters group by group; its own loader takes care of devices and types.
    names = {id(parameter): name for name, parameter in parameters.items()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: by_name[name] for number, name in enumerate(ordered) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
