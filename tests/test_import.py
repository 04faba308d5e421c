"""`import shardkeep` stays light, for processes that never train and for those that train without Ray."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"ray", "megatron", "matplotlib", "obstore", "cyclopts", "rich", "hypothesis", "pytest", "pyseccomp"}


def test_import_loads_no_optional_package() -> None:
    code = "import sys, shardkeep; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert loaded & HEAVY == set()


def test_import_starts_no_thread_and_no_child() -> None:
    code = (
        "import os, torch, torch.distributed.checkpoint\n"
        "tasks = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = tasks()\n"
        "import shardkeep\n"
        "children = open('/proc/self/task/%d/children' % os.getpid()).read().split()\n"
        "print(tasks() - before, len(children))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "0"]
