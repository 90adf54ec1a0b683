"""When Python looks for garbage: not while it only makes what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_less() -> Iterator[None]:
    """Python's collector would look at many new objects again and again, which can take as long as to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
