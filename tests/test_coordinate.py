"""Coordination: values arrive, errors reach every rank, silence and death are named in time, nothing stays.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardkeep import coordinate
from shardkeep.coordinate import Coordinator, open_session, session
from shardkeep.errors import InvalidState, SaveFailed, ShardkeepError
from shardkeep.shared_error import sharing
from shardkeep.testing.cluster import ClusterPool

HOST = socket.gethostname()
DEADLINE_S = 2.5
SLACK_S = 20.0  # this machine may be busy; a wait without a deadline of ours takes minutes


def exchange(purpose: str = "save", deadline_s: float = 60.0) -> dict[str, Any]:
    """One session that uses every method; what this rank got."""
    with session(purpose, deadline_s, SaveFailed) as ranks:
        gathered = ranks.gather("g", {"rank": ranks.rank, "pair": (1, "x"), "bytes": b"\0\1"})
        told = ranks.broadcast("b", {"from": ranks.rank, "none": None} if ranks.rank == 0 else "ignored")
        mine = ranks.scatter("s", [[r, r * r] for r in range(ranks.world_size)] if ranks.rank == 0 else None)
        ranks.settle("end")
    return {"gathered": gathered, "told": told, "mine": mine}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_arrive_as_they_were_sent(ranks: ClusterPool, world_size: int) -> None:
    """With one rank as with many; tuples come back as lists in either case."""
    got = ranks.run(world_size, exchange)
    everyone = [{"rank": r, "pair": [1, "x"], "bytes": b"\0\1"} for r in range(world_size)]
    assert [g["gathered"] for g in got] == [everyone] + [None] * (world_size - 1)
    assert [g["told"] for g in got] == [{"from": 0, "none": None}] * world_size
    assert [g["mine"] for g in got] == [[r, r * r] for r in range(world_size)]


def exchange_in_parts() -> dict[str, Any]:
    """With so few keys a call that four ranks need several."""
    coordinate._AT_ONCE = 3
    try:
        return exchange()
    finally:
        coordinate._AT_ONCE = 256


def test_what_many_ranks_say_is_fetched_in_parts(ranks: ClusterPool) -> None:
    got = ranks.run(4, exchange_in_parts)
    assert [value["rank"] for value in got[0]["gathered"]] == [0, 1, 2, 3]
    assert [g["mine"] for g in got] == [[r, r * r] for r in range(4)]


def test_without_a_process_group_a_process_is_alone() -> None:
    assert exchange()["gathered"] == [{"rank": 0, "pair": [1, "x"], "bytes": b"\0\1"}]
    with pytest.raises(SaveFailed, match=r"^ValueError: boom$") as caught, session("save", 1.0, SaveFailed):
        raise ValueError("boom")
    assert isinstance(caught.value.__cause__, ValueError)


def attempt(work: Callable[[Coordinator], object], deadline_s: float = 60.0) -> tuple[str, str, str, float]:
    """Class, text and cause of the error that this rank gets from a session of `work`, and after how long."""
    start = time.monotonic()
    try:
        with session("save /ckpt", deadline_s, SaveFailed) as ranks:
            work(ranks)
    except BaseException as e:
        return type(e).__name__, str(e), type(e.__cause__).__name__, time.monotonic() - start
    return "", "", "", time.monotonic() - start


def raise_on(rank: int, moment: str, error: BaseException) -> tuple[str, str, str, float]:
    def work(ranks: Coordinator) -> None:
        for name in ("first", "second"):
            if name == moment and ranks.rank == rank:
                raise error
            ranks.gather(name, ranks.rank)
            ranks.broadcast(f"{name}-all", 1)

    return attempt(work)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("moment", ["first", "second"])
def test_an_error_on_one_rank_is_raised_on_all(ranks: ClusterPool, rank: int, moment: str) -> None:
    got = ranks.run(3, raise_on, rank, moment, ValueError("boom"))
    text = f"ValueError: boom (rank {rank}, host '{HOST}')"
    assert [g[:2] for g in got] == [("SaveFailed", text)] * 3
    assert got[rank][2] == "ValueError"  # the cause, where there is one
    assert max(g[3] for g in got) < SLACK_S


def test_errors_of_ours_keep_their_class_and_fields(ranks: ClusterPool) -> None:
    got = ranks.run(2, raise_on, 1, "second", InvalidState("a gap", key="w", expected=4, got=3))
    text = f"a gap (rank 1, host '{HOST}', key 'w'): expected 4, got 3"
    assert [g[:2] for g in got] == [("InvalidState", text)] * 2


def test_an_interrupt_goes_on_as_itself_and_is_told_to_the_others(ranks: ClusterPool) -> None:
    got = ranks.run(2, raise_on, 0, "second", KeyboardInterrupt())
    assert got[0][0] == "KeyboardInterrupt"
    assert got[1][0] == "SaveFailed" and "KeyboardInterrupt" in got[1][1] and "rank 0" in got[1][1]


def both_raise() -> tuple[str, str, str, float]:
    def work(ranks: Coordinator) -> None:
        raise ValueError(f"boom {ranks.rank}")

    return attempt(work)


def test_of_two_errors_all_ranks_raise_the_same(ranks: ClusterPool) -> None:
    texts = {g[1] for g in ranks.run(4, both_raise)}
    assert len(texts) == 1
    assert texts.pop().startswith("ValueError: boom")


def after_an_error() -> tuple[str, dict[str, Any]]:
    first = raise_on(1, "first", ValueError("boom"))
    return first[0], exchange("save again")


def test_the_next_session_is_not_touched_by_an_error(ranks: ClusterPool) -> None:
    got = ranks.run(3, after_an_error)
    assert [g[0] for g in got] == ["SaveFailed"] * 3
    assert [g[1]["mine"] for g in got] == [[0, 0], [1, 1], [2, 4]]


def pids_and_silence(silent: int, warm: bool) -> tuple[int, tuple[str, str, str, float] | None]:
    """The silent rank does not come to the session at all."""
    if warm:
        exchange()
    dist.barrier()
    if dist.get_rank() == silent:
        dist.barrier()
        return os.getpid(), None
    got = attempt(lambda ranks: (ranks.gather("here", 1), ranks.broadcast("go", 1)), DEADLINE_S)
    dist.barrier()
    return os.getpid(), got


@pytest.mark.parametrize("warm", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_rank_is_named_within_the_deadline(ranks: ClusterPool, silent: int, warm: bool) -> None:
    got = ranks.run(3, pids_and_silence, silent, warm)
    for rank, (_, error) in enumerate(got):
        if rank == silent:
            continue
        assert error is not None
        kind, text, _, took_s = error
        assert kind == "SaveFailed"
        assert f"rank {silent}" in text
        if warm:
            assert f"rank {silent} ({HOST}, pid {got[silent][0]})" in text
        assert DEADLINE_S <= took_s < DEADLINE_S + SLACK_S


def kill_in_session(victim: int, moment: str) -> tuple[int, tuple[str, str, str, float]]:
    exchange()
    dist.barrier()
    if moment == "before" and dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "before":
        time.sleep(0.5)

    def work(ranks: Coordinator) -> None:
        ranks.gather("begun", os.getpid())
        ranks.broadcast("begun-all", 1)
        if ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.settle("never")

    return os.getpid(), attempt(work, DEADLINE_S)


@pytest.mark.parametrize("moment", ["within", "before"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_within_the_deadline(ranks: ClusterPool, victim: int, moment: str) -> None:
    """Rank 0 as well, with which the store dies."""
    outcomes = ranks.outcomes(3, kill_in_session, victim, moment, timeout_s=60.0)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        kind, text, _, took_s = outcome.value[1]
        assert kind == "SaveFailed", text
        assert f"rank {victim} ({HOST}, pid {outcomes[victim].pid})" in text
        assert took_s < DEADLINE_S + SLACK_S


def stop_rank_0() -> tuple[str, str, str, float] | None:
    exchange()
    pid = [os.getpid()]
    dist.broadcast_object_list(pid, src=0)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None  # once rank 1 has seen enough
    time.sleep(0.3)
    try:
        return attempt(lambda ranks: ranks.settle("never"), DEADLINE_S)
    finally:
        os.kill(pid[0], signal.SIGCONT)


def test_a_host_that_stops_answering_does_not_block(ranks: ClusterPool) -> None:
    """Its store accepts connections and answers nothing: torch's own calls wait past their time-outs."""
    outcomes = ranks.outcomes(2, stop_rank_0)
    kind, text, _, took_s = outcomes[1].value
    assert kind == "SaveFailed"
    assert f"rank 0 ({HOST}, pid {outcomes[0].pid})" in text
    assert took_s < 2 * DEADLINE_S + SLACK_S


