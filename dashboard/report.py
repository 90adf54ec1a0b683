"""A run as one file: charts that can be zoomed, findings, and the passes and requests that are their evidence."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, overview, parts, pass_page, ranks_page, request_page, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.insight import examined
from schedscope.dashboard.library import Pending
from schedscope.dashboard.static import to_html
from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.manifest import own_version
from schedscope.replay.finding import plural

_PASSES = 6
_REQUESTS = 4
_DRAW = """
"use strict";
const graphs = [];
for (const data of document.querySelectorAll("script.figure")) {
  const place = data.previousElementSibling, figure = JSON.parse(data.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  if (!figure.layout.meta || !figure.layout.meta.time || place.closest(".alone")) continue;
  graphs.push(place);
  place.on("plotly_relayout", (event) => {
    const update = event["xaxis.range[0]"] !== undefined
      ? { "xaxis.range": [event["xaxis.range[0]"], event["xaxis.range[1]"]] }
      : event["xaxis.autorange"] ? { "xaxis.range": figure.layout.xaxis.range } : null;
    if (!update || place.dataset.told) return;
    for (const other of graphs) {
      other.dataset.told = "1";
      Plotly.relayout(other, { ...update, "xaxis.tickvals": null, "xaxis.ticktext": null })
        .then(() => { delete other.dataset.told; });
    }
  });
}
"""


def make_report(desk: Desk) -> str:
    """The report of what a desk looks at, as HTML. Works out whatever it needs, which takes seconds."""
    desk = replace(desk, patient=True)
    passes, requests = _evidence(desk)
    anchors = {_anchor("pass", rank, number) for rank, number in passes}
    anchors |= {_anchor("request", rank, rid) for rank, rid in requests}

    def href(link: str) -> str | None:
        parsed = urlsplit(link)
        query = {name: values[0] for name, values in parse_qs(parsed.query).items()}
        target = None
        if parsed.path == "/pass":
            target = _anchor("pass", query.get("rank", 0), query.get("pass", ""))
        elif parsed.path == "/request":
            target = _anchor("request", query.get("rank", 0), query.get("rid", ""))
        return f"#{target}" if target in anchors else None

    sections: list[Component | list[Component]] = [_head(desk), _sheet(desk, overview.PAGE)]
    if len(desk.timeline.extent.ranks) > 1:
        sections += [html.H2("Ranks"), _sheet(desk, ranks_page.PAGE)]
    for rank, rid in requests:
        at = replace(desk, cursor=replace(desk.cursor, rank=rank, rid=rid))
        sections.append(
            html.Section(_sheet(at, request_page.PAGE), id=_anchor("request", rank, rid), className="evidence alone")
        )
    for rank, number in passes:
        at = replace(desk, cursor=replace(desk.cursor, rank=rank, pass_number=number))
        sections.append(
            html.Section(_sheet(at, pass_page.PAGE), id=_anchor("pass", rank, number), className="evidence alone")
        )
    body = "\n".join(to_html(section, href) for section in sections)
    return _file(f"{desk.book.name} · schedscope report", body, desk.theme)


def _sheet(desk: Desk, page: Page) -> list[Component]:
    def draw(name: str) -> Any:
        try:
            return (page.charts.get(name) or page.parts[name])(desk)
        except SchedscopeError as error:
            return figures.blank(desk.theme, str(error)) if name in page.charts else html.P(str(error))

    return page.layout(desk, draw)


def _evidence(desk: Desk) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """Passes and requests that findings point at, then the slowest requests."""
    passes: dict[tuple[int, int], None] = {}
    requests: dict[tuple[int, str], None] = {}
    found = examined(desk)
    assert not isinstance(found, Pending)
    for finding in found.examination.findings:
        for each in finding.evidence[:1]:
            if each.pass_number is not None:
                passes[each.rank, each.pass_number] = None
            if each.rid is not None:
                requests[each.rank, each.rid] = None
    for slow in desk.timeline.slowest(desk.whole(), most=2):
        requests[slow.rank, slow.rid] = None
    recorded = desk.timeline.extent.level != "steps"
    return list(passes)[:_PASSES] if recorded else [], list(requests)[:_REQUESTS]


def _anchor(kind: str, rank: object, which: object) -> str:
    # A name from outside is no name for an anchor.
    return f"{kind}-{rank}-{hashlib.sha256(str(which).encode()).hexdigest()[:16]}"


def _head(desk: Desk) -> Component:
    manifest = desk.book.run.manifest
    window, extent = desk.window(), desk.timeline.extent
    begin, end = ((ns - extent.first_ns) / 1e9 for ns in (window.begin_ns, window.end_ns))
    facts: Iterable[tuple[str, str]] = (
        ("Run", desk.book.run.where),
        ("Recorded", f"{manifest.created}, {desk.book.status}, level {extent.level}"),
        ("Command", " ".join(manifest.command or []) or words.NOTHING),
        ("Time", f"{words.clock(begin, 0.1)} to {words.clock(end, 0.1)} from the first step"),
        (
            "Holds",
            ", ".join(
                [plural(extent.passes, "pass"), plural(extent.requests, "request"), plural(len(extent.ranks), "rank")]
            ),
        ),
        ("Made by", f"schedscope {own_version()}"),
    )
    listed = [part for name, value in facts for part in (html.Dt(name), html.Dd(words.name(value, 400)))]
    settings = [
        [name, words.name(str(value), 120)] for name, value in sorted(manifest.config.items()) if value is not None
    ]
    columns = [parts.Column("setting"), parts.Column("value")]
    more = html.Details([html.Summary("Settings"), parts.table(columns, settings, caption="Settings")])
    return html.Section(
        [html.H2("schedscope report"), html.Dl(listed, className="facts"), more], className="card wide lead"
    )


def _file(title: str, body: str, theme: str) -> str:
    assets = files("schedscope.dashboard").joinpath("assets")
    style = assets.joinpath("style.css").read_text(encoding="utf-8")
    scripts = [assets.joinpath("plotly.min.js").read_text(encoding="utf-8"), _DRAW]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    placed = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en" data-theme="{theme}">\n<head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f'<body class="report"><main>{body}</main>{placed}</body>\n</html>\n'
    )
