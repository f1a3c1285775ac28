"""Updates of the weights: Adam, AdamW, SGD, and Muon with AdamW; their state as named tensors.

An update takes the flag `skipped` as a tensor, so that a device can leave out an update that is not finite without the
host reading the flag, also in a recorded CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.sgd import sgd

from txl.config import TrainConfig
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.runs.environment import multiplies_bfloat16
from txl.training.parallel import full_tensor, is_sharded

_MUON_MOMENTUM = 0.95  # in all published recipes
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest quintic at 0 that keeps values near 1
_NEWTON_SCHULZ_STEPS = 5
_CLIP_EPSILON = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`
_DOUBLE_AFTER = 2000  # finite updates in a row after which the scale of the loss is doubled, as in `torch.amp`
_EPSILON = 1e-7  # smallest norm that a matrix is divided by
_MOST_AT_ONCE = 1 << 22  # elements above which a batch of matrices is orthogonalised, to bound the batch's memory


@dataclass
class Group:
    """Parameters that are updated alike."""

    parameters: list[nn.Parameter]
    weight_decay: float
    lr_factor: float  # factor of the schedule's learning rate
    matrices: tuple[int, int] | None = None  # Muon: matrices below and beside one another in each parameter
    rate: float | Tensor = 0.0  # a tensor in recorded steps, because a graph keeps the value of a Python number


class LossScale:
    """The factor of the loss in float16, so that small gradients do not become 0 (Micikevicius et al. 2018).

    It is halved, down to 1, by an update whose loss or gradient is not finite, and doubled after 2000 updates in a row
    that are. Both numbers are on the device, because recorded steps change them.
    """

    def __init__(self, device: torch.device):
        self.factor = torch.full((), 2.0**16, device=device)
        self.n_finite = torch.zeros((), device=device)  # updates in a row since the factor changed

    def update(self, bad: Tensor, void: Tensor | None) -> Tensor:
        """Change the factor after an update, unless `void` is set; return whether it was `bad` and could be halved."""
        could_halve = bad & (self.factor > 1)
        n_finite = (self.n_finite + 1).masked_fill(bad, 0)
        doubled = self.factor * (1 + (n_finite >= _DOUBLE_AFTER).float())
        factor = torch.where(bad, (self.factor / 2).clamp(min=1.0), doubled)
        n_finite = torch.where(n_finite >= _DOUBLE_AFTER, 0.0, n_finite)
        if void is not None:
            factor, n_finite = torch.where(void, self.factor, factor), torch.where(void, self.n_finite, n_finite)
            could_halve = could_halve & ~void
        self.factor.copy_(factor)
        self.n_finite.copy_(n_finite)
        return could_halve

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name, as a checkpoint stores it."""
        return {"factor": self.factor, "n_finite": self.n_finite}


