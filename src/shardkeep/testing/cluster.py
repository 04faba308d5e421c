"""Run a function in N real processes joined by a gloo process group on this machine.

In:  a world size, a top-level function (or "module:function") and its picklable arguments, the same for every
     rank.
Out: what it returned on each rank, in rank order; or `RankFailed` with every failing rank's traceback and
     output.
Invariant: nothing hangs and nothing is left. After `timeout_s` the ranks that are silent dump their stacks
     and are killed; when this process ends, however it ends, so do they.

Each rank is a fresh interpreter, never a fork of this threaded one. Importing torch takes seconds, so a
`ClusterPool` keeps its processes: a call on warm ones costs some 50 ms, most of it gloo's. Each call gets a
new process group, which ends with the call, and the environment that `torchrun` would set, so a process holds
nothing of an earlier call but its module-level state.

    with ClusterPool() as pool:
        assert pool.run(4, "my_tests:sum_of_ranks") == [6, 6, 6, 6]
        first, second = pool.outcomes(2, "my_tests:rank_1_kills_itself")  # failures as values

The channel to the ranks is pickle, between processes that this one started.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["ClusterPool", "Outcome", "RankFailed", "RankTimeout", "run_ranks"]

_START_S = 120.0  # longest wait for a process to import torch, on a busy machine
_GRACE_S = 10.0  # how long `run` still waits for the others once a rank has failed
_DUMP_S = 0.5  # for faulthandler to write the stacks before the kill
_TAIL_CHARS = 6000  # of a rank's output, in messages

# The parent's sys.path, so that a rank finds the package and the test modules where its parent does.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from shardkeep.testing import _rank; _rank.main(int(sys.argv[1]), jailed=sys.argv[2] == 'jailed')"
)


class RankFailed(RuntimeError):
    """A rank raised, died or was silent for too long. `outcomes` holds all ranks', the good ones too."""

    def __init__(self, message: str, outcomes: list[Outcome] | None = None) -> None:
        super().__init__(message)
        self.outcomes = outcomes or []


class RankTimeout(RankFailed, TimeoutError):
    """A rank did not answer in time; its stacks are in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended on one rank: with a value, an error that it raised, a death, or silence."""

    rank: int
    pid: int
    value: Any = None
    error: BaseException | None = None
    """What the function raised; a stand-in RuntimeError when that cannot be pickled."""
    traceback: str = ""
    exit_code: int | None = None
    """Set when the process died in the call; negative is the number of the signal that killed it."""
    timed_out: bool = False
    output: str = ""
    """The end of what the rank wrote to stdout and stderr during the call, stack dumps included."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None and not self.timed_out

    def describe(self) -> str:
        if self.timed_out:
            ending = "gave no answer in time and was killed"
        elif self.exit_code is not None:
            ending = f"died: {_exit_reason(self.exit_code)}"
        elif self.error is not None:
            ending = f"raised {type(self.error).__name__}: {self.error}"
        else:
            ending = f"returned {self.value!r}"
        details = [part.rstrip() for part in (self.traceback, self.output) if part.strip()]
        return "\n".join([f"rank {self.rank} (pid {self.pid}) {ending}", *details])


class ClusterPool:
    """Warm rank processes. Not for several threads at once; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="shardkeep-cluster-"))
        self._idle: list[_Process] = []
        self._numbers = itertools.count()

    def run(
        self,
        world_size: int,
        function: str | Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        jailed: bool = False,
        process_group: bool = True,
    ) -> list[Any]:
        """Call `function(*args)` on every rank and return the values in rank order.

        `env` is set for the call alone; `jailed` runs it in the no-fork jail; without `process_group` the
        ranks know RANK and WORLD_SIZE but are not joined. Once a rank fails, the others get ten more seconds
        at most. Raises RankFailed, caused by the first failing rank's own error, or RankTimeout.
        """
        call = _Call(world_size, _importable(function), args, dict(env or {}), process_group, timeout_s)
        outcomes = self._call(call, jailed, grace_s=_GRACE_S)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            message = "\n\n".join(outcome.describe() for outcome in failed)
            raised = RankTimeout if any(outcome.timed_out for outcome in failed) else RankFailed
            raise raised(f"{call.name} on {world_size} ranks:\n{message}", outcomes) from failed[0].error
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: str | Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        jailed: bool = False,
        process_group: bool = True,
    ) -> list[Outcome]:
        """Like `run`, but failures are values too, and the survivors of one have all of `timeout_s`."""
        call = _Call(world_size, _importable(function), args, dict(env or {}), process_group, timeout_s)
        return self._call(call, jailed, grace_s=None)

    def close(self) -> None:
        """End all processes. The pool can be used again afterwards only by making a new one."""
        for process in self._idle:
            process.connection.close()  # a rank exits at end of file
        for process in self._idle:
            process.end(patience_s=2.0)
        self._idle.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: _Call, jailed: bool, grace_s: float | None) -> list[Outcome]:
        members = self._take(call.world_size, jailed)
        store = self._directory / f"store-{next(self._numbers)}"
        try:
            for rank, member in enumerate(members):
                member.request(call.for_rank(rank, store))
            outcomes = _collect(members, call.timeout_s, grace_s)
        except BaseException:  # an interrupted call leaves its ranks in the middle of it
            for member in members:
                member.end()
            raise
        survivors = [member for member in members if member.alive]
        for member in survivors:
            member.request(None)
        self._idle[:0] = survivors  # in front, so that a run of calls stays with the same processes
        for member in members:
            if not member.alive:  # its replacement imports torch while the caller looks at the outcome
                member.end()
                self._idle.append(self._start(jailed))
        return outcomes

    def _take(self, world_size: int, jailed: bool) -> list[_Process]:
        """`world_size` processes that are ready, from the idle ones as far as they go."""
        fit = [process for process in self._idle if process.jailed == jailed and process.alive][:world_size]
        self._idle = [process for process in self._idle if process not in fit and process.alive]
        fit += [self._start(jailed) for _ in range(world_size - len(fit))]
        try:
            for process in fit:
                process.await_ready()
        except BaseException:
            for process in fit:
                process.end()
            raise
        return fit

    def _start(self, jailed: bool) -> _Process:
        return _Process(self._directory / f"output-{next(self._numbers)}", jailed)


