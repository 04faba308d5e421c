"""Holds on the state of a save that is still read where it lies, and optimizers whose steps respect them.

A lazy save streams weights to storage beside forward and backward, which only read them. What changes weights
is the optimizer's step: that of a registered optimizer first waits until no save holds the state any more.
Version counters do not tell (Megatron's DistributedOptimizer writes through views that have their own), so
what belongs to an optimizer is known by the memory it lies in, looked up anew at each save.

Invariant: a hold ends once, well (all bytes are read) or badly (the save failed, or training did not wait any
longer); after a bad end its save never commits.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import wraps
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shardkeep.errors import SaveFailed

log = logging.getLogger("shardkeep")

Memory = tuple[torch.device, int]  # device and address of a storage


class Hold:
    """The state of one save must not change until this has ended."""

    def __init__(self, path: str, deadline_s: float) -> None:
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()
        self.seconds = 0.0  # until it ended
        self._path, self._deadline_s = path, deadline_s
        self._start = time.perf_counter()
        self._is_reading = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Threads read the state from now on. Raises the error with which the hold has ended, if it has."""
        with self._lock:
            self._is_reading = True
        if self.ended.done():
            self.ended.result()

    def cancel(self, error: BaseException) -> None:
        """End badly, unless threads read already: what they read may not be released under them, and they
        stop soon.
        """
        self._end(error, even_reading=False)

    def release(self) -> None:
        """All bytes are read. Raises the error with which the hold has ended before, if it has."""
        self._end(None)
        self.ended.result()

    def fail(self, error: BaseException) -> None:
        """The save has failed, so nobody needs the state any more."""
        self._end(error)

    def wait(self) -> None:
        """Block until the hold has ended, at most its deadline: then the save fails, and training goes on."""
        try:
            self.ended.exception(self._deadline_s)
        except TimeoutError:
            log.error("the save %s has not read the weights in %g s; it fails", self._path, self._deadline_s)
            self._end(
                SaveFailed(
                    f"the state was not read within {self._deadline_s:g} s, and training goes on",
                    path=self._path,
                    remedy="The storage is too slow for capture='lazy', or stuck.",
                )
            )

    def _end(self, error: BaseException | None, *, even_reading: bool = True) -> None:
        with self._lock:
            if self.ended.done() or (self._is_reading and not even_reading):
                return
            self.seconds = time.perf_counter() - self._start
            self.ended.set_exception(error) if error else self.ended.set_result(None)


_holds: list[Hold] = []
_lock = threading.Lock()


def hold(path: str, deadline_s: float) -> Hold:
    """A new hold, which registered optimizers respect from now on."""
    new = Hold(path, deadline_s)
    with _lock:
        _holds[:] = [h for h in _holds if not h.ended.done()] + [new]
    return new


def wait_for_holds() -> None:
    """Block until no save holds the state. An error of such a save is not raised here: it belongs to its
    handle.
    """
    with _lock:
        waiting = list(_holds)
    for each in waiting:
        each.wait()


class Registration:
    """An optimizer whose steps wait for lazy saves; `remove()` ends that, and waits for those in flight."""

    def __init__(self, undo: list[Callable[[], object]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        if self._undo:
            wait_for_holds()  # what they read would be protected by nothing
        while self._undo:
            self._undo.pop()()


_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def register_optimizer(optimizer: Any) -> Registration:
    """Make `optimizer.step()` wait until lazy saves have read the weights; with it they may stream its
    parameters and state.

    Takes a `torch.optim.Optimizer` (a step pre-hook is registered) or one of Megatron's, chained ones
    included (the instance's `step_with_ready_grads` is wrapped: after the gradients are ready, before any
    weight changes). TypeError for anything else. Weights that something else changes, such as
    `load_state_dict` or an offload, are not protected: call `handle.wait_captured()` before.
    """
    undo = list(_hook(optimizer))
    _optimizers.add(optimizer)
    return Registration([lambda: _optimizers.discard(optimizer), *undo])


def _hook(optimizer: Any) -> Iterator[Callable[[], object]]:
    """Install the waits; yields what takes each back."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer.register_step_pre_hook(lambda *_: wait_for_holds()).remove
        return
    if not hasattr(optimizer, "step_with_ready_grads"):
        raise TypeError(f"neither a torch nor a Megatron optimizer: {type(optimizer).__name__}")
    for each in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        yield _wrap(each, "step_with_ready_grads")


def _wrap(owner: Any, name: str) -> Callable[[], object]:
    """Put a waiting method over the one of this instance alone."""
    original = getattr(owner, name)

    @wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        wait_for_holds()
        return original(*args, **kwargs)

    had_own = name in vars(owner)
    setattr(owner, name, waiting)
    return lambda: setattr(owner, name, original) if had_own else delattr(owner, name)


def held_memory() -> set[Memory]:
    """Where parameters and state of the registered optimizers lie, at this moment."""
    return {
        memory_of(tensor)
        for optimizer in _optimizers
        for tensor in _tensors_of(optimizer)
        if _has_memory(tensor)
    }


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so what is not initialised, and wrappers as Transformer Engine's quantised tensors."""
    if is_lazy(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return False
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return False


def memory_of(tensor: torch.Tensor) -> Memory:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _below([group["params"] for group in optimizer.param_groups])
        yield from _below(list(optimizer.state.values()))
        return
    for each in getattr(optimizer, "chained_optimizers", ()):
        yield from _tensors_of(each)
    if isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        yield from _tensors_of(inner)
    for name, groups in vars(optimizer).items():  # model, main and shard parameters, whatever the version
        if name.endswith("_groups"):
            yield from _below(groups)
    for chunk in vars(optimizer).get("model_chunks", ()):
        yield from chunk.parameters()


def _below(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers; of a DTensor its local part."""
    if isinstance(value, torch.distributed.tensor.DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _below(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _below(child)
