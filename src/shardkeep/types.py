"""The vocabulary that the stages exchange. Frozen, slotted, keyword-only; no behaviour beyond arithmetic on
boxes.

Two layers: what a rank holds (`TensorShard`, `ObjectShard`, `Captured`) and what a checkpoint stores (`Item`,
`StoredFile`, `Index`, `Manifest`). Headers are the part of a shard that travels between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from shardkeep.storage import Storage

Dialect = Literal["megatron", "dcp"]
CaptureMode = Literal["sync", "snapshot", "lazy"]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A hyper-rectangle of a global tensor: `offset` and `shape`, in elements, one entry per global
    dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None where they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= x for x, h in zip(low, high, strict=True)):
            return None
        return Box(offset=low, shape=tuple(h - x for x, h in zip(low, high, strict=True)))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies inside `outer`, as slices of a tensor that holds `outer`."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return Box(offset=(0,) * len(shape), shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What other ranks need to know of a shard. `is_main`: Megatron's main replica; in the `dcp` dialect
    every copy is one. `tied_to`: key of this rank's first shard of the same memory and box (tied weights).
    """

    key: str
    kind: Literal["tensor", "object"]
    dtype: str
    shape: tuple[int, ...]
    box: Box
    is_main: bool
    num_bytes: int
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A tensor (any strides, any device) that holds `header.box`; its own shape may lack axes of size 1 of
    the box.
    """

    header: ShardHeader
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectShard:
    """A value that `torch.save` will serialise on the rank that writes it."""

    header: ShardHeader
    value: Any


Shard = TensorShard | ObjectShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's state, taken apart. `common` holds the plain values of the Megatron dialect (rank 0 writes
    them), `paths` the nesting of the `dcp` dialect. `digests` (hex, by key) let ranks compare plain values
    that all should hold alike.
    """

    dialect: Dialect
    shards: list[Shard]
    paths: dict[str, Path] = field(default_factory=dict)
    common: dict[Any, Any] | None = None
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes and under which rules. `attached`: files for other tools, name -> bytes.
    `keep_previous`: leave the files of older attempts, because a run removes them after its step is
    committed. `lenient`: as unmodified trainers need it, differing plain values and directories only warn.
    `check_cover`: refuse shards that do not tile their tensor.
    """

    storage: Storage
    overwrite: bool = False
    step: int | None = None
    attached: dict[str, bytes] = field(default_factory=dict)
    keep_previous: bool = False
    lenient: bool = False
    check_cover: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank has written and made durable; `paths` (dialect `dcp`) nests the keys of its items."""

    items: list[Item]
    files: dict[str, StoredFile]
    paths: dict[str, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of one local shard placed in a file: `shard` indexes `Captured.shards`, head and tail frame the
    payload, `also` are other shards with the same bytes.
    """

    shard: int
    box: Box
    offset: int
    head_bytes: int
    tail_bytes: int
    num_bytes: int
    also: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.head_bytes + self.num_bytes + self.tail_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """One file that this rank writes: pieces back to back from offset 0."""

    name: str
    pieces: list[Piece]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A stored box or object. Offsets are absolute in `file`; see docs/format.md."""

    key: str
    kind: Literal["tensor", "object"]
    dtype: str
    box: Box
    file: str
    offset: int
    length: int
    payload_offset: int
    num_bytes: int


def stored_bytes(items: Iterable[Item]) -> int:
    """Payload bytes of items, once where tied tensors share them."""
    return sum({(i.file, i.offset): i.num_bytes for i in items}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Size in bytes and the concatenated 16-byte checksums of the chunks (empty: not checksummed)."""

    size: int
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything a reader needs to find bytes; the content of `shardkeep.<attempt>.index`."""

    format_version: int
    attempt: str
    dialect: Dialect
    checksum: str
    chunk_bytes: int
    tensors: dict[str, TensorInfo]
    items: list[Item]
    files: dict[str, StoredFile]
    paths: dict[str, tuple[str | int, ...]]
    fixed: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `shardkeep.json`; `files` maps every attempt-unique file to its size in bytes."""

    format_version: int
    attempt: str
    dialect: Dialect
    step: int | None
    versions: dict[str, str | None]
    layout: dict[str, int]
    totals: dict[str, int]
    files: dict[str, int]
    index_digest: str
    fixed: dict[str, str]
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did. Bytes are payload bytes over all ranks; `seconds` has one entry per phase of this
    rank; `stall_s` is how long the training thread was held.
    """

    path: str
    attempt: str
    num_bytes: int
    num_items: int
    num_files: int
    seconds: dict[str, float]
    stall_s: float
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did on this rank, in bytes of tensors: placed into the state, read from storage (whole
    checksum chunks), and received from ranks that had read them (`Config.read_once`).
    """

    path: str
    num_bytes: int
    read_bytes: int
    received_bytes: int
    seconds: dict[str, float]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of `verify`: `problems` is empty for a good checkpoint; each names file or key, expected and
    got.
    """

    path: str
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]
    checksums: bool

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What committing a step of a run did; `components` maps a name to its SaveReport. Seconds are the
    slowest component's.
    """

    step: int
    path: str
    num_bytes: int
    stall_s: float
    seconds: dict[str, float]
    components: dict[str, SaveReport]


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix, as stored: 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in a checkpoint; a newer torch may know it")
    return found
