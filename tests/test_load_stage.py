"""The load stage: what reaches the caller's tensors, what is read for it, and what happens to damaged
bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craft import ATTEMPT, CHUNK, craft, flip, grid, saved
from shardkeep.catalog import Catalog, resolve
from shardkeep.config import Config
from shardkeep.errors import Corrupt, LoadFailed, Mismatch, MissingKey, StorageReleased, UnsafePickle
from shardkeep.load import (
    Moved,
    Target,
    check_targets,
    load_value,
    read_common,
    read_object,
    read_tensor,
    read_tensors,
)
from shardkeep.manifest import data_name
from shardkeep.storage import Reader, Storage, storage_for
from shardkeep.types import Box, whole

CONFIG = Config(io_threads=2, staging_bytes=64 << 10)  # slots of 16 KiB, four chunks


def opened(directory: Path) -> tuple[Storage, Catalog]:
    storage = storage_for(directory)
    return storage, resolve(storage)


def fill(directory: Path, targets: Sequence[Target], config: Config = CONFIG) -> Moved:
    return read_tensors(*opened(directory), targets, config)


def all_of(key: str, tensor: torch.Tensor, **more: Any) -> Target:
    return Target(key=key, box=whole(tuple(tensor.shape)), tensor=tensor, **more)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2).bool().view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("checksum", ["xxh3_128", "none"])
def test_every_dtype_into_contiguous_and_strided_memory(
    tmp_path: Path, dtype: torch.dtype, checksum: str
) -> None:
    shape = (37, 131)
    source = random(*shape, dtype=dtype)
    craft(tmp_path, {"w": (source, grid(shape, (3, 2)))}, checksum=checksum)
    plain = torch.zeros(shape, dtype=dtype)
    turned = torch.zeros(shape[::-1], dtype=dtype).t()
    sliced = torch.zeros((37, 262), dtype=dtype)[:, ::2]
    num_bytes, _, _ = fill(tmp_path, [all_of("w", plain), all_of("w", turned), all_of("w", sliced)])
    assert num_bytes == 3 * source.numel() * dtype.itemsize
    for got in (plain, turned, sliced):
        assert bits(got) == bits(source)


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box], bool, int]:
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=4)))
    parts = tuple(draw(st.integers(1, min(3, n))) for n in shape)
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        offset, size = [], []
        for n in shape:
            size.append(draw(st.integers(0, n)))
            offset.append(draw(st.integers(0, n - size[-1])))
        boxes.append(Box(offset=tuple(offset), shape=tuple(size)))
    return shape, parts, boxes, draw(st.booleans()), draw(st.sampled_from([64, 512, 4096]))


@given(requests())
@settings(max_examples=120, deadline=None)
def test_any_box_of_any_layout(
    tmp_path_factory: pytest.TempPathFactory,
    request_: tuple[tuple[int, ...], tuple[int, ...], list[Box], bool, int],
) -> None:
    shape, parts, boxes, strided, chunk = request_
    directory = tmp_path_factory.mktemp("any")
    source = random(*shape, dtype=torch.int16)
    craft(directory, {"w": (source, grid(shape, parts))}, chunk_bytes=chunk)
    targets = []
    for box in boxes:
        tensor = torch.full(box.shape, -1, dtype=torch.int16)
        if strided and box.shape:
            tensor = torch.full(box.shape[::-1], -1, dtype=torch.int16).permute(*range(len(box.shape))[::-1])
        targets.append(Target(key="w", box=box, tensor=tensor))
    fill(directory, targets, Config(io_threads=1, staging_bytes=8192))
    for box, target in zip(boxes, targets, strict=True):
        want = source[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        assert torch.equal(target.tensor, want)


def test_axes_of_size_one_may_be_missing(tmp_path: Path) -> None:
    source = random(3, 1, 8, 16)
    craft(tmp_path, {"w": (source, grid((3, 1, 8, 16), (3, 1, 1, 1)))})
    flat = torch.zeros(8, 16)
    turned = torch.zeros(16, 8).t()
    fill(
        tmp_path,
        [
            Target(key="w", box=Box(offset=(1, 0, 0, 0), shape=(1, 1, 8, 16)), tensor=flat),
            Target(key="w", box=Box(offset=(2, 0, 0, 0), shape=(1, 1, 8, 16)), tensor=turned),
        ],
    )
    assert bits(flat) == bits(source[1, 0]) and bits(turned) == bits(source[2, 0])


def test_conjugated_and_negated_views_get_values_and_not_bits(tmp_path: Path) -> None:
    source = torch.randn(5, 3, dtype=torch.complex64)
    craft(tmp_path, {"z": source, "imag": source.imag.contiguous()})
    conj, neg = (
        torch.zeros(5, 3, dtype=torch.complex64).conj(),
        torch.zeros(5, 3, dtype=torch.complex64).conj().imag,
    )
    assert conj.is_conj() and neg.is_neg()
    fill(tmp_path, [all_of("z", conj), all_of("imag", neg)])
    assert torch.equal(conj.resolve_conj(), source) and torch.equal(neg.resolve_neg(), source.imag)


def test_cast_converts_and_without_it_a_dtype_is_a_mismatch(tmp_path: Path) -> None:
    source = torch.randn(100, 30)
    craft(tmp_path, {"w": source, "odd": torch.ones(1, dtype=torch.uint8), "v": source.double()}, num_files=1)
    half, single = torch.zeros(100, 30, dtype=torch.bfloat16), torch.zeros(100, 30)
    with pytest.raises(Mismatch, match=r"dtype differs.*'w'.*expected bfloat16, got float32"):
        fill(tmp_path, [all_of("w", half)])
    fill(tmp_path, [all_of("w", half, cast=True), all_of("v", single, cast=True)])
    assert torch.equal(half, source.bfloat16()) and torch.equal(single, source)


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    source = torch.randn(10, 10)
    craft(tmp_path, {"w": source})
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    address = parameter.data_ptr()
    wide = torch.nn.Parameter(torch.zeros(10, 10).t())
    fill(tmp_path, [all_of("w", parameter), all_of("w", wide)])
    assert torch.equal(parameter, source) and parameter.data_ptr() == address and parameter.requires_grad
    assert torch.equal(wide, source)


def test_clip_loads_what_both_have_and_leaves_the_rest(tmp_path: Path) -> None:
    source = torch.randn(10, 4)
    craft(tmp_path, {"w": source})
    longer, shorter = torch.full((12, 4), 7.0), torch.full((8, 4), 7.0)
    with pytest.raises(Mismatch, match=r"global shape.*expected \[12, 4\], got \[10, 4\]"):
        fill(tmp_path, [all_of("w", longer, shape=(12, 4))])
    fill(
        tmp_path,
        [all_of("w", longer, shape=(12, 4), clip=True), all_of("w", shorter, shape=(8, 4), clip=True)],
    )
    assert torch.equal(longer[:10], source) and (longer[10:] == 7).all()
    assert torch.equal(shorter, source[:8])


# --- what is read ---


class Watched:
    """A storage that records ranges read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.ranges: list[tuple[str, int, int]] = []
        self.open_files = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, name: str) -> Reader:
        reader, watched = self._storage.open(name), self
        self.open_files += 1

        class Recording:
            size = reader.size

            def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
                watched.ranges.append((name, offset, offset + sum(map(len, parts))))
                reader.read_into(offset, parts)

            def close(self) -> None:
                watched.open_files -= 1
                reader.close()

        return Recording()


