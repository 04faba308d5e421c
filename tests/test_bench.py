"""`shardkeep bench`: what it measures, how it judges, and that wrong bytes end it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep.bench import beside, machine, memory, planning, rows
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.contestant import Contestant, Field, Samples, WrongBytes, measure, over_ranks, ratio
from shardkeep.cli import WRONG_USE, run
from shardkeep.demo.config import WrongOption

MIB = 1 << 20


def field_of(directory: Path, num_tensors: int = 3) -> Field:
    state = {f"t{i}": torch.randn(1000) for i in range(num_tensors)}
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    return Field(state=state, target=target, directory=directory / "checkpoint", device="cpu")


def samples(name: str, save: list[float], **warm: list[float]) -> Samples:
    cold = {"save": 1.0, "load": 1.0, "stall": 1.0}
    return Samples(name=name, note="", cold=cold, warm={"save": save, **warm})


def test_json_has_every_sample_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    line = f"bench --gib 0.004 --tensors 6 --rounds 2 --path {tmp_path} --peers dcp --peers dcp-async --json"
    code = run([*line.split(), "--sections", "memory", "--sections", "speed", "--out", str(out)])
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(out.read_text())
    assert code == int(any(row["verdict"] in ("missed", "failed") for row in shown["rows"]))
    assert shown["hardware"]["cores"] > 0
    assert shown["hardware"]["versions"]["torch"] == torch.__version__
    measured = shown["measured"]["speed"]
    assert measured["num_bytes"] == pytest.approx(0.004 * 2**30, rel=0.01)
    by_name = {each["name"]: each for each in measured["samples"]}
    assert not [each for each in by_name.values() if each["failed"]]
    for name in ("bare", "torch DCP", "shardkeep"):
        assert [len(by_name[name]["warm"][op]) for op in ("save", "load")] == [2, 2]
    for name in ("torch DCP, async", "shardkeep, snapshot"):
        warm = by_name[name]["warm"]
        assert all(stall < save for stall, save in zip(warm["stall"], warm["save"], strict=True))
    verdicts = {row["what"]: row["verdict"] for row in shown["rows"]}
    assert verdicts["host memory of a synchronous save, strided state"] == "met"
    assert verdicts["save, speed / megatron-core"] == "absent"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.megatron
def test_table_is_plain_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"bench --gib 0.002 --tensors 4 --rounds 1 --path {tmp_path} --peers megatron --sections speed"
    run(line.split())
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "shardkeep, snapshot" in shown
    assert "save, speed / megatron-core" in shown
    assert "failed" not in shown


def test_several_ranks_save_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"bench --gib 0.002 --tensors 5 --ranks 2 --rounds 1 --path {tmp_path} --peers dcp --json"
    run([*line.split(), "--sections", "speed"])
    measured = json.loads(capsys.readouterr().out)["measured"]["speed"]
    assert measured["num_tensors"] == 5
    assert measured["num_bytes"] == pytest.approx(0.002 * 2**30, rel=0.01)
    assert not [each for each in measured["samples"] if each["failed"]]


def test_small_tensors_have_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"bench --small-tensors 40 --rounds 1 --path {tmp_path} --sections small --json"
    run(line.split())
    shown = json.loads(capsys.readouterr().out)
    measured = shown["measured"]["small"]
    assert measured["num_tensors"] == 40
    assert 40 << 10 <= measured["num_bytes"] <= 40 * 64 << 10
    (row,) = shown["rows"]
    assert (row["what"], row["target"]) == ("40 small tensors: save, speed / torch DCP", 5.0)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--gib 0", "--gib"),
        ("--min-kib 2", "--max-kib"),
        ("--min-kib 2 --max-kib 1", "--min-kib"),
        ("--path /nowhere", "--path"),
        ("--ranks 100", "--ranks"),
        ("--gib 1e6", "--gib"),
        ("--peers nccl", "--peers"),
    ],
)
def test_wrong_option_is_one_line(options: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *options.split()]) == WRONG_USE
    (line,) = capsys.readouterr().err.splitlines()
    assert names in line


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["bench", "--device", "cuda"]) == WRONG_USE
    assert "--device cuda needs a GPU" in capsys.readouterr().err


def test_wrong_bytes_end_the_run(tmp_path: Path) -> None:
    field = field_of(tmp_path)

    def load(path: Path) -> None:
        for key, tensor in field.state.items():
            field.target[key].copy_(tensor)
        field.target["t1"][-1] += 1

    with pytest.raises(WrongBytes, match="liar did not load what it saved, first: t1"):
        measure([Contestant(name="liar", note="", save=lambda path: None, load=load)], field, 1)


def test_a_failing_contestant_leaves_the_others_their_rounds(tmp_path: Path) -> None:
    field = field_of(tmp_path)
    calls: list[str] = []

    def fail(path: Path) -> None:
        raise OSError("no room")

    def note(name: str) -> Any:
        return lambda path: calls.append(name)

    names = [Contestant(name=name, note="", save=note(name)) for name in ("a", "b")]
    found = measure([names[0], Contestant(name="broken", note="", save=fail), names[1]], field, 3)
    assert [each.failed for each in found] == [None, "OSError: no room", None]
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]  # cold, then rounds that rotate
    assert rows.faster([*found, samples("shardkeep", [1.0])], "save", "broken", 2.0).verdict == "failed"


def test_ratio_is_the_median_of_each_rounds_own() -> None:
    peer, us = samples("peer", [4.0, 9.0, 2.0]), samples("shardkeep", [2.0, 3.0, 2.0])
    assert ratio(peer, us, "save") == 2.0
    assert ratio(peer, None, "save") is None
    assert ratio(peer, us, "load") is None


def test_over_ranks_takes_the_slowest_and_adds_memory() -> None:
    first, second = samples("x", [1.0, 4.0]), samples("x", [2.0, 3.0])
    first.peak_bytes, second.peak_bytes = {"save": 5}, {"save": 7}
    (merged,) = over_ranks([[first], [second]])
    assert merged.warm["save"] == [2.0, 4.0]
    assert merged.peak_bytes == {"save": 12}
    second.failed = "no"
    assert next(iter(over_ranks([[first], [second]]))).failed == "no"


def test_rows_of_a_gpu() -> None:
    found = [
        samples("bare", [0.75], load=[0.7]),
        samples("pinned copy", [1.0]),
        samples("torch DCP", [8.5], load=[5.0]),
        samples("shardkeep", [1.0], load=[1.0]),
        samples("shardkeep, snapshot", [3.0], stall=[1.1]),
        samples("shardkeep, lazy", [3.0], stall=[0.011]),
    ]
    verdicts = {row.what: row.verdict for row in rows.of_speed(found, "cuda")}
    assert verdicts == {
        "stall of a snapshot / pinned copy of the same bytes": "met",
        "stall of a lazy save": "missed",
        "save, speed / bare": "met",
        "save, speed / torch DCP": "met",
        "save, speed / torch DCP, threads": "absent",
        "save, speed / megatron-core": "absent",
        "load, speed / torch DCP": "missed",
        "load, speed / megatron-core": "absent",
    }


def test_peak_memory_sees_what_is_freed_again() -> None:
    with machine.PeakMemory() as peak:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        del held
    assert 63 * MIB < peak.extra_bytes < 80 * MIB


def test_peak_memory_leaves_out_a_tmpfs_file() -> None:
    data = bytes(32 * MIB)
    path = Path("/dev/shm/shardkeep-test-bench")
    try:
        with machine.PeakMemory() as peak:
            path.write_bytes(data)
    finally:
        path.unlink()
    assert peak.extra_bytes < 8 * MIB


def test_strided_state_shares_memory_and_is_not_contiguous() -> None:
    state = {"a": torch.arange(7.0)}
    turned = memory.strided(state)["a"]
    assert not turned.is_contiguous()
    assert turned.data_ptr() == state["a"].data_ptr()
    assert turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_file_system_is_that_of_the_innermost_mount() -> None:
    assert machine.filesystem_of(Path("/dev/shm")) == "tmpfs"
    assert machine.filesystem_of(Path("/proc/self")) == "proc"


def test_room_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="lower --gib"):
        BenchOptions(gib=1e5, path=tmp_path).check_room()


def test_loops_beside_a_lazy_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_ALONE_S", {"cpu": 0.01})
    monkeypatch.setattr(beside, "_WARM_S", {"cpu": 0.01})
    found = beside.run(BenchOptions(gib=0.2, tensors=4, rounds=1, path=tmp_path))
    assert [row.target for row in found] == [3.0, 10.0]
    assert all(row.verdict != "absent" for row in found)


def test_planning_is_measured_on_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NUM_RANKS", 2)
    (row,) = planning.run(BenchOptions(path=tmp_path))
    assert row.reached is not None
    assert 0 < row.reached < 60_000
    assert all(phase in row.note for phase in ("capture", "plan", "stage", "write", "commit"))
