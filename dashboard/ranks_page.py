"""Schedulers side by side: who waits, who is ahead, and whether they decide alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, parts, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.insight import examined, finding_row
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import pass_link
from schedscope.dashboard.parts import Column
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Hue

RANKS: tuple[Hue, ...] = (SKY, ORANGE, GREEN, PURPLE, BLUE, VERMILION, YELLOW, GREY)
_DASHES = ("solid", "dash", "dot", "dashdot")
_MOST = 16
"""Ranks with a line of their own."""
ESTIMATIONS = {"all": GREEN, "mixed": VERMILION, "none": GREY}
_ABOUT_RANKS = {"delayer_veto", "delayer_mixed", "rank_behind"}


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The page of ranks."""
    del desk
    return [
        parts.part("table", draw("table")),
        html.Div(
            [
                parts.chart("queues", "Queues", draw("queues"), note="requests waiting, most at any step"),
                parts.chart("ttfts", "TTFT p99", draw("ttfts")),
                parts.chart("hits", "Hit rates", draw("hits"), note="share of prompt tokens, at first admission"),
                parts.chart(
                    "progress",
                    "Ahead and behind",
                    draw("progress"),
                    note="tokens computed so far, against the mean of all ranks",
                ),
                parts.chart(
                    "mixed",
                    "Who could prefill",
                    draw("mixed"),
                    note="what the prefill delayer saw, passes; mixed: some could, some could not",
                    wide=True,
                ),
            ],
            className="grid",
        ),
        parts.part("alike", draw("alike")),
        parts.part("about", draw("about")),
    ]


def table(desk: Desk) -> Component:
    """A row per rank."""
    rows = desk.table("ranks", desk.whole()).to_pylist()
    extents = {each.rank: each for each in desk.timeline.extent.ranks}
    origin = desk.timeline.extent.first_ns
    shown = []
    for row in rows:
        extent = extents[row["rank"]]
        shown.append(
            [
                parts.link(
                    parts.chip(f"rank {row['rank']}", _hue(row["rank"]), desk.theme),
                    desk.cursor.href("/", rank=row["rank"]),
                ),
                words.count(row["passes"]),
                words.count(row["admitted"]),
                words.share(row["hit_rate"]),
                words.seconds(row["ttft_p50"]),
                words.seconds(row["ttft_p99"]),
                words.seconds(row["queue_p99"]),
                words.count(row["queue_max"]),
                words.count(row["computed_tokens"]),
                words.share(row["used_max"]),
                words.count(row["retractions"] + row["preemptions"]),
                words.clock((extent.last_ns - origin) / 1e9, 0.1),
                pass_link(desk.cursor, row["rank"], extent.last_pass),
            ]
        )
    columns = [
        Column("rank"),
        Column("passes", True),
        Column("admitted", True, "requests"),
        Column("hit rate", True),
        Column("TTFT p50", True),
        Column("TTFT p99", True),
        Column("queue p99", True, "time from arrival to first admission"),
        Column("longest queue", True),
        Column("computed", True, "tokens"),
        Column("pool used", True, "most at any step"),
        Column("lost memory", True, "retractions and preemptions"),
        Column("seen until", True),
        Column("last pass", True),
    ]
    listed = parts.table(columns, shown, caption="Ranks side by side", id="ranks-table")
    return parts.card("Ranks", listed, note="in the time that is looked at", wide=True)


def _hue(rank: int) -> Hue:
    return RANKS[rank % len(RANKS)]


def _by_rank(desk: Desk, what: str) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in desk.table(what, desk.window(), by_rank=True).to_pylist():
        found.setdefault(row["rank"], []).append(row)
    return dict(list(found.items())[:_MOST])


