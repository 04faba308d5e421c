"""Lazy saves: training goes on while weights are read, and nothing changes before it has been read."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_cases as cases
import shardkeep as sk
from quantised import Quantised
from shardkeep import checkpointer, hold
from shardkeep.errors import Cancelled, SaveFailed, StateChanged
from shardkeep.handle import SaveHandle, background
from shardkeep.storage import Buffer, Writer
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.cluster import ClusterPool
from shardkeep.types import SaveReport, Target


class Gated(LocalStorage):
    """Data files take their first byte, and end, when the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reached, self.may_write, self.may_close = (threading.Event() for _ in range(3))

    def create(self, name: str) -> Any:
        return _GatedWriter(super().create(name), self)


class _GatedWriter:
    def __init__(self, inner: Writer, gates: Gated) -> None:
        self._inner, self._gates = inner, gates

    def append(self, parts: Sequence[Buffer]) -> None:
        self._gates.reached.set()
        assert self._gates.may_write.wait(30)
        self._inner.append(parts)

    def close(self, *, durable: bool) -> None:
        assert self._gates.may_close.wait(30)
        self._inner.close(durable=durable)

    def abort(self) -> None:
        self._inner.abort()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    storage = Gated(tmp_path / "a")
    yield storage
    storage.may_write.set()
    storage.may_close.set()
    background.wait_all()


class Job:
    """A linear model, its Adam after one step, and a buffer that no optimizer owns."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(300, 200)
        self.model.register_buffer("seen", torch.zeros(1000))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.registration = sk.register_optimizer(self.optimizer)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 300)).sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = {
            f"{n}.{name}": value
            for n, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
        }
        return {"model": self.model.state_dict(), "optimizer": moments}


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.registration.remove()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {part: {k: v.clone() for k, v in tensors.items()} for part, tensors in state.items()}


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {part: {k: torch.zeros_like(v) for k, v in tensors.items()} for part, tensors in state.items()}


def begin(state: dict[str, Any], storage: LocalStorage, **config: Any) -> SaveHandle[SaveReport]:
    return checkpointer.save_to_async(state, Target(storage=storage), sk.Config(**config), mode="lazy")


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def assert_stored(directory: Path, expected: dict[str, Any]) -> None:
    found = zeros(expected)
    sk.load(found, directory)
    for part, tensors in expected.items():
        for key, tensor in tensors.items():
            assert torch.equal(found[part][key], tensor), key


def test_the_step_waits_until_the_weights_are_read_and_not_for_the_disk(job: Job, gated: Gated) -> None:
    before = copied(job.state())
    handle = begin(job.state(), gated)
    assert gated.reached.wait(30)
    stepping = in_thread(job.step)
    stepping.join(0.3)
    assert stepping.is_alive()
    assert torch.equal(job.model.weight, before["model"]["weight"])
    with pytest.raises(TimeoutError):
        handle.wait_captured(0.01)
    gated.may_write.set()
    stepping.join(30)
    assert not stepping.is_alive()
    handle.wait_captured(0)
    assert not handle.done()  # nothing is committed yet, but training goes on
    assert not torch.equal(job.model.weight, before["model"]["weight"])
    gated.may_close.set()
    handle.wait(30)
    assert_stored(Path(gated.url), before)


def test_forward_and_backward_do_not_wait(job: Job, gated: Gated) -> None:
    begin(job.state(), gated)
    working = in_thread(lambda: job.model(torch.ones(4, 300)).sum().backward())
    working.join(30)
    assert not working.is_alive()


def test_what_no_optimizer_owns_is_copied_at_once(job: Job, gated: Gated) -> None:
    """Buffers such as a mixture's `expert_bias` change in the forward pass; plain values at any time."""
    before = copied(job.state())
    state = job.state()
    begin(state, gated)
    job.model.seen.fill_(9.0)
    state["model"].clear()
    gated.may_write.set()
    gated.may_close.set()
    background.wait_all()
    assert_stored(Path(gated.url), before)


def test_without_a_registered_optimizer_everything_is_copied(gated: Gated) -> None:
    tensor = torch.arange(1000.0)
    handle = begin({"model": {"w": tensor}}, gated)
    handle.wait_captured(0)
    tensor.zero_()
    gated.may_write.set()
    gated.may_close.set()
    handle.wait(30)
    assert_stored(Path(gated.url), {"model": {"w": torch.arange(1000.0)}})


def test_a_removed_registration_waits_for_nothing_and_protects_nothing(job: Job, gated: Gated) -> None:
    before = copied(job.state())
    job.registration.remove()
    begin(job.state(), gated)  # so all of it is copied
    job.step()
    gated.may_write.set()
    gated.may_close.set()
    background.wait_all()
    assert_stored(Path(gated.url), before)


