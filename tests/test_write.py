"""Writing: files as laid out, checksums of the bytes on disk, and after an error nothing."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import shardkeep as sk
from shardkeep import layout, stage, write
from shardkeep.capture import capture
from shardkeep.config import Config
from shardkeep.errors import Cancelled
from shardkeep.freeze import Room, freeze
from shardkeep.storage import Buffer, Storage, Writer
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.faults import Died, Faults, FaultyStorage, die, fail_with
from shardkeep.types import Item, StoredFile

ATTEMPT = "17000000000001234"
CONFIG = Config(io_threads=3, chunk_bytes=4096, split_bytes=1 << 20, staging_bytes=1 << 18)


@pytest.fixture(params=[0, 99], ids=["hash then write", "hash beside the write"], autouse=True)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it with too few cores for threads that hash, and with enough."""
    monkeypatch.setattr(write, "cores_per_rank", lambda: request.param)


def state(num_elements: int = 3 << 19) -> dict[str, Any]:
    """Direct and staged tensors of several dtypes, objects, and tensors with few or no bytes; 12 MiB."""
    torch.manual_seed(1)
    return {
        "large": torch.rand(num_elements),
        "transposed": torch.rand(1024, num_elements // 1024).t(),
        "columns": torch.rand(700, 40)[:, 3:33:2],
        "conjugated": torch.rand(300, dtype=torch.complex64).conj(),
        "half": torch.rand(33, 7).half(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "step": 7,
        "names": ["a", "b"],
    }


def write_state(
    what: dict[str, Any], storage: Storage, config: Config = CONFIG
) -> tuple[list[Item], dict[str, StoredFile]]:
    """All of `what`, as rank 5."""
    Path(storage.url).mkdir(exist_ok=True)
    captured = capture(what)
    chosen = list(range(len(captured.shards)))
    frozen = freeze(captured, chosen, 5, mode="sync", room=Room(), lenient=False)
    files = layout.layout(frozen.headers, chosen, frozen.payloads, rank=5, attempt=ATTEMPT, config=config)
    stored = write.write_files(
        write.Job(
            storage=storage,
            files=files,
            shards=frozen.shards,
            payloads=frozen.payloads,
            config=config,
            ready=frozen.ready,
        )
    )
    result = write.result(files, stored, frozen)
    assert result.files == stored
    return result.items, stored


def read_back(items: list[Item], directory: Path, into: dict[str, Any]) -> None:
    """Every item through `torch.load`, put where its box belongs."""
    for item in items:
        data = (directory / item.file).read_bytes()[item.offset : item.offset + item.length]
        value = torch.load(io.BytesIO(data), weights_only=True)
        if item.kind == "object":
            into[item.key] = value
        else:
            shape = tuple(value.shape)
            assert shape == item.box.shape and item.num_bytes == value.numel() * value.element_size()
            into[item.key][tuple(slice(o, o + n) for o, n in zip(item.box.offset, shape, strict=True))] = (
                value
            )


def test_every_item_is_an_archive_that_torch_loads(tmp_path: Path) -> None:
    what = state()
    items, _ = write_state(what, LocalStorage(tmp_path))
    got = {k: torch.empty_like(v) if isinstance(v, torch.Tensor) else None for k, v in what.items()}
    read_back(items, tmp_path, got)
    for key, value in what.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key
    assert len({i.file for i in items}) == 3
    assert sum(i.key == "large" for i in items) > 1  # cut, so that files balance


def test_items_tile_their_files(tmp_path: Path) -> None:
    items, stored = write_state(state(), LocalStorage(tmp_path))
    for name, file in stored.items():
        end = 0
        for item in sorted((i for i in items if i.file == name), key=lambda i: i.offset):
            assert item.offset == end <= item.payload_offset
            assert item.payload_offset + item.num_bytes <= item.offset + item.length
            end += item.length
        assert end == file.size == (tmp_path / name).stat().st_size
    assert set(stored) == {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20, 1 << 30])
def test_checksums_are_those_of_the_bytes_on_disk(tmp_path: Path, chunk_bytes: int) -> None:
    config = Config(io_threads=2, chunk_bytes=chunk_bytes, staging_bytes=1 << 18)
    _, stored = write_state(state(1 << 17), LocalStorage(tmp_path), config)
    for name, file in stored.items():
        data = (tmp_path / name).read_bytes()
        chunks = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]
        assert file.checksums == b"".join(xxhash.xxh3_128_digest(c) for c in chunks)
        assert file.size == len(data)


