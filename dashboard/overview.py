"""What goes on in a run: how well the cache is hit, how long requests wait, and for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, parts, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure, Lane
from schedscope.dashboard.insight import examined, findings, inside
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import pass_link, request_link
from schedscope.dashboard.parts import Column, Tile
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.describe import GATES, STOPS
from schedscope.replay.palette import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    POLICIES,
    PURPLE,
    REASONS,
    SERIES,
    SKY,
    VERMILION,
    YELLOW,
)
from schedscope.replay.palette import GATES as GATE_HUES
from schedscope.replay.told import Stretches

_NOW_S = 60.0
"""How long "now" is."""
DELAYER = {
    "delay": YELLOW,
    "wait_timeout": VERMILION,
    "wait_success": GREEN,
    "no_wait": PALE,
    "token_watermark": SKY,
    "none": GREY,
}
REFUSED = {
    "memory": "memory",
    "memory_ignore_eos": "memory, no cache",
    "memory_future": "memory, later",
    "input_budget": "prefill budget",
    "chunk_budget": "chunk budget",
    "chunk_too_small": "chunk too small",
    "chunk_taken": "chunk taken",
    "prefill_max_requests": "batch size",
    "delayed": "prefill delayer",
}
"""Reasons of a refusal, in a word or two."""


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The overview."""
    del desk
    return [
        parts.part("findings", draw("findings")),
        parts.part("tiles", draw("tiles")),
        parts.part("moment", draw("moment")),
        html.Div(
            [
                parts.chart(
                    "hit-rate",
                    "Hit rate",
                    draw("hit-rate"),
                    note="share of prompt tokens found cached, at first admission",
                ),
                parts.chart(
                    "ttft", "Time to first token", draw("ttft"), note="p50, p90 and p99 of those that got it then"
                ),
                parts.chart("queue", "Queue and batch", draw("queue"), note="most at any step"),
                parts.chart("waited", "Time in the queue", draw("waited"), note="arrival to first admission"),
                parts.chart("admitted", "Admitted tokens", draw("admitted"), note="of prompts, at first admission"),
                parts.chart(
                    "refused",
                    "Refused tokens",
                    draw("refused"),
                    note="what passes looked at and did not admit, by reason",
                ),
                parts.chart(
                    "bands",
                    "Policy and gates",
                    draw("bands"),
                    note="what sorted the queue, and what kept steps from it",
                    wide=True,
                ),
                parts.chart(
                    "heat",
                    "Every first token",
                    draw("heat"),
                    note="drag a box to see what is different about it",
                    tall=True,
                ),
                parts.part("inside", draw("inside"), className="card"),
                parts.chart("memory", "KV pool", draw("memory"), note="most at any step"),
                parts.chart(
                    "lost",
                    "Evicted, retracted, preempted",
                    draw("lost"),
                    note="tokens that left the cache; requests that lost their memory",
                ),
                parts.chart(
                    "gates",
                    "Time behind gates",
                    draw("gates"),
                    note="steps that ended before a pass, by when they began",
                ),
                parts.chart("delayer", "Prefill delayer", draw("delayer"), note="its verdicts, passes"),
            ],
            className="grid",
        ),
        parts.part("slowest", draw("slowest")),
    ]


# ---- numbers -----------------------------------------------------------------------------------------------------


def tiles(desk: Desk) -> Component:
    """The window in numbers."""
    load, latency = desk.load(), desk.latency()
    refused = desk.table("shares", desk.window(), "refused")
    refused_tokens = sum(value or 0 for value in refused["tokens"].to_pylist())
    refused_times = sum(refused["count"].to_pylist())
    recent_load, recent_latency = _now(desk)
    decisions = desk.timeline.extent.level in {"decisions", "full"}
    lost = load["retractions"] + load["preemptions"]
    known, bound = _bound(desk)
    shown = [
        Tile(
            "hit_rate",
            "Hit rate",
            words.share(load["hit_rate"]),
            f"last minute {words.share(recent_load['hit_rate'])}{bound}",
            "good",
            True,
        ),
        Tile(
            "ttft_p99",
            "TTFT p99",
            words.seconds(latency["ttft_p99"]),
            f"last minute {words.seconds(recent_latency['ttft_p99'])}",
            "wait",
            True,
        ),
        Tile("ttft_p90", "TTFT p90", words.seconds(latency["ttft_p90"])),
        Tile("ttft_p50", "TTFT p50", words.seconds(latency["ttft_p50"])),
        Tile(
            "queue_p99",
            "In queue, p99",
            words.seconds(latency["queue_p99"]),
            f"p50 {words.seconds(latency['queue_p50'])}",
        ),
        Tile("queue_max", "Longest queue", words.count(load["queue_max"]), "requests waiting"),
        Tile(
            "admitted",
            "Admitted",
            words.count(load["admitted"]),
            f"requests, {words.count(load['prompt_tokens'])} tokens",
        ),
        Tile(
            "refused",
            "Refused",
            words.count(refused_times) if decisions else words.NOTHING,
            f"times, {words.count(refused_tokens)} tokens" if decisions else "decisions are not recorded",
        ),
        Tile(
            "evicted",
            "Evicted",
            words.count(load["evicted_tokens"]),
            "tokens" if load["evicted_tokens"] is not None else "recorded with --level full",
        ),
        Tile(
            "lost",
            "Lost their memory",
            words.count(lost),
            f"{words.count(load['retractions'])} retracted, {words.count(load['preemptions'])} preempted",
        ),
    ]
    return html.Div([parts.tiles(shown), *([] if known else [parts.waits()])])


