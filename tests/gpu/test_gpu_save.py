"""Device state -> checkpoint: every dtype and layout bit by bit, in the order of the caller's streams, in
bounded memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardkeep as sk
from device import CONFIG, DTYPES, MIB, keep_busy, needs_gpu, random, same_bits, save_by
from shardkeep.bench.machine import PeakMemory

pytestmark = needs_gpu


def read(path: Path, key: str) -> torch.Tensor:
    found = sk.inspect(path).read(key)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("capture", ["save", "snapshot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, capture: str) -> None:
    source = random(301, 517, dtype=dtype)
    save_by(capture, {"w": source}, tmp_path / "c")
    assert same_bits(read(tmp_path / "c", "w"), source)
    assert sk.verify(tmp_path / "c").ok


VIEWS = {
    "transposed": lambda t: t.t(),
    "stepped": lambda t: t[::3, 5:400:7],
    "column": lambda t: t[:, 3],
    "offset": lambda t: t[100:200],
    "flipped twice": lambda t: t.flip(0)[1:],
    "expanded": lambda t: t[:1].expand(50, -1),
    "scalar": lambda t: t[3, 4],
    "empty": lambda t: t[:0],
    "wide rows": lambda t: t.view(1, -1)[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(tmp_path: Path, name: str) -> None:
    source = VIEWS[name](random(601, 1033))
    report = sk.save({"w": source}, tmp_path / "c", config=CONFIG)
    assert report.num_bytes == source.numel() * 4
    assert same_bits(read(tmp_path / "c", "w"), source)
    sk.save_async({"w": source}, tmp_path / "s", config=CONFIG).wait()
    assert same_bits(read(tmp_path / "s", "w"), source)


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    source = torch.randn(200, 300, dtype=torch.complex64, device="cuda")
    state = {"conj": source.conj(), "neg": source.conj().imag}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    sk.save(state, tmp_path / "c", config=CONFIG)
    assert all(same_bits(read(tmp_path / "c", key), tensor) for key, tensor in state.items())


def test_cpu_and_gpu_tensors_in_one_state(tmp_path: Path) -> None:
    state = {
        "gpu": random(1000, 700),
        "cpu": random(1000, 700, seed=1).cpu(),
        "pinned": random(300, seed=2).cpu().pin_memory(),
        "cpu view": random(500, 600, seed=3).cpu().t(),
        "scalar": torch.tensor(2.5, device="cuda"),
        "none": torch.empty(0, 4, device="cuda"),
        "step": 7,
    }
    sk.save(state, tmp_path / "c", config=CONFIG)
    sk.save_async(state, tmp_path / "s", config=CONFIG).wait()
    for name in ("c", "s"):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(read(tmp_path / name, key), value)
        assert sk.inspect(tmp_path / name).read("step") == 7


@pytest.mark.slow
def test_tensor_over_4_gib(tmpfs: Path) -> None:
    source = torch.empty((9 << 29) // 2 + 3, dtype=torch.bfloat16, device="cuda").normal_()
    assert source.nbytes > 4 << 30
    sk.save({"w": source}, tmpfs / "c")
    target = {"w": torch.zeros_like(source)}
    sk.load(target, tmpfs / "c")
    assert torch.equal(target["w"], source)


# --- order ---


@pytest.mark.parametrize("capture", ["save", "snapshot"])
def test_kernel_that_still_runs_counts(tmp_path: Path, capture: str) -> None:
    weight = torch.zeros(1000, 1000, device="cuda")
    torch.cuda.synchronize()
    keep_busy()
    weight.fill_(7.0)
    save_by(capture, {"w": weight}, tmp_path / "c")
    assert (read(tmp_path / "c", "w") == 7).all()


@pytest.mark.parametrize("capture", ["save", "snapshot"])
def test_the_callers_stream_is_the_one_that_counts(tmp_path: Path, capture: str) -> None:
    weight = torch.zeros(1000, 1000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    keep_busy(stream)
    with torch.cuda.stream(stream):
        weight.fill_(7.0)
        save_by(capture, {"w": weight}, tmp_path / "c")
    assert (read(tmp_path / "c", "w") == 7).all()


def test_work_of_several_streams_that_the_caller_joined_counts(tmp_path: Path) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    weights = [torch.zeros(500, 500, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for number, (stream, weight) in enumerate(zip(streams, weights, strict=True)):
        keep_busy(stream)
        with torch.cuda.stream(stream):
            weight.fill_(number + 1.0)
        torch.cuda.current_stream().wait_stream(stream)
    sk.save({str(n): weight for n, weight in enumerate(weights)}, tmp_path / "c", config=CONFIG)
    assert [read(tmp_path / "c", str(n)).unique().item() for n in range(3)] == [1.0, 2.0, 3.0]


def test_state_may_change_once_a_snapshot_returned(tmp_path: Path) -> None:
    weights = {f"w{i}": random(700, 900, seed=i) for i in range(8)}
    before = {key: tensor.clone() for key, tensor in weights.items()}
    handle = sk.save_async(weights, tmp_path / "c", config=CONFIG)
    for tensor in weights.values():
        tensor.zero_()
    handle.wait()
    assert all(same_bits(read(tmp_path / "c", key), tensor) for key, tensor in before.items())


def test_snapshots_in_flight_do_not_share_memory(tmp_path: Path) -> None:
    weight = torch.zeros(3000, 1000, device="cuda")
    handles = []
    for number in range(4):
        weight.fill_(float(number))
        handles.append(sk.save_async({"w": weight}, tmp_path / f"{number}", config=CONFIG))
    for number, handle in enumerate(handles):
        handle.wait()
        assert (read(tmp_path / f"{number}", "w") == number).all()


# --- memory ---


def test_released_storage_is_refused(tmp_path: Path) -> None:
    state = {"kept": random(10, 10), "gone": random(100, 100)}
    state["gone"].untyped_storage().resize_(0)
    for save in (sk.save, sk.save_async):
        with pytest.raises(sk.errors.StorageReleased, match="gone"):
            save(state, tmp_path / "c")
    assert not sk.is_committed(tmp_path / "c")


@pytest.mark.slow
def test_host_memory_of_a_synchronous_save_is_the_ring(tmpfs: Path) -> None:
    config = sk.Config(io_threads=4, staging_bytes=96 * MIB)
    state = {f"w{i}": torch.randn(64 * MIB // 4, device="cuda").view(2, -1).t() for i in range(32)}
    sk.save({"small": torch.ones(3, device="cuda")}, tmpfs / "first")  # whatever torch itself sets up
    with PeakMemory() as peak:
        sk.save(state, tmpfs / "c", config=config)
    assert 32 * MIB < peak.extra_bytes <= (96 + 64) * MIB  # 32: that page-locked memory is seen at all


@pytest.mark.slow
def test_device_memory_of_a_save_is_bounded(tmpfs: Path) -> None:
    """A strided tensor is made contiguous slot by slot, never whole."""
    config = sk.Config(io_threads=2, staging_bytes=32 * MIB)
    source = torch.randn(1024 * MIB // 4, device="cuda").view(2, -1).t()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sk.save({"w": source}, tmpfs / "c", config=config)
    assert torch.cuda.max_memory_allocated() - before <= 128 * MIB
    assert torch.cuda.memory_allocated() == before


def test_torchs_page_locked_cache_is_left_alone(tmp_path: Path) -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch has no host_memory_stats")
    state = {"w": random(2000, 1000), "turned": random(900, 800).t()}
    before = torch.cuda.host_memory_stats()
    sk.save(state, tmp_path / "c", config=CONFIG)
    sk.save_async(state, tmp_path / "s", config=CONFIG).wait()
    sk.load(state, tmp_path / "c", config=CONFIG)
    assert torch.cuda.host_memory_stats() == before


@pytest.mark.slow
def test_after_prepare_the_first_snapshot_allocates_nothing(tmpfs: Path) -> None:
    state = {f"w{i}": torch.randn(64 * MIB // 4, device="cuda") for i in range(16)}
    sk.prepare(state)
    with PeakMemory() as peak:
        sk.save_async(state, tmpfs / "c").wait()
    assert peak.extra_bytes < 64 * MIB