def test_a_file_that_ends_with_a_chunk_has_no_empty_one(tmp_path: Path) -> None:
    size = sum(f.size for f in write_state({"w": torch.rand(64)}, LocalStorage(tmp_path / "a"))[1].values())
    config = Config(io_threads=1, chunk_bytes=size, staging_bytes=1 << 18)
    (file,) = write_state({"w": torch.rand(64)}, LocalStorage(tmp_path / "b"), config)[1].values()
    assert (file.size, len(file.checksums)) == (size, 16)


def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    _, stored = write_state(
        state(1 << 15), LocalStorage(tmp_path), Config(checksum="none", staging_bytes=1 << 20)
    )
    assert [f.checksums for f in stored.values()] == [b""]


def test_checksums_of_a_small_file() -> None:
    data = bytes(range(256)) * 40
    expected = b"".join(xxhash.xxh3_128_digest(data[i : i + 4096]) for i in range(0, len(data), 4096))
    assert write.checksums(data, CONFIG) == expected
    assert write.checksums(data, Config(checksum="none")) == b""


class SlowStorage(LocalStorage):
    """Takes its time, and looks at the bytes only afterwards: a slot that is reused too early is seen."""

    def create(self, name: str) -> Writer:  # type: ignore[override]
        return SlowWriter(super().create(name))


class SlowWriter:
    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def append(self, parts: Sequence[Buffer]) -> None:
        time.sleep(0.0005)
        self._inner.append(parts)

    def close(self, *, durable: bool) -> None:
        self._inner.close(durable=durable)

    def abort(self) -> None:
        self._inner.abort()


def test_slots_are_not_reused_before_a_slow_storage_has_taken_them(tmp_path: Path) -> None:
    what = {f"w{n}": torch.randint(0, 1 << 30, (256, 2048), dtype=torch.int32).t() for n in range(4)}
    config = Config(io_threads=2, staging_bytes=1 << 18, chunk_bytes=1 << 16)
    items, stored = write_state(what, SlowStorage(tmp_path), config)
    got = {k: torch.empty_like(v) for k, v in what.items()}
    read_back(items, tmp_path, got)
    assert all(torch.equal(got[k], v) for k, v in what.items())
    assert all((tmp_path / name).stat().st_size == f.size for name, f in stored.items())


def test_staging_stays_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_rings", {})
    made: list[int] = []
    allocate = stage.allocate
    monkeypatch.setattr(stage, "allocate", lambda n: made.append(n) or allocate(n))
    for save in range(3):
        write_state(state(), LocalStorage(tmp_path / str(save)), Config(io_threads=3, staging_bytes=600_000))
    assert len(made) <= 6
    assert sum(made) <= 600_000


@pytest.mark.parametrize("slot_bytes", [1 << 13, 1 << 20])
def test_many_small_items_are_packed_in_their_order(tmp_path: Path, slot_bytes: int) -> None:
    """Items of all kinds, larger and smaller than a slot, at odd offsets; a small item never waits alone."""
    torch.manual_seed(2)
    kinds: list[Any] = [
        lambda n: torch.rand(n % 37 + 1, n % 11 + 1),
        lambda n: torch.rand(n % 23 + 2, 6).t(),
        lambda n: torch.randint(0, 256, (n % 900,), dtype=torch.uint8),
        lambda n: torch.rand(n % 13 + 1, dtype=torch.complex64).conj(),
        lambda n: torch.rand(n % 300 + 3)[1::3].bfloat16(),
        lambda n: list(range(n % 50)),
        lambda n: torch.rand(5000 if n % 10 else 100_000),
    ]
    what = {f"k{n}": kinds[n % len(kinds)](n) for n in range(300)}
    config = Config(io_threads=2, staging_bytes=4 * slot_bytes, chunk_bytes=5000)
    appended: list[int] = []
    storage = CountingStorage(tmp_path, appended)
    items, stored = write_state(what, storage, config)
    got = {k: torch.empty_like(v) if isinstance(v, torch.Tensor) else None for k, v in what.items()}
    read_back(items, tmp_path, got)
    for key, value in what.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key
    for name, file in stored.items():
        data = (tmp_path / name).read_bytes()
        chunks = [data[i : i + 5000] for i in range(0, len(data), 5000)]
        assert file.checksums == b"".join(xxhash.xxh3_128_digest(c) for c in chunks)
    if slot_bytes == 1 << 20:
        assert len(appended) < 40  # not 300


