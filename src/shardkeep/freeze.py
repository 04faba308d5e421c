"""Captured state + this rank's share -> what `write` may read later: serialised values, and tensors or copies
of them.

Plain values are serialised at once, always: the caller may change them as soon as it has control again.
Tensors are copied only for a snapshot, and only those that this rank writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardkeep import serialize, stage
from shardkeep.layout import first_of_tied
from shardkeep.types import Captured, Dialect, ObjectShard, Path, Shard, ShardHeader, TensorShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """`shards` is parallel to `headers`, None where this rank does not write. `ready`: event after which
    device tensors hold their values; `device`: the one that threads are to use.
    """

    dialect: Dialect
    headers: list[ShardHeader]
    shards: list[Shard | None]
    payloads: dict[int, bytes]
    common: bytes | None
    paths: dict[str, Path]
    ready: torch.cuda.Event | None
    device: int | None
    segment: stage.Segment | None

    def release(self) -> None:
        """Give the snapshot's memory back for the next save."""
        if self.segment is not None:
            stage.arena.give_back(self.segment)


def freeze(captured: Captured, chosen: Sequence[int], rank: int, *, snapshot: bool, lenient: bool) -> Frozen:
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
    segment = None
    if snapshot:
        mine, segment = _snapshot(mine)
    shards = [mine.get(i) for i in range(len(captured.shards))]
    return Frozen(
        dialect=captured.dialect,
        headers=headers,
        shards=shards,
        payloads=payloads,
        common=common,
        paths=captured.paths,
        ready=None if snapshot else stage.current_event(),
        device=stage.current_device(),
        segment=segment,
    )


def _snapshot(shards: dict[int, Shard]) -> tuple[dict[int, Shard], stage.Segment]:
    tensors = {i: s for i, s in shards.items() if isinstance(s, TensorShard)}
    segment = stage.arena.take(sum(stage.padded_bytes(s.tensor) for s in tensors.values()))
    try:
        copies = {i: replace(s, tensor=segment.copy(s.tensor)) for i, s in tensors.items()}
        for device in {s.tensor.device for s in tensors.values() if s.tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
    except BaseException:
        stage.arena.give_back(segment)
        raise
    return shards | copies, segment
