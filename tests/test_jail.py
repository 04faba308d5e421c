"""The no-fork jail holds: no child by any road; threads, torch, Ray actors as usual; megatron's save fails.

The jail cannot be left, so every test enters it in a process of its own. Top-level functions without a
`test_` prefix are what those processes run.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import shardkeep as sk
from shardkeep.testing import jail

TESTS = Path(__file__).resolve().parent
CHILDREN = ("os.fork", "subprocess.run", "os.posix_spawn", "spawn", "fork", "forkserver")


def start_child(how: str) -> None:
    """Start and reap a child process in the way named; raises what the system answers."""
    if how == "os.fork":
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    elif how == "subprocess.run":
        subprocess.run(["true"], check=True)
    elif how == "os.posix_spawn":
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    else:
        child = multiprocessing.get_context(how).Process(target=print)
        child.start()
        child.join()


def errno_of(action: Callable[[], object]) -> int:
    """The errno that `action` fails with; 0 when it succeeds."""
    try:
        action()
    except OSError as failure:
        return failure.errno or -1
    return 0


def children_errnos() -> dict[str, int]:
    """For each way to start a child, the errno it fails with."""
    return {how: errno_of(lambda how=how: start_child(how)) for how in CHILDREN}


def start_threads(num_threads: int) -> int:
    """How many of `num_threads` threads ran at the same time."""
    together = threading.Barrier(num_threads)
    ran: list[int] = []
    threads = [threading.Thread(target=lambda: ran.append(together.wait(30))) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(set(ran))


def multiply_in_threads() -> float:
    """A product large enough for torch to split over its own threads, which it starts here."""
    import torch

    torch.set_num_threads(4)
    return float((torch.ones(1024, 1024) @ torch.ones(1024, 1024)).sum())


def save_with_megatron(directory: str, *, shardkeep: bool = False) -> None:
    """megatron-core, unmodified or with shardkeep installed, saves two sharded tensors in one gloo process,
    on a machine without a GPU."""
    import torch
    from megatron.core import dist_checkpointing

    if shardkeep:
        import shardkeep as sk

        sk.megatron.install()

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}.store", rank=0, world_size=1
    )
    os.makedirs(directory)
    state = {
        key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, torch.full((64, 64), fill))
        for key, fill in (("a", 1.0), ("b", 2.0))
    }
    dist_checkpointing.save({**state, "step": 3}, directory)
    torch.distributed.destroy_process_group()


def calling(expression: str) -> str:
    """Code for `python -c` that evaluates `expression` in this module and prints its value."""
    return f"import sys; sys.path.insert(0, {str(TESTS)!r}); from test_jail import *; print({expression})"


def run_jailed(expression: str) -> str:
    """What `expression`, evaluated in this module in the jail, prints."""
    done = jail.run_jailed("-c", calling(expression))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_child_process_starts() -> None:
    assert children_errnos() == dict.fromkeys(CHILDREN, 0), "outside, each way must work"
    assert run_jailed("children_errnos()") == str(dict.fromkeys(CHILDREN, errno.ENOMEM))


def test_jail_knows_itself() -> None:
    assert not jail.is_jailed()
    assert run_jailed("jail.is_jailed()") == "True"


def test_entering_twice_is_harmless() -> None:
    assert run_jailed("jail.enter() or errno_of(lambda: start_child('os.fork'))") == "12"


def test_threads_that_already_run_are_jailed_too() -> None:
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]); import test_jail\n"
        "go, codes = threading.Event(), []\n"
        "def late(): go.wait(); codes.append(test_jail.errno_of(lambda: test_jail.start_child('os.fork')))\n"
        "thread = threading.Thread(target=late); thread.start()\n"
        "test_jail.jail.enter(); go.set(); thread.join(); print(codes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TESTS)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[12]"


def test_threads_still_start() -> None:
    assert run_jailed("start_threads(100)") == "100"


def test_torch_computes_in_its_threads() -> None:
    assert run_jailed("multiply_in_threads()") == str(float(1024**3))


def test_scripts_and_modules_run_as_main(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 5\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, helper\nif __name__ == '__main__': print(helper.value, sys.argv[1:])\n")
    assert jail.run_jailed(script, "x").stdout == "5 ['x']\n"
    assert jail.run_jailed("-m", "script", "y", cwd=tmp_path).stdout == "5 ['y']\n"


def test_exit_status_and_error_output_come_back() -> None:
    done = jail.run_jailed("-c", "raise SystemExit('no')")
    assert (done.returncode, done.stderr) == (1, "no\n")
    assert jail.run_jailed().returncode != 0


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(180)
def test_ray_actor_works_in_the_jail(ray_local: ModuleType) -> None:
    ray = ray_local

    @ray.remote(num_cpus=1)
    class Jailed:
        def __init__(self) -> None:
            jail.enter()

        def children(self) -> dict[str, int]:
            import test_jail

            return test_jail.children_errnos()

        def work(self) -> tuple[int, float]:
            import test_jail

            return test_jail.start_threads(100), test_jail.multiply_in_threads()

        def ask_a_task(self) -> int:
            import test_jail

            return int(ray.get(ray.remote(num_cpus=1)(test_jail.start_threads).remote(5)))

        def fail(self) -> None:
            raise ValueError("expected")

    actor = Jailed.remote()
    assert ray.get(actor.children.remote(), timeout=120) == dict.fromkeys(CHILDREN, errno.ENOMEM)
    assert ray.get(actor.work.remote(), timeout=60) == (100, float(1024**3))
    assert ray.get(actor.ask_a_task.remote(), timeout=60) == 5
    with pytest.raises(ValueError, match="expected"):
        ray.get(actor.fail.remote(), timeout=60)
    ray.kill(actor)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_the_jail_unmodified_megatron_fails_and_shardkeep_saves(tmp_path: Path) -> None:
    free, jailed = tmp_path / "free", tmp_path / "jailed"
    outside = subprocess.run(
        [sys.executable, "-c", calling(f"save_with_megatron({str(free)!r})")],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert outside.returncode == 0, outside.stderr
    assert {"metadata.json", ".metadata", "common.pt"} < {file.name for file in free.iterdir()}

    inside = jail.run_jailed("-c", calling(f"save_with_megatron({str(jailed)!r})"), timeout_s=140)
    assert inside.returncode != 0
    assert "OSError: [Errno 12] Cannot allocate memory" in inside.stderr
    assert "megatron/core/dist_checkpointing/strategies/filesystem_async.py" in inside.stderr
    assert not (jailed / "metadata.json").exists()

    ours = tmp_path / "ours"
    done = jail.run_jailed("-c", calling(f"save_with_megatron({str(ours)!r}, shardkeep=True)"), timeout_s=140)
    assert done.returncode == 0, done.stderr
    loaded = sk.inspect(ours)
    assert (loaded.read("a") == 1.0).all() and loaded.common()["step"] == 3
