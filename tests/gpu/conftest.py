"""Fixtures of the GPU tests. Without a GPU all of them skip: `python -m pytest tests/gpu`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A new directory in memory, where gigabytes are quick."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shardkeep-gpu-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
