"""Two runs on the same axes, or a run's passes as another policy would have decided them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, parts, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.library import Book, Pending
from schedscope.dashboard.parts import Column
from schedscope.dashboard.rebuilt import near
from schedscope.engine.decision import Plan
from schedscope.engine.errors import ConfigError, SchedscopeError, UsageError
from schedscope.engine.ordering import POLICIES
from schedscope.recorder.run import Run
from schedscope.replay.palette import GREEN, GREY, ORANGE, SERIES, SKY, Hue
from schedscope.replay.palette import POLICIES as POLICY_HUES
from schedscope.replay.redecide import redecide
from schedscope.replay.window import Window

_SAMPLED = 120
"""Passes that are decided again."""


class Both(NamedTuple):
    """A pass as recorded and as another policy decides it."""

    number: int
    ns: int | None
    waiting: int
    moved: int
    recorded: tuple[int, int, int]
    """Requests admitted, tokens to compute, tokens found cached."""
    other: tuple[int, int, int]
    differs: bool
    """Not the same requests are admitted."""


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The page of comparisons."""
    common = [parts.part("choose", draw("choose"))]
    if desk.cursor.other is not None:
        return [
            *common,
            parts.part("numbers", draw("numbers")),
            html.Div(
                [
                    parts.chart("hit", "Hit rate", draw("hit"), note="dashed: the other run"),
                    parts.chart("p99", "TTFT p99", draw("p99"), note="dashed: the other run"),
                    parts.chart("waits", "Time in the queue, p99", draw("waits"), note="dashed: the other run"),
                    parts.chart(
                        "length",
                        "Queue",
                        draw("length"),
                        note="requests waiting, most at any step; dashed: the other run",
                    ),
                    parts.chart(
                        "difference",
                        "Difference of TTFT p99",
                        draw("difference"),
                        note="other run less this one; above zero: this one was faster",
                        wide=True,
                    ),
                ],
                className="grid",
            ),
            parts.part("first", draw("first")),
        ]
    if desk.cursor.policy is not None:
        return [
            *common,
            parts.part("redecided", draw("redecided")),
            html.Div(
                [
                    parts.chart("moved", "Requests that stand elsewhere", draw("moved"), note="share of the queue"),
                    parts.chart("tokens", "Tokens to compute", draw("tokens"), note="of those admitted in a pass"),
                    parts.chart("cached", "Tokens found cached", draw("cached"), note="by those admitted in a pass"),
                    parts.chart("number", "Requests admitted", draw("number"), note="in a pass"),
                ],
                className="grid",
            ),
            parts.part("passes", draw("passes")),
        ]
    return common


def choose(desk: Desk) -> Component:
    """With what to compare."""
    runs = [info.path.name for info in desk.library.runs() if info.problem is None and info.path.name != desk.book.name]
    cursor = desk.cursor
    others = [("choose…", ""), *((words.name(name, 60), name) for name in runs)]
    policies = [("choose…", ""), *((name, name) for name in POLICIES)]
    from_ = html.P(
        [
            "This run against another one, on the same axes; or its own passes, each decided again under another "
            "policy. The latter is exact for a pass taken by itself; it does not tell how the run would have gone on."
        ],
        className="quiet",
    )
    return parts.card(
        "Compare",
        from_,
        html.Div(
            [
                parts.select("Another run", "with", others, cursor.other or ""),
                html.Span("or", className="quiet"),
                parts.select("Another policy", "policy", policies, "" if cursor.other else cursor.policy or ""),
            ],
            className="choices",
        ),
        note=f"with {words.name(desk.book.name, 60)}",
        wide=True,
    )


# ---- two runs ----------------------------------------------------------------------------------------------------


