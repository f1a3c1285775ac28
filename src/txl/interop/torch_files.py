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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from txl.errors import UserError
from txl.files import opened
from txl.interop.safe_pickle import SafeUnpickler, UnsafePickle, plain_sequence

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

    def fill(self, data: np.ndarray) -> None:
        """Take bytes as the elements, if there are as many as the pickle says."""
        if len(data) != self.numel * self.dtype.itemsize:
            raise UnsafePickle(f"the storage {self.key} says {self.numel} elements, but has {len(data)} bytes")
        self.data = torch.frombuffer(data, dtype=self.dtype) if len(data) else torch.empty(0, dtype=self.dtype)


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *rest: object) -> Tensor:
    """Return a view of a storage, after checking that it lies in the storage."""
    if not isinstance(storage, _Storage) or storage.data is None:
        raise UnsafePickle("a tensor without a storage")
    shape = (offset, *size, *stride) if isinstance(size, tuple | list) and isinstance(stride, tuple | list) else ()
    if not 1 <= len(shape) <= 17 or not all(type(number) is int and 0 <= number < 2**63 for number in shape):
        raise UnsafePickle("a tensor's shape is not made of a few numbers")
    first, numel = cast(int, offset), storage.data.numel()
    sizes, strides = cast(tuple[int, ...], tuple(size)), cast(tuple[int, ...], tuple(stride))  # pyright: ignore
    if len(sizes) != len(strides):
        raise UnsafePickle("a tensor has no possible shape")
    if 0 in sizes:
        return storage.data.new_empty(sizes)
    last = first + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    if last >= numel or math.prod(sizes) > numel:
        raise UnsafePickle(f"a tensor of shape {list(sizes)} exceeds or repeats numbers of its storage of {numel}")
    return storage.data.as_strided(sizes, strides, first)


_REBUILT = {("torch._utils", name): _rebuild_tensor for name in ("_rebuild_tensor", "_rebuild_tensor_v2")}
_PARAMETERS = (
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch.nn.parameter", "Parameter"),
)
_NAMES: dict[tuple[str, str], object] = {
    **_REBUILT,
    **dict.fromkeys(_PARAMETERS, lambda data, *rest: data),
    ("torch", "Size"): lambda sizes=(): tuple(plain_sequence(sizes)),
    ("torch", "device"): lambda *named: named,
    **{(module, name): dtype for name, dtype in _DTYPES.items() for module in ("torch", "torch.cuda")},
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
        # Copy on write: changing a tensor does not change the file.
        return _read_zip(path, np.memmap(path, dtype=np.uint8, mode="c")) if is_zip else _read_stream(path, size)
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
            storage.fill(_record(mapped, entries[f"{prefix}data/{storage.key}"]))
        return storage

    return SafeUnpickler(io.BytesIO(bytes(_record(mapped, entries[pickles[0]]))), _NAMES, persistent).load()


def _record(mapped: np.ndarray, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return the bytes of a record that is neither compressed nor encrypted, lies in the file and has its CRC."""
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
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
        raise UnsafePickle("it refers to data in an unknown way")
    _, dtype, key, _, numel, *_ = pid
    if not isinstance(key, str | int) or type(numel) is not int or not 0 <= numel < 2**63:
        raise UnsafePickle("a storage has no name or no possible size")
    storage = storages.setdefault(str(key), _Storage(str(key), dtype, numel))
    if storage.dtype != dtype:
        raise UnsafePickle(f"the storage {key} has two types")
    return storage


def _read_stream(path: Path, size: int) -> object:
    storages: dict[str, _Storage] = {}

    def persistent(pid: object) -> object:
        if isinstance(pid, tuple) and len(pid) >= 2 and pid[0] == "module":
            return pid[1]  # a class and its source text, which is not needed
        storage = _named_storage(pid, storages)
        view = pid[5] if isinstance(pid, tuple) and len(pid) > 5 else None
        if view is None:
            return storage
        if not isinstance(view, tuple) or len(view) != 3 or not all(type(number) is int for number in view[1:]):
            raise UnsafePickle("a view of a storage in an unknown form")
        _, offset, numel = view
        if offset < 0 or numel < 0 or offset + numel > storage.numel:
            raise UnsafePickle(f"a view that does not lie in its storage {storage.key}")
        data = None if storage.data is None else storage.data[offset : offset + numel]
        return _Storage(storage.key, storage.dtype, numel, data)

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        first = SafeUnpickler(stream, _NAMES, persistent).load()
        if type(first) is not int or first != _MAGIC:
            # A plain pickle, for example a vocabulary.
            return first
        if SafeUnpickler(stream).load() != _STREAM_PROTOCOL:
            raise UnsafePickle("a stream of an unknown protocol")
        system = SafeUnpickler(stream).load()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise UnsafePickle("written on a big-endian machine; save it again on a little-endian one")
        # The storages follow the value that needs them: it is read without tensors first.
        value_at = stream.tell()
        SafeUnpickler(stream, {**_NAMES, **dict.fromkeys(_REBUILT, lambda *_: None)}, persistent).load()
        keys = SafeUnpickler(stream).load()
        if not isinstance(keys, list):
            raise UnsafePickle("the list of storages is missing")
        file.seek(stream.tell())
        for key in keys:
            storage = storages.get(str(key)) if isinstance(key, str | int) else None
            if storage is None:
                raise UnsafePickle("a storage that nothing refers to")
            (numel,) = struct.unpack("<q", file.read(8))
            n_byte = numel * storage.dtype.itemsize
            if numel != storage.numel or file.tell() + n_byte > size:
                raise UnsafePickle(f"the storage {key} is truncated, or has {numel} elements, not {storage.numel}")
            # Read into memory that is aligned to the size of the elements.
            data = np.empty(n_byte, dtype=np.uint8)
            file.readinto(data.data)
            storage.fill(data)
        stream.seek(value_at)
        return SafeUnpickler(stream, _NAMES, persistent).load()
