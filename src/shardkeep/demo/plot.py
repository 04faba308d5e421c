"""The plot: reward over steps of every run, with saves, crash and resume marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shardkeep.demo.events import Event

STYLES: dict[str, dict[str, Any]] = {
    "reference": {"color": "0.75", "linewidth": 5, "label": "reference, TP=2, uninterrupted"},
    "training": {"color": "tab:blue", "linewidth": 1.8, "label": "training, TP=2, until the crash"},
    "same layout": {"color": "tab:blue", "linewidth": 1.4, "linestyle": ":", "label": "resumed, TP=2"},
    "new layout": {"color": "tab:orange", "linewidth": 1.8, "label": "resumed, TP=1 x DP=2"},
}


def plot(events: list[Event], path: Path) -> Path:
    """Draw the events into a PNG at `path`."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    rewards = {(e["run"], e["step"]): e["reward"] for e in events if e["kind"] == "step"}
    for run, style in STYLES.items():
        points = [(step, reward) for (of, step), reward in rewards.items() if of == run]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    saves = [(e["run"], e["step"]) for e in events if e["kind"] == "saved"]
    axes.plot(
        [step for _, step in saves],
        [rewards[save] for save in saves],
        "k^",
        markersize=7,
        label="step committed",
    )
    for event in events:
        if event["kind"] == "killed":
            axes.axvline(event["step"], color="tab:red", linestyle="--", linewidth=1)
            axes.plot(
                event["step"],
                rewards[event["run"], event["step"]],
                "X",
                color="tab:red",
                markersize=11,
                label="actor killed while saving",
            )
        elif event["kind"] == "resumed" and event["run"] == "new layout":
            axes.axvline(
                event["step"], color="tab:green", linestyle="--", linewidth=1, label="resumed from here"
            )
    axes.set(
        title="GRPO on sorting three digits: reward per step",
        xlabel="step",
        ylabel="mean reward",
        ylim=(0, 1),
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    return path
