"""Captured state + this rank's share -> what `write` may read later: serialised values, and tensors or copies
of them.

Plain values are serialised at once, always: the caller may change them as soon as it has control again.
Which tensors are copied depends on the capture mode (`sync` none, `snapshot` all, `lazy` those that no
registered optimizer owns), and on whether there is room for the copies. Only this rank's share is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardkeep import serialize, stage
from shardkeep.arena import Segment, arena, padded_bytes
from shardkeep.budget import Free, in_words
from shardkeep.hold import held_memory, memory_of
from shardkeep.layout import first_of_tied
from shardkeep.types import (
    Captured,
    CaptureMode,
    Dialect,
    ObjectShard,
    Path,
    Shard,
    ShardHeader,
    TensorShard,
)

log = logging.getLogger("shardkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory for the copies of a save: the shards to copy into `segment`, and those that should be copied
    but are not, because there is no room (`left`: then nothing else is copied either).
    """

    copied: frozenset[int] = frozenset()
    left: bool = False
    segment: Segment | None = None

    def release(self) -> None:
        """Give the memory back for the next save."""
        if self.segment is not None:
            arena.give_back(self.segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """`shards` is parallel to `headers`, None where this rank does not write. `ready`: event after which
    device tensors and copies of them hold their values; `device`: the one that threads are to use.
    `by_reference`: tensors are read where the caller has them.
    """

    dialect: Dialect
    headers: list[ShardHeader]
    shards: list[Shard | None]
    payloads: dict[int, bytes]
    common: bytes | None
    paths: dict[str, Path]
    ready: torch.cuda.Event | None
    device: int | None
    by_reference: bool
    room: Room

    @property
    def unguarded(self) -> bool:
        """No optimizer's step waits until some tensors are read, so the caller has to."""
        return self.room.left


def make_room(captured: Captured, chosen: Sequence[int], mode: CaptureMode, limit: Free) -> Room:
    """Memory for what the mode copies; new memory only up to `limit`. One warning if there is not enough."""
    if mode == "sync":
        return Room()
    first = first_of_tied([s.header for s in captured.shards], chosen)
    tensors = [(i, s) for i in first if isinstance(s := captured.shards[i], TensorShard)]
    if mode == "lazy":
        held = held_memory()
        tensors = [(i, s) for i, s in tensors if memory_of(s.tensor) not in held]
    needed = sum(padded_bytes(s.tensor) for _, s in tensors)
    if not needed:
        return Room()
    segment = arena.take(needed, limit.num_bytes)
    if segment is None:
        log.warning(
            "no memory for a copy of the state: it needs %s, this rank's share of what is free is %s (%s);"
            " this save streams to storage, and holds training until it has read the state",
            in_words(needed),
            in_words(limit.num_bytes),
            limit.limited_by,
        )
    return Room(
        copied=frozenset(i for i, _ in tensors) if segment else frozenset(),
        left=segment is None,
        segment=segment,
    )


def freeze(
    captured: Captured, chosen: Sequence[int], rank: int, *, mode: CaptureMode, room: Room, lenient: bool
) -> Frozen:
    """See the module. InvalidState for a value that could not be loaded again."""
    headers = [s.header for s in captured.shards]
    mine = {i: captured.shards[i] for i in first_of_tied(headers, chosen)}
    payloads = {
        i: serialize.dumps(s.value, s.header.key, lenient=lenient)
        for i, s in mine.items()
        if isinstance(s, ObjectShard)
    }
    common = None
    if captured.dialect == "megatron" and rank == 0:
        common = serialize.dumps(captured.common, "common", lenient=lenient)
    mine |= _copies(mine, room)
    if mode == "snapshot" and room.segment:
        _wait_for_copies(captured, room)
    return Frozen(
        dialect=captured.dialect,
        headers=headers,
        shards=[mine.get(i) for i in range(len(headers))],
        payloads=payloads,
        common=common,
        paths=captured.paths,
        ready=stage.current_event(),
        device=stage.current_device(),
        by_reference=any(isinstance(s, TensorShard) and i not in room.copied for i, s in mine.items()),
        room=room,
    )


def _copies(shards: dict[int, Shard], room: Room) -> dict[int, Shard]:
    """Asynchronous for device tensors: on the caller's stream, so before anything that changes them."""
    copied: dict[int, Shard] = {}
    for i in sorted(room.copied):
        shard = shards[i]
        assert room.segment is not None and isinstance(shard, TensorShard)
        copied[i] = replace(shard, tensor=room.segment.copy(shard.tensor))
    return copied


def _wait_for_copies(captured: Captured, room: Room) -> None:
    """A snapshot is in host memory when its caller has control again, whatever happens to the device's."""
    devices = {s.tensor.device for i in room.copied if isinstance(s := captured.shards[i], TensorShard)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
