"""Shard headers <-> arrays: what travels from each rank to rank 0, and what rank 0 plans with. Pure.

In: a rank's headers (`pack`) or the packed ones of all ranks (`unpack`). Out: bytes, or one `Columns` with a
row per shard. Invariant: row `starts[r] + i` describes shard `i` of rank `r`, exactly as its header did.
Ranks of one pipeline stage hold the same keys, so a table of keys is decoded once however many ranks sent it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkeep.types import Box, ShardHeader

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_SCALARS = 6  # rows of the packed array before shape, offset and extent: see `pack_ints`
_IS_MAIN, _IS_OBJECT = 1, 2
_LEVEL = 1  # zlib's fastest: columns shrink about tenfold at any level


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The shards of all ranks, n rows. Tensors with fewer dimensions than D have offset 0 and extent 1 in the
    others, so that products over D need no mask.
    """

    keys: list[str]
    dtypes: list[str]
    starts: Ints
    """(ranks + 1,): first row of each rank."""
    rank: NDArray[np.int32]
    """(n,): who holds the shard."""
    key: NDArray[np.int32]
    """(n,): index in `keys`."""
    dtype: NDArray[np.uint8]
    """(n,): index in `dtypes`."""
    ndim: NDArray[np.uint8]
    """(n,)"""
    is_main: Flags
    """(n,)"""
    is_object: Flags
    """(n,)"""
    num_bytes: Ints
    """(n,)"""
    tied: NDArray[np.int32]
    """(n,): the key, as an index in `keys`, whose box on the same rank is the same memory; -1 for none."""
    shape: Ints
    """(D, n): global shape."""
    offset: Ints
    """(D, n): where the box begins."""
    extent: Ints
    """(D, n): shape of the box."""

    @property
    def num_ranks(self) -> int:
        return len(self.starts) - 1

    def header(self, row: int) -> ShardHeader:
        """One row as a header again."""
        used = slice(0, int(self.ndim[row]))
        return ShardHeader(
            key=self.keys[self.key[row]],
            kind="object" if self.is_object[row] else "tensor",
            dtype=self.dtypes[self.dtype[row]],
            shape=tuple(self.shape[used, row].tolist()),
            box=Box(
                offset=tuple(self.offset[used, row].tolist()), shape=tuple(self.extent[used, row].tolist())
            ),
            is_main=bool(self.is_main[row]),
            num_bytes=int(self.num_bytes[row]),
            tied_to=None if self.tied[row] < 0 else self.keys[self.tied[row]],
        )


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """One rank's headers on the wire. `keys` is zlib of a msgpack array of str; `ints` zlib of an int64 array
    (6 + 3 D, n) in row-major order, see `pack_ints`."""

    num_shards: int
    num_dims: int
    dtypes: list[str]
    keys: bytes
    ints: bytes


def pack(headers: Sequence[ShardHeader]) -> bytes:
    """The headers of one rank, as small as they travel."""
    keys = _numbered(key for h in headers for key in (h.key, h.tied_to) if key is not None)
    dtypes = _numbered(h.dtype for h in headers)
    num_dims = max((len(h.shape) for h in headers), default=0)
    ints = np.empty((_SCALARS + 3 * num_dims, len(headers)), np.int64)
    ints[0] = [keys[h.key] for h in headers]
    ints[1] = [dtypes[h.dtype] for h in headers]
    ints[2] = [len(h.shape) for h in headers]
    ints[3] = [_IS_MAIN * h.is_main + _IS_OBJECT * (h.kind == "object") for h in headers]
    ints[4] = [h.num_bytes for h in headers]
    ints[5] = [-1 if h.tied_to is None else keys[h.tied_to] for h in headers]
    zeros, ones = (0,) * num_dims, (1,) * num_dims
    if num_dims:
        shape, offset, extent = np.split(ints[_SCALARS:], 3)
        shape.T[:] = [(*h.shape, *ones[len(h.shape) :]) for h in headers]
        offset.T[:] = [(*h.box.offset, *zeros[len(h.shape) :]) for h in headers]
        extent.T[:] = [(*h.box.shape, *ones[len(h.shape) :]) for h in headers]
    return pack_ints(list(keys), list(dtypes), ints)