def num_keys_after(num_sessions: int) -> list[int]:
    counts = []
    for _ in range(num_sessions):
        exchange()
        dist.barrier()
        counts.append(coordinate._meeting(1.0).store.num_keys())
        dist.barrier()
    return counts


def test_a_finished_session_leaves_no_key(ranks: ClusterPool) -> None:
    for counts in ranks.run(3, num_keys_after, 4):
        assert len(set(counts)) == 1


def skip_sessions(skipped: list[int], purposes: list[str]) -> list[str]:
    """What each of several calls gave; rank 1 does not make those in `skipped`."""
    got = []
    for number, purpose in enumerate(purposes):
        dist.barrier()
        if dist.get_rank() == 1 and number in skipped:
            got.append("skipped")
        else:
            try:
                exchange(purpose, DEADLINE_S)
                got.append("ok")
            except ShardkeepError as e:
                got.append("failed" if "rank 1" in str(e) else str(e))
        dist.barrier()
    return got


def test_a_rank_that_skipped_a_call_catches_up(ranks: ClusterPool) -> None:
    got = ranks.run(3, skip_sessions, [1, 2], ["a", "b", "c", "d", "e"])
    assert got[0] == got[2] == ["ok", "failed", "failed", "ok", "ok"]
    assert got[1] == ["ok", "skipped", "skipped", "ok", "ok"]


