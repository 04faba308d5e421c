"""Bad input, for save and load: the error's class, what its message names, and that nothing has changed.

What depends on several ranks is in test_save; damage of every kind in test_verify.
"""

from __future__ import annotations

import enum
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkeep as sk
from quantised import Quantised
from shardkeep import budget, checkpointer, errors
from shardkeep.errors import InputError, ShardkeepError
from shardkeep.memory import host_bytes
from shardkeep.storage.local import LocalStorage
from shardkeep.types import Target


@pytest.fixture(autouse=True)
def torch_s_own_safe_globals() -> Iterator[None]:
    """Classes that other tests' imports have registered are not known here."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(registered)


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((6, 4), value), "b": torch.full((4,), value)},
        "step": int(value),
    }


def snapshot(what: Any) -> Any:
    """All values of a state, to compare with later."""
    if isinstance(what, torch.Tensor):
        return (what.dtype, tuple(what.shape), what.tolist() if what.device.type == "cpu" else None)
    if isinstance(what, dict):
        return {k: snapshot(v) for k, v in what.items()}
    return what


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(directory)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in directory.rglob("*")
        if p.is_file()
    }


# -- save


class Unknown:
    """A class that `torch.load(weights_only=True)` would not load."""


class Mode(enum.Enum):
    TRAIN = 1


def released() -> dict[str, Any]:
    what = state()
    what["model"]["w"].untyped_storage().resize_(0)
    return what


def shrunk() -> dict[str, Any]:
    what = state()
    what["model"]["w"].untyped_storage().resize_(40)
    return what


BAD_STATES: dict[str, tuple[Callable[[], Any], type[ShardkeepError], list[str]]] = {
    "released memory": (
        released,
        errors.StorageReleased,
        ["'model.w'", "expected 96 bytes", "got 0 bytes", "Bring an offloaded model back"],
    ),
    "shrunk memory": (shrunk, errors.StorageReleased, ["'model.w'", "expected 96 bytes", "got 40 bytes"]),
    "no dict": (lambda: [torch.ones(2)], errors.InvalidState, ["expected dict", "got list"]),
    "one dotted key twice": (lambda: {"a.b": 1, "a": {"b": 2}}, errors.InvalidState, ["a.b"]),
    "a sparse tensor": (lambda: {"w": torch.eye(2).to_sparse()}, errors.InvalidState, ["'w'", "sparse"]),
    "a meta tensor": (lambda: {"w": torch.ones(2, device="meta")}, errors.InvalidState, ["'w'", "meta"]),
    "an object of one's own": (
        lambda: {"a": {"cfg": Unknown()}},
        errors.InvalidState,
        ["'a.cfg'", "Unknown", "weights_only", "add_safe_globals"],
    ),
    "an enum": (lambda: {"mode": Mode.TRAIN}, errors.InvalidState, ["'mode'", "Mode"]),
    "a class": (lambda: {"kind": torch.optim.Adam}, errors.InvalidState, ["'kind'", "Adam"]),
    "a numpy array": (lambda: {"seed": np.arange(3)}, errors.InvalidState, ["'seed'", "numpy"]),
    "a function": (lambda: {"f": lambda: 1}, errors.InvalidState, ["'f'", "cannot be serialised"]),
    "a lock": (lambda: {"f": threading.Lock()}, errors.InvalidState, ["'f'", "lock"]),
}


@pytest.mark.parametrize("name", BAD_STATES)
@pytest.mark.parametrize("how", ["save", "save_async", "run"])
def test_a_state_that_cannot_be_stored_writes_nothing(tmp_path: Path, name: str, how: str) -> None:
    make, kind, says = BAD_STATES[name]
    what = make()
    before = snapshot(what) if name not in ("released memory", "shrunk memory", "a sparse tensor") else None
    with pytest.raises(kind) as caught:
        if how == "save":
            sk.save(what, tmp_path / "a")
        elif how == "save_async":
            sk.save_async(what, tmp_path / "a")
        else:
            with sk.Run(tmp_path).step(1) as step:
                step.save("policy", what)
    assert isinstance(caught.value, InputError)
    for text in says:
        assert text in str(caught.value), str(caught.value)
    assert files_in(tmp_path) == {}
    if before is not None:
        assert snapshot(what) == before


def test_a_bad_state_leaves_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    sk.save(state(1.0), tmp_path / "a")
    before = files_in(tmp_path)
    for make, kind, _ in BAD_STATES.values():
        with pytest.raises(kind):
            sk.save(make(), tmp_path / "a", overwrite=True)
    assert files_in(tmp_path) == before


def test_a_committed_target_is_refused(tmp_path: Path) -> None:
    sk.save(state(1.0), tmp_path / "a")
    before = files_in(tmp_path)
    for save in (sk.save, sk.save_async):
        with pytest.raises(errors.AlreadyCommitted, match="overwrite=True") as caught:
            save(state(2.0), tmp_path / "a")
        assert caught.value.fields["path"] == str(tmp_path / "a")
    assert files_in(tmp_path) == before


def test_an_unknown_way_to_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'snapshot' or 'lazy', got 'magic'"):
        sk.save_async(state(), tmp_path / "a", capture="magic")


def test_registered_classes_can_be_stored(tmp_path: Path) -> None:
    """What the message recommends works."""
    with torch.serialization.safe_globals([Mode]):
        sk.save({"mode": Mode.TRAIN}, tmp_path / "a")
        got: dict[str, Any] = {"mode": None}
        sk.load(got, tmp_path / "a")
    assert got == {"mode": Mode.TRAIN}


# -- tensors that are not plain ones

NOT_PLAIN: dict[str, tuple[Callable[[], torch.Tensor], list[str]]] = {
    "sparse coo": (lambda: torch.eye(3).to_sparse(), ["torch.sparse_coo"]),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), ["torch.sparse_csr"]),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), ["torch._mkldnn"]),
    "meta": (lambda: torch.empty(3, device="meta"), ["device meta"]),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ["torch.qint8", "dequantize()"],
    ),
    "quantised by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        ["torch.quint8", "dequantize()"],
    ),
    "wrapper with values elsewhere": (
        lambda: Quantised(torch.ones(3)),
        ["quantised.Quantised", "dequantize()"],
    ),
    "wrapper as a parameter": (
        lambda: torch.nn.Parameter(Quantised(torch.ones(3))),
        ["quantised.Quantised"],
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ["nested"]),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        ["NestedTensor"],
    ),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, ["uninitialised", "UninitializedParameter"]),
} | {
    name: (
        (lambda name=name: torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))),
        [f"torch.{name}"],
    )
    for name in ("int1", "int4", "int7", "uint1", "uint4", "uint7", "qint8")
}


@pytest.mark.parametrize("name", NOT_PLAIN)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_tensor_without_plain_memory_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """By a save and as a load's target; nothing is written, nothing changed."""
    make, says = NOT_PLAIN[name]
    sk.save({"a": {"w": torch.ones(3)}, "b": torch.ones(2)}, tmp_path / "good")
    before = files_in(tmp_path)
    what = {"a": {"w": make()}, "b": torch.zeros(2)}
    for use in (
        lambda: sk.save(what, tmp_path / "a"),
        lambda: sk.save_async(what, tmp_path / "a"),
        lambda: sk.load(what, tmp_path / "good"),
    ):
        with pytest.raises(errors.InvalidState, match="only plain strided tensors") as caught:
            use()
        assert caught.value.fields["key"] == "a.w"
        for text in says:
            assert text in str(caught.value), str(caught.value)
    assert files_in(tmp_path) == before
    assert what["b"].tolist() == [0.0, 0.0]  # type: ignore[union-attr]


