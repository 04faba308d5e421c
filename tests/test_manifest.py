"""Index and manifest: they come back as they went, damage of any kind is Corrupt, names are told apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import manifest as m
from shardkeep.errors import Corrupt
from shardkeep.types import Box, Index, Item, Manifest, StoredFile, TensorInfo

ATTEMPT = "17000000000001234"
INDEX = Index(
    format_version=1,
    attempt=ATTEMPT,
    dialect="dcp",
    checksum="xxh3_128",
    chunk_bytes=4096,
    tensors={"w": TensorInfo(dtype="bfloat16", shape=(4, 3)), "s": TensorInfo(dtype="float32", shape=())},
    items=[
        Item(
            key="w",
            kind="tensor",
            dtype="bfloat16",
            box=Box(offset=(2, 0), shape=(2, 3)),
            file=m.data_name(0, ATTEMPT, 0),
            offset=0,
            length=700,
            payload_offset=576,
            num_bytes=12,
        )
    ],
    files={m.data_name(0, ATTEMPT, 0): StoredFile(size=700, checksums=bytes(range(16)))},
    paths={"layers.0.w": ("layers", 0, "w")},
    fixed={".metadata": "00ff"},
)
MANIFEST = Manifest(
    format_version=1,
    attempt=ATTEMPT,
    dialect="megatron",
    step=100,
    versions={"shardkeep": "0.1.0", "torch": "2.13.0", "megatron": None},
    layout={"world_size": 4, "tp": 2},
    totals={"num_bytes": 12, "num_items": 1, "num_files": 2},
    files={m.data_name(0, ATTEMPT, 0): 700, m.index_name(ATTEMPT): 512},
    index_digest="ab" * 16,
    fixed={"common.pt": "cd" * 16},
)


def test_an_index_comes_back_as_it_went() -> None:
    assert m.decode_index(m.encode_index(INDEX), "p") == INDEX


def test_a_manifest_comes_back_sealed() -> None:
    sealed = m.seal(MANIFEST)
    assert m.decode_manifest(m.encode_manifest(MANIFEST), "p") == sealed
    assert m.encode_manifest(sealed) == m.encode_manifest(MANIFEST)


def test_the_digest_is_that_of_the_format_page() -> None:
    """Hex xxh3_128 of the object as canonical JSON (sorted keys, no spaces) without `digest`."""
    raw = json.loads(m.encode_manifest(MANIFEST))
    digest = raw.pop("digest")
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    assert digest == xxhash.xxh3_128_hexdigest(canonical)
    assert set(raw) == {
        *("format_version", "attempt", "dialect", "step", "versions", "layout", "totals"),
        *("files", "index_digest", "fixed"),
    }


def test_every_flipped_byte_is_found() -> None:
    data = m.encode_manifest(MANIFEST)
    original, found = m.decode_manifest(data, "p"), 0
    for position in range(len(data)):
        for bit in (0x01, 0x20):
            damaged = bytearray(data)
            damaged[position] ^= bit
            try:
                assert m.decode_manifest(bytes(damaged), "p") == original  # white space
            except Corrupt:
                found += 1
    assert found > len(data)


def test_every_truncation_is_found() -> None:
    data = m.encode_manifest(MANIFEST).rstrip()
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            m.decode_manifest(data[:length], "p")
    index = m.encode_index(INDEX)
    for length in range(len(index)):
        with pytest.raises(Corrupt):
            m.decode_index(index[:length], "p")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'{"digest": 1}',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"1" * 6000,
    ],
    ids=[
        "empty",
        "null",
        "list",
        "number",
        "wrong type",
        "not utf-8",
        "deep lists",
        "deep objects",
        "long number",
    ],
)
def test_what_is_no_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="manifest cannot be read") as caught:
        m.decode_manifest(data, "/runs/a/shardkeep.json")
    assert caught.value.fields["path"] == "/runs/a/shardkeep.json"


@given(st.binary(max_size=200))
def test_what_is_no_index_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        m.decode_index(data, "p")


@pytest.mark.parametrize("data", [b"\x91" * 200_000, b"\x81\xa5files" * 50_000], ids=["lists", "maps"])
def test_a_deeply_nested_index_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        m.decode_index(data, "p")


def test_a_newer_format_says_so() -> None:
    with pytest.raises(Corrupt, match=r"unknown format version.*expected 1, got 2.*upgrade"):
        m.decode_manifest(m.encode_manifest(replace(MANIFEST, format_version=2)), "p")
    with pytest.raises(Corrupt, match=r"unknown format version.*expected 1, got 2.*upgrade"):
        m.decode_index(m.encode_index(replace(INDEX, format_version=2)), "p")


def test_data_names_are_what_frameworks_parse() -> None:
    name = m.data_name(12, ATTEMPT, 7)
    assert name == "__12_17000000000001234007.distcp"
    assert re.fullmatch(r"__(\d+)_\d+\.distcp", name)


ATTEMPT_FILES = (m.data_name(0, ATTEMPT, 0), "__3_1.distcp", m.index_name(ATTEMPT), m.common_name(ATTEMPT))
ATTEMPT_FILES += (m.attempt_manifest_name(ATTEMPT), m.nonce_name(ATTEMPT), "shardkeep.json.shardkeep-tmp")
OTHER_FILES = ("shardkeep.json", "shardkeep.step.json", "common.pt", ".metadata", "metadata.json")
OTHER_FILES += ("tokenizer.json", "__0_a.distcp", "x__0_1.distcp", "shardkeep.1.index", "__0_1.distcp.bak")


def test_attempt_files_are_told_from_others() -> None:
    assert [n for n in (*ATTEMPT_FILES, *OTHER_FILES) if m.is_attempt_file(n)] == list(ATTEMPT_FILES)
