"""Lazy capture of device state: what an optimizer owns streams, and its step waits; the rest is copied."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from device import CONFIG, MIB, keep_busy, needs_gpu, same_bits
from shardkeep import stage

pytestmark = needs_gpu


class Training:
    """Parameters with an Adam that has stepped once and that shardkeep knows."""

    def __init__(self, num_tensors: int, numel: int) -> None:
        self.parameters = {
            f"w{i}": torch.nn.Parameter(torch.randn(numel, device="cuda")) for i in range(num_tensors)
        }
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=0.1)
        sk.register_optimizer(self.optimizer)
        self.step()

    def step(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = {
            key: {"exp_avg": of["exp_avg"], "exp_avg_sq": of["exp_avg_sq"]}
            for key, parameter in self.parameters.items()
            for of in [self.optimizer.state[parameter]]
        }
        return {"model": dict(self.parameters), "optimizer": moments}


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def copies(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in flat(state).items()}


def assert_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = sk.inspect(path)
    wrong = [key for key, tensor in expected.items() if not same_bits(checkpoint.read(key), tensor)]
    assert not wrong


@pytest.mark.slow
def test_optimizer_step_waits_for_the_capture(tmpfs: Path) -> None:
    training = Training(8, 32 * MIB // 4)
    state = training.state()
    before = copies(state)
    handle = sk.save_async(state, tmpfs / "c", capture="lazy", config=CONFIG)
    training.step()
    assert not same_bits(training.parameters["w0"], before["model.w0"])
    handle.wait()
    assert_saved(tmpfs / "c", before)


@pytest.mark.slow
def test_many_steps_and_saves(tmpfs: Path) -> None:
    training = Training(4, 8 * MIB // 4)
    for number in range(5):
        before = copies(training.state())
        handle = sk.save_async(training.state(), tmpfs / f"{number}", capture="lazy", config=CONFIG)
        training.step()
        training.step()
        handle.wait()
        assert_saved(tmpfs / f"{number}", before)


def test_wait_captured_lets_anything_change(tmpfs: Path) -> None:
    training = Training(4, MIB)
    state = training.state()
    before = copies(state)
    handle = sk.save_async(state, tmpfs / "c", capture="lazy", config=CONFIG)
    handle.wait_captured()
    for tensor in flat(state).values():
        tensor.detach().zero_()
    handle.wait()
    assert_saved(tmpfs / "c", before)


def test_what_no_optimizer_owns_is_copied_at_once(tmpfs: Path) -> None:
    training = Training(4, MIB)
    buffers = {"bias": torch.full((MIB,), 3.0, device="cuda"), "step": 7, "cpu": torch.ones(1000)}
    state = {**training.state(), "buffers": buffers}
    handle = sk.save_async(state, tmpfs / "c", capture="lazy", config=CONFIG)
    buffers["bias"].fill_(9.0)  # type: ignore[union-attr]
    buffers["cpu"].fill_(9.0)  # type: ignore[union-attr]
    buffers["step"] = 8
    handle.wait()
    checkpoint = sk.inspect(tmpfs / "c")
    assert (checkpoint.read("buffers.bias") == 3).all()
    assert (checkpoint.read("buffers.cpu") == 1).all()
    assert checkpoint.read("buffers.step") == 7


def test_kernel_that_still_runs_counts(tmpfs: Path) -> None:
    training = Training(2, MIB)
    torch.cuda.synchronize()
    keep_busy()
    with torch.no_grad():
        training.parameters["w0"].fill_(7.0)
    handle = sk.save_async(training.state(), tmpfs / "c", capture="lazy", config=CONFIG)
    handle.wait()
    assert (sk.inspect(tmpfs / "c").read("model.w0") == 7).all()


def test_step_on_another_stream_waits_too(tmpfs: Path) -> None:
    training = Training(4, 8 * MIB // 4)
    before = copies(training.state())
    torch.cuda.synchronize()
    handle = sk.save_async(training.state(), tmpfs / "c", capture="lazy", config=CONFIG)
    with torch.cuda.stream(torch.cuda.Stream()):
        training.step()
    handle.wait()
    assert_saved(tmpfs / "c", before)


@pytest.mark.slow
def test_call_returns_long_before_the_state_is_copied(tmpfs: Path) -> None:
    """Compared with the streaming itself, not with a clock."""
    training = Training(16, 64 * MIB // 4)
    sk.save_async(training.state(), tmpfs / "first", capture="lazy").wait()
    start = time.perf_counter()
    handle = sk.save_async(training.state(), tmpfs / "c", capture="lazy")
    stall_s = time.perf_counter() - start
    handle.wait_captured()
    assert stall_s < (time.perf_counter() - start) / 3
    handle.wait()


@pytest.mark.parametrize("numel", [1000, 16 * MIB // 4])
def test_a_copy_that_has_not_come_yet_is_waited_for(tmpfs: Path, numel: int) -> None:
    """A buffer on its way to the arena behind a long kernel, in a piece that is packed and in one that is
    not."""
    sk.prepare({"buffer": torch.zeros(numel, device="cuda")}, CONFIG)
    buffer = torch.full((numel,), 3.0, device="cuda")
    torch.cuda.synchronize()
    keep_busy()
    handle = sk.save_async({"buffer": buffer}, tmpfs / "c", capture="lazy", config=CONFIG)
    buffer.fill_(9.0)
    handle.wait()
    assert (sk.inspect(tmpfs / "c").read("buffer") == 3).all()


def test_a_page_lock_that_fails_does_not_fail_the_next_kernel() -> None:
    taken = stage.allocate(MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: taken)
        with pytest.raises(RuntimeError):
            stage.allocate(MIB)  # locked already
    stage.free(taken)
    assert torch.ones(3, device="cuda").add_(1).tolist() == [2, 2, 2]
