"""What a reader knows of a checkpoint, ours or another tool's; and the one rule that says whether a
directory is committed.

In: a storage. Out: a `Catalog`, or an error that says what is wrong and what to do. Of ours only JSON and
msgpack are read; another tool's `.metadata` goes through the allow-list of `foreign.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardkeep import foreign
from shardkeep.errors import Corrupt, NotCommitted, ShardkeepError
from shardkeep.manifest import (
    MANIFEST,
    attempt_manifest_name,
    common_name,
    decode_index,
    decode_manifest,
    digest,
    index_name,
    is_attempt_file,
)
from shardkeep.nogc import no_gc
from shardkeep.storage import Storage
from shardkeep.types import Dialect, Item, Manifest, StoredFile, TensorInfo, stored_bytes

METADATA = ".metadata"
_COMMON_KEY = "common_state/shard_0_1"  # megatron-core >= 0.19
_ATTEMPT_MANIFEST = re.compile(r"shardkeep\.(\d{17})\.json")
_TRIES = 5  # a reader may meet a save that replaces the manifest and removes the old files


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """A committed checkpoint as its readers see it. `manifest` is None for another tool's; then nothing has
    checksums and the `payload_offset` of tensor items is -1 (their own zip directory has it). `common`
    names the file of plain values, if any; `common_item` is the item that holds them instead from
    megatron-core 0.19, and is not in `items`. `mcore` holds, for a foreign Megatron checkpoint, what it
    adds per key (`nd_reformulated_orig_global_shape`)."""

    url: str
    dialect: Dialect
    tensors: dict[str, TensorInfo]
    items: dict[str, list[Item]]
    files: dict[str, StoredFile]
    checksum: str
    chunk_bytes: int
    paths: dict[str, tuple[str | int, ...]]
    common: str | None
    manifest: Manifest | None
    mcore: dict[str, dict[str, Any]] = field(default_factory=dict)
    common_item: Item | None = None

    @property
    def objects(self) -> list[str]:
        """Keys that hold a value rather than a tensor."""
        return [key for key in self.items if key not in self.tensors]

    def num_bytes(self) -> int:
        """Payload bytes of all items."""
        return stored_bytes(item for items in self.items.values() for item in items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who wrote the last committed state of a directory: `manifest` (ours), `foreign` (another tool's
    dialect), or `error`."""

    sizes: dict[str, int]
    manifest: Manifest | None = None
    foreign: Dialect | None = None
    error: ShardkeepError | None = None


def is_committed(storage: Storage, manifest_name: str = MANIFEST) -> bool:
    """Whether the directory holds a committed checkpoint, ours or another tool's."""
    return judge(storage, manifest_name).error is None


def committed_manifest(storage: Storage, manifest_name: str = MANIFEST) -> Manifest | None:
    """The manifest if the directory holds a committed checkpoint of ours, else None."""
    verdict = judge(storage, manifest_name)
    return verdict.manifest if verdict.error is None else None


def resolve(storage: Storage, manifest_name: str = MANIFEST) -> Catalog:
    """Open a committed checkpoint. `NotCommitted` if there is none, `Corrupt` if it is damaged."""
    for remaining in range(_TRIES - 1, -1, -1):
        verdict = judge(storage, manifest_name)
        if verdict.error is not None:
            raise verdict.error
        try:
            if verdict.manifest is None:
                assert verdict.foreign is not None
                return read_foreign(storage, verdict.foreign, verdict.sizes)
            return read_ours(storage, verdict.manifest)
        except FileNotFoundError as e:  # replaced by a newer save between the two looks
            if remaining == 0:
                raise Corrupt("a file vanished while the checkpoint was opened", path=storage.url) from e
    raise AssertionError("unreachable")


def judge(storage: Storage, manifest_name: str = MANIFEST) -> Verdict:
    """Apply the rules of docs/format.md, "When a directory is committed"."""
    verdict = _judge_once(storage, manifest_name)
    for _ in range(_TRIES):
        if verdict.manifest is None or verdict.error is None:
            break
        again = _judge_once(storage, manifest_name)  # files missing: a newer save may just have replaced them
        if again.manifest is not None and again.manifest.digest == verdict.manifest.digest:
            return again
        verdict = again
    return verdict


def _judge_once(storage: Storage, manifest_name: str) -> Verdict:
    try:
        sizes = storage.sizes()
    except NotADirectoryError:
        return Verdict(
            sizes={},
            error=NotCommitted(
                "not a directory", path=storage.url, remedy="Give the directory that holds the checkpoint."
            ),
        )
    manifest, damage = _read_manifest(storage, manifest_name, sizes)
    if manifest_name != MANIFEST:  # a step of a run names its attempt: fixed names may belong to a newer one
        error = damage or (
            _first_problem(manifest, sizes, storage.url) if manifest else _nothing(storage, sizes)
        )
        return Verdict(sizes=sizes, manifest=manifest, error=error)
    if manifest is not None and _metadata_is_ours(storage, sizes, manifest):
        return Verdict(sizes=sizes, manifest=manifest, error=_first_problem(manifest, sizes, storage.url))
    if METADATA in sizes and (manifest is not None or not _metadata_is_ours(storage, sizes, None)):
        return _judge_foreign(storage, sizes)
    return Verdict(sizes=sizes, error=damage or _nothing(storage, sizes))


def _read_manifest(
    storage: Storage, name: str, sizes: dict[str, int]
) -> tuple[Manifest | None, Corrupt | None]:
    if name not in sizes:
        return None, None
    try:
        return decode_manifest(storage.get(name), f"{storage.url}/{name}"), None
    except FileNotFoundError:
        return None, None
    except Corrupt as e:
        return None, e


