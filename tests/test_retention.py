"""Retention: which steps go is arithmetic; how one goes leaves nothing that looks whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_cases import CHANGES, Unsynced
from shardkeep.retention import remove_step, surplus
from shardkeep.testing.faults import Died, Faults, FaultyStorage, die


@pytest.mark.parametrize(
    ("steps", "keep", "keep_every", "gone"),
    [
        ([1, 2, 3], None, None, []),
        ([1, 2, 3], None, 2, []),
        ([1, 2, 3], 3, None, []),
        ([1, 2, 3, 4], 2, None, [1, 2]),
        ([4, 1, 3, 2], 1, None, [1, 2, 3]),
        ([10, 15, 20, 25, 30], 1, 10, [15, 25]),
        ([0, 5, 7, 9], 1, 5, [7]),
        ([], 1, 5, []),
    ],
)
def test_surplus_steps(steps: list[int], keep: int | None, keep_every: int | None, gone: list[int]) -> None:
    assert surplus(steps, keep, keep_every) == gone


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 10), st.none() | st.integers(1, 50))
def test_the_newest_and_the_milestones_stay(steps: list[int], keep: int, keep_every: int | None) -> None:
    gone = surplus(steps, keep, keep_every)
    left = set(steps) - set(gone)
    assert set(sorted(steps)[-keep:]) <= left
    assert keep_every is None or {s for s in steps if s % keep_every == 0} <= left
    assert len(left) <= keep + sum(keep_every is not None and s % keep_every == 0 for s in steps)


def a_step(root: Path) -> Path:
    for name in ("policy", "critic"):
        (root / name).mkdir(parents=True)
        for file in ("a.distcp", "b.distcp", "shardkeep.json"):
            (root / name / file).write_bytes(b"x")
    (root / "shardkeep.step.json").write_bytes(b"{}")
    return root


def test_a_step_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    remove_step(Unsynced(a_step(tmp_path / "step_1")), durable=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_removal_that_dies_leaves_a_whole_step_or_one_without_its_manifest(
    tmp_path: Path, durable: bool
) -> None:
    counted = Faults(kinds=CHANGES)
    remove_step(FaultyStorage(Unsynced(a_step(tmp_path / "counted")), counted), durable=durable)
    kinds = [operation.partition(" ")[0] for operation in counted.operations]
    assert kinds == (["delete", "sync", "remove_tree"] if durable else ["delete", "remove_tree"])
    for at, when in itertools.product(range(len(kinds)), ("before", "half")):
        step = a_step(tmp_path / f"{at}{when}")
        faults = Faults(at=at, strike=die, when=when, kinds=CHANGES)  # type: ignore[arg-type]
        with pytest.raises(Died):
            remove_step(FaultyStorage(Unsynced(step), faults), durable=durable)
        whole = sum(p.is_file() for p in step.rglob("*")) == 7
        assert whole == (step / "shardkeep.step.json").exists()
        remove_step(Unsynced(step), durable=durable)  # taken up again
        assert not step.exists()
