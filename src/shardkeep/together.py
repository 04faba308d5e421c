"""The ranks of a load, reading together: each byte that several need comes from storage once.

In: what this rank needs, as units or as ranges of files. Out: the units filled, or the ranges in memory
(`Held`). `Together.agree` decides for all ranks whether a loading does this. Every method is collective and
driven by the training thread; what ranks tell each other goes over our store, the bytes over `connect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import numpy as np
import torch

from shardkeep.catalog import METADATA, Catalog, judge, read_foreign, read_ours
from shardkeep.config import Config
from shardkeep.connect import Inbox, Outbox
from shardkeep.coordinate import Coordinator
from shardkeep.errors import Corrupt
from shardkeep.exchange import Job, exchange, tasks_of
from shardkeep.fetch import Checker, Ready, usable_bytes
from shardkeep.manifest import common_name, index_name
from shardkeep.memory import host_bytes
from shardkeep.once import OWN, Numbers, Share, assign, pack, unpack
from shardkeep.ranges import DIRECT_BYTES, Unit, granule
from shardkeep.rendezvous import route_to
from shardkeep.storage import Reader, Storage
from shardkeep.types import Dialect, Manifest

Range = tuple[str, int, int]


class Together:
    """What the loadings of one session share: connections between the ranks, opened at their first use."""

    def __init__(self, ranks: Coordinator) -> None:
        self.ranks = ranks
        self._number = 0
        self._inbox: Inbox | None = None
        self._outbox = Outbox(ranks.rank)

    def agree(self, storage: Storage, config: Config, label: str) -> Once | None:
        """How to read `storage` as one, or None if each rank is to read for itself. Rank 0 decides, by its
        configuration and by where it sees the storage.
        """
        if self.ranks.world_size == 1:
            return None
        rooms = self.ranks.gather(f"room{label}", usable_bytes(config))
        told = 0
        if rooms is not None:
            is_on = config.read_once == "on" or (config.read_once == "auto" and storage.is_shared)
            told = min(rooms) if is_on else 0
        room = self.ranks.broadcast(f"once{label}", told)
        return Once(self, storage, config, room) if room else None

    def run(self, make_job: Any, needs: Numbers, room: int) -> tuple[int, int]:
        """Tell the ranks what this one needs, learn its share of the work, and do it."""
        self._number += 1
        ranks = self.ranks
        self._inbox = self._inbox or Inbox()
        card = self._inbox.card(ranks.addresses())
        everyone = ranks.gather(f"needs{self._number}", [pack(needs), card])
        shares = None
        if everyone is not None:
            shares = _shares([unpack(n) for n, _ in everyone], [c for _, c in everyone], room)
        sources, reads, parts, cards = ranks.scatter(f"share{self._number}", shares)
        self._outbox.know(dict(cards))
        job = make_job(Share(unpack(sources), unpack(reads), unpack(parts)))
        return exchange(job, ranks, self._inbox, self._outbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._outbox.close()
        if self._inbox is not None:
            self._inbox.close()


def _shares(needs: list[Numbers], cards: list[Any], room: int) -> list[Any]:
    """What rank 0 tells each rank: its share, and where the ranks are that it sends to. Rank 0 itself is
    reached at the address that its packets to that rank come from.
    """
    told = []
    for rank, share in enumerate(assign(needs, room)):
        peers = sorted({int(p) for p in share.parts[:, 0]} - {rank})
        known = [[p, cards[p]] for p in peers]
        if peers and peers[0] == 0:
            hosts, port, token = cards[0]
            known[0] = [0, [[*route_to(cards[rank][0][0]), *hosts], port, token]]
        told.append([pack(share.sources), pack(share.reads), pack(share.parts), known])
    return told


class Once:
    """One checkpoint read by all ranks as one. `room`: the longest read in scratch that every rank has space
    for.
    """

    def __init__(self, together: Together, storage: Storage, config: Config, room: int) -> None:
        self._together, self._storage, self._config = together, storage, config
        self.room = room

    def fetch(
        self, units: list[Unit], files: Iterable[str], room: int, checker: Checker, ready: Ready
    ) -> tuple[int, int]:
        """As `fetch.fetch`, with the same files named on all ranks; returns bytes read and received. Whole
        archives of other tools are not shared.
        """
        names = sorted(files)
        place = {name: n for n, name in enumerate(names)}
        units = [u for u in units if u.archive is None] + [u for u in units if u.archive is not None]
        rows = [(place[u.file], u.start, u.end) for u in units if u.archive is None]

        def job(share: Share) -> Job:
            rank = self._together.ranks.rank
            sources = enumerate(share.sources.tolist())
            return Job(
                storage=self._storage,
                url=self._storage.url,
                checker=checker,
                config=self._config,
                ready=ready,
                units=units,
                tasks=tasks_of(share, units, names, rank),
                owed={number: source for number, source in sources if source not in (OWN, rank)},
            )

        return self._together.run(job, np.array(rows, np.int64).reshape(len(rows), 3), room)

    def open(self, manifest_name: str, label: str) -> tuple[Catalog, Held]:
        """The catalog of the checkpoint that rank 0 finds committed, and the common values in memory."""
        ranks, url = self._together.ranks, self._storage.url
        found = _found(self._storage, manifest_name) if ranks.rank == 0 else None
        manifest, dialect, sizes = ranks.broadcast(f"found{label}", found)
        ours = msgspec.convert(manifest, Manifest) if manifest else None
        if ours is not None:
            names = [index_name(ours.attempt), common_name(ours.attempt)]
            sizes = ours.files
        else:
            names = [METADATA, "common.pt"]
        try:
            held = self.hold([(name, 0, sizes[name]) for name in names if name in sizes], None)
        except Corrupt as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise
            raise Corrupt("a file vanished while the checkpoint was opened", path=url) from e
        storage = cast(Storage, held)
        if ours is not None:
            return read_ours(storage, ours), held
        return read_foreign(storage, cast(Dialect, dialect), sizes), held

    def hold(self, ranges: Sequence[Range], catalog: Catalog | None) -> Held:
        """Ranges of files in memory. With a catalog they are whole chunks, and checked; without one, all
        ranks need the same files.
        """
        memory = [(file, start, torch.empty(end - start, dtype=torch.uint8)) for file, start, end in ranges]
        chunk = catalog.chunk_bytes if catalog else 1
        step = max(chunk, DIRECT_BYTES // chunk * chunk)
        units = [
            Unit(file, start + at, start + min(at + step, buffer.numel()), buffer.data_ptr() + at, ())
            for file, start, buffer in memory
            for at in range(0, buffer.numel(), step)
        ]
        files = catalog.files if catalog else {file for file, _, _ in ranges}
        self.fetch(units, files, step, Checker(catalog), {})
        return Held(self._storage, memory)

    def hold_values(self, catalog: Catalog, keys: Iterable[str]) -> Held:
        """The values of `keys` in memory; those that cannot be read are left to be complained about."""
        chunk = granule(catalog)
        wanted = []
        for key in keys:
            items = catalog.items.get(key, [])
            stored = catalog.files.get(items[0].file) if len(items) == 1 else None
            if stored is not None and items[0].offset + items[0].length <= stored.size:
                start, end = items[0].payload_offset, items[0].payload_offset + items[0].num_bytes
                wanted.append(
                    (items[0].file, start // chunk * chunk, min(stored.size, -(-end // chunk) * chunk))
                )
        return self.hold(_joined(wanted), catalog)


def _found(storage: Storage, manifest_name: str) -> list[Any]:
    verdict = judge(storage, manifest_name)
    if verdict.error is not None:
        raise verdict.error
    if verdict.manifest is not None:
        return [msgspec.to_builtins(verdict.manifest), None, {}]
    return [None, verdict.foreign, verdict.sizes]


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that touch as one."""
    joined: list[Range] = []
    for file, start, end in sorted(ranges):
        if joined and joined[-1][0] == file and start <= joined[-1][2]:
            joined[-1] = (file, joined[-1][1], max(end, joined[-1][2]))
        else:
            joined.append((file, start, end))
    return joined


class Held:
    """The part of a storage that reads of a checkpoint's values need, with some ranges of files in memory."""

    def __init__(self, storage: Storage, memory: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        self.url = storage.url
        self._storage = storage
        self._memory: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for file, start, buffer in memory:
            self._memory.setdefault(file, []).append((start, buffer))

    def get(self, name: str) -> bytes:
        if name in self._memory:
            return bytes(host_bytes(self._memory[name][0][1]))
        return self._storage.get(name)

    def open(self, name: str) -> Reader:
        return _HeldReader(self._storage, name, self._memory.get(name, []))


class _HeldReader:
    """See `shardkeep.storage.Reader`."""

    def __init__(self, storage: Storage, name: str, memory: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.size = max((start + buffer.numel() for start, buffer in memory), default=0)
        self._storage, self._name, self._memory = storage, name, memory
        self._reader: Reader | None = None

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, parts))
        for start, buffer in self._memory:
            if start <= offset and offset + num_bytes <= start + buffer.numel():
                data, at = host_bytes(buffer), offset - start
                for part in parts:
                    part[:] = data[at : at + len(part)]
                    at += len(part)
                return
        self._reader = self._reader or self._storage.open(self._name)
        self.size = self._reader.size
        self._reader.read_into(offset, parts)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