def test_what_the_refusal_of_a_quantised_tensor_recommends_works(tmp_path: Path) -> None:
    weight = Quantised(torch.tensor([1.0, -2.0, 0.5]))
    sk.save({"w": weight.dequantize()}, tmp_path / "a")
    got = {"w": torch.zeros(3)}
    sk.load(got, tmp_path / "a")
    other = Quantised(torch.zeros(3))
    other.copy_(got["w"])
    assert torch.equal(other.dequantize(), weight.dequantize())


DTYPES = sorted(
    {
        str(d).removeprefix("torch.")
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and "int" not in str(d)
    }
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def test_every_dtype_is_among_those_tried() -> None:
    assert {"bool", "complex32", "complex128", "bfloat16", "uint64", "float4_e2m1fn_x2"} < set(DTYPES)
    assert len([d for d in DTYPES if d.startswith("float8")]) >= 5


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(host_bytes(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    """Of any shape, in order or strided, saved from where it lies or from a snapshot. The bytes hold NaNs and
    subnormals; a bool's are 0 and 1.
    """
    kind = getattr(torch, dtype)
    raw = (torch.arange(256) * 37 % 256).to(torch.uint8)
    flat = (raw % 2).bool() if kind is torch.bool else raw.view(kind)
    state = {
        "flat": flat,
        "scalar": flat[1],
        "strided": flat[1::3],
        "transposed": flat.view(2, -1).t(),
        "expanded": flat[3].expand(2, 5),
        "nothing": flat[:0],
        "no rows": flat[:0].view(0, 4),
        "no columns": flat[:0].view(4, 0),
    }
    in_order = {k: torch.empty(t.shape, dtype=kind).copy_(t) for k, t in state.items()}
    assert bits(in_order["flat"]) == bits(flat)
    sk.save(state, tmp_path / "sync", config=sk.Config(io_threads=1, staging_bytes=8192, chunk_bytes=100))
    sk.save_async(state, tmp_path / "snapshot").wait()
    for name in ("sync", "snapshot"):
        assert sk.verify(tmp_path / name).ok
        got = {
            k: torch.zeros(t.numel() * kind.itemsize, dtype=torch.uint8).view(kind).view(t.shape)
            for k, t in in_order.items()
        }
        sk.load(got, tmp_path / name)
        for key, tensor in in_order.items():
            assert got[key].shape == tensor.shape
            assert bits(got[key]) == bits(tensor), key


def test_lazily_conjugated_and_negated_views_are_stored_as_what_they_mean(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(6.0), torch.arange(6.0) - 3)
    state = {"conj": z.conj(), "imag of conj": z.conj().imag, "neg": torch._neg_view(z.real), "plain": z}
    for name in ("sync", "snapshot"):
        save = sk.save if name == "sync" else lambda *args: sk.save_async(*args).wait()
        save(state, tmp_path / name)
        got = {k: torch.zeros(6, dtype=t.dtype) for k, t in state.items()}
        sk.load(got, tmp_path / name)
        assert torch.equal(got["conj"], torch.complex(torch.arange(6.0), 3 - torch.arange(6.0)))
        assert got["imag of conj"].tolist() == [3.0, 2.0, 1.0, 0.0, -1.0, -2.0]
        assert got["neg"].tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
        assert torch.equal(got["plain"], z)


@pytest.mark.slow
def test_a_tensor_of_more_than_4_gib_comes_back(tmp_path: Path) -> None:
    """Beyond 32 bits, zip archives need their 64-bit fields, and one `pwrite` takes less than 2 GiB. Once in
    memory and once on disk or tmpfs, so with room for both.
    """
    num_bytes = (4 << 30) + (1 << 20) + 7
    if budget.free_bytes().num_bytes < 10 << 30 or shutil.disk_usage(tmp_path).free < 10 << 30:
        pytest.skip("needs 10 GiB of memory and of disk")
    places = [0, 1, (2 << 30) - 1, 2 << 30, (4 << 30) - 1, 4 << 30, num_bytes - 1]
    what = torch.zeros(num_bytes, dtype=torch.uint8)
    what[places] = torch.arange(1, 8, dtype=torch.uint8)
    config = sk.Config(checksum="none", durable=False, split_bytes=8 << 30)
    report = sk.save({"w": what}, tmp_path / "a", config=config)
    assert (report.num_bytes, report.num_items) == (num_bytes, 1)
    what[places] = 0
    try:
        sk.load({"w": what}, tmp_path / "a", config=config)
        assert what[places].tolist() == list(range(1, 8))
        assert what.count_nonzero() == 7
        # As torch itself finds it in the archive
        item = next((tmp_path / "a").glob("*.distcp"))
        theirs = torch.load(item, mmap=True, weights_only=True)
        assert theirs.shape == (num_bytes,) and theirs[places].tolist() == list(range(1, 8))
        del theirs
    finally:
        shutil.rmtree(tmp_path / "a")


# -- settings and space


@pytest.mark.parametrize("staging_bytes", [1, 4096, 2 * 4 * 4096 - 1])
def test_a_ring_below_two_slots_a_thread_is_refused(staging_bytes: int) -> None:
    with pytest.raises(ValueError) as caught:
        sk.Config(io_threads=4, staging_bytes=staging_bytes)
    assert str(caught.value) == (
        f"Config.staging_bytes of {staging_bytes} is too small: 4 threads with two slots of 4096 bytes each "
        "need 32768. Raise it, lower io_threads, or leave it 0."
    )
    assert sk.Config(io_threads=4, staging_bytes=32768).slot_bytes == 4096


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"staging_bytes": -1}, "staging_bytes must not be negative, got -1"),
        ({"io_threads": -2}, "io_threads must not be negative, got -2"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive, got 0"),
        ({"split_bytes": -5}, "split_bytes must be positive, got -5"),
        ({"deadline_s": 0}, "deadline_s must be positive, got 0"),
        ({"checksum": "crc"}, "checksum must be 'xxh3_128' or 'none', got 'crc'"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sk.Config(**setting)


def test_a_setting_of_the_environment_is_judged_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKEEP_STAGING_BYTES", "100")
    with pytest.raises(ValueError, match="staging_bytes of 100 is too small"):
        sk.save(state(), tmp_path / "a")
    monkeypatch.setenv("SHARDKEEP_STAGING_BYTES", "a lot")
    with pytest.raises(ValueError, match="SHARDKEEP_STAGING_BYTES='a lot' is not a int"):
        sk.save(state(), tmp_path / "a")
    assert files_in(tmp_path) == {}


def test_more_threads_than_cores_are_no_harm(tmp_path: Path) -> None:
    threads = 8 * len(os.sched_getaffinity(0)) + 1
    what = {f"w{n}": torch.rand(300, 400).t() for n in range(3 * threads)}
    sk.save(what, tmp_path / "a", config=sk.Config(io_threads=threads, staging_bytes=2 * threads * 8192))
    got = {key: torch.zeros(400, 300) for key in what}
    sk.load(got, tmp_path / "a", config=sk.Config(io_threads=threads))
    assert all(torch.equal(got[key], what[key]) for key in what)


class Full(LocalStorage):
    """A file system with 5,000 bytes left."""

    def free_bytes(self) -> int:
        return 5000


def test_a_full_disk_is_refused_before_anything_is_written_with_both_figures(tmp_path: Path) -> None:
    what = {"w": torch.rand(1000), "v": torch.rand(500)}
    for snapshot in (False, True):
        save = checkpointer.save_to_async if snapshot else checkpointer.save_to
        with pytest.raises(errors.NoSpace) as caught:
            save(what, Target(storage=Full(str(tmp_path / "a"))))
        assert isinstance(caught.value, OSError)
        assert caught.value.fields["path"] == str(tmp_path / "a")
        assert caught.value.fields["got"] in (5000, "5000 bytes free")
        assert "6000 bytes" in str(caught.value) and "5000" in str(caught.value)
        assert files_in(tmp_path) == {}
    checkpointer.save_to({"w": torch.rand(1000)}, Target(storage=Full(str(tmp_path / "a"))))  # fits


# -- load


def template(**changes: Any) -> dict[str, Any]:
    got = state(7.0)
    got["model"] |= changes.pop("model", {})
    return got | changes


def without(key: str) -> dict[str, Any]:
    got = state(7.0)
    del got["model"][key]
    return got


BAD_TARGETS: dict[str, tuple[Callable[[], Any], type[ShardkeepError], list[str]]] = {
    "a key that is not stored": (
        lambda: template(model={"extra": torch.zeros(2)}),
        errors.MissingKey,
        ["'model.extra'", "strict=False"],
    ),
    "a value that is not stored": (lambda: template(epoch=None), errors.MissingKey, ["'epoch'"]),
    "a key that is not asked for": (
        lambda: without("b"),
        errors.UnexpectedKey,
        ["'model.b'", "strict=False"],
    ),
    "another shape": (
        lambda: template(model={"w": torch.zeros(4, 6)}),
        errors.Mismatch,
        ["'model.w'", "expected [4, 6]", "got [6, 4] in the checkpoint"],
    ),
    "another number of dimensions": (
        lambda: template(model={"w": torch.zeros(24)}),
        errors.Mismatch,
        ["'model.w'", "expected [24]", "got [6, 4] in the checkpoint"],
    ),
    "another dtype": (
        lambda: template(model={"w": torch.zeros(6, 4, dtype=torch.float16)}),
        errors.Mismatch,
        ["'model.w'", "expected float16", "got float32 in the checkpoint"],
    ),
    "a tensor for a value": (
        lambda: template(step=torch.zeros(2)),
        errors.MissingKey,
        ["'step'", "not a tensor"],
    ),
    "a value for a tensor": (lambda: template(model={"w": None}), errors.MissingKey, ["no value 'model.w'"]),
    "released memory": (released, errors.StorageReleased, ["'model.w'", "expected 96 bytes", "got 0 bytes"]),
    "no dict": (lambda: torch.zeros(2), errors.InvalidState, ["expected dict", "got Tensor"]),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_target_that_does_not_fit_is_left_as_it_was(tmp_path: Path, name: str) -> None:
    sk.save(state(1.0), tmp_path / "a")
    make, kind, says = BAD_TARGETS[name]
    got = make()
    before = snapshot(got) if name != "released memory" else None
    with pytest.raises(kind) as caught:
        sk.load(got, tmp_path / "a")
    assert isinstance(caught.value, InputError)
    for text in says:
        assert text in str(caught.value), str(caught.value)
    if before is not None:
        assert snapshot(got) == before


@pytest.mark.parametrize("name", ["another shape", "another dtype"])
def test_a_mismatch_is_none_the_less_one_without_strict(tmp_path: Path, name: str) -> None:
    sk.save(state(1.0), tmp_path / "a")
    got = BAD_TARGETS[name][0]()
    with pytest.raises(errors.Mismatch):
        sk.load(got, tmp_path / "a", strict=False)
    assert got["model"]["b"].tolist() == [7.0] * 4


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(tmp_path: Path) -> None:
    sk.save(state(1.0), tmp_path / "a")
    got = without("b") | {"epoch": 5}
    report = sk.load(got, tmp_path / "a", strict=False)
    assert (report.missing, report.unexpected) == (("epoch",), ("model.b",))
    assert (got["epoch"], got["step"], got["model"]["w"][0, 0]) == (5, 1, 1.0)


def nowhere(directory: Path) -> None:
    pass


def an_empty_directory(directory: Path) -> None:
    directory.mkdir()


def a_file(directory: Path) -> None:
    directory.write_bytes(b"x")


def other_files(directory: Path) -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"x")


def leftovers(directory: Path) -> None:
    sk.save(state(), directory)
    (directory / "shardkeep.json").unlink()
    (directory / ".metadata").unlink()


def the_root_of_a_run(directory: Path) -> None:
    with sk.Run(directory).step(1) as step:
        step.save("policy", state())


NO_CHECKPOINTS = [nowhere, an_empty_directory, a_file, other_files, leftovers, the_root_of_a_run]


@pytest.mark.parametrize("make", NO_CHECKPOINTS)
def test_a_path_without_a_checkpoint_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a"
    make(path)
    assert not sk.is_committed(path)
    got = state(7.0)
    for use in (lambda: sk.load(got, path), lambda: sk.inspect(path)):
        with pytest.raises(errors.NotCommitted) as caught:
            use()
        assert caught.value.fields["path"] == str(path)
        assert str(path) in str(caught.value) and caught.value.fields["remedy"]
    assert snapshot(got) == snapshot(state(7.0))


def data_file(directory: Path) -> Path:
    return next(directory.glob("*.distcp"))


def truncated(directory: Path) -> None:
    path = data_file(directory)
    os.truncate(path, path.stat().st_size - 1)


def deleted(directory: Path) -> None:
    data_file(directory).unlink()


def longer(directory: Path) -> None:
    with data_file(directory).open("ab") as file:
        file.write(b"\0")


def index_flipped(directory: Path) -> None:
    flip(next(directory.glob("*.index")), 50)


def index_deleted(directory: Path) -> None:
    next(directory.glob("*.index")).unlink()


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, deleted, longer, index_flipped, index_deleted])
def test_damage_that_sizes_and_digests_show_is_found_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    sk.save(state(1.0), tmp_path / "a")
    name = data_file(tmp_path / "a").name if damage in (truncated, deleted, longer) else ".index"
    damage(tmp_path / "a")
    got = state(7.0)
    with pytest.raises(errors.Corrupt) as caught:
        sk.load(got, tmp_path / "a")
    assert name in str(caught.value) and str(tmp_path / "a") in str(caught.value)
    assert "expected" in str(caught.value) and "got" in str(caught.value)
    assert snapshot(got) == snapshot(state(7.0))


def test_every_flipped_bit_of_the_data_is_found(tmp_path: Path) -> None:
    """In payloads and in frames alike; the message names file and chunk."""
    config = sk.Config(chunk_bytes=512, io_threads=1)
    sk.save(state(1.0), tmp_path / "a", config=config)
    path = data_file(tmp_path / "a")
    for position in range(0, path.stat().st_size, 61):
        flip(path, position)
        assert not sk.verify(tmp_path / "a").ok
        flip(path, position)
    assert sk.verify(tmp_path / "a").ok
    payload = path.read_bytes().index(np.full(24, 1.0, dtype=np.float32).tobytes())
    flip(path, payload + 5)
    with pytest.raises(errors.Corrupt, match="checksum") as caught:
        sk.load(state(7.0), tmp_path / "a")
    assert path.name in str(caught.value)
