"""The plugin that SGLang loads: it records the scheduler of a server that was asked to be recorded.

SGLang finds it as an entry point of `sglang.srt.plugins`, in the server's main process and in every scheduler. Unless
a recording was asked for, it does nothing at all. Where one was, methods of the scheduler are wrapped: each calls an
`Observer` and the original, hands the original's result or exception on as it is, and if the observer fails, the
recording ends with one line in the log and the server goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedscope.recorder.hello import Description, Source
from schedscope.recorder.sink import SOCKET_VARIABLE, open_sink

STRICT_VARIABLE = "SCHEDSCOPE_STRICT"
"""Environment: a hook that can't be applied is an error at start."""

log = logging.getLogger("schedscope.recorder")


class _Guard:
    """Holds the observer of this process, and lets go of it if anything in it fails."""

    def __init__(self) -> None:
        self.observer: Any = None
        self.missing: dict[str, str] = {}
        """Hooks that could not be applied, and what is not recorded without them."""

    def let_go(self, error: Exception) -> None:
        """End the recording of this process, with one line in the log."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.detach(RuntimeError(_words(error)))


GUARD = _Guard()


def _words(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def load() -> None:
    """What SGLang calls. Raises SystemExit, under SCHEDSCOPE_STRICT only."""
    from schedscope.recorder.standalone import ensure_companion

    ensure_companion()
    if not os.environ.get(SOCKET_VARIABLE):
        return
    from schedscope.recorder.sglang_hooks import register

    GUARD.missing = register(GUARD, attach)
    _insist(GUARD.missing)


def _insist(missing: Mapping[str, str]) -> None:
    """End the process if something can't be recorded and that was not to be. SGLang survives any other exception."""
    if missing and os.environ.get(STRICT_VARIABLE):
        raise SystemExit("schedscope: this SGLang can't be recorded as a whole: " + ", ".join(sorted(missing)))


def attach(scheduler: Any) -> None:
    """Begin to observe a scheduler that was just built."""
    try:
        from schedscope.recorder.sglang_config import read_config, source_gaps
        from schedscope.recorder.sglang_hooks import sglang_version, unapplied
        from schedscope.recorder.sglang_observer import Observer
        from sglang.srt.runtime_context import get_parallel

        config = read_config(scheduler)
        unknown = source_gaps(scheduler)
        gaps = [gap.to_dict() for gap in unknown]
        missing = {**GUARD.missing, **unapplied()}
        _insist(missing)
        gaps += [{"feature": name, "effect": f"not recorded: {effect}"} for name, effect in sorted(missing.items())]
        description = Description(
            source=Source(kind="sglang", version=sglang_version()),
            config=config.to_dict(),
            model=scheduler.model_config.model_path,
            source_gaps=gaps,
        )
        sink = open_sink(own_rank(), description)
        if sink is None:
            return
        place = get_parallel().attn_dp_rank if config.enable_dp_attention else 0
        observer = Observer(scheduler, config, sink, place, is_known=not unknown)
    except Exception as error:
        log.warning("this scheduler is not recorded: %s", _words(error))
        return
    GUARD.observer = observer
    atexit.register(_close)


def own_rank() -> int:
    """A number of its own for each scheduler process of a server."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    inside = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    if parallel.attn_dp_enabled:
        return int(inside)
    return int((parallel.dp_rank or 0) * parallel.tp_size * parallel.pp_size + inside)


def _close() -> None:
    if GUARD.observer is not None:
        try:
            GUARD.observer.close()
        except Exception as error:
            GUARD.let_go(error)