def test_a_rank_that_skipped_a_call_catches_up_with_calls_of_the_same_purpose(ranks: ClusterPool) -> None:
    """Saves to one path again and again: its first call may get the error of the one that it skipped."""
    got = ranks.run(3, skip_sessions, [1], ["a", "a", "a", "a", "a"])
    for mine in got:
        assert mine[0] == "ok"
        assert mine[3:] == ["ok", "ok"]


def rank_0_comes_late() -> tuple[str, str, str, float]:
    """Rank 2 has waited for its whole deadline when rank 0, who came later, has not."""
    exchange()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3 * DEADLINE_S)
        return "", "", "", 0.0
    if dist.get_rank() == 0:
        time.sleep(0.9 * DEADLINE_S)
    return attempt(lambda ranks: ranks.settle("never"), DEADLINE_S)


def test_the_missing_rank_is_named_though_rank_0_itself_was_late(ranks: ClusterPool) -> None:
    got = ranks.run(3, rank_0_comes_late)
    for rank in (0, 2):
        assert got[rank][0] == "SaveFailed"
        assert f"from rank 1 ({HOST}, pid " in got[rank][1]


def late_rank() -> list[str]:
    """Rank 1 comes to the session when the others have given it up."""
    got = []
    for late in (True, False):
        if late and dist.get_rank() == 1:
            time.sleep(2 * DEADLINE_S)
        try:
            exchange("save", DEADLINE_S if late else 30.0)
            got.append("ok")
        except ShardkeepError as e:
            got.append("failed" if "rank 1" in str(e) else str(e))
        dist.barrier()
    return got


def test_a_rank_that_is_too_late_gets_the_error_of_its_call(ranks: ClusterPool) -> None:
    assert ranks.run(3, late_rank) == [["failed", "ok"]] * 3


