"""How to write files quickest: threads, size of a write, preallocation, early write-back, dropped cache.

In:  a directory on the file system to measure, a number of bytes, of rounds.
Out: for each variant its time as a ratio to plain `pwrite` of 1 MiB at a time with as many threads as cores
     and an fsync at the end; how much of the time the fsync took; how much of the files is left in the page
     cache. Everything in benchmarks/results/writers_<file system>.json.
Fair: every variant differs from the plain one in one thing, or as its name says, writes the same bytes to
     new files, and ends with an fsync of all. Each round runs all of them in an order that rotates; a ratio
     is the median of each round's own.

    python benchmarks/writers.py --dir /dev/shm --gib 1 --rounds 5
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardkeep.bench.machine import hardware

RESULTS = Path(__file__).resolve().parent / "results"

MIB = 1 << 20
_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4  # of sync_file_range(2)

libc = ctypes.CDLL(None, use_errno=True)
libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


@dataclass(kw_only=True)
class Variant:
    """One way to write. `write_back_bytes`: after so many bytes the kernel is asked to begin writing them
    to the disk; 0: it decides. `drop`: pages are dropped from the cache once they are on the disk.
    """

    name: str
    num_threads: int
    batch_bytes: int = MIB
    preallocate: bool = False
    write_back_bytes: int = 0
    drop: bool = False
    seconds: list[float] = field(default_factory=list)
    fsync_s: list[float] = field(default_factory=list)  # of the slowest thread
    cached: float = 0.0  # share of the files' pages


def variants(num_threads: int) -> list[Variant]:
    plain = Variant(name="plain", num_threads=num_threads)

    def other(name: str, **changes: int) -> Variant:
        return replace(plain, name=name, seconds=[], fsync_s=[], **changes)

    threads = [other(f"{n} threads", num_threads=n) for n in (1, 2, 4, 8, 16) if n != num_threads]
    sizes = [other(f"{b >> 10} KiB", batch_bytes=b) for b in (128 << 10, 512 << 10, 4 * MIB, 16 * MIB)]
    return [
        plain,
        *threads,
        *sizes,
        other("preallocated", preallocate=True),
        other("write-back, 8 MiB", write_back_bytes=8 * MIB),
        other("write-back, 64 MiB", write_back_bytes=64 * MIB),
        other("write-back, drop, 8 MiB", write_back_bytes=8 * MIB, drop=True),
        other("write-back, drop, 64 MiB", write_back_bytes=64 * MIB, drop=True),
        other("preallocated, write-back", preallocate=True, write_back_bytes=8 * MIB),
        other("drop after the fsync", drop=True),
    ]


def write_file(variant: Variant, path: Path, source: memoryview, num_bytes: int) -> float:
    """Write one file; returns the seconds of its fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if variant.preallocate:
            os.posix_fallocate(fd, 0, num_bytes)
        window = variant.write_back_bytes
        begun = 0  # write-back of the bytes before this has begun
        for at in range(0, num_bytes, variant.batch_bytes):
            size = min(variant.batch_bytes, num_bytes - at)
            start = at % (len(source) - variant.batch_bytes + 1)
            assert os.pwrite(fd, source[start : start + size], at) == size
            if window and at + size - begun >= window:
                _sync_range(fd, begun, at + size - begun, _SYNC_WRITE)
                if variant.drop and begun:  # the window before is on the disk by now, or nearly
                    _sync_range(
                        fd, begun - window, window, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER
                    )
                    os.posix_fadvise(fd, begun - window, window, os.POSIX_FADV_DONTNEED)
                begun = at + size
        start_s = time.perf_counter()
        os.fsync(fd)
        took_s = time.perf_counter() - start_s
        if variant.drop:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return took_s
    finally:
        os.close(fd)


def _sync_range(fd: int, start: int, num_bytes: int, flags: int) -> None:
    if libc.sync_file_range(fd, start, num_bytes, flags):
        raise OSError(ctypes.get_errno(), "sync_file_range")


def run_once(variant: Variant, directory: Path, source: memoryview, num_bytes: int) -> None:
    directory.mkdir()
    share = num_bytes // variant.num_threads
    files = [directory / str(n) for n in range(variant.num_threads)]
    start = time.perf_counter()
    with ThreadPoolExecutor(variant.num_threads) as threads:
        syncs = list(threads.map(lambda path: write_file(variant, path, source, share), files))
    variant.seconds.append(time.perf_counter() - start)
    variant.fsync_s.append(max(syncs))
    variant.cached = statistics.mean(_share_in_cache(path) for path in files)
    shutil.rmtree(directory)


def _share_in_cache(path: Path) -> float:
    """Of the file's pages, those that are in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        states = ctypes.create_string_buffer(num_pages)
        anchor = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.addressof(anchor), len(mapped), states)
        del anchor
    return -1.0 if failed else sum(s & 1 for s in states.raw) / num_pages


def ratio(variant: Variant, plain: Variant) -> float:
    """How many times the plain variant's speed this one has: the median over rounds."""
    pairs = zip(plain.seconds, variant.seconds, strict=True)
    return statistics.median(plain_s / own_s for plain_s, own_s in pairs)


def table(measured: Sequence[Variant], num_bytes: int) -> Table:
    shown = Table("variant")
    for heading in ("GB/s", "times plain", "min..max", "fsync s", "left in cache"):
        shown.add_column(heading, justify="right")
    for each in measured:
        median_s = statistics.median(each.seconds)
        each_ratio = [p / s for p, s in zip(measured[0].seconds, each.seconds, strict=True)]
        shown.add_row(
            each.name,
            f"{num_bytes / median_s / 1e9:.2f}",
            f"{ratio(each, measured[0]):.2f}",
            f"{min(each_ratio):.2f}..{max(each_ratio):.2f}",
            f"{statistics.median(each.fsync_s):.2f}",
            f"{each.cached:.0%}",
        )
    return shown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare ways to write files.")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to write")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes that each variant writes (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--threads", type=int, default=0, help="of the plain variant (default: the cores)")
    args = parser.parse_args()
    if min(args.gib, args.rounds) <= 0 or args.threads < 0:
        parser.error("--gib and --rounds must be positive, --threads not negative")
    return args


def main() -> None:
    args = _arguments()
    num_cores = len(os.sched_getaffinity(0))
    machine = hardware(args.dir, "cpu")
    source = memoryview(os.urandom(64 * MIB))
    num_bytes = int(args.gib * 2**30)
    measured = variants(args.threads or num_cores)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="shardkeep-bench-") as scratch:
        for turn in range(args.rounds):
            first = turn % len(measured)
            for variant in measured[first:] + measured[:first]:
                run_once(variant, Path(scratch) / "files", source, num_bytes)
    console = Console(width=None if os.isatty(1) else 120)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['filesystem']},"
        f" load average {machine['load_average']:.1f} at the start; {args.gib:g} GiB, {args.rounds} rounds"
    )
    console.print(table(measured, num_bytes))
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / f"writers_{machine['filesystem']}.json"
    found = {
        each.name: {
            "ratio_to_plain": ratio(each, measured[0]),
            "seconds": each.seconds,
            "fsync_s": each.fsync_s,
            "share_left_in_cache": each.cached,
        }
        for each in measured
    }
    content = {"num_bytes": num_bytes, "hardware": machine, "variants": found}
    out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{out.name}")


if __name__ == "__main__":
    main()
