"""A plugin of SGLang that makes a method of schedscope's observers fail.

`SCHEDSCOPE_FAULT=METHOD:CALLS`: after so many calls.
"""

from __future__ import annotations

import os
from typing import Any


def load() -> None:
    """What SGLang calls."""
    fault = os.environ.get("SCHEDSCOPE_FAULT")
    if fault is None:
        return
    from schedscope.recorder.sglang_observer import Observer
    from schedscope.recorder.sglang_pass import PassWatch

    name, _, calls = fault.partition(":")
    left = int(calls)
    watcher = Observer if hasattr(Observer, name) else PassWatch
    original = getattr(watcher, name)

    def failing(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError(f"injected into {name}")
        return original(self, *args)

    setattr(watcher, name, failing)