def run_ranks(
    world_size: int,
    function: str | Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    jailed: bool = False,
) -> list[Any]:
    """One `ClusterPool.run` in new processes that end with it: for a call where seconds do not matter."""
    with ClusterPool() as pool:
        return pool.run(world_size, function, *args, timeout_s=timeout_s, env=env, jailed=jailed)


@dataclass(frozen=True, slots=True)
class _Call:
    """What all ranks of a call share."""

    world_size: int
    target: tuple[str, str]  # module and function
    args: tuple[Any, ...]
    env: dict[str, str]
    process_group: bool
    timeout_s: float

    @property
    def name(self) -> str:
        return ":".join(self.target)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")

    def for_rank(self, rank: int, store: Path) -> dict[str, Any]:
        """The request that `_rank.serve` takes."""
        return {
            "target": self.target,
            "args": self.args,
            "sys_path": sys.path,
            "env": {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                **self.env,
            },
            "store": str(store) if self.process_group else None,
            # Ours is the shorter one: its stack dump says more than gloo's error.
            "group_timeout_s": 2 * self.timeout_s,
        }


class _Process:
    """One rank process and the connection to it."""

    def __init__(self, output: Path, jailed: bool) -> None:
        self.jailed = jailed
        self._output = output
        self._output_start = 0
        self._ready = False
        self.connection, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        with theirs, output.open("wb") as sink:
            mode = "jailed" if jailed else "free"
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), mode, json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that `end` reaches what the rank itself may have started
            )
        # The connection does not close with the process while a child of it lives; this does.
        self.death_fd = os.pidfd_open(self._popen.pid)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def await_ready(self) -> None:
        if self._ready:
            return
        if not self.connection.poll(_START_S):
            raise RankTimeout(f"a rank process was not ready after {_START_S:.0f} s:\n{self._tail()}")
        try:
            self.connection.recv()
        except EOFError:
            raise RankFailed(f"a rank process ended as it started:\n{self._tail()}") from None
        self._ready = True

    def request(self, message: dict[str, Any] | None) -> None:
        """Send a call, or with None the end of the last one."""
        self._output_start = self._output.stat().st_size
        # Not `send`: its pickler passes tensors through shared memory and a helper thread.
        with suppress(BrokenPipeError):  # a rank that died in between is reported by `receive`
            self.connection.send_bytes(b"" if message is None else pickle.dumps(message))

    def receive(self, rank: int) -> Outcome:
        """The outcome of a call, once the connection or `death_fd` is ready."""
        try:
            if self.connection.poll():
                reply = self.connection.recv()
                output = "" if reply["error"] is None else self._tail()
                return Outcome(rank=rank, pid=self._popen.pid, output=output, **reply)
        except (EOFError, ConnectionResetError):
            pass
        exit_code = self._popen.wait()
        return Outcome(rank=rank, pid=self._popen.pid, exit_code=exit_code, output=self._tail())

    def dump_stacks(self) -> None:
        with suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGUSR1)

    def abandon(self, rank: int) -> Outcome:
        self.end()
        return Outcome(rank=rank, pid=self._popen.pid, timed_out=True, output=self._tail())

    def end(self, patience_s: float = 0.0) -> None:
        """Kill the process and what it started, after `patience_s` to end by itself. May be called again."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self.connection.close()
        if self.death_fd >= 0:
            os.close(self.death_fd)
            self.death_fd = -1

    def _tail(self) -> str:
        with self._output.open("rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace")[-_TAIL_CHARS:]


def _collect(members: list[_Process], timeout_s: float, grace_s: float | None) -> list[Outcome]:
    """One outcome per member, in order; those silent at the deadline dump their stacks and are killed."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(members) and (left_s := deadline - time.monotonic()) > 0:
        pending = {rank: member for rank, member in enumerate(members) if rank not in outcomes}
        sources: dict[Connection[Any, Any] | int, int] = {}
        for rank, member in pending.items():
            sources |= {member.connection: rank, member.death_fd: rank}
        for rank in {sources[source] for source in wait(list(sources), left_s)}:  # type: ignore[index]
            outcomes[rank] = members[rank].receive(rank)
            if grace_s is not None and not outcomes[rank].ok:
                deadline = min(deadline, time.monotonic() + grace_s)
    silent = [rank for rank in range(len(members)) if rank not in outcomes]
    for rank in silent:
        members[rank].dump_stacks()
    if silent:
        time.sleep(_DUMP_S)
    outcomes |= {rank: members[rank].abandon(rank) for rank in silent}
    return [outcomes[rank] for rank in range(len(members))]


def _importable(function: str | Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which another process finds `function`."""
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise ValueError(f"expected 'module:function', got {function!r}")
        return module, name
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ValueError(
            f"ranks import the function by name: {module}:{name} must be at the top level of a module"
        )
    return module, name


def _exit_reason(exit_code: int) -> str:
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
