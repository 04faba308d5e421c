"""Dispatch over real Ray actors, all of them in the no-fork jail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ray_cases as cases
import shardkeep as sk
from shardkeep.errors import InvalidState, NotCommitted, SaveFailed

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

Start = Callable[..., list[Any]]


@pytest.fixture
def start(ray_local: ModuleType, tmp_path: Path) -> Iterator[Start]:
    """Starts a group of actors; all are killed after the test."""
    started: list[Any] = []

    def start_group(kind: type, world_size: int, *args: Any) -> list[Any]:
        rendezvous = str(tmp_path / f"rendezvous{len(started)}")
        remote = ray_local.remote(num_cpus=0.1)(kind)
        group = [remote.remote(rank, world_size, rendezvous, *args) for rank in range(world_size)]
        started.extend(group)
        ray_local.get(
            [actor.pid.remote() for actor in group], timeout=120
        )  # they are up: deadlines are for saves
        return group

    yield start_group
    for actor in started:
        ray_local.kill(actor)


def call(ray: ModuleType, group: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in group], timeout=120)


@pytest.mark.megatron
def test_megatron_in_jailed_actors_resumes_under_another_layout(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    group = start(cases.MegatronRank, 2)
    call(ray_local, group, "build", 2, 1234)
    call(ray_local, group, "train", 0, 3)
    dispatch = sk.ray.Dispatch(tmp_path / "run", {"policy": group}, config=sk.Config(deadline_s=60))
    saved = call(ray_local, group, "digests")[0]
    saving = dispatch.save(3, trainer_state={"epoch": 1, "order": [3, 1, 2]})
    saving.wait_captured(60)
    uninterrupted = call(ray_local, group, "train", 3, 2)  # goes on while the copy is written
    report = saving.wait(60)
    assert report.components["policy"].num_bytes > 100_000

    call(ray_local, group, "build", 1, 99)
    restored = dispatch.restore().wait(60)
    assert (restored.step, restored.trainer_state) == (3, {"epoch": 1, "order": [3, 1, 2]})
    assert call(ray_local, group, "digests") == [saved, saved]
    assert [r["rng"]["seed"] for r in call(ray_local, group, "what_was_restored")] == [100, 101]
    assert call(ray_local, group, "train", 3, 2)[0] == pytest.approx(uninterrupted[0], abs=1e-5)


def test_groups_of_different_sizes_and_the_trainer_commit_as_one_step(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    policy, critic = start(cases.PlainRank, 2, 10.0), start(cases.PlainRank, 1, 50.0)
    dispatch = sk.ray.Dispatch(tmp_path, {"policy": policy, "critic": critic}, keep=2)

    async def trainer() -> None:
        assert await dispatch.restore() is None
        for step in (1, 2, 3):
            saving = dispatch.save(
                step, trainer_state={"step": step}, files={"huggingface": {"config.json": b'{"a": 1}'}}
            )
            await saving.captured()
            call(ray_local, policy + critic, "set_value", 100.0 * step)
            report = await saving
            assert set(report.components) == {"policy", "critic", "trainer", "huggingface"}
        restored = await dispatch.restore()
        assert (restored.step, restored.trainer_state) == (3, {"step": 3})

    asyncio.run(trainer())
    assert call(ray_local, policy, "get") == [(200.0, "value 200.0"), (201.0, "value 200.0")]
    assert dispatch.steps() == [2, 3]
    assert json.loads((tmp_path / "step_3/huggingface/config.json").read_text()) == {"a": 1}
    assert sorted(json.loads((tmp_path / "step_3/shardkeep.step.json").read_text())["components"]) == [
        "critic",
        "huggingface",
        "policy",
        "trainer",
    ]
    dispatch.restore(2).wait(60)
    assert call(ray_local, critic, "get") == [(100.0, "value 100.0")]


def test_the_trainers_state_is_the_one_at_the_call(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    group = start(cases.PlainRank, 1, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path, {"policy": group})
    state = {"rewards": [0.5], "loader": {"position": 3}}
    saving = dispatch.save(1, trainer_state=state)
    state["rewards"].append(0.7)
    state["loader"]["position"] = 4
    saving.wait(60)
    assert dispatch.restore().wait(60).trainer_state == {"rewards": [0.5], "loader": {"position": 3}}


def test_names_that_would_hide_a_component_are_refused_before_anything_begins(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    group = start(cases.PlainRank, 1, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path / "run", {"policy": group})
    for files in (
        {"policy": {"a": b""}},
        {"trainer": {"a": b""}},
        {"hf": {"../a": b""}},
        {"hf": {".metadata": b""}},
    ):
        with pytest.raises(InvalidState):
            dispatch.save(1, files=files)
    assert not (tmp_path / "run").exists()
    dispatch.save(1).wait(60)
    assert dispatch.steps() == [1]


def test_a_driver_that_does_not_see_the_files_says_so(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    """The actors write elsewhere, as on a node without the driver's file system."""
    group = start(cases.ElsewhereRank, 1, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path / "run", {"policy": group})
    with pytest.raises(SaveFailed, match="component 'policy' was saved but is not whole"):
        dispatch.save(1).wait(60)
    assert dispatch.steps() == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_actor_is_named_and_the_previous_step_stands(
    ray_local: ModuleType, start: Start, tmp_path: Path, victim: int
) -> None:
    group = start(cases.PlainRank, 2, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path / "run", {"policy": group}, config=sk.Config(deadline_s=20))
    dispatch.save(1).wait(60)
    pids = call(ray_local, group, "pid")
    ray_local.get(group[victim].set_slow.remote(30.0))
    saving = dispatch.save(2)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(SaveFailed) as caught:
        saving.wait(60)
    assert time.monotonic() - began < 20  # the deadline
    message = str(caught.value)
    assert (
        f"group 'policy' rank {victim}" in message and f"pid {pids[victim]}" in message and "node" in message
    )
    assert caught.value.fields["rank"] == victim
    assert dispatch.steps() == [1]

    restarted = start(cases.PlainRank, 2, 7.0)
    dispatch.set_group("policy", restarted)
    assert dispatch.restore().wait(60).step == 1
    assert call(ray_local, restarted, "get") == [(1.0, "value 1.0"), (2.0, "value 1.0")]
    dispatch.save(2).wait(60)
    assert dispatch.steps() == [1, 2]


def test_a_rank_that_raises_fails_the_save_with_its_cause(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    group = start(cases.FailingRank, 2, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path / "run", {"policy": group}, config=sk.Config(deadline_s=5))
    dispatch.save(1).wait(60)
    call(ray_local, group, "set_slow", 1.0)
    with pytest.raises(SaveFailed, match=r"rank 1 .*moments are not finite"):
        dispatch.save(2).wait(60)
    assert dispatch.steps() == [1]
    call(ray_local, group, "set_slow", 0.0)
    dispatch.save(3).wait(60)
    assert dispatch.steps() == [1, 3]


def test_a_restore_of_what_is_not_there_says_what_is(
    ray_local: ModuleType, start: Start, tmp_path: Path
) -> None:
    group = start(cases.PlainRank, 1, 1.0)
    dispatch = sk.ray.Dispatch(tmp_path, {"policy": group})
    dispatch.save(4).wait(60)
    with pytest.raises(NotCommitted, match=r"step 5 is not committed.*\[4\]"):
        dispatch.restore(5).wait(60)
    other = sk.ray.Dispatch(tmp_path, {"value": group})
    with pytest.raises(NotCommitted, match="no component 'value'"):
        other.restore().wait(60)
