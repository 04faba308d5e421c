"""All ranks' captures -> one attempt and each rank's share of it. Collective; the only place where plans are
cached.

First the ranks exchange fingerprints of their headers (names, shapes, dtypes, boxes, replicas: nothing that
memory can invalidate). If all of them remember the plan for these fingerprints it is used again; otherwise
headers travel to rank 0, which plans. Only rank 0 asks the storage what exists. A nonce file proves that all
ranks see the same directory.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep import commit, manifest, plan
from shardkeep.catalog import Catalog
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator
from shardkeep.errors import InvalidState, LoadFailed, NoSpace
from shardkeep.nogc import no_gc
from shardkeep.storage import Storage
from shardkeep.types import Captured, ShardHeader, Target, TensorInfo

log = logging.getLogger("shardkeep")

_REMEMBERED_PLANS = 16  # a job has a handful of components (policy, critic, ...)
_SEE_NONCE_S = 10.0  # a network file system may show a new file late


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`chosen`: indices of this rank's shards that it writes. `tensors` (rank 0): what the whole checkpoint
    holds.
    """

    attempt: str
    chosen: list[int]
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    chosen: list[int]
    tensors: dict[str, TensorInfo]  # rank 0
    num_bytes: int  # rank 0


_plans: OrderedDict[str, _Plan] = OrderedDict()


def agree(ranks: Coordinator, captured: Captured, target: Target, config: Config) -> Agreement:
    """Fix attempt and shares. Raises on every rank: InvalidState, AlreadyCommitted, NoSpace, SaveFailed."""
    headers = [s.header for s in captured.shards]
    mine = {"fingerprint": fingerprint(captured, headers), "known": list(_plans), "digests": captured.digests}
    everyone = ranks.gather("captures", mine)
    opened: dict[str, Any] | None = None
    try:
        if everyone is not None:
            opened = _open(everyone, target)
        opened = ranks.broadcast("attempt", opened)
        if not opened["known"]:
            _make_plan(ranks, opened["plan"], headers, captured, target)
        _plans.move_to_end(opened["plan"])
        chosen = _plans[opened["plan"]]
        if ranks.rank == 0:
            _check_space(target.storage, chosen.num_bytes)
        elif not _sees_nonce(target.storage, opened["attempt"]):
            _other_directory(target)
    except BaseException:
        if opened and ranks.rank == 0:
            commit.abandon(target.storage, opened["attempt"])
        raise
    return Agreement(attempt=opened["attempt"], chosen=chosen.chosen, tensors=chosen.tensors)


def _open(everyone: list[dict[str, Any]], target: Target) -> dict[str, Any]:
    """Rank 0: a fresh attempt for what all ranks hold, and the plan to use if all of them know it."""
    _compare_values([e["digests"] for e in everyone], strict=not target.lenient)
    prints = "".join(e["fingerprint"] for e in everyone)
    plan_id = manifest.digest(f"{prints} checked {target.check_cover}".encode())
    known = all(plan_id in e["known"] for e in everyone)
    return {"attempt": commit.open_attempt(target), "plan": plan_id, "known": known}


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


def fingerprint(captured: Captured, headers: list[ShardHeader]) -> str:
    return manifest.digest(msgspec.msgpack.encode((captured.dialect, headers)))


def _make_plan(
    ranks: Coordinator, plan_id: str, headers: list[ShardHeader], captured: Captured, target: Target
) -> None:
    raw = ranks.gather("headers", msgspec.to_builtins(headers))
    shares, infos, num_bytes = None, {}, 0
    if raw is not None:
        with no_gc():
            everyone = msgspec.convert(raw, list[list[ShardHeader]])
            shares = plan.assign(everyone, captured.dialect, check=target.check_cover)
            infos = plan.tensors(everyone)
            num_bytes = sum(everyone[rank][i].num_bytes for rank, share in enumerate(shares) for i in share)
    mine = ranks.scatter("shares", shares)
    _plans[plan_id] = _Plan(chosen=mine, tensors=infos, num_bytes=num_bytes)
    while len(_plans) > _REMEMBERED_PLANS:
        _plans.popitem(last=False)


def _compare_values(digests: list[dict[str, str]], *, strict: bool) -> None:
    """Plain values that several ranks hold must be equal, since one of them is stored for all."""
    first: dict[str, tuple[int, str]] = {}
    for rank, values in enumerate(digests):
        for key, digest in values.items():
            rank_a, digest_a = first.setdefault(key, (rank, digest))
            if digest_a == digest:
                continue
            what = f"ranks {rank_a} and {rank} hold different values of '{key}'"
            if strict:
                raise InvalidState(
                    what,
                    key=key,
                    remedy="Store per-rank values under keys that name the rank, or as a ShardedObject.",
                )
            log.warning("%s; rank %d's is stored", what, rank_a)
            return  # one warning is enough


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
    while manifest.nonce_name(attempt) not in storage.sizes():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _other_directory(target: Target) -> None:
    what = "this rank does not see the directory that rank 0 sees"
    if not target.lenient:
        raise InvalidState(
            what, path=target.storage.url, remedy="All ranks must save to one shared directory."
        )
    log.warning("%s (%s): its files stay on this host", what, target.storage.url)
    target.storage.make()
