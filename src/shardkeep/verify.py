"""A path -> every problem of the checkpoint there, one line each. Reads everything, changes nothing.

Of ours: manifest, sizes, index and fixed-name digests, each chunk's checksum, boxes (no gap, no overlap),
items inside files. Of another tool's, which stores no checksums: sizes and structure.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from shardkeep import archive
from shardkeep.catalog import Catalog, Verdict, judge, read_foreign, read_ours, size_problems
from shardkeep.config import Config, resolve
from shardkeep.errors import Corrupt, NotCommitted, ShardkeepError
from shardkeep.fetch import DIGEST_BYTES, Checker, read_checked
from shardkeep.manifest import MANIFEST, attempt_manifest_name, digest
from shardkeep.ranges import DIRECT_BYTES
from shardkeep.reshard import first_gap, overlap, show
from shardkeep.storage import Storage, storage_for
from shardkeep.types import Item, Manifest, VerifyReport, dtype_named, whole


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check a checkpoint completely. Damage is in `problems`; NotCommitted if there is nothing to check."""
    return verify_storage(storage_for(path), resolve(None))


def verify_storage(storage: Storage, config: Config, manifest_name: str = MANIFEST) -> VerifyReport:
    """`verify` of a storage, by the manifest of that name."""
    verdict = judge(storage, manifest_name)
    if isinstance(verdict.error, NotCommitted):
        raise verdict.error
    problems: list[str] = []
    catalog = None
    try:
        catalog = _catalog(storage, verdict)
    except ShardkeepError as e:
        problems.append(str(e))
    except FileNotFoundError as e:
        problems.append(f"a file is missing: {e}")
    if verdict.manifest is not None:
        problems += [str(e) for e in size_problems(verdict.manifest, verdict.sizes, storage.url)]
        problems += _fixed_problems(storage, verdict.manifest, verdict.sizes)
    elif verdict.error is not None and str(verdict.error) not in problems:
        problems.append(str(verdict.error))
    if catalog is not None:
        problems += _item_problems(catalog)
        problems += _box_problems(catalog)
        problems += (
            _chunk_problems(storage, catalog, verdict.sizes, config)
            if catalog.manifest
            else _archives(storage, catalog)
        )
    return VerifyReport(
        path=storage.url,
        num_files=len(catalog.files) if catalog else 0,
        problems=tuple(dict.fromkeys(problems)),
        num_bytes=sum(f.size for f in catalog.files.values()) if catalog else 0,
        checksums=catalog is not None and catalog.checksum != "none",
    )


def _catalog(storage: Storage, verdict: Verdict) -> Catalog:
    if verdict.manifest is not None:
        return read_ours(storage, verdict.manifest)
    if verdict.foreign is not None:
        return read_foreign(storage, verdict.foreign, verdict.sizes)
    assert verdict.error is not None
    raise verdict.error


def _fixed_problems(storage: Storage, manifest: Manifest, sizes: dict[str, int]) -> Iterator[str]:
    """Copies for other readers: they must be what this attempt wrote, or other readers see something else."""
    for name, expected in manifest.fixed.items():
        try:
            got = digest(storage.get(name)) if name in sizes else "no file"
        except FileNotFoundError:
            got = "no file"
        if got != expected:
            yield f"a file for other readers was changed (file {name!r}): expected {expected}, got {got}"
    own = attempt_manifest_name(manifest.attempt)
    if own not in sizes:
        yield f"the attempt's manifest is missing (file {own!r})"


def _item_problems(catalog: Catalog) -> Iterator[str]:
    """Items lie inside their files, do not overlap there, and have the size that their boxes ask for."""
    by_file: dict[str, list[Item]] = {}
    for items in catalog.items.values():
        for item in items:
            by_file.setdefault(item.file, []).append(item)
            yield from _one_item(catalog, item)
    for file, items in by_file.items():
        stored = catalog.files.get(file)
        if stored is None:
            yield (
                f"a file of the checkpoint is missing (file {file!r}, {len(items)} items, "
                f"first key {items[0].key!r})"
            )
            continue
        end, before = 0, ""
        shared = {_bytes_of(i): i for i in items}.values()  # tied tensors are one archive
        for item in sorted(shared, key=lambda i: i.offset):
            if item.offset + item.length > stored.size:
                yield (
                    f"an item reaches past the end of its file (file {file!r}, key {item.key!r}): "
                    f"expected at least {item.offset + item.length} bytes, got {stored.size} bytes"
                )
            if item.offset < end:
                yield (
                    f"items overlap in a file (file {file!r}, keys {before!r} and {item.key!r}): "
                    f"expected an offset of at least {end}, got {item.offset}"
                )
            end, before = max(end, item.offset + item.length), item.key


def _bytes_of(item: Item) -> tuple[object, ...]:
    """What two items have in common if they are the same archive."""
    return (
        item.kind,
        item.dtype,
        item.box.shape,
        item.offset,
        item.length,
        item.payload_offset,
        item.num_bytes,
    )


