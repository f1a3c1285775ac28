"""Read pickles from outside without running anything of theirs.

A pickle is a program: it names functions and calls them. Here a name either stands on a short list of harmless ones, or
belongs to a module whose classes are replaced by inert stand-ins that only keep their attributes, or the whole file is
refused by that name. Nothing is ever imported because a file asks for it.

The pure-Python unpickler is used, not the C one: every operation can be overridden, and its memo is a dictionary, which
no index in the file can blow up.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar

STAND_IN_MODULES = (
    "mem_transformer",
    "transformer_xl",
    "proj_adaptive_softmax",
    "log_uniform_sampler",
    "adaptive_softmax",
    "vocabulary",
    "data_utils",
    "data_parallel",
    "fp16_opt",
    "exp_utils",
    "utils",
    "torch.nn",
    "apex",
    "lamb",
    "argparse",
    "transformers",
    "pytorch_transformers",
    "pytorch_pretrained_bert",
    "numpy",
    "__main__",
)
"""Modules (with all below them) of the implementations whose classes files may hold; they are never imported."""


class UnsafePickle(Exception):
    """A pickle that is damaged, or names what is on no list."""


class StandIn:
    """Keeps the attributes of an object whose class is not run."""

    origin = "?"
    """Module and name of the class it stands for."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the pickled object; called by the class, as an object may have one of this name."""
        return self.__dict__.get(name, default)


def stand_in(module: str, name: str) -> type[StandIn]:
    """Return a class of stand-ins for one class."""

    class Named(StandIn):
        origin = f"{module}.{name}"

    return Named


def _encoded(text: object, encoding: object = "latin1") -> bytes:
    """Stand in for `_codecs.encode`, by which Python 3 writes bytes in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise UnsafePickle("bytes in an unknown encoding")
    return text.encode("latin1")


def _plain_dict(*args: Any) -> dict[object, object]:
    """Return a dictionary in place of an OrderedDict or Counter: of a list of pairs, a mapping, or nothing."""
    return dict(*args) if args else {}


HARMLESS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): _plain_dict,
    ("collections", "Counter"): _plain_dict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("_codecs", "encode"): _encoded,
}


_PurePython: Any = vars(pickle)["_Unpickler"]


class SafeUnpickler(_PurePython):
    """Reads one pickle; `load` returns plain values and stand-ins.

    Args:
        file: an open binary file.
        names: further (module, name) pairs and what they mean.
        persistent: resolves persistent ids (torch's storages); None: there may be none.
    """

    def __init__(
        self,
        file: IO[bytes] | mmap.mmap,
        names: Mapping[tuple[str, str], object] | None = None,
        persistent: Callable[[object], object] | None = None,
    ):
        super().__init__(file, encoding="latin1")
        self._names = {**HARMLESS, **(names or {})}
        self._persistent = persistent
        self._stand_ins: dict[tuple[str, str], type[StandIn]] = {}

    def find_class(self, module: object, name: object) -> object:
        """Return the stand-in or function for a name.

        Raises:
            UnsafePickle: if it is on no list.
        """
        key = (str(module), str(name))
        if key in self._names:
            return self._names[key]
        if any(key[0] == known or key[0].startswith(known + ".") for known in STAND_IN_MODULES):
            if key not in self._stand_ins:
                self._stand_ins[key] = stand_in(*key)
            return self._stand_ins[key]
        raise UnsafePickle(f"it asks for {key[0]}.{key[1]}, which no checkpoint of a Transformer-XL needs")

    def get_extension(self, code: int) -> None:
        """Refuse copyreg's extensions, which are a process's own."""
        raise UnsafePickle(f"it asks for the extension number {code}, which no checkpoint needs")

    def persistent_load(self, pid: object) -> object:
        """Return a storage of torch's."""
        if self._persistent is None:
            raise UnsafePickle("it refers to data outside of it")
        return self._persistent(pid)

    def load_build(self) -> None:
        """Do BUILD: set attributes on stand-ins alone (a dictionary's own attributes are dropped)."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, StandIn):
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
                state = state[0]
            if isinstance(state, dict):
                target.__dict__.update({str(key): value for key, value in state.items()})
            else:
                target.__dict__["state"] = state
        elif not isinstance(target, dict):
            raise UnsafePickle(f"it changes a {type(target).__name__}")

    dispatch: ClassVar[dict[int, Callable[[SafeUnpickler], None]]] = {
        **_PurePython.dispatch,
        pickle.BUILD[0]: load_build,
    }

    def load(self) -> object:
        """Return the pickled value.

        Raises:
            UnsafePickle: for a damaged pickle, or one that names what is on no list.
        """
        try:
            return super().load()
        except UnsafePickle:
            raise
        except Exception as error:  # whatever a damaged or hostile program of opcodes leads to
            raise UnsafePickle(f"damaged pickle ({type(error).__name__}: {str(error)[:100]})") from None
