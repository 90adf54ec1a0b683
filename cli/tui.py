"""`schedscope tui`: a run in the terminal, to walk through and ask why."""

from __future__ import annotations

import sys

from schedscope.cli.options import LogDir, RunName
from schedscope.engine.errors import UsageError


def tui(run: RunName = None, *, at: str = "", compare: str | None = None, log: LogDir = None) -> int:
    """Walk through a run: who waited in which pass, why, and what another policy would have done.

    Parameters
    ----------
    at
        Where to begin: pass=4821,rank=0,view=cache,rid=abc; what is left out is the default. A rid, which may hold
        commas, comes last.
    compare
        Another run, to show beside this one.
    """
    from schedscope.tui.thrift import economize

    economize()

    from schedscope.recorder.run import Run
    from schedscope.recorder.runs import resolve_run
    from schedscope.tui.app import ScopeApp
    from schedscope.tui.cursor import parse_at
    from schedscope.tui.session import Session

    start = parse_at(at)
    # It is drawn on standard error, where a pipe behind standard output doesn't matter.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("tui: needs a terminal; without one, see `schedscope report` or `schedscope replay pass N`")
    session = Session(Run.open(resolve_run(run, log)))
    other = None if compare is None else Session(Run.open(resolve_run(compare, log)))
    app = ScopeApp(session, start, other)
    app.run()
    return app.return_code or 0
