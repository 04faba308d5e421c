"""Agreement: plans are made once per layout, ranks hold alike what is stored once, all see one directory.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkeep import agree as agreeing
from shardkeep import manifest as names
from shardkeep.agree import Agreement, agree, fingerprint, plan_together
from shardkeep.alone import Alone
from shardkeep.capture import capture
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator, session
from shardkeep.errors import AlreadyCommitted, InvalidState, NoSpace, SaveFailed, ShardkeepError
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.cluster import ClusterPool
from shardkeep.types import Target


class Recorder:
    """A coordinator that notes what travels: (what, to all or to rank 0)."""

    def __init__(self, inner: Coordinator) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.names: list[str] = []

    def gather(self, name: str, value: Any) -> list[Any] | None:
        self.names.append(name)
        return self._inner.gather(name, value)

    def broadcast(self, name: str, value: Any = None) -> Any:
        self.names.append(name)
        return self._inner.broadcast(name, value)

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        self.names.append(name)
        return self._inner.scatter(name, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def agreed(
    state: dict[str, Any], directory: str, **rules: Any
) -> tuple[Agreement | None, list[str], ShardkeepError | None]:
    """What this rank gets, what travelled for it, and the error."""
    target = Target(storage=LocalStorage(directory), overwrite=True, **rules)
    try:
        with session("save", 20.0, SaveFailed) as ranks:
            recorder = Recorder(ranks)
            return agree(recorder, capture(state), target, Config()), recorder.names, None
    except ShardkeepError as e:
        return None, [], e


def state_of(shape: tuple[int, ...] = (4, 4), **more: Any) -> dict[str, Any]:
    return {"w": torch.rand(shape), "b": torch.rand(64), "step": 1, **more}


def agree_again_and_again(directory: str) -> list[Any]:
    """The names that travel: at first, again in new memory, with one rank's layout changed, and back."""
    agreeing._plans.clear()
    rank = dist.get_rank()
    got = []
    changes = [{}, {}, {"extra": torch.rand(3)} if rank == 1 else {}, {}, {"step": 2}]
    for more in changes:
        agreement, travelled, _ = agreed(state_of(**more), directory)
        assert agreement is not None
        got.append((travelled, agreement.chosen))
    return got


def test_an_unchanged_layout_uses_its_plan_again(ranks: ClusterPool, tmp_path: Path) -> None:
    """No headers travel, whatever memory the tensors have moved to and whatever their values."""
    full, repeat = ["captures", "attempt", "headers", "shares"], ["captures", "attempt"]
    for got in ranks.run(2, agree_again_and_again, str(tmp_path)):
        travelled = [names for names, _ in got]
        assert travelled == [full, repeat, full, repeat, repeat]
        assert got[0][1] == got[1][1] == got[3][1]
    first, second = ranks.run(2, agree_again_and_again, str(tmp_path))
    assert sorted(first[0][1] + second[0][1]) == [0, 1, 2]  # each of the three shards once
    assert sorted(first[2][1] + second[2][1]) == [0, 1, 2, 3]


def forget_on_one_rank(directory: str) -> list[list[str]]:
    got = []
    for forgetful in (False, True):
        if forgetful and dist.get_rank() == 1:
            agreeing._plans.clear()
        got.append(agreed(state_of((5, 5)), directory)[1])
    return got


def test_a_plan_that_one_rank_has_forgotten_is_made_anew(ranks: ClusterPool, tmp_path: Path) -> None:
    for got in ranks.run(2, forget_on_one_rank, str(tmp_path)):
        assert got[1] == ["captures", "attempt", "headers", "shares"]


def plan_ahead(directory: str) -> tuple[list[str], list[str], bool]:
    """What travels for a plan, and for the save after it; whether the plan had touched the directory."""
    agreeing._plans.clear()
    with session("prepare", 20.0, SaveFailed) as ranks:
        recorder = Recorder(ranks)
        plan, begun, _ = plan_together(recorder, capture(state_of()))
    touched = Path(directory).exists()
    dist.barrier()
    agreement, travelled, _ = agreed(state_of(), directory)
    assert begun == "" and agreement is not None and agreement.chosen == plan.chosen
    return recorder.names, travelled, touched


def test_a_plan_can_be_made_ahead_without_an_attempt(ranks: ClusterPool, tmp_path: Path) -> None:
    for ahead, later, touched in ranks.run(2, plan_ahead, str(tmp_path / "new")):
        assert ahead == ["captures", "attempt", "headers", "shares"]
        assert later == ["captures", "attempt"]
        assert not touched


def values_of_one_rank(directory: str) -> list[list[str]]:
    """A value that one rank alone holds, and that changes from save to save, costs no further exchange."""
    got = []
    for step in range(3):
        state = state_of(**{f"rng{dist.get_rank()}": step}) | {"step": step}
        agreement, travelled, error = agreed(state, directory)
        assert agreement is not None, error
        got.append(travelled)
    return got


def test_values_that_change_need_no_new_plan(ranks: ClusterPool, tmp_path: Path) -> None:
    for got in ranks.run(3, values_of_one_rank, str(tmp_path)):
        assert got[1:] == [["captures", "attempt"]] * 2


def values_that_differ_later(directory: str) -> list[str]:
    got = []
    for step in range(2):
        state = state_of((3, 3), **{f"rng{dist.get_rank()}": step, "lr": step * dist.get_rank()})
        _, _, error = agreed(state, directory)
        got.append(str(error))
    return got


