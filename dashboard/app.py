"""The dashboard: its shell, its routes, and the question that a browser asks.

A view is a URL. An answer is the page of a URL, or some of its panels when only the query changed or the run has grown.
It is HTML and figures, which the browser puts in their places (assets/view.js, assets/charts.js): a Dash component for
each cell of a table would be told of everything that happens. There is never more than one question under way.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flask
from dash import ClientsideFunction, Dash, Input, Output, dcc, html
from dash.development.base_component import Component
from schedscope.dashboard import (
    cache_page,
    compare_page,
    figures,
    overview,
    parts,
    pass_page,
    ranks_page,
    request_page,
    runs_page,
    words,
)
from schedscope.dashboard.cursor import Cursor
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.guard import protect
from schedscope.dashboard.library import Library
from schedscope.dashboard.metrics import CONTENT_TYPE, exposition
from schedscope.dashboard.report import make_report
from schedscope.dashboard.static import to_html
from schedscope.dashboard.transfer import make_light
from schedscope.engine.errors import RunNotFoundError, SchedscopeError, UsageError

PAGES = (overview.PAGE, pass_page.PAGE, request_page.PAGE, cache_page.PAGE, ranks_page.PAGE, compare_page.PAGE)
_LOG = logging.getLogger(__name__)
_LASTS = (("1 min", 60), ("5 min", 300), ("15 min", 900), ("1 h", 3600))
_THEME = (
    "document.documentElement.dataset.theme=localStorage.getItem('theme')||"
    "(matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light')"
)
_INDEX = f"""<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<script>{_THEME}</script>
{{%favicon%}}
{{%css%}}
</head>
<body>
{{%app_entry%}}
<noscript>The dashboard needs JavaScript.</noscript>
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>"""

_NOT_NEEDED = ("/polyfill@", "/dash_table/")
"""Names in the URLs of Dash's scripts: for browsers of long ago, and a component that isn't used."""


class Wanted(NamedTuple):
    """What a browser asks for."""

    path: str
    cursor: Cursor
    generation: int = 0
    """Of the run it has seen; 0: draw whatever it is."""
    panels: tuple[str, ...] | None = None
    """Names of those to draw again; None: the whole page."""
    bar: bool = True
    """And for what stands above them."""

    @classmethod
    def parse(cls, given: Any) -> Wanted:
        """Raises UsageError."""
        if not isinstance(given, dict):
            raise UsageError("a question of the dashboard is an object")
        cursor = Cursor.parse(str(given.get("search", "")))
        if given.get("theme") in ("dark", "light"):
            cursor = replace(cursor, theme=given["theme"])
        named = given.get("panels")
        generation = given.get("generation") or 0
        if not isinstance(named, list | None) or not isinstance(generation, int):
            raise UsageError("a question names panels in a list, and a generation by its number")
        panels = None if named is None else tuple(str(name) for name in named)
        return cls(str(given.get("path", "/")), cursor, generation, panels, bool(given.get("bar", True)))


class _App(Dash):  # type: ignore[misc]
    def interpolate_index(self, **pieces: str) -> str:
        """Without scripts that nothing here needs: they cost a browser more than all of the page."""
        scripts = pieces["scripts"].splitlines()
        kept = (each for each in scripts if not any(name in each for name in _NOT_NEEDED))
        index: str = super().interpolate_index(**pieces | {"scripts": "\n".join(kept)})
        return index


def make_app(library: Library, token: str | None = None) -> Dash:
    """The dashboard over a library, ready to be served.

    Args:
        token: what a browser has to show; None: it is for this machine only.
    """
    app = _App(
        __name__,
        title="schedscope",
        update_title=None,
        serve_locally=True,
        compress=False,
        enable_mcp=False,
        add_log_handler=False,
        suppress_callback_exceptions=True,
        index_string=_INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.layout = _shell()
    _ask(app, library)
    server: flask.Flask = app.server
    protect(server, token)
    _check_questions(app, server)
    _headers(app, server)
    make_light(server)
    _more_routes(server, library)
    server.add_url_rule("/healthz", "healthz", lambda: flask.Response("ok\n", mimetype="text/plain"))
    return app


def _headers(app: Dash, server: flask.Flask) -> None:
    digest = base64.b64encode(hashlib.sha256(_THEME.encode()).digest()).decode()
    # What is inline is known beforehand: nothing that a client sent is ever run, whatever a page made of it.
    scripts = " ".join(["'self'", *app.csp_hashes(), f"'sha256-{digest}'"])
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @server.after_request
    def add(response: flask.Response) -> flask.Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        return response


def _check_questions(app: Dash, server: flask.Flask) -> None:
    """What none of the pages here would ask is said to be wrong before Dash stumbles over it."""

    @server.before_request
    def check() -> flask.Response | None:
        if flask.request.endpoint != f"{app.config.routes_pathname_prefix}_dash-update-component":
            return None
        asked = flask.request.get_json(silent=True)
        if isinstance(asked, dict) and _is_question(asked):
            return None
        return flask.Response("not a question that this dashboard's pages ask\n", 400, mimetype="text/plain")


def _is_question(asked: dict[str, Any]) -> bool:
    inputs = asked.get("inputs")
    return (
        asked.get("output") == "answer.data"
        and asked.get("outputs") == {"id": "answer", "property": "data"}
        and isinstance(inputs, list)
        and len(inputs) == 1
        and isinstance(inputs[0], dict)
        and inputs[0].get("id") == "question"
        and inputs[0].get("property") == "data"
        and isinstance(asked.get("state", []), list)
        and isinstance(asked.get("changedPropIds", []), list)
    )


def _more_routes(server: flask.Flask, library: Library) -> None:
    """What is not for looking at in a browser."""

    def reply(make: Callable[[], flask.Response]) -> flask.Response:
        try:
            return make()
        except UsageError as error:
            return flask.Response(f"{error}\n", 400, mimetype="text/plain")
        except SchedscopeError as error:
            return flask.Response(f"{error}\n", 404, mimetype="text/plain")

    def metrics() -> flask.Response:
        text = exposition(library.book(flask.request.args.get("run")))
        return flask.Response(text, content_type=CONTENT_TYPE)

    def report() -> flask.Response:
        cursor = Cursor.parse(flask.request.query_string.decode())
        desk = _desk(library, cursor)
        response = flask.Response(make_report(desk), mimetype="text/html")
        response.headers["Content-Disposition"] = f'attachment; filename="{desk.book.name}.html"'
        return response

    server.add_url_rule("/metrics", "metrics", lambda: reply(metrics))
    server.add_url_rule("/report.html", "report", lambda: reply(report))


# ---- the shell ---------------------------------------------------------------------------------------------------


def _shell() -> Component:
    links = [html.A(page.title, href=page.path, **{"data-page": page.path}) for page in (*PAGES, runs_page.PAGE)]
    return html.Div(
        [
            dcc.Store(id="question"),
            dcc.Store(id="answer"),
            dcc.Store(id="noted"),
            html.A("Skip to the page", href="#page", className="skip", **{"data-native": "1"}),
            html.H1("schedscope", className="unseen"),
            html.Header(
                [
                    html.A(["sched", html.B("scope")], href="/", className="brand", **{"data-page": "/"}),
                    html.Nav(links, **{"aria-label": "Views"}),
                    html.Div(
                        [
                            html.Div(**{"data-search": "Request id, or number of a pass"}),
                            html.Button("Copy link", id="copy", title="Copy the URL of exactly this view"),
                            html.Button(
                                "Theme",
                                id="theme",
                                title="Dark or light",
                                **{"aria-label": "Switch between dark and light"},
                            ),
                        ],
                        className="tools",
                    ),
                ],
                className="top",
            ),
            html.Div(id="bar", className="bar"),
            html.Div(id="offline", className="notice bad", hidden=True, role="alert"),
            html.Div(id="notice"),
            html.Main(parts.working("Opening the run…"), id="page", tabIndex=-1),
        ],
        id="shell",
    )


def _bar(desk: Desk | None, library: Library, cursor: Cursor) -> list[Component]:
    """Run, status, rank and time."""
    try:
        names = [info.path.name for info in library.runs()]
    except SchedscopeError:
        names = []
    current = desk.book.name if desk is not None else cursor.run
    if current is not None and current not in names:
        names.insert(0, current)
    shown = [parts.select("Run", "run", [(words.name(name, 60), name) for name in names], current or "")]
    if desk is None:
        return shown
    extent, window = desk.timeline.extent, desk.window()
    status = desk.book.status
    shown.append(
        html.Span(
            [html.I(**{"aria-hidden": "true"}), "live" if desk.book.live else status], className=f"status {status}"
        )
    )
    if len(extent.ranks) > 1:
        ranks = [("all ranks", "")] + [(f"rank {each.rank}", str(each.rank)) for each in extent.ranks]
        shown.append(parts.select("Rank", "rank", ranks, "" if cursor.rank is None else str(cursor.rank)))
    step = max((window.end_ns - window.begin_ns) / 1e9 / 1000, 0.001)
    begin, end = ((ns - extent.first_ns) / 1e9 for ns in (window.begin_ns, window.end_ns))
    whole = cursor.begin_ns is None and cursor.end_ns is None and cursor.last_s is None
    shown.append(
        html.Div(
            [
                html.Span(f"{words.clock(begin, step)} – {words.clock(end, step)}", className="when"),
                html.Span(words.seconds(end - begin), className="quiet"),
                *(
                    html.Button(label, **{"data-last": str(lasts), "aria-pressed": str(cursor.last_s == lasts).lower()})
                    for label, lasts in _LASTS
                    if lasts * 1e9 < extent.last_ns - extent.first_ns
                ),
                html.Button("Whole run", **{"data-last": "", "aria-pressed": str(whole).lower()}),
            ],
            className="time",
        )
    )
    shown.append(
        html.A(
            "Report",
            href=cursor.href("/report.html"),
            className="action",
            download=f"{desk.book.name}.html",
            title="What is looked at, as one file",
        )
    )
    return shown


# ---- questions ---------------------------------------------------------------------------------------------------


def _ask(app: Dash, library: Library) -> None:
    @app.callback(Output("answer", "data"), Input("question", "data"), prevent_initial_call=True)  # type: ignore[untyped-decorator]
    def answer(given: dict[str, Any]) -> dict[str, Any]:
        return _answer(library, given)

    app.clientside_callback(
        ClientsideFunction("view", "done"),
        Output("noted", "data", allow_duplicate=True),
        Input("answer", "data"),
        prevent_initial_call="initial_duplicate",
    )


def _answer(library: Library, given: dict[str, Any]) -> dict[str, Any]:
    """What to show, as HTML and figures; an error in words stands where it would have been."""
    wanted = Wanted("/", Cursor())
    try:
        wanted = Wanted.parse(given)
        if wanted.path == runs_page.PAGE.path:
            shown = {"page": to_html(runs_page.layout(library, wanted.cursor))}
            return _done(given, None, "Runs") | shown | _above(None, library, wanted)
        page = _page(wanted.path)
        desk = _desk(library, wanted.cursor)
        done = _done(given, desk, page.title)
        if wanted.panels is None:
            return done | _whole(page, desk) | _above(desk, library, wanted)
        if wanted.generation == desk.book.generation:
            return done
        return done | _panels(page, desk, wanted.panels) | _above(desk, library, wanted)
    except Exception as error:
        done, failed = _done(given, None, "Error"), to_html(_failed(error))
        if wanted.panels is None:
            return done | _above(None, library, wanted) | {"page": failed}
        return done | {"notice": failed}


def _above(desk: Desk | None, library: Library, wanted: Wanted) -> dict[str, Any]:
    """What stands above a page."""
    if not wanted.bar:
        return {"notice": ""}
    return {"notice": "", "bar": to_html(_bar(desk, library, wanted.cursor if desk is None else desk.cursor))}


def _whole(page: Page, desk: Desk) -> dict[str, Any]:
    """A page with those of its panels that come first."""
    charts: dict[str, Figure] = {}
    rest: list[str] = []

    def draw(name: str) -> Any:
        if page.first and name not in page.first:
            rest.append(name)
            return None
        drawn = _draw(page, desk, name)
        if name not in page.charts:
            return drawn
        charts[name] = drawn
        return None

    return {"page": to_html(page.layout(desk, draw)), "charts": charts, "rest": rest}


def _panels(page: Page, desk: Desk, names: tuple[str, ...]) -> dict[str, Any]:
    """Some panels of a page that is there."""
    return {
        "charts": {name: _draw(page, desk, name) for name in names if name in page.charts},
        "parts": {name: to_html(_draw(page, desk, name)) for name in names if name in page.parts},
    }


def _page(path: str) -> Page:
    for page in PAGES:
        if page.path == path:
            return page
    raise RunNotFoundError(f"there is no page {path[:60]!r}; there are: {', '.join(page.path for page in PAGES)}")


def _desk(library: Library, cursor: Cursor) -> Desk:
    book = library.book(cursor.run)
    desk = Desk(library, book, replace(cursor, run=book.name))
    desk.window()
    return desk


def _draw(page: Page, desk: Desk, name: str) -> Any:
    """A panel; one that can't be drawn says so in its own place, and the others stay."""
    try:
        return (page.charts.get(name) or page.parts[name])(desk)
    except Exception as error:
        if not isinstance(error, SchedscopeError):
            _LOG.exception("a panel could not be drawn: %s", name)
        if name in page.charts:
            return figures.blank(desk.theme, words.name(str(error), 120))
        return _failed(error)


