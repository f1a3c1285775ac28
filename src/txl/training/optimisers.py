"""Updates of the weights: optimisers, and their state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from txl.config import TrainConfig
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.runs.environment import multiplies_bfloat16
from txl.training.parallel import is_sharded

_MUON_MOMENTUM = 0.95
"""Momentum of Muon in all published recipes."""
_MOST_AT_ONCE = 1 << 22
"""Number of elements above which a batch of matrices is orthogonalised, to bound the memory of the batch."""


class _Muon(torch.optim.Muon):
    """PyTorch's Muon, for parameters that may hold several matrices: each matrix is orthogonalised by itself.

    Matrices of the same shape are orthogonalised together, in batched products. PyTorch's Muon processes one matrix
    after another, which for small matrices on several threads of a CPU takes more than twice as long. The products are
    in bfloat16, as in PyTorch, if the device has instructions for it, else in float32; of float64 weights in float64.

    The key `matrices` of a group holds the number of matrices in each of its parameters, below and beside one another.
    The momentum has the shape of the parameter.

    On a GPU, `found_inf` (a number without dimension on the device, as for PyTorch's fused optimisers) skips the update
    if it is not 0; the host does not read it.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        super().__init__(groups, lr=lr, momentum=_MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        devices = {parameter.device for group in groups for parameter in group["params"]}
        self._low = {each: multiplies_bfloat16(str(each)) for each in devices}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_low": self._low}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all matrices that have a gradient."""
        if self.found_inf is not None:
            self._step_unless(self.found_inf != 0)
            return
        for group in self.param_groups:
            batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for matrix, grad, momentum in self._matrices(group):
                momentum.lerp_(grad, 1 - group["momentum"])
                shorter, longer = sorted(matrix.shape)
                batch = batches.setdefault((shorter, longer), [])
                batch.append((matrix, grad.lerp(momentum, group["momentum"])))  # Nesterov momentum
                if len(batch) * matrix.numel() > _MOST_AT_ONCE:
                    self._update(batches.pop((shorter, longer)), group)
            for batch in batches.values():
                self._update(batch, group)

    def _step_unless(self, skipped: Tensor) -> None:
        """Update all matrices unless `skipped` is true, with few launches: matrices of a shape move together."""
        for group in self.param_groups:
            batches: dict[tuple[int, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
            for matrix, grad, momentum in self._matrices(group):
                wide = (matrix, grad, momentum) if _is_wide(matrix) else (matrix.T, grad.T, momentum.T)
                batches.setdefault(wide[0].shape, []).append(wide)
            for shape, batch in batches.items():
                most = max(1, _MOST_AT_ONCE // math.prod(shape))
                for first in range(0, len(batch), most):
                    self._update_unless(skipped, batch[first : first + most], group)

    def _update_unless(
        self, skipped: Tensor, batch: list[tuple[Tensor, Tensor, Tensor]], group: dict[str, Any]
    ) -> None:
        """Update wide matrices of one shape, given with gradients and momenta, unless `skipped` is true."""
        matrices, grads, momenta = (list(each) for each in zip(*batch, strict=True))
        momentum = torch.stack(momenta)
        # If skipped, the momentum serves as gradient: it is finite, it stays as it is, and the move is multiplied by 0.
        grad = torch.where(skipped, momentum, torch.stack(grads))
        momentum = momentum.lerp(grad, 1 - group["momentum"])
        torch._foreach_copy_(momenta, list(momentum.unbind()))  # pyright: ignore[reportPrivateImportUsage]
        nesterov = grad.lerp(momentum, group["momentum"])
        moves = self._orthogonalised(nesterov, group)
        rate = torch.where(skipped, 0.0, group["lr"])
        if group["weight_decay"]:
            factor = 1 - rate * group["weight_decay"]
            torch._foreach_mul_(matrices, factor)  # pyright: ignore[reportPrivateImportUsage]
        # Moves get the root mean square of Adam's.
        moves = moves.to(momentum.dtype) * (rate * (0.2 * math.sqrt(momentum.shape[-1])))
        torch._foreach_sub_(matrices, list(moves.unbind()))  # pyright: ignore[reportPrivateImportUsage]

    def _orthogonalised(self, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        if matrices.dtype != torch.float64:
            matrices = matrices.to(torch.bfloat16 if self._low[matrices.device] else torch.float32)
        return orthogonalised(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _matrices(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each matrix with its gradient and its momentum, all as views of the stored tensors."""
        whole: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        self._init_group(group, *whole)
        rows, columns = group["matrices"]
        for tensors in zip(*whole, strict=True):
            of_rows = zip(*(each.chunk(rows) for each in tensors), strict=True)
            for parts in of_rows:
                yield from zip(*(each.chunk(columns, dim=1) for each in parts), strict=True)

    def _update(self, batch: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        """Update the matrices of a batch, which have one shape or its transpose."""
        wide = torch.stack([each if _is_wide(each) else each.T for _, each in batch])
        moves = self._orthogonalised(wide, group)
        rate = group["lr"] * 0.2 * math.sqrt(wide.shape[-1])  # moves get the root mean square of Adam's
        for (matrix, _), move in zip(batch, moves, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(move if _is_wide(matrix) else move.T, alpha=-rate)


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def orthogonalised(
    matrices: Float[Tensor, "N I O"], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Float[Tensor, "N I O"]:
    """Return approximately U V^T for each matrix U S V^T: Newton-Schulz iterations (Jordan et al. 2024).

    Args:
        matrices: matrices with at most as many rows I as columns O.
        coefficients: coefficients a, b and c of X <- a X + (b X X^T + c (X X^T)^2) X.
        steps: number of iterations.
        eps: smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for the layers' matrices (Jordan et al. 2024), AdamW for all other parameters, as one optimiser.

    Muon's updates have the root mean square of Adam's (`match_rms_adamw`, Liu et al. 2025), so that both have the same
    learning rate and weight decay.

    Args:
        groups: groups of parameters; Muon updates the groups with a key `matrices`.
        config: training configuration with the learning rate, and Adam's betas and epsilon.
    """

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig):
        rate = config.learning_rate
        muon = [group for group in groups if "matrices" in group]
        adam = [group for group in groups if "matrices" not in group]
        self._muon = _Muon(muon, rate)
        self._adam = torch.optim.AdamW(
            adam,
            lr=rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
            capturable=config.capture,
        )
        super().__init__([*muon, *adam], {})
        self._share()

    def _share(self) -> None:
        """Let Muon and AdamW use this optimiser's groups and state."""
        for part, is_muon in ((self._muon, True), (self._adam, False)):
            part.param_groups = [group for group in self.param_groups if ("matrices" in group) == is_muon]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_muon": self._muon, "_adam": self._adam}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """PyTorch's name for optimisers that skip an update by `found_inf`. On a CPU reading the flag costs nothing."""
        return all(each.device.type != "cpu" for group in self.param_groups for each in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters: to Muon if the group has `matrices`, else to AdamW."""
        part = self._muon if "matrices" in param_group else self._adam
        super().add_param_group({**part.defaults, "lr_factor": 1.0, **param_group})
        self._share()

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient, unless `found_inf` is set and not 0."""
        found_inf = getattr(self, "found_inf", None)
        for part in (self._muon, self._adam):
            part.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
            try:
                part.step()
            finally:
                part.found_inf = None  # pyright: ignore[reportAttributeAccessIssue]


def build_optimizer(model: FamilyModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Build Adam, AdamW, SGD, or Muon with AdamW; weight decay acts on matrices only, not on biases, norms, u and v.

    Every group of parameters has an `lr_factor`, by which the schedule's learning rate is multiplied.
    """
    matrices = model.layer_matrices() if config.optimizer == "muon" else {}
    groups: dict[tuple[float, float, tuple[int, int] | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and name.rpartition(".")[2] not in ("u", "v")
        decay = config.weight_decay if is_matrix else 0.0
        factor = config.embedding_lr_factor if name.startswith("embedding.tables.") else 1.0
        groups.setdefault((decay, factor, matrices.get(name)), []).append(parameter)
    divided: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        | ({} if stored is None else {"matrices": stored})
        for (decay, factor, stored), parameters in groups.items()
    ]
    if config.optimizer == "muon":
        return _recordable(MuonWithAdam(divided, config), config, model)
    if config.optimizer == "sgd":
        momentum, sharded = config.momentum, any(map(is_sharded, model.parameters()))
        return torch.optim.SGD(
            divided,
            lr=config.learning_rate,
            momentum=momentum,
            nesterov=momentum > 0,
            # PyTorch's fused SGD does not serve shards, nor momentum if a parameter has its first gradient later than
            # others (a tail cluster without targets). None: PyTorch chooses the best of its other implementations.
            fused=(momentum == 0 and not sharded) or None,
        )
    adaptive = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    made = adaptive[config.optimizer](
        divided,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
        capturable=config.capture,
    )
    return _recordable(made, config, model)


def _recordable(optimizer: torch.optim.Optimizer, config: TrainConfig, model: FamilyModel) -> torch.optim.Optimizer:
    """Return the optimiser; with `train.capture` its rates are tensors, which a recorded step reads."""
    if config.capture:  # `set_learning_rate` fills them
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(config.learning_rate, device=model.softmax.bias.device)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update: in each group `rate` times `lr_factor`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["lr_factor"])
        else:
            group["lr"] = rate * group["lr_factor"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimiser's state as tensors named PARAMETER/KEY; `load_optimizer_tensors` is the inverse."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load an optimiser's state from the result of `optimizer_tensors`."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        by_name.setdefault(name, {})[what] = value
    parameters = dict(model.named_parameters())
    # The optimiser numbers parameters group by group; `load_state_dict` converts devices and dtypes.
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    fits = by_name.keys() <= parameters.keys()
    for group in groups:
        fits &= len({frozenset(by_name[name]) for name in group if name in by_name}) <= 1  # the same keys in all
        for name in group:
            moments = [value for key, value in by_name.get(name, {}).items() if key != "step"]  # step: a number
            fits &= all(each.shape == parameters[name].shape for each in moments)
    if not fits:
        raise UserError("the optimiser's state in the checkpoint belongs to another model")
    ordered = [name for group in groups for name in group]
    state = {number: by_name[name] for number, name in enumerate(ordered) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