def _one_item(catalog: Catalog, item: Item) -> Iterator[str]:
    if item.payload_offset >= 0 and not (
        item.offset <= item.payload_offset
        and item.payload_offset + item.num_bytes <= item.offset + item.length
    ):
        yield (
            f"an item's payload lies outside it (file {item.file!r}, key {item.key!r}, "
            f"offset {item.payload_offset})"
        )
    if item.kind != "tensor":
        return
    info = catalog.tensors.get(item.key)
    if info is None:
        yield f"an item belongs to no tensor (file {item.file!r}, key {item.key!r})"
        return
    if item.dtype != info.dtype:
        yield (
            f"an item's dtype differs from its tensor's (key {item.key!r}): "
            f"expected {info.dtype}, got {item.dtype}"
        )
        return
    try:
        expected = item.box.numel * dtype_named(item.dtype).itemsize
    except ValueError as e:
        yield f"{e} (key {item.key!r})"
        return
    if item.num_bytes != expected:
        yield (
            f"an item has the wrong size (file {item.file!r}, key {item.key!r}): "
            f"expected {expected}, got {item.num_bytes}"
        )


def _box_problems(catalog: Catalog) -> Iterator[str]:
    """The boxes of each tensor cover it, exactly: they lie inside, none overlap, and their elements add
    up."""
    for key, info in catalog.tensors.items():
        boxes = [item.box for item in catalog.items.get(key, [])]
        if any(len(b.shape) != len(info.shape) or len(b.offset) != len(info.shape) for b in boxes):
            yield (
                f"a box has another number of dimensions than its tensor (key {key!r}): "
                f"expected {len(info.shape)}"
            )
            continue
        outside = [
            b
            for b in boxes
            if any(o < 0 or o + n > m for o, n, m in zip(b.offset, b.shape, info.shape, strict=True))
        ]
        if outside:
            yield (
                f"a box reaches outside its tensor (key {key!r}): "
                f"expected inside {list(info.shape)}, got {show(outside[0])}"
            )
            continue
        pair = overlap(boxes)
        if pair is not None:
            yield (
                f"boxes overlap (key {key!r}): expected disjoint ones, "
                f"got {show(boxes[pair[0]])} and {show(boxes[pair[1]])}"
            )
            continue
        target = whole(info.shape)
        covered = sum(b.numel for b in boxes)
        if covered != target.numel:
            gap = first_gap(target, [b for b in boxes if b.numel])
            yield (
                f"boxes leave a gap (key {key!r}, missing {show(gap)}): "
                f"expected {target.numel} elements, got {covered}"
            )


def _chunk_problems(storage: Storage, catalog: Catalog, sizes: dict[str, int], config: Config) -> list[str]:
    """Every chunk of every file against its checksum, with `config.num_threads` threads."""
    if catalog.checksum == "none":
        return []
    problems: list[str] = []
    work: list[tuple[str, int, int]] = []
    step = max(1, DIRECT_BYTES // catalog.chunk_bytes) * catalog.chunk_bytes
    for file, stored in catalog.files.items():
        num_chunks = -(-stored.size // catalog.chunk_bytes)
        if len(stored.checksums) != num_chunks * DIGEST_BYTES:
            problems.append(
                f"a file has the wrong number of checksums (file {file!r}): expected {num_chunks}, "
                f"got {len(stored.checksums) / DIGEST_BYTES:g}"
            )
        elif sizes.get(file) == stored.size:  # other sizes are reported already
            work += [(file, at, min(at + step, stored.size)) for at in range(0, stored.size, step)]
    checker, unchecked, local = Checker(catalog), Checker(catalog, on=False), threading.local()

    def check(file: str, start: int, end: int) -> list[str]:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(step)
        view = memoryview(local.buffer)[: end - start]
        found = []
        reader = storage.open(file)
        try:
            read_checked(reader, unchecked, file, catalog.url, start, view)
        finally:
            reader.close()
        for at in range(
            0, len(view), catalog.chunk_bytes
        ):  # each chunk by itself, so that every bad one is named
            try:
                checker.check(file, start + at, view[at : at + catalog.chunk_bytes])
            except Corrupt as e:
                found.append(str(e))
        return found

    with ThreadPoolExecutor(config.num_threads, thread_name_prefix="shardkeep-verify") as pool:
        for found in pool.map(lambda w: check(*w), work):
            problems += found
    return problems


def _archives(storage: Storage, catalog: Catalog) -> Iterator[str]:
    """Foreign tensor items: each has a readable zip directory inside its bounds."""
    for items in catalog.items.values():
        for item in items:
            stored = catalog.files.get(item.file)
            if item.kind != "tensor" or stored is None or item.offset + item.length > stored.size:
                continue
            reader = storage.open(item.file)
            try:
                archive.payload_offset(item, archive.cached_reads(item, reader))
            except Corrupt as e:
                yield str(e)
            finally:
                reader.close()