def _other(desk: Desk) -> tuple[Book, Window]:
    """The other run, and the same time of it, counted from its begin. Raises SchedscopeError."""
    assert desk.cursor.other is not None
    book = desk.library.book(desk.cursor.other)
    window, shift = desk.window(), book.timeline.extent.first_ns - desk.timeline.extent.first_ns
    begin, end = window.begin_ns + shift, window.end_ns + shift
    if desk.cursor.begin_ns is None and desk.cursor.end_ns is None and desk.cursor.last_s is None:
        longest = max(end, book.timeline.extent.last_ns + 1)
        end = longest
    return book, Window(begin, end, window.buckets)


def _windows(desk: Desk) -> tuple[Window, Window, Book]:
    """Of this run and of the other one, equally long."""
    book, other = _other(desk)
    window = desk.window()
    length = max(window.end_ns - window.begin_ns, other.end_ns - other.begin_ns)
    return replace(window, end_ns=window.begin_ns + length), replace(other, end_ns=other.begin_ns + length), book


def _pair(
    what: str, column: str, label: str, hue: Hue, form: str, y: dict[str, Any] | None = None
) -> Callable[[Desk], Figure]:
    def draw(desk: Desk) -> Figure:
        if desk.cursor.other is None:
            return figures.blank(desk.theme, "choose another run")
        own, other, book = _windows(desk)
        mine: list[Any] = desk.table(what, own)[column].to_pylist()
        theirs: list[Any] = _ask(book, what, other)[column].to_pylist()
        span = figures.Span(own, desk.timeline.extent.first_ns, desk.cursor.at_ns)
        lines = [
            figures.line(span, words.in_chart(desk.book.name), mine, hue, desk.theme, form=form, width=2),
            figures.line(span, words.in_chart(book.name), theirs, hue, desk.theme, form=form, width=1.6, dash="dash"),
        ]
        figure = figures.over_time(span, lines, desk.theme, y=y)
        figure["layout"]["meta"]["label"] = label
        return figure

    return draw


def _ask(book: Book, what: str, window: Window) -> pa.Table:
    found: pa.Table = book.answers.get((what, window), lambda: getattr(book.timeline, what)(window))
    return found


def difference(desk: Desk) -> Figure:
    """By how much the other run waited longer."""
    if desk.cursor.other is None:
        return figures.blank(desk.theme, "choose another run")
    own, other, book = _windows(desk)
    mine = desk.table("latency", own)["ttft_p99"].to_pylist()
    theirs = _ask(book, "latency", other)["ttft_p99"].to_pylist()
    values = [None if a is None or b is None else b - a for a, b in zip(mine, theirs, strict=True)]
    span = figures.Span(own, desk.timeline.extent.first_ns, desk.cursor.at_ns)
    bar = figures.bars(span, "difference", values, SERIES["ttft_p99"], desk.theme, form="+.3~f")
    bar["marker"]["color"] = [(GREEN if (value or 0) >= 0 else ORANGE).on(desk.theme) for value in values]
    return figures.over_time(
        span,
        [bar],
        desk.theme,
        y={"ticksuffix": " s", "rangemode": "normal", "zeroline": True, "zerolinecolor": "rgba(128,128,128,0.5)"},
    )


