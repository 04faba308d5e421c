"""Frames: head + payload + tail is an archive that torch loads, bit-equal, for every dtype and shape."""

from __future__ import annotations

import io
import math
import resource
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import frame as frames
from shardkeep.frame import frame, frame_bytes, payload_start
from shardkeep.types import dtype_name, dtype_named

# Sub-byte and quantized types have no plain bytes of their own; capture refuses the latter.
DTYPES = sorted(
    {
        dtype_name(d)
        for d in vars(torch).values()
        if isinstance(d, torch.dtype)
        and dtype_name(d).startswith(("float", "bfloat", "complex", "int", "uint", "bool"))
    }
    - {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3), (2, 1, 3, 1, 2)]


def random_bytes(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A payload of arbitrary bits; for bool the two that are defined."""
    num_bytes = math.prod(shape) * dtype_named(dtype).itemsize
    return torch.randint(0, 2 if dtype == "bool" else 256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_the_dtypes_of_training_are_among_the_tested() -> None:
    assert {
        "bfloat16",
        "float16",
        "float32",
        "float8_e4m3fn",
        "float8_e5m2",
        "bool",
        "uint16",
        "complex64",
    } <= set(DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_the_archive_bit_equal(dtype: str) -> None:
    for shape in SHAPES:
        head, tail = frame(dtype, shape)
        payload = random_bytes(dtype, shape)
        loaded = torch.load(io.BytesIO(head + payload + tail), weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape)) == (dtype_named(dtype), shape)
        assert loaded.is_contiguous() and not loaded.requires_grad
        assert bytes_of(loaded) == payload


@pytest.mark.parametrize("dtype", ["float32", "bool", "float8_e5m2"])
def test_the_archive_is_what_torch_writes(dtype: str) -> None:
    """Same records, same sizes, same place of the payload."""
    shape = (5, 3)
    payload = random_bytes(dtype, shape)
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(dtype_named(dtype)).view(shape)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    head, tail = frame(dtype, shape)
    ours = io.BytesIO(head + payload + tail)
    assert len(ours.getvalue()) == len(buffer.getvalue())
    assert payload_start(ours, "data/0") == payload_start(buffer, "data/0") == len(head)
    assert buffer.getvalue()[len(head) : len(head) + len(payload)] == payload
    records = [
        [(i.filename.partition("/")[2], i.file_size) for i in zipfile.ZipFile(f).infolist()]
        for f in (ours, buffer)
    ]
    assert records[0] == records[1]


def test_only_the_payload_record_lacks_its_crc() -> None:
    """As the format page says: `unzip -t` complains about the payload and about nothing else."""
    head, tail = frame("float32", (4,))
    with zipfile.ZipFile(io.BytesIO(head + b"x" * 16 + tail)) as archive:
        assert archive.testzip().endswith("/data/0")  # type: ignore[union-attr]
        for name in archive.namelist():
            if not name.endswith("/data/0"):
                archive.read(name)  # checks its CRC


def test_a_frame_beyond_4_gib_costs_no_memory(tmp_path: Path) -> None:
    shape = (3, 1 << 29)  # 6 GiB, the last element beyond what 32 bits address
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    head, tail = frame("float32", shape)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1500  # 6 GiB are 3072 huge pages
    assert len(head) + len(tail) < 8192
    with (tmp_path / "item").open("wb") as file:  # sparse: a few pages on disk
        file.write(head)
        file.seek(math.prod(shape) * 4 - 4, 1)
        file.write(torch.tensor(2.5).numpy().tobytes() + tail)
    loaded = torch.load(tmp_path / "item", weights_only=True, mmap=True)
    assert tuple(loaded.shape) == shape
    assert loaded[2, -1] == 2.5
    assert loaded[1, 0] == 0


def test_making_frames_does_not_blank_what_another_thread_saves() -> None:
    """`skip_data` must hold for the thread that makes the frame and for nobody else."""
    stop, made = threading.Event(), []

    def make_frames() -> None:
        while not stop.is_set():
            frame.__wrapped__("float32", (64, 64))  # past the cache
            made.append(1)

    thread = threading.Thread(target=make_frames)
    thread.start()
    try:
        tensor = torch.arange(1.0, 4097.0)
        while len(made) < 50:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            buffer.seek(0)
            assert torch.equal(torch.load(buffer, weights_only=True), tensor)
    finally:
        stop.set()
        thread.join()


def test_the_payload_of_a_foreign_archive_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(10, dtype=torch.int16)
    torch.save({"w": tensor}, tmp_path / "a.pt")
    with (tmp_path / "a.pt").open("rb") as file:
        start = payload_start(file, "data/0")
    assert (tmp_path / "a.pt").read_bytes()[start : start + 20] == tensor.numpy().tobytes()


def derived(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a frame of this shape comes from another one."""
    return frames._template(dtype, shape) is not None


@given(
    st.sampled_from(["float32", "bfloat16", "uint8", "bool", "complex128", "float8_e5m2"]),
    st.lists(st.sampled_from([1, 2, 3, 9, 255, 256, 257, 300, 65535, 65536]), max_size=5).filter(
        lambda shape: math.prod(shape) < 1 << 26
    ),
)
def test_a_derived_frame_is_torchs_own_except_for_its_id(dtype: str, dims: list[int]) -> None:
    shape = tuple(dims)
    frame(dtype, (5,) * len(shape))  # so that there is one to derive from
    ours, own = frame.__wrapped__(dtype, shape), frames._by_torch(dtype, shape)
    assert derived(dtype, shape)
    assert frame_bytes(dtype, shape) == (len(ours[0]), len(ours[1])) == (len(own[0]), len(own[1]))
    assert ours[0] == own[0]  # pickle, sizes and CRCs included
    ids, changed = [], []
    for head, tail in (ours, own):
        with zipfile.ZipFile(
            io.BytesIO(head + bytes(math.prod(shape) * dtype_named(dtype).itemsize) + tail)
        ) as z:
            ids.append(z.read("archive/.data/serialization_id"))
            changed.append(z.getinfo("archive/.data/serialization_id").CRC.to_bytes(4, "little"))
    assert ours[1].replace(ids[0], ids[1]).replace(changed[0], changed[1]) == own[1]


def test_torch_makes_what_cannot_be_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not derived("float32", (1 << 29,))  # beyond 1 GiB, where zip and pickle change their form
    assert not derived("float32", (0, 3))
    assert derived("float32", (6, 2))


def test_torch_makes_all_frames_once_a_derived_one_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    frames._script.cache_clear()
    monkeypatch.setattr(frames, "_templates", {})
    frame.__wrapped__("float32", (100, 3))
    fill = frames._Form.fill
    monkeypatch.setattr(frames._Form, "fill", lambda *a: fill(*a).replace(b"archive", b"Archive", 1))
    for rows in range(116, 230, 16):  # each could be made from the first
        assert frame.__wrapped__("float32", (rows, 3)) == frames._by_torch("float32", (rows, 3))
    assert not derived("float32", (244, 3))
    frames._script.cache_clear()


def test_an_archive_of_an_unknown_form_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    frames._script.cache_clear()
    by_torch = frames._by_torch
    monkeypatch.setattr(frames, "_templates", {})
    monkeypatch.setattr(
        frames, "_by_torch", lambda d, s: (by_torch(d, s)[0], by_torch(d, s)[1].replace(b"PK\1\2", b"PK\1\3"))
    )
    assert not derived("float32", (7, 7))
    assert frame.__wrapped__("float32", (7, 7)) == frames._by_torch("float32", (7, 7))
    frames._script.cache_clear()
