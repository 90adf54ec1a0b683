"""One pass: who stood where, who got in, which numbers decided, and what other policies would have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, parts, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import request_link
from schedscope.dashboard.parts import Column
from schedscope.dashboard.rebuilt import alternatives, explained_pass
from schedscope.engine.errors import RunFormatError, RunNotFoundError, SchedscopeError
from schedscope.replay.explain_words import (
    against_words,
    flip_words,
    held_words,
    mark_words,
    match_words,
    pass_sentence,
    pool_words,
)
from schedscope.replay.palette import GREY, VERDICTS, VERMILION
from schedscope.replay.palette import POLICIES as POLICY_HUES
from schedscope.replay.recorded import Place, RecordedPass, read_pass
from schedscope.replay.redecide import Redecided

_TOLD = 5
"""Requests whose place is explained."""
_SHOWN = 300
"""Requests in the table."""
FATES = {
    "admitted": "admitted",
    "chunk": "next chunk",
    "refused": "refused",
    "held_back": "held back",
    "waiting": "not looked at",
}


def number_of(desk: Desk) -> tuple[int, int]:
    """Rank and number of the pass that is looked at; by default the last. Raises RunNotFoundError, RunFormatError."""
    rank = desk.cursor.rank if desk.cursor.rank is not None else desk.timeline.extent.ranks[0].rank
    number = desk.cursor.pass_number
    if number is None:
        number = desk.timeline.pass_at(desk.cursor.at_ns or desk.timeline.extent.last_ns, rank)
    if desk.timeline.extent.level == "steps":
        raise RunFormatError(f"run {desk.book.name} was recorded at level steps: its passes are not in the log")
    if number is None:
        raise RunNotFoundError(f"rank {rank} of run {desk.book.name} has no pass yet")
    return rank, number


def chosen(desk: Desk) -> RecordedPass:
    """The pass that is looked at. Raises RunNotFoundError, RunFormatError."""
    rank, number = number_of(desk)
    return desk.once(("pass", rank, number), lambda: read_pass(desk.book.run, rank, number))


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The page of a pass."""
    del desk
    return [
        parts.part("head", draw("head")),
        parts.part("why", draw("why")),
        html.Div(
            [
                parts.chart(
                    "order", "Before and after sorting", draw("order"), note="front of the queue on top", tall=True
                ),
                html.Div(
                    [
                        parts.chart(
                            "total",
                            "Memory left",
                            draw("total"),
                            note="tokens, after what is reserved for outputs",
                            flat=True,
                        ),
                        parts.chart(
                            "input",
                            "Prefill budget left",
                            draw("input"),
                            note="tokens of max_prefill_tokens",
                            flat=True,
                        ),
                        parts.chart(
                            "chunk", "Chunk left", draw("chunk"), note="tokens of chunked_prefill_size", flat=True
                        ),
                    ],
                    className="stack",
                ),
            ],
            className="grid",
        ),
        parts.part("queue", draw("queue")),
        parts.part("policies", draw("policies")),
    ]


def head(desk: Desk) -> Component:
    """Which pass, and why it went so."""
    it, cursor = chosen(desk), desk.cursor
    row, step = it.row, it.step
    extent = next(each for each in desk.timeline.extent.ranks if each.rank == it.rank)
    first, last = extent.first_pass or 0, max(extent.last_pass or 0, it.number)
    steps = [
        ("‹ previous", it.number - 1, it.number > first),
        ("next ›", it.number + 1, it.number < last),
        ("last ›|", last, it.number < last),
    ]
    ways = [
        parts.link(label, cursor.href("/pass", rank=it.rank, pass_number=number), className="action")
        if there
        else html.Span(label, className="action off")
        for label, number, there in steps
    ]
    if step is not None:
        around = int(2e9)
        ways.append(
            parts.link(
                "on the time axis",
                cursor.href(
                    "/",
                    rank=it.rank,
                    at_ns=step["start_ns"],
                    begin_ns=max(step["start_ns"] - around, 0),
                    end_ns=step["end_ns"] + around,
                    last_s=None,
                ),
                className="action",
            )
        )
    when = (
        "" if step is None else f"at {words.clock((step['start_ns'] - desk.timeline.extent.first_ns) / 1e9, 0.001)}, "
    )
    took = "" if step is None else f", then the model ran for {words.nanoseconds(step['forward_ns'])}"
    admitted = [place for place in it.looked_at if place.verdict is not None and place.verdict.admitted]
    names: list[Any] = []
    for place in admitted[:8]:
        names += [", " if names else "", request_link(cursor, it.rank, place.rid, 20)]
    if len(admitted) > 8:
        names.append(f" and {len(admitted) - 8} more")
    return html.Section(
        [
            html.Div(
                [
                    html.H2(f"Pass {it.number:,} of rank {it.rank}"),
                    html.Nav(ways, className="ways", **{"aria-label": "Passes"}),
                ],
                className="title",
            ),
            html.P(
                f"{when}{words.count(row['queue_len'])} waiting and {words.count(row['running'])} running; "
                f"decided in {words.nanoseconds(row['decide_ns'])}{took}."
            ),
            html.Dl(
                [
                    html.Dt("Policy"),
                    html.Dd(
                        [
                            parts.chip(it.policy_words, POLICY_HUES.get(row["active_policy"], GREY), desk.theme),
                            html.Span(_key_names(it), className="quiet"),
                        ]
                    ),
                    html.Dt("Admitted"),
                    html.Dd(names or "nobody"),
                    html.Dt("Stopped"),
                    html.Dd(_sentence(it.stop_words), id="stopped"),
                    *_delayer(it),
                    *_chunk(it, cursor),
                ],
                className="facts",
            ),
        ],
        className="card wide lead",
    )


