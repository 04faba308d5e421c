"""The commit: whenever the process dies or the storage fails, the old checkpoint is whole, or the new."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkeep as sk
from fault_cases import (
    CHANGES,
    CONFIG,
    FIXED_NAMES,
    Unsynced,
    operations,
    save_through,
    small_files,
    state,
    strays,
    struck,
    whole,
)
from shardkeep.errors import AlreadyCommitted, InputError, SaveFailed
from shardkeep.storage import Storage
from shardkeep.testing.faults import Died, Faults, die, fail_with

__all__ = ["small_files"]

pytestmark = [
    pytest.mark.usefixtures("small_files"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def nothing(directory: Path) -> None:
    pass


def ours(directory: Path) -> None:
    save_through(Unsynced(directory), 1)


def ours_with_tokenizer(directory: Path) -> None:
    save_through(Unsynced(directory), 1, "megatron", attached={"tokenizer.json": b"1" * 100})


def foreign(directory: Path) -> None:
    dcp.save(state(1), checkpoint_id=directory, no_dist=True)


def foreign_over_ours(directory: Path) -> None:
    save_through(Unsynced(directory), 9)
    dcp.save(state(1), checkpoint_id=directory, no_dist=True)


def save_2(storage: Storage) -> sk.SaveReport:
    return save_through(storage, 2)


def save_2_megatron(storage: Storage) -> sk.SaveReport:
    return save_through(storage, 2, "megatron", attached={"tokenizer.json": b"2" * 100})


OURS_ALONE = replace(CONFIG, vanilla_metadata=False)


def without_metadata(directory: Path) -> None:
    save_through(Unsynced(directory), 1, config=OURS_ALONE)


def save_2_without_metadata(storage: Storage) -> sk.SaveReport:
    return save_through(storage, 2, config=OURS_ALONE)


def save_2_megatron_without_metadata(storage: Storage) -> sk.SaveReport:
    return save_through(storage, 2, "megatron", config=OURS_ALONE)


# name -> (what the directory holds before, the save that is struck)
SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Storage], sk.SaveReport]]] = {
    "first save": (nothing, save_2),
    "overwrite": (ours, save_2),
    "overwrite, megatron": (ours_with_tokenizer, save_2_megatron),
    "overwrite of another tool's": (foreign, save_2_megatron),
    "overwrite of another tool's over ours": (foreign_over_ours, save_2),
    "first save, without .metadata": (nothing, save_2_megatron_without_metadata),
    "without .metadata over one with it": (ours, save_2_without_metadata),
    "with .metadata over one without it": (without_metadata, save_2),
    "without .metadata over another tool's": (foreign_over_ours, save_2_megatron_without_metadata),
}
scenarios = pytest.mark.parametrize("scenario", SCENARIOS)


class Case:
    """A directory before the save, of which each strike gets a fresh copy."""

    def __init__(self, tmp_path: Path, scenario: str) -> None:
        before, self.save = SCENARIOS[scenario]
        self._root = tmp_path
        before(tmp_path / "origin")
        self.old = whole(tmp_path / "origin")
        self.files = {p.name for p in (tmp_path / "origin").glob("*")} | FIXED_NAMES

    def fresh(self) -> Path:
        directory = self._root / "case"
        shutil.rmtree(directory, ignore_errors=True)
        if (self._root / "origin").exists():
            shutil.copytree(self._root / "origin", directory)
        return directory


@scenarios
def test_a_death_at_any_operation_leaves_the_old_or_the_new_whole(tmp_path: Path, scenario: str) -> None:
    case = Case(tmp_path, scenario)
    planned = operations(case.save, case.fresh(), CHANGES)
    assert len(planned) > 15
    seen = []
    for at, when in itertools.product(range(len(planned)), ("before", "half")):
        if when == "half" and not planned[at].startswith(("append", "put")):
            continue  # nothing between before and after
        directory = case.fresh()
        faults = Faults(at=at, strike=die, when=when, kinds=CHANGES)  # type: ignore[arg-type]
        assert isinstance(struck(case.save, directory, faults), Died)
        seen.append(whole(directory))
        assert seen[-1] in (case.old, 2), faults.operations
        after_a_restart(directory)
    assert seen == sorted(seen, key=lambda seed: seed == 2)  # the new one comes at one moment and stays
    assert {case.old, 2} == set(seen)


def after_a_restart(directory: Path) -> None:
    """The next save succeeds, is whole, and clears what the dead one left."""
    save_through(Unsynced(directory), 3)
    assert whole(directory) == 3
    assert strays(directory) == set()


@scenarios
def test_an_error_at_any_operation_fails_the_save_and_leaves_the_old(tmp_path: Path, scenario: str) -> None:
    """Reading as well."""
    case = Case(tmp_path, scenario)
    for at in range(len(operations(case.save, case.fresh()))):
        code = (errno.EIO, errno.EACCES)[at % 2]
        check_failure(case, Faults(at=at, strike=fail_with(code), when="half"))


@scenarios
def test_a_disk_that_fills_up_at_any_operation_leaves_the_old(tmp_path: Path, scenario: str) -> None:
    """From then on nothing can be written; deleting and reading go on."""
    case = Case(tmp_path, scenario)
    writing = frozenset({"create", "append", "close", "put", "make"})
    for at in range(len(operations(case.save, case.fresh(), writing))):
        faults = Faults(at=at, strike=fail_with(errno.ENOSPC), when="half", lasting=True, kinds=writing)
        assert check_failure(case, faults) is not None


def check_failure(case: Case, faults: Faults) -> BaseException | None:
    """The save has failed as it should, or has succeeded in spite of it; nothing large is left over."""
    directory = case.fresh()
    error = struck(case.save, directory, faults)
    now = whole(directory)
    assert faults.at is not None
    at = faults.operations[faults.at]
    if error is None:
        assert now == 2, at
    else:
        assert isinstance(error, SaveFailed | InputError), at
        # in place all the same: perhaps not durable, or with files missing that are for other tools
        after_the_commit = ("sync", "put common", "put metadata", "put tokenizer")
        assert now == case.old or (now == 2 and at.startswith(after_the_commit)), at
    left = {n for n in strays(directory) - case.files if n.endswith((".distcp", ".index", ".common"))}
    assert left == set() or at.startswith("delete"), (at, left)  # what cannot be deleted waits
    after_a_restart(directory)
    return error


def test_a_manifest_whose_put_took_effect_though_it_failed_is_committed(tmp_path: Path) -> None:
    """As with an object store whose answer is lost: nothing that the new manifest names may go."""
    ours(tmp_path / "a")
    puts = frozenset({"put"})
    counted = Faults(kinds=puts)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    struck(save_2, tmp_path / "b", counted)
    at = counted.operations.index("put shardkeep.json")
    error = struck(
        save_2, tmp_path / "a", Faults(at=at, strike=fail_with(errno.EIO), when="after", kinds=puts)
    )
    assert isinstance(error, SaveFailed)
    assert whole(tmp_path / "a") == 2


def fixed_files(directory: Path) -> dict[str, bytes]:
    return {n: (directory / n).read_bytes() for n in FIXED_NAMES if (directory / n).exists()}


def test_a_failed_commit_puts_the_files_of_other_readers_back(tmp_path: Path) -> None:
    """Vanilla readers too then find the old checkpoint, not one half of each."""
    ours_with_tokenizer(tmp_path / "a")
    before = fixed_files(tmp_path / "a")
    assert set(before) == FIXED_NAMES
    puts = frozenset({"put"})
    for at in range(len(operations(save_2_megatron, tmp_path / "b", puts))):
        faults = Faults(at=at, strike=fail_with(errno.ENOSPC), kinds=puts)
        error = struck(save_2_megatron, tmp_path / "a", faults)
        assert isinstance(error, SaveFailed)
        assert fixed_files(tmp_path / "a") == before, faults.operations[at]
        assert strays(tmp_path / "a") == set()


@pytest.mark.parametrize("save", [save_2, save_2_megatron])
def test_the_manifest_is_written_after_all_that_it_names(tmp_path: Path, save: Any) -> None:
    order = operations(save, tmp_path, CHANGES)
    manifest = order.index("put shardkeep.json")
    assert order[manifest + 1].startswith("sync")
    report_files = {p.name for p in tmp_path.iterdir()} - {"shardkeep.json"}
    for name in report_files:
        assert max(i for i, o in enumerate(order) if o.endswith(f" {name}")) < manifest, name
    data_done = max(i for i, o in enumerate(order) if o.startswith("close"))
    index = next(i for i, o in enumerate(order) if o.startswith("put") and o.endswith(".index"))
    assert any(o.startswith("sync") for o in order[data_done:index])  # the data's names are durable first


def test_nothing_of_others_in_the_directory_is_touched(tmp_path: Path) -> None:
    ours(tmp_path)
    for name in THEIRS - {"hf"}:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "hf").mkdir()
    save_2(Unsynced(tmp_path))
    assert whole(tmp_path) == 2
    assert {p.name for p in tmp_path.iterdir() if p.is_dir() or p.read_bytes() == b"mine"} == {*THEIRS}


THEIRS = {"notes.txt", "notes.txt.tmp", "tokenizer.model", "events.distcp", "model.safetensors", "hf"}


def test_the_nonce_of_a_save_that_has_begun_since_is_left(tmp_path: Path) -> None:
    """Ranks of a later save in the background may not have looked for it yet."""
    ours(tmp_path)
    for attempt in ("1" * 17, "9" * 17):
        (tmp_path / f"shardkeep.{attempt}.nonce").write_bytes(b"")
    save_2(Unsynced(tmp_path))
    assert strays(tmp_path) == {f"shardkeep.{'9' * 17}.nonce"}


def test_a_checkpoint_without_metadata_is_whole_and_another_tool_can_overwrite_it(tmp_path: Path) -> None:
    """`.metadata` of the checkpoint before must not stay and make the directory look like another tool's."""
    ours(tmp_path)
    assert (tmp_path / ".metadata").exists()
    save_2_without_metadata(Unsynced(tmp_path))
    assert not (tmp_path / ".metadata").exists()
    assert whole(tmp_path) == 2 and sk.verify(tmp_path).ok and strays(tmp_path) == set()
    with pytest.raises(AlreadyCommitted):
        sk.save(state(3), tmp_path)
    dcp.save(state(4), checkpoint_id=tmp_path, no_dist=True)
    assert whole(tmp_path) == 4  # theirs now counts, though our manifest is still there
    save_2_without_metadata(Unsynced(tmp_path))
    assert whole(tmp_path) == 2 and strays(tmp_path) == set()
    save_through(Unsynced(tmp_path), 3)
    assert whole(tmp_path) == 3
    read = {"model.w": torch.zeros(30, 20)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["model.w"], state(3)["model"]["w"])


def test_metadata_of_an_attempt_that_is_left_for_its_step_does_not_hide_the_next(tmp_path: Path) -> None:
    """A run keeps the files of the attempt before until its step is committed."""
    ours(tmp_path)
    save_through(Unsynced(tmp_path), 2, config=OURS_ALONE, keep_previous=True)
    assert whole(tmp_path) == 2
    assert not (tmp_path / ".metadata").exists()


def test_the_environment_can_leave_metadata_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKEEP_VANILLA_METADATA", "0")
    sk.save(state(1), tmp_path)
    assert whole(tmp_path) == 1 and not (tmp_path / ".metadata").exists()


def test_a_save_that_another_has_overtaken_is_refused_at_its_commit(tmp_path: Path) -> None:
    """Both found the directory empty when they began, and neither was to overwrite."""
    first = sk.save_async(state(1), tmp_path / "a")
    second = sk.save_async(state(2), tmp_path / "a")
    first.wait(60)
    with pytest.raises(AlreadyCommitted):
        second.wait(60)
    assert whole(tmp_path / "a") == 1
    assert strays(tmp_path / "a") == set()
