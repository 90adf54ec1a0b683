"""A pass under other policies."""

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
from schedscope.dashboard.rebuilt import alternatives
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.palette import GREY
from schedscope.replay.palette import POLICIES as POLICY_HUES
from schedscope.replay.recorded import RecordedPass
from schedscope.replay.redecide import Redecided


def policies(desk: Desk) -> Component:
    """The same pass under every policy, side by side."""
    it, cursor = chosen(desk), desk.cursor
    title = "The same pass under other policies"
    try:
        found = alternatives(desk, it.rank, it.number)
    except SchedscopeError as error:
        return parts.card(title, html.P(f"It can't be decided again: {error}"), wide=True)
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Rebuilding the scheduler as it was before this pass…"), wide=True)
    columns = [
        Column("policy"),
        Column("moved", True, "requests that stand elsewhere in the queue than recorded"),
        Column("admitted", True),
        Column("tokens", True, "to compute"),
        Column("cached", True, "tokens that those admitted find in the cache"),
        Column("gets in as well"),
        Column("stays out"),
        Column("first place that differs"),
    ]
    rows, classes = [], []
    for each in found:
        own = each.policy == it.row["active_policy"]
        here = each.policy == cursor.policy
        target = cursor.href("/pass", rank=it.rank, pass_number=it.number, policy=None if own or here else each.policy)
        name = parts.link(parts.chip(each.policy, POLICY_HUES.get(each.policy, GREY), desk.theme), target)
        if each.again is None:
            rows.append([name, "", "", "", "", words.name(each.problem or "", 120), "", ""])
            classes.append("off")
            continue
        rows.append([name, *_compared(desk, it, each.again)])
        classes.append("chosen" if here else "own" if own else "")
    table = parts.table(columns, rows, caption="This pass under every policy", classes=classes, id="policies-table")
    return parts.card(
        title, table, note="same queue, same cache, same moment; choose one to see its order above", wide=True
    )


def _compared(desk: Desk, it: RecordedPass, again: Redecided) -> list[Any]:
    recorded, other = again.recorded.admission, again.other.admission
    if other is None or recorded is None:
        return ["", "", "", "", again.other.gate or "", "", ""]
    before, after = {v.rid: v for v in recorded.admitted}, {v.rid: v for v in other.admitted}

    def named(rids: list[str]) -> list[Any]:
        shown: list[Any] = []
        for rid in rids[:3]:
            shown += [", " if shown else "", request_link(desk.cursor, it.rank, rid, 16)]
        return [*shown, f" and {len(rids) - 3} more"] if len(rids) > 3 else shown

    return [
        words.count(len(again.moves())),
        words.count(len(after)),
        words.count(sum(v.extend_len or 0 for v in after.values())),
        words.count(sum(v.prefix_len for v in after.values())),
        named([rid for rid in after if rid not in before]),
        named([rid for rid in before if rid not in after]),
        _first_difference(desk, it, again),
    ]


def _first_difference(desk: Desk, it: RecordedPass, again: Redecided) -> Any:
    if again.recorded.ordering is None or again.other.ordering is None:
        return ""
    pairs = zip(again.recorded.ordering.ranked, again.other.ordering.ranked, strict=False)
    for place, (one, two) in enumerate(pairs):
        if one.request.rid != two.request.rid:
            return [f"{place}: ", request_link(desk.cursor, it.rank, two.request.rid, 16)]
    return html.Span("none", className="quiet")