def test_only_the_chunks_that_a_box_needs_are_read(tmp_path: Path) -> None:
    source = random(1024, 256)  # 1 MiB: 256 chunks
    craft(tmp_path, {"w": source}, num_files=1)
    storage = Watched(storage_for(tmp_path))
    catalog = resolve(storage)  # type: ignore[arg-type]
    rows = torch.zeros(64, 256)
    target = Target(key="w", box=Box(offset=(512, 0), shape=(64, 256)), tensor=rows)
    num_bytes, read_bytes, _ = read_tensors(storage, catalog, [target], CONFIG)  # type: ignore[arg-type]
    assert bits(rows) == bits(source[512:576])
    assert num_bytes == 64 << 10
    assert read_bytes == sum(end - start for _, start, end in storage.ranges) <= (64 << 10) + 2 * CHUNK
    assert storage.open_files == 0


def test_each_chunk_is_read_once_even_when_many_small_tensors_share_it(tmp_path: Path) -> None:
    sources = {f"k{n}": random(1 + n % 300, seed=n) for n in range(500)}
    craft(tmp_path, sources, num_files=3)
    storage = Watched(storage_for(tmp_path))
    catalog = resolve(storage)  # type: ignore[arg-type]
    got = {key: torch.zeros_like(t) for key, t in sources.items()}
    targets = [all_of(key, t) for key, t in sorted(got.items(), reverse=True)]
    _, read_bytes, _ = read_tensors(storage, catalog, targets, CONFIG)  # type: ignore[arg-type]
    for key, tensor in sources.items():
        assert bits(got[key]) == bits(tensor), key
    assert read_bytes <= sum(stored.size for stored in catalog.files.values())
    assert len(storage.ranges) < 100
    ranges = sorted(storage.ranges)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))


