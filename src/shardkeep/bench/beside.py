"""Section `beside`: how much slower a training loop steps while a lazy save streams the state out.

Two loops: one that the GPU's arithmetic limits (large bf16 matrix products, forward and backward), one that
the launching thread limits (thousands of tiny kernels), which any other Python thread disturbs. A step here
is forward and backward: that is what runs while the state streams; the optimizer's step ends the streaming by
waiting for it. Each round times the loop alone, beside a save, and alone again, each for about as long and
without a pause, since a GPU that has rested runs faster for a while; the mean counts, so that a few long
steps are not lost. As in training, a step is launched before the one before it has ended. What was saved is
then compared with the state from before the optimizer stepped.
The number of threads is shardkeep's own choice here: fewer than a synchronous save takes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import shardkeep as sk
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.contestant import State, WrongBytes
from shardkeep.bench.machine import synchronize
from shardkeep.bench.rows import Row
from shardkeep.bench.speed import make_state

_WARM_S = {"cuda": 4.0, "cpu": 0.5}
_ALONE_S = {"cuda": 2.0, "cpu": 0.7}
Step = Callable[[], object]


@dataclass(kw_only=True, slots=True)
class Beside:
    """What the rounds of one loop found."""

    slowdown_percent: list[float] = field(default_factory=list)
    stall_ms: list[float] = field(default_factory=list)
    streamed_s: list[float] = field(default_factory=list)
    optimizer_wait_ms: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)


def run(options: BenchOptions) -> list[Row]:
    """Rows of the section."""
    loops = (("compute-bound", compute_bound, 3.0), ("launch-bound", launch_bound, 10.0))
    saved = Saved(options)
    return [
        _row(name, limit, saved.beside(build(options.device), options.rounds)) for name, build, limit in loops
    ]


def compute_bound(device: str) -> Step:
    """Forward and backward of four square layers."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    weights = [torch.randn(size, size, device=device, dtype=dtype).requires_grad_() for _ in range(4)]
    batch = torch.randn(size, size, device=device, dtype=dtype)

    def step() -> None:
        hidden = batch
        for weight in weights:
            hidden = (hidden @ weight) * size**-0.5
        hidden.sum().backward()  # type: ignore[no-untyped-call]
        for weight in weights:
            weight.grad = None

    return step


def launch_bound(device: str) -> Step:
    """Three thousand additions of a thousand numbers."""
    small = torch.zeros(1024, device=device)

    def step() -> None:
        for _ in range(3000):
            small.add_(1.0)

    return step


class Saved:
    """The state, an optimizer over it that shardkeep knows, and where it is saved."""

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        state = make_state(options, 0, 1)
        self._parameters = {key: torch.nn.Parameter(tensor) for key, tensor in state.items()}
        self._optimizer = torch.optim.SGD(self._parameters.values(), lr=0.1)
        sk.register_optimizer(self._optimizer)
        self._target: State = {key: torch.empty_like(tensor) for key, tensor in state.items()}

    def beside(self, step: Step, num_rounds: int) -> Beside:
        """Rounds of one loop; what only a first save has to do is done before."""
        found = Beside()
        sk.prepare(self._parameters, capture="lazy")
        for _ in range(num_rounds):
            with tempfile.TemporaryDirectory(dir=self._options.path, prefix="shardkeep-bench-") as scratch:
                self._round(step, Path(scratch) / "checkpoint", found)
        return found

    def _round(self, step: Step, path: Path, found: Beside) -> None:
        changing = next(iter(self._parameters.values()))
        before = changing.detach().clone()
        loop = _Loop(step, self._options.device)
        loop.go_on(_WARM_S[self._options.device])
        alone = loop.go_on(_ALONE_S[self._options.device])
        start = time.perf_counter()
        handle = sk.save_async(self._parameters, path, capture="lazy")
        found.stall_ms.append((time.perf_counter() - start) * 1e3)
        beside = self._until_captured(loop, handle)
        found.streamed_s.append(time.perf_counter() - start)
        found.optimizer_wait_ms.append(self._optimizer_step(changing) * 1e3)
        handle.wait()
        alone += loop.go_on(_ALONE_S[self._options.device])
        found.num_steps.append(len(beside))
        if beside:
            found.slowdown_percent.append((statistics.mean(beside) / statistics.mean(alone) - 1) * 100)
        self._check(path, changing, before)
        shutil.rmtree(path)

    def _until_captured(self, loop: _Loop, handle: sk.SaveHandle[sk.SaveReport]) -> list[float]:
        """Step while the state streams; the last step, which may have run beyond, is left out."""
        captured, seconds = threading.Event(), list[float]()

        def watch() -> None:
            try:
                handle.wait_captured()
            finally:
                captured.set()

        threading.Thread(target=watch, name="bench-captured", daemon=True).start()
        loop.pause()
        while not captured.is_set():
            seconds.append(loop.step())
        return seconds[:-1]

    def _optimizer_step(self, changing: torch.nn.Parameter) -> float:
        changing.grad = torch.ones_like(changing)
        synchronize(self._options.device)
        start = time.perf_counter()
        self._optimizer.step()
        synchronize(self._options.device)
        changing.grad = None
        return time.perf_counter() - start

    def _check(self, path: Path, changing: torch.nn.Parameter, before: torch.Tensor) -> None:
        sk.load(self._target, path)
        for key, parameter in self._parameters.items():
            expected = before if parameter is changing else parameter.detach()
            if not torch.equal(self._target[key], expected):
                raise WrongBytes(f"a lazy save beside training did not keep {key} as it was at the call")


class _Loop:
    """Steps, each launched before the one before it has ended."""

    def __init__(self, step: Step, device: str) -> None:
        self._step = step
        self._on_device = device == "cuda"
        self._launched: torch.cuda.Event | None = None
        self._last = time.perf_counter()

    def pause(self) -> None:
        """What follows is not part of a step."""
        self._last = time.perf_counter()

    def step(self) -> float:
        """Launch a step and wait for the one before; seconds since the last call."""
        self._step()
        if self._on_device:
            before, self._launched = self._launched, torch.cuda.current_stream().record_event()
            if before is not None:
                before.synchronize()
        now = time.perf_counter()
        took_s, self._last = now - self._last, now
        return took_s

    def go_on(self, duration_s: float) -> list[float]:
        """Steps for about this long; seconds of each."""
        self.pause()
        seconds: list[float] = []
        while sum(seconds) < duration_s:
            seconds.append(self.step())
        return seconds


def _row(name: str, limit: float, found: Beside) -> Row:
    steps, streamed_s, stall_ms, wait_ms = (
        statistics.median(values)
        for values in (found.num_steps, found.streamed_s, found.stall_ms, found.optimizer_wait_ms)
    )
    slowdown = statistics.median(found.slowdown_percent) if found.slowdown_percent else None
    return Row(
        what=f"slowdown of a {name} loop beside a lazy save",
        target=limit,
        sense="<=",
        reached=slowdown,
        unit="%",
        note=f"{steps:.0f} steps beside {streamed_s:.2f} s of streaming; stall {stall_ms:.1f} ms; "
        f"optimizer step {wait_ms:.1f} ms",
        error="no whole step fitted beside the save: raise --gib" if slowdown is None else None,
    )
