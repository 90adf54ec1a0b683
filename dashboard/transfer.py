"""How answers travel: compressed, and what never changes only once."""

from __future__ import annotations

import gzip
from functools import lru_cache

import flask

_SMALL = 1_000
"""Bytes that aren't worth it."""
_TEXT = {"text/html", "text/css", "text/javascript", "application/json"}
_SCRIPTS = ("/assets/", "/_dash-component-suites/")
"""Paths of files that belong to a version of schedscope or Dash; their URLs name it."""
_FOR_GOOD = "max-age=31536000, immutable"


def make_light(server: flask.Flask) -> None:
    """Compress what is asked for compressed, and let browsers keep scripts and styles whose URLs name their version."""

    @server.after_request
    def lighten(response: flask.Response) -> flask.Response:
        request = flask.request
        is_script = request.path.startswith(_SCRIPTS)
        if is_script and response.status_code == 200 and ("m" in request.args or ".v" in request.path):
            response.headers["Cache-Control"] = _FOR_GOOD
        if response.status_code != 200 or response.mimetype not in _TEXT or "Content-Encoding" in response.headers:
            return response
        response.headers.add("Vary", "Accept-Encoding")
        if request.accept_encodings["gzip"] <= 0:
            return response
        response.direct_passthrough = False
        plain = response.get_data()
        if len(plain) >= _SMALL:
            response.set_data(_well(plain) if is_script else gzip.compress(plain, 1))
            response.headers["Content-Encoding"] = "gzip"
        return response


@lru_cache(maxsize=32)
def _well(plain: bytes) -> bytes:
    """As small as can be. By content, so that what is kept is never of another version."""
    return gzip.compress(plain, 9)
