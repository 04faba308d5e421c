"""Checksums of chunks: the same on a thread of their own, and no memory in use after an error."""

from __future__ import annotations

import random
import threading

import pytest
import xxhash

from shardkeep.hashing import Hasher, HasherBeside

DATA = random.Random(1).randbytes(50_001)


@pytest.mark.parametrize("kind", [Hasher, HasherBeside])
@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 50_001, 1 << 20])
def test_checksums_do_not_depend_on_how_the_bytes_come(kind: type[Hasher], chunk_bytes: int) -> None:
    hasher, rng, at = kind(chunk_bytes), random.Random(2), 0
    while at < len(DATA):
        parts = []
        for _ in range(rng.randrange(4)):
            num_bytes = rng.randrange(5000)
            parts.append(memoryview(DATA)[at : at + num_bytes])
            at += num_bytes
        with hasher.along(parts):
            pass
    hasher.close()
    chunks = [DATA[i : i + chunk_bytes] for i in range(0, len(DATA), chunk_bytes)]
    assert hasher.checksums() == b"".join(xxhash.xxh3_128_digest(c) for c in chunks)


@pytest.mark.parametrize("kind", [Hasher, HasherBeside])
def test_no_checksums_if_none_are_asked_for(kind: type[Hasher]) -> None:
    hasher = kind(1000, "none")
    with hasher.along([DATA]):
        pass
    hasher.close()
    assert hasher.checksums() == b""


def test_an_error_of_the_write_is_raised_when_the_bytes_are_no_longer_read() -> None:
    hasher, let_go = HasherBeside(1000), threading.Event()
    update = hasher.update

    def slow_update(parts: object) -> None:
        let_go.wait(0.2)
        update([DATA])
        let_go.set()

    hasher.update = slow_update  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk"), hasher.along([DATA]):
        raise OSError("disk")
    assert let_go.is_set()
    hasher.close()


def test_an_error_of_the_hash_is_raised_and_the_thread_ends() -> None:
    hasher = HasherBeside(1000)
    with pytest.raises(TypeError), hasher.along([object()]):  # type: ignore[list-item]
        pass
    with hasher.along([DATA]):
        pass
    hasher.close()
    assert not [t for t in threading.enumerate() if t.name == "shardkeep-hash"]
