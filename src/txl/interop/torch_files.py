"""Files that torch.save wrote: zip archives, and the stream format of 2019 and before. No code in a file is run.

Zip: NAME/data.pkl refers to storages by key; each storage is an uncompressed record NAME/data/KEY. Tensors are views of
the memory-mapped file, so that reading needs no additional memory.
Stream: pickles of a magic number, a protocol number, the writer's system, the value, and the list of storage keys; then
for each key the number of elements (int64) and the elements.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from txl.errors import UserError
from txl.files import opened
from txl.interop.safe_pickle import SafeUnpickler, StandIn, UnsafePickle

_MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_PROTOCOL = 1001
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass
class _Storage:
    """A storage that the pickle refers to; `data` is None until its bytes are read."""

    key: str
    dtype: torch.dtype
    numel: int
    data: Tensor | None = None


@dataclass
class _PendingTensor:
    """A tensor of a storage whose bytes may not have been read yet."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def resolve(self) -> Tensor:
        """Return the tensor, as a view of its storage.

        Raises:
            UnsafePickle: if the storage is missing or too small, or the shape is not possible.
        """
        data = self.storage.data
        if data is None:
            raise UnsafePickle(f"the storage {self.storage.key} of a tensor is missing")
        if len(self.size) != len(self.stride):
            raise UnsafePickle("a tensor has no possible shape")
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        if 0 not in self.size and last >= data.numel():
            raise UnsafePickle(f"a tensor of shape {list(self.size)} is larger than its storage of {data.numel()}")
        if math.prod(self.size) > data.numel():
            raise UnsafePickle(f"a tensor of shape {list(self.size)} repeats numbers of its storage of {data.numel()}")
        if 0 in self.size:
            return data.new_empty(self.size)
        return data.as_strided(self.size, self.stride, self.offset)


@dataclass
class _StorageKind:
    """A storage class such as torch.FloatStorage."""

    dtype: torch.dtype


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *rest: object) -> _PendingTensor:
    if not isinstance(storage, _Storage):
        raise UnsafePickle("a tensor without a storage")
    (first,) = _numbers((offset,))
    return _PendingTensor(storage, first, _numbers(size), _numbers(stride))


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or not all(type(number) is int for number in values):
        raise UnsafePickle("a tensor's shape is not made of numbers")
    if len(values) > 8 or not all(0 <= number < 2**63 for number in values):
        raise UnsafePickle("a tensor has no possible shape")
    return tuple(values)


def _rebuild_parameter(data: object, *rest: object) -> object:
    return data


def _tuple(*args: Iterable[object]) -> tuple[object, ...]:
    return tuple(*args)


def _device(*args: object) -> tuple[object, ...]:
    return args


_NAMES: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch.nn.parameter", "Parameter"): _rebuild_parameter,
    ("torch", "Size"): _tuple,
    ("torch", "device"): _device,
    **{(module, name): _StorageKind(dtype) for name, dtype in _DTYPES.items() for module in ("torch", "torch.cuda")},
    **{("torch", str(dtype).rpartition(".")[2]): dtype for dtype in _DTYPES.values()},
}


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins like a file of torch.save (or like another pickle of protocol 2)."""
    with opened(path) as file:
        head = file.read(4)
    return head[:2] == b"\x80\x02" or head == b"PK\x03\x04"


def read_torch_file(path: Path) -> object:
    """Return the content of a torch.save file: plain values, tensors, and stand-ins for all other objects.

    Raises:
        UserError: if the file cannot be read, is damaged, or refers to a name that no checkpoint needs.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise UserError(f"{path}: empty; expected a checkpoint")
        with opened(path) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if not is_zip:
            return _resolved(_read_stream(path, size))
        # Copy on write: changing a tensor does not change the file.
        return _resolved(_read_zip(path, np.memmap(path, dtype=np.uint8, mode="c")))
    except UnsafePickle as error:
        raise UserError(f"{path}: refused: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, KeyError, EOFError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {str(error)[:100]})") from None


def _read_zip(path: Path, mapped: np.ndarray) -> object:
    storages: dict[str, _Storage] = {}
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnsafePickle(f"an archive with {len(pickles)} data.pkl; torch.save writes one")
        prefix = pickles[0].removesuffix("data.pkl")
        order = f"{prefix}byteorder"
        if order in entries and bytes(_record(mapped, entries[order])) != b"little":
            raise UnsafePickle("written on a big-endian machine; save it again on a little-endian one")

        def persistent(pid: object) -> _Storage:
            storage = _named_storage(pid, storages)
            if storage.data is None:
                entry = entries.get(f"{prefix}data/{storage.key}")
                if entry is None:
                    raise UnsafePickle(f"the storage {storage.key} is missing from the archive")
                storage.data = _as_tensor(_record(mapped, entry), storage)
            return storage

        return SafeUnpickler(io.BytesIO(bytes(_record(mapped, entries[pickles[0]]))), _NAMES, persistent).load()


