"""Saves in the background: no error is lost, they commit in order, and an exit waits for them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep import stage
from shardkeep.arena import Arena
from shardkeep.errors import Cancelled, SaveFailed
from shardkeep.handle import Background, SaveHandle
from shardkeep.handle import background as process_background
from shardkeep.storage.local import LocalStorage


@pytest.fixture
def background() -> Iterator[Background]:
    """Saves of this test alone."""
    made = Background()
    yield made
    made.wait_all()


class Gate:
    """Work that ends when the test says so."""

    def __init__(self, result: object = "saved") -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self._result = result

    def __call__(self) -> object:
        self.begun.set()
        assert self.open.wait(30)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


def failed(background: Background, error: BaseException) -> SaveHandle[object]:
    gate = Gate(error)
    gate.open.set()
    handle = background.submit(gate, cancel=None)
    background.wait_all()
    return handle


def test_a_handle_gives_the_result_as_often_as_it_is_asked(background: Background) -> None:
    gate = Gate()
    handle = background.submit(gate)
    handle.wait_captured(0)
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.wait(timeout_s=0.01)
    gate.open.set()
    assert handle.wait(30) == "saved"
    assert handle.wait() == "saved"
    assert handle.done()


def test_an_error_is_logged_at_once_and_raised_by_every_call(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "shardkeep"):
        handle = failed(background, SaveFailed("disk on fire", rank=3))
    assert [r.getMessage() for r in caplog.records] == ["save failed: disk on fire (rank 3)"]
    for ask in (handle.wait, handle.wait, handle.done):
        with pytest.raises(SaveFailed, match="disk on fire"):
            ask()


def test_an_error_nobody_asked_for_is_raised_by_the_next_save_once(background: Background) -> None:
    failed(background, SaveFailed("disk on fire"))
    with pytest.raises(SaveFailed, match="disk on fire"):
        background.raise_unseen()
    background.raise_unseen()


def test_an_error_that_was_seen_is_not_raised_again(background: Background) -> None:
    handle = failed(background, SaveFailed("disk on fire"))
    with pytest.raises(SaveFailed):
        handle.wait()
    background.raise_unseen()


def test_an_error_is_not_seen_by_a_wait_that_timed_out(background: Background) -> None:
    gate = Gate(SaveFailed("disk on fire"))
    handle = background.submit(gate)
    with pytest.raises(TimeoutError):
        handle.wait(timeout_s=0.01)
    assert not handle.done()
    gate.open.set()
    background.wait_all()
    with pytest.raises(SaveFailed, match="disk on fire"):
        background.raise_unseen()


def test_of_several_errors_each_is_raised(background: Background) -> None:
    failed(background, SaveFailed("first"))
    failed(background, SaveFailed("second"))
    for text in ("first", "second"):
        with pytest.raises(SaveFailed, match=text):
            background.raise_unseen()
    background.raise_unseen()


def test_a_cancelled_save_is_no_error_of_the_next(background: Background) -> None:
    failed(background, Cancelled("the save was cancelled"))
    background.raise_unseen()


def test_saves_end_in_the_order_in_which_they_were_begun(background: Background) -> None:
    gates, order = [Gate(n) for n in range(4)], []

    def through(gate: Gate) -> object:
        result = gate()
        order.append(result)
        return result

    handles = [background.submit(lambda gate=gate: through(gate)) for gate in gates]  # type: ignore[misc]
    for gate in reversed(gates):
        gate.open.set()
    assert [h.wait(30) for h in handles] == order == [0, 1, 2, 3]
    assert background.in_flight() == 0


def test_a_handle_can_be_awaited(background: Background) -> None:
    gate = Gate()

    async def main() -> list[object]:
        handle = background.submit(gate)
        await handle.captured()
        waiting = asyncio.ensure_future(handle)
        await asyncio.sleep(0.01)
        assert not waiting.done()  # and the loop goes on
        gate.open.set()
        return [await waiting, await handle]

    assert asyncio.run(main()) == ["saved", "saved"]


def test_an_awaited_handle_raises_its_error(background: Background) -> None:
    handle = failed(background, SaveFailed("disk on fire"))

    async def main() -> None:
        await handle

    with pytest.raises(SaveFailed, match="disk on fire"):
        asyncio.run(main())
    background.raise_unseen()


def test_giving_up_to_await_does_not_touch_the_save(background: Background) -> None:
    """`asyncio.wait_for` cancels what it waits for; the save goes on and its outcome is not lost."""
    gate, bad = Gate(), Gate(SaveFailed("disk on fire"))
    good_handle, bad_handle = background.submit(gate), background.submit(bad)

    async def main() -> None:
        for handle in (good_handle, bad_handle):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle, 0.01)

    asyncio.run(main())
    gate.open.set()
    bad.open.set()
    assert good_handle.wait(30) == "saved"
    background.wait_all()
    with pytest.raises(SaveFailed, match="disk on fire"):
        background.raise_unseen()


def state(value: float = 1.0, num_elements: int = 1000) -> dict[str, object]:
    return {"w": torch.full((num_elements,), value), "step": int(value)}


def loaded(path: Path, num_elements: int = 1000) -> float:
    got: dict[str, object] = {"w": torch.zeros(num_elements), "step": None}
    sk.load(got, path)
    assert isinstance(got["w"], torch.Tensor)
    assert torch.equal(got["w"], torch.full((num_elements,), float(got["step"])))  # type: ignore[arg-type]
    return float(got["w"][0])


class Slow(LocalStorage):
    """The storage of a slow disk, which the test may hold back."""

    held = threading.Event()

    def create(self, name: str):  # type: ignore[no-untyped-def] # a LocalWriter
        assert Slow.held.wait(30)
        return super().create(name)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every save waits before its first byte until the event is set."""
    Slow.held = threading.Event()
    monkeypatch.setattr("shardkeep.checkpointer.storage_for", Slow)
    monkeypatch.setattr("shardkeep.run.storage_for", Slow)
    yield Slow.held
    Slow.held.set()
    process_background.wait_all()


