"""Staging: blocks are the tensor in row-major order; memory is bounded, reused, never too early."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import stage
from shardkeep.config import Config
from shardkeep.memory import host_bytes, is_direct


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a counting tensor: permuted, sliced with steps, expanded."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    dtype = draw(st.sampled_from([torch.int16, torch.int32, torch.float64]))
    tensor = torch.arange(int(torch.Size(shape).numel())).to(dtype).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for axis in range(tensor.dim()):
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@given(views(), st.integers(8, 200))
def test_cut_parts_are_the_tensor_in_row_major_order(tensor: torch.Tensor, max_bytes: int) -> None:
    parts = list(stage.cut(tensor, max_bytes))
    assert all(0 < p.numel() * p.element_size() <= max_bytes for p in parts)
    joined = torch.cat([p.reshape(-1) for p in parts]) if parts else tensor.reshape(-1)
    assert torch.equal(joined, tensor.reshape(-1))
    assert all(p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in parts)


def test_cut_parts_are_about_as_large_as_they_may() -> None:
    assert [p.numel() for p in stage.cut(torch.zeros(1000, 7), 4096)] == [1024] * 6 + [856]
    assert [tuple(p.shape) for p in stage.cut(torch.zeros(7, 10).t(), 4 * 21)] == [
        (3, 7),
        (3, 7),
        (3, 7),
        (1, 7),
    ]


def slots(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(50, 30).t(),
        torch.rand(64, 9)[::3, 1::2],
        torch.rand(30, dtype=torch.complex64).conj(),
        torch.rand(30, dtype=torch.complex64).conj().imag,  # a lazily negated view
        torch.rand(1).expand(500),
        torch.rand(40, 40).bfloat16().t(),
        torch.rand(7, 1, 3).permute(2, 1, 0),
    ],
    ids=["transposed", "strided", "conjugated", "negated", "expanded", "bfloat16", "permuted"],
)
def test_blocks_are_the_bytes_and_stay_until_the_next_is_asked_for(tensor: torch.Tensor) -> None:
    assert not is_direct(tensor)
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    expected = bytes(host_bytes(flat))
    stager, got = stage.Stager(slots(256), None), b""
    for block in stager.blocks(tensor):
        start = bytes(block)
        time.sleep(0.001)
        assert bytes(block) == start
        got += bytes(block)
    assert got == expected


def test_a_block_survives_the_filling_of_the_next() -> None:
    """The consumer holds block n while n + 1 is being filled: they must lie in different slots."""
    pair = slots(64)
    tensor = torch.arange(64, dtype=torch.int32).view(8, 8).t()
    stager = stage.Stager(pair, None)
    addresses = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in stager.blocks(tensor)]
    assert len(addresses) == 4
    assert all(a != b for a, b in pairwise(addresses))
    assert set(addresses) == {pair[0].data_ptr(), pair[1].data_ptr()}


def test_bytes_of_a_tensor_are_its_own_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.int16)
    view = host_bytes(tensor)
    view[2] = 7
    assert tensor.tolist() == [0, 7, 0, 0]
    tensor.untyped_storage().resize_(0)  # `numpy()` would have made this impossible


def test_a_ring_never_holds_more_than_its_pairs(allocations: list[int]) -> None:
    ring, lock = stage.Ring(6 * 1024), threading.Lock()
    in_use: set[int] = set()
    most = 0

    def use() -> None:
        nonlocal most
        for _ in range(20):
            with ring.pair(1024) as (a, b):
                with lock:
                    assert not in_use & {a.data_ptr(), b.data_ptr()}  # nobody else writes from these slots
                    in_use.update((a.data_ptr(), b.data_ptr()))
                    most = max(most, len(in_use))
                time.sleep(0.0002)
                with lock:
                    in_use.difference_update((a.data_ptr(), b.data_ptr()))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 6
    assert allocations == [1024] * 6


def test_a_pair_comes_back_after_an_error() -> None:
    ring = stage.Ring(128)
    with pytest.raises(ZeroDivisionError), ring.pair(64):
        raise ZeroDivisionError
    with ring.pair(64) as slots:
        assert len(slots) == 2


def test_a_ring_survives_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = stage.Ring(128)

    def refuse(num_bytes: int) -> torch.Tensor:
        raise MemoryError(num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "allocate", refuse)
        with pytest.raises(MemoryError), ring.pair(64):
            pass
    taken = threading.Event()

    def take() -> None:
        with ring.pair(64):
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert taken.wait(10), "the pair whose allocation failed is lost, so the next save waits for ever"


def test_the_ring_is_the_process_s_own_and_within_the_budget() -> None:
    config = Config(staging_bytes=1 << 20, io_threads=2)
    assert stage.ring(config) is stage.ring(Config(staging_bytes=1 << 20, io_threads=2))
    assert 2 * config.num_threads * config.slot_bytes <= config.staging_bytes


def test_slots_of_another_size_take_the_place_of_idle_ones(allocations: list[int]) -> None:
    """A background save uses fewer and larger slots than one that training waits for; never both at once."""
    ring = stage.Ring(1024)
    with ring.pair(128), ring.pair(128):
        pass
    with ring.pair(512):
        pass
    assert allocations == [128] * 4 + [-128] * 4 + [512] * 2
    with pytest.raises(ValueError, match="two slots of 600 bytes do not fit 1024"), ring.pair(600):
        pass


def test_a_large_pair_waits_for_the_small_ones_in_use() -> None:
    ring = stage.Ring(1024)
    got = threading.Event()

    def take_large() -> None:
        with ring.pair(512):
            got.set()

    with ring.pair(128):
        thread = threading.Thread(target=take_large)
        thread.start()
        assert not got.wait(0.1)
    thread.join(10)
    assert got.is_set()


def test_slots_are_given_back_only_after_copies_on_their_way() -> None:
    """An error in a writer leaves the copy of the following block under way."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("copied")

    ring = stage.Ring(1024)
    with pytest.raises(ZeroDivisionError), ring.pair(64) as slots, stage.Stager(slots, None) as stager:
        stager._streams[torch.device("cuda", 0)] = Stream()  # type: ignore[assignment]
        raise ZeroDivisionError
    assert waited == ["copied"]