class CountingStorage(LocalStorage):
    def __init__(self, directory: Path, appended: list[int]) -> None:
        super().__init__(directory)
        self._appended = appended

    def create(self, name: str) -> Writer:  # type: ignore[override]
        writer = super().create(name)
        append = writer.append

        def counted(parts: Sequence[Buffer]) -> None:
            self._appended.append(sum(map(len, parts)))
            append(parts)

        writer.append = counted  # type: ignore[method-assign]
        return writer


class Event:
    """Stands for a device's event: what it waits for happens when it is waited for."""

    def __init__(self, happen: Any) -> None:
        self._happen = happen

    def synchronize(self) -> None:
        self._happen()


def test_packed_blocks_are_settled_once_each_and_before_they_are_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a device: copies of a whole slot are begun together, and take place while it is waited for."""
    waits: list[int] = []

    def late(self: stage.Stager, block: Any) -> Any:
        def happen() -> None:
            waits.append(len(block.collected))
            block.copy(block.collected)

        return block.view[: block.used_bytes], Event(happen) if block.collected else None

    monkeypatch.setattr(stage.Stager, "_settle", late)
    slots = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    tensors = [torch.randint(0, 256, (n % 199 + 2, 2), dtype=torch.uint8).t() for n in range(100)]
    items = [(t.numel() + 2, (b"<", t, b">")) for t in tensors]
    blocks = [bytes(block) for block in stage.Stager(slots, None).pack(iter(items), 512)]
    assert b"".join(blocks) == b"".join(b"<" + t.contiguous().numpy().tobytes() + b">" for t in tensors)
    assert len(waits) == len(blocks) <= 1 + sum(n for n, _ in items) // (4096 - 404)  # slots are filled
    assert sum(waits) == len(tensors)


def tied_state() -> dict[str, Any]:
    w = torch.rand(64, 300)
    columns = torch.rand(50, 8)[:, ::2]
    return {
        "embed": {"w": w},
        "head": {"w": w},
        "columns": columns,
        "same": columns[:],
        "part": w[:10],
        "scale": torch.rand(3),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tied_weights_are_written_once_and_read_under_all_names(tmp_path: Path, asynchronous: bool) -> None:
    what = tied_state()
    path = tmp_path / "checkpoint"
    report = sk.save_async(what, path).wait() if asynchronous else sk.save(what, path)
    once = 4 * (64 * 300 + 200 + 10 * 300 + 3)
    assert (report.num_bytes, report.num_items) == (once, 6)
    assert sum(f.stat().st_size for f in path.glob("*.distcp")) < once + 4 * 2500
    assert sk.verify(path).problems == ()
    ckpt = sk.inspect(path)
    assert ckpt.num_bytes == once
    flat = {"embed.w": what["embed"]["w"], "head.w": what["head"]["w"]} | {
        k: what[k] for k in ("columns", "same", "part", "scale")
    }
    for key, tensor in flat.items():
        assert torch.equal(ckpt.read(key), tensor)
    by_torch = {k: torch.zeros_like(v) for k, v in flat.items()}
    nested = {"embed": {"w": by_torch.pop("embed.w")}, "head": {"w": by_torch.pop("head.w")}, **by_torch}
    dcp.load(nested, checkpoint_id=path, no_dist=True)
    ours = {"embed": {"w": torch.zeros(64, 300)}, "head": {"w": torch.zeros(64, 300)}}
    ours |= {k: torch.zeros_like(v) for k, v in by_torch.items()}
    sk.load(ours, path)
    for loaded in (nested, ours):
        assert torch.equal(loaded["embed"]["w"], what["embed"]["w"])
        assert torch.equal(loaded["head"]["w"], what["head"]["w"])
        assert all(torch.equal(loaded[k], what[k]) for k in by_torch)


def test_megatron_reads_tied_weights(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint import FileSystemReader

    w = torch.rand(40, 7)
    state = {
        "embed": ShardedTensor.from_rank_offsets("embed", w),
        "head": ShardedTensor.from_rank_offsets("head", w),
    }
    report = sk.save(state, tmp_path)
    assert report.num_bytes == w.nbytes
    blank = {k: ShardedTensor.from_rank_offsets(k, torch.zeros(40, 7)) for k in state}
    sk.load(blank, tmp_path)
    assert torch.equal(blank["embed"].data, w) and torch.equal(blank["head"].data, w)
    stored = FileSystemReader(tmp_path).read_metadata().storage_data
    assert len(set(map(str, stored.values()))) == 1  # what Megatron's own strategy reads by
    assert len(stored) == 2


def test_tied_weights_that_change_apart_are_two_again(tmp_path: Path) -> None:
    what = tied_state()
    sk.save(what, tmp_path)
    what["head"]["w"] = what["head"]["w"] + 1
    sk.save(what, tmp_path, overwrite=True)
    ckpt = sk.inspect(tmp_path)
    assert torch.equal(ckpt.read("head.w"), ckpt.read("embed.w") + 1)


def writer_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardkeep-write")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("when", ["before", "half"])
def test_an_error_at_any_operation_is_raised_and_leaves_no_thread(
    tmp_path: Path, code: int, when: Any
) -> None:
    """The file that failed is removed; the others are removed by the save as a whole (see test_save)."""
    what = state(1 << 19)
    config = Config(io_threads=3, chunk_bytes=1 << 18, staging_bytes=1 << 20)
    counted = Faults()
    write_state(what, FaultyStorage(LocalStorage(tmp_path / "counted"), counted), config)
    num_operations = len(counted.operations)
    assert num_operations > 12
    for at in range(num_operations):
        faults = Faults(at=at, strike=fail_with(code), when=when)
        with pytest.raises(OSError, match=r"__5_\d+\.distcp") as caught:
            write_state(what, FaultyStorage(LocalStorage(tmp_path / str(at)), faults), config)
        assert caught.value.errno == code
        kind, _, name = faults.operations[at].partition(" ")
        assert kind == "close" or not (tmp_path / str(at) / name).exists()
    assert writer_threads() == []


def test_one_failing_file_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not write on for minutes while the outcome is known."""
    monkeypatch.setattr(write, "_BATCH_BYTES", 4096)
    faults = Faults(at=0, strike=fail_with(errno.EIO), kinds=frozenset({"append"}))
    with pytest.raises(OSError, match="Input/output error"):
        write_state(
            state(),
            FaultyStorage(LocalStorage(tmp_path), faults),
            Config(io_threads=3, chunk_bytes=4096, staging_bytes=1 << 18),
        )
    assert len(faults.operations) < 500  # of 3,000


