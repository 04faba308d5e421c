"""One rank process of `cluster.ClusterPool`: takes calls from its parent until the connection ends.

In:  requests as `cluster._Call.for_rank` makes them, one at a time; an empty one ends the last call.
Out: one reply per request, with the keys `value`, `error` and `traceback`; SIGUSR1 dumps all stacks.
Invariant: when the parent is gone this process ends at once, even in the middle of a call. Nobody leaves a
     call's process group before all have joined it; a rank that succeeded stays until the parent has heard
     from all, so that its leaving breaks nothing for the slower ones, while one that raised leaves at once,
     so that its peers fail too instead of waiting for it.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch.distributed as dist

from shardkeep.testing import jail

__all__ = ["main"]


def main(connection_fd: int, *, jailed: bool) -> NoReturn:
    """Serve the parent at the other end of `connection_fd`; never returns."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if jailed:
        jail.enter()
    connection: Connection[Any, Any] = Connection(connection_fd)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), name="rank-requests", daemon=True).start()
    connection.send("ready")
    while True:
        request = requests.get()
        _leave()
        if request:
            reply = serve(request)
            sys.stdout.flush()
            connection.send_bytes(reply)


def serve(request: bytes) -> bytes:
    """Make the call and return the pickled reply, whatever happens in the call."""
    try:
        # The loader that a multiprocessing connection uses itself; the bytes are our parent's.
        call: dict[str, Any] = ForkingPickler.loads(request)
        with _environment(call["env"]):
            if call["store"] is not None:
                _join(call["store"], call["group_timeout_s"])
            value = _function(call)(*call["args"])
        return pickle.dumps({"value": value, "error": None, "traceback": ""})
    except BaseException as error:  # the process boundary: the parent gets it
        trace = traceback.format_exc()
        _leave()
        return pickle.dumps({"value": None, "error": _picklable(error), "traceback": trace})


def _read(connection: Connection[Any, Any], requests: queue.SimpleQueue[bytes]) -> None:
    """Hand requests on. A thread of its own, so that the end of the parent is seen while a call hangs."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _join(store: str, timeout_s: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    dist.barrier()


def _leave() -> None:
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        megatron.destroy_model_parallel()  # its groups end with ours; the next call must not find them
    if dist.is_initialized():
        dist.destroy_process_group()


def _function(call: dict[str, Any]) -> Any:
    sys.path.extend(path for path in call["sys_path"] if path not in sys.path)
    module, name = call["target"]
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _picklable(error: BaseException) -> BaseException:
    """`error` itself if it survives the way to the parent, else a stand-in with its text."""
    try:
        ForkingPickler.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
