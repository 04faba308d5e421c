"""Headers to plan with."""

from __future__ import annotations

from shardkeep.types import Box, ShardHeader, whole

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
