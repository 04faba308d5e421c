"""Fixtures and helpers that every test file shares.

`ranks` gives warm processes for multi-rank tests, `ray_local` a Ray of this machine alone. `require_tool`
skips a test whose command is missing on a developer's machine and fails it in CI, where a silent skip would
hide a lost guarantee.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

import shardkeep
from shardkeep import stage
from shardkeep.testing.cluster import ClusterPool

TESTS = Path(__file__).resolve().parent
SOURCES = Path(shardkeep.__file__).parents[1]  # the package under test, also where another one is installed

# An example takes as long as a busy machine makes it take.
settings.register_profile("shardkeep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardkeep")


def require_tool(name: str) -> str:
    """The path of command `name`. Without it: skips the test, or fails it when CI is set."""
    path = shutil.which(name)
    if path is None:
        message = f"{name} is not installed"
        if os.environ.get("CI"):
            pytest.fail(f"{message}; .ci/run is to install it")
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[ClusterPool]:
    """Rank processes that stay warm through the session: `ranks.run(world_size, function, *args)`."""
    with ClusterPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def ray_local() -> Iterator[ModuleType]:
    """`ray`, connected to a new cluster on this machine, whose workers can import the test modules."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,  # a count of slots: the actors of these tests mostly wait
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": f"{TESTS}{os.pathsep}{SOURCES}", "OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The Ray tests first: one group, since there is one Ray at a time, and the longest that a worker has."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of all buffers that staging has asked for; freed ones as negative numbers."""
    made: list[int] = []
    allocate, free = stage.allocate, stage.free

    def counted_allocate(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return allocate(num_bytes)

    def counted_free(buffer: torch.Tensor) -> None:
        made.append(-buffer.numel())
        free(buffer)

    monkeypatch.setattr(stage, "allocate", counted_allocate)
    monkeypatch.setattr(stage, "free", counted_free)
    yield made
