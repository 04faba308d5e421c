"""shardkeep's own contestants: a synchronous save and load, a snapshot, a lazy save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import shardkeep as sk
from shardkeep.bench.contestant import Contestant, State

SYNC, SNAPSHOT, LAZY = "shardkeep", "shardkeep, snapshot", "shardkeep, lazy"


def contestants(state: State, target: State, config: sk.Config) -> list[Contestant]:
    """All ways to save. Loads of a snapshot are timed too: its checksum chunks are larger."""
    return [
        synchronous(state, target, config),
        asynchronous(SNAPSHOT, state, target, config),
        lazy(state, target, config),
    ]


def lazy(state: State, target: State, config: sk.Config) -> Contestant:
    """The state's memory as parameters of an optimizer that shardkeep knows, so that it may stream them."""
    parameters = {key: torch.nn.Parameter(tensor) for key, tensor in state.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    sk.register_optimizer(optimizer)
    found = asynchronous(LAZY, parameters, target, config)
    found.keeps.append(optimizer)
    return found


def synchronous(state: State, target: State, config: sk.Config) -> Contestant:
    def save(path: Path) -> None:
        sk.save(state, path, config=config)

    def load(path: Path) -> None:
        sk.load(target, path, config=config)

    return Contestant(name=SYNC, note="checksums; fsync of files and directory", save=save, load=load)


def asynchronous(name: str, state: Any, target: State, config: sk.Config) -> Contestant:
    capture = "lazy" if name == LAZY else "snapshot"

    def save(path: Path) -> float:
        start = time.perf_counter()
        handle = sk.save_async(state, path, capture=capture, config=config)
        stall_s = time.perf_counter() - start
        handle.wait()
        return stall_s

    def load(path: Path) -> None:
        sk.load(target, path, config=config)

    note = f'save_async(capture="{capture}")'
    return Contestant(name=name, note=note, save=save, load=load, times_load=name == SNAPSHOT)
