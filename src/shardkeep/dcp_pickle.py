"""Index -> the pickle of DCP's `Metadata`, as opcodes, without making its objects.

Five objects a tensor and a pickler that looks at each take 60 us; what they say is a few numbers. Here each
class is pickled once, as a specimen that pickle's own protocol (`__reduce_ex__`) describes, and every further
object repeats those opcodes with other numbers. Whatever is used more than once (classes, names of fields,
keys, file names, sizes) is put into the pickle's memo before, so that objects only refer to it: that keeps
the pickle small, and one object for a reader. The opcodes are those of `pickle`, protocol 4.

`Unknown` where a class of the installed torch is not pickled as a new object with a dict of its fields in the
order known here: then `vanilla` has pickle do all.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkeep.types import Index, Item, Path, TensorInfo, dtype_named

_START = pickle.PROTO + b"\4"
_DEFINED = pickle.MEMOIZE + pickle.POP  # under the next number of the memo, and off the stack
_LIST = pickle.EMPTY_LIST + pickle.MARK + b"%b" + pickle.APPENDS
_NUMBERED = struct.Struct("<cI")  # an opcode and its argument


class Unknown(Exception):
    """A class is not pickled as it is known how to."""


def dump(index: Index) -> bytes:
    """What `pickle.dumps(vanilla.dcp_objects(index))` says, in other opcodes: it loads as an equal object."""
    return _Writer().metadata(index)


class _Writer:
    def __init__(self) -> None:
        self._parts = [_START]
        self._num_defined = 0
        size_class = self._define(_plain(torch.Size))
        self._strings = _Defined(lambda text: self._define(_string(text)))
        self._sizes = _Defined(lambda size: self._define(_size(size_class, size)))
        self._dtypes = _Defined(lambda name: self._define(_plain(TensorProperties(dtype=dtype_named(name)))))
        size, properties = torch.Size(()), TensorProperties(dtype=torch.float32)
        self._tensor = self._form(
            TensorStorageMetadata(properties=properties, size=size, chunks=[]), "properties", "size", "chunks"
        )
        self._chunk = self._form(ChunkStorageMetadata(offsets=size, sizes=size), "offsets", "sizes")
        self._object = self._form(BytesStorageMetadata())
        self._where = self._form(MetadataIndex("", size, 1), "fqn", "index", "offset")
        self._where_object = self._form(MetadataIndex(""), "fqn")
        self._stored = self._form(_StorageInfo("", 0, 1), "relative_path", "offset", "length")
        self._whole = self._form(
            Metadata(state_dict_metadata={}, planner_data={}, storage_data={}),
            "state_dict_metadata",
            "planner_data",
            "storage_data",
        )

    def metadata(self, index: Index) -> bytes:
        items: dict[str, list[Item]] = defaultdict(list)
        for item in index.items:
            items[item.key].append(item)
        paths = index.paths if index.dialect == "dcp" else {}
        entries = [self._entry(key, index.tensors.get(key), stored) for key, stored in items.items()]
        planner_data = [self._strings[key] + self._path(path) for key, path in paths.items()]
        storage = [
            self._storage(item, number, key in index.tensors)
            for key, stored in items.items()
            for number, item in enumerate(stored)
        ]
        self._parts += [self._whole % (_dict(entries), _dict(planner_data), _dict(storage)), pickle.STOP]
        return b"".join(self._parts)

    def _entry(self, key: str, info: TensorInfo | None, items: list[Item]) -> bytes:
        """A key and what is stored of it."""
        if info is None:
            return self._strings[key] + self._object
        sizes, form = self._sizes, self._chunk
        chunks = b"".join([form % (sizes[i.box.offset], sizes[i.box.shape]) for i in items])
        tensor = self._tensor % (self._dtypes[info.dtype], sizes[info.shape], _LIST % chunks)
        return self._strings[key] + tensor

    def _storage(self, item: Item, number: int, is_tensor: bool) -> bytes:
        """Where to look for an item, the key's `number`th, and where it is."""
        name = self._strings[item.key]
        where = (
            self._where % (name, _int(number), self._sizes[item.box.offset])
            if is_tensor
            else self._where_object % name
        )
        return where + self._stored % (self._strings[item.file], _int(item.offset), _int(item.length))

    def _path(self, path: Path) -> bytes:
        return _tuple([self._strings[p] if isinstance(p, str) else _int(p) for p in path])

    def _define(self, data: bytes) -> bytes:
        """Have a value made ahead of the others; returns what refers to it."""
        self._parts.append(data + _DEFINED)
        number = self._num_defined
        self._num_defined += 1
        if number < 256:
            return pickle.BINGET + number.to_bytes(1)
        return _NUMBERED.pack(pickle.LONG_BINGET, number)

    def _form(self, specimen: object, *fields: str) -> bytes:
        """The opcodes for objects of a class, as a format with a place for each of the fields."""
        reduced = specimen.__reduce_ex__(4)
        makes = copyreg.__newobj__, (type(specimen),)  # type: ignore[attr-defined]
        if isinstance(reduced, str) or reduced[:2] != makes or any(x is not None for x in reduced[3:]):
            raise Unknown(type(specimen))
        state: Any = reduced[2]
        new = self._define(_plain(type(specimen))) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if state is None and not fields:
            return new
        if not isinstance(state, dict) or [f for f in state if f in fields] != list(fields):
            raise Unknown(type(specimen))
        values = {f: b"%b" if f in fields else _escaped(_plain(v)) for f, v in state.items()}
        content = [_escaped(self._strings[f]) + v for f, v in values.items()]
        return _escaped(new) + _dict(content) + pickle.BUILD


class _Defined(dict[Any, bytes]):
    """Value -> what refers to it; a value is defined when it is first asked for."""

    def __init__(self, define: Callable[[Any], bytes]) -> None:
        super().__init__()
        self._define = define

    def __missing__(self, value: Any) -> bytes:
        found = self[value] = self._define(value)
        return found


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _NUMBERED.pack(pickle.BINUNICODE, len(data)) + data


def _size(size_class: bytes, numbers: tuple[int, ...]) -> bytes:
    return size_class + _tuple([_int(n) for n in numbers]) + pickle.TUPLE1 + pickle.REDUCE


def _dict(content: Sequence[bytes]) -> bytes:
    """A dict of what are keys and values in turn."""
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(content) + pickle.SETITEMS


def _tuple(content: Sequence[bytes]) -> bytes:
    return pickle.MARK + b"".join(content) + pickle.TUPLE


def _int(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


def _plain(value: Any) -> bytes:
    """The opcodes of a value that neither fill nor read the memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def _escaped(data: bytes) -> bytes:
    return data.replace(b"%", b"%%")
