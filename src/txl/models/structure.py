"""A view of a model for evaluation, and a record of a model's modules that detects changes.

Nothing here changes a model. Evaluation, generation and analysis use a model through `evaluation_view`, so that the
model can be trained or used elsewhere at the same time. Code that replaces calls of modules (cached keys and values,
compiled steps, the decode engine) keeps a `Structure` and checks that this record still holds.
"""

from __future__ import annotations

import functools
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_version, _training = attrgetter("_version"), itemgetter("training")


def evaluation_view(model: ModuleT, dtype: torch.dtype | None = None) -> ModuleT:
    """Return a view of the model in evaluation mode; the model itself does not change.

    The view is a second tree of modules with `training` false throughout. It shares parameters, buffers and hooks with
    the model, so it needs no memory for them and follows every update of the weights. Attributes set on the view do not
    affect the model. Layers that `torch.compile` compiled for training run eagerly in the view.

    Args:
        model: any module, in any mode.
        dtype: dtype of the view's floating-point parameters and buffers, which are then converted copies; None: they
            are shared with the model.
    """
    views: dict[int, nn.Module] = {}
    converted: dict[int, Tensor] = {}

    def in_dtype(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in converted:
            made = tensor.detach().to(dtype)
            converted[id(tensor)] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
        return converted[id(tensor)]

    def viewed(module: nn.Module) -> nn.Module:
        if id(module) in views:
            return views[id(module)]
        view = views[id(module)] = object.__new__(type(module))
        own, given = vars(view), vars(module)
        own.update(given, training=False)
        own.pop("_compiled_call_impl", None)  # bound to the original module and its mode
        own["_modules"] = {name: None if child is None else viewed(child) for name, child in module._modules.items()}
        for name, value in given.items():
            if type(value) is MethodType and value.__self__ is module:
                own[name] = MethodType(value.__func__, view)
        if dtype is not None:
            for kind in ("_parameters", "_buffers"):
                own[kind] = {name: in_dtype(tensor) for name, tensor in given[kind].items()}
        return view

    return viewed(model)  # pyright: ignore[reportReturnType]


class Structure:
    """Record of a model's modules, parameters, buffers and hooks at the time of construction.

    Args:
        model: model to record.
        own: classes whose `forward` other code may compute; `nn.Module` stands for modules without a `forward`.
    """

    def __init__(self, model: nn.Module, own: frozenset[type] = frozenset()):
        self.model = model
        self.outsider: str | None = None
        """Message about a module that must be called itself: its class is not in `own`, or it has a forward hook."""
        self._vars: list[dict[str, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        owners: list[dict[str, Any]] = []
        names: list[str] = []
        tensors: dict[int, Tensor] = {}
        knows = functools.cache(lambda kind: _home(kind) in own)
        self._heard = _all_are_heard()
        if self._heard:
            self.outsider = "every module has a forward hook"
        waiting, seen = [model], set()
        while waiting:  # `model.modules()` takes several times as long
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            given = vars(module)
            seen.add(id(module))
            waiting += reversed(given["_modules"].values())
            self._vars.append(given)
            hooks = (given["_forward_hooks"], given["_forward_pre_hooks"])
            self._hooks += hooks
            for kind in ("_modules", "_parameters", "_buffers"):
                owner = given[kind]
                if owner:
                    owners += repeat(owner, len(owner))
                    names += owner
                    if kind != "_modules":
                        tensors |= {id(each): each for each in owner.values() if each is not None}
            # A method may also be replaced on a single module: `module.forward = ...`.
            replaceable = [name for name in ("forward", "attend") if name == "forward" or name in given]
            owners += repeat(given, len(replaceable))
            names += replaceable
            if self.outsider is None:
                if "forward" in given or not knows(type(module)):
                    self.outsider = f"{_named(model, module)} is not a class of this model's modules"
                elif _any_listens(*hooks):
                    self.outsider = f"{_named(model, module)} has a forward hook"
        self._owners, self._names = owners, names
        self._values = [*map(dict.get, owners, names)]  # kept alive, so that no new object gets one of these ids
        self._ids = [*map(id, self._values)]
        self._counts = [*map(len, self._hooks)]
        self._tensors = [*tensors.values()]
        # An inference tensor has no version, and only inference mode can change it.
        self._counted = [each for each in self._tensors if not each.is_inference()]
        self._addresses, self._versions = self._now()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle or a copy of the record would be meaningless, so it becomes None

    def holds(self, hooks: bool = True) -> bool:
        """Return whether all modules, parameters and buffers are still the same objects with the same values.

        With `hooks`, the forward hooks must be unchanged too. A change through `parameter.data` is not detected,
        because PyTorch does not count it as a new version.
        """
        return (
            [*map(id, map(dict.get, self._owners, self._names))] == self._ids
            and (not hooks or ([*map(len, self._hooks)] == self._counts and _all_are_heard() == self._heard))
            and self._now() == (self._addresses, self._versions)
        )

    def evaluates(self) -> bool:
        """Return whether every module is in evaluation mode."""
        return not any(map(_training, self._vars))

    def change(self) -> str:
        """Return a description of the first change found since the record was made."""
        for owner, name, value in zip(self._owners, self._names, self._values, strict=True):
            if owner.get(name) is not value:
                return f"{self._place(owner)}{name} was replaced"
        if self._now() != (self._addresses, self._versions):
            return "parameter values have changed"
        return "a forward hook was added or removed"

    def _now(self) -> tuple[list[int], list[int]]:
        return [*map(Tensor.data_ptr, self._tensors)], [*map(_version, self._counted)]

    def _place(self, owner: dict[str, Any]) -> str:
        for name, module in self.model.named_modules(prefix="model"):
            given = vars(module)
            if any(owner is each for each in (given, given["_modules"], given["_parameters"], given["_buffers"])):
                return f"{name}."
        return ""


def _home(kind: type) -> type:
    """Return the class that defines `forward`; it stays the same under sharding, which makes a subclass."""
    return next(each for each in kind.__mro__ if "forward" in vars(each))


def _any_listens(*kinds: dict[int, Any]) -> bool:
    """Return whether a hook is the user's, and not one of PyTorch's own, which shard modules or count operations."""
    return any(kinds) and any(
        not type(getattr(hook, "__self__", None)).__module__.startswith("torch.")
        for hook in chain(*(each.values() for each in kinds))
    )


def _all_are_heard() -> bool:
    """Return whether a global hook of the user is called for every module."""
    return _any_listens(_global._global_forward_hooks, _global._global_forward_pre_hooks)


def _named(model: nn.Module, module: nn.Module) -> str:
    """Return the name and class of a module in a model."""
    name = next((name for name, each in model.named_modules() if each is module), "")
    return f"{name or 'the model'} ({type(module).__name__})"
