"""Unpickler for untrusted files that runs no code from a file.

A pickle is a program: it names functions and calls them. This unpickler accepts a name only if it is on a short list of
harmless functions, or if it belongs to a module whose classes are replaced by inert stand-ins, which only keep
attributes. At any other name it refuses the whole file, with an error that states the name. A file never causes an
import.

The pure-Python unpickler is used instead of the C one: every operation can be overridden, and its memo is a dictionary,
so that a large index in the file does not allocate memory.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, ClassVar

# Modules, with their submodules, whose classes and functions a file may name; these modules are never imported.
# Tokenizers of Hugging Face's and NVIDIA's hold objects of `tokenizers`, `sacremoses`, `re` and `regex`.
STAND_IN_MODULES = (
    "mem_transformer", "transformer_xl", "proj_adaptive_softmax", "log_uniform_sampler", "adaptive_softmax",
    "vocabulary", "data_utils", "data_parallel", "fp16_opt", "exp_utils", "utils", "torch.nn", "apex", "lamb",
    "argparse", "transformers", "pytorch_transformers", "pytorch_pretrained_bert", "tokenizers", "sacremoses", "re",
    "regex", "_regex", "_regex_core", "numpy", "__main__",
)  # fmt: skip


class UnsafePickle(Exception):
    """A pickle that is damaged, or that contains a name which is not allowed."""


class StandIn:
    """Stand-in that keeps the attributes of an object without its class."""

    origin = "?"  # module and name of the class that the stand-in replaces

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __repr__(self) -> str:
        return f"<{self.origin}>"

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the pickled object.

        Call `StandIn.attribute(object, name)`, because the object may have an attribute with the name "attribute".
        """
        return self.__dict__.get(name, default)