class Optimizer:
    """Adam, AdamW, SGD or Muon (Jordan et al. 2024); Muon updates the layers' matrices, AdamW all other parameters.

    Muon's updates have the root mean square of Adam's (Liu et al. 2025), so that both have the same learning rate and
    weight decay. All parameters are on one device.
    """

    def __init__(self, groups: list[Group], config: TrainConfig):
        self.groups, self._config = groups, config
        # Moments of each parameter by name, and its number of updates as `step`, from its first gradient on.
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._is_sharded = any(is_sharded(parameter) for group in groups for parameter in group.parameters)
        device = groups[0].parameters[0].device
        self._muon_dtype = torch.bfloat16 if multiplies_bfloat16(str(device)) else torch.float32
        # Whether the device leaves out an update by itself. PyTorch's fused updates can, but not of shards nor with
        # SGD's momentum. Muon could everywhere; on a CPU, reading the flag costs nothing and its arithmetic does.
        can_skip = {"sgd": config.momentum == 0, "muon": device.type != "cpu"}
        self.skips_on_device = can_skip.get(config.optimizer, True) and not self._is_sharded
        # A GPU clips gradients in the pass that updates the weights: PyTorch's fused Adam divides them by a float32.
        self._divides = device.type != "cpu" and config.optimizer != "sgd" and not self._is_sharded
        self._divides &= config.dtype != "float64"
        self.loss_scale = LossScale(device) if config.dtype == "float16" else None
        if config.capture:
            for group in groups:
                group.rate = torch.tensor(config.learning_rate, device=device)
        self.set_rate(config.learning_rate)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update: in each group `rate` times `lr_factor`."""
        for group in self.groups:
            if isinstance(group.rate, Tensor):
                group.rate.fill_(rate * group.lr_factor)
            else:
                group.rate = rate * group.lr_factor

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], largest: float) -> tuple[Tensor, Tensor | None]:
        """Remove the loss's scale from all gradients, and clip them to a largest norm; 0: do not clip them.

        Returns:
            Norm of all gradients before clipping, and the number by which `step` has to divide the gradients. None: the
            gradients are clipped.
        """
        largest, parameters = largest or math.inf, list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale = None if self.loss_scale is None else self.loss_scale.factor
        if not self._divides:  # without clipping, the call still returns the norm
            if scale is not None:
                torch._foreach_div_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
            return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, largest)), None
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        norm = norm if scale is None else norm / scale
        divisor = None if largest == math.inf else ((norm + _CLIP_EPSILON) / largest).clamp(min=1.0)
        if scale is not None:  # a copy, because the scale changes before the gradients are divided
            divisor = scale.clone() if divisor is None else divisor * scale
        return norm, divisor

    @torch.no_grad()
    def step(self, skipped: Tensor | None = None, divisor: Tensor | None = None) -> None:
        """Update all parameters that have a gradient, unless `skipped` (a bool without dimension) is true.

        The gradients are divided by `divisor` (see `clip`) first.
        """
        if skipped is not None and not self.skips_on_device:
            if bool(skipped):  # waits for the device
                return
            skipped = None
        found_inf = None if skipped is None else skipped.float()  # mixed precision's name for a flag to skip
        for group in self.groups:
            parameters = [parameter for parameter in group.parameters if parameter.grad is not None]
            if group.matrices is not None:
                self._muon(parameters, group, skipped, divisor)
            elif self._config.optimizer == "sgd":
                self._sgd(parameters, group, found_inf)
            else:
                self._adam(parameters, group, found_inf, divisor)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None

    def _adam(
        self, parameters: list[nn.Parameter], group: Group, found_inf: Tensor | None, divisor: Tensor | None
    ) -> None:
        if not parameters:
            return
        config = self._config
        for parameter in parameters:
            if parameter not in self.state:
                step = torch.zeros((), device=parameter.device)
                moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": step, **moments}
        first, second, steps = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        if found_inf is None:
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        else:  # without `alpha`, PyTorch would read the tensor, and wait for the device
            torch._foreach_add_(steps, 1 - found_inf, alpha=1)  # pyright: ignore[reportPrivateImportUsage]
        update: Any = torch._fused_adam_ if config.optimizer == "adam" else torch._fused_adamw_  # pyright: ignore
        update(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            first,
            second,
            [],
            steps,
            lr=group.rate,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=group.weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )

    def _sgd(self, parameters: list[nn.Parameter], group: Group, found_inf: Tensor | None) -> None:
        assert isinstance(group.rate, float)
        momentum = self._config.momentum
        buffers = [self.state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]
        sgd(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            buffers,
            # PyTorch's fused SGD does not serve shards, nor momentum if a parameter has its first gradient later than
            # others (a tail cluster without targets). None: PyTorch chooses the best of its other implementations.
            fused=(momentum == 0 and not self._is_sharded) or None,
            found_inf=found_inf,
            weight_decay=group.weight_decay,
            momentum=momentum,
            lr=group.rate,
            dampening=0.0,
            nesterov=momentum > 0,
            maximize=False,
        )
        for parameter, buffer in zip(parameters, buffers, strict=True):
            if buffer is not None:
                self.state[parameter] = {"momentum_buffer": buffer}

    def _muon(
        self, parameters: list[nn.Parameter], group: Group, skipped: Tensor | None, divisor: Tensor | None
    ) -> None:
        """Update the matrices in batches of one shape: one after another, small matrices take twice as long."""
        assert group.matrices is not None
        batches: dict[torch.Size, list[list[Tensor]]] = {}
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter.detach())}
            momentum, gradient = self.state[parameter]["momentum_buffer"], parameter.grad
            assert gradient is not None
            rows, columns = group.matrices
            for of_row in zip(*(tensor.chunk(rows) for tensor in (parameter, gradient, momentum)), strict=True):
                for tensors in zip(*(tensor.chunk(columns, dim=1) for tensor in of_row), strict=True):
                    # The product X X^T is smaller for a wide X.
                    is_wide = tensors[0].shape[0] <= tensors[0].shape[1]
                    wide = [tensor if is_wide else tensor.T for tensor in tensors]
                    batches.setdefault(wide[0].shape, []).append(wide)
        for shape, batch in batches.items():
            size = _MOST_AT_ONCE // shape.numel() + 1
            for first in range(0, len(batch), size):
                self._update_matrices(batch[first : first + size], group, skipped, divisor)

    def _update_matrices(
        self, batch: list[list[Tensor]], group: Group, skipped: Tensor | None, divisor: Tensor | None
    ) -> None:
        """Update matrices [I,O] of one shape, I <= O, each given with its gradient and its momentum."""
        matrices, gradients, momenta = (list(tensors) for tensors in zip(*batch, strict=True))
        momentum, gradient = torch.stack(momenta), torch.stack(gradients)
        if divisor is not None:
            gradient = gradient / divisor
        if skipped is not None:
            # The momentum serves as gradient: it is finite, it stays as it is, and the move is multiplied by 0.
            gradient = torch.where(skipped, momentum, gradient)
        momentum = momentum.lerp(gradient, 1 - _MUON_MOMENTUM)
        torch._foreach_copy_(momenta, list(momentum.unbind()))  # pyright: ignore[reportPrivateImportUsage]
        nesterov = gradient.lerp(momentum, _MUON_MOMENTUM)
        if nesterov.dtype != torch.float64:
            nesterov = nesterov.to(self._muon_dtype)
        moves = orthogonalised(nesterov)
        scale = math.sqrt(moves.shape[-1])  # 0.2 times this gives a move the root mean square of Adam's
        if skipped is None:
            for matrix, move in zip(matrices, moves, strict=True):
                matrix.mul_(1 - group.rate * group.weight_decay)
                matrix.add_(move, alpha=-(group.rate * 0.2 * scale))
            return
        rate = torch.where(skipped, 0.0, group.rate)
        torch._foreach_mul_(matrices, 1 - rate * group.weight_decay)  # pyright: ignore[reportPrivateImportUsage]
        moves = moves.to(momentum.dtype) * (rate * (0.2 * scale))
        torch._foreach_sub_(matrices, list(moves.unbind()))  # pyright: ignore[reportPrivateImportUsage]


def orthogonalised(matrices: Float[Tensor, "N I O"]) -> Float[Tensor, "N I O"]:
    """Return approximately U V^T for each matrix U S V^T, I <= O, by Newton-Schulz iterations (Jordan et al. 2024).

    An iteration is X <- a X + (b X X^T + c (X X^T)^2) X, which moves all singular values of X towards 1.
    """
    a, b, c = _NEWTON_SCHULZ
    # The iterations need singular values of at most about 1; no singular value exceeds the Frobenius norm.
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=_EPSILON)[:, None, None]
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def build_optimizer(model: FamilyModel, config: TrainConfig) -> Optimizer:
    """Build the optimiser of a model; weight decay acts on matrices only, not on biases, norms, u and v."""
    matrices = model.layer_matrices() if config.optimizer == "muon" else {}
    groups: dict[tuple[float, float, tuple[int, int] | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and name.rpartition(".")[2] not in ("u", "v")
        decay = config.weight_decay if is_matrix else 0.0
        factor = config.embedding_lr_factor if name.startswith("embedding.tables.") else 1.0
        groups.setdefault((decay, factor, matrices.get(name)), []).append(parameter)
    return Optimizer([Group(parameters, *settings) for settings, parameters in groups.items()], config)


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimiser's state as tensors named PARAMETER/KEY; `load_optimizer_tensors` is the inverse."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the result of `optimizer_tensors`; a state of another model or optimiser raises UserError."""
    parameters = dict(model.named_parameters())
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    other = UserError("the optimiser's state in the checkpoint belongs to another model")
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (moment != "step" and value.shape != parameter.shape):
            raise other
        dtype = torch.float32 if moment == "step" else parameter.dtype
        state.setdefault(parameter, {})[moment] = value.to(parameter.device, dtype)
    for group in optimizer.groups:
        if len({frozenset(state[parameter]) for parameter in group.parameters if parameter in state}) > 1:
            raise other
    optimizer.state = state