def test_training_goes_on_after_the_deadline_and_the_save_fails(job: Job, gated: Gated) -> None:
    handle = begin(job.state(), gated, deadline_s=0.2)
    assert gated.reached.wait(30)
    before = job.model.weight.clone()
    job.step()
    assert not torch.equal(job.model.weight, before)
    gated.may_write.set()
    gated.may_close.set()
    with pytest.raises(SaveFailed, match=r"not read within 0\.2 s"):
        handle.wait(30)
    with pytest.raises(SaveFailed, match=r"not read within 0\.2 s"):
        handle.wait_captured()
    assert not sk.is_committed(gated.url)


def test_a_save_that_fails_lets_training_go_on(job: Job, gated: Gated) -> None:
    handle = begin(job.state(), gated)
    assert gated.reached.wait(30)
    stepping = in_thread(job.step)
    handle.cancel()
    gated.may_write.set()
    stepping.join(30)
    assert not stepping.is_alive()
    gated.may_close.set()
    background.wait_all()
    handle.forget()


def test_a_cancelled_save_that_has_not_begun_lets_training_go_on(
    job: Job, gated: Gated, tmp_path: Path
) -> None:
    begin({"model": {"w": torch.zeros(3)}}, gated)  # a copy, which holds nothing but the queue
    handle = begin(job.state(), LocalStorage(tmp_path / "b"))
    handle.cancel()
    job.step()
    for parameter in job.model.parameters():
        parameter.untyped_storage().resize_(0)  # nothing will read it any more
    gated.may_write.set()
    gated.may_close.set()
    with pytest.raises(Cancelled):
        handle.wait(30)
    assert not (tmp_path / "b").exists()


def test_a_cancelled_save_that_reads_holds_the_state_until_its_threads_have_stopped(
    job: Job, gated: Gated
) -> None:
    handle = begin(job.state(), gated)
    assert gated.reached.wait(30)
    handle.cancel()
    with pytest.raises(TimeoutError):
        handle.wait_captured(0.2)
    gated.may_write.set()
    gated.may_close.set()
    with pytest.raises(Cancelled):
        handle.wait_captured(30)
    handle.join()


def test_an_optimizer_that_is_taken_off_has_its_weights_read_before(job: Job, gated: Gated) -> None:
    before = copied(job.state())
    begin(job.state(), gated)
    removing = in_thread(lambda: (job.registration.remove(), job.step()))
    assert gated.reached.wait(30)
    removing.join(0.3)
    gated.may_write.set()
    gated.may_close.set()
    removing.join(30)
    background.wait_all()
    assert_stored(Path(gated.url), before)


