"""Checkpoints of other tools: `.metadata` of torch DCP and megatron-core -> items, without trusting its pickle.

The unpickler knows a list of names and builds inert placeholders for them; no code of torch or megatron runs, megatron need
not be installed. Anything else raises `UnsafePickle`. A scan of the opcodes goes first, so that no length or memo index in
the file makes the unpickler allocate more than the file is worth.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardkeep.errors import Corrupt, UnsafePickle
from shardkeep.storage import Reader
from shardkeep.types import Box, Item, TensorInfo, dtype_name, dtype_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The part of a `.metadata` that loading needs. `files` are the names that items live in."""

    tensors: dict[str, TensorInfo]
    items: dict[str, list[Item]]
    files: set[str]
    paths: dict[str, tuple[str | int, ...]]
    mcore: dict[str, dict[str, Any]]


class _Record:
    """An inert stand-in for a class of the allow-list: keeps the pickled state, runs nothing."""

    __slots__ = ("args", "state")
    origin = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Index(_Record):
    """MetadataIndex: a key of `storage_data`, so it needs the identity that torch gives it: fqn and offset."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((self.get("fqn"), self.get("offset")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.get("fqn"), self.get("offset")) == (other.get("fqn"), other.get("offset"))


class _Call:
    """A function of the allow-list. Not a plain function: a pickle could write into one's attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("state for a function")


def _enum(value: Any) -> Any:
    return value


def _ignored(*args: Any) -> None:
    """torch.device and paths: nothing that loading needs."""


_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies"
_RECORDS = {
    (f"{_DCP}.metadata", name)
    for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                 "StorageMeta")
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
    *((f"{_MCORE}.{module}", name) for module in ("torch", "filesystem_async", "state_dict_saver", "cached_metadata_filesystem_reader")
      for name in ("MCoreMetadata", "MCoreSavePlan")),
    (f"{_DCP}._extension", "StreamTransformExtension"),
}
_INDEXES = {(f"{_DCP}.metadata", "MetadataIndex")}
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): lambda *args: tuple(int(n) for n in args[0]) if args else (),
    ("torch", "device"): _ignored,
    ("torch.serialization", "_get_layout"): _enum,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _enum,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _enum,
    (f"{_DCP}.planner", "WriteItemType"): _enum,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): _ignored for module in ("pathlib", "pathlib._local")
       for name in ("Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath")},
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__")
       for kind in (set, frozenset, list, dict, tuple, slice, bytearray, complex)},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        at = (module, name)
        if at not in self._made:
            self._made[at] = self._make(module, name)
        return self._made[at]

    def _make(self, module: str, name: str) -> Any:
        at = (module, name)
        if at in _RECORDS:
            return type(name, (_Record,), {"__slots__": (), "origin": f"{module}.{name}"})
        if at in _INDEXES:
            return _Index
        if at in _CALLS:
            return _Call(_CALLS[at])
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)):
            return getattr(torch, name)
        raise unsafe(module, name, self._path)


def unsafe(module: str, name: str, path: str) -> UnsafePickle:
    return UnsafePickle("the pickle asks for something that no checkpoint metadata needs", path=path, name=f"{module}.{name}",
                        remedy="If you trust the file, load it with the tool that wrote it and save it again.")


def unpickle(data: bytes, path: str) -> Any:
    """The object in an allow-listed pickle. `UnsafePickle` for a name outside the list, `Corrupt` for a broken stream."""
    scan(data, path)
    try:
        return _Unpickler(data, path).load()
    except UnsafePickle:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError,
            RecursionError, MemoryError, OverflowError) as e:
        raise Corrupt(f"the pickle cannot be read: {type(e).__name__}: {e}", path=path) from e