def _lines(desk: Desk, series: dict[int, list[Any]], *, form: str = ",.0f", y: dict[str, Any] | None = None) -> Figure:
    span = desk.span()
    traces = [
        figures.line(
            span,
            f"rank {rank}",
            values,
            _hue(rank),
            desk.theme,
            form=form,
            dash=_DASHES[rank // len(RANKS) % len(_DASHES)],
        )
        for rank, values in series.items()
    ]
    return figures.over_time(span, traces, desk.theme, y=y, showlegend=True)


def _column(what: str, column: str, form: str, y: dict[str, Any] | None = None) -> Callable[[Desk], Figure]:
    def draw(desk: Desk) -> Figure:
        rows = _by_rank(desk, what)
        return _lines(desk, {rank: [row[column] for row in mine] for rank, mine in rows.items()}, form=form, y=y)

    return draw


def progress(desk: Desk) -> Figure:
    """Tokens that each rank computed, against the mean."""
    sums = {
        rank: list(accumulate(row["computed_tokens"] for row in mine)) for rank, mine in _by_rank(desk, "load").items()
    }
    if len(sums) < 2:
        return figures.blank(desk.theme, "there is one rank only")
    means = [sum(each) / len(sums) for each in zip(*sums.values(), strict=True)]
    series = {rank: [own - mean for own, mean in zip(values, means, strict=True)] for rank, values in sums.items()}
    return _lines(
        desk,
        series,
        form="+,.0f",
        y={"rangemode": "normal", "zeroline": True, "zerolinecolor": "rgba(128,128,128,0.5)"},
    )


def mixed(desk: Desk) -> Figure:
    """What the prefill delayer saw of all ranks."""
    window, span = desk.window(), desk.span()
    found = desk.table("shares", window, "prefillable")
    series = figures.spread(found, "count", window.buckets)
    if not series:
        return figures.blank(desk.theme, "the prefill delayer is off")
    return figures.over_time(span, figures.stacked(span, series, ESTIMATIONS, desk.theme), desk.theme, showlegend=True)


def alike(desk: Desk) -> Component:
    """Whether ranks decided alike, by the hashes of their decisions."""
    title = "Equal decisions"
    if len(desk.timeline.extent.ranks) < 2:
        return parts.card(title, html.P("There is one rank only: nothing to compare."), wide=True)
    found = desk.later("hashes", lambda: _hashes(desk))
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Comparing the decisions of all ranks…"), wide=True)
    common, equal, first = found
    if not common:
        return parts.card(
            title, html.P("No pass was made by all ranks, or their decisions were not hashed."), wide=True
        )
    said: list[Any] = [f"{equal:,} of the {common:,} passes that all ranks made were decided alike."]
    if first is not None:
        links = [
            [" ", pass_link(desk.cursor, each.rank, first), f" (rank {each.rank})"]
            for each in desk.timeline.extent.ranks[:4]
        ]
        said += [" The first that differs is pass", *(part for link in links for part in link), "."]
    told = (
        "Ranks with queues of their own (data parallel) decide for themselves, and differ. Ranks that share one queue "
        "(tensor parallel) must never differ: if they do, they compute different batches."
    )
    return parts.card(title, html.P(said), html.P(told, className="quiet"), wide=True)


def _hashes(desk: Desk) -> tuple[int, int, int | None]:
    """Passes that all ranks made, those decided alike, and the first that was not."""
    with desk.book.run.connect(["passes"]) as connection:
        row = connection.execute(
            """
            WITH each AS (
                SELECT pass, count(*) AS ranks, count(DISTINCT decision_hash) AS hashes,
                    bool_or(decision_hash IS NULL) AS open
                FROM passes GROUP BY pass
            ), common AS (SELECT * FROM each WHERE ranks = ? AND NOT open)
            SELECT count(*), count(*) FILTER (hashes = 1), min(pass) FILTER (hashes > 1) FROM common
            """,
            [len(desk.timeline.extent.ranks)],
        ).fetchall()[0]
    return row[0], row[1], row[2]


def about(desk: Desk) -> Component:
    """What the doctor says about ranks."""
    try:
        found = examined(desk)
    except SchedscopeError as error:
        return parts.card("Findings about ranks", html.P(str(error)), wide=True)
    if isinstance(found, Pending):
        return parts.card("Findings about ranks", parts.working("Examining the run…"), wide=True)
    mine = [each for each in found.examination.findings if each.detector in _ABOUT_RANKS]
    if not mine:
        return parts.card("Findings about ranks", html.P("None."), wide=True)
    return parts.card(
        "Findings about ranks", html.Ul([finding_row(desk, each) for each in mine], className="findings"), wide=True
    )


PAGE = Page(
    path="/ranks",
    title="Ranks",
    layout=layout,
    charts={
        "queues": _column("load", "queue_max", ",.0f"),
        "ttfts": _column("latency", "ttft_p99", ".3~f", {"ticksuffix": " s"}),
        "hits": _column("load", "hit_rate", ".1%", {"tickformat": ".0%", "range": [0, 1.02]}),
        "progress": progress,
        "mixed": mixed,
    },
    parts={"table": table, "alike": alike, "about": about},
)
