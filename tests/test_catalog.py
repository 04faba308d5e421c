"""Which directory is committed, and by whom: the rules of docs/format.md, one test each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from craft import ATTEMPT, LATER, craft, flip
from shardkeep.catalog import Catalog, committed_manifest, is_committed, resolve
from shardkeep.errors import Corrupt, NotCommitted
from shardkeep.manifest import attempt_manifest_name, data_name, index_name
from shardkeep.storage import Storage, storage_for
from shardkeep.types import TensorInfo

STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def open_(directory: Path) -> Catalog:
    return resolve(storage_for(directory))


def committed(directory: Path) -> bool:
    return is_committed(storage_for(directory))


def write_dcp(directory: Path, value: float) -> None:
    dcp.save({"theirs": torch.full((4,), value)}, checkpoint_id=str(directory), no_dist=True)


def test_ours(tmp_path: Path) -> None:
    craft(tmp_path, STATE, objects={"step": 3}, fixed={".metadata": b"for others"})
    catalog = open_(tmp_path)
    assert committed(tmp_path)
    assert catalog.tensors == {
        "w": TensorInfo(dtype="float32", shape=(3, 4)),
        "b": TensorInfo(dtype="bfloat16", shape=(5,)),
    }
    assert catalog.objects == ["step"]
    assert catalog.dialect == "dcp" and catalog.common is None
    assert catalog.manifest is not None and catalog.manifest.attempt == ATTEMPT
    assert committed_manifest(storage_for(tmp_path)) == catalog.manifest
    assert set(catalog.files) == {data_name(0, ATTEMPT, 0), data_name(0, ATTEMPT, 1)}
    assert catalog.num_bytes() == 48 + 10 + catalog.items["step"][0].num_bytes


def test_ours_in_the_megatron_dialect_names_its_common_file(tmp_path: Path) -> None:
    craft(tmp_path, STATE, common={"iteration": 5})
    assert open_(tmp_path).common == f"shardkeep.{ATTEMPT}.common"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda d: None, "empty or does not exist"),
        (lambda d: d.mkdir(), "empty or does not exist"),
        (lambda d: d.write_text("x"), "not a directory"),
        (lambda d: (d.mkdir(), (d / "notes.txt").write_text("x")), "neither shardkeep.json nor .metadata"),
        (lambda d: craft(d, STATE, commit=False), "leftovers of a save that did not finish"),
        (
            lambda d: craft(d, STATE, commit=False, fixed={".metadata": b"died right after"}),
            "leftovers of a save that did not finish",
        ),
        (
            lambda d: (write_dcp(d, 1.0), (d / "common.pt").write_bytes(b"")),
            "common.pt without metadata.json",
        ),
        (
            lambda d: (write_dcp(d, 1.0), (d / "metadata.json").write_bytes(b"{")),
            "metadata.json cannot be read",
        ),
    ],
)
def test_nothing_committed_says_what_is_there(tmp_path: Path, prepare: object, says: str) -> None:
    directory = tmp_path / "here"
    prepare(directory)  # type: ignore[operator]
    assert not committed(directory)
    assert committed_manifest(storage_for(directory)) is None
    with pytest.raises(NotCommitted, match=re.escape(says)) as error:
        open_(directory)
    assert str(directory) in str(error.value)


def test_an_overwrite_that_died_before_its_manifest_leaves_the_old_one_committed(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"first"})
    craft(tmp_path, {"w": torch.zeros(9)}, attempt=LATER, commit=False, fixed={".metadata": b"second"})
    assert (tmp_path / ".metadata").read_bytes() == b"second"
    catalog = open_(tmp_path)
    assert catalog.manifest is not None and catalog.manifest.attempt == ATTEMPT
    assert catalog.tensors["w"].shape == (3, 4)


def test_an_overwrite_by_another_tool_makes_our_manifest_stale(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"ours"})
    write_dcp(tmp_path, 2.0)
    catalog = open_(tmp_path)
    assert committed(tmp_path)
    assert catalog.manifest is None and committed_manifest(storage_for(tmp_path)) is None
    assert list(catalog.tensors) == ["theirs"]


def test_a_fixed_name_file_that_people_edit_does_not_make_the_manifest_stale(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"ours", "config.json": b"{}"})
    (tmp_path / "config.json").write_text('{"edited": true}')
    (tmp_path / ".metadata").unlink()
    assert open_(tmp_path).manifest is not None


def test_a_step_reads_the_attempt_it_names_whatever_was_saved_since(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"first"})
    craft(tmp_path, {"w": torch.zeros(9)}, attempt=LATER, fixed={".metadata": b"second"})
    assert open_(tmp_path).tensors["w"].shape == (9,)
    old = resolve(storage_for(tmp_path), attempt_manifest_name(ATTEMPT))
    assert old.tensors["w"].shape == (3, 4)
    write_dcp(tmp_path, 3.0)
    assert resolve(storage_for(tmp_path), attempt_manifest_name(ATTEMPT)).tensors["w"].shape == (3, 4)
    with pytest.raises(NotCommitted):
        resolve(storage_for(tmp_path), "shardkeep.00000000000000000.json")


@pytest.mark.parametrize("number", [0, 1])
def test_a_data_file_that_is_missing_or_of_another_size_is_named(tmp_path: Path, number: int) -> None:
    manifest = craft(tmp_path, STATE, fixed={".metadata": b"ours"})
    name = data_name(0, ATTEMPT, number)
    size = manifest.files[name]
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1])
    assert not committed(tmp_path)
    with pytest.raises(Corrupt, match=rf"{name}.*expected {size} bytes, got {size - 1} bytes"):
        open_(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(Corrupt, match=rf"missing.*{name}"):
        open_(tmp_path)
    assert not committed(tmp_path)


def test_an_index_with_a_flipped_bit_is_corrupt(tmp_path: Path) -> None:
    craft(tmp_path, STATE)
    flip(tmp_path / index_name(ATTEMPT), 40)
    with pytest.raises(
        Corrupt, match=r"index's digest is wrong.*shardkeep\.\d+\.index.*expected \w{32}, got \w{32}"
    ):
        open_(tmp_path)


def test_a_bit_flip_anywhere_in_the_manifest_is_noticed(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"ours"})
    path = tmp_path / "shardkeep.json"
    whole = path.read_bytes()
    meaning = json.loads(whole)
    for offset in range(len(whole)):
        flip(path, offset)
        if not _says(path.read_bytes(), meaning):  # a flip in white space can leave the meaning as it was
            assert not committed(tmp_path), offset
            with pytest.raises(Corrupt, match=r"manifest.*shardkeep\.json"):
                open_(tmp_path)
        path.write_bytes(whole)
    assert committed(tmp_path)


def _says(data: bytes, meaning: object) -> bool:
    try:
        return bool(json.loads(data) == meaning)
    except ValueError:
        return False


def test_a_damaged_manifest_under_another_tools_checkpoint_does_not_hide_it(tmp_path: Path) -> None:
    craft(tmp_path, STATE, fixed={".metadata": b"ours"})
    flip(tmp_path / "shardkeep.json", 1)
    write_dcp(tmp_path, 4.0)
    assert list(open_(tmp_path).tensors) == ["theirs"]


class Replaced:
    """A storage in which a newer save commits, and removes the old files, between two looks of a reader."""

    def __init__(self, directory: Path) -> None:
        self._storage = storage_for(directory)
        self._directory = directory
        self._done = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def get(self, name: str) -> bytes:
        if name.endswith(".index") and not self._done:
            self._done = True
            craft(self._directory, {"new": torch.ones(3)}, attempt=LATER)
            for path in self._directory.glob(f"*{ATTEMPT}*"):
                path.unlink()
        return self._storage.get(name)


def test_a_reader_that_meets_a_replacement_gets_the_new_checkpoint(tmp_path: Path) -> None:
    craft(tmp_path, STATE)
    storage: Storage = Replaced(tmp_path)  # type: ignore[assignment]
    assert list(resolve(storage).tensors) == ["new"]