def _sentence(said: str) -> str:
    return f"{words.name(said, 300)}."


def _key_names(it: RecordedPass) -> str:
    first = next((place for place in it.places if place.after is not None), None)
    if first is None:
        return ""
    names = [name for name, _ in first.key]
    return f"sorted by {', '.join(names)}, then place" if names else "sorted by place in the queue"


def _delayer(it: RecordedPass) -> list[Component]:
    row = it.row
    if row["delayer_allow"] is None:
        return []
    verdict = "may prefill" if row["delayer_allow"] else "has to wait"
    said = f"{verdict}: {row['delayer_reason'] or 'no rank can prefill'}; prefillable: {row['delayer_estimation']}"
    return [html.Dt("Prefill delayer"), html.Dd(said)]


def _chunk(it: RecordedPass, cursor: Any) -> list[Component]:
    row = it.row
    if row["chunked_in"] is None and row["chunked_out"] is None:
        return []
    said: list[Any] = []
    if row["chunked_in"] is not None:
        said += ["unfinished before: ", request_link(cursor, it.rank, row["chunked_in"], 20)]
    if row["chunked_out"] is not None:
        said += ["; " if said else "", "unfinished after: ", request_link(cursor, it.rank, row["chunked_out"], 20)]
    return [html.Dt("Chunked prefill"), html.Dd(said)]


# ---- why ---------------------------------------------------------------------------------------------------------


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
        said.append(html.P(_sentence(mark_words(found.mark_after))))
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


# ---- before and after --------------------------------------------------------------------------------------------


def order(desk: Desk) -> Figure:
    """Lines from where a request stood to where it stands; with another policy, to where it would stand."""
    it = chosen(desk)
    queued = [place for place in it.places if place.before is not None and place.after is not None]
    if not queued:
        said = "nobody waits" if not it.row["queue_len"] else "the decisions of this pass are not recorded"
        return figures.blank(desk.theme, said)
    columns: list[tuple[str, dict[str, int]]] = [
        ("before", {place.rid: place.before for place in queued if place.before is not None}),
        (it.row["active_policy"], {place.rid: place.after for place in queued if place.after is not None}),
    ]
    policy, pending = desk.cursor.policy, False
    if policy is not None:
        other = alternatives(desk, it.rank, it.number)
        pending = isinstance(other, Pending)
        if not isinstance(other, Pending):
            for each in other:
                if each.policy == policy and each.again is not None and each.again.other.ordering is not None:
                    ranked = each.again.other.ordering.ranked
                    columns.append((policy, {place.request.rid: i for i, place in enumerate(ranked)}))
    figure = _slopes(desk, queued, columns)
    figure["layout"]["meta"]["pending"] = pending
    return figure


def _slopes(desk: Desk, queued: Sequence[Place], columns: Sequence[tuple[str, dict[str, int]]]) -> Figure:
    theme = desk.theme
    traces = []
    for fate, label in FATES.items():
        x: list[float | None] = []
        y: list[int | None] = []
        said: list[str] = []
        for place in queued:
            if place.fate == fate:
                for column, (_, places) in enumerate(columns):
                    x.append(column)
                    y.append(places.get(place.rid))
                    said.append(f"{words.in_chart(place.rid, 30)}<br>{words.in_chart(place.words, 90)}")
                x.append(None)
                y.append(None)
                said.append("")
        if x:
            shade = VERDICTS[fate].on(theme)
            busy = fate in {"waiting", "held_back"}
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": label,
                    "x": x,
                    "y": y,
                    "customdata": said,
                    "line": {"color": figures.faint(shade, 0.4) if busy else shade, "width": 1 if busy else 2},
                    "marker": {"color": shade, "size": 5},
                    "hovertemplate": "%{customdata}<extra></extra>",
                }
            )
    most = max(max(places.values(), default=0) for _, places in columns)
    layout = figures.base(theme)
    return {
        "data": traces,
        "layout": {
            **layout,
            "showlegend": True,
            "hovermode": "closest",
            "margin": {**layout["margin"], "l": 40, "b": 28},
            "xaxis": {
                "tickvals": list(range(len(columns))),
                "ticktext": [words.in_chart(name) for name, _ in columns],
                "range": [-0.12, len(columns) - 0.88],
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
            },
            "yaxis": {
                "range": [most + 0.8, -0.8],
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "nticks": 6,
                "tickformat": ",d",
            },
            "meta": {},
        },
    }


