"""Has the process give back memory that it no longer needs: a debugger stays open for hours, often beside a server."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress

ARROW = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Arrow's own pools keep what was freed. Arrow looks at this once, when it is loaded."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Of glibc's mallopt."""
_OWN_PAGES = 256 * 1024
"""Bytes from which on an allocation goes back to the system as soon as it is freed, however often that happens."""
_GENERATIONS = 5_000, 5, 12
"""Thresholds of Python's generations: many small collections, and a large one only where there is no time to sweep."""
_MUCH = 2
"""Collections of what is new after which it is worth it to sweep although something is still worked out."""
_ARENAS = 2
"""As many threads as here would otherwise each keep what they freed for themselves."""


def economize() -> None:
    """Call it before anything imports Arrow. Where the C library has no such switches, it stays as it is."""
    os.environ.update(ARROW)
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _OWN_PAGES)
        mallopt(_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return to the system what is free between other memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Sweeper:
    """Collects garbage while one reads: to look through all that a re-run makes takes longer than a key may.

    Python still looks through what is new, a little at a time. Only one may be at work in a process.
    """

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        gc.collect()
        # What is there now stays: modules, widgets.
        gc.freeze()
        gc.set_threshold(*_GENERATIONS)

    def sweep(self, *, busy: bool = False) -> None:
        """Collect, if there is anything worth it."""
        if gc.get_count()[2] >= (_MUCH if busy else 1):
            gc.collect()
            give_back()

    def close(self) -> None:
        """Leave it to Python again."""
        gc.unfreeze()
        gc.set_threshold(*self._before)
