"""A foreign item, a `torch.save` archive -> where its tensor's bytes are, without loading it.

The zip directory says where the records are, a restricted read of `data.pkl` how the tensor lies in its
storage. So a box of a foreign tensor is read like one of ours: only the bytes it needs.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.errors import Corrupt, UnsafePickle
from shardkeep.foreign import Call, scan
from shardkeep.storage import Reader
from shardkeep.types import Item, dtype_named


@dataclass(frozen=True, slots=True)
class _Storage:
    """The persistent id of a storage in `data.pkl`: ("storage", type, name of its record, device, number of
    elements)."""

    record: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None
    plain: bool


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype | None, metadata: Any
) -> _Tensor:
    numbers = (offset, *size, *stride)
    if not isinstance(storage, _Storage) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor of unknown structure")
    return _Tensor(storage, offset, tuple(size), tuple(stride), dtype, not metadata)


def _rebuild_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> _Tensor:
    return _tensor(storage, offset, size, stride, None, metadata)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> _Tensor:
    return _tensor(storage, offset, size, stride, dtype, metadata)


_ITEM_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, grad, hooks: data,
    ("torch", "Size"): lambda *args: tuple(args[0]) if args else (),
    ("collections", "OrderedDict"): OrderedDict,
}
_STORAGE_DTYPES = {
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
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}


class _ItemUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ITEM_CALLS:
            return Call(_ITEM_CALLS[module, name])
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, record, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"persistent id {kind!r}")
        return _Storage(record, dtype.itemsize)


ReadAt = Callable[[int, int], bytes]
_HEAD_BYTES = 1024  # holds data.pkl and the small records of a tensor's archive
_TAIL_BYTES = 2048  # holds its zip directory


def cached_reads(item: Item, reader: Reader) -> ReadAt:
    """Reads of one item's bytes that go to the file once for its head and once for its tail."""
    pieces: list[tuple[int, bytes]] = []

    def at(offset: int, length: int) -> bytes:
        data = bytearray(length)
        try:
            reader.read_into(offset, [memoryview(data)])
        except EOFError as e:
            raise Corrupt(
                "a file is shorter than its items",
                file=item.file,
                key=item.key,
                expected=f"{offset + length} bytes",
                got=f"{reader.size} bytes",
            ) from e
        return bytes(data)

    def read(offset: int, length: int) -> bytes:
        for start, data in pieces:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return at(offset, length)

    head = min(item.length, _HEAD_BYTES)
    pieces.append((item.offset, at(item.offset, head)))
    tail = min(item.length, _TAIL_BYTES)
    pieces.append((item.offset + item.length - tail, at(item.offset + item.length - tail, tail)))
    return read


def payload_offset(item: Item, read: ReadAt) -> int | None:
    """Where the payload of a foreign tensor item begins in its file, or None if it is not plainly the box
    in row-major order (other strides, lazily conjugated, compressed, another byte order): then the archive
    has to be loaded as a whole.

    `read(offset, length)` returns bytes of the file. `Corrupt` if the item is no archive.
    """
    records = _records(item, read)
    by_name = {name.split("/", 1)[-1]: at for name, at in records.items()}
    if "data.pkl" not in by_name:
        raise _not_an_archive(item, "no data.pkl in it")
    if "byteorder" in by_name and _record(item, read, by_name["byteorder"]) != b"little":
        return None
    try:
        pickled = _record(item, read, by_name["data.pkl"])
        scan(pickled, item.file)
        found = _ItemUnpickler(pickled).load()
    except (
        Corrupt,
        UnsafePickle,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ):
        return None
    if not isinstance(found, _Tensor) or not found.plain:
        return None
    return _plain_offset(item, read, found, by_name)


