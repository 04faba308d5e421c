"""Runs: components commit together or not at all; discovery and retention go by what is committed.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from fault_cases import CHANGES, CONFIG, Unsynced, empty, small_files, state, strays
from shardkeep.errors import Cancelled, InvalidState, NotCommitted, SaveFailed, ShardkeepError
from shardkeep.handle import background
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.cluster import ClusterPool
from shardkeep.testing.faults import Died, Faults, FaultyStorage, die, fail_with, kill

__all__ = ["small_files"]


def run_of(root: Path | str, faults: Faults | None = None, **rules: Any) -> sk.Run:
    """A run over a storage that may go wrong."""
    run = sk.Run(root, config=CONFIG, **rules)
    run._root = Unsynced(root)
    if faults is not None:
        run._root = FaultyStorage(run._root, faults)
    return run


def save_step(run: sk.Run, number: int, seed: int, names: tuple[str, ...] = ("policy", "critic")) -> None:
    with run.step(number) as step:
        for name in names:
            step.save(name, state(seed))
        step.put("trainer", {"seed": seed, "epoch": [1, 2]})


def save_step_async(run: sk.Run, number: int, seed: int) -> None:
    components = {"policy": state(seed), "critic": state(seed), "trainer": {"seed": seed, "epoch": [1, 2]}}
    run.save_async(number, components).wait(60)


def seed_of(
    run: sk.Run, step: int | None = None, names: tuple[str, ...] = ("policy", "critic")
) -> tuple[int, int] | None:
    """(step, seed) of a step, all of whose components come from one save; None if there is none."""
    states: dict[str, dict[str, Any]] = {name: empty() for name in names}
    trainer: dict[str, Any] = {"seed": None, "epoch": None}
    try:
        found = run.load(step, components={**states, "trainer": trainer})
    except NotCommitted:
        return None
    expected = state(trainer["seed"])
    for got in states.values():
        assert torch.equal(got["model"]["w"], expected["model"]["w"])
        assert torch.equal(got["model"]["v"], expected["model"]["v"])
        assert (got["step"], got["history"]) == (trainer["seed"], expected["history"])
    return found, trainer["seed"]


def names_in(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


@pytest.mark.parametrize("save", [save_step, save_step_async])
def test_components_commit_together(tmp_path: Path, save: Callable[..., None]) -> None:
    run = run_of(tmp_path)
    assert (run.latest(), run.steps(), seed_of(run)) == (None, [], None)
    save(run, 9, 1)
    save(run, 100, 2)
    save(run, 20, 3)
    assert (run.latest(), run.steps()) == (100, [9, 20, 100])
    assert seed_of(run) == (100, 2)
    assert seed_of(run, 9) == (9, 1)
    assert names_in(tmp_path) == {"step_9", "step_20", "step_100"}
    assert names_in(tmp_path / "step_9") == {"policy", "critic", "trainer", "shardkeep.step.json"}


def test_nothing_counts_before_the_step_is_committed(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with run.step(1) as step:
        report = step.save("policy", state(1))
        assert report.num_bytes > 4000
        assert run.latest() is None
        step.save("critic", state(1))
        step.put("trainer", {"seed": 1, "epoch": [1, 2]})
        assert run.latest() is None and step.report is None
    assert run.latest() == 1
    assert step.report is not None
    assert set(step.report.components) == {"policy", "critic", "trainer"}
    assert step.report.num_bytes == sum(r.num_bytes for r in step.report.components.values())
    assert step.report.stall_s == pytest.approx(sum(r.stall_s for r in step.report.components.values()))


def test_an_exception_discards_the_step(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save_step(run, 1, 1)
    with pytest.raises(ZeroDivisionError), run.step(2) as step:
        step.save("policy", state(2))
        raise ZeroDivisionError
    assert (run.latest(), seed_of(run)) == (1, (1, 1))
    with pytest.raises(ZeroDivisionError), run.step(1) as step:  # also of one that is saved again
        step.save("policy", state(2))
        raise ZeroDivisionError
    assert seed_of(run) == (1, 1)
    save_step(run, 3, 3)
    assert run.steps() == [1, 3]
    assert not (tmp_path / "step_2").exists()  # what was discarded goes with the next commit


def test_old_steps_go_after_a_newer_one_is_committed(tmp_path: Path) -> None:
    run = run_of(tmp_path, keep=2, keep_every=10)
    for number in (9, 10, 11, 12):
        save_step(run, number, number)
        assert run.latest() == number
    assert run.steps() == [10, 11, 12]
    assert names_in(tmp_path) == {"step_10", "step_11", "step_12"}
    assert [seed_of(run, s) for s in run.steps()] == [(10, 10), (11, 11), (12, 12)]


def test_a_run_taken_up_from_an_older_step_keeps_what_it_saves(tmp_path: Path) -> None:
    """Someone has loaded step 10 of 30 and trains on from there: what is saved now must not go at once."""
    run = run_of(tmp_path, keep=2)
    for number in (10, 20, 30):
        save_step(run, number, number)
    save_step(run, 11, 99)
    assert seed_of(run, 11) == (11, 99)


def test_only_committed_steps_count_towards_keep(tmp_path: Path) -> None:
    run = run_of(tmp_path, keep=2)
    for number in (1, 2, 3):
        save_step(run, number, number)
    (tmp_path / "step_3" / "shardkeep.step.json").unlink()  # as if it had never been committed
    assert run.steps() == [2]
    save_step(run, 4, 4)
    assert run.steps() == [2, 4]
    assert names_in(tmp_path) == {"step_2", "step_4"}


def damage_missing(step: Path) -> None:
    next((step / "critic").glob("*.distcp")).unlink()


def damage_truncated(step: Path) -> None:
    os.truncate(next((step / "critic").glob("*.distcp")), 100)


def damage_step_manifest(step: Path) -> None:
    data = (step / "shardkeep.step.json").read_bytes()
    (step / "shardkeep.step.json").write_bytes(data.replace(b'"step": 2', b'"step": 3'))


def damage_component_manifest(step: Path) -> None:
    for path in (step / "critic").glob("shardkeep.*.json"):
        path.write_bytes(path.read_bytes()[:-20])


def damage_component_replaced(step: Path) -> None:
    shutil.rmtree(step / "critic")
    shutil.copytree(step / "policy", step / "critic")


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_truncated,
        damage_step_manifest,
        damage_component_manifest,
        damage_component_replaced,
    ],
)
def test_a_damaged_step_does_not_count(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = run_of(tmp_path)
    save_step(run, 1, 1)
    save_step(run, 2, 2)
    damage(tmp_path / "step_2")
    assert (run.latest(), run.steps(), seed_of(run)) == (1, [1], (1, 1))
    with pytest.raises(NotCommitted, match=r"step 2 is not committed.*committed: \[1\]"):
        run.load(2, components={"policy": empty()})
    save_step(run, 3, 3)
    assert run.steps() == [1, 3]
    assert (tmp_path / "step_2").exists()  # it was committed once: not ours to throw away


def others(root: Path) -> set[Path]:
    """Directories and files in a root that are not ours, though some look like steps."""
    made = {
        *("step_7.bak", "step_007", "step_x", "step_", "xstep_3", "step_-1", "other", "global_step_3"),
        *("step_3/hf/model", "step_4/actor/huggingface/deep"),
    }
    for name in made:
        (root / name).mkdir(parents=True)
        (root / name / "model.safetensors").write_bytes(b"theirs")
    (root / "step_5").mkdir()
    (root / "step_5" / "optimizer.pt").write_bytes(b"theirs")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    (root / "step_8").write_bytes(b"a file")
    return {p for p in root.rglob("*") if p.is_file()}


def test_what_others_keep_in_the_root_is_left_alone(tmp_path: Path) -> None:
    theirs = others(tmp_path)
    run = run_of(tmp_path, keep=1)
    assert (run.latest(), run.steps()) == (None, [])
    for number in (6, 10, 11):
        save_step(run, number, number)
    assert run.steps() == [11]
    assert {p for p in theirs if not p.exists()} == set()
    assert not (tmp_path / "step_10").exists()


@pytest.mark.parametrize(
    ("step_name", "directory"), [("global_step_{}", "global_step_7"), ("iter_{:07d}", "iter_0000007")]
)
def test_steps_can_have_the_names_of_other_frameworks(tmp_path: Path, step_name: str, directory: str) -> None:
    (tmp_path / "step_9").mkdir()
    run = run_of(tmp_path, step_name=step_name)
    save_step(run, 7, 1)
    assert (tmp_path / directory / "shardkeep.step.json").exists()
    assert run.steps() == [7]
    assert seed_of(run) == (7, 1)


def test_files_for_other_tools_lie_under_their_own_names(tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}\n", "config.json": b'{"layers": 2}'}
    run = run_of(tmp_path)
    with run.step(1) as step:
        step.put_files("hf", files)
    assert {n: (tmp_path / "step_1" / "hf" / n).read_bytes() for n in files} == files
    got: dict[str, Any] = dict.fromkeys(files)
    run.load(components={"hf": got})
    assert got == files


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save_step(run, 1, 1)
    save_step(run, 1, 2)
    assert (run.steps(), seed_of(run)) == ([1], (1, 2))
    for name in ("policy", "critic", "trainer"):
        assert strays(tmp_path / "step_1" / name) == set()


def test_components_of_a_step_can_be_loaded_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save_step(run, 1, 5)
    trainer = {"seed": None, "epoch": None}
    assert run.load(components={"trainer": trainer}) == 1
    assert trainer == {"seed": 5, "epoch": [1, 2]}


def test_a_missing_component_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save_step(run, 1, 5)
    got = empty()
    with pytest.raises(NotCommitted, match=r"no component 'ref'.*expected ref, got critic, policy, trainer"):
        run.load(components={"policy": got, "ref": {}})
    assert got["step"] is None and torch.count_nonzero(got["model"]["w"]) == 0


def test_names_and_numbers_are_checked(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for name in ("", "../x", "a/b", ".hidden", "a b"):
        with pytest.raises(InvalidState, match="plain file name"), run.step(1) as step:
            step.save(name, state(1))
    with pytest.raises(InvalidState, match="already saved"), run.step(1) as step:
        step.save("policy", state(1))
        step.save("policy", state(1))
    with pytest.raises(InvalidState, match="inside its `with` block"):
        run.step(1).save("policy", state(1))
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        sk.Run(tmp_path, keep=0)
    assert run.steps() == []


def test_no_committed_step_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match=r"no step is committed.*committed: \[\]") as caught:
        run_of(tmp_path).load(components={"policy": empty()})
    assert caught.value.fields["path"] == str(tmp_path)


# -- crashes and errors


NAMES = ("policy",)  # beside the trainer's
SCENARIOS = {"a new step, the last one goes": (2, {"keep": 1}), "a step saved again": (1, {})}
scenarios = pytest.mark.parametrize("scenario", SCENARIOS)


class Case:
    """A run with step 1 committed, in a fresh copy for each strike; then `save` with seed 2 is struck."""

    def __init__(self, tmp_path: Path, scenario: str) -> None:
        self.number, self.rules = SCENARIOS[scenario]
        self._origin, self.root = tmp_path / "origin", tmp_path / "case"
        save_step(run_of(self._origin), 1, 1, NAMES)

    def save(self, faults: Faults) -> BaseException | None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self._origin, self.root)
        try:
            save_step(run_of(self.root, faults, **self.rules), self.number, 2, NAMES)
        except (Died, ShardkeepError, OSError) as e:
            return e
        return None

    def found(self) -> tuple[int, int] | None:
        return seed_of(run_of(self.root), names=NAMES)

    def restart(self) -> None:
        """The same step is saved again: that succeeds, and clears everything that was left."""
        run = run_of(self.root, **self.rules)
        save_step(run, self.number, 3, NAMES)
        assert seed_of(run, names=NAMES) == (self.number, 3)
        assert run.steps() == [self.number]
        assert names_in(self.root) == {f"step_{self.number}"}
        step = self.root / f"step_{self.number}"
        assert names_in(step) == {"policy", "trainer", "shardkeep.step.json"}
        assert [strays(step / name) for name in ("policy", "trainer")] == [set()] * 2


@scenarios
def test_a_death_at_any_operation_leaves_one_step_whole(tmp_path: Path, scenario: str) -> None:
    """Between the last component's commit and the step's as well, and while old steps are removed."""
    case = Case(tmp_path, scenario)
    counted = Faults(kinds=CHANGES)
    assert case.save(counted) is None
    seen = []
    for at, when in itertools.product(range(len(counted.operations)), ("before", "half")):
        if when == "half" and not counted.operations[at].startswith(("put", "remove_tree")):
            continue
        faults = Faults(at=at, strike=die, when=when, kinds=CHANGES)  # type: ignore[arg-type]
        assert isinstance(case.save(faults), Died)
        seen.append(case.found())
        assert seen[-1] in ((1, 1), (case.number, 2)), faults.operations
        case.restart()
    assert seen == sorted(seen)  # once the new one is there it stays
    assert set(seen) == {(1, 1), (case.number, 2)}


@scenarios
def test_an_error_at_any_operation_leaves_one_step_whole(tmp_path: Path, scenario: str) -> None:
    case = Case(tmp_path, scenario)
    counted = Faults()
    assert case.save(counted) is None
    for at in range(len(counted.operations)):
        faults = Faults(at=at, strike=fail_with((errno.EIO, errno.ENOSPC)[at % 2]))
        error = case.save(faults)
        assert (
            case.found() == (case.number, 2) if error is None else case.found() in ((1, 1), (case.number, 2))
        )
        assert error is None or isinstance(error, ShardkeepError), (error, faults.operations[at])
        case.restart()


def test_an_old_step_that_cannot_be_removed_does_not_fail_the_save(tmp_path: Path) -> None:
    """It is committed; the old one goes another time."""
    save_step(run_of(tmp_path), 1, 1)
    faults = Faults(at=0, strike=fail_with(errno.EACCES), kinds=frozenset({"remove_tree"}))
    run = run_of(tmp_path, faults, keep=1)
    save_step(run, 2, 2)
    assert seed_of(run) == (2, 2)
    save_step(run, 3, 3)
    assert names_in(tmp_path) == {"step_3"}


# -- in the background


class Held(LocalStorage):
    """A storage that is held back until the test lets go."""

    go = threading.Event()

    def create(self, name: str):  # type: ignore[no-untyped-def] # a LocalWriter
        assert Held.go.wait(30)
        return super().create(name)

    def child(self, name: str) -> LocalStorage:
        return Held(super().child(name).url)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    Held.go = threading.Event()
    yield Held.go
    Held.go.set()
    background.wait_all()


def test_a_step_in_the_background_counts_when_it_is_committed(tmp_path: Path, held: threading.Event) -> None:
    run = run_of(tmp_path)
    run._root = Held(tmp_path)
    what = {"policy": state(1), "critic": state(1), "trainer": {"seed": 1, "epoch": [1, 2]}}
    handle = run.save_async(1, what)
    what["policy"]["model"]["w"].zero_()  # type: ignore[index]
    assert not handle.done() and run.latest() is None
    held.set()
    report = handle.wait(60)
    assert report.step == 1 and set(report.components) == {"policy", "critic", "trainer"}
    assert seed_of(run) == (1, 1)


def test_a_later_step_does_not_take_one_in_flight_for_a_dead_one(
    tmp_path: Path, held: threading.Event
) -> None:
    run = run_of(tmp_path)
    run._root = Held(tmp_path)
    handle = run.save_async(
        1, {"policy": state(1), "critic": state(1), "trainer": {"seed": 1, "epoch": [1, 2]}}
    )
    threading.Timer(0.2, held.set).start()
    save_step(run, 2, 2)
    assert handle.wait(60).step == 1
    assert [seed_of(run, s) for s in run.steps()] == [(1, 1), (2, 2)]


def test_a_cancelled_step_leaves_no_step(tmp_path: Path, held: threading.Event) -> None:
    run = run_of(tmp_path)
    run._root = Held(tmp_path)
    handle = run.save_async(1, {"policy": state(1), "critic": state(1)})
    handle.cancel()
    held.set()
    with pytest.raises(Cancelled):
        handle.wait(60)
    assert run.latest() is None
    save_step(run, 2, 2)
    assert run.steps() == [2]
    assert names_in(tmp_path) == {"step_2"}


def test_a_component_that_cannot_be_stored_gives_all_of_the_step_up(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(InvalidState, match="strided"):
        run.save_async(1, {"policy": state(1), "critic": {"w": torch.zeros(3, device="meta")}})
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    save_step(run, 2, 2)
    assert run.steps() == [2]


# -- several ranks


def cannot_store_on_one_rank(root: str, deadline_s: float) -> tuple[str, str, list[Any]]:
    """Rank 1 alone finds, late, that it cannot store the second component."""
    run = run_of(root)
    run._config = sk.Config(deadline_s=deadline_s)
    second: dict[str, Any] = {f"rank{dist.get_rank()}": (lambda: 1) if dist.get_rank() == 1 else 1}
    try:
        run.save_async(1, {"policy": state(1), "second": second})
    except ShardkeepError as e:
        kind, text = type(e).__name__, str(e)
        dist.barrier()
        files = [str(p) for p in Path(root).rglob("*") if p.is_file()]
        dist.barrier()
        save_step(run, 2, 2)
        return kind, text, [*run.steps(), *files]
    return "", "", []


def test_a_component_that_one_rank_cannot_store_gives_the_step_up_on_all(
    ranks: ClusterPool, tmp_path: Path
) -> None:
    got = ranks.run(2, cannot_store_on_one_rank, str(tmp_path), 100.0)
    assert [g[0] for g in got] == ["InvalidState"] * 2
    assert got[0][1] == got[1][1] and "'rank1'" in got[0][1]
    assert [g[2] for g in got] == [[2]] * 2


def raise_in_step(
    root: str, culprit: int, moment: str
) -> tuple[str, str, int | None, tuple[int, int] | None]:
    run = run_of(root)
    save_step(run, 1, 1)
    kind, text = "", ""
    try:
        with run.step(2) as step:
            if moment == "first" and dist.get_rank() == culprit:
                raise ValueError("boom")
            step.save("policy", state(2))
            if moment == "last" and dist.get_rank() == culprit:
                raise ValueError("boom")
    except Exception as e:
        kind, text = type(e).__name__, str(e)
    dist.barrier()
    before = run.latest()
    save_step(run, 3, 3)
    return kind, text, before, seed_of(run)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("moment", ["first", "last"])
def test_an_exception_on_one_rank_discards_the_step_on_all(
    ranks: ClusterPool, tmp_path: Path, culprit: int, moment: str
) -> None:
    got = ranks.run(2, raise_in_step, str(tmp_path), culprit, moment)
    shared = f"ValueError: boom (rank {culprit}, host '{socket.gethostname()}')"
    assert got[culprit][:2] == ("ValueError", "boom")
    assert got[1 - culprit][:2] == ("SaveFailed", shared)
    assert [g[2:] for g in got] == [(1, (3, 3))] * 2
    assert names_in(tmp_path) == {"step_1", "step_3"}


def save_sharded(root: str, seed: int) -> list[int]:
    """Each rank has plain values in common, and the step is one for all."""
    run = run_of(root)
    save_step(run, seed, seed)
    save_step_async(run, seed + 1, seed + 1)
    return run.steps()


def test_ranks_commit_a_step_together(ranks: ClusterPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_sharded, str(tmp_path), 4) == [[4, 5]] * 3
    assert seed_of(run_of(tmp_path)) == (5, 5)


@pytest.mark.parametrize(("victim", "number"), [(0, 40), (1, 5)])
def test_a_killed_rank_fails_the_step_on_the_others(
    ranks: ClusterPool, tmp_path: Path, victim: int, number: int
) -> None:
    save_step(run_of(tmp_path), 1, 1)
    outcomes = ranks.outcomes(2, die_at, str(tmp_path), victim, number, timeout_s=60)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    kind, text = outcomes[1 - victim].value
    assert kind == SaveFailed.__name__
    assert f"rank {victim} ({socket.gethostname()}, pid {outcomes[victim].pid})" in text
    assert seed_of(run_of(tmp_path)) == (1, 1)
    assert ranks.run(2, save_sharded, str(tmp_path), 1) == [[1, 2]] * 2
    assert seed_of(run_of(tmp_path), 1) == (1, 1)


def die_at(root: str, victim: int, number: int) -> tuple[str, str]:
    mine = dist.get_rank() == victim
    run = run_of(root, Faults(at=number, strike=kill) if mine else None)
    run._config = sk.Config(deadline_s=10.0, io_threads=1)
    try:
        save_step(run, 1, 2)
    except ShardkeepError as e:
        return type(e).__name__, str(e)
    return "", ""