def test_scratch_stays_within_the_slots(tmp_path: Path) -> None:
    source = random(600, 600)
    craft(tmp_path, {"w": source}, num_files=1)
    storage = Watched(storage_for(tmp_path))
    catalog = resolve(storage)  # type: ignore[arg-type]
    turned = torch.zeros(600, 600).t()
    read_tensors(storage, catalog, [all_of("w", turned)], CONFIG)  # type: ignore[arg-type]
    assert bits(turned) == bits(source)
    assert max(end - start for _, start, end in storage.ranges) <= CONFIG.slot_bytes


def test_fifty_thousand_small_tensors_take_seconds(tmp_path: Path) -> None:
    flat = random(50_000 * 64)
    boxes = [Box(offset=(n * 64,), shape=(64,)) for n in range(0, 50_000, 100)]
    craft(
        tmp_path,
        {"w": (flat, [Box(offset=(n * 6400,), shape=(6400,)) for n in range(500)])},
        chunk_bytes=1 << 20,
    )
    assert len(boxes) == 500
    got = torch.zeros(50_000, 64)
    targets = [Target(key="w", box=Box(offset=(n * 64,), shape=(64,)), tensor=got[n]) for n in range(50_000)]
    storage, catalog = opened(tmp_path)
    began = time.process_time()
    read_tensors(storage, catalog, targets, Config(io_threads=2, staging_bytes=1 << 20))
    assert time.process_time() - began < 15
    assert bits(got) == bits(flat)


# --- damage ---


def test_a_flipped_bit_anywhere_in_a_data_file_is_named(tmp_path: Path) -> None:
    source = {"a": random(3000), "b": random(50, 70, dtype=torch.bfloat16), "c": random(40)}
    craft(tmp_path, source, objects={"step": 5}, num_files=1)
    storage, catalog = opened(tmp_path)
    name = data_name(0, ATTEMPT, 0)
    path = tmp_path / name
    size = catalog.files[name].size
    targets = [all_of(k, torch.zeros_like(t)) for k, t in source.items()]
    targets[1] = all_of("b", torch.zeros(70, 50, dtype=torch.bfloat16).t())
    for offset in [*range(0, size, 997), size - 1]:
        flip(path, offset, offset % 8)
        wrong = rf"checksum is wrong.*{name}.*chunk {offset // CHUNK}.*expected \w{{32}}, got \w{{32}}"
        with pytest.raises(Corrupt, match=wrong) as error:
            read_tensors(storage, catalog, targets, CONFIG)
            read_object(storage, catalog, "step")
        assert error.value.fields["key"]
        flip(path, offset, offset % 8)
    read_tensors(storage, catalog, targets, CONFIG)
    assert all(bits(t.tensor) == bits(source[t.key]) for t in targets)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    craft(tmp_path, {"a": random(30_000)}, num_files=1)
    storage, catalog = opened(tmp_path)
    name = data_name(0, ATTEMPT, 0)
    os.truncate(tmp_path / name, 50_000)
    with pytest.raises(Corrupt, match=rf"shorter.*{name}.*expected at least \d+ bytes, got 50000 bytes"):
        read_tensors(storage, catalog, [all_of("a", torch.zeros(30_000))], CONFIG)
    (tmp_path / name).unlink()
    with pytest.raises(Corrupt, match=name):
        read_tensors(storage, catalog, [all_of("a", torch.zeros(30_000))], CONFIG)


def test_an_error_in_one_thread_stops_the_others_and_keeps_its_cause(tmp_path: Path) -> None:
    craft(tmp_path, {f"k{n}": random(8000, seed=n) for n in range(40)}, num_files=4)
    storage, catalog = opened(tmp_path)
    reads = []

    class Failing:
        url = storage.url

        def open(self, name: str) -> Reader:
            reader = storage.open(name)

            class Broken:
                size = reader.size
                close = reader.close

                def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
                    reads.append(offset)
                    raise OSError(5, "Input/output error", name)

            return Broken()

    before = threading.active_count()
    with pytest.raises(LoadFailed, match=r"Input/output error.*distcp") as error:
        read_tensors(Failing(), catalog, [all_of(f"k{n}", torch.zeros(8000)) for n in range(40)], CONFIG)  # type: ignore[arg-type]
    assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == 5
    assert len(reads) <= CONFIG.num_threads
    assert threading.active_count() == before


