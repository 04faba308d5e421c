"""Results of all ranks -> a committed checkpoint. Runs on rank 0; docs/format.md has the order of writing.

Invariants: nothing that the previous checkpoint's manifest lists is touched before the new manifest is in
place; one put is the commit, of the manifest (see `_in_order`); only then do older files go. So a crash
between any two operations leaves, for our readers, the old checkpoint whole or the new one.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import sys
import time
from importlib import metadata as packages

import torch

from shardkeep import manifest as names
from shardkeep import vanilla
from shardkeep.catalog import METADATA, is_committed, judge
from shardkeep.config import Config
from shardkeep.errors import AlreadyCommitted
from shardkeep.storage import Storage
from shardkeep.types import (
    Dialect,
    Index,
    Item,
    Manifest,
    RankResult,
    StoredFile,
    Target,
    TensorInfo,
    stored_bytes,
)
from shardkeep.version import __version__
from shardkeep.write import checksums

log = logging.getLogger("shardkeep")


def open_attempt(target: Target) -> str:
    """A fresh attempt id, its directory and its nonce file. AlreadyCommitted before anything is created."""
    _refuse_committed(target)
    attempt = f"{time.time_ns() // 1_000_000:013d}{random.SystemRandom().randrange(10_000):04d}"
    target.storage.make()
    nonce = f"{platform.node()} {os.getpid()}".encode()
    try:
        target.storage.put(names.nonce_name(attempt), nonce, durable=False)
    except BaseException:
        abandon(target.storage, attempt)
        raise
    return attempt


def _refuse_committed(target: Target) -> None:
    if not target.overwrite and is_committed(target.storage):
        raise AlreadyCommitted(
            "the target holds a committed checkpoint",
            path=target.storage.url,
            remedy="Pass overwrite=True to replace it, or save elsewhere.",
        )


def commit(
    target: Target,
    attempt: str,
    results: list[RankResult],
    *,
    dialect: Dialect,
    tensors: dict[str, TensorInfo],
    common: bytes | None,
    config: Config,
) -> Manifest:
    """Put the checkpoint in place and clear what it replaces. OSError leaves the old checkpoint standing."""
    storage = target.storage
    files = {name: f for result in results for name, f in result.files.items()}
    try:
        if common is not None:
            storage.put(names.common_name(attempt), common, durable=config.durable)
            files[names.common_name(attempt)] = StoredFile(
                size=len(common), checksums=checksums(common, config)
            )
        index = Index(
            format_version=names.FORMAT_VERSION,
            attempt=attempt,
            dialect=dialect,
            checksum=config.checksum,
            chunk_bytes=config.chunk_bytes,
            tensors=tensors,
            items=[i for r in results for i in r.items],
            files=files,
            paths={key: path for r in results for key, path in r.paths.items()},
            fixed={},
        )
        fixed = vanilla.fixed_files(index, common, metadata=config.vanilla_metadata) | target.attached
        manifest = _prepare(
            target,
            names.with_fixed(index, {n: names.digest(d) for n, d in fixed.items()}),
            len(results),
            config,
        )
        _refuse_committed(target)  # another save may have been quicker
        published = _in_order(storage, manifest, fixed)
        before = {name: storage.get(name) for name in storage.sizes() if name in published}
    except BaseException:
        abandon(storage, attempt)
        raise
    _publish(storage, manifest, published, before, config)
    if not target.keep_previous:
        clean_up(storage, manifest, durable=config.durable)
    return manifest


def abandon(storage: Storage, attempt: str) -> None:
    """Rank 0, after a failure before `commit`: remove every rank's files of this attempt, and the directory
    if it was new.
    """
    try:
        remove_files(storage, [n for n in storage.sizes() if attempt in n and names.is_attempt_file(n)])
        storage.remove_if_empty()
    except OSError as e:  # the error of the save itself is the one to raise
        log.warning("could not clear the attempt %s of a failed save: %s", attempt, e)


def _prepare(target: Target, index: Index, world_size: int, config: Config) -> Manifest:
    """Index and attempt manifest, durable: the attempt is whole, but nobody looks at it yet."""
    storage, data = target.storage, names.encode_index(index)
    manifest = _manifest(target, index, data, world_size)
    storage.put(names.index_name(index.attempt), data, durable=config.durable)
    storage.put(
        names.attempt_manifest_name(index.attempt), names.encode_manifest(manifest), durable=config.durable
    )
    _sync(storage, config)
    return manifest


def _in_order(storage: Storage, manifest: Manifest, fixed: dict[str, bytes]) -> dict[str, bytes | None]:
    """What `_publish` puts (or removes: None), and when: fixed-name files for other readers, then the
    manifest, the commit.

    Over another tool's checkpoint the manifest comes first: `.metadata` is what that tool committed by, so
    replacing or removing it is the moment at which the directory becomes ours. An attempt without a
    `.metadata` removes one of ours before its manifest comes: the attempt that explains it goes soon after.
    """
    removed: dict[str, bytes | None] = {} if METADATA in fixed else {METADATA: None}
    files = removed | fixed | {names.MANIFEST: names.encode_manifest(manifest)}
    first = (names.MANIFEST, METADATA) if judge(storage).foreign else ()
    return {name: files[name] for name in first} | files


def _publish(
    storage: Storage,
    manifest: Manifest,
    files: dict[str, bytes | None],
    before: dict[str, bytes],
    config: Config,
) -> None:
    """Put the files that make the attempt the checkpoint; if the storage refuses, what was there `before`."""
    over_foreign = next(iter(files)) == names.MANIFEST
    commits = METADATA if over_foreign else names.MANIFEST
    try:
        for name, data in files.items():
            _set(storage, name, data, config)
            if over_foreign and name == names.MANIFEST:
                _sync(storage, config)  # it must not be lost where what comes next, the commit, is not
    except Exception:
        if not _may_hold(storage, commits, files[commits]):
            _take_back(storage, manifest, {name: before.get(name) for name in files}, config)
        raise
    _sync(storage, config)


def _set(storage: Storage, name: str, data: bytes | None, config: Config) -> None:
    if data is None:
        storage.delete(name)
    else:
        storage.put(name, data, durable=config.durable)


def _may_hold(storage: Storage, name: str, data: bytes | None) -> bool:
    """Whether a file may be in place (with None: may be gone) although putting it there has failed."""
    try:
        return storage.get(name) == data
    except FileNotFoundError:
        return data is None
    except OSError:
        return True


def _take_back(storage: Storage, manifest: Manifest, before: dict[str, bytes | None], config: Config) -> None:
    """Undo a commit that failed half-way: also other readers find again what there was.

    The data goes first, which makes room; the attempt's manifest last, since it explains `.metadata` to our
    readers until that is the old one again.
    """
    remove_files(storage, list(manifest.files))
    try:
        for name, data in before.items():
            _set(storage, name, data, config)
    except OSError as e:
        log.warning("other tools cannot read %s until the next save: %s", storage.url, e)
    else:
        abandon(storage, manifest.attempt)


def clean_up(storage: Storage, manifest: Manifest, *, durable: bool) -> None:
    """After the commit: remove what older attempts, ours or another tool's, and dead ones left in the
    directory. What cannot be removed waits for the next save: the checkpoint is committed.
    """
    keep = {*manifest.files, names.attempt_manifest_name(manifest.attempt), names.MANIFEST, *manifest.fixed}
    try:
        garbage = [
            n
            for n in storage.sizes()
            if n not in keep
            and (names.is_attempt_file(n) or n in names.FIXED_NAMES)
            and (names.attempt_of(n) or "") <= manifest.attempt  # a later save may have begun already
        ]
        remove_files(storage, garbage)
        if durable and garbage:
            storage.sync()
    except OSError as e:
        log.warning("could not clear older files from %s: %s", storage.url, e)


def remove_files(storage: Storage, files: list[str]) -> None:
    """After a failure: remove files that no manifest lists. Best effort; the next successful save clears the
    rest.
    """
    for name in files:
        try:
            storage.delete(name)
        except OSError as e:
            log.warning("could not remove %s of a failed save: %s", name, e)


def _manifest(target: Target, index: Index, index_data: bytes, world_size: int) -> Manifest:
    sizes = {name: f.size for name, f in index.files.items()} | {
        names.index_name(index.attempt): len(index_data)
    }
    return names.seal(
        Manifest(
            format_version=names.FORMAT_VERSION,
            attempt=index.attempt,
            dialect=index.dialect,
            step=target.step,
            versions=versions(),
            layout={"world_size": world_size} | _megatron_layout(),
            totals=_totals(index.items, sizes),
            files=sizes,
            index_digest=names.digest(index_data),
            fixed=index.fixed,
        )
    )


def _totals(items: list[Item], files: dict[str, int]) -> dict[str, int]:
    return {"num_bytes": stored_bytes(items), "num_items": len(items), "num_files": len(files)}


def versions() -> dict[str, str | None]:
    """Versions that a later reader may want to know; megatron only if the job uses it."""
    megatron = packages.version("megatron-core") if "megatron.core" in sys.modules else None
    return {"shardkeep": __version__, "torch": str(torch.__version__), "megatron": megatron}


def _megatron_layout() -> dict[str, int]:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
    }


def _sync(storage: Storage, config: Config) -> None:
    if config.durable:
        storage.sync()