def join_again(directory: str) -> list[Any]:
    """Sessions before and after the job has re-initialised torch.distributed; one that spans it."""
    got = [exchange()["mine"]]
    spanning = open_session("spanning", 30.0, SaveFailed)
    spanning.gather("a", 1)
    for number in range(2):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/{number}", rank=rank, world_size=size
        )
        got.append(exchange()["mine"])
    with sharing(spanning, SaveFailed):
        spanning.settle("b")
    spanning.finish()
    return got


def test_a_job_may_initialise_its_process_groups_anew(ranks: ClusterPool, tmp_path: Path) -> None:
    """Also while a session, a save in the background, is still open."""
    got = ranks.run(2, join_again, str(tmp_path))
    assert got == [[[0, 0]] * 3, [[1, 1]] * 3]


def different_calls() -> tuple[str, str, list[int], float]:
    purpose = "load /ckpt" if dist.get_rank() == 1 else "save /ckpt"
    start = time.monotonic()
    try:
        with session(purpose, 60.0, SaveFailed) as ranks:
            ranks.gather("x", 1)
            ranks.broadcast("y", 1)
    except ShardkeepError as e:
        took_s = time.monotonic() - start
        return type(e).__name__, str(e), exchange()["mine"], took_s
    return "", "", [], 0.0


def test_ranks_that_make_different_calls_are_told_at_once(ranks: ClusterPool) -> None:
    """One has seen that a checkpoint exists and loads, the other has not: they would wait for each other."""
    got = ranks.run(3, different_calls)
    assert [g[0] for g in got] == ["InvalidState"] * 3
    assert len({g[1] for g in got}) == 1
    assert "'load /ckpt'" in got[0][1] and "'save /ckpt'" in got[0][1] and "rank" in got[0][1]
    assert [g[2] for g in got] == [[0, 0], [1, 1], [2, 4]]
    assert max(g[3] for g in got) < SLACK_S


class Watched:
    """A store that refuses every call which would wait."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self.inner.check(keys))

    def get(self, key: str) -> bytes:
        assert self.inner.check([key]), f"get({key}) would wait"
        return bytes(self.inner.get(key))


def exchange_over_a_watched_store() -> list[int]:
    inner = dist.distributed_c10d._get_default_store()
    dist.distributed_c10d._get_default_store = lambda: Watched(inner)
    try:
        if dist.get_rank() == 0:
            time.sleep(0.3)  # the others come first
        mine: list[int] = exchange()["mine"]
        return mine
    finally:
        dist.distributed_c10d._get_default_store = _get_default_store


_get_default_store = dist.distributed_c10d._get_default_store


def test_the_default_store_is_looked_at_but_never_waited_on(ranks: ClusterPool) -> None:
    assert ranks.run(3, exchange_over_a_watched_store) == [[0, 0], [1, 1], [2, 4]]


def threads_after_sessions() -> tuple[int, int]:
    exchange()
    before = threading.active_count()
    for _ in range(5):
        exchange()
    return before, threading.active_count()


def test_sessions_start_no_further_threads(ranks: ClusterPool) -> None:
    for before, after in ranks.run(2, threads_after_sessions):
        assert after == before


ENDING = """
import sys, time, torch.distributed as dist
from shardkeep.coordinate import session
from shardkeep.errors import SaveFailed
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
with session("save", 30.0, SaveFailed) as ranks:
    ranks.settle("written")
    if rank == 1:
        time.sleep(1.0)
    ranks.broadcast("committed", 1)
print("ok", flush=True)
"""


def test_a_slow_rank_still_learns_that_the_last_save_is_committed(tmp_path: Path) -> None:
    """Rank 0 is through with its script, and would take the store with it."""
    ends = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [end.communicate(timeout=100)[0] for end in ends]
    assert [o.strip().splitlines()[-1] for o in outputs] == ["ok", "ok"], outputs[1]
