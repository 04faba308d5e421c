"""The goals: what the design asks for, what was reached, and the verdict.

A row that does not apply on this device is left out; one whose contestant is not there says "absent" and
decides nothing; one whose peer failed, or whose value misses the goal, makes the run fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkeep.bench import bare, ours, peers
from shardkeep.bench.contestant import Samples, by_name, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One goal. `sense` is ">=" or "<=", between what was reached and the target; both are in `unit`."""

    what: str
    target: float
    sense: str
    reached: float | None
    unit: str = "x"
    note: str = ""
    error: str | None = None
    """Why there is nothing to judge by, if something broke."""

    @property
    def verdict(self) -> str:
        if self.reached is None:
            return "failed" if self.error else "absent"
        is_met = self.reached >= self.target if self.sense == ">=" else self.reached <= self.target
        return "met" if is_met else "missed"

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("missed", "failed")


def of_speed(samples: Sequence[Samples], device: str) -> list[Row]:
    """Goals of section `speed`."""
    return _on_cuda(samples) if device == "cuda" else _on_cpu(samples)


def _on_cpu(samples: Sequence[Samples]) -> list[Row]:
    return [
        faster(samples, "save", bare.BARE, 0.75),
        faster(samples, "save", peers.DCP, 2.5),
        faster(samples, "save", peers.MEGATRON, 3.0),
        faster(samples, "load", bare.BARE, 0.7),
        faster(samples, "load", peers.DCP, 3.0),
    ]


def _on_cuda(samples: Sequence[Samples]) -> list[Row]:
    return [
        _stall_of_snapshot(samples),
        _stall_of_lazy(samples),
        faster(samples, "save", bare.BARE, 0.75),
        *(faster(samples, "save", peer, 8.0) for peer in (peers.DCP, peers.DCP_THREADS, peers.MEGATRON)),
        *(faster(samples, "load", peer, 6.0) for peer in (peers.DCP, peers.MEGATRON)),
    ]


def _stall_of_snapshot(samples: Sequence[Samples]) -> Row:
    found = by_name(samples)
    snapshot, copy = found.get(ours.SNAPSHOT), found.get(bare.PINNED_COPY)
    return Row(
        what="stall of a snapshot / pinned copy of the same bytes",
        target=1.15,
        sense="<=",
        reached=ratio(snapshot, copy, "stall", "save"),
        note=f"first {snapshot.cold['stall']:.3f} s" if snapshot and not snapshot.failed else "",
        error=_error(snapshot, copy),
    )


def _stall_of_lazy(samples: Sequence[Samples]) -> Row:
    lazy = by_name(samples).get(ours.LAZY)
    stall_s = lazy.median_s("stall") if lazy else None
    return Row(
        what="stall of a lazy save",
        target=10.0,
        sense="<=",
        reached=None if stall_s is None else stall_s * 1e3,
        unit="ms",
        error=_error(lazy),
    )


def faster(samples: Sequence[Samples], operation: str, peer: str, target: float, what: str = "") -> Row:
    """How many times the peer's speed ours is."""
    found = by_name(samples)
    us, them = found.get(ours.SYNC), found.get(peer)
    error = _error(us, them)
    return Row(
        what=f"{what}{operation}, speed / {peer}",
        target=target,
        sense=">=",
        reached=ratio(them, us, operation),
        note=f"cold {them.cold[operation] / us.cold[operation]:.2f}x" if us and them and not error else "",
        error=error,
    )


def _error(*samples: Samples | None) -> str | None:
    return next((f"{each.name}: {each.failed}" for each in samples if each and each.failed), None)