def _plain_offset(
    item: Item, read: ReadAt, tensor: _Tensor, records: dict[str, tuple[int, int, int]]
) -> int | None:
    itemsize = dtype_named(item.dtype).itemsize
    at = records.get(f"data/{tensor.storage.record}")
    if at is None or at[2] != 0:
        return None
    expected, wanted = 1, []
    for n in reversed(tensor.size):
        wanted.append(expected)
        expected *= n
    wanted.reverse()
    same = all(n == 1 or s == w for n, s, w in zip(tensor.size, tensor.stride, wanted, strict=True))
    if not same or expected != item.box.numel or (tensor.dtype or torch.uint8).itemsize not in (1, itemsize):
        return None
    if tensor.dtype is None and tensor.storage.itemsize != itemsize:
        return None
    start = _data_start(item, read, at[0]) + tensor.offset * itemsize
    end = start + expected * itemsize
    if end > item.offset + item.length:
        raise _not_an_archive(item, f"its tensor ends {end - item.offset - item.length} bytes after it")
    return start


def _records(item: Item, read: ReadAt) -> dict[str, tuple[int, int, int]]:
    """Name -> (absolute offset of the local header, size, compression method), from the zip directory
    (APPNOTE 4.3.12)."""
    tail_bytes = min(item.length, _TAIL_BYTES)
    tail = read(item.offset + item.length - tail_bytes, tail_bytes)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) - end < 22:
        raise _not_an_archive(item, "no zip directory at its end")
    size, start = struct.unpack_from("<II", tail, end + 12)
    if start == 0xFFFFFFFF or size == 0xFFFFFFFF:
        locator = tail.rfind(b"PK\x06\x06", 0, end)
        if locator < 0:
            raise _not_an_archive(item, "no zip64 directory at its end")
        size, start = struct.unpack_from("<QQ", tail, locator + 40)
    if start + size > item.length:
        raise _not_an_archive(item, "its zip directory lies outside")
    return _directory(item, read(item.offset + start, size))


def _directory(item: Item, data: bytes) -> dict[str, tuple[int, int, int]]:
    found = {}
    at = 0
    while at + 46 <= len(data) and data[at : at + 4] == b"PK\x01\x02":
        method = struct.unpack_from("<H", data, at + 10)[0]
        packed, size, name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<IIHHH", data, at + 20)
        header = struct.unpack_from("<I", data, at + 42)[0]
        name = data[at + 46 : at + 46 + name_bytes].decode(errors="replace")
        extra = data[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes]
        size, header = _zip64(extra, size, packed, header)
        if header + 30 > item.length:
            raise _not_an_archive(item, f"its record {name} lies outside")
        found[name] = (item.offset + header, size, method)
        at += 46 + name_bytes + extra_bytes + comment_bytes
    return found


def _zip64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int]:
    """Values of a directory entry that did not fit 32 bits are in extra field 1, in this order (APPNOTE
    4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            if size == 0xFFFFFFFF and values:
                size = values.pop(0)
            if packed == 0xFFFFFFFF and values:
                values.pop(0)
            if header == 0xFFFFFFFF and values:
                header = values.pop(0)
        at += 4 + length
    return size, header


def _data_start(item: Item, read: ReadAt, header: int) -> int:
    """Absolute offset of a record's bytes: the local header's own lengths decide (torch pads with an extra
    field)."""
    data = read(header, 30)
    if data[:4] != b"PK\x03\x04":
        raise _not_an_archive(item, "a record has no local header")
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, 26)
    return int(header + 30 + name_bytes + extra_bytes)


def _record(item: Item, read: ReadAt, at: tuple[int, int, int]) -> bytes:
    header, size, method = at
    start = _data_start(item, read, header)
    if method != 0 or start + size > item.offset + item.length:
        raise _not_an_archive(item, "a record is compressed or lies outside")
    return read(start, size)


def _not_an_archive(item: Item, why: str) -> Corrupt:
    return Corrupt(
        f"an item is not a torch.save archive: {why}",
        file=item.file,
        key=item.key,
        offset=item.offset,
        length=item.length,
    )
