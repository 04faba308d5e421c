"""Headers to plan with, and plans made of them as ranks make them: packed, sent, unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkeep import plan
from shardkeep.columns import Columns, pack, unpack
from shardkeep.types import Box, Dialect, ShardHeader, whole

ATTEMPT = "17000000000001234"


def header(
    key: str, box: Box, shape: tuple[int, ...], *, is_main: bool = True, dtype: str = "float32"
) -> ShardHeader:
    return ShardHeader(
        key=key, kind="tensor", dtype=dtype, shape=shape, box=box, is_main=is_main, num_bytes=box.numel * 4
    )


def object_header(key: str, *, is_main: bool = True) -> ShardHeader:
    return ShardHeader(
        key=key, kind="object", dtype="", shape=(), box=whole(()), is_main=is_main, num_bytes=0
    )


def rows(key: str, low: int, high: int, total: int, **more: object) -> ShardHeader:
    return header(key, Box(offset=(low, 0), shape=(high - low, 8)), (total, 8), **more)  # type: ignore[arg-type]


def joined(ranks: Sequence[Sequence[ShardHeader]]) -> Columns:
    return unpack([pack(headers) for headers in ranks])


def assign(ranks: Sequence[Sequence[ShardHeader]], dialect: Dialect, **rules: Any) -> list[list[int]]:
    return [share.tolist() for share in plan.assign(joined(ranks), dialect, **rules)]
