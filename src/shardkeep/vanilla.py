"""Index -> the fixed-name files with which unmodified torch DCP and megatron-core read our checkpoints. Pure.

`.metadata` is DCP's pickled `Metadata`; we only ever write it. `metadata.json` has exactly Megatron's four
fields, since 0.13-0.18 reject any other. See docs/format.md, "Dialects".
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable

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

from shardkeep import dcp_pickle
from shardkeep.types import Index, Item, TensorInfo, dtype_named

MEGATRON_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def fixed_files(index: Index, common: bytes | None, *, metadata: bool) -> dict[str, bytes]:
    """Name -> bytes, in the order in which they are to be put in place: Megatron's own marker comes last.
    Without `metadata` the checkpoint is for shardkeep's readers alone.
    """
    files = {".metadata": dcp_metadata(index)} if metadata else {}
    if index.dialect == "megatron":
        assert common is not None
        files = {"common.pt": common, **files, "metadata.json": json.dumps(MEGATRON_CONFIG).encode()}
    return files


def dcp_metadata(index: Index) -> bytes:
    """The pickled `torch.distributed.checkpoint.metadata.Metadata` of the checkpoint."""
    try:
        return dcp_pickle.dump(index)
    except dcp_pickle.Unknown:
        return pickle.dumps(dcp_objects(index))


def dcp_objects(index: Index) -> Metadata:
    """DCP's own description of the checkpoint.

    Equal offsets, shapes and file names are one object each: the pickle names it again by a few bytes, and a
    reader holds it once. It halves time and size for hundreds of thousands of shards.
    """
    items: dict[str, list[Item]] = defaultdict(list)
    for item in index.items:
        items[item.key].append(item)
    sizes: dict[tuple[int, ...], torch.Size] = {}
    files: dict[str, str] = {}

    def size(numbers: tuple[int, ...]) -> torch.Size:
        found = sizes.get(numbers)
        return found if found is not None else sizes.setdefault(numbers, torch.Size(numbers))

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in items.items():
        info = index.tensors.get(key)
        if info is None:
            entries[key] = BytesStorageMetadata()
        else:
            entries[key] = _tensor_entry(info, stored, size)
        for number, item in enumerate(stored):
            where = MetadataIndex(key)
            if info is not None:  # its constructor would copy the offset
                where.__dict__.update(offset=size(item.box.offset), index=number)
            file = files.setdefault(item.file, item.file)
            storage[where] = _StorageInfo(file, item.offset, item.length)
    planner_data = {k: tuple(p) for k, p in index.paths.items()} if index.dialect == "dcp" else {}
    return Metadata(state_dict_metadata=entries, planner_data=planner_data, storage_data=storage)


def _tensor_entry(
    info: TensorInfo, items: list[Item], size: Callable[[tuple[int, ...]], torch.Size]
) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(info.dtype)),
        size=torch.Size(info.shape),
        chunks=[ChunkStorageMetadata(offsets=size(i.box.offset), sizes=size(i.box.shape)) for i in items],
    )
