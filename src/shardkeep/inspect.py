"""A path -> what the checkpoint there holds, and any part of it, without a job that fits it.

ckpt = sk.inspect(path)
print(ckpt)                                       # a table of keys, dtypes, shapes
ckpt.read("decoder.weight", Box(offset=(0, 0), shape=(4, 8)))
ckpt.read("step")                                 # a plain value of the DCP dialect
ckpt.common()                                     # Megatron's plain values
"""

from __future__ import annotations

import os
from typing import Any

from shardkeep.catalog import Catalog
from shardkeep.catalog import resolve as resolve_catalog
from shardkeep.config import resolve as resolve_config
from shardkeep.errors import MissingKey
from shardkeep.load import load_value, read_common, read_object, read_tensor
from shardkeep.manifest import MANIFEST
from shardkeep.storage import Storage, storage_for
from shardkeep.types import Box, Dialect, Manifest, TensorInfo

_ROWS = 20


def inspect(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a committed checkpoint of shardkeep, Megatron or torch DCP for reading. NotCommitted, Corrupt or
    UnsafePickle if that is not possible."""
    return Checkpoint(storage_for(path))


class Checkpoint:
    """A committed checkpoint, read only. Nothing is kept open; each read opens what it needs."""

    def __init__(self, storage: Storage, manifest_name: str = MANIFEST) -> None:
        self._storage = storage
        self._catalog: Catalog = resolve_catalog(storage, manifest_name)

    @property
    def path(self) -> str:
        return self._storage.url

    @property
    def dialect(self) -> Dialect:
        return self._catalog.dialect

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Key -> dtype (torch's name) and global shape."""
        return dict(self._catalog.tensors)

    @property
    def objects(self) -> list[str]:
        """Keys of values that are not tensors."""
        return self._catalog.objects

    @property
    def files(self) -> dict[str, int]:
        """Name -> size in bytes of the files that hold the content."""
        return {name: stored.size for name, stored in self._catalog.files.items()}

    @property
    def manifest(self) -> Manifest | None:
        """None for a checkpoint of another tool."""
        return self._catalog.manifest

    @property
    def layout(self) -> dict[str, int]:
        """World size and parallel sizes of the run that saved, as far as known; empty for a checkpoint of
        another tool."""
        return dict(self._catalog.manifest.layout) if self._catalog.manifest else {}

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all tensors and objects."""
        return self._catalog.num_bytes()

    def boxes(self, key: str) -> list[Box]:
        """How a tensor is cut up in storage."""
        return [item.box for item in self._catalog.items.get(key, [])]

    def read(self, key: str, box: Box | None = None) -> Any:
        """A tensor on the CPU (or a box of it, in elements), or a value. MissingKey, Mismatch, Corrupt,
        UnsafePickle."""
        if key in self._catalog.tensors:
            return read_tensor(self._storage, self._catalog, key, resolve_config(None), box)
        if key not in self._catalog.items:
            raise MissingKey(f"the checkpoint has neither a tensor nor a value {key!r}", path=self.path)
        value = load_value(read_object(self._storage, self._catalog, key), key)
        if (
            self.dialect == "megatron" and isinstance(value, list) and len(value) == 1
        ):  # a ShardedObject is stored as [data]
            return value[0]
        return value

    def common(self) -> dict[Any, Any]:
        """Megatron's plain values; empty in the DCP dialect."""
        return read_common(self._storage, self._catalog)

    def values(self) -> dict[str, Any]:
        """All values that are not tensors, by key."""
        return {key: self.read(key) for key in self.objects}

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self._summary()})"

    def __str__(self) -> str:
        rows = [
            (key, info.dtype, "x".join(map(str, info.shape)) or "scalar", f"{len(self._catalog.items[key])}")
            for key, info in sorted(self._catalog.tensors.items())[:_ROWS]
        ]
        head = ("key", "dtype", "shape", "boxes")
        widths = [max(len(row[n]) for row in [head, *rows]) for n in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        left = len(self._catalog.tensors) - len(rows)
        more = [f"... and {left} more tensors"] if left else []
        return "\n".join([f"{self.path}: {self._summary()}", *lines, *more])

    def _summary(self) -> str:
        origin = f"shardkeep {self.manifest.versions.get('shardkeep')}" if self.manifest else "another tool"
        num_tensors, num_files = len(self._catalog.tensors), len(self._catalog.files)
        return (
            f"{self.dialect} dialect by {origin}, {num_tensors} tensors, {len(self.objects)} objects, "
            f"{num_files} files, {self.num_bytes:,} bytes"
        )