# Number of argument bytes per opcode (pickle protocols 0-5); absent: the opcode never occurs in checkpoint metadata.
_FIXED = {
    **dict.fromkeys(b"(.012NRabdelstu)}]\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1), ord("M"): 2, **dict.fromkeys(b"Jrj", 4), **dict.fromkeys(b"G\x95", 8),
}
_PREFIX = {**dict.fromkeys(b"U\x8a\x8cC", 1), **dict.fromkeys(b"TX\x8bB", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
_LINES = {**dict.fromkeys(b"IFLSVgp", 1), ord("c"): 2}


def scan(data: bytes, path: str) -> None:
    """Walk the opcodes: every length stays inside the data, every memo index below its size, and STOP ends it."""
    position, end = 0, len(data)
    while position < end:
        op = data[position]
        if op == 0x2E:  # STOP
            return
        fixed = _FIXED.get(op)
        if fixed is not None:
            if op == 0x72 and int.from_bytes(data[position + 1 : position + 5], "little") > end:  # LONG_BINPUT
                raise Corrupt("a memo index in the pickle is larger than the file", path=path, offset=position)
            position += 1 + fixed
        elif op in _PREFIX:
            width = _PREFIX[op]
            position += 1 + width + int.from_bytes(data[position + 1 : position + 1 + width], "little")
        elif op in _LINES:
            start = position + 1
            for _ in range(_LINES[op]):
                position = data.find(b"\n", position + 1)
                if position < 0:
                    raise Corrupt("the pickle ends in the middle", path=path, expected="a newline", got="end of file")
            if op == 0x70 and not data[start:position].isdigit() or op == 0x70 and int(data[start:position][:20]) > end:
                raise Corrupt("a memo index in the pickle is larger than the file", path=path, offset=start)
            position += 1
        else:
            raise UnsafePickle("the pickle uses an opcode that no checkpoint metadata needs", path=path, opcode=f"0x{op:02x}",
                               offset=position)
    raise Corrupt("the pickle ends in the middle", path=path, expected="a STOP opcode", got=f"end of file at byte {end}")


def parse_metadata(data: bytes, path: str) -> Parsed:
    """A DCP `Metadata` pickle as items grouped by key."""
    root = unpickle(data, path)
    if not isinstance(root, _Record) or not isinstance(root.state, dict):
        raise Corrupt("not a torch.distributed.checkpoint Metadata", path=path, got=type(root).__name__)
    try:
        return _convert(root.state, path)
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise Corrupt(f"the metadata has an unknown structure: {type(e).__name__}: {e}", path=path) from e


def _convert(state: dict[str, Any], path: str) -> Parsed:
    tensors: dict[str, TensorInfo] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    items: dict[str, list[Item]] = {}
    for key, entry in state["state_dict_metadata"].items():
        items[key] = []
        if not entry.origin.endswith(".TensorStorageMetadata"):
            continue
        tensors[key] = TensorInfo(dtype=_dtype(entry.get("properties")), shape=_ints(entry.get("size")))
        chunks[key] = {_ints(c.get("offsets")): _ints(c.get("sizes")) for c in entry.get("chunks")}
    for index, info in (state.get("storage_data") or {}).items():
        item = _item(index, info, tensors, chunks, path)
        items[item.key].append(item)
    mcore = state.get("mcore_data")
    return Parsed(
        tensors=tensors, items=items, files={i.file for found in items.values() for i in found}, paths=_paths(state),
        mcore=mcore if isinstance(mcore, dict) else {},
    )


def _item(
    index: _Record, info: _Record, tensors: dict[str, TensorInfo], chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]],
    path: str,
) -> Item:
    key, file, offset, length = index.get("fqn"), info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(file, str) or not _inside(file) or not isinstance(offset, int) or not isinstance(length, int):
        raise Corrupt("an item has no usable place", path=path, key=key, file=str(file), offset=str(offset), length=str(length))
    if info.get("transform_descriptors"):
        raise Corrupt("an item is compressed or otherwise transformed, which shardkeep cannot read", path=path, key=key,
                      transforms=str(info.get("transform_descriptors")), remedy="Load it with the tool that wrote it.")
    if key not in tensors:
        return Item(key=key, kind="object", dtype="", box=Box(offset=(), shape=()), file=file, offset=offset, length=length,
                    payload_offset=offset, num_bytes=length)
    at = _ints(index.get("offset")) if index.get("offset") is not None else (0,) * len(tensors[key].shape)
    box = Box(offset=at, shape=chunks[key][at])
    dtype = tensors[key].dtype
    return Item(key=key, kind="tensor", dtype=dtype, box=box, file=file, offset=offset, length=length, payload_offset=-1,
                num_bytes=box.numel * dtype_named(dtype).itemsize)


def _inside(file: str) -> bool:
    """A name inside the checkpoint's directory."""
    return bool(file) and not file.startswith("/") and ".." not in file.split("/") and "\0" not in file


def _dtype(properties: _Record) -> str:
    """TensorProperties pickles itself as (dtype, layout, requires_grad, memory format, pin_memory)."""
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype but {dtype!r}")
    return dtype_name(dtype)


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in value):
        raise TypeError(f"no shape but {value!r}")
    return tuple(value)


def _paths(state: dict[str, Any]) -> dict[str, tuple[str | int, ...]]:
    planner = state.get("planner_data")
    if not isinstance(planner, dict):
        return {}
    return {key: tuple(path) for key, path in planner.items()
            if isinstance(path, (tuple, list)) and all(isinstance(p, (str, int)) for p in path)}


# --- items: each a torch.save archive -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    """The persistent id of a storage in `data.pkl`: ("storage", type, name of its record, device, number of elements)."""

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


def _rebuild_v2(storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, metadata: Any = None) -> _Tensor:
    return _Tensor(storage, offset, tuple(size), tuple(stride), None, not metadata)


def _rebuild_v3(storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, dtype: Any, metadata: Any = None) -> _Tensor:
    return _Tensor(storage, offset, tuple(size), tuple(stride), dtype, not metadata)


_ITEM_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, grad, hooks: data,
    ("torch", "Size"): lambda *args: tuple(args[0]) if args else (),
    ("collections", "OrderedDict"): OrderedDict,
}
_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
}


class _ItemUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ITEM_CALLS:
            return _Call(_ITEM_CALLS[module, name])
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, record, *_ = pid
        if kind != "storage":
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
            raise Corrupt("a file is shorter than its items", file=item.file, key=item.key, expected=f"{offset + length} bytes",
                          got=f"{reader.size} bytes") from e
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
    """Where the payload of a foreign tensor item begins in its file, or None if it is not plainly the box in row-major order
    (other strides, lazily conjugated, compressed, another byte order): then the archive has to be loaded as a whole.

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
        scan_item = _ItemUnpickler(pickled).load() if len(pickled) < 1 << 16 else None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    if not isinstance(scan_item, _Tensor) or not scan_item.plain:
        return None
    return _plain_offset(item, read, scan_item, by_name)


def _plain_offset(item: Item, read: ReadAt, tensor: _Tensor, records: dict[str, tuple[int, int, int]]) -> int | None:
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
    """Name -> (absolute offset of the local header, size, compression method), from the zip directory (APPNOTE 4.3.12)."""
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
    """Values of a directory entry that did not fit 32 bits are in extra field 1, in this order (APPNOTE 4.5.3)."""
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
    """Absolute offset of a record's bytes: the local header's own lengths decide (torch pads with an extra field)."""
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
    return Corrupt(f"an item is not a torch.save archive: {why}", file=item.file, key=item.key, offset=item.offset,
                   length=item.length)
