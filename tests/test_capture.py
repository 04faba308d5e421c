"""Capture: a state is taken apart as torch DCP does it, its memory checked, nothing of the caller's changed.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardkeep.agree import fingerprint
from shardkeep.capture import capture, value_digest
from shardkeep.errors import InvalidState, StorageReleased
from shardkeep.testing.cluster import ClusterPool
from shardkeep.types import Box, Captured, ObjectShard, TensorShard, whole


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


def nested() -> dict[str, Any]:
    return {
        "model": {"layers": [{"w": torch.rand(2, 3)}, {"w": torch.rand(4)}], "scale": torch.tensor(2.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(5), "exp_avg": torch.zeros(3)}}, "lr": 0.1},
        "mixed": [1, [torch.ones(2), "x"], {"deep": [torch.zeros(1)]}],
        "plain": [1, 2, {"a": 3}],
        "pair": (torch.ones(2), 1),
        "step": 7,
        "none": None,
        "empty": {},
    }


def values(captured: Captured) -> dict[str, Any]:
    return {s.header.key: s.tensor if isinstance(s, TensorShard) else s.value for s in captured.shards}


def test_a_state_is_flattened_as_dcp_does_it() -> None:
    state = nested()
    flat, paths = flatten_state_dict(state)
    captured = capture(state)
    assert captured.dialect == "dcp"
    assert list(values(captured)) == list(flat)
    assert captured.paths == {key: tuple(path) for key, path in paths.items()}
    back = unflatten_state_dict(values(captured), captured.paths)
    assert back["model"]["layers"][1]["w"] is not None
    assert torch.equal(back["mixed"][2]["deep"][0], torch.zeros(1))
    assert (back["plain"], back["step"], back["none"]) == ([1, 2, {"a": 3}], 7, None)


def test_tensors_and_values_become_shards_of_their_kind() -> None:
    captured = capture({"w": torch.rand(2, 3).bfloat16(), "step": 3})
    tensor, value = captured.shards
    assert isinstance(tensor, TensorShard) and isinstance(value, ObjectShard)
    assert (tensor.header.dtype, tensor.header.shape, tensor.header.num_bytes) == ("bfloat16", (2, 3), 12)
    assert tensor.header.box == whole((2, 3))
    assert (value.value, value.header.kind) == (3, "object")
    assert set(captured.digests) == {"step"}


def test_headers_hold_nothing_that_memory_can_invalidate() -> None:
    """The same layout in other memory gives the same headers: the key of cached plans."""
    first, second = (capture(nested()) for _ in range(2))
    assert [s.header for s in first.shards] == [s.header for s in second.shards]


def test_the_state_is_left_as_it_was() -> None:
    state = nested() | {"p": torch.nn.Parameter(torch.rand(3)), "view": torch.rand(4, 6).t()[1:]}
    before, identities = copy.deepcopy(state), [id(v) for v in state.values()]
    captured = capture(state)
    assert [id(v) for v in state.values()] == identities
    assert state["p"].requires_grad
    assert repr(state) == repr(before)
    assert values(captured)["view"].data_ptr() == state["view"].data_ptr()  # not a copy
    assert not values(captured)["p"].requires_grad


def test_storages_can_be_released_afterwards() -> None:
    state = {"w": torch.rand(5), "o": (torch.rand(2), 1)}
    capture(state)
    state["w"].untyped_storage().resize_(0)
    state["o"][0].untyped_storage().resize_(0)
    state["w"].untyped_storage().resize_(20)


@pytest.mark.parametrize(
    ("left", "needed", "tensor"),
    [
        (0, 24, torch.zeros(6)),
        (20, 24, torch.zeros(6)),
        (12, 16, torch.zeros(8)[2:4]),
        (16, 20, torch.zeros(3, 2).t()[0:1]),
        (0, 4, torch.zeros(1).expand(100)),
        (1, 2, torch.tensor(1, dtype=torch.int16)),
    ],
    ids=["all", "last element", "slice", "strided", "expanded", "scalar"],
)
def test_released_memory_is_found(left: int, needed: int, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(left)
    with pytest.raises(StorageReleased, match=f"expected {needed} bytes, got {left} bytes") as caught:
        capture({"model": {"w": tensor}})
    assert caught.value.fields["key"] == "model.w"


def test_memory_that_no_element_needs_may_be_released() -> None:
    empty, tail = torch.zeros(0, 3), torch.zeros(8)[:2]
    empty.untyped_storage().resize_(0)
    tail.untyped_storage().resize_(8)
    assert [s.header.num_bytes for s in capture({"e": empty, "t": tail}).shards] == [0, 8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "coo", "csr", "quantized"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_tensors_without_plain_memory_are_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(InvalidState, match="strided") as caught:
        capture({"a": {"w": make()}})
    assert caught.value.fields["key"] == "a.w"


def test_two_entries_of_one_dotted_key_are_refused() -> None:
    with pytest.raises(InvalidState, match=r"a\.b"):
        capture({"a": {"b": 1}, "a.b": 2})


@pytest.mark.parametrize("state", [None, [torch.ones(1)], torch.ones(1)], ids=["none", "list", "tensor"])
def test_a_state_is_a_dict(state: Any) -> None:
    with pytest.raises(InvalidState, match=r"must be a dict: expected dict, got (NoneType|list|Tensor)"):
        capture(state)


SAME = [
    ({"a": 1, "b": [2, (3,)]}, {"b": [2, (3,)], "a": 1}),
    (OrderedDict(a=1), OrderedDict(a=1)),
    (torch.arange(3), torch.arange(3)),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
    (np.arange(3), np.arange(3)),
    (Mode.TRAIN, Mode.TRAIN),
    (float("nan"), float("nan")),
    ({"x", "y", "z"}, {"z", "y", "x"}),
]
DIFFERENT = [
    (1, 2),
    (1, 1.0),
    (1, True),
    ("1", 1),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ([1, 2], [2, 1]),
    ([1], (1,)),
    (["ab", "c"], ["a", "bc"]),
    ([[1], 2], [1, [2]]),
    ({"a": [1]}, {"a": [1, 1]}),
    (torch.zeros(2), torch.zeros(3)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (torch.tensor([0.0]), torch.tensor([1e-30])),
    (np.zeros(2), np.zeros((2, 1))),
    (Mode.TRAIN, Mode.EVAL),
    (b"a", b"b"),
    ({"x"}, {"y"}),
]


def test_equal_values_have_equal_digests() -> None:
    for a, b in SAME:
        assert value_digest(a) == value_digest(b), (a, b)


def test_different_values_have_different_digests() -> None:
    for a, b in DIFFERENT:
        assert value_digest(a) != value_digest(b), (a, b)


def digests_of_values() -> list[str]:
    words = [f"word{n}" for n in range(20)]
    objects = np.array(["a", {"b": 1}, None], dtype=object)
    return [
        value_digest(v)
        for v in ({*words}, frozenset(words), {w: 1 for w in {*words}}, objects, [({*words},)], Mode.EVAL)
    ]


def test_equal_values_have_equal_digests_in_every_process(ranks: ClusterPool) -> None:
    """Hashes of strings, and so the order of a set, differ from process to process; so do addresses."""
    first, second = ranks.run(2, digests_of_values)
    assert first == second
    assert len(set(first)) == len(first)


def boxes_of_dtensor(mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]) -> list[Box]:
    """The boxes this rank would save; checks that each holds what the global tensor has there."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", mesh_shape)
    whole_tensor = torch.rand(shape)
    captured = capture({"w": distribute_tensor(whole_tensor, mesh, placements)})
    for shard in captured.shards:
        assert isinstance(shard, TensorShard)
        assert (shard.header.key, shard.header.shape) == ("w", shape)
        assert torch.equal(shard.tensor, whole_tensor[shard.header.box.slices_in(whole(shape))])
    return [s.header.box for s in captured.shards]