def pack_ints(keys: list[str], dtypes: list[str], ints: Ints) -> bytes:
    """`pack` of an array whose rows are: key (index in `keys`), dtype (index in `dtypes`), ndim, flags (1:
    main replica, 2: object), bytes, tied key (index in `keys`, or -1), then D rows each of shape, offset and
    extent of the box.
    """
    packed = Packed(
        num_shards=ints.shape[1],
        num_dims=(ints.shape[0] - _SCALARS) // 3,
        dtypes=dtypes,
        keys=zlib.compress(msgspec.msgpack.encode(keys), _LEVEL),
        ints=zlib.compress(ints.tobytes(), _LEVEL),
    )
    return msgspec.msgpack.encode(packed)


def unpack(ranks: Sequence[bytes]) -> Columns:
    """What all ranks have packed, by rank."""
    packed = [msgspec.msgpack.decode(p, type=Packed) for p in ranks]
    starts = np.array([0, *accumulate(p.num_shards for p in packed)], np.int64)
    num_rows, num_dims = int(starts[-1]), max((p.num_dims for p in packed), default=0)
    keys, dtypes = _Table(), _Table()
    joined = Columns(
        keys=keys.names,
        dtypes=dtypes.names,
        starts=starts,
        rank=np.repeat(np.arange(len(packed), dtype=np.int32), np.diff(starts)),
        key=np.empty(num_rows, np.int32),
        dtype=np.empty(num_rows, np.uint8),
        ndim=np.empty(num_rows, np.uint8),
        is_main=np.empty(num_rows, np.bool_),
        is_object=np.empty(num_rows, np.bool_),
        num_bytes=np.empty(num_rows, np.int64),
        tied=np.empty(num_rows, np.int32),
        shape=np.ones((num_dims, num_rows), np.int64),
        offset=np.zeros((num_dims, num_rows), np.int64),
        extent=np.ones((num_dims, num_rows), np.int64),
    )
    tables: dict[bytes, Ints] = {}  # of keys, by how they came
    for rank, p in enumerate(packed):
        if p.keys not in tables:
            tables[p.keys] = keys.ids(msgspec.msgpack.decode(zlib.decompress(p.keys), type=list[str]))
        _fill(joined, slice(starts[rank], starts[rank + 1]), p, tables[p.keys], dtypes.ids(p.dtypes))
    return joined


def _fill(joined: Columns, rows: slice, packed: Packed, keys: Ints, dtypes: Ints) -> None:
    ints = np.frombuffer(zlib.decompress(packed.ints), np.int64)
    ints = ints.reshape(_SCALARS + 3 * packed.num_dims, packed.num_shards)
    joined.key[rows] = keys[ints[0]]
    joined.dtype[rows] = dtypes[ints[1]]
    joined.ndim[rows] = ints[2]
    joined.is_main[rows] = ints[3] & _IS_MAIN
    joined.is_object[rows] = ints[3] & _IS_OBJECT
    joined.num_bytes[rows] = ints[4]
    joined.tied[rows] = np.where(ints[5] < 0, -1, keys[ints[5]])
    if packed.num_dims:
        used = slice(0, packed.num_dims)
        joined.shape[used, rows], joined.offset[used, rows], joined.extent[used, rows] = np.split(
            ints[_SCALARS:], 3
        )


class _Table:
    """Names numbered in the order in which they come."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def ids(self, names: Iterable[str]) -> Ints:
        found = []
        for name in names:
            number = self._numbers.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name)
            found.append(number)
        return np.array(found, np.int64)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found.setdefault(name, len(found))
    return found