def _done(given: Any, desk: Desk | None, title: str) -> dict[str, Any]:
    serial = given.get("serial", 0) if isinstance(given, dict) else 0
    if desk is None:
        return {"serial": serial, "generation": 0, "live": False, "title": title, "run": None}
    return {
        "serial": serial,
        "generation": desk.book.generation,
        "live": desk.book.live,
        "title": f"{title} · {desk.book.name}",
        "run": desk.book.name,
        "origin": str(desk.timeline.extent.first_ns),
        "window": [str(desk.window().begin_ns), str(desk.window().end_ns)],
    }


_WHAT_TO_DO: dict[type[SchedscopeError], str] = {
    UsageError: "Something in the address of this view can't be.",
    RunNotFoundError: "It is not there.",
}


def _failed(error: Exception) -> Component:
    """An error in words; what is a bug goes to the server's log, too."""
    runs = parts.link("See which runs there are", "/runs", className="action")
    over = parts.link("Overview of the newest run", "/", className="action")
    if isinstance(error, SchedscopeError):
        title = _WHAT_TO_DO.get(type(error), "This can't be shown.")
        return parts.notice(title, words.name(str(error), 600), html.Span([runs, over], className="ways"), tone="bad")
    _LOG.exception("a view could not be drawn", exc_info=error)
    said = f"{type(error).__name__}: {words.name(str(error), 300)}"
    return parts.notice(
        "The dashboard has a bug: this view could not be drawn.",
        said,
        "Its server goes on; the whole story is in its log. Please report it.",
        html.Span([runs, over], className="ways"),
        tone="bad",
    )