def numbers(desk: Desk) -> Component:
    """Both in numbers."""
    if desk.cursor.other is None:
        return html.Div()
    own, other, book = _windows(desk)
    load = [
        desk.table("load", replace(own, buckets=1)).to_pylist()[0],
        _ask(book, "load", replace(other, buckets=1)).to_pylist()[0],
    ]
    wait = [
        desk.table("latency", replace(own, buckets=1)).to_pylist()[0],
        _ask(book, "latency", replace(other, buckets=1)).to_pylist()[0],
    ]
    lines: list[tuple[str, Sequence[dict[str, Any]], str, Callable[[Any], str]]] = [
        ("Hit rate", load, "hit_rate", words.share),
        ("TTFT p50", wait, "ttft_p50", words.seconds),
        ("TTFT p90", wait, "ttft_p90", words.seconds),
        ("TTFT p99", wait, "ttft_p99", words.seconds),
        ("In queue, p99", wait, "queue_p99", words.seconds),
        ("Longest queue", load, "queue_max", words.count),
        ("Admitted requests", load, "admitted", words.count),
        ("Prompt tokens admitted", load, "prompt_tokens", words.count),
        ("Evicted tokens", load, "evicted_tokens", words.count),
        ("Retractions", load, "retractions", words.count),
        ("Preemptions", load, "preemptions", words.count),
    ]
    rows = []
    for label, found, name, write in lines:
        a, b = found[0][name], found[1][name]
        change = (
            "" if a is None or b is None else words.NOTHING if a == b else f"{'+' if b > a else '−'}{write(abs(b - a))}"
        )
        ratio = "" if not a or b is None else f"× {b / a:.2f}"
        rows.append([label, write(a), write(b), change, ratio])
    columns = [
        Column(""),
        Column(words.name(desk.book.name, 30), True),
        Column(words.name(book.name, 30), True),
        Column("difference", True),
        Column("ratio", True),
    ]
    note = "equal times, counted from the first step of each run"
    settings = _settings(desk.book.run, book.run)
    return parts.card(
        "In numbers",
        parts.table(columns, rows, caption="Both runs in numbers", id="numbers-table"),
        *settings,
        note=note,
        wide=True,
    )


def _settings(one: Run, other: Run) -> list[Component]:
    """Settings that differ."""
    a, b = one.manifest.config, other.manifest.config
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if not names:
        return [html.P("Both have the same settings.", className="quiet spaced")]
    told = [f"{name}: {words.name(str(a.get(name)), 40)} / {words.name(str(b.get(name)), 40)}" for name in names[:20]]
    return [html.P(["Settings that differ: ", "; ".join(told), "."], className="spaced")]


def first(desk: Desk) -> Component:
    """The first decision in which two runs part."""
    title = "The first decision that differs"
    if desk.cursor.other is None:
        return html.Div()
    book, _ = _other(desk)
    rank = desk.cursor.rank if desk.cursor.rank is not None else desk.timeline.extent.ranks[0].rank
    key = ("first difference", book.name, book.generation, rank)
    found = desk.later(key, lambda: _first_difference(desk.book.run, book.run, rank))
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Comparing decisions…"), wide=True)
    common, number = found
    if not common:
        return parts.card(title, html.P("There is no pass that both runs made and hashed."), wide=True)
    if number is None:
        return parts.card(
            title, html.P(f"None: all {common:,} passes that both runs made were decided alike."), wide=True
        )
    links = [
        parts.link(
            f"pass {number:,} of {words.name(desk.book.name, 40)}",
            desk.cursor.href("/pass", rank=rank, pass_number=number, other=None, policy=None),
            className="action",
        ),
        parts.link(
            f"pass {number:,} of {words.name(book.name, 40)}",
            replace(desk.cursor, run=book.name).href(
                "/pass", rank=rank, pass_number=number, other=None, policy=None, begin_ns=None, end_ns=None, at_ns=None
            ),
            className="action",
        ),
    ]
    same = f"The {number:,} passes before it were decided alike." if number else "It is the very first one."
    return parts.card(
        title, html.P(f"Pass {number:,} of rank {rank}. {same}"), html.Div(links, className="ways"), wide=True
    )


def _first_difference(one: Run, other: Run, rank: int) -> tuple[int, int | None]:
    """How many passes both have, and the first with another decision."""
    tables = []
    for run in (one, other):
        found = run.table("passes", rank, ["pass", "decision_hash"]) if rank in run.ranks else None
        tables.append(
            {}
            if found is None
            else dict(zip(found["pass"].to_pylist(), found["decision_hash"].to_pylist(), strict=True))
        )
    common = sorted(number for number in tables[0].keys() & tables[1].keys() if tables[0][number] and tables[1][number])
    return len(common), next((number for number in common if tables[0][number] != tables[1][number]), None)