# --- known before reading: nothing is changed ---


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (
            lambda: [all_of(f"gone{n}", torch.zeros(2)) for n in range(12)],
            MissingKey,
            r"'gone0', .*'gone9' and 2 more",
        ),
        (
            lambda: [all_of("step", torch.zeros(2))],
            MissingKey,
            "holds a plain value, not a tensor, for 'step'",
        ),
        (
            lambda: [all_of("w", torch.zeros(10, 5), shape=(10, 5))],
            Mismatch,
            r"'w'.*expected \[10, 5\], got \[10, 4\]",
        ),
        (lambda: [all_of("w", torch.zeros(11, 4))], Mismatch, r"outside.*'w'.*expected \[0:11, 0:4\]"),
        (lambda: [all_of("w", torch.zeros(40))], Mismatch, r"dimensions.*expected 1, got 2"),
        (lambda: [all_of("w", torch.zeros(10, 4).half())], Mismatch, r"dtype.*expected float16, got float32"),
        (
            lambda: [Target(key="w", box=whole((10, 4)), tensor=torch.zeros(10, 3))],
            Mismatch,
            r"number of elements.*expected 40.*got 30",
        ),
        (lambda: [all_of("w", torch.zeros(10, 4, device="meta"))], Mismatch, r"in place.*meta"),
        (lambda: [all_of("hole", torch.zeros(6))], Corrupt, r"'hole'.*missing '\[2:4\]'"),
    ],
)
def test_what_can_be_known_before_reading_changes_nothing(
    tmp_path: Path, bad: Any, error: type[Exception], says: str
) -> None:
    boxes = [Box(offset=(0,), shape=(2,)), Box(offset=(4,), shape=(2,))]
    craft(
        tmp_path,
        {"w": torch.ones(10, 4), "ok": torch.ones(3), "hole": (torch.ones(6), boxes)},
        objects={"step": 1},
    )
    untouched = torch.zeros(3)
    with pytest.raises(error, match=says):
        fill(tmp_path, [all_of("ok", untouched), *bad()])
    assert not untouched.any()


def test_released_memory_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    craft(tmp_path, {"w": torch.ones(100), "v": torch.ones(4, 5)})
    whole_, strided = torch.zeros(100), torch.zeros(5, 4).t()
    whole_.untyped_storage().resize_(0)
    strided.untyped_storage().resize_(70)
    _, catalog = opened(tmp_path)
    with pytest.raises(StorageReleased, match=r"'w'.*expected 400 bytes, got 0 bytes"):
        check_targets(catalog, [all_of("w", whole_)])
    with pytest.raises(StorageReleased, match=r"'v'.*expected 80 bytes, got 70 bytes"):
        check_targets(catalog, [all_of("v", strided)])


# --- values ---


class Unknown:
    pass


def test_values_come_back_and_unknown_classes_are_named(tmp_path: Path) -> None:
    value = {"lr": [0.1, 0.2], "t": torch.arange(3), "n": None}
    craft(tmp_path, {"w": torch.ones(2)}, objects={"obj": value, "bad": Unknown()}, common={"iteration": 5})
    storage, catalog = opened(tmp_path)
    got = load_value(read_object(storage, catalog, "obj"), "obj")
    assert got["lr"] == [0.1, 0.2] and got["n"] is None and torch.equal(got["t"], torch.arange(3))
    assert read_common(storage, catalog) == {"iteration": 5}
    with pytest.raises(UnsafePickle, match=r"'bad'.*test_load_stage\.Unknown.*add_safe_globals"):
        load_value(read_object(storage, catalog, "bad"), "bad")
    with torch.serialization.safe_globals([Unknown]):
        assert isinstance(load_value(read_object(storage, catalog, "bad"), "bad"), Unknown)
    with pytest.raises(MissingKey, match="'nope'"):
        read_object(storage, catalog, "nope")
    with pytest.raises(MissingKey, match="'w'"):
        read_object(storage, catalog, "w")
    with pytest.raises(Corrupt, match="'obj'"):
        load_value(saved(value)[:-30], "obj")


def test_read_tensor_makes_one(tmp_path: Path) -> None:
    source = random(9, 9, dtype=torch.float64)
    craft(tmp_path, {"w": source, "s": torch.tensor(3.5), "e": torch.empty(0, 2)})
    storage, catalog = opened(tmp_path)
    assert bits(read_tensor(storage, catalog, "w", CONFIG)) == bits(source)
    part = read_tensor(storage, catalog, "w", CONFIG, Box(offset=(2, 3), shape=(4, 5)))
    assert bits(part) == bits(source[2:6, 3:8])
    assert read_tensor(storage, catalog, "s", CONFIG).item() == 3.5
    assert read_tensor(storage, catalog, "e", CONFIG).shape == (0, 2)
