"""The N-process cluster: values in rank order, failures with their cause, no hang, no process left behind.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardkeep.testing.cluster import ClusterPool, RankFailed, RankTimeout, run_ranks


def sum_of_ranks(extra: int = 0) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + extra])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def pid() -> int:
    return os.getpid()


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + dist.get_rank())


def variable(name: str) -> str | None:
    return os.environ.get(name)


def rank_and_group() -> tuple[str, bool]:
    return os.environ["RANK"], dist.is_initialized()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        print("about to fail", file=sys.stderr)
        raise KeyError("missing", rank)
    return rank


def fail_on_while_others_wait(rank: int) -> None:
    fail_on(rank)
    dist.barrier()


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def exit_on(rank: int, code: int) -> str:
    if dist.get_rank() == rank:
        os._exit(code)
    return "alive"


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        threading.Event().wait()
    return "alive"


class Unpicklable(Exception):
    def __init__(self, lock: object) -> None:
        super().__init__("holds a lock")
        self.lock = lock


def raise_unpicklable() -> None:
    raise Unpicklable(threading.Lock())


def return_unpicklable() -> object:
    return threading.Lock()


def fork_errno() -> int:
    try:
        child = os.fork()
    except OSError as failure:
        return failure.errno or -1
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return 0


def die_leaving_a_child() -> None:
    if dist.get_rank() == 0:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_back_in_rank_order(ranks: ClusterPool, world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    assert ranks.run(world_size, sum_of_ranks, 10) == [
        (rank, world_size, total) for rank in range(world_size)
    ]


def test_function_can_be_named(ranks: ClusterPool) -> None:
    assert ranks.run(2, "test_cluster:sum_of_ranks") == [(0, 2, 1), (1, 2, 1)]


def test_tensors_travel_by_value(ranks: ClusterPool) -> None:
    first, second = ranks.run(2, scaled, torch.arange(3.0))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [0, 2, 4]


def test_processes_are_kept_and_calls_are_quick(ranks: ClusterPool) -> None:
    before = ranks.run(2, pid)
    start = time.monotonic()
    assert all(set(ranks.run(2, pid)) == set(before) for _ in range(5))
    assert (time.monotonic() - start) / 5 < 1.0  # about 50 ms; importing torch again would take seconds
    assert os.getpid() not in before


def test_environment_is_set_for_one_call(ranks: ClusterPool) -> None:
    assert ranks.run(2, variable, "SHARDKEEP_TEST_VARIABLE", env={"SHARDKEEP_TEST_VARIABLE": "on"}) == [
        "on",
        "on",
    ]
    assert ranks.run(2, variable, "SHARDKEEP_TEST_VARIABLE") == [None, None]
    assert ranks.run(2, variable, "WORLD_SIZE") == ["2", "2"]


def test_ranks_can_stay_unjoined(ranks: ClusterPool) -> None:
    assert ranks.run(2, rank_and_group, process_group=False) == [("0", False), ("1", False)]


def test_an_error_carries_its_cause_traceback_and_output(ranks: ClusterPool) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, fail_on, 1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("missing", 1)
    for text in ("test_cluster:fail_on on 2 ranks", "rank 1 (pid", "in fail_on", "about to fail"):
        assert text in str(caught.value)
    assert [outcome.ok for outcome in caught.value.outcomes] == [True, False]


def test_ranks_outlive_an_error_they_report(ranks: ClusterPool) -> None:
    before = set(ranks.run(2, pid))
    outcomes = ranks.outcomes(2, fail_on, 0)
    assert [type(outcome.error) for outcome in outcomes] == [KeyError, type(None)]
    assert set(ranks.run(2, pid)) == before


def test_peers_of_a_failed_rank_do_not_wait_for_the_timeout(ranks: ClusterPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.run(3, fail_on_while_others_wait, 1, timeout_s=100)
    assert time.monotonic() - start < 30
    assert isinstance(caught.value.outcomes[1].error, KeyError)


def test_a_killed_rank_is_reported_and_replaced(ranks: ClusterPool) -> None:
    before = ranks.run(2, pid)
    outcomes = ranks.outcomes(2, die_on, 1)
    assert [(outcome.value, outcome.exit_code) for outcome in outcomes] == [
        ("alive", None),
        (None, -signal.SIGKILL),
    ]
    assert "killed by SIGKILL" in outcomes[1].describe()
    after = ranks.run(2, pid)
    assert before[0] in after
    assert before[1] not in after
    assert ranks.run(2, sum_of_ranks) == [(0, 2, 1), (1, 2, 1)]


def test_an_exit_is_not_a_success(ranks: ClusterPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 .* died: exit code 0"):
        ranks.run(1, exit_on, 0, 0)


def test_a_death_is_seen_while_a_forked_child_holds_the_connection(ranks: ClusterPool) -> None:
    start = time.monotonic()
    assert ranks.outcomes(1, die_leaving_a_child)[0].exit_code == -signal.SIGKILL
    assert time.monotonic() - start < 20


def test_a_hang_dumps_stacks_and_ends(ranks: ClusterPool) -> None:
    with pytest.raises(RankTimeout, match="in hang_on") as caught:
        ranks.run(2, hang_on, 0, timeout_s=2)
    hung, other = caught.value.outcomes
    assert (hung.timed_out, other.value) == (True, "alive")
    with pytest.raises(ProcessLookupError):
        os.kill(hung.pid, 0)


def test_what_cannot_be_pickled_is_an_error_not_a_hang(ranks: ClusterPool) -> None:
    with pytest.raises(RankFailed, match="Unpicklable: holds a lock"):
        ranks.run(1, raise_unpicklable)
    with pytest.raises(RankFailed, match="cannot pickle"):
        ranks.run(1, return_unpicklable)


def test_jailed_ranks_cannot_fork_and_still_communicate(ranks: ClusterPool) -> None:
    assert ranks.run(2, fork_errno) == [0, 0]
    assert ranks.run(2, fork_errno, jailed=True) == [12, 12]
    assert ranks.run(2, sum_of_ranks, jailed=True) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize("function", ["no_colon", lambda: None], ids=["name", "lambda"])
def test_a_function_that_ranks_cannot_import_is_refused(ranks: ClusterPool, function: object) -> None:
    with pytest.raises(ValueError, match="module"):
        ranks.run(1, function)  # type: ignore[arg-type]


def test_world_size_is_checked(ranks: ClusterPool) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ranks.run(0, pid)


def test_one_call_needs_no_pool_and_leaves_no_process() -> None:
    (rank_pid,) = run_ranks(1, pid)
    with pytest.raises(ProcessLookupError):
        os.kill(rank_pid, 0)


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\n"
        "from shardkeep.testing.cluster import ClusterPool\n"
        "pool = ClusterPool(); print(*pool.run(1, 'test_cluster:pid'), flush=True)\n"
        "threading.Thread(target=pool.run, args=(1, 'test_cluster:hang_on', 0), daemon=True).start()\n"
        "threading.Event().wait(0.5); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    orphan = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{orphan}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{orphan}").exists()