def _record(mapped: np.ndarray, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return the bytes of an uncompressed record, checked against its CRC.

    Raises:
        UnsafePickle: if the record is compressed or encrypted, extends beyond the file, or is altered.
    """
    name = entry.filename
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        raise UnsafePickle(f"{name} is compressed or encrypted; torch.save does neither")
    header = bytes(mapped[entry.header_offset : entry.header_offset + 30])
    signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
    start = entry.header_offset + 30 + name_length + extra_length
    if signature != b"PK\x03\x04" or start + entry.file_size > len(mapped):
        raise UnsafePickle(f"{name} does not lie in the file: truncated or altered")
    data = mapped[start : start + entry.file_size]
    if zlib.crc32(cast(Any, data)) != entry.CRC:
        raise UnsafePickle(f"{name} is altered: its checksum is not the one in the archive")
    return data


def _named_storage(pid: object, storages: dict[str, _Storage]) -> _Storage:
    """Return the storage that a persistent id ("storage", kind, key, location, numel, ...) names."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageKind):
        raise UnsafePickle("it refers to data in an unknown way")
    if not isinstance(pid[2], (str, int)):
        raise UnsafePickle("a storage has no name")
    kind, key, numel = pid[1], str(pid[2]), pid[4]
    if type(numel) is not int or numel < 0:
        raise UnsafePickle(f"the storage {key} has no possible size")
    storage = storages.setdefault(key, _Storage(key, kind.dtype, numel))
    if storage.dtype != kind.dtype:
        raise UnsafePickle(f"the storage {key} has two types")
    return storage


def _as_tensor(data: np.ndarray, storage: _Storage) -> Tensor:
    """Return bytes as a tensor of a storage's elements.

    Raises:
        UnsafePickle: if the number of bytes does not match the storage's number of elements.
    """
    width = torch.empty((), dtype=storage.dtype).element_size()
    if len(data) != storage.numel * width:
        raise UnsafePickle(f"the storage {storage.key} says {storage.numel} elements, but has {len(data)} bytes")
    if len(data) == 0:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(data, dtype=storage.dtype)


def _read_stream(path: Path, size: int) -> object:
    storages: dict[str, _Storage] = {}
    views: list[tuple[_Storage, _Storage, int]] = []

    def persistent(pid: object) -> object:
        if isinstance(pid, tuple) and len(pid) >= 2 and pid[0] == "module":
            return pid[1]  # a class and its source text, which is not needed
        storage = _named_storage(pid, storages)
        view = pid[5] if isinstance(pid, tuple) and len(pid) > 5 else None
        if view is None:
            return storage
        if (
            not isinstance(view, tuple)
            or len(view) != 3
            or not isinstance(view[0], (str, int))
            or not all(type(number) is int for number in view[1:])
        ):
            raise UnsafePickle("a view of a storage in an unknown form")
        part = _Storage(f"{storage.key}/{view[0]}", storage.dtype, view[2])
        views.append((storage, part, view[1]))
        return part

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        first = SafeUnpickler(stream, _NAMES, persistent).load()
        if first != _MAGIC:
            # A plain pickle, for example a vocabulary.
            return first
        if SafeUnpickler(stream).load() != _STREAM_PROTOCOL:
            raise UnsafePickle("a stream of an unknown protocol")
        system = SafeUnpickler(stream).load()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise UnsafePickle("written on a big-endian machine; save it again on a little-endian one")
        value = SafeUnpickler(stream, _NAMES, persistent).load()
        keys = SafeUnpickler(stream).load()
        if not isinstance(keys, list):
            raise UnsafePickle("the list of storages is missing")
        place = stream.tell()
    with open(path, "rb") as file:
        _read_storages(file, place, size, keys, storages)
    for storage, part, offset in views:
        if storage.data is None or offset < 0 or part.numel < 0 or offset + part.numel > storage.numel:
            raise UnsafePickle(f"a view that does not lie in its storage {storage.key}")
        part.data = storage.data[offset : offset + part.numel]
    return value


def _read_storages(
    file: BufferedReader, place: int, size: int, keys: Iterable[object], storages: dict[str, _Storage]
) -> None:
    """Read the storages at the end of a stream into memory aligned to the size of the elements."""
    for key in keys:
        if not isinstance(key, (str, int)):
            raise UnsafePickle("a storage has no name")
        storage = storages.get(str(key))
        if storage is None:
            raise UnsafePickle(f"a storage {key} that nothing refers to")
        if place + 8 > size:
            raise UnsafePickle(f"truncated: the storage {key} is missing")
        file.seek(place)
        (numel,) = struct.unpack("<q", file.read(8))
        if numel != storage.numel:
            raise UnsafePickle(f"the storage {key} says {storage.numel} elements, the file {numel}")
        end = place + 8 + numel * torch.empty((), dtype=storage.dtype).element_size()
        if end > size:
            raise UnsafePickle(f"truncated: the storage {key} ends at byte {end}, the file at {size}")
        data = np.empty(end - place - 8, dtype=np.uint8)
        file.readinto(data.data)
        storage.data = _as_tensor(data, storage)
        place = end


def _resolved(value: object) -> object:
    """Return the value with every pending tensor replaced by its tensor; objects that occur twice are visited once."""
    seen: dict[int, object] = {}
    keep: list[object] = []  # keeps objects alive, so that the ids in `seen` stay valid

    def walk(item: object) -> object:
        if isinstance(item, _PendingTensor):
            return item.resolve()
        if not isinstance(item, (dict, list, tuple, StandIn)):
            return item
        if id(item) in seen:
            return seen[id(item)]
        keep.append(item)
        if isinstance(item, tuple):
            seen[id(item)] = None  # only in a damaged file does a tuple contain itself
            seen[id(item)] = result = tuple(walk(part) for part in item)
            return result
        seen[id(item)] = item
        if isinstance(item, list):
            item[:] = [walk(part) for part in item]
        else:
            values = item if isinstance(item, dict) else item.__dict__
            for key in list(values):
                values[key] = walk(values[key])
        return item

    try:
        return walk(value)
    except RecursionError:
        raise UnsafePickle("nested too deeply") from None
