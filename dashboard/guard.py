"""Who may look: everyone on this machine, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
from hashlib import sha256
from urllib.parse import urlencode

import flask
from werkzeug.wrappers import Response

COOKIE = "schedscope_dashboard"
OPEN_PATHS = {"/healthz"}
"""Answered to anyone: they tell nothing."""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def protect(server: flask.Flask, token: str | None) -> None:
    """Turn away requests without the token; without one, those that reach this machine under another name.

    The latter is how a web page elsewhere would read a local server through its reader's browser.
    """

    def check() -> Response | None:
        request = flask.request
        if request.path in OPEN_PATHS:
            return None
        headers = request.headers
        if headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            return _refuse(403, "Other web pages can link to this dashboard, but not use it.")
        if token is None:
            name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
            return None if is_loopback(name) else _refuse(403, "This dashboard answers on this machine only.")
        given = request.args.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            return _let_in(token)
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        cookie = request.cookies.get(COOKIE, "")
        if hmac.compare_digest(bearer.encode(), token.encode()) or hmac.compare_digest(cookie, _seal(token)):
            return None
        return _refuse(401, "This dashboard needs a token. Open the link that its server printed when it started.")

    server.before_request(check)


def _let_in(token: str) -> Response | None:
    """Keep the token out of the address bar, and of what is copied from it."""
    request = flask.request
    if request.method != "GET":
        return None
    others = [(name, value) for name, value in request.args.items(multi=True) if name != "token"]
    target = request.path + (f"?{urlencode(others)}" if others else "")
    # A path that begins with two slashes would lead to another host.
    response = flask.redirect("/" + target.lstrip("/"))
    response.set_cookie(COOKIE, _seal(token), httponly=True, samesite="Lax")
    return response


def _seal(token: str) -> str:
    return sha256(b"schedscope dashboard " + token.encode()).hexdigest()


def _refuse(status: int, why: str) -> Response:
    return flask.Response(why + "\n", status, mimetype="text/plain")