# ---- another policy ----------------------------------------------------------------------------------------------


def redecided_passes(desk: Desk) -> tuple[Both, ...] | Pending | None:
    """Passes of the window under the other policy; None: there are none. Raises SchedscopeError."""
    policy = desk.cursor.policy
    if policy is None:
        return None
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy[:40]!r}; there are: {', '.join(POLICIES)}")
    window = desk.window()
    rank = window.rank if window.rank is not None else desk.timeline.extent.ranks[0].rank
    last = desk.timeline.pass_at(window.end_ns - 1, rank)
    before = desk.timeline.pass_at(window.begin_ns - 1, rank)
    if last is None:
        return None
    first_ = 0 if before is None else before + 1
    known = desk.timeline.extent.ranks
    first_ = max(first_, next(each.first_pass or 0 for each in known if each.rank == rank))
    if first_ > last:
        return None
    run, timeline = desk.book.run, desk.timeline

    def find() -> tuple[Both, ...]:
        count = min(_SAMPLED, last - first_ + 1)
        chosen = sorted({first_ + (last - first_) * i // max(count - 1, 1) for i in range(count)})
        replayer = near(run, rank, first_)
        times = timeline.pass_times(rank, first_, last)
        found = []
        for moment in replayer.visit(chosen):
            again = redecide(moment, policy, {})
            moves = len(again.moves())
            found.append(
                Both(
                    moment.number,
                    times.get(moment.number),
                    len(moment.view.queue),
                    moves,
                    _facts(again.recorded),
                    _facts(again.other),
                    _members(again.recorded) != _members(again.other),
                )
            )
        return tuple(found)

    return desk.later(("redecided", policy, rank, first_, last), find)


def _facts(plan: Plan) -> tuple[int, int, int]:
    if plan.admission is None:
        return 0, 0, 0
    admitted = plan.admission.admitted
    return len(admitted), sum(v.extend_len or 0 for v in admitted), sum(v.prefix_len for v in admitted)


def _members(plan: Plan) -> set[str]:
    return set() if plan.admission is None else {verdict.rid for verdict in plan.admission.admitted}


def redecided(desk: Desk) -> Component:
    """The other policy in a sentence."""
    policy = desk.cursor.policy
    if policy is None:
        return html.Div()
    title = f"Under {words.name(policy, 30)}"
    try:
        found = redecided_passes(desk)
    except (SchedscopeError, ConfigError) as error:
        return parts.card(title, html.P(f"It can't be decided again: {words.name(str(error), 400)}"), wide=True)
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Deciding passes again…"), wide=True)
    if not found:
        return parts.card(title, html.P("There is no pass in this time."), wide=True)
    differing = [each for each in found if each.differs]
    own, other = (sum(getattr(each, name)[2] for each in found) for name in ("recorded", "other"))
    said = (
        f"{len(found):,} passes were decided again; in {len(differing):,} of them other requests would have been "
        f"admitted. Those admitted would have found {words.count(other)} tokens cached instead of {words.count(own)}."
    )
    links = []
    if differing:
        number = differing[0].number
        rank = desk.cursor.rank if desk.cursor.rank is not None else desk.timeline.extent.ranks[0].rank
        links = [
            parts.link(
                f"The first that differs: pass {number:,}",
                desk.cursor.href("/pass", rank=rank, pass_number=number),
                className="action",
            )
        ]
    return parts.card(title, html.P(said), html.Div(links, className="ways"), wide=True)


def _per_pass(
    what: Callable[[Both], tuple[float, float | None]], form: str, y: dict[str, Any] | None = None
) -> Callable[[Desk], Figure]:
    def draw(desk: Desk) -> Figure:
        found = redecided_passes(desk)
        if isinstance(found, Pending):
            figure = figures.blank(desk.theme, "deciding passes again…")
            figure["layout"]["meta"]["pending"] = True
            return figure
        if not found:
            return figures.blank(desk.theme, "there is no pass in this time")
        known = [each for each in found if each.ns is not None]
        span = desk.span()
        x = [span.seconds(each.ns or 0) for each in known]
        policy = desk.cursor.policy or ""
        pairs = [what(each) for each in known]
        traces = []
        if any(recorded is not None for _, recorded in pairs):
            traces.append(_dots("recorded", x, [recorded for _, recorded in pairs], GREY, desk, form, known))
        traces.append(_dots(policy, x, [other for other, _ in pairs], POLICY_HUES.get(policy, SKY), desk, form, known))
        figure = figures.over_time(span, traces, desk.theme, y=y)
        figure["layout"]["showlegend"] = True
        return figure

    return draw


def _dots(
    name: str, x: list[float], y: Sequence[float | None], hue: Hue, desk: Desk, form: str, known: Sequence[Both]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": x,
        "y": list(y),
        "line": {"color": hue.on(desk.theme), "width": 1},
        "marker": {"size": 4, "color": hue.on(desk.theme)},
        "customdata": [each.number for each in known],
        "hovertemplate": f"%{{y:{form}}} in pass %{{customdata:,}}",
    }


def passes(desk: Desk) -> Component:
    """Passes that differ most."""
    found = redecided_passes(desk) if desk.cursor.policy is not None else None
    if found is None or isinstance(found, Pending):
        return html.Div()
    worst = sorted(
        (each for each in found if each.differs or each.moved),
        key=lambda each: (-each.differs, -each.moved, each.number),
    )[:12]
    if not worst:
        return parts.card("Passes that differ", html.P("None of them."), wide=True)
    rank = desk.cursor.rank if desk.cursor.rank is not None else desk.timeline.extent.ranks[0].rank
    rows = [
        [
            parts.link(f"{each.number:,}", desk.cursor.href("/pass", rank=rank, pass_number=each.number)),
            words.count(each.waiting),
            words.count(each.moved),
            "others" if each.differs else "the same",
            f"{each.recorded[0]} → {each.other[0]}",
            f"{each.recorded[1]:,} → {each.other[1]:,}",
            f"{each.recorded[2]:,} → {each.other[2]:,}",
        ]
        for each in worst
    ]
    columns = [
        Column("pass", True),
        Column("waiting", True),
        Column("moved", True),
        Column("admits"),
        Column("requests", True),
        Column("to compute", True),
        Column("cached", True),
    ]
    return parts.card(
        "Passes that differ most", parts.table(columns, rows, caption="Passes that differ most"), wide=True
    )


PAGE = Page(
    path="/compare",
    title="Compare",
    layout=layout,
    charts={
        "hit": _pair(
            "load", "hit_rate", "hit rate", SERIES["hit_rate"], ".1%", {"tickformat": ".0%", "range": [0, 1.02]}
        ),
        "p99": _pair("latency", "ttft_p99", "TTFT p99", SERIES["ttft_p99"], ".3~f", {"ticksuffix": " s"}),
        "waits": _pair("latency", "queue_p99", "queue p99", SERIES["waited"], ".3~f", {"ticksuffix": " s"}),
        "length": _pair("load", "queue_max", "queue", SERIES["queue"], ",.0f"),
        "difference": difference,
        "moved": _per_pass(
            lambda each: (each.moved / each.waiting if each.waiting else 0.0, None),
            ".0%",
            {"tickformat": ".0%", "range": [0, 1.02]},
        ),
        "tokens": _per_pass(lambda each: (each.other[1], each.recorded[1]), ",.0f"),
        "cached": _per_pass(lambda each: (each.other[2], each.recorded[2]), ",.0f"),
        "number": _per_pass(lambda each: (each.other[0], each.recorded[0]), ",.0f"),
    },
    parts={"choose": choose, "numbers": numbers, "first": first, "redecided": redecided, "passes": passes},
)