@pytest.mark.parametrize(
    ("mesh", "shape", "placements", "expected"),
    [
        ((2,), (4, 3), [Shard(0)], [[((0, 0), (2, 3))], [((2, 0), (2, 3))]]),
        ((2,), (4, 3), [Shard(1)], [[((0, 0), (4, 2))], [((0, 2), (4, 1))]]),
        ((2,), (5,), [Shard(0)], [[((0,), (3,))], [((3,), (2,))]]),
        ((2,), (1, 4), [Shard(0)], [[((0, 0), (1, 4))], []]),
        ((2,), (3,), [Replicate()], [[((0,), (3,))], [((0,), (3,))]]),
        ((2,), (), [Replicate()], [[((), ())], [((), ())]]),
        ((2, 2), (4, 4), [Shard(0), Shard(1)], [[((r, c), (2, 2))] for r in (0, 2) for c in (0, 2)]),
        ((2, 2), (5, 2), [Replicate(), Shard(0)], [[((0, 0), (3, 2))], [((3, 0), (2, 2))]] * 2),
        (
            (2, 2),
            (6, 2),
            [Shard(0), Shard(0)],
            [[((r, 0), (n, 2))] for r, n in ((0, 2), (2, 1), (3, 2), (5, 1))],
        ),
    ],
    ids=["rows", "columns", "uneven", "one rank empty", "replicated", "scalar", "2-d", "hsdp", "twice"],
)
def test_dtensors_give_the_boxes_that_each_rank_holds(
    ranks: ClusterPool, mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Any], expected: Any
) -> None:
    world_size = int(np.prod(mesh))
    found = ranks.run(world_size, boxes_of_dtensor, mesh, shape, placements)
    assert [[(b.offset, b.shape) for b in boxes] for boxes in found] == expected