def _bound(desk: Desk) -> tuple[bool, str]:
    """Whether it is known, and what a cache that never forgets would have found of a sample of prompts."""
    try:
        found = examined(desk)
    except SchedscopeError:
        # The findings above say why.
        return True, ""
    if isinstance(found, Pending):
        return False, ""
    known = [each.rate for rank, each in found.bounds.items() if desk.cursor.rank in (None, rank)]
    return True, f"; {max(known):.1%} repeats" if known else ""


def _now(desk: Desk) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and latency of the last minute of what is looked at."""
    window = desk.whole()
    begin = max(window.begin_ns, min(window.end_ns, desk.timeline.extent.last_ns + 1) - int(_NOW_S * 1e9))
    recent = desk.timeline.window(min(begin, window.end_ns - 1), window.end_ns, buckets=1, rank=window.rank)
    load = desk.table("load", recent).to_pylist()[0]
    latency = desk.table("latency", recent).to_pylist()[0]
    return load, latency


# ---- charts ------------------------------------------------------------------------------------------------------


def _series(desk: Desk, what: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = desk.table(what, desk.window()).to_pydict()
    return found


def hit_rate(desk: Desk) -> Figure:
    """Share of prompt tokens that were found in the cache."""
    load = _series(desk, "load")
    whole = desk.load()["hit_rate"]
    span = desk.span()
    line = figures.line(span, "hit rate", load["hit_rate"], SERIES["hit_rate"], desk.theme, form=".1%", fill=True)
    figure = figures.over_time(span, [line], desk.theme, y={"tickformat": ".0%", "range": [0, 1.02]})
    if whole is not None:
        dash = {"color": SERIES["hit_rate"].on(desk.theme), "width": 1, "dash": "dash"}
        figure["layout"]["shapes"].append(
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": whole, "y1": whole, "line": dash}
        )
    return figure


def ttft(desk: Desk) -> Figure:
    """Quantiles of times to first token."""
    latency, span, theme = _series(desk, "latency"), desk.span(), desk.theme
    lines = [
        figures.line(span, "p99", latency["ttft_p99"], SERIES["ttft_p99"], theme, form=".3~s", width=2.2),
        figures.line(span, "p90", latency["ttft_p90"], SERIES["ttft_p99"], theme, form=".3~s", width=1.4, dash="dash"),
        figures.line(span, "p50", latency["ttft_p50"], SERIES["ttft_p50"], theme, form=".3~s", width=1.4, dash="dot"),
    ]
    return _lasting(figures.over_time(span, lines, theme, y={"ticksuffix": " s"}))


def _lasting(figure: Figure) -> Figure:
    """With seconds where one points."""
    for trace in figure["data"]:
        trace["hovertemplate"] = "%{y:.3~f} s"
    return figure


def queue(desk: Desk) -> Figure:
    """Requests that wait and that run."""
    load, span, theme = _series(desk, "load"), desk.span(), desk.theme
    lines = [
        figures.line(span, "waiting", load["queue_max"], SERIES["queue"], theme, fill=True),
        figures.line(span, "running", load["running_max"], SERIES["running"], theme),
    ]
    return figures.over_time(span, lines, theme)


def waited(desk: Desk) -> Figure:
    """From arrival to admission."""
    latency, span, theme = _series(desk, "latency"), desk.span(), desk.theme
    lines = [
        figures.line(span, "p99", latency["queue_p99"], SERIES["waited"], theme, width=2.2),
        figures.line(span, "p50", latency["queue_p50"], SERIES["waited"], theme, width=1.4, dash="dot"),
    ]
    return _lasting(figures.over_time(span, lines, theme, y={"ticksuffix": " s"}))


def admitted(desk: Desk) -> Figure:
    """Prompt tokens that were admitted: found cached, and computed."""
    load, span, theme = _series(desk, "load"), desk.span(), desk.theme
    computed = [all_ - cached for all_, cached in zip(load["prompt_tokens"], load["cached_tokens"], strict=True)]
    shown = [
        figures.bars(span, "cached", load["cached_tokens"], SERIES["hit_rate"], theme),
        figures.bars(span, "to compute", computed, SERIES["admitted"], theme),
    ]
    return figures.over_time(span, shown, theme)


def refused(desk: Desk) -> Figure:
    """Tokens of requests that a pass looked at and did not admit."""
    if desk.timeline.extent.level not in {"decisions", "full"}:
        return figures.blank(desk.theme, "decisions are not recorded: --level decisions")
    window, span = desk.window(), desk.span()
    series = figures.spread(desk.table("shares", window, "refused"), "tokens", window.buckets)
    if not series:
        return figures.blank(desk.theme, "no request was refused in this time")
    return figures.over_time(
        span, figures.stacked(span, series, REASONS, desk.theme, called=REFUSED), desk.theme, showlegend=True
    )


def bands(desk: Desk) -> Figure:
    """Which policy sorted, which gate held, and what is missing."""
    window, span = desk.window(), desk.span()
    found: dict[str, Stretches] = {of: desk.table("stretches", window, of) for of in ("policy", "gate", "gap")}
    lanes = [Lane("policy", found["policy"].longest, POLICIES), Lane("gate", found["gate"].longest, GATE_HUES)]
    if found["gap"].longest:
        lanes.append(Lane("missing", found["gap"].longest, {}))
    if not any(lane.stretches for lane in lanes):
        return figures.blank(desk.theme, "no pass and no gate in this time")
    figure = figures.bands(span, lanes, desk.theme)
    left = sum(each.others for each in found.values())
    if left:
        figure["layout"]["annotations"] = [
            {
                "text": f"{left:,} shorter ones are left out; zoom in to see them",
                "showarrow": False,
                "xref": "paper",
                "yref": "paper",
                "x": 1,
                "y": 1.02,
                "xanchor": "right",
                "yanchor": "bottom",
            }
        ]
    return figure


def heat(desk: Desk) -> Figure:
    """Every request by when its first token came and how long that took."""
    window, span, box = desk.window(), desk.span(), desk.cursor.box
    found = desk.table("heat_map", window)
    if not found.cells.num_rows:
        return figures.blank(desk.theme, "no request got its first token in this time")
    chosen = None if box is None else (span.seconds(box.begin_ns), span.seconds(box.end_ns), box.low_s, box.high_s)
    return figures.heat(span, found, desk.theme, chosen)


def memory(desk: Desk) -> Figure:
    """Shares of the KV pool."""
    load, span, theme = _series(desk, "load"), desk.span(), desk.theme
    lines = [
        figures.line(span, "held by requests", load["used_max"], BLUE, theme, form=".1%", fill=True),
        figures.line(span, "held for reuse only", load["cached_max"], SERIES["hit_rate"], theme, form=".1%"),
    ]
    return figures.over_time(span, lines, theme, y={"tickformat": ".0%", "range": [0, 1.02]})


def lost(desk: Desk) -> Figure:
    """What left the cache, and who lost its memory."""
    load, span, theme = _series(desk, "load"), desk.span(), desk.theme
    shown = []
    if any(load["evicted_tokens"]):
        shown.append(figures.bars(span, "evicted tokens", load["evicted_tokens"], SERIES["evicted"], theme))
    for name, hue, symbol in (("retractions", ORANGE, "triangle-down"), ("preemptions", PURPLE, "diamond")):
        if any(load[name]):
            values = [value or None for value in load[name]]
            line = figures.line(span, name, values, hue, theme)
            marker = {"color": hue.on(theme), "size": 8, "symbol": symbol}
            shown.append({**line, "mode": "markers", "marker": marker, "yaxis": "y2"})
    if not shown:
        known = load["evicted_tokens"][0] is not None
        said = "nothing was evicted, retracted or preempted in this time"
        return figures.blank(
            theme, said if known else "nothing was retracted or preempted; evictions are recorded with --level full"
        )
    most = max(max(load["retractions"]), max(load["preemptions"]))
    second = {
        "overlaying": "y",
        "side": "right",
        "range": [0, most * 1.3 + 0.5],
        "dtick": max(1, round(most / 3)),
        "showgrid": False,
        "fixedrange": True,
    }
    figure = figures.over_time(span, shown, theme, yaxis2=second)
    if any(trace.get("yaxis") for trace in shown):
        figure["layout"]["margin"] = {**figure["layout"]["margin"], "r": 36}
    return figure


def gates(desk: Desk) -> Figure:
    """How much of the time steps ended before a pass."""
    window, span = desk.window(), desk.span()
    series = figures.spread(desk.table("shares", window, "gate"), "seconds", window.buckets)
    if not series:
        return figures.blank(desk.theme, "no step ended at a gate in this time")
    traces = figures.stacked(span, series, GATE_HUES, desk.theme, form=".3~f")
    return figures.over_time(span, traces, desk.theme, y={"ticksuffix": " s"}, showlegend=True)


def delayer(desk: Desk) -> Figure:
    """What the prefill delayer said."""
    window, span = desk.window(), desk.span()
    series = figures.spread(desk.table("shares", window, "delayer"), "count", window.buckets)
    if not series:
        return figures.blank(desk.theme, "the prefill delayer is off")
    return figures.over_time(span, figures.stacked(span, series, DELAYER, desk.theme), desk.theme, showlegend=True)


# ---- what to look at ---------------------------------------------------------------------------------------------


def moment(desk: Desk) -> Component:
    """The moment that was pointed at, and the way down to its decision."""
    at, cursor = desk.cursor.at_ns, desk.cursor
    if at is None:
        return html.P(
            "Drag across a chart to zoom every one of them; click, or use the arrow keys, to choose a moment and go "
            "down to its decision. Double-click shows the whole run again.",
            className="hint",
        )
    turns = desk.timeline.turns_at(at, cursor.rank)
    when = words.clock((at - desk.timeline.extent.first_ns) / 1e9, 0.001)
    if not turns:
        return parts.notice(f"At {when}", "Nothing was recorded yet.")
    rows = [
        [
            str(turn.rank),
            pass_link(cursor, turn.rank, turn.pass_number),
            turn.kind,
            words.count(turn.queue_len),
            words.count(turn.running),
            words.count(turn.admitted),
            turn.policy or words.NOTHING,
            GATES.get(turn.gate, turn.gate) if turn.gate else STOPS.get(turn.stop or "", turn.stop or words.NOTHING),
        ]
        for turn in turns
    ]
    columns = [
        Column("rank", True),
        Column("pass"),
        Column("step"),
        Column("waiting", True),
        Column("running", True),
        Column("admitted", True),
        Column("policy"),
        Column("ended because"),
    ]
    clear = parts.link("clear", cursor.href("/", at_ns=None), className="action")
    return parts.card(
        f"At {when}", parts.table(columns, rows, caption=f"What each rank did at {when}"), note=clear, wide=True
    )


def slowest(desk: Desk) -> Component:
    """Requests that waited longest for their first token, in the box if there is one."""
    box, cursor = desk.cursor.box, desk.cursor
    window = desk.whole()
    low, high, where = 0.0, 1e12, "in this time"
    if box is not None:
        window = desk.timeline.window(box.begin_ns, box.end_ns, buckets=1, rank=cursor.rank)
        low, high, where = box.low_s, box.high_s, "in the box"
    found = desk.once(("slowest", window, low, high), lambda: desk.timeline.slowest(window, low_s=low, high_s=high))
    if not found:
        return parts.card("Slowest first tokens", html.P(f"No request got its first token {where}."), wide=True)
    origin = desk.timeline.extent.first_ns
    rows = [
        [
            request_link(cursor, each.rank, each.rid),
            str(each.rank),
            words.clock((each.arrive_ns - origin) / 1e9, 0.1),
            words.seconds(each.ttft_s),
            words.seconds(each.waited_s),
            words.seconds(each.prefill_s),
            words.seconds(each.scheduling_s),
            words.count(each.prompt_tokens),
            words.share(each.cached_tokens / each.prompt_tokens if each.prompt_tokens else None),
            words.NOTHING if each.routing_key is None else words.name(each.routing_key, 24),
        ]
        for each in found
    ]
    columns = [
        Column("request"),
        Column("rank", True),
        Column("arrived", True),
        Column("first token after", True),
        Column("queue", True),
        Column("prefill", True),
        Column("scheduling", True),
        Column("prompt", True, "tokens"),
        Column("cached", True, "share of the prompt, at first admission"),
        Column("routing key"),
    ]
    table = parts.table(columns, rows, caption=f"Slowest first tokens {where}", id="slowest-table")
    return parts.card("Slowest first tokens", table, note=where, wide=True)


PAGE = Page(
    path="/",
    title="Overview",
    layout=layout,
    charts={
        "hit-rate": hit_rate,
        "ttft": ttft,
        "queue": queue,
        "waited": waited,
        "admitted": admitted,
        "refused": refused,
        "bands": bands,
        "heat": heat,
        "memory": memory,
        "lost": lost,
        "gates": gates,
        "delayer": delayer,
    },
    parts={"findings": findings, "tiles": tiles, "moment": moment, "inside": inside, "slowest": slowest},
    first=frozenset({"findings", "tiles", "moment", "hit-rate", "ttft", "queue", "waited"}),
)
