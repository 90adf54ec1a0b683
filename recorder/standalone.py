"""A companion for a server that was not started by `schedscope record`, but asked to record by its environment.

It is a process of its own, and ends by itself when the server that started it and all its schedulers are gone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import MutableMapping

from schedscope.recorder.sink import SOCKET_VARIABLE

RECORD_VARIABLE = "SCHEDSCOPE_RECORD"
"""Environment: the folder of runs, or their URL, in which to make one of this server."""
OPTIONS_VARIABLE = "SCHEDSCOPE_RECORD_OPTIONS"
"""Environment: options as `schedscope record` takes them."""

_PROGRAM = "schedscope.cli.companion"

log = logging.getLogger("schedscope.recorder")


def ensure_companion(environ: MutableMapping[str, str] = os.environ) -> None:
    """Start a companion if one is asked for and there is none; then its address is in the environment.

    To be called before the processes of the schedulers are started. Says in the log what fails, and raises nothing.
    """
    folder = environ.get(RECORD_VARIABLE)
    if not folder or environ.get(SOCKET_VARIABLE):
        return
    command = [sys.executable, "-m", _PROGRAM, folder, *sys.orig_argv]
    try:
        # Its standard input ends with this process, however that ends.
        companion = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert companion.stdout is not None
        line = companion.stdout.readline()
        if not line:
            raise ChildProcessError(f"it ended with exit code {companion.wait()}")
        environ.update(json.loads(line))
        _STARTED.append(companion)
    except (OSError, ValueError) as error:
        log.warning("nothing is recorded: the recorder for %s can't be started: %s", folder, error)


_STARTED: list[subprocess.Popen[str]] = []
"""Keeps their standard inputs open."""
