"""Checkpoints made by hand from the format's own encoders, for tests of everything that reads.

`craft(directory, tensors={"w": (tensor, [box, ...])}, ...)` writes items with `torch.save`, finds payloads
through `zipfile`, and hashes chunks with xxhash: nothing of the library's writer is used, so that readers
and writer are checked against the format and not against each other.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from shardkeep.manifest import (
    attempt_manifest_name,
    common_name,
    data_name,
    digest,
    encode_index,
    encode_manifest,
    index_name,
)
from shardkeep.types import Box, Index, Item, Manifest, StoredFile, TensorInfo, dtype_name, whole

ATTEMPT = "17961359597790042"
LATER = "17961359999990007"
CHUNK = 4096


def craft(
    directory: Path,
    tensors: Mapping[str, torch.Tensor | tuple[torch.Tensor, Sequence[Box]]],
    *,
    objects: Mapping[str, Any] | None = None,
    common: dict[str, Any] | None = None,
    attempt: str = ATTEMPT,
    chunk_bytes: int = CHUNK,
    num_files: int = 2,
    checksum: str = "xxh3_128",
    fixed: Mapping[str, bytes] | None = None,
    commit: bool = True,
) -> Manifest:
    """Write a checkpoint; `commit=False` stops before `shardkeep.json`, as a save does that dies there."""
    directory.mkdir(parents=True, exist_ok=True)
    blobs: dict[str, bytearray] = {data_name(0, attempt, n): bytearray() for n in range(num_files)}
    items, infos = [], {}
    jobs: list[tuple[str, str, Any, Box]] = []
    for key, value in tensors.items():
        tensor, boxes = value if isinstance(value, tuple) else (value, [whole(tuple(value.shape))])
        infos[key] = TensorInfo(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for box in boxes:
            part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            jobs.append((key, "tensor", part.contiguous().clone(), box))
    jobs += [(key, "object", value, Box(offset=(), shape=())) for key, value in (objects or {}).items()]
    for number, (key, kind, value, box) in enumerate(jobs):
        file = list(blobs)[number % num_files]
        data = saved(value)
        start, size = (0, len(data)) if kind == "object" else payload(data)
        items.append(
            Item(
                key=key,
                kind=kind,
                dtype=infos[key].dtype if kind == "tensor" else "",
                box=box,
                file=file,
                offset=len(blobs[file]),
                length=len(data),
                payload_offset=len(blobs[file]) + start,
                num_bytes=size,
            )
        )
        blobs[file] += data
    if common is not None:
        blobs[common_name(attempt)] = bytearray(saved(common))
    fixed = dict(fixed or {})
    hashes = {name: digest(data) for name, data in fixed.items()}
    dialect = "dcp" if common is None else "megatron"
    index = Index(
        format_version=1,
        attempt=attempt,
        dialect=dialect,
        checksum=checksum,
        chunk_bytes=chunk_bytes,
        tensors=infos,
        items=items,
        files={n: StoredFile(size=len(b), checksums=hashed(b, chunk_bytes)) for n, b in blobs.items()},
        paths={},
        fixed=hashes,
    )
    for name, data in blobs.items():
        (directory / name).write_bytes(data)
    encoded = encode_index(index)
    (directory / index_name(attempt)).write_bytes(encoded)
    sizes = {name: len(data) for name, data in blobs.items()} | {index_name(attempt): len(encoded)}
    manifest = Manifest(
        format_version=1,
        attempt=attempt,
        dialect=dialect,
        step=7,
        layout={"world_size": 1, "tp": 1},
        versions={"shardkeep": "0.1.0", "torch": torch.__version__, "megatron": None},
        totals={
            "num_bytes": sum(i.num_bytes for i in items),
            "num_items": len(items),
            "num_files": len(blobs),
        },
        files=sizes,
        index_digest=digest(encoded),
        fixed=hashes,
    )
    (directory / attempt_manifest_name(attempt)).write_bytes(encode_manifest(manifest))
    for name, data in fixed.items():
        (directory / name).write_bytes(data)
    if commit:
        (directory / "shardkeep.json").write_bytes(encode_manifest(manifest))
    return manifest


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def payload(archive: bytes) -> tuple[int, int]:
    """Start and size of the tensor's bytes in an archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as z:
        entry = next(i for i in z.infolist() if i.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", archive, entry.header_offset + 26)
    return entry.header_offset + 30 + name_bytes + extra_bytes, entry.file_size


def hashed(data: bytes | bytearray, chunk_bytes: int) -> bytes:
    return b"".join(
        xxhash.xxh3_128_digest(bytes(data[at : at + chunk_bytes])) for at in range(0, len(data), chunk_bytes)
    )


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def grid(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """`shape` cut into `parts[d]` nearly equal pieces along each dimension."""
    boxes = [Box(offset=(), shape=())]
    for size, count in zip(shape, parts, strict=True):
        cuts = [size * n // count for n in range(count + 1)]
        boxes = [
            Box(offset=(*b.offset, low), shape=(*b.shape, high - low))
            for b in boxes
            for low, high in pairwise(cuts)
        ]
    return boxes
