"""Serves the dashboard: waitress, whose threads never wait for a slow browser."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import waitress
from schedscope.dashboard.app import make_app
from schedscope.dashboard.library import Library
from schedscope.engine.errors import ServerError

_THREADS = 12
_CONNECTIONS = 1_000


def make_server(library: Library, host: str, port: int, token: str | None) -> Any:
    """A server that is bound; `run()` serves, `close()` ends it. Raises ServerError where it can't be bound."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        return waitress.create_server(
            make_app(library, token).server,
            host=host,
            port=port,
            threads=_THREADS,
            connection_limit=_CONNECTIONS,
            ident=None,
        )
    except (OSError, socket.gaierror, ValueError) as error:
        raise ServerError(f"the dashboard can't be served at {host}:{port}: {error}; choose another --port") from None


@contextmanager
def serving(library: Library, host: str, port: int, token: str | None) -> Iterator[Any]:
    """The same, closed at the end."""
    server = make_server(library, host, port, token)
    try:
        yield server
    finally:
        server.close()
