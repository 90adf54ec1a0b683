"""Links between pages, which keep the rest of what is looked at."""

from __future__ import annotations

from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.cursor import Cursor


def pass_link(cursor: Cursor, rank: int, number: int | None) -> Component | str:
    """To a pass."""
    if number is None:
        return words.NOTHING
    return parts.link(f"{number:,}", cursor.href("/pass", rank=rank, pass_number=number), title="Open this pass")


def request_link(cursor: Cursor, rank: int, rid: str | None, most: int = 28) -> Component | str:
    """To a request."""
    if rid is None:
        return words.NOTHING
    return parts.link(
        words.name(rid, most), cursor.href("/request", rank=rank, rid=rid), className="rid", title="Open this request"
    )