def test_an_error_that_a_wait_for_the_weights_has_raised_is_not_raised_by_the_next_save(
    job: Job, gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(_GatedWriter, "append", failing)
    handle = begin(job.state(), gated)
    with pytest.raises(SaveFailed, match="disk on fire"):
        handle.wait_captured(30)
    handle = begin(job.state(), LocalStorage(tmp_path / "b"))
    handle.wait(30)
    monkeypatch.setattr(_GatedWriter, "append", failing)
    handle = begin(job.state(), gated)
    with pytest.raises(SaveFailed, match="disk on fire"):
        asyncio.run(handle.captured())
    sk.save(job.state(), tmp_path / "c")


def test_a_debug_reading_that_fails_holds_nothing(
    job: Job, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Any) -> None:
        raise MemoryError("no room for a digest")

    monkeypatch.setattr("shardkeep.write.payload_digests", failing)
    with pytest.raises(MemoryError):
        begin(job.state(), gated, check_capture=True)
    stepping = in_thread(job.step)
    stepping.join(30)
    assert not stepping.is_alive()
    assert not Path(gated.url).exists()


def test_an_interrupted_wait_for_the_reading_fails_the_save(
    job: Job, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has control before all is read, and may change what nothing else keeps still."""

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardkeep.freeze.arena.take", lambda num_bytes, limit_bytes=None: None)
    monkeypatch.setattr(hold.Hold, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(job.state(), gated)
    monkeypatch.undo()
    gated.may_write.set()
    gated.may_close.set()
    background.wait_all()
    assert not sk.is_committed(gated.url)
    with pytest.raises(SaveFailed, match="interrupted while the state was read"):
        background.raise_unseen()


def test_a_change_that_no_hook_sees_is_found_in_debug_mode(job: Job, gated: Gated) -> None:
    """As Megatron's DistributedOptimizer writes: through a view whose version counter is its own."""
    handle = begin(job.state(), gated, check_capture=True, io_threads=1)
    assert gated.reached.wait(30)
    second = job.optimizer.state[job.model.bias]["exp_avg"]
    version = second._version
    second.detach().data.view(torch.int32)[-1] ^= 1
    assert second._version == version
    gated.may_write.set()
    gated.may_close.set()
    with pytest.raises(StateChanged, match="changed while a lazy save was reading it") as caught:
        handle.wait(30)
    assert caught.value.fields["key"] == "optimizer.1.exp_avg"
    assert not sk.is_committed(gated.url)


def test_debug_mode_passes_what_holds_still(job: Job, gated: Gated) -> None:
    gated.may_write.set()
    gated.may_close.set()
    before = copied(job.state())
    begin(job.state(), gated, check_capture=True).wait(30)
    assert_stored(Path(gated.url), before)


def test_a_save_whose_first_digest_fails_holds_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "cannot read")

    monkeypatch.setattr("shardkeep.write.payload_digests", fail)
    with pytest.raises(OSError, match="cannot read"):
        sk.save_async(job.state(), tmp_path / "a", capture="lazy", config=sk.Config(check_capture=True))
    stepping = in_thread(job.step)
    stepping.join(30)
    assert not stepping.is_alive()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", ["snapshot", "lazy"])
def test_without_room_for_a_copy_the_call_streams_and_says_so(
    mode: Any,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It returns when the state has been read, so that the caller may change it as after a copy."""
    monkeypatch.setattr("shardkeep.freeze.arena.take", lambda num_bytes, limit_bytes=None: None)
    before = copied(job.state())
    with caplog.at_level(logging.WARNING, "shardkeep"):
        handle = checkpointer.save_to_async(job.state(), Target(storage=LocalStorage(tmp_path)), mode=mode)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1 and "no memory for a copy of the state" in warnings[0]
    handle.wait_captured(0)
    with torch.no_grad():
        job.model.weight.fill_(7.0)
        job.model.seen.fill_(7.0)
    report = handle.wait(30)
    assert_stored(tmp_path, before)
    assert report.stall_s > report.seconds["capture"] + report.seconds["plan"]


def test_nothing_of_the_state_is_referred_to_once_it_is_read(job: Job, gated: Gated) -> None:
    tensor = torch.rand(1000, 10)
    job.optimizer.add_param_group({"params": [tensor]})
    memory = StorageWeakRef(tensor.untyped_storage())
    handle = begin({"model": {"w": tensor}}, gated)
    job.optimizer.param_groups.pop()
    del tensor
    gc.collect()
    assert not memory.expired()
    gated.may_write.set()
    handle.wait_captured(30)
    gc.collect()
    assert memory.expired()
    assert not handle.done()


def test_components_of_a_step_are_held_until_each_is_read(job: Job, tmp_path: Path) -> None:
    before = copied(job.state())
    run = sk.Run(tmp_path)
    handle = run.save_async(3, {"policy": job.state(), "trainer": {"epoch": {"n": 2}}}, capture="lazy")
    job.step()
    handle.wait(30)
    assert run.latest() == 3
    found = zeros(before)
    run.load(components={"policy": found})
    assert torch.equal(found["model"]["weight"], before["model"]["weight"])


def test_only_modes_that_exist_are_taken(tmp_path: Path) -> None:
    for capture in ("sync", "eager"):
        with pytest.raises(ValueError, match=f"'snapshot' or 'lazy', got '{capture}'"):
            sk.save_async({"w": torch.zeros(1)}, tmp_path, capture=capture)
    with pytest.raises(TypeError, match="neither a torch nor a Megatron optimizer: dict"):
        sk.register_optimizer({})


def test_parameters_without_memory_of_their_own_are_no_hindrance(tmp_path: Path) -> None:
    """Wrappers as those of FP8 training, released storages, and what is not initialised yet."""
    weight, released = torch.nn.Parameter(torch.rand(4)), torch.nn.Parameter(torch.rand(5))
    wrapped = torch.nn.Parameter(Quantised(torch.rand(4, 4)))
    optimizer = torch.optim.SGD([weight, released, wrapped, torch.nn.LazyLinear(3).weight], lr=0.1)
    released.untyped_storage().resize_(0)
    registration = sk.register_optimizer(optimizer)
    try:
        assert hold.held_memory() == {hold.memory_of(weight)}
        sk.save_async({"w": weight}, tmp_path / "a", capture="lazy").wait(30)
    finally:
        registration.remove()
    assert torch.equal(sk.inspect(tmp_path / "a").read("w"), weight.detach())


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    job = Job()
    memory = hold.memory_of(job.model.weight)
    assert memory in hold.held_memory()
    del job
    gc.collect()
    assert memory not in hold.held_memory()


@pytest.mark.megatron
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_real_megatron_job_steps_on_and_the_save_holds_the_weights_before(
    ranks: ClusterPool, tmp_path: Path, tp: int
) -> None:
    results = ranks.run(2, cases.lazy_save, str(tmp_path / "a"), tp)
    for rank, result in enumerate(results):
        assert result["held"] > 0, rank
        assert result["model_held"], rank  # all of the model's parameters, though the optimizer has shards
        assert result["changed"], rank
    loaded = ranks.run(2, cases.our_load, str(tmp_path / "a"), tp)
    assert loaded[0]["digests"] == results[0]["digests"]
    assert [r["next"] for r in loaded] == [r["next"] for r in results]