def _first_problem(manifest: Manifest, sizes: dict[str, int], url: str) -> Corrupt | None:
    return next(size_problems(manifest, sizes, url), None)


def size_problems(manifest: Manifest, sizes: dict[str, int], url: str) -> Iterator[Corrupt]:
    """Every file of the manifest that is missing or of another size."""
    for name, expected in manifest.files.items():
        got = sizes.get(name)
        if got is None:
            yield Corrupt(
                "a file of the checkpoint is missing",
                file=name,
                path=url,
                expected=f"{expected} bytes",
                got="no file",
            )
        elif got != expected:
            yield Corrupt(
                "a file of the checkpoint has the wrong size",
                file=name,
                path=url,
                expected=f"{expected} bytes",
                got=f"{got} bytes",
            )


def _metadata_is_ours(storage: Storage, sizes: dict[str, int], manifest: Manifest | None) -> bool:
    """Whether `.metadata` was written by `manifest`'s attempt or by another attempt of ours; if not,
    another tool overwrote it.

    `.metadata` alone decides: it is what every other tool writes at its own commit. Other fixed names may
    be edited by people (a tokenizer's config), and ours never reads them. A missing one says nothing.
    """
    if METADATA not in sizes:
        return manifest is not None
    try:
        found = digest(storage.get(METADATA))
    except FileNotFoundError:
        return manifest is not None
    if manifest is not None and manifest.fixed.get(METADATA) == found:
        return True
    for name in sizes:
        match = _ATTEMPT_MANIFEST.fullmatch(name)
        if match and name == attempt_manifest_name(match[1]):
            other, _ = _read_manifest(storage, name, sizes)
            if other is not None and other.fixed.get(METADATA) == found:
                return True
    return False


def _judge_foreign(storage: Storage, sizes: dict[str, int]) -> Verdict:
    """Another tool's marker: Megatron's `metadata.json` beside `.metadata`, or DCP's `.metadata` alone."""
    if "metadata.json" not in sizes:
        if "common.pt" in sizes:  # Megatron writes common.pt first and metadata.json last
            return Verdict(
                sizes=sizes,
                error=NotCommitted(
                    "a Megatron save that did not finish: common.pt without metadata.json",
                    path=storage.url,
                    remedy="Load an earlier step.",
                ),
            )
        return Verdict(sizes=sizes, foreign="dcp")
    try:
        if not isinstance(json.loads(storage.get("metadata.json")), dict):
            raise ValueError("not an object")
    except (ValueError, FileNotFoundError) as e:
        return Verdict(
            sizes=sizes,
            error=NotCommitted(
                f"metadata.json cannot be read: {e}", path=storage.url, remedy="Load an earlier step."
            ),
        )
    return Verdict(sizes=sizes, foreign="megatron")


def _nothing(storage: Storage, sizes: dict[str, int]) -> NotCommitted:
    if not sizes:
        return NotCommitted(
            "no checkpoint here: the directory is empty or does not exist",
            path=storage.url,
            remedy="Check the path; checkpoints of a run are in its step directories.",
        )
    if any(is_attempt_file(name) for name in sizes):
        return NotCommitted(
            "only leftovers of a save that did not finish",
            path=storage.url,
            files=len(sizes),
            remedy="Load an earlier step; the next save to this directory removes them.",
        )
    return NotCommitted(
        "no checkpoint here: neither shardkeep.json nor .metadata",
        path=storage.url,
        files=len(sizes),
        remedy="Check the path; checkpoints of a run are in its step directories.",
    )


def read_ours(storage: Storage, manifest: Manifest) -> Catalog:
    """The catalog of a checkpoint of ours; `Corrupt` if the index is not the one that the manifest names."""
    name = index_name(manifest.attempt)
    path = f"{storage.url}/{name}"
    data = storage.get(name)
    found = digest(data)
    if found != manifest.index_digest:
        raise Corrupt(
            "the index's digest is wrong",
            file=name,
            path=storage.url,
            expected=manifest.index_digest,
            got=found,
        )
    with no_gc():
        index = decode_index(data, path)
        items: dict[str, list[Item]] = {key: [] for key in index.tensors}
        for item in index.items:
            items.setdefault(item.key, []).append(item)
    common = common_name(manifest.attempt)
    return Catalog(
        url=storage.url,
        dialect=index.dialect,
        tensors=index.tensors,
        items=items,
        files=index.files,
        checksum=index.checksum,
        chunk_bytes=index.chunk_bytes,
        paths=index.paths,
        common=common if common in manifest.files else None,
        manifest=manifest,
    )


def read_foreign(storage: Storage, dialect: Dialect, sizes: dict[str, int]) -> Catalog:
    """The catalog of another tool's checkpoint: nothing is checksummed, sizes are what is on disk."""
    with no_gc():
        parsed = foreign.parse_metadata(storage.get(METADATA), f"{storage.url}/{METADATA}")
    common = parsed.items.pop(_COMMON_KEY, None) if dialect == "megatron" else None
    return Catalog(
        url=storage.url,
        dialect=dialect,
        tensors=parsed.tensors,
        items=parsed.items,
        files={
            name: StoredFile(size=size, checksums=b"") for name, size in sizes.items() if name in parsed.files
        },
        checksum="none",
        chunk_bytes=1 << 20,
        paths=parsed.paths,
        common="common.pt" if dialect == "megatron" and "common.pt" in sizes else None,
        manifest=None,
        mcore=parsed.mcore,
        common_item=common[0] if common else None,
    )
