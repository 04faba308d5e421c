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
from collections.abc import Iterable, Sequence
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
_FIELD = "a field to fill in"
_STRING, _ENTRY = struct.Struct("<cI"), struct.Struct("<cI")


class Unknown(Exception):
    """A class is not pickled as it is known how to."""


def dump(index: Index) -> bytes:
    """What `pickle.dumps(vanilla.dcp_objects(index))` says, in other opcodes: it loads as an equal object."""
    return _Writer().metadata(index)


class _Writer:
    def __init__(self) -> None:
        self._parts = [_START]
        self._num_defined = 0
        self._strings: dict[str, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._properties: dict[str, bytes] = {}
        self._size_class = self._define(_plain(torch.Size))
        size, properties = torch.Size(()), TensorProperties(dtype=torch.float32)
        self._tensor = self._form(
            TensorStorageMetadata(properties=properties, size=size, chunks=[]), "properties", "size", "chunks"
        )
        self._chunk = self._form(ChunkStorageMetadata(offsets=size, sizes=size), "offsets", "sizes")
        self._object = self._form(BytesStorageMetadata())
        self._where = self._form(MetadataIndex("", size, 1), "fqn", "index", "offset")
        self._where_object = self._form(MetadataIndex(""), "fqn", "index")
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
        planner_data = [self._string(key) + self._path(path) for key, path in paths.items()]
        storage = [self._storage(key, key in index.tensors, stored) for key, stored in items.items()]
        self._parts += [self._whole % (_dict(entries), _dict(planner_data), _dict(storage)), pickle.STOP]
        return b"".join(self._parts)

    def _entry(self, key: str, info: TensorInfo | None, items: list[Item]) -> bytes:
        """A key and what is stored of it."""
        if info is None:
            return self._string(key) + self._object
        size, form = self._size, self._chunk
        chunks = [form % (size(i.box.offset), size(i.box.shape)) for i in items]
        chunk_list = pickle.EMPTY_LIST + pickle.MARK + b"".join(chunks) + pickle.APPENDS
        return self._string(key) + self._tensor % (self._dtype(info.dtype), size(info.shape), chunk_list)

    def _storage(self, key: str, is_tensor: bool, items: list[Item]) -> bytes:
        """For each item of a key, where to look for it and where it is."""
        name, string = self._string(key), self._string
        return b"".join(
            [
                (self._where % (name, _int(n), self._size(i.box.offset)) if is_tensor else self._where_object % (name, b"N"))
                + self._stored % (string(i.file), _int(i.offset), _int(i.length))
                for n, i in enumerate(items)
            ]
        )

    def _path(self, path: Path) -> bytes:
        return _tuple(self._string(p) if isinstance(p, str) else _int(p) for p in path)

    def _dtype(self, name: str) -> bytes:
        """The properties of tensors of a dtype."""
        if name not in self._properties:
            self._properties[name] = self._define(_plain(TensorProperties(dtype=dtype_named(name))))
        return self._properties[name]

    def _size(self, numbers: tuple[int, ...]) -> bytes:
        found = self._sizes.get(numbers)
        if found is None:
            made = self._size_class + _tuple(map(_int, numbers)) + pickle.TUPLE1 + pickle.REDUCE
            found = self._sizes[numbers] = self._define(made)
        return found

    def _string(self, text: str) -> bytes:
        found = self._strings.get(text)
        if found is None:
            data = text.encode("utf-8", "surrogatepass")
            found = self._strings[text] = self._define(_STRING.pack(pickle.BINUNICODE, len(data)) + data)
        return found

    def _define(self, data: bytes) -> bytes:
        """Have a value made ahead of the others; returns what refers to it."""
        self._parts.append(data + _DEFINED)
        number = self._num_defined
        self._num_defined += 1
        return pickle.BINGET + number.to_bytes(1) if number < 256 else _ENTRY.pack(pickle.LONG_BINGET, number)

    def _form(self, specimen: object, *fields: str) -> bytes:
        """The opcodes for objects of a class, as a format with a place for each of the fields."""
        make, args, state, *more = specimen.__reduce_ex__(4)
        if make is not copyreg.__newobj__ or args != (type(specimen),) or any(m is not None for m in more):  # type: ignore[attr-defined]
            raise Unknown(type(specimen))
        new = self._define(_plain(type(specimen))) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if state is None and not fields:
            return new
        if not isinstance(state, dict) or [f for f in state if f in fields] != list(fields):
            raise Unknown(type(specimen))
        values = {f: b"%b" if f in fields else _escaped(_plain(v)) for f, v in state.items()}
        content = [_escaped(self._string(f)) + v for f, v in values.items()]
        return _escaped(new) + _dict(content) + pickle.BUILD


def _dict(content: Sequence[bytes]) -> bytes:
    """A dict of what are keys and values in turn."""
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(content) + pickle.SETITEMS


def _tuple(content: Iterable[bytes]) -> bytes:
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
