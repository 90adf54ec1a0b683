"""A companion over HTTP: `POST /keep` makes it keep what lies around this moment, `GET /status` tells how it is."""

from __future__ import annotations

import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from schedscope.engine.errors import UsageError
from schedscope.recorder.companion import Companion

LOCAL = "127.0.0.1"
_THERE_IS = "there are: POST /keep?reason=TEXT and GET /status"


class Control:
    """Serves while it is entered. Raises UsageError where it can't listen.

    Args:
        address: `PORT` or `HOST:PORT`; without a host only this machine is served, and port 0 is any free one.
    """

    def __init__(self, companion: Companion, address: str) -> None:
        try:
            place = urlsplit(f"//{address}" if ":" in address else f"//{LOCAL}:{address}")
            self._server = _Server((place.hostname or LOCAL, int(place.netloc.rpartition(":")[2])), _handler(companion))
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"--control {address}: can't listen there: {error}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="schedscope-control", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = str(self._server.server_address[0]), self._server.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: whoever hangs up in the midst of an answer doesn't want it."""


def _handler(companion: Companion) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                url = urlsplit(self.path)
            except ValueError as error:
                return self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            if url.path != "/keep":
                return self._answer(HTTPStatus.NOT_FOUND, {"error": f"no POST {url.path}; {_THERE_IS}"})
            reason = parse_qs(url.query).get("reason", ["asked over HTTP"])[0]
            if not companion.keep(reason):
                return self._answer(HTTPStatus.CONFLICT, {"error": "as many moments are kept as may be"})
            return self._answer(HTTPStatus.ACCEPTED, {"reason": reason})

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/status":
                return self._answer(HTTPStatus.NOT_FOUND, {"error": f"no GET {self.path}; {_THERE_IS}"})
            return self._answer(HTTPStatus.OK, companion.status())

        def _answer(self, status: HTTPStatus, document: object) -> None:
            body = json.dumps(document).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: what it does is in the companion's log."""

    return Handler
