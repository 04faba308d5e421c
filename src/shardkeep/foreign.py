"""Checkpoints of other tools: `.metadata` of torch DCP and megatron-core -> items, without trusting its
pickle.

The unpickler knows a list of names and builds inert placeholders for them; no code of torch or megatron
runs, megatron need not be installed. Anything else raises `UnsafePickle`. A scan of the opcodes goes first,
so that no length or memo index in the file makes the unpickler allocate more than the file is worth.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardkeep.errors import Corrupt, UnsafePickle
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
    """MetadataIndex: a key of `storage_data`, so it needs the identity that torch gives it: fqn and
    offset."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((self.get("fqn"), self.get("offset")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.get("fqn"), self.get("offset")) == (
            other.get("fqn"),
            other.get("offset"),
        )


class Call:
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
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
    *(
        (f"{_MCORE}.{module}", name)
        for module in ("torch", "filesystem_async", "state_dict_saver", "cached_metadata_filesystem_reader")
        for name in ("MCoreMetadata", "MCoreSavePlan")
    ),
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
    **{
        (module, name): _ignored
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath")
    },
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, list, dict, tuple, slice, bytearray, complex)
    },
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
            return Call(_CALLS[at])
        if module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return getattr(torch, name)
        raise unsafe(module, name, self._path)


def unsafe(module: str, name: str, path: str) -> UnsafePickle:
    return UnsafePickle(
        "the pickle asks for something that no checkpoint metadata needs",
        path=path,
        name=f"{module}.{name}",
        remedy="If you trust the file, load it with the tool that wrote it and save it again.",
    )


def unpickle(data: bytes, path: str) -> Any:
    """The object in an allow-listed pickle. `UnsafePickle` for a name outside the list, `Corrupt` for a
    broken stream."""
    scan(data, path)
    try:
        return _Unpickler(data, path).load()
    except UnsafePickle:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ImportError,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as e:
        raise Corrupt(f"the pickle cannot be read: {type(e).__name__}: {e}", path=path) from e


# Number of argument bytes per opcode (pickle protocols 0-5); absent: the opcode never occurs in checkpoint
# metadata.
_FIXED = {
    **dict.fromkeys(b"(.012NQRabdelstu)}]\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1),
    ord("M"): 2,
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G\x95", 8),
}
_PREFIX = {
    **dict.fromkeys(b"U\x8a\x8cC", 1),
    **dict.fromkeys(b"TX\x8bB", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES = {**dict.fromkeys(b"IFLSVgp", 1), ord("c"): 2}


def scan(data: bytes, path: str) -> None:
    """Walk the opcodes: every length stays inside the data, every memo index below its size, and STOP ends
    it."""
    position, end = 0, len(data)
    while position < end:
        op = data[position]
        if op == 0x2E:  # STOP
            return
        fixed = _FIXED.get(op)
        if fixed is not None:
            if (
                op == 0x72 and int.from_bytes(data[position + 1 : position + 5], "little") > end
            ):  # LONG_BINPUT
                raise Corrupt(
                    "a memo index in the pickle is larger than the file", path=path, offset=position
                )
            position += 1 + fixed
        elif op in _PREFIX:
            width = _PREFIX[op]
            position += 1 + width + int.from_bytes(data[position + 1 : position + 1 + width], "little")
        elif op in _LINES:
            start = position + 1
            for _ in range(_LINES[op]):
                position = data.find(b"\n", position + 1)
                if position < 0:
                    raise Corrupt(
                        "the pickle ends in the middle", path=path, expected="a newline", got="end of file"
                    )
            if op == 0x70 and not _is_index(data[start:position], end):  # PUT
                raise Corrupt("a memo index in the pickle is larger than the file", path=path, offset=start)
            position += 1
        else:
            raise UnsafePickle(
                "the pickle uses an opcode that no checkpoint metadata needs",
                path=path,
                opcode=f"0x{op:02x}",
                offset=position,
            )
    raise Corrupt(
        "the pickle ends in the middle", path=path, expected="a STOP opcode", got=f"end of file at byte {end}"
    )


def _is_index(text: bytes, limit: int) -> bool:
    return text.isdigit() and len(text) < 20 and int(text) <= limit


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
        tensors=tensors,
        items=items,
        files={i.file for found in items.values() for i in found},
        paths=_paths(state),
        mcore=mcore if isinstance(mcore, dict) else {},
    )


def _item(
    index: _Record,
    info: _Record,
    tensors: dict[str, TensorInfo],
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]],
    path: str,
) -> Item:
    key, file, offset, length = (
        index.get("fqn"),
        info.get("relative_path"),
        info.get("offset"),
        info.get("length"),
    )
    if (
        not isinstance(file, str)
        or not _inside(file)
        or not isinstance(offset, int)
        or not isinstance(length, int)
    ):
        raise Corrupt(
            "an item has no usable place",
            path=path,
            key=key,
            file=str(file),
            offset=str(offset),
            length=str(length),
        )
    if info.get("transform_descriptors"):
        raise Corrupt(
            "an item is compressed or otherwise transformed, which shardkeep cannot read",
            path=path,
            key=key,
            transforms=str(info.get("transform_descriptors")),
            remedy="Load it with the tool that wrote it.",
        )
    if key not in tensors:
        return Item(
            key=key,
            kind="object",
            dtype="",
            box=Box(offset=(), shape=()),
            file=file,
            offset=offset,
            length=length,
            payload_offset=offset,
            num_bytes=length,
        )
    at = _ints(index.get("offset")) if index.get("offset") is not None else (0,) * len(tensors[key].shape)
    box = Box(offset=at, shape=chunks[key][at])
    dtype = tensors[key].dtype
    return Item(
        key=key,
        kind="tensor",
        dtype=dtype,
        box=box,
        file=file,
        offset=offset,
        length=length,
        payload_offset=-1,
        num_bytes=box.numel * dtype_named(dtype).itemsize,
    )


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
    return {
        key: tuple(path)
        for key, path in planner.items()
        if isinstance(path, (tuple, list)) and all(isinstance(p, (str, int)) for p in path)
    }
