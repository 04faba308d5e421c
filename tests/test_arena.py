"""Memory of snapshots: one segment per save in flight, reused, within the limit."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardkeep import stage
from shardkeep.arena import Arena, padded_bytes


def test_snapshots_one_after_the_other_use_one_segment(allocations: list[int]) -> None:
    arena = Arena()
    addresses = set()
    for _ in range(50):
        segment = arena.take(10_000)
        addresses.add(segment.buffer.data_ptr())
        arena.give_back(segment)
    assert allocations == [10_000]
    assert len(addresses) == 1


def test_snapshots_in_flight_have_a_segment_each(allocations: list[int]) -> None:
    arena = Arena()
    for _ in range(10):
        first, second = arena.take(5000), arena.take(5000)
        assert first.buffer.data_ptr() != second.buffer.data_ptr()
        arena.give_back(first)
        arena.give_back(second)
    assert allocations == [5000, 5000]


def test_a_segment_given_back_twice_is_not_shared_by_two_saves() -> None:
    """A save that fails may be given up by more than one hand."""
    arena = Arena()
    failed = arena.take(5000)
    arena.give_back(failed)
    second = arena.take(5000)
    arena.give_back(failed)
    third = arena.take(5000)
    assert second.buffer.data_ptr() != third.buffer.data_ptr()


def test_a_grown_snapshot_replaces_the_small_segment(allocations: list[int]) -> None:
    arena = Arena()
    for size in (2000, 3000, 2500):  # the last one fits
        arena.give_back(arena.take(size))
    assert allocations == [2000, -2000, 3000]


def test_a_small_snapshot_leaves_the_large_segment_alone(allocations: list[int]) -> None:
    """Else the next large one would allocate again, at every step."""
    arena = Arena()
    arena.give_back(arena.take(9000))
    small = arena.take(1000)
    large = arena.take(9000)
    assert allocations == [9000, 1000]
    arena.give_back(small)
    arena.give_back(large)


def test_new_memory_stays_within_the_limit(allocations: list[int]) -> None:
    """The limit is for memory beyond what idle segments hold; those that are too small make room."""
    arena = Arena()
    assert arena.take(4000, limit_bytes=3999) is None
    arena.give_back(arena.take(1000, limit_bytes=1000))
    assert arena.take(4000, limit_bytes=2999) is None  # 1000 + 2999 < 4000
    assert allocations == [1000, -1000]
    arena.give_back(arena.take(4000, limit_bytes=4000))
    assert arena.take(600, limit_bytes=0).buffer.numel() == 4000  # the large one, since nothing new may come
    assert arena.take(600, limit_bytes=0) is None


def test_memory_that_the_system_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(stage, "allocate", refuse)
    assert Arena().take(1000) is None


def test_components_of_different_sizes_find_their_segments_again(allocations: list[int]) -> None:
    """A step saves a small and a large component, both in flight; its second time allocates nothing."""
    arena = Arena()
    for _ in range(5):
        small, large = arena.take(1000), arena.take(8000)
        arena.give_back(large)
        arena.give_back(small)
    assert allocations == [1000, 8000]


def test_copies_in_a_segment_are_bit_equal_and_apart() -> None:
    tensors = [
        torch.rand(3, 5).t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.rand(700).half(),
    ]
    tensors += [torch.rand(3, dtype=torch.complex128).conj(), torch.tensor([True, False])]
    segment = Arena().take(sum(map(padded_bytes, tensors)))
    copies = [segment.copy(t) for t in tensors]
    for tensor, twin in zip(tensors, copies, strict=True):
        assert torch.equal(twin, tensor) and twin.is_contiguous()
        assert twin.dtype == tensor.dtype and not twin.is_conj()
    assert segment.used_bytes == sum(map(padded_bytes, tensors)) <= segment.buffer.numel()


def test_outgrown_memory_is_gone_before_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the peak of a state that has grown is the old and the new segment together."""
    arena, allocate, gone = Arena(), stage.allocate, []
    arena.give_back(arena.take(2000))
    old = StorageWeakRef(arena._idle[0].untyped_storage())

    def observed(num_bytes: int) -> torch.Tensor:
        gone.append(old.expired())
        return allocate(num_bytes)

    monkeypatch.setattr(stage, "allocate", observed)
    arena.take(4000)
    assert gone == [True]
