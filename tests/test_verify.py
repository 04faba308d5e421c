"""verify: each kind of damage is a line that names it, and a good checkpoint has none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from craft import ATTEMPT, CHUNK, craft, flip, grid
from shardkeep.errors import NotCommitted
from shardkeep.manifest import (
    attempt_manifest_name,
    data_name,
    decode_index,
    decode_manifest,
    digest,
    encode_index,
    encode_manifest,
    index_name,
)
from shardkeep.types import Box, Index, TensorInfo
from shardkeep.verify import verify

FILE = data_name(0, ATTEMPT, 0)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def good(directory: Path, **more: Any) -> None:
    w = torch.arange(6000.0).reshape(60, 100)
    craft(
        directory, {"w": (w, grid((60, 100), (2, 3))), "s": torch.tensor(1), "e": torch.empty(0, 3)}, **more
    )


def test_a_good_checkpoint_has_no_problems(tmp_path: Path) -> None:
    good(tmp_path, objects={"step": 3}, fixed={".metadata": b"m"})
    report = verify(tmp_path)
    assert report.ok and report.problems == () and report.checksums
    assert report.num_files == 2
    assert report.num_bytes == sum((tmp_path / data_name(0, ATTEMPT, n)).stat().st_size for n in (0, 1))


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted):
        verify(tmp_path / "nowhere")


def test_a_flipped_bit_anywhere_in_a_data_file_is_named_with_its_chunk(tmp_path: Path) -> None:
    good(tmp_path)
    path = tmp_path / FILE
    size = path.stat().st_size
    for offset in [*range(0, size, 1301), size - 1]:
        flip(path, offset, offset % 8)
        (line,) = verify(tmp_path).problems
        assert re.search(rf"{FILE}.*chunk {offset // CHUNK}\b.*expected \w{{32}}, got \w{{32}}", line)
        flip(path, offset, offset % 8)
    assert verify(tmp_path).ok


def test_every_bad_chunk_is_named(tmp_path: Path) -> None:
    good(tmp_path)
    for chunk in (0, 2):
        flip(tmp_path / FILE, chunk * CHUNK + 7)
    flip(tmp_path / data_name(0, ATTEMPT, 1), 1)
    lines = verify(tmp_path).problems
    assert len(lines) == 3
    assert [("chunk 0" in x, "chunk 2" in x) for x in lines] == [(True, False), (False, True), (True, False)]


def test_truncated_grown_and_missing_files(tmp_path: Path) -> None:
    good(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    os.truncate(tmp_path / FILE, size - 5)
    (line,) = verify(tmp_path).problems
    assert FILE in line and f"expected {size} bytes, got {size - 5} bytes" in line
    os.truncate(tmp_path / FILE, size + 5)
    assert f"expected {size} bytes, got {size + 5} bytes" in verify(tmp_path).problems[0]
    (tmp_path / FILE).unlink()
    assert "missing" in verify(tmp_path).problems[0] and FILE in verify(tmp_path).problems[0]


def test_index_manifest_and_fixed_names(tmp_path: Path) -> None:
    good(tmp_path, fixed={".metadata": b"m", "config.json": b"{}"})
    (tmp_path / "config.json").write_bytes(b"[]")
    (line,) = verify(tmp_path).problems
    assert "'config.json'" in line and f"expected {digest(b'{}')}, got {digest(b'[]')}" in line
    (tmp_path / "config.json").unlink()
    assert verify(tmp_path).problems == (
        f"a file for other readers was changed (file 'config.json'): expected {digest(b'{}')}, got no file",
    )
    (tmp_path / "config.json").write_bytes(b"{}")
    flip(tmp_path / index_name(ATTEMPT), 30)
    (line,) = verify(tmp_path).problems
    assert index_name(ATTEMPT) in line and "digest is wrong" in line
    flip(tmp_path / index_name(ATTEMPT), 30)
    flip(tmp_path / "shardkeep.json", 50)
    (line,) = verify(tmp_path).problems
    assert "shardkeep.json" in line


def edited(directory: Path, edit: Callable[[Index], Index]) -> None:
    """Replace the index by an edited one with all digests right, as a writer with a bug would leave it."""
    path = directory / index_name(ATTEMPT)
    data = encode_index(edit(decode_index(path.read_bytes(), "")))
    path.write_bytes(data)
    manifest = decode_manifest((directory / "shardkeep.json").read_bytes(), "")
    manifest = replace(
        manifest, files=manifest.files | {path.name: len(data)}, index_digest=digest(data), digest=""
    )
    for name in ("shardkeep.json", attempt_manifest_name(ATTEMPT)):
        (directory / name).write_bytes(encode_manifest(manifest))


def item(index: Index, number: int, **changes: Any) -> Index:
    items = list(index.items)
    items[number] = replace(items[number], **changes)
    return replace(index, items=items)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda i: replace(i, items=i.items[1:]),
            r"gap \(key 'w', missing \[0:30, 0:33\]\): expected 6000 .* got 5010",
        ),
        (
            lambda i: item(i, 1, box=Box(offset=(0, 32), shape=(30, 33))),
            r"overlap \(key 'w'\).*\[0:30, 0:33\] and \[0:30, 32:65\]",
        ),
        (
            lambda i: item(i, 5, box=Box(offset=(31, 66), shape=(30, 34))),
            r"outside its tensor \(key 'w'\): expected inside \[60, 100\], got \[31:61, 66:100\]",
        ),
        (
            lambda i: item(i, 2, box=Box(offset=(0,), shape=(1020,))),
            r"dimensions than its tensor \(key 'w'\): expected 2",
        ),
        (lambda i: item(i, 2, offset=i.items[2].offset - 9), r"items overlap in a file .*'w' and 'w'"),
        (
            lambda i: item(i, 6, length=1 << 20),
            rf"past the end .*{FILE}.*'s'.*expected at least \d+ bytes, got \d+",
        ),
        (lambda i: item(i, 0, payload_offset=1 << 20), r"payload lies outside it .*'w'"),
        (lambda i: item(i, 0, num_bytes=8), r"wrong size .*'w'.*expected 3960, got 8"),
        (lambda i: item(i, 0, dtype="int32"), r"dtype differs.*'w'.*expected float32, got int32"),
        (lambda i: item(i, 6, key="ghost"), r"belongs to no tensor .*'ghost'"),
        (
            lambda i: replace(i, tensors=i.tensors | {"lost": TensorInfo(dtype="int8", shape=(4,))}),
            r"'lost'.*\[0:4\]",
        ),
        (
            lambda i: replace(
                i, files={k: replace(v, checksums=v.checksums[16:]) for k, v in i.files.items()}
            ),
            rf"number of checksums \(file '{FILE}'\): expected \d+, got \d+",
        ),
    ],
)
def test_a_writers_mistake_is_found(tmp_path: Path, edit: Callable[[Index], Index], says: str) -> None:
    good(tmp_path)
    edited(tmp_path, edit)
    problems = verify(tmp_path).problems
    assert any(re.search(says, line) for line in problems), problems


def test_without_checksums_only_structure_is_checked(tmp_path: Path) -> None:
    good(tmp_path, checksum="none")
    flip(tmp_path / FILE, 1000)
    report = verify(tmp_path)
    assert report.ok and not report.checksums


def test_a_foreign_checkpoint_is_checked_for_structure(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(300), "v": torch.ones(4), "n": 3}, checkpoint_id=str(tmp_path), no_dist=True)
    report = verify(tmp_path)
    assert report.ok and not report.checksums and report.num_files == 1
    path = tmp_path / "__0_0.distcp"
    size = path.stat().st_size
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PK\x05\x06", b"PK\x00\x00"))
    lines = verify(tmp_path).problems
    assert len(lines) == 2 and all("not a torch.save archive" in x and "__0_0.distcp" in x for x in lines)
    path.write_bytes(data[:-10])
    assert any(f"at least {size} bytes, got {size - 10} bytes" in x for x in verify(tmp_path).problems)
    path.unlink()
    assert any("missing" in x and "__0_0.distcp" in x for x in verify(tmp_path).problems)


def test_the_index_is_plain_msgpack(tmp_path: Path) -> None:
    """The format page's claim: any msgpack reader sees the documented fields."""
    good(tmp_path)
    raw = msgspec.msgpack.decode((tmp_path / index_name(ATTEMPT)).read_bytes())
    assert sorted(raw) == [
        "attempt",
        "checksum",
        "chunk_bytes",
        "dialect",
        "files",
        "fixed",
        "format_version",
        "items",
        "paths",
        "tensors",
    ]