def _encoded(text: object, encoding: object = "latin1") -> bytes:
    """Replace `_codecs.encode`, which Python 3 uses to write bytes in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise UnsafePickle("bytes in an unknown encoding")
    return text.encode("latin1")


def _check_hashed(values: Iterable[object]) -> None:
    """Refuse keys and elements of sets that are nested: hashing them may never end, or overflow the stack."""
    plain = (str, bytes, int, float, bool, type(None), StandIn)
    for value in values:
        if not all(isinstance(part, plain) for part in (value if isinstance(value, tuple) else (value,))):
            raise UnsafePickle("it has a nested key, which no checkpoint needs")


def plain_sequence(value: Any) -> Any:
    """Return a container of the pickle itself; refuse a tensor, which makes all its rows when it is iterated."""
    if not isinstance(value, list | tuple | set | frozenset | dict):
        raise UnsafePickle(f"it makes a container of {type(value).__name__}")
    return value


def _plain_dict(*args: Any) -> dict[object, object]:
    """Return a dict in place of an OrderedDict or Counter, from a list of pairs, from a mapping, or empty."""
    for pairs in map(plain_sequence, args):
        _check_hashed(pairs if isinstance(pairs, dict) else (key for key, _ in map(plain_sequence, pairs)))
    return dict(*args)


def _plain_set(elements: object = ()) -> set[object]:
    _check_hashed(plain_sequence(elements))
    return set(plain_sequence(elements))


HARMLESS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): _plain_dict,
    ("collections", "Counter"): _plain_dict,
    ("builtins", "set"): _plain_set,
    ("__builtin__", "set"): _plain_set,
    ("builtins", "frozenset"): lambda *elements: frozenset(_plain_set(*elements)),
    ("_codecs", "encode"): _encoded,
}
_PurePython: Any = vars(pickle)["_Unpickler"]


def _with_checks(name: str, keys: slice = slice(0), target: int | None = None) -> Callable[[SafeUnpickler], None]:
    """Return the function of an opcode that first checks elements of the stack.

    Args:
        name: method of the opcode.
        keys: elements that it will hash.
        target: place of the container that it changes, on the stack, or 0: below the mark. Tensors are no containers.
    """
    load = getattr(_PurePython, name)

    def checked(unpickler: SafeUnpickler) -> None:
        _check_hashed(unpickler.stack[keys])
        if target is not None:
            changed = unpickler.stack[target] if target else unpickler.metastack[-1][-1]
            if not isinstance(changed, list | dict | set | StandIn):
                raise UnsafePickle(f"it adds to a {type(changed).__name__}")
        load(unpickler)

    return checked


def _with_arguments(name: str) -> Callable[[SafeUnpickler], None]:
    """Return the function of an opcode that calls something with a tuple of arguments."""
    load, place = getattr(_PurePython, name), -2 if name == "load_newobj_ex" else -1

    def checked(unpickler: SafeUnpickler) -> None:
        if not isinstance(unpickler.stack[place], tuple):
            raise UnsafePickle("it calls something without a tuple of arguments")
        load(unpickler)

    return checked


class SafeUnpickler(_PurePython):
    """Unpickler of one pickle; `load` returns plain values and stand-ins.

    Args:
        file: an open binary file.
        names: further allowed (module, name) pairs, each with the object that replaces it.
        persistent: function that resolves persistent ids (torch's storages); None: persistent ids are refused.
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
        """Return the stand-in or function for a name; refuse a name that is not allowed."""
        key = (str(module), str(name))
        if key in self._names:
            return self._names[key]
        if any(key[0] == known or key[0].startswith(known + ".") for known in STAND_IN_MODULES):
            return self._stand_ins.setdefault(key, type("Named", (StandIn,), {"origin": ".".join(key)}))
        raise UnsafePickle(f"it asks for {key[0][:100]}.{key[1][:100]}, which no checkpoint of a Transformer-XL needs")

    def get_extension(self, code: int) -> None:
        """Refuse copyreg's extensions, whose numbers have a meaning only within a process."""
        raise UnsafePickle(f"it asks for the extension number {code}, which no checkpoint needs")

    def refuse_size(self) -> None:
        """Refuse an opcode for a number or an array of any size, before memory is allocated for it."""
        raise UnsafePickle("it has a number of thousands of bits, or a bytearray, which no checkpoint needs")

    def persistent_load(self, pid: object) -> object:
        """Return the object with a persistent id (a storage of torch)."""
        if self._persistent is None:
            raise UnsafePickle("it refers to data outside of the file")
        return self._persistent(pid)

    def load_build(self) -> None:
        """Execute BUILD: set attributes on a stand-in, ignore attributes of a dictionary, refuse any other object."""
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
            raise UnsafePickle(f"it sets attributes of a {type(target).__name__}")

    # After a mark, the stack holds only the items since the mark.
    dispatch: ClassVar[dict[int, Callable[[SafeUnpickler], None]]] = {
        **_PurePython.dispatch,
        pickle.LONG4[0]: refuse_size,
        pickle.BYTEARRAY8[0]: refuse_size,
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: _with_arguments("load_reduce"),
        pickle.NEWOBJ[0]: _with_arguments("load_newobj"),
        pickle.NEWOBJ_EX[0]: _with_arguments("load_newobj_ex"),
        pickle.APPEND[0]: _with_checks("load_append", target=-2),
        pickle.APPENDS[0]: _with_checks("load_appends", target=0),
        pickle.SETITEM[0]: _with_checks("load_setitem", slice(-2, -1), target=-3),
        pickle.SETITEMS[0]: _with_checks("load_setitems", slice(None, None, 2), target=0),
        pickle.DICT[0]: _with_checks("load_dict", slice(None, None, 2)),
        pickle.ADDITEMS[0]: _with_checks("load_additems", slice(None), target=0),
        pickle.FROZENSET[0]: _with_checks("load_frozenset", slice(None)),
    }

    def load(self) -> object:
        """Return the pickled value; raise `UnsafePickle` for whatever is damaged or not allowed."""
        try:
            return super().load()
        except UnsafePickle:
            raise
        except Exception as error:  # damaged or hostile opcodes can raise any exception
            raise UnsafePickle(f"damaged pickle ({type(error).__name__}: {str(error)[:100]})") from None
