"""Contestants and how they are compared: cold once, then in rounds whose order rotates.

In:  ways to save and load the same state.
Out: `Samples` of each: seconds by operation, peak memory, or why it failed.
Fair: all write the same bytes into a directory that is new each time; clearing it is not timed; noise hits
      all alike, since a ratio is the median of each round's own ratio. What the first call loads is compared
      with what it saved; a difference ends the run.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardkeep.bench.machine import PeakMemory, synchronize

State = dict[str, torch.Tensor]


class WrongBytes(RuntimeError):
    """What was loaded is not what was saved."""


@dataclass(kw_only=True, slots=True)
class Samples:
    """Seconds of the first call (`cold`) and of the rounds (`warm`), by operation: save, stall, load.

    `peak_bytes`: most memory held on top during the first call, by operation. `failed` says why there is
    nothing to compare with.
    """

    name: str
    note: str
    cold: dict[str, float] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failed: str | None = None

    def median_s(self, operation: str) -> float | None:
        """Median of the warm seconds; None where this one does not do the operation."""
        return statistics.median(self.warm[operation]) if self.warm.get(operation) else None


@dataclass(kw_only=True, slots=True)
class Contestant:
    """A way to save and load. `save` returns the seconds for which it held the caller where those are not
    all. `load` fills the target; `times_load` is off where another contestant's is the same, `is_checked`
    where it fills something else. `keeps`: what has to live as long.
    """

    name: str
    note: str
    save: Callable[[Path], float | None]
    load: Callable[[Path], None] | None = None
    times_load: bool = True
    is_checked: bool = True
    keeps: list[object] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Field:
    """The state, what loads fill, and the ranks that take part. `meet` is a barrier over all of them;
    `agree` gives the first rank's failure to all.
    """

    state: State
    target: State
    directory: Path
    device: str
    rank: int = 0
    meet: Callable[[], None] = lambda: None
    agree: Callable[[str | None], str | None] = lambda failure: failure

    def clear(self) -> None:
        """Remove what the last save left; on all ranks at once."""
        self.meet()
        if self.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.meet()


def measure(contestants: Sequence[Contestant], field: Field, num_rounds: int) -> list[Samples]:
    """Run all; a contestant that fails at its first call is left out of the rounds and says why."""
    samples = {each.name: Samples(name=each.name, note=each.note) for each in contestants}
    runners = []
    for each in contestants:
        failure = None
        try:
            _cold(each, field, samples[each.name])
        except (WrongBytes, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a peer's failure must not end the run; DCP's errors are no `Exception`
            failure = f"{type(e).__name__}: {' '.join(str(e).split())[-300:]}"  # the cause comes last
        samples[each.name].failed = field.agree(failure)
        runners += [] if samples[each.name].failed else [each]
    for number in range(num_rounds):
        first = number % max(1, len(runners))
        for each in runners[first:] + runners[:first]:
            for operation, seconds in _run(each, field).items():
                samples[each.name].warm.setdefault(operation, []).append(seconds)
    field.clear()
    return list(samples.values())


def _cold(contestant: Contestant, field: Field, samples: Samples) -> None:
    for tensor in field.target.values():
        tensor.zero_()
    samples.cold = _run(contestant, field, samples.peak_bytes, always_load=True)
    if contestant.load and contestant.is_checked:
        wrong = [key for key in field.state if not torch.equal(field.state[key], field.target[key])]
        if wrong:
            raise WrongBytes(f"{contestant.name} did not load what it saved, first: {wrong[0]}")


def _run(
    contestant: Contestant, field: Field, peaks: dict[str, int] | None = None, always_load: bool = False
) -> dict[str, float]:
    """Seconds by operation of one save and load."""
    field.clear()
    seconds: dict[str, float] = {}
    stall_s = _timed("save", lambda: contestant.save(field.directory), field, seconds, peaks)
    if stall_s is not None:
        seconds["stall"] = stall_s
    load = contestant.load
    if load and (contestant.times_load or always_load):
        _timed("load", lambda: load(field.directory), field, seconds, peaks)
        if not contestant.times_load:
            del seconds["load"]
    return seconds


def _timed(
    operation: str,
    work: Callable[[], float | None],
    field: Field,
    seconds: dict[str, float],
    peaks: dict[str, int] | None,
) -> float | None:
    def run() -> float | None:
        synchronize(field.device)
        field.meet()
        start = time.perf_counter()
        stall_s = work()
        synchronize(field.device)
        seconds[operation] = time.perf_counter() - start
        return stall_s

    if peaks is None:
        return run()
    with PeakMemory() as peak:
        stall_s = run()
    peaks[operation] = peak.extra_bytes
    return stall_s


def over_ranks(of_ranks: Iterable[Sequence[Samples]]) -> list[Samples]:
    """Several ranks' samples as one: a call takes as long as its slowest rank; memory adds up."""
    merged = []
    for same in zip(*of_ranks, strict=True):
        failed = [each.failed for each in same if each.failed]
        merged.append(
            Samples(
                name=same[0].name,
                note=same[0].note,
                cold={op: max(each.cold[op] for each in same) for op in same[0].cold} if not failed else {},
                warm={op: _slowest(each.warm[op] for each in same) for op in same[0].warm}
                if not failed
                else {},
                peak_bytes={
                    op: sum(each.peak_bytes.get(op, 0) for each in same) for op in same[0].peak_bytes
                },
                failed=failed[0] if failed else None,
            )
        )
    return merged


def _slowest(samples: Iterable[list[float]]) -> list[float]:
    return [max(same) for same in zip(*samples, strict=True)]


def ratio(over: Samples | None, under: Samples | None, *operations: str) -> float | None:
    """Median over rounds of one's seconds by the other's, in the same round; None if either is not there.
    `operations`: of the first, and of the second where it is another.
    """
    if over is None or under is None:
        return None
    first, second = over.warm.get(operations[0]), under.warm.get(operations[-1])
    if not first or not second:
        return None
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def by_name(samples: Iterable[Samples]) -> Mapping[str, Samples]:
    return {each.name: each for each in samples}
