"""`install()`: put shardkeep under the names that frameworks already call, and take it back with
`uninstall()`.

Replaced: `save` and `load` of `megatron.core.dist_checkpointing`, wherever a loaded module refers to them
(frameworks also import the functions by name), and `AsyncCallsQueue._get_async_caller`, so that asynchronous
saves run in a thread of this process.
"""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

from shardkeep.handle import SaveHandle, background
from shardkeep.megatron import api

log = logging.getLogger("shardkeep")

_replaced: list[tuple[Any, str, Any]] = []  # (owner, attribute, original), in the order of replacing


def install() -> None:
    """Make `dist_checkpointing.save/load` shardkeep's in this process. Twice is once."""
    if _replaced:
        return
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import async_utils

    for name, ours in (("save", api.save), ("load", api.load)):
        _replace_everywhere(getattr(dist_checkpointing, name), ours)
    if not hasattr(async_utils.AsyncCallsQueue, "_get_async_caller"):
        uninstall()
        raise RuntimeError(
            "this megatron-core has no AsyncCallsQueue._get_async_caller to redirect asynchronous saves by"
        )
    caller = _thread_caller(async_utils.AsyncCaller)
    _replace(async_utils.AsyncCallsQueue, "_get_async_caller", lambda queue: caller())
    log.info("shardkeep is installed under megatron.core.dist_checkpointing")


def uninstall() -> None:
    """Put Megatron's own functions back."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def _replace_everywhere(original: Any, ours: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and not module.__name__.startswith("shardkeep"):
            for name, value in list(vars(module).items()):
                if value is original:
                    _replace(module, name, ours)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, vars(owner)[name]))
    setattr(owner, name, ours)


def _thread_caller(base: type) -> type:
    """An AsyncCaller that runs a request in shardkeep's background thread."""

    class ThreadCaller(base):
        def __init__(self) -> None:
            self._handle: SaveHandle[Any] | None = None

        def schedule_async_call(self, async_req: Any) -> None:
            args = list(async_req.async_fn_args)
            if (
                async_req.preload_fn
            ):  # a request that is not ours: its tensors are copied now, as every caller does it
                args[1] = async_req.preload_fn()
            if async_req.async_fn is not None:
                self._handle = background.submit(
                    lambda: async_req.async_fn(*args, **async_req.async_fn_kwargs)
                )

        def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
            running = self._handle is not None and not self._handle.done()
            done = not running if no_dist else bool(self.sync_all_async_calls(int(running)))
            if blocking and not done:
                self.close()
            return done or blocking

        def close(self, abort: bool = False) -> None:
            if self._handle is None:
                return
            if abort:
                self._handle.cancel()
            else:
                self._handle.wait()

        def __del__(self) -> None:
            pass

    return ThreadCaller
