"""Why a pass came out so, and what alone would have let someone in."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.chosen_pass import chosen
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import request_link
from schedscope.dashboard.parts import Column
from schedscope.dashboard.rebuilt import explained_pass
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.explain_words import (
    against_words,
    flip_words,
    held_words,
    mark_words,
    match_words,
    pass_sentence,
    pool_words,
)

_TOLD = 5
"""Requests whose place is explained."""


def why(desk: Desk) -> Component:
    """Why it came out so: read off the decision, made again, with changes that were checked to change it."""
    it = chosen(desk)
    try:
        found = explained_pass(desk, it.rank, it.number)
    except SchedscopeError as error:
        return parts.card("Why", html.P(f"It can't be explained: {words.name(str(error), 300)}"), wide=True)
    if isinstance(found, Pending):
        return parts.card("Why", parts.working("Deciding this pass again…"), wide=True)
    said: list[Any] = [html.P(html.Strong(pass_sentence(found)))]
    if found.mark_before is not None:
        said.append(html.P(f"When it began, {mark_words(found.mark_before)}."))
    if found.mark_after is not None:
        said.append(html.P(words.sentence(mark_words(found.mark_after))))
    if found.ending.stop == "NO_TOKEN":
        said.append(html.P(f"The pool: {pool_words(found.pool)}."))
    told = [place for place in found.places if place.flips or place.ahead][:_TOLD]
    rows = []
    for place in told:
        held = held_words(place)
        behind = "first in the queue" if place.against is None else against_words(place.against)
        known = match_words(place)
        lines = [flip_words(flip) for flip in (*place.flips, *place.ahead)]
        rows.append(
            [
                str(place.place),
                request_link(desk.cursor, it.rank, place.rid, 24),
                words.name(behind, 160),
                words.name(f"{held}; {known}" if held else known, 200),
                html.Ul([html.Li(words.name(line, 200)) for line in lines], className="plain"),
            ]
        )
    if rows:
        columns = [
            Column("place", True),
            Column("request"),
            Column("stands there because"),
            Column("in the cache"),
            Column("what alone would have changed it"),
        ]
        said.append(parts.table(columns, rows, caption="What would have let requests in", id="why-table"))
    note = f"decided again and found identical; {found.checked} claims checked by deciding once more"
    return parts.card("Why", *said, note=note, wide=True)
