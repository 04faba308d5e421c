"""What the demo shows: progress while it runs, then the table of saves, the checks and the plot."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardkeep.demo.config import DemoConfig
from shardkeep.demo.events import Event

LINE_EVERY = 10
"""Without a terminal, a line is printed every so many training steps."""


class Display:
    """Shows events as they come: bars on a terminal, plain lines elsewhere."""

    def __init__(self, config: DemoConfig, root: Path) -> None:
        self.config, self.checkpoints = config, root / "checkpoints"
        self.console = Console(highlight=False, soft_wrap=True)
        self.started_s = time.monotonic()
        self.bars = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._bar: Any = None

    def __enter__(self) -> Display:
        self._say("starting Ray")
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def show(self, event: Event) -> None:
        """Show one event."""
        getattr(self, f"_on_{event['kind']}")(event)

    def _on_starting(self, event: Event) -> None:
        self._stop_bar()
        self._say("starting two actors")

    def _on_run(self, event: Event) -> None:
        self._stop_bar()
        title = f"{event['run']}, {event['layout']}"
        self._bar = self.bars.add_task(title, total=self.config.steps, note="")
        self._say(f"== {title}")

    def _on_step(self, event: Event) -> None:
        self.bars.update(self._bar, completed=event["step"], note=f"reward {event['reward']:.2f}")
        if not self.console.is_terminal and event["step"] % LINE_EVERY == 0:
            self._say(f"{event['run']}: step {event['step']}, reward {event['reward']:.2f}")

    def _on_saving(self, event: Event) -> None:
        self._say(f"{event['run']}: saving step {event['step']}")

    def _on_saved(self, event: Event) -> None:
        write_s = event["seconds"].get("write", 0.0)
        self._say(
            f"{event['run']}: step {event['step']} committed, {event['num_bytes'] / 1e6:.1f} MB, "
            f"stall {event['stall_s']:.3f} s, write {write_s:.3f} s"
        )

    def _on_killed(self, event: Event) -> None:
        self._say(
            f"{event['run']}: SIGKILL to rank {event['rank']} (pid {event['pid']}) while step "
            f"{event['step']} is being saved",
            style="bold red",
        )

    def _on_failed(self, event: Event) -> None:
        self._say(f"{event['run']}: noticed: {event['error']}", style="red")

    def _on_resumed(self, event: Event) -> None:
        self._say(f"{event['run']}: resumed from step {event['step']}", style="bold green")

    def _on_check(self, event: Event) -> None:
        self._say(_check_line(event), style="green" if event["held"] else "bold red")

    def _on_log(self, event: Event) -> None:
        """Show shardkeep's line per phase as one rank sees it; the record has those of all."""
        if event["source"] == "policy rank 0":
            self._say(f"  rank 0: {event['text'].replace(f'{self.checkpoints}/', '')}", style="dim")

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self.bars.stop_task(self._bar)

    def _say(self, text: str, style: str | None = None) -> None:
        elapsed_s = time.monotonic() - self.started_s
        self.console.print(f"{elapsed_s:6.1f} s  {text}", style=style, markup=False)


def summary(events: list[Event], root: Path, console: Console) -> None:
    """Print the table of saves and the checks; write the plot."""
    console.print(_table(events))
    for event in events:
        if event["kind"] == "check":
            console.print(_check_line(event), style="green" if event["held"] else "bold red", markup=False)
    checks = [event["held"] for event in events if event["kind"] == "check"]
    from shardkeep.demo.plot import plot

    path = plot(events, root / "reward.png")
    console.print(
        f"{sum(checks)} of {len(checks)} checks held. Plot: {path}. Record: {root / 'events.jsonl'}",
        markup=False,
    )


def _check_line(event: Event) -> str:
    return f"{'ok  ' if event['held'] else 'FAIL'}  {event['what']} ({event['seen']})"


def _table(events: list[Event]) -> Table:
    table = Table(title="Saves", title_justify="left", box=box.ASCII2)
    for name in ("step", "run", "bytes", "stall s", "write s", "GB/s", ""):
        table.add_column(name, justify="left" if name in ("run", "") else "right")
    resumed = {event["step"] for event in events if event["kind"] == "resumed"}
    for event in events:
        if event["kind"] == "saved":
            write_s = event["seconds"].get("write", 0.0)
            speed = f"{event['num_bytes'] / write_s / 1e9:.2f}" if write_s else "-"
            note = "resumed from here" if event["step"] in resumed else ""
            table.add_row(
                str(event["step"]),
                event["run"],
                f"{event['num_bytes']:,}",
                f"{event['stall_s']:.4f}",
                f"{write_s:.4f}",
                speed,
                note,
            )
        elif event["kind"] == "killed":
            table.add_row(
                str(event["step"]),
                event["run"],
                "-",
                "-",
                "-",
                "-",
                f"rank {event['rank']} killed; not committed",
            )
    return table
