"""Index and manifest <-> bytes, and the names of files. Pure: no I/O.

The index is msgpack, the manifest canonical JSON with a digest of itself; docs/format.md has every field.
Decoding validates types and structure and raises `Corrupt`; nothing here runs a pickle.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import TypeVar

import msgspec
import xxhash

from shardkeep.errors import Corrupt
from shardkeep.storage import TEMPORARY
from shardkeep.types import Index, Manifest

FORMAT_VERSION = 1
MANIFEST = "shardkeep.json"
STEP_MANIFEST = "shardkeep.step.json"

FIXED_NAMES = ("common.pt", ".metadata", "metadata.json")  # what vanilla readers look for

_VANILLA = re.compile(r"__\d+_\d+\.distcp")
_WITH_ATTEMPT = re.compile(r"__\d+_(\d{17})\d{3}\.distcp|shardkeep\.(\d{17})\.(?:index|common|json|nonce)")

T = TypeVar("T")


def data_name(rank: int, attempt: str, number: int) -> str:
    """`__<rank>_<attempt><number:03d>.distcp`, the shape that frameworks parse."""
    return f"__{rank}_{attempt}{number:03d}.distcp"


def index_name(attempt: str) -> str:
    return f"shardkeep.{attempt}.index"


def common_name(attempt: str) -> str:
    return f"shardkeep.{attempt}.common"


def attempt_manifest_name(attempt: str) -> str:
    return f"shardkeep.{attempt}.json"


def nonce_name(attempt: str) -> str:
    return f"shardkeep.{attempt}.nonce"


def is_attempt_file(name: str) -> bool:
    """Whether a name is one that attempts (ours or vanilla's) write, so that a later commit may remove it."""
    return attempt_of(name) is not None or _VANILLA.fullmatch(name) is not None or name.endswith(TEMPORARY)


def attempt_of(name: str) -> str | None:
    """The attempt that a file name carries, or None: then no attempt of ours writes it. Ids of later attempts
    are greater."""
    found = _WITH_ATTEMPT.fullmatch(name.removesuffix(TEMPORARY))
    return (found[1] or found[2]) if found else None


def is_reserved(name: str) -> bool:
    """Whether a name has a meaning in the format, so that nothing else may be called so."""
    return name in FIXED_NAMES or name.startswith("shardkeep.") or is_attempt_file(name)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encode_index(index: Index) -> bytes:
    return msgspec.msgpack.encode(index)


def decode_index(data: bytes, path: str) -> Index:
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        RecursionError,
    ) as e:  # deeply nested: nothing of ours is
        raise Corrupt(f"the index cannot be read: {e}", path=path) from e
    _check_version(index.format_version, path)
    return index


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest with its own digest filled in."""
    return sealed(asdict(manifest))


def decode_manifest(data: bytes, path: str) -> Manifest:
    return unsealed(data, Manifest, path)


def seal(manifest: Manifest) -> Manifest:
    """The manifest with `digest` set, as its readers will see it."""
    return replace(manifest, digest=_self_digest(asdict(manifest)))


def with_fixed(index: Index, fixed: dict[str, str]) -> Index:
    """The index with the digests of its fixed-name files, which are made from it."""
    return replace(index, fixed=fixed)


def sealed(record: dict[str, object]) -> bytes:
    """A JSON object, indented for people, with a `digest` of its canonical form."""
    return json.dumps(record | {"digest": _self_digest(record)}, sort_keys=True, indent=1).encode() + b"\n"


def unsealed(data: bytes, kind: type[T], path: str) -> T:
    """Decode what `sealed` made into the dataclass `kind`; `Corrupt` if a byte of meaning changed."""
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict):
            raise TypeError("not an object")
        record = msgspec.convert(raw, kind)
    except (ValueError, TypeError, RecursionError) as e:  # msgspec's and json's errors are ValueErrors
        raise Corrupt(f"the manifest cannot be read: {e}", path=path) from e
    expected = _self_digest(raw)
    if raw.get("digest") != expected:
        raise Corrupt("the manifest's digest is wrong", path=path, expected=expected, got=raw.get("digest"))
    _check_version(raw.get("format_version"), path)
    return record


def _self_digest(record: dict[str, object]) -> str:
    body = {k: v for k, v in record.items() if k != "digest"}
    return digest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _check_version(version: object, path: str) -> None:
    if version != FORMAT_VERSION:
        raise Corrupt(
            "unknown format version",
            path=path,
            expected=FORMAT_VERSION,
            got=version,
            remedy="A newer shardkeep wrote this; upgrade to read it.",
        )
