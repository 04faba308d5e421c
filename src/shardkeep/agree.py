"""All ranks' captures -> one plan, and one attempt that follows it. Collective; the only place where plans
are cached.

First the ranks exchange fingerprints of their headers (names, shapes, dtypes, boxes, replicas: nothing that
memory can invalidate). If all of them remember the plan for these fingerprints it is used again, and one
exchange is all it takes; otherwise headers travel to rank 0, as columns, and it plans. Only rank 0 asks the
storage what exists. A nonce file proves that all ranks see the same directory.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import xxhash

from shardkeep import budget, commit, manifest, plan
from shardkeep.budget import Free
from shardkeep.catalog import Catalog
from shardkeep.columns import pack, unpack
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator
from shardkeep.errors import InvalidState, LoadFailed, NoSpace
from shardkeep.nogc import no_gc
from shardkeep.storage import Storage
from shardkeep.types import Captured, Dialect, Target, TensorInfo

log = logging.getLogger("shardkeep")

_REMEMBERED_PLANS = 16  # a job has a handful of components (policy, critic, ...)
_SEE_NONCE_S = 10.0  # a network file system may show a new file late
_DIGEST_BYTES = 8  # of a plain value, see `capture.value_digest`


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`chosen`: indices of this rank's shards that it writes. `tensors` (rank 0): what the whole checkpoint
    holds. `limit`: the new memory that this rank may take for copies.
    """

    attempt: str
    chosen: list[int]
    tensors: dict[str, TensorInfo]
    limit: Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who writes what, for one layout. `fingerprint` and `chosen` (indices of shards) are this rank's own;
    the rest is known to rank 0 alone: the tensors and payload bytes of all ranks together, and the names of
    each rank's plain values, in the order in which their digests come.
    """

    fingerprint: bytes
    chosen: list[int]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    num_bytes: int = 0
    values: list[list[str]] = field(default_factory=list)


class Mine(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says at every save: `known` are its plans for this fingerprint, `values` the digests of its
    plain values, 8 bytes each, `free_bytes` the memory that it sees free on its `node`."""

    fingerprint: bytes
    known: list[bytes]
    values: bytes
    node: str
    free_bytes: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a layout that is new to some rank."""

    columns: bytes
    values: list[str]
    host: str


_plans: OrderedDict[bytes, Plan] = OrderedDict()


def agree(ranks: Coordinator, captured: Captured, target: Target, config: Config) -> Agreement:
    """Fix attempt and shares. Raises on every rank: InvalidState, AlreadyCommitted, NoSpace, SaveFailed."""
    opened: list[str] = []

    def open_attempt(plan: Plan) -> str:
        opened.append(commit.open_attempt(target))
        _check_space(target.storage, plan.num_bytes)
        return opened[0]

    try:
        chosen, attempt, limit = plan_together(
            ranks, captured, check_cover=target.check_cover, lenient=target.lenient, begin=open_attempt
        )
        if ranks.rank != 0 and not _sees_nonce(target.storage, attempt):
            _other_directory(target)
    except BaseException:
        if opened:
            commit.abandon(target.storage, opened[0])
        raise
    return Agreement(attempt=attempt, chosen=chosen.chosen, tensors=chosen.tensors, limit=limit)


def plan_together(
    ranks: Coordinator,
    captured: Captured,
    *,
    check_cover: bool = True,
    lenient: bool = False,
    begin: Callable[[Plan], str] = lambda plan: "",
) -> tuple[Plan, str, Free]:
    """The plan for what all ranks hold; what `begin(plan)` said on rank 0, where it is called once the plan
    stands; and this rank's share of its node's free memory, as all ranks saw it before any of them took some.
    One exchange if every rank remembers the plan, two otherwise. InvalidState if shards are no exact cover
    (with `check_cover`), or if plain values differ (unless `lenient`).
    """
    own, free = fingerprint(captured), budget.free_bytes()
    mine = Mine(
        fingerprint=own,
        known=[plan_id for plan_id, p in _plans.items() if p.fingerprint == own],
        values=bytes.fromhex("".join(captured.digests.values())),
        node=budget.node(),
        free_bytes=free.num_bytes,
    )
    said = ranks.gather("captures", msgspec.msgpack.encode(mine))
    everyone = [msgspec.msgpack.decode(s, type=Mine) for s in said or ()]

    def accept(plan: Plan) -> str:
        _compare_values(plan.values, [m.values for m in everyone], lenient=lenient)
        return begin(plan)

    answer: tuple[bytes, str | None, dict[str, int]] | None = None
    if said is not None:
        plan_id, is_known = identify(everyone, check_cover)
        shares = budget.share_bytes([(m.node, m.free_bytes) for m in everyone])
        answer = plan_id, accept(_plans[plan_id]) if is_known else None, shares
    plan_id, begun, shares = ranks.broadcast("attempt", answer)
    if begun is None:
        _plans[plan_id], begun = _make_plan(ranks, captured, own, check_cover, accept)
    _plans.move_to_end(plan_id)
    while len(_plans) > _REMEMBERED_PLANS:
        _plans.popitem(last=False)
    return _plans[plan_id], begun, replace(free, num_bytes=shares[mine.node])


def fingerprint(captured: Captured) -> bytes:
    """16 bytes that tell layouts apart: everything that a plan is made of, nothing that memory can
    invalidate.
    """
    layout = (captured.dialect, [s.header for s in captured.shards], list(captured.digests))
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(layout))


def identify(everyone: Sequence[Mine], check_cover: bool) -> tuple[bytes, bool]:
    """The id of the plan for these fingerprints, and whether all ranks remember it."""
    prints = b"".join(m.fingerprint for m in everyone)
    plan_id = xxhash.xxh3_128_digest(prints + bytes([check_cover]))
    return plan_id, all(plan_id in m.known for m in everyone)


def make_plan(layouts: Sequence[Layout], dialect: Dialect, check_cover: bool) -> tuple[Plan, list[bytes]]:
    """Rank 0: the plan for what all ranks hold, but for its own share; and each rank's share, as int32."""
    with no_gc():
        columns = unpack([layout.columns for layout in layouts])
        shares = plan.assign(columns, dialect, check=check_cover, hosts=[layout.host for layout in layouts])
        tensors = plan.tensors(columns)
    stored = np.where(columns.tied < 0, columns.num_bytes, 0)  # what is tied is stored with another
    num_bytes = sum(
        int(stored[start:][share].sum())
        for start, share in zip(columns.starts.tolist(), shares, strict=False)
    )
    same: dict[tuple[str, ...], list[str]] = {}  # most ranks name the same values
    values = [same.setdefault(tuple(layout.values), layout.values) for layout in layouts]
    made = Plan(fingerprint=b"", chosen=[], tensors=tensors, num_bytes=num_bytes, values=values)
    return made, [share.astype(np.int32).tobytes() for share in shares]