def test_a_death_is_not_taken_for_an_error(tmp_path: Path) -> None:
    with pytest.raises(Died):
        write_state(state(1 << 18), FaultyStorage(LocalStorage(tmp_path), Faults(at=4, strike=die)))
    assert writer_threads() == []


@pytest.mark.parametrize("what", [state(1 << 16), {"step": 7}], ids=["tensors", "objects alone"])
def test_a_stopped_job_is_cancelled(tmp_path: Path, what: dict[str, Any]) -> None:
    captured = capture(what)
    chosen = list(range(len(captured.shards)))
    frozen = freeze(captured, chosen, 0, mode="sync", room=Room(), lenient=False)
    files = layout.layout(frozen.headers, chosen, frozen.payloads, rank=0, attempt=ATTEMPT, config=CONFIG)
    job = write.Job(
        storage=LocalStorage(tmp_path),
        files=files,
        shards=frozen.shards,
        payloads=frozen.payloads,
        config=CONFIG,
        ready=None,
    )
    job.stop.set()
    with pytest.raises(Cancelled):
        write.write_files(job)
    assert list(tmp_path.iterdir()) == []


def test_a_share_of_nothing_writes_nothing(tmp_path: Path) -> None:
    assert write_state({}, LocalStorage(tmp_path)) == ([], {})
    assert list(tmp_path.iterdir()) == []