def test_values_are_compared_under_a_plan_that_is_remembered_too(ranks: ClusterPool, tmp_path: Path) -> None:
    for first, second in ranks.run(2, values_that_differ_later, str(tmp_path)):
        assert first == "None"
        assert "ranks 0 and 1 hold different values of 'lr'" in second


def test_a_plan_made_without_checks_is_not_used_where_checks_are_asked_for(tmp_path: Path) -> None:
    """As megatron's validate_access_integrity=False leaves it behind for a later `sk.save`."""
    captured = capture({"w": torch.rand(4, 2)})
    header = captured.shards[0].header
    object.__setattr__(header, "shape", (8, 2))  # half of the tensor is nowhere
    storage = LocalStorage(tmp_path)
    agree(Alone(), captured, Target(storage=storage, check_cover=False), Config())
    with pytest.raises(InvalidState, match="gap"):
        agree(Alone(), captured, Target(storage=storage), Config())


def test_few_plans_are_remembered(tmp_path: Path) -> None:
    for size in range(1, 40):
        agree(Alone(), capture({"w": torch.rand(size)}), Target(storage=LocalStorage(tmp_path)), Config())
    assert len(agreeing._plans) == agreeing._REMEMBERED_PLANS


def test_fingerprints_tell_layouts_apart() -> None:
    states = [
        {"w": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(2, 3, dtype=torch.float16)},
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(2, 3), "step": 1},
        {"w": 1},
    ]
    prints = []
    for state in states:
        prints.append(fingerprint(capture(state)))
    assert len(set(prints)) == len(states)


def values_that_differ(directory: str, where: int, lenient: bool) -> tuple[str, str, list[str], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkeep").addHandler(handler)
    try:
        state = state_of(lr={"decay": 0.1 if dist.get_rank() != where else 0.2})
        _, travelled, error = agreed(state, directory, lenient=lenient)
    finally:
        logging.getLogger("shardkeep").removeHandler(handler)
    return type(error).__name__, str(error), travelled, records


def test_values_that_differ_between_ranks_are_refused_by_key(ranks: ClusterPool, tmp_path: Path) -> None:
    got = ranks.run(3, values_that_differ, str(tmp_path / "new"), 2, False)
    assert [g[0] for g in got] == ["InvalidState"] * 3
    for _, text, _, _ in got:
        assert "ranks 0 and 2 hold different values of 'lr.decay'" in text
        assert "ShardedObject" in text  # the way out
    assert not (tmp_path / "new").exists()


def test_values_that_differ_only_warn_where_trainers_rely_on_it(ranks: ClusterPool, tmp_path: Path) -> None:
    got = ranks.run(2, values_that_differ, str(tmp_path), 1, True)
    assert [g[0] for g in got] == ["NoneType"] * 2
    assert any("ranks 0 and 1 hold different values of 'lr.decay'" in m for m in got[0][3])


def own_directory(root: str, lenient: bool) -> tuple[str, str]:
    agreeing._SEE_NONCE_S = 0.3
    _, _, error = agreed(state_of(), f"{root}/rank{dist.get_rank()}", lenient=lenient)
    dist.barrier()
    return type(error).__name__, str(error)


def test_two_different_directories_are_refused(ranks: ClusterPool, tmp_path: Path) -> None:
    got = ranks.run(2, own_directory, str(tmp_path), False)
    assert {g[0] for g in got} <= {"InvalidState", "NoneType"}
    assert got[1][0] == "InvalidState"
    assert "rank1" in got[1][1] and "shared directory" in got[1][1]
    assert not (tmp_path / "rank1").exists()


def test_private_directories_are_allowed_where_frameworks_use_them(
    ranks: ClusterPool, tmp_path: Path
) -> None:
    assert ranks.run(2, own_directory, str(tmp_path), True) == [("NoneType", "None")] * 2
    assert (tmp_path / "rank1").is_dir()


def refusals(directory: str) -> tuple[str, str]:
    """A shape that differs between ranks: known after the attempt was opened."""
    shape = (4, 4) if dist.get_rank() == 0 else (4, 5)
    _, _, error = agreed(state_of(shape), directory)
    return type(error).__name__, str(error)


def test_a_refused_state_leaves_nothing_behind(ranks: ClusterPool, tmp_path: Path) -> None:
    got = ranks.run(2, refusals, str(tmp_path / "new"))
    assert [g[0] for g in got] == ["InvalidState"] * 2
    assert "ranks 0 and 1" in got[0][1] and "'w'" in got[0][1]
    assert not (tmp_path / "new").exists()


def test_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Full(LocalStorage):
        def free_bytes(self) -> int:
            return 100

    target = Target(storage=Full(tmp_path / "new"))
    with pytest.raises(NoSpace, match=r"expected 400 bytes free, got 100"):
        agree(Alone(), capture({"w": torch.zeros(100)}), target, Config())
    assert not (tmp_path / "new").exists()


def test_a_committed_target_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    import shardkeep as sk

    sk.save({"w": torch.zeros(3)}, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(AlreadyCommitted, match="overwrite=True"):
        agree(Alone(), capture({"w": torch.zeros(3)}), Target(storage=LocalStorage(tmp_path)), Config())
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_attempts_are_17_digits_in_the_order_of_time(tmp_path: Path) -> None:
    target = Target(storage=LocalStorage(tmp_path), overwrite=True)
    attempts = [agree(Alone(), capture({}), target, Config()).attempt for _ in range(3)]
    assert all(len(a) == 17 and a.isdigit() for a in attempts)
    assert [a[:13] for a in attempts] == sorted(a[:13] for a in attempts)
    assert {names.nonce_name(a) for a in attempts} == {p.name for p in tmp_path.iterdir()}
