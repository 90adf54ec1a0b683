"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 20.0
"""By then it has happened, however busy the machine is."""


def until(condition: Callable[[], object], within_s: float = SOON_S) -> None:
    """Return when it holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
