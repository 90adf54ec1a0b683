"""`schedscope dashboard [RUN]`: runs in a browser."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from schedscope.cli.options import LAST_PORT, LogDir
from schedscope.cli.output import console
from schedscope.dashboard.guard import is_loopback
from schedscope.dashboard.library import Library
from schedscope.dashboard.serve import serving
from schedscope.engine.errors import UsageError
from schedscope.recorder.runs import default_log_dir, resolve_run

PORT = 8500
_SHORTEST = 8
_NICENESS = 10
"""It is a guest: a scheduler on the same machine goes first."""


def dashboard(
    run: Annotated[
        str | None, Parameter(help="Path, URL or name of a run to begin with; by default the newest.")
    ] = None,
    *,
    log: LogDir = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
) -> int:
    """Show runs in a browser: hit rate and TTFT over time, down to every decision.

    Parameters
    ----------
    host
        Address to listen on. Any but this machine's own needs a token.
    port
        Port; 0 takes a free one.
    token
        What a browser has to know; on other addresses than 127.0.0.1, one is made if none is given.
    """
    if not 0 <= port <= LAST_PORT:
        raise UsageError(f"--port {port}: must be between 0 and {LAST_PORT}")
    if token is not None and len(token) < _SHORTEST:
        raise UsageError(f"--token: at least {_SHORTEST} characters")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    given: Path | None = resolve_run(run, log) if run is not None else None
    library = Library(log or default_log_dir(), given)
    os.nice(_NICENESS)
    with serving(library, host, port, token) as server:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{server.effective_port}/"
        console.print(f"Dashboard at {url}{'' if token is None else f'?token={token}'}", markup=False, soft_wrap=True)
        console.print("Press Ctrl-C to end it.", style="dim")
        server.run()
    return 0