def _make_plan(
    ranks: Coordinator, captured: Captured, own: bytes, check_cover: bool, begin: Callable[[Plan], str]
) -> tuple[Plan, str]:
    layout = Layout(
        columns=pack([s.header for s in captured.shards]),
        values=list(captured.digests),
        host=socket.gethostname(),
    )
    said = ranks.gather("headers", msgspec.msgpack.encode(layout))
    made, answers = Plan(fingerprint=own, chosen=[]), None
    if said is not None:
        layouts = [msgspec.msgpack.decode(s, type=Layout) for s in said]
        made, shares = make_plan(layouts, captured.dialect, check_cover)
        begun = begin(made)
        answers = [[share, begun] for share in shares]
    share, begun = ranks.scatter("shares", answers)
    return replace(made, fingerprint=own, chosen=np.frombuffer(share, np.int32).tolist()), begun


def _compare_values(names: Sequence[list[str]], digests: Sequence[bytes], *, lenient: bool) -> None:
    """Plain values that several ranks hold must be equal, since one of them is stored for all."""
    first: dict[str, tuple[int, bytes]] = {}
    seen: set[tuple[int, bytes]] = set()  # ranks with the same names share one list of them
    for rank, (own, values) in enumerate(zip(names, digests, strict=True)):
        if (id(own), values) in seen:
            continue
        seen.add((id(own), values))
        for number, key in enumerate(own):
            digest = values[number * _DIGEST_BYTES :][:_DIGEST_BYTES]
            rank_a, digest_a = first.setdefault(key, (rank, digest))
            if digest_a == digest:
                continue
            what = f"ranks {rank_a} and {rank} hold different values of '{key}'"
            if not lenient:
                raise InvalidState(
                    what,
                    key=key,
                    remedy="Store per-rank values under keys that name the rank, or as a ShardedObject.",
                )
            log.warning("%s; rank %d's is stored", what, rank_a)
            return  # one warning is enough


def same_for_all(ranks: Coordinator, catalog: Catalog, label: str) -> Catalog:
    """The catalog, if all ranks have opened the same attempt; LoadFailed if a save replaced it while they
    did.
    """
    attempt = catalog.manifest.attempt if catalog.manifest else catalog.url
    found = ranks.gather(f"opened{label}", attempt)
    if found is not None and catalog.manifest and len(set(found)) > 1:
        raise LoadFailed(
            "ranks opened different attempts: the checkpoint was replaced meanwhile, or directories differ",
            path=catalog.url,
            expected=found[0],
            got=next(a for a in found if a != found[0]),
            remedy="Load again.",
        )
    return catalog


def _check_space(storage: Storage, num_bytes: int) -> None:
    free = storage.free_bytes()
    if free < num_bytes:
        raise NoSpace(
            "not enough room for the checkpoint",
            path=storage.url,
            expected=f"{num_bytes} bytes free",
            got=free,
        )


def _sees_nonce(storage: Storage, attempt: str) -> bool:
    end = time.monotonic() + _SEE_NONCE_S
    while True:
        try:
            storage.get(
                manifest.nonce_name(attempt)
            )  # not a listing: of thousands of ranks each would make one
            return True
        except (FileNotFoundError, NotADirectoryError):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)


def _other_directory(target: Target) -> None:
    what = "this rank does not see the directory that rank 0 sees"
    if not target.lenient:
        raise InvalidState(
            what, path=target.storage.url, remedy="All ranks must save to one shared directory."
        )
    log.warning("%s (%s): its files stay on this host", what, target.storage.url)
    target.storage.make()