# ---- budgets -----------------------------------------------------------------------------------------------------


def budget(name: str) -> Callable[[Desk], Figure]:
    """A chart of what each request took of a budget."""

    def draw(desk: Desk) -> Figure:
        it = chosen(desk)
        begin = getattr(it.before, name)
        if begin is None:
            return figures.blank(desk.theme, "chunked prefill is off")
        if not it.looked_at:
            return figures.blank(desk.theme, f"{words.count(begin)} tokens; no request was looked at")
        return _waterfall(desk, it, name, begin)

    return draw


def _waterfall(desk: Desk, it: RecordedPass, name: str, begin: float) -> Figure:
    theme = desk.theme
    labels, bases, heights, colours, said = (
        ["before"],
        [0.0],
        [begin],
        [figures.faint(GREY.on(theme), 0.55)],
        [f"{words.count(begin)} tokens before the pass"],
    )
    needs: list[tuple[str, float]] = []
    level = begin
    for place in it.looked_at:
        verdict = place.verdict
        assert verdict is not None
        left = getattr(verdict.remaining, name)
        label = f"{len(labels)}"
        if left is None:
            continue
        labels.append(label)
        bases.append(min(level, left))
        heights.append(abs(level - left))
        colours.append(VERDICTS[place.fate].on(theme))
        said.append(f"{words.in_chart(place.rid, 30)}<br>{words.in_chart(place.words, 90)}<br>{words.count(left)} left")
        if not verdict.admitted and verdict.need is not None and _decides(name, str(verdict.reason)):
            needs.append((label, verdict.need))
        level = left
    labels.append("after")
    bases.append(min(level, 0))
    heights.append(abs(level))
    colours.append(figures.faint(GREY.on(theme), 0.55))
    said.append(f"{words.count(level)} tokens after the pass")
    ends = {0, len(heights) - 1}
    labelled = [words.count(height) if place in ends else _taken(height) for place, height in enumerate(heights)]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": labels,
            "base": bases,
            "y": heights,
            "marker": {"color": colours, "line": {"width": 0}},
            "customdata": said,
            "hovertemplate": "%{customdata}<extra></extra>",
            "name": "tokens",
            "text": labelled if len(labels) <= 14 else None,
            "textposition": "outside",
            "cliponaxis": False,
        }
    ]
    if needs:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "needed",
                "x": [label for label, _ in needs],
                "y": [need for _, need in needs],
                "marker": {"symbol": "line-ew", "size": 16, "line": {"width": 2.5, "color": VERMILION.on(theme)}},
                "hovertemplate": "needs %{y:,.0f} tokens<extra></extra>",
            }
        )
    layout = figures.base(theme)
    many = len(labels) > 14
    return {
        "data": traces,
        "layout": {
            **layout,
            "barmode": "overlay",
            "bargap": 0.15,
            "showlegend": False,
            "hovermode": "closest",
            "xaxis": {
                "type": "category",
                "fixedrange": True,
                "showgrid": False,
                "tickvals": ["before", "after"] if many else labels,
                "ticktext": ["before", "after"] if many else labels,
            },
            "yaxis": {
                "fixedrange": True,
                "gridcolor": "rgba(128,128,128,0.15)",
                "nticks": 4,
                "range": [min(0, level, *bases) * 1.2, max(begin, level, *(need for _, need in needs)) * 1.28 or 1],
                "zerolinecolor": "rgba(128,128,128,0.4)",
            },
            "meta": {},
        },
    }


def _taken(tokens: float) -> str:
    return f"−{words.count(tokens)}" if tokens else ""


def _decides(name: str, reason: str) -> bool:
    """Whether a refusal's operands are of this budget."""
    budgets = {
        "total": ("memory", "memory_future", "memory_ignore_eos"),
        "input": ("input_budget",),
        "chunk": ("chunk_budget", "chunk_too_small"),
    }
    return reason in budgets[name]


# ---- the queue ---------------------------------------------------------------------------------------------------


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


# ---- other policies ----------------------------------------------------------------------------------------------


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


PAGE = Page(
    path="/pass",
    title="Pass",
    layout=layout,
    charts={"order": order, "total": budget("total"), "input": budget("input"), "chunk": budget("chunk")},
    parts={"head": head, "why": why, "queue": queue, "policies": policies},
)
