"""What can be configured, with its reasons. The only place that reads `SHARDKEEP_*` environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of saves and loads. Every field can be overridden by `SHARDKEEP_<FIELD>` in the
    environment.
    """

    staging_bytes: int = 256 * MIB
    """Host memory per rank for copies on their way to or from storage; split into slots over the I/O
    threads.
    """
    io_threads: int = 0
    """Threads and files per rank; 0 takes the cores this process may use, at most 8."""
    chunk_bytes: int = 1 * MIB
    """Size of a checksum chunk and of a write."""
    split_bytes: int = 64 * MIB
    """A shard larger than this may be cut into several boxes so that the files of a rank balance."""
    checksum: str = "xxh3_128"
    """`xxh3_128`, or `none` to leave checksums out."""
    deadline_s: float = 600.0
    """Longest wait for another rank, in seconds; the error names the ranks that are missing."""
    durable: bool = True
    """fsync files and directories before committing."""
    vanilla_metadata: bool = True
    """Write `.metadata`, by which unmodified torch DCP and megatron-core read the checkpoint. Every rank of
    theirs unpickles all of it; docs/format.md says from which size on that hurts.
    """

    def __post_init__(self) -> None:
        for name in ("staging_bytes", "chunk_bytes", "split_bytes", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Config.{name} must be positive, got {getattr(self, name)}")
        if self.checksum not in ("xxh3_128", "none"):
            raise ValueError(f"Config.checksum must be 'xxh3_128' or 'none', got {self.checksum!r}")
        if self.io_threads < 0:
            raise ValueError(f"Config.io_threads must not be negative, got {self.io_threads}")
        if self.staging_bytes < 2 * self.num_threads * 4096:
            raise ValueError(
                f"Config.staging_bytes of {self.staging_bytes} gives {self.num_threads} threads no slot each"
            )

    @property
    def num_threads(self) -> int:
        return self.io_threads or min(8, len(os.sched_getaffinity(0)))

    @property
    def slot_bytes(self) -> int:
        """Two slots per thread: one is filled while the other is written. At most 16 MiB each."""
        return min(16 * MIB, self.staging_bytes // (2 * self.num_threads))


def resolve(config: Config | None) -> Config:
    """The given configuration with the environment's overrides applied."""
    config = config or Config()
    overrides: dict[str, Any] = {}
    for f in fields(Config):
        text = os.environ.get(f"SHARDKEEP_{f.name.upper()}")
        if text is not None:
            overrides[f.name] = _parse(f.name, text, getattr(config, f.name))
    return replace(config, **overrides) if overrides else config


def _parse(name: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
        return type(default)(text)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        raise ValueError(f"SHARDKEEP_{name.upper()}={text!r} is not a {type(default).__name__}") from None
