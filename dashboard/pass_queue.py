"""The queue of a pass as a table."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.chosen_pass import chosen
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.links import request_link
from schedscope.dashboard.parts import Column
from schedscope.replay.palette import VERDICTS
from schedscope.replay.recorded import Place, RecordedPass

_SHOWN = 300
"""Requests in the table."""


def queue(desk: Desk) -> Component:
    """Every request of the pass, as sorted."""
    it = chosen(desk)
    if not it.places:
        if not it.row["queue_len"]:
            return parts.card("Queue", html.P("Nobody was waiting."), wide=True)
        said = "The decisions of this pass are not in the log, for want of --level decisions or because of --sample."
        return parts.card("Queue", html.P(said), wide=True)
    shown = it.places[:_SHOWN]
    held = any(place.deprioritized for place in it.places)
    columns = [
        Column("place", True),
        Column("moved", True),
        Column("request"),
        Column("key"),
        Column("matched", True, "tokens found in the cache"),
    ]
    columns += [Column("held back for")] if held else []
    columns += [Column("verdict")]
    rows = [_row(desk, it, place, held) for place in shown]
    table = parts.table(
        columns,
        rows,
        caption=f"The queue of pass {it.number}, as sorted",
        classes=[place.fate for place in shown],
        id="queue-table",
    )
    more = f"the first {_SHOWN} of {len(it.places):,}" if len(it.places) > _SHOWN else f"{len(it.places):,} requests"
    return parts.card("Queue", table, note=more, wide=True)


def _row(desk: Desk, it: RecordedPass, place: Place, held: bool) -> list[Any]:
    cursor = desk.cursor
    moved: Any = "chunk"
    if place.before is not None and place.after is not None:
        change = place.before - place.after
        moved = html.Span(
            "·" if not change else f"{'↑' if change > 0 else '↓'} {abs(change)}",
            className="up" if change > 0 else "down" if change else "quiet",
            title=f"stood at {place.before}",
        )
    cells: list[Any] = [
        "" if place.after is None else f"{place.after}",
        moved,
        request_link(cursor, it.rank, place.rid),
        "  ".join(_value(value) for name, value in place.key if name != "rid"),
        words.count(place.matched),
    ]
    if held:
        cells.append(_partner(desk, it, place))
    cells.append(
        html.Span(
            [html.I(style={"background": VERDICTS[place.fate].on(desk.theme)}), words.name(place.words, 160)],
            className="chip",
        )
    )
    return cells


def _partner(desk: Desk, it: RecordedPass, place: Place) -> Any:
    if not place.deprioritized:
        return ""
    if place.partner is None:
        return "everyone"
    return [request_link(desk.cursor, it.rank, place.partner, 20), f" {words.count(place.shared_len)} shared"]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value + 0.0:g}"
    if isinstance(value, list):
        return "/".join(f"{-branch[0]:g}" for branch in value[:-1] if isinstance(branch, list)) or "root"
    return words.name(str(value), 24)