def test_the_state_may_change_once_save_async_has_returned(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    what = state(1.0)
    handle = sk.save_async(what, tmp_path / "a")
    what["w"].fill_(9.0)  # type: ignore[attr-defined]
    what["w"].untyped_storage().resize_(0)  # type: ignore[attr-defined]
    what["step"] = 9
    assert not handle.done() and not sk.is_committed(tmp_path / "a")
    slow_disk.set()
    report = handle.wait(60)
    assert report.num_bytes >= 4000 and report.stall_s >= 0
    assert loaded(tmp_path / "a") == 1.0


def test_a_cancelled_save_leaves_nothing(tmp_path: Path, slow_disk: threading.Event) -> None:
    handle = sk.save_async(state(), tmp_path / "a")
    handle.cancel()
    slow_disk.set()
    with pytest.raises(Cancelled):
        handle.wait(60)
    assert not (tmp_path / "a").exists()
    sk.save(state(2.0), tmp_path / "a")  # not an error of this one
    assert loaded(tmp_path / "a") == 2.0


def test_cancelling_what_is_committed_does_nothing(tmp_path: Path) -> None:
    handle = sk.save_async(state(), tmp_path / "a")
    handle.wait(60)
    handle.cancel()
    assert handle.done()
    assert loaded(tmp_path / "a") == 1.0


def test_a_later_save_of_the_same_path_is_the_one_that_stays(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    """Also a synchronous one, which must not overtake what is in flight, nor remove its files."""
    first = sk.save_async(state(1.0, 100_000), tmp_path / "a", overwrite=True)
    second = sk.save_async(state(2.0, 100_000), tmp_path / "a", overwrite=True)
    threading.Timer(0.2, slow_disk.set).start()
    sk.save(state(3.0), tmp_path / "a", overwrite=True)
    assert first.done() and second.done()
    assert loaded(tmp_path / "a") == 3.0
    assert sk.verify(tmp_path / "a").ok


def test_a_failed_save_is_raised_by_the_next_which_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(LocalStorage):
        def create(self, name: str):  # type: ignore[no-untyped-def] # a LocalWriter
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with monkeypatch.context() as patch:
        patch.setattr("shardkeep.checkpointer.storage_for", Full)
        sk.save_async(state(), tmp_path / "a")
        process_background.wait_all()
    with pytest.raises(SaveFailed, match="No space left on device"):
        sk.save(state(), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    sk.save(state(), tmp_path / "b")
    assert loaded(tmp_path / "b") == 1.0


def test_snapshots_use_the_same_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No growth with the number of saves; and none by failed or cancelled ones."""
    monkeypatch.setattr("shardkeep.freeze.arena", Arena())
    made: list[int] = []
    allocate = stage.allocate
    monkeypatch.setattr(stage, "allocate", lambda n: made.append(n) or allocate(n))
    for number in range(12):
        handle = sk.save_async(state(number), tmp_path / "a", overwrite=True)
        if number % 3 == 1:
            handle.cancel()
        process_background.wait_all()
    assert sum(n >= 4000 for n in made) == 1


EXITING = """
import sys, time, logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
import shardkeep as sk
from shardkeep.storage.local import LocalStorage

class Slow(LocalStorage):
    def create(self, name):
        time.sleep(0.5)
        return super().create(name)

import shardkeep.checkpointer
shardkeep.checkpointer.storage_for = Slow
for number in range(2):
    sk.save_async({"w": torch.full((1000,), float(number)), "step": number}, f"{sys.argv[1]}/{number}")
print("leaving", flush=True)
"""


def test_a_process_that_exits_waits_for_its_saves_and_says_so(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", EXITING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr
    assert "exits with 2 saves in flight" in done.stderr
    assert "failed" not in done.stderr
    assert [loaded(tmp_path / "0"), loaded(tmp_path / "1")] == [0.0, 1.0]
    assert time.monotonic() - start > 1.0


def test_work_that_is_not_taken_is_not_waited_for(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that has begun to exit."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(background._pool, "submit", refuse)
    with pytest.raises(RuntimeError, match="cannot schedule"):
        background.submit(lambda: 1)
    assert background.in_flight() == 0
    background.wait_all()
