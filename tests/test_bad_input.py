"""Bad input, for save and load: the error's class, what its message names, and that nothing has changed.

What depends on several ranks is in test_save; damage of every kind in test_verify.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep import errors
from shardkeep.errors import InputError, ShardkeepError


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
    with pytest.raises(ValueError, match="capture must be 'snapshot', got 'magic'"):
        sk.save_async(state(), tmp_path / "a", capture="magic")


def test_registered_classes_can_be_stored(tmp_path: Path) -> None:
    """What the message recommends works."""
    with torch.serialization.safe_globals([Mode]):
        sk.save({"mode": Mode.TRAIN}, tmp_path / "a")
        got: dict[str, Any] = {"mode": None}
        sk.load(got, tmp_path / "a")
    assert got == {"mode": Mode.TRAIN}


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
