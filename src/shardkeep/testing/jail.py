"""The no-fork jail: a seccomp filter under which no child process can start.

In:  the current process (`enter`), or Python code to run in a child that enters first (`run_jailed`).
Out: inside, `fork`, `vfork` and every `clone` that does not make a thread fail with ENOMEM, as they do in a
     Ray worker too big to be forked; `clone3` fails with ENOSYS, since a filter cannot look into its argument
     struct and glibc then falls back to `clone`. Threads start as before.
Invariant: there is no way out. The filter covers all threads of the process, those of native libraries
     included, and whatever they start later.

A Ray actor enters in its `__init__`: Ray must have started the worker process already, and a worker starts no
process of its own afterwards (compiling, profiling and `runtime_env` are done by Ray's agents elsewhere).

    @ray.remote
    class Worker:
        def __init__(self):
            jail.enter()

This file is also a program, `python -P jail.py (-c CODE | -m MODULE | SCRIPT) [ARGS...]`: it imports nothing
of shardkeep, so the code that it runs is jailed from its first import.
"""

from __future__ import annotations

import ctypes
import errno
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

__all__ = ["enter", "is_jailed", "run_jailed"]

# From linux/sched.h.
_CLONE_FS = 0x00000200
_CLONE_THREAD = 0x00010000
_CLONE_NEWNS = 0x00020000


def enter() -> None:
    """Put the current process, with all its threads, into the jail, for good. Entering twice does nothing.

    Raises ImportError when pyseccomp or libseccomp is missing, and OSError when the kernel refuses the
    filter.
    """
    if is_jailed():
        return
    seccomp = _seccomp()
    jail = seccomp.SyscallFilter(seccomp.ALLOW)
    # A filter otherwise covers the calling thread alone, and torch, gRPC and Ray already run their own.
    jail.set_attr(seccomp.Attr.CTL_TSYNC, 1)
    no_memory = seccomp.ERRNO(errno.ENOMEM)
    jail.add_rule(no_memory, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0))
    jail.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    for call in ("fork", "vfork"):
        jail.add_rule(no_memory, call)
    jail.load()


def is_jailed() -> bool:
    """Whether this process is in the jail, also when it was entered by an ancestor or another thread.

    Asks the kernel: CLONE_NEWNS | CLONE_FS is never valid, so outside nothing starts and the answer is EINVAL
    (or EPERM under a container's own filter); inside, the jail answers first, with ENOMEM.
    """
    seccomp = _seccomp()
    libc = ctypes.CDLL(None, use_errno=True)
    number = seccomp.resolve_syscall(seccomp.system_arch(), "clone")
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), ctypes.c_ulong(_CLONE_NEWNS | _CLONE_FS), None, None, None, None)
    return ctypes.get_errno() == errno.ENOMEM


def run_jailed(
    *args: str | os.PathLike[str],
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS...` in a child that enters the jail before anything else, and capture its output.

    `args` are those of the interpreter: `"-c", code`, `"-m", module` or a script, then its own arguments.
    `env` adds to this process's environment. The caller must be outside the jail. Raises
    subprocess.TimeoutExpired.
    """
    return subprocess.run(
        # -P: a script's directory leads sys.path, and this one holds modules with common names.
        [sys.executable, "-P", __file__, *[os.fspath(arg) for arg in args]],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        check=False,
    )


def _seccomp() -> ModuleType:
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as cause:
        raise ImportError(
            "the no-fork jail needs pyseccomp, from `pip install 'shardkeep[test]'`, and the system's"
            f" libseccomp.so.2 (Debian: libseccomp2): {cause}"
        ) from cause
    module: ModuleType = pyseccomp
    return module


def _main(argv: list[str]) -> None:
    """Enter, then do with `argv` what the interpreter does with its own arguments."""
    if not argv or (argv[0] in ("-c", "-m") and len(argv) == 1):
        sys.exit("usage: jail.py (-c CODE | -m MODULE | SCRIPT) [ARGS...]")
    enter()
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<jailed>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
