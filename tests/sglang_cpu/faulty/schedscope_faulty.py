"""A plugin of SGLang that makes schedscope's observer fail: `SCHEDSCOPE_FAULT=METHOD:CALLS`, after so many calls."""

from __future__ import annotations

import os
from typing import Any


def load() -> None:
    """What SGLang calls."""
    fault = os.environ.get("SCHEDSCOPE_FAULT")
    if fault is None:
        return
    from schedscope.recorder.sglang_observer import Observer

    name, _, calls = fault.partition(":")
    left = int(calls)
    original = getattr(Observer, name)

    def failing(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError(f"injected into {name}")
        return original(self, *args)

    setattr(Observer, name, failing)
