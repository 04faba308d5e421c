"""What can be configured, with its reasons. The only place that reads `SHARDKEEP_*` environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from shardkeep import budget

MIB = 1 << 20

# The ring when nobody has chosen: enough for full slots for 8 threads, and no more than a sixteenth of
# a rank's part of what is free, so that a small machine keeps its memory for training.
_STAGING_BYTES = 256 * MIB
_STAGING_PART_OF_FREE = 16
_LEAST_AUTOMATIC_SLOT_BYTES = 64 << 10
_LEAST_SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of saves and loads. Every field can be overridden by `SHARDKEEP_<FIELD>` in the
    environment.
    """

    staging_bytes: int = 0
    """Host memory per rank for copies on their way to or from storage; split into slots over the I/O
    threads. 0 chooses once per process: 256 MiB, or less where that is more than a sixteenth of this rank's
    part of the node's free memory.
    """
    io_threads: int = 0
    """Threads and files per rank; 0 takes the cores this process may use, at most 8."""
    chunk_bytes: int = 4 * MIB
    """Size of a checksum chunk, the least that a load reads. Background saves take at least 8 MiB."""
    split_bytes: int = 64 * MIB
    """A shard larger than this may be cut into several boxes so that the files of a rank balance."""
    checksum: str = "xxh3_128"
    """`xxh3_128`, or `none` to leave checksums out."""
    deadline_s: float = 600.0
    """Longest wait for another rank, in seconds; the error names the ranks that are missing."""
    read_once: str = "auto"
    """Whether a load reads each byte that several ranks need from storage once and sends it to the others:
    `on`, `off`, or `auto`, which is on for network file systems. Rank 0's setting counts.
    """
    check_capture: bool = False
    """For debugging: a lazy save reads the state twice and fails if anything has changed it in between. The
    first reading holds training."""
    durable: bool = True
    """fsync files and directories before committing."""
    vanilla_metadata: bool = True
    """Write `.metadata`, by which unmodified torch DCP and megatron-core read the checkpoint. Every rank of
    theirs unpickles all of it; docs/format.md says from which size on that hurts.
    """

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "split_bytes", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Config.{name} must be positive, got {getattr(self, name)}")
        for name in ("staging_bytes", "io_threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"Config.{name} must not be negative, got {getattr(self, name)}")
        if self.checksum not in ("xxh3_128", "none"):
            raise ValueError(f"Config.checksum must be 'xxh3_128' or 'none', got {self.checksum!r}")
        if self.read_once not in ("auto", "on", "off"):
            raise ValueError(f"Config.read_once must be 'auto', 'on' or 'off', got {self.read_once!r}")
        least = 2 * self.num_threads * _LEAST_SLOT_BYTES
        if 0 < self.staging_bytes < least:
            raise ValueError(
                f"Config.staging_bytes of {self.staging_bytes} is too small: {self.num_threads} threads with "
                f"two slots of {_LEAST_SLOT_BYTES} bytes each need {least}. Raise it, lower io_threads, or "
                "leave it 0."
            )

    @property
    def num_threads(self) -> int:
        return self.io_threads or min(8, len(os.sched_getaffinity(0)))

    @property
    def slot_bytes(self) -> int:
        """Size of a slot where the caller waits for the I/O."""
        return self.slot_of(16 * MIB)

    def slot_of(self, most_bytes: int) -> int:
        """Two slots per thread: one is filled while the other is written. At most `most_bytes` each. Before
        `resolve`, an automatic ring counts as a large machine's.
        """
        return min(most_bytes, (self.staging_bytes or _STAGING_BYTES) // (2 * self.num_threads))


def cores_per_rank() -> int:
    """Cores that this process may use, shared fairly with the other ranks of its node."""
    return len(os.sched_getaffinity(0)) // budget.local_ranks()


def beside_training(config: Config) -> Config:
    """The configuration of a save that runs in the background: it should cost the training thread little
    rather than end soon. Threads that were asked for stay.
    """
    chunk_bytes = max(config.chunk_bytes, 8 * MIB)
    return replace(
        config, io_threads=config.io_threads or min(2, config.num_threads), chunk_bytes=chunk_bytes
    )


def resolve(config: Config | None) -> Config:
    """`overridden`, and what is automatic chosen for this process."""
    config = overridden(config)
    return config if config.staging_bytes else replace(config, staging_bytes=_automatic_staging(config))


def overridden(config: Config | None) -> Config:
    """The given configuration with the environment's overrides applied."""
    config = config or Config()
    overrides: dict[str, Any] = {}
    for f in fields(Config):
        text = os.environ.get(f"SHARDKEEP_{f.name.upper()}")
        if text is not None:
            overrides[f.name] = _parse(f.name, text, getattr(config, f.name))
    return replace(config, **overrides) if overrides else config


def _automatic_staging(config: Config) -> int:
    return max(_staging_part(), 2 * config.num_threads * _LEAST_AUTOMATIC_SLOT_BYTES)


@lru_cache
def _staging_part() -> int:
    """Once per process: a ring of another size would be another ring."""
    return min(
        _STAGING_BYTES, budget.free_bytes().num_bytes // (budget.local_ranks() * _STAGING_PART_OF_FREE)
    )


def _parse(name: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
        return type(default)(text)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        raise ValueError(f"SHARDKEEP_{name.upper()}={text!r} is not a {type(default).__name__}") from None
