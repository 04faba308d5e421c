"""What crash and failure tests share: a small state, saves through a faulty storage, what is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import checkpointer, layout, write
from shardkeep import manifest as names
from shardkeep.capture import capture
from shardkeep.errors import NotCommitted, ShardkeepError
from shardkeep.storage import Buffer, Storage, Writer
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.faults import Died, Faults, FaultyStorage
from shardkeep.types import Captured, Target

CONFIG = sk.Config(io_threads=2, chunk_bytes=4096, staging_bytes=1 << 18)
CHANGES = frozenset({"create", "append", "close", "put", "delete", "sync", "make"})
CHANGES |= {"remove_tree", "remove_if_empty"}
FIXED_NAMES = {".metadata", "common.pt", "metadata.json", "tokenizer.json"}


def state(seed: int) -> dict[str, Any]:
    """Tensors and values that tell one save from another; several files with `small_files`."""
    return {
        "model": {"w": torch.full((30, 20), float(seed)), "v": torch.arange(300) + seed},
        "step": seed,
        "history": [seed, str(seed)],
    }


def empty() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(30, 20), "v": torch.zeros(300, dtype=torch.int64)},
        "step": None,
        "history": None,
    }


class Unsynced(LocalStorage):
    """Files without fsync, which takes most of the time of small saves; `sync` is asked for all the same."""

    def create(self, name: str) -> Writer:  # type: ignore[override]
        return UnsyncedWriter(super().create(name))

    def put(self, name: str, data: Buffer, *, durable: bool) -> None:
        super().put(name, data, durable=False)

    def sync(self) -> None:
        os.stat(self.url)

    def child(self, name: str) -> Unsynced:
        return Unsynced(super().child(name).url)


class UnsyncedWriter:
    def __init__(self, inner: Writer) -> None:
        self.append, self.abort, self._close = inner.append, inner.abort, inner.close

    def close(self, *, durable: bool) -> None:
        self._close(durable=False)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states too are written to several files, each in several writes."""
    monkeypatch.setattr(layout, "_SMALL_FILE_BYTES", 1024)
    monkeypatch.setattr(write, "_BATCH_BYTES", 2048)


def save_through(
    storage: Storage, seed: int, dialect: str = "dcp", config: sk.Config = CONFIG, **rules: Any
) -> sk.SaveReport:
    """Save `state(seed)` to any storage; in the megatron dialect the values are common ones."""
    target = Target(storage=storage, overwrite=True, **rules)
    take_apart = capture if dialect == "dcp" else capture_as_megatron
    begun = checkpointer.begin(state(seed), target, config, mode="sync", take_apart=take_apart)
    return checkpointer.finish(begun)


def capture_as_megatron(what: Mapping[str, Any]) -> Captured:
    """As `shardkeep.megatron` would give it, without importing megatron."""
    tensors = capture({"model": what["model"]})
    common = {"step": what["step"], "history": what["history"]}
    return Captured(dialect="megatron", shards=tensors.shards, common=common)


def whole(directory: Path) -> int | None:
    """Which save the directory holds, whole in every value; None where no checkpoint is committed."""
    got = empty()
    try:
        sk.load(got, directory, strict=False)
    except NotCommitted:
        assert not sk.is_committed(directory)
        return None
    assert sk.is_committed(directory)
    seed = got["step"]
    expected = state(seed)
    assert torch.equal(got["model"]["w"], expected["model"]["w"])
    assert torch.equal(got["model"]["v"], expected["model"]["v"])
    assert got["history"] == expected["history"]
    problems = [p for p in sk.verify(directory).problems if "for other readers" not in p]
    assert problems == []
    return int(seed)


def strays(directory: Path) -> set[str]:
    """Files that belong to no committed checkpoint of ours in the directory, nor to its user."""
    if not directory.exists():
        return set()
    found = {p.name for p in directory.iterdir()}
    if names.MANIFEST not in found:
        return found
    manifest = json.loads((directory / names.MANIFEST).read_bytes())
    own = {*manifest["files"], *manifest["fixed"], names.attempt_manifest_name(manifest["attempt"])}
    return found - own - {names.MANIFEST, "tokenizer.json"}


def operations(
    work: Callable[[Storage], object], directory: Path, kinds: frozenset[str] | None = None
) -> list[str]:
    """What the work asks of its storage when nothing goes wrong."""
    counted = Faults(kinds=kinds)
    work(FaultyStorage(Unsynced(directory), counted))
    return counted.operations


def struck(work: Callable[[Storage], object], directory: Path, faults: Faults) -> BaseException | None:
    """Do the work on a storage that goes wrong; the error that it gave."""
    try:
        work(FaultyStorage(Unsynced(directory), faults))
    except (Died, ShardkeepError, OSError) as e:
        return e
    return None
