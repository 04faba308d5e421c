"""Planning for thousands of ranks, on one core: the assignment, a repeat, index and `.metadata`.

In:  nothing; the layouts below, TP x PP x DP.
Out: CPU seconds, memory and balance beside DESIGN's limits; the same in benchmarks/results/plan_scale.json.
Rank 0's part is the real one: `plan_together` with a coordinator that hands it what the other ranks would
send. What they send is made here, with arrays; on a real job each rank makes its own.

    python benchmarks/plan_scale.py
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shardkeep import agree, columns, manifest, plan, vanilla
from shardkeep.bench.machine import hardware
from shardkeep.nogc import no_gc
from shardkeep.types import Captured, Index, Item, TensorShard

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN = 4096
# Of one layer: name, rows, columns (0: one dimension), the axis that TP cuts (-1: every TP rank holds it).
# Attention is stored as Megatron stores layers that are alike: one key, with an axis of layers in front.
PARAMETERS = (
    ("layers.attention.qkv", 3 * HIDDEN, HIDDEN, 0),
    ("layers.attention.proj", HIDDEN, HIDDEN, 1),
    ("layers.{}.fc1", 4 * HIDDEN, HIDDEN, 0),
    ("layers.{}.fc2", HIDDEN, 4 * HIDDEN, 1),
    ("layers.{}.norm", HIDDEN, 0, -1),
)
PARTS = ("{}", "state.param.{}", "state.exp_avg.{}", "state.exp_avg_sq.{}")  # the weight, and what Adam keeps
NUM_STACKED = 2
PER_LAYER = len(PARAMETERS) * len(PARTS)

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class World:
    """A 3D-parallel job; ranks are numbered as Megatron does, TP fastest, then DP, then PP; eight a host.

    bf16 weights are held by all ranks of a DP group; fp32 optimizer states are cut over it. A layer is 20
    shards a rank.
    """

    tp: int
    pp: int
    dp: int
    layers: int
    """Of each pipeline stage."""

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def shards_per_rank(self) -> int:
        return self.layers * PER_LAYER

    def packed(self) -> Iterator[bytes]:
        """The columns of each rank, by rank."""
        for pp in range(self.pp):
            layers = range(pp * self.layers, (pp + 1) * self.layers)
            shards = list(product(layers, range(len(PARAMETERS)), range(len(PARTS))))
            keys = [PARTS[part].format(PARAMETERS[p][0].format(layer)) for layer, p, part in shards]
            numbers = np.array(shards, np.int64).T
            for dp, tp in product(range(self.dp), range(self.tp)):
                yield columns.pack_ints(keys, ["bfloat16", "float32"], self._ints(numbers, tp, dp))

    def _ints(self, shards: Ints, tp: int, dp: int) -> Ints:
        """What `columns.pack_ints` takes. `shards` (3, n): numbers of layer, parameter and part."""
        layer, parameter, part = shards
        size = np.array([row[1:3] for row in PARAMETERS], np.int64)[parameter].T  # (2, n): rows, columns
        axis = np.array([row[3] for row in PARAMETERS], np.int64)[parameter]
        low, extent = np.zeros_like(size), size.copy()
        for d in (0, 1):
            extent[d, axis == d] //= self.tp
            low[d, axis == d] = tp * extent[d, axis == d]
        is_state = part > 0
        rows = extent[0].copy()
        extent[0, is_state] = (rows * (dp + 1) // self.dp - rows * dp // self.dp)[is_state]
        low[0, is_state] += (rows * dp // self.dp)[is_state]
        is_main = ((axis >= 0) | (tp == 0)) & (is_state | (dp == 0))

        num_elements = np.where(size[1] > 0, extent[0] * extent[1], extent[0])
        is_stacked = parameter < NUM_STACKED
        has_columns = size[1] > 0
        ints = np.empty((6 + 3 * 3, len(layer)), np.int64)
        ints[5] = -1  # no tied weights
        ints[:5] = (
            np.arange(len(layer)),
            is_state,
            1 + is_stacked + has_columns,
            is_main,
            num_elements * np.where(is_state, 4, 2),
        )
        shape, offset, box = np.split(ints[6:], 3)
        shape[:], offset[:], box[:] = 1, 0, 1
        at = np.arange(len(layer))
        for target, lead, values in (
            (shape, self.pp * self.layers, size),
            (offset, layer, low),
            (box, 1, extent),
        ):
            target[0] = lead  # where there is no axis of layers, the rows overwrite it
            target[is_stacked * 1, at] = values[0]
            target[(is_stacked + 1)[has_columns], at[has_columns]] = values[1, has_columns]
        return ints


@dataclass(kw_only=True)
class Rank0:
    """A coordinator that has heard from every rank of a world; see `shardkeep.coordinate.Coordinator`."""

    columns: list[bytes]
    hosts: list[str]
    known: list[bytes] = field(default_factory=list)
    """Plans that all ranks remember."""
    shares: list[bytes] = field(default_factory=list)
    rank: int = 0

    @property
    def world_size(self) -> int:
        return len(self.columns)

    def gather(self, name: str, value: Any) -> list[Any]:
        """What rank 0 says, and what the others say in its place."""
        mine = msgspec.msgpack.decode(value)
        if name == "headers":
            return [
                msgspec.msgpack.encode(agree.Layout(columns=c, values=mine[1], host=host))
                for c, host in zip(self.columns, self.hosts, strict=True)
            ]
        others = [
            agree.Mine(
                fingerprint=manifest.digest(c).encode()[:16],
                known=self.known,
                values=mine[2],
                node=mine[3],
                free_bytes=mine[4],
            )
            for c in self.columns[1:]
        ]
        return [value, *map(msgspec.msgpack.encode, others)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        self.known = [value[0]]
        return value

    def scatter(self, name: str, values: list[Any]) -> Any:
        self.shares = [share for share, _ in values]
        return values[0]


def simulate(world: World) -> Rank0:
    """Everything that rank 0 hears."""
    return Rank0(columns=list(world.packed()), hosts=[f"host{r // 8}" for r in range(world.size)])


def captured(ranks: Rank0) -> Captured:
    """The state of rank 0, without its tensors."""
    own = columns.unpack(ranks.columns[:1])
    nothing = torch.empty(0)
    headers = map(own.header, range(len(own.rank)))
    return Captured(
        dialect="megatron",
        shards=[TensorShard(header=h, tensor=nothing) for h in headers],
        digests={f"value{n}": f"{n:016x}" for n in range(20)},
    )


def written(ranks: Rank0) -> tuple[columns.Columns, Ints]:
    """All shards, and the rows of those that are written."""
    everyone = columns.unpack(ranks.columns)
    shares = [np.frombuffer(share, np.int32) for share in ranks.shares]
    return everyone, np.concatenate([s + a for s, a in zip(shares, everyone.starts, strict=False)])


def balance(ranks: Rank0) -> dict[str, float]:
    """Most bytes of a rank, and of a host, over the mean."""
    everyone, rows = written(ranks)
    load = np.bincount(everyone.rank[rows], weights=everyone.num_bytes[rows], minlength=ranks.world_size)
    names = np.unique(ranks.hosts, return_inverse=True)[1]
    hosts = np.bincount(names, weights=load)
    return {"ranks": load.max() / load.mean(), "hosts": hosts.max() / hosts.mean()}


def index_of(ranks: Rank0) -> Index:
    """The index of the checkpoint that the plan leads to, as rank 0 gets it from what the ranks report."""
    everyone, rows = written(ranks)
    items, offset = [], dict.fromkeys(range(ranks.world_size), 0)
    for row in rows.tolist():
        h, rank = everyone.header(row), int(everyone.rank[row])
        length = h.num_bytes + 1024
        items.append(
            Item(
                key=h.key,
                kind=h.kind,
                dtype=h.dtype,
                box=h.box,
                file=manifest.data_name(rank, "1" * 17, 0),
                offset=offset[rank],
                length=length,
                payload_offset=offset[rank] + 512,
                num_bytes=h.num_bytes,
            )
        )
        offset[rank] += length
    return Index(
        format_version=manifest.FORMAT_VERSION,
        attempt="1" * 17,
        dialect="megatron",
        checksum="none",
        chunk_bytes=1 << 20,
        tensors=plan.tensors(everyone),
        items=msgspec.convert(msgspec.to_builtins(items), list[Item]),  # no object shared, as after a gather
        files={},
        paths={},
        fixed={},
    )


class Measured:
    """CPU seconds of a block (on one core that is all there is, and other processes do not count), seconds by
    the clock, and how far its memory grew above what was there when it began.
    """

    def __enter__(self) -> Measured:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = _status_kib("VmRSS")
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        self.clock_s, self.cpu_s = time.perf_counter() - self._start, time.process_time() - self._cpu
        self.peak_gib = (_status_kib("VmHWM") - self._before) / 2**20


def _status_kib(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


def measure_plan(world: World) -> dict[str, Any]:
    ranks = simulate(world)
    mine = captured(ranks)
    with Measured() as first:
        agree.plan_together(ranks, mine)
    repeats = []
    for _ in range(5):
        with Measured() as repeat:
            agree.plan_together(ranks, mine)
        repeats.append(repeat.cpu_s)
    headers = [s.header for s in mine.shards]
    with Measured() as packing:
        columns.pack(headers)
    with Measured() as printing:
        agree.fingerprint(mine)
    even = balance(ranks)
    return {
        "ranks": world.size,
        "layout": {"tp": world.tp, "pp": world.pp, "dp": world.dp},
        "shards_per_rank": world.shards_per_rank,
        "wire_bytes_per_rank": sum(map(len, ranks.columns)) / world.size,
        "first_cpu_s": first.cpu_s,
        "first_clock_s": first.clock_s,
        "first_peak_gib": first.peak_gib,
        "repeat_cpu_s": sorted(repeats)[len(repeats) // 2],
        "pack_cpu_s": packing.cpu_s,
        "fingerprint_cpu_s": printing.cpu_s,
        "max_over_mean_bytes": even,
    }


def measure_index(world: World) -> dict[str, Any]:
    ranks = simulate(world)
    agree.plan_together(ranks, captured(ranks))
    with no_gc():
        index = index_of(ranks)
        with Measured() as encoding:
            encoded = manifest.encode_index(index)
        with Measured() as pickling:
            metadata = vanilla.dcp_metadata(index)
    num_items = len(index.items)
    with Measured() as decoding, no_gc():
        manifest.decode_index(encoded, "index")
    with Measured() as loading:
        pickle.loads(metadata)
    return {
        "shards": num_items,
        "index_cpu_s": encoding.cpu_s,
        "metadata_cpu_s": pickling.cpu_s,
        "peak_gib": max(encoding.peak_gib, pickling.peak_gib),
        "index_bytes": len(encoded),
        "metadata_bytes": len(metadata),
        "index_decode_cpu_s": decoding.cpu_s,
        "metadata_load_cpu_s": loading.cpu_s,
        "metadata_load_gib": loading.peak_gib,
    }


def main() -> None:
    machine = hardware(RESULTS, "cpu") | {"cores_used": 1}
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    planned = measure_plan(World(tp=8, pp=16, dp=64, layers=50))
    indexed = measure_index(World(tp=8, pp=4, dp=16, layers=78))
    goals = [
        ("first assignment, s", planned["first_cpu_s"], 20.0),
        ("first assignment, GiB beyond what was received", planned["first_peak_gib"], 4.0),
        ("repeat, s", planned["repeat_cpu_s"], 0.5),
        ("most bytes of a rank / mean", planned["max_over_mean_bytes"]["ranks"], 1.05),
        ("index and .metadata, s", indexed["index_cpu_s"] + indexed["metadata_cpu_s"], 30.0),
    ]
    print(json.dumps({"plan": planned, "index": indexed}, indent=1))
    for name, reached, limit in goals:
        print(f"{name}: {reached:.3g}, limit {limit:g}: {'reached' if reached <= limit else 'MISSED'}")
    targets = [{"what": n, "reached": r, "limit": m} for n, r, m in goals]
    content = {"hardware": machine, "plan": planned, "index": indexed, "targets": targets}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plan_scale.json").write_text(json.dumps(content, indent=1) + "\n")
    print("written: benchmarks/results/plan_scale.json")


if __name__ == "__main__":
    main()
