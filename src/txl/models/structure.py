"""A view of a model for evaluation, and a record of a model that detects changes.

Nothing here changes a model. Evaluation, generation and analysis use a model through `evaluation_view`, so that the
model can be trained or used elsewhere at the same time.
"""

from __future__ import annotations

import functools
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global

from txl.models.compiled_step import LayerWeights

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_TENSORS = ("_parameters", "_buffers")
# Hooks of a module by the pass that calls them.
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_version, _training = attrgetter("_version"), itemgetter("training")


def evaluation_view(model: ModuleT, dtype: torch.dtype | None = None) -> ModuleT:
    """Return a view of the model in evaluation mode; the model itself does not change.

    The view is a second tree of modules with `training` false throughout. It shares parameters, buffers and hooks with
    the model, so it needs no memory for them and follows every update of the weights. Attributes set on the view do not
    affect the model. Layers that `torch.compile` compiled for training run eagerly in the view.

    With `dtype`, floating-point parameters and buffers are not shared but converted copies.
    """
    views: dict[int, nn.Module] = {}
    converted: dict[int, Tensor] = {}

    def in_dtype(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in converted:
            copy = tensor.detach().to(dtype)
            converted[id(tensor)] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
        return converted[id(tensor)]

    def viewed(module: nn.Module) -> nn.Module:
        if id(module) in views:
            return views[id(module)]
        view = views[id(module)] = object.__new__(type(module))
        own, original = vars(view), vars(module)
        own.update(original, training=False)
        own.pop("_compiled_call_impl", None)  # bound to the original module and its mode
        # Dictionaries of parameters and hooks are shared, so that the view follows the model; those of modules are not.
        own["_modules"] = {name: None if child is None else viewed(child) for name, child in module._modules.items()}
        for name, value in original.items():
            if type(value) is MethodType and value.__self__ is module:
                own[name] = MethodType(value.__func__, view)
        if dtype is not None:
            for kind in _TENSORS:
                own[kind] = {name: in_dtype(tensor) for name, tensor in original[kind].items()}
        return view

    return viewed(model)  # pyright: ignore[reportReturnType]


class Frozen:
    """A model as it is at one moment: its modules, parameters, buffers and hooks.

    Code that does not call every module (cached keys and values, compiled steps, the decode engine) must follow one
    rule: it may do so only with a record that names no `outsider`, and only as long as the record holds. `own` has the
    classes whose `forward` such code replaces; `nn.Module` stands for modules without a `forward`.
    """

    def __init__(self, model: nn.Module, own: frozenset[type]):
        self.model = model
        self.outsider = outsider(model, own)
        self.weights: LayerWeights | None = None  # for the compiled steps, kept here by the first of them
        self._vars: list[dict[str, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        # Every place from which a call of the model takes a module, a tensor or a method.
        places: list[tuple[dict[str, Any], str]] = []
        self._heard = _all_are_heard()
        for module in model.modules():
            attributes = vars(module)
            self._vars.append(attributes)
            self._hooks += [attributes[kind] for kind in _FORWARD]
            places += [(attributes[kind], key) for kind in ("_modules", *_TENSORS) for key in attributes[kind]]
            # A method may also be replaced on a single module: `module.forward = ...`.
            places += [(attributes, key) for key in ("forward", "attend") if key == "forward" or key in attributes]
        self._owners, self._names = zip(*places, strict=True)
        self._values = [*map(dict.get, self._owners, self._names)]
        self._counts = [*map(len, self._hooks)]
        self._tensors = [*{id(value): value for value in self._values if isinstance(value, Tensor)}.values()]
        # An inference tensor has no version, and only inference mode can change it.
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._contents = self._contents_now()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle or a copy of the record would be meaningless, so it becomes None

    def holds(self, hooks: bool = True) -> bool:
        """Return whether all modules, parameters, buffers and (with `hooks`) forward hooks are still the same.

        A change through `parameter.data` is not detected, because PyTorch does not count it as a new version.
        """
        # Asked for each segment and each decoded token, so the loops run in C.
        return (
            all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and (not hooks or ([*map(len, self._hooks)] == self._counts and _all_are_heard() == self._heard))
            and self._contents_now() == self._contents
        )

    def evaluates(self) -> bool:
        """Return whether every module is in evaluation mode."""
        return not any(map(_training, self._vars))

    def _contents_now(self) -> tuple[list[int], list[int]]:
        """Return the addresses and versions of all tensors: `model.to` changes the first, an optimiser the second."""
        return [*map(Tensor.data_ptr, self._tensors)], [*map(_version, self._counted)]


def outsider(model: nn.Module, own: frozenset[type], backward: bool = False) -> str | None:
    """Return a message about a module that must be called itself: its class is not in `own`, or it has a forward hook.

    With `backward`, a hook of the backward pass counts, too.
    """
    kinds = _FORWARD + _BACKWARD if backward else _FORWARD
    if _all_are_heard(kinds):
        return "every module has a hook"
    for name, module in model.named_modules():
        attributes, why = vars(module), None
        if "forward" in attributes or _home(type(module)) not in own:
            why = "is not a class of this model's modules"
        elif _any_listens(*[attributes[kind] for kind in kinds]):
            why = "has a hook"
        if why is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {why}"
    return None


@functools.cache
def _home(kind: type) -> type:
    """Return the class that defines `forward`; it stays the same under sharding, which makes a subclass."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


def _any_listens(*kinds: dict[int, Any]) -> bool:
    """Return whether a hook is the user's, and not one of PyTorch's own, which shard modules or count operations."""
    return any(kinds) and any(
        not type(getattr(hook, "__self__", None)).__module__.startswith("torch.")
        for hook in chain(*(hooks.values() for hooks in kinds))
    )


def _all_are_heard(kinds: tuple[str, ...] = _FORWARD) -> bool:
    """Return whether a global hook of the user is called for every module."""
    return _any_listens(*(getattr(_global, f"_global{kind}") for kind in kinds))