def refusals_of_dtensors() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    texts = []
    released = distribute_tensor(torch.rand(4), mesh, [Shard(0)])
    released.to_local().untyped_storage().resize_(0)
    for tensor, kind in (
        (DTensor.from_local(torch.rand(4), mesh, [Partial()]), InvalidState),
        (released, StorageReleased),
    ):
        with pytest.raises(kind) as caught:
            capture({"a": {"w": tensor}})
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_dtensors_without_final_values_or_memory_are_refused(ranks: ClusterPool) -> None:
    for partial, released in ranks.run(2, refusals_of_dtensors):
        assert "Partial" in partial and "'a.w'" in partial and "full_tensor()" in partial
        assert "'a.w'" in released and "expected 8 bytes, got 0 bytes" in released


def ties(state: dict[str, Any]) -> dict[str, str | None]:
    return {s.header.key: s.header.tied_to for s in capture(state).shards}


def test_tensors_of_the_same_memory_are_tied_to_the_first() -> None:
    w = torch.rand(4, 6)
    state = {
        "embed": w,
        "head": torch.nn.Parameter(w),
        "again": w.view(4, 6),
        "transposed": w.t(),
        "flat": w.view(-1),
        "first_rows": w[:2],  # overlaps, and is stored by itself
        "last_rows": w[2:],
        "bits": w.view(torch.int32),
        "equal": w.clone(),
        "empty": torch.zeros(0, 3),
        "also_empty": torch.zeros(0, 3),
        "value": 1,
    }
    assert {k: t for k, t in ties(state).items() if t} == {"head": "embed", "again": "embed"}
    z = torch.rand(3, dtype=torch.complex64)
    assert ties({"a": z, "b": z.conj(), "c": z.conj()}) == {"a": None, "b": None, "c": "b"}


def test_ties_are_looked_up_anew_each_time() -> None:
    state = {"a": torch.rand(8), "b": torch.rand(8)}
    assert ties(state) == {"a": None, "b": None}
    untied = fingerprint(capture(state))
    state["b"] = state["a"]
    assert ties(state) == {"a": None, "b": "a"}
    assert fingerprint(capture(state)) != untied
    state["b"] = state["a"].clone()
    assert ties(state) == {"a": None, "b": None}


def test_boxes_of_one_tensor_are_not_tied_to_each_other() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing import ShardedTensor

    part = torch.rand(2, 3)
    make = ShardedTensor.from_rank_offsets
    state = {
        "low": make("w", part, (0, 0, 2)),
        "high": make("w", part, (0, 1, 2)),  # other place, same memory: two boxes to store
        "tied": make("v", part, (0, 0, 2)),
        "elsewhere": make("u", part, (0, 1, 4)),
    }
    assert [(s.header.key, s.header.tied_to) for s in capture(state).shards] == [
        ("w", None),
        ("w", None),
        ("v", "w"),
        ("u", None),
    ]
