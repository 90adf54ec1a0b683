"""Which runs there are."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.cursor import Cursor
from schedscope.dashboard.desk import Page
from schedscope.dashboard.library import Library
from schedscope.dashboard.parts import Column
from schedscope.recorder.store import shown_url


def layout(library: Library, cursor: Cursor) -> list[Component]:
    """The list, newest first. Raises UsageError, StoreError."""
    found = library.runs(fresh=True)
    where = shown_url(str(library.log))
    if not found:
        return [
            parts.notice(
                f"There is no run in {where} yet.",
                ["Record one: ", parts.code("schedscope record -- serve")],
                ["Or see what a run looks like: ", parts.code("schedscope demo")],
            )
        ]
    rows: list[list[Any]] = []
    for info in found:
        name = words.name(info.path.name, 60)
        rows.append(
            [
                name if info.problem is not None else parts.link(name, Cursor(run=info.path.name).href("/")),
                info.created[:19].replace("T", " "),
                html.Span([html.I(**{"aria-hidden": "true"}), info.status], className=f"status {info.status}"),
                words.count(info.ranks),
                words.count(info.passes),
                words.count(info.requests),
                f"{info.bytes / 1e6:,.1f} MB",
                ""
                if info.problem is not None or cursor.run in (None, info.path.name)
                else parts.link("compare", cursor.href("/compare", other=info.path.name), className="action"),
                words.name(info.problem or "", 200),
            ]
        )
    columns = [
        Column("run"),
        Column("created, UTC"),
        Column("status"),
        Column("ranks", True),
        Column("passes", True),
        Column("requests", True),
        Column("size", True),
        Column(""),
        Column(""),
    ]
    return [
        parts.card(
            "Runs", parts.table(columns, rows, caption=f"Runs in {where}", id="runs-table"), note=where, wide=True
        )
    ]


def _nothing(*_: Any) -> list[Component]:
    return []


PAGE = Page(path="/runs", title="Runs", layout=_nothing, charts={}, parts={})
