"""One request: its life, what it waited for to the nanosecond, who overtook it, and what it found in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, parts, words
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.figures import Figure, Piece, Span
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import pass_link, request_link
from schedscope.dashboard.parts import Column
from schedscope.dashboard.rebuilt import explained_request
from schedscope.engine.errors import RunNotFoundError, SchedscopeError
from schedscope.replay.explain_words import (
    change_words,
    look_lines,
    look_title,
    request_sentence,
    slots_words,
    where_words,
)
from schedscope.replay.ledger import CAUSES, Part, RequestLedger, request_ledger
from schedscope.replay.palette import CAUSES as CAUSE_HUES
from schedscope.replay.palette import GREEN, GREY, ORANGE, SKY, VERDICTS
from schedscope.replay.recorded import Place, place_of
from schedscope.replay.window import Window

_OVERTAKING = ("longer_match", "priority", "order")
_SHOWN = 40
"""Parts of a ledger in a table."""
_PLACES = 4_000
"""Passes in a chart."""
_LONGEST_NAME = 600


class Story(NamedTuple):
    """What is known about a request."""

    rid: str
    rank: int
    times: dict[str, Any]
    """See `Timeline.request`."""
    places: tuple[tuple[int, Place], ...]
    """Pass by pass."""
    events: tuple[dict[str, Any], ...]


def chosen(desk: Desk) -> Story | None:
    """The request that is looked at; None: none is chosen, or none is called so."""
    rid, rank = desk.cursor.rid, desk.cursor.rank
    if rid is None:
        return None
    return desk.once(("story", rid, rank), lambda: _read(desk, rid, rank))


def _read(desk: Desk, rid: str, rank: int | None) -> Story | None:
    times = desk.timeline.request(rid, rank)
    if times is None:
        return None
    try:
        rows = desk.book.run.request_rows(rid, times["rank"])
    except RunNotFoundError:
        rows = {"decisions": [], "events": []}
    decisions = sorted(rows["decisions"], key=lambda row: row["pass"])
    return Story(
        rid,
        times["rank"],
        times,
        tuple((row["pass"], place_of(row)) for row in decisions),
        tuple(sorted(rows["events"], key=lambda row: row["seq"])),
    )


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The page of a request."""
    if chosen(desk) is None:
        return [parts.part("head", draw("head"))]
    return [
        parts.part("head", draw("head")),
        parts.chart("life", "Its life", draw("life"), note="from arrival to its end", wide=True, flat=True),
        parts.chart(
            "ledger",
            "What it waited for",
            draw("ledger"),
            note="every nanosecond in the queue, charged once",
            wide=True,
            flat=True,
        ),
        parts.part("looks", draw("looks")),
        parts.part("parts", draw("parts")),
        parts.chart(
            "places",
            "Its place in the queue, pass by pass",
            draw("places"),
            note="front of the queue on top",
            wide=True,
            tall=True,
        ),
        html.Div([parts.part("overtaken", draw("overtaken")), parts.part("prefix", draw("prefix"))], className="grid"),
    ]


def head(desk: Desk) -> Component:
    """Who it is."""
    story, cursor = chosen(desk), desk.cursor
    if story is None:
        return _choose(desk)
    times = story.times
    prompt, cached = times["prompt_tokens"], times["cached_tokens"]
    origin = desk.timeline.extent.first_ns

    def when(name: str) -> str:
        return words.NOTHING if times[name] is None else words.clock((times[name] - origin) / 1e9, 0.001)

    tiles = [
        parts.Tile(
            "ttft",
            "First token after",
            words.nanoseconds(times["ttft_ns"]),
            f"at {when('first_token_ns')}",
            "wait",
            True,
        ),
        parts.Tile(
            "waited", "In the queue", words.nanoseconds(times["waited_ns"]), "arrival to first admission", "", True
        ),
        parts.Tile("prefill", "Prefill", words.nanoseconds(times["prefill_ns"]), "forwards of its prompt"),
        parts.Tile("scheduling", "Between", words.nanoseconds(times["scheduling_ns"]), "deciding, other batches"),
        parts.Tile("prompt", "Prompt", words.count(prompt), "tokens"),
        parts.Tile(
            "cached",
            "Cached",
            words.share(cached / prompt if prompt and times["admit_ns"] is not None else None),
            f"{words.count(cached)} tokens",
        ),
        parts.Tile(
            "output",
            "Output",
            words.count(times["output_tokens"]),
            f"of at most {words.count(times['max_new_tokens'])}",
        ),
        parts.Tile("passes", "Passes", words.count(len(story.places)), "looked at the queue with it"),
        parts.Tile("lost", "Lost its memory", words.count(times["retractions"] + times["preemptions"]), "times"),
        parts.Tile(
            "end", "Ended", times["end_reason"] or ("running" if times["admit_ns"] else "waiting"), when("finish_ns")
        ),
    ]
    ways = []
    if story.places:
        ways = [
            parts.link(
                "first pass", cursor.href("/pass", rank=story.rank, pass_number=story.places[0][0]), className="action"
            ),
            parts.link(
                "last pass in the queue",
                cursor.href("/pass", rank=story.rank, pass_number=story.places[-1][0]),
                className="action",
            ),
        ]
    end = times["finish_ns"] or desk.timeline.extent.last_ns
    ways.append(
        parts.link(
            "on the time axis",
            cursor.href("/", begin_ns=times["arrive_ns"], end_ns=end + 1, last_s=None, at_ns=times["admit_ns"]),
            className="action",
        )
    )
    facts = [f"rank {story.rank}", f"arrived at {when('arrive_ns')}"]
    if times["priority"] is not None:
        facts.append(f"priority {times['priority']}")
    if times["routing_key"] is not None:
        facts.append(f"routing key {words.name(times['routing_key'], 60)}")
    return html.Div(
        [
            html.Section(
                [
                    html.Div(
                        [
                            html.H2(["Request ", html.Span(words.name(story.rid, _LONGEST_NAME), className="rid")]),
                            html.Nav(ways, className="ways", **{"aria-label": "Passes of this request"}),
                        ],
                        className="title",
                    ),
                    html.P(", ".join(facts)),
                ],
                className="card wide lead",
            ),
            parts.tiles(tiles),
        ],
        className="stack",
    )


def _choose(desk: Desk) -> Component:
    """Requests that may be meant."""
    rid, cursor = desk.cursor.rid, desk.cursor
    found = desk.timeline.find(rid or "", most=20)
    if not found and rid is not None:
        return parts.notice(
            f"No request of this run begins with {words.name(rid, 60)!r}.",
            "Requests are found by the beginning of their id. It may be in another run, or may not have arrived yet.",
            tone="warning",
        )
    title = "The newest requests" if rid is None else f"Requests that begin with {words.name(rid, 40)}"
    origin = desk.timeline.extent.first_ns
    rows = [
        [
            request_link(cursor, each.rank, each.rid),
            str(each.rank),
            words.clock((each.arrive_ns - origin) / 1e9, 0.001),
            words.seconds(each.ttft_s),
            each.end_reason or "not yet",
        ]
        for each in found
    ]
    columns = [
        Column("request"),
        Column("rank", True),
        Column("arrived", True),
        Column("first token after", True),
        Column("ended"),
    ]
    note = "or type the beginning of an id above" if rid is None else "choose one"
    return parts.card(title, parts.table(columns, rows, caption=title), note=note, wide=True)


# ---- charts ------------------------------------------------------------------------------------------------------


def life(desk: Desk) -> Figure:
    """Its phases on one bar."""
    story = chosen(desk)
    if story is None:
        return figures.blank(desk.theme, "no request is chosen")
    times = story.times
    last = times["finish_ns"] or desk.timeline.extent.last_ns
    marks = [
        ("queue", times["arrive_ns"], times["admit_ns"], ORANGE),
        ("prefill", times["admit_ns"], times["first_token_ns"], SKY),
        ("decode", times["first_token_ns"], last, GREEN),
    ]
    pieces = []
    for name, begin, end, hue in marks:
        if begin is not None:
            until = last if end is None else end
            pieces.append(Piece(name, (until - begin) / 1e9, hue, f"{name}: {words.nanoseconds(until - begin)}"))
    figure = figures.one_bar(pieces, desk.theme, unit="s", total=(last - times["arrive_ns"]) / 1e9)
    figure["layout"]["showlegend"] = True
    # Lines of a legend count from the last trace of a stack; this one reads like time.
    figure["layout"]["legend"]["traceorder"] = "normal"
    return figure


def ledger_of(desk: Desk, story: Story) -> RequestLedger:
    """Its ledger. Raises SchedscopeError where it can't be made."""
    return desk.once(("ledger", story.rid, story.rank), lambda: request_ledger(desk.book.run, story.rid, story.rank))


def ledger(desk: Desk) -> Figure:
    """Its time in the queue by cause: parts that add up exactly."""
    story = chosen(desk)
    if story is None:
        return figures.blank(desk.theme, "no request is chosen")
    found = ledger_of(desk, story)
    if not found.queued_ns:
        return figures.blank(desk.theme, "it never waited in the queue")
    pieces = []
    for (cause, after), ns in found.by_cause().items():
        label = CAUSES.get(cause, cause) + (f", after it was {after}" if after else "")
        share = words.share(ns / found.queued_ns)
        pieces.append(Piece(label, ns / 1e9, CAUSE_HUES.get(cause, GREY), f"{label}: {words.nanoseconds(ns)}, {share}"))
    figure = figures.one_bar(pieces, desk.theme, unit="s", total=found.queued_ns / 1e9)
    figure["layout"]["showlegend"] = True
    figure["layout"]["legend"]["traceorder"] = "normal"
    return figure


def parts_table(desk: Desk) -> Component:
    """The parts, with whom they are charged to."""
    story = chosen(desk)
    if story is None:
        return html.Div()
    try:
        found = ledger_of(desk, story)
    except SchedscopeError as error:
        return parts.card("Its ledger", html.P(f"It can't be made: {error}"), wide=True)
    shown = found.parts[:_SHOWN]
    columns = [
        Column("cause"),
        Column("charged to"),
        Column("because of"),
        Column("time", True),
        Column("share", True),
        Column("times", True, "passes that decided so"),
        Column("passes", True),
        Column("worst", True, "the pass that cost most of it"),
        Column("short", True, "tokens that were missing, at most"),
    ]
    table = parts.table(
        columns,
        [_part_row(desk, found, each) for each in shown],
        caption="Its time in the queue, part by part",
        id="ledger-table",
    )
    total = f"{len(found.parts):,} parts add up to {found.queued_ns:,} ns"
    if len(found.parts) > _SHOWN:
        total += f"; the {_SHOWN} largest are shown"
    return parts.card("Its ledger", table, note=total, wide=True)


def _part_row(desk: Desk, found: RequestLedger, part: Part) -> list[Any]:
    hue = CAUSE_HUES.get(part.cause, GREY)
    passes = (
        where_words([part])
        if part.first_pass is None
        else f"{part.first_pass:,}"
        if part.first_pass == part.last_pass
        else f"{part.first_pass:,}–{part.last_pass:,}"
    )
    label = CAUSES.get(part.cause, part.cause) + (f", after it was {part.after}" if part.after else "")
    return [
        parts.chip(label, hue, desk.theme),
        "" if part.rid is None else request_link(desk.cursor, found.rank, part.rid, 24),
        part.reason or "" if part.running is None else slots_words(part.running, part.slots),
        words.nanoseconds(part.ns),
        words.share(part.ns / found.queued_ns if found.queued_ns else None),
        words.count(part.times),
        passes,
        pass_link(desk.cursor, found.rank, part.worst_pass),
        "" if part.short is None else words.count(part.short),
    ]


def places(desk: Desk) -> Figure:
    """Where it stood after each sort, and what the pass said."""
    story = chosen(desk)
    if story is None or not story.places:
        known = desk.timeline.extent.level in {"decisions", "full"}
        return figures.blank(
            desk.theme, "no pass saw it in the queue" if known else "decisions are not recorded: --level decisions"
        )
    stood = story.places[-_PLACES:]
    begun = desk.timeline.pass_times(story.rank, stood[0][0], stood[-1][0])
    known_places = [(number, place, begun[number]) for number, place in stood if number in begun]
    if not known_places:
        return figures.blank(desk.theme, "its passes have not ended yet")
    first, last = known_places[0][2], known_places[-1][2]
    margin = max((last - first) // 40, 1_000_000)
    window = Window(max(first - margin, 0), last + margin, 1)
    span = Span(window, desk.timeline.extent.first_ns, desk.cursor.at_ns)
    line = [place.after for _, place, _ in known_places]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [span.seconds(ns) for _, _, ns in known_places],
            "y": line,
            "line": {"color": GREY.on(desk.theme), "width": 1, "shape": "hv"},
            "hoverinfo": "skip",
            "showlegend": False,
            "name": "place",
        }
    ]
    labels = {
        "admitted": "admitted",
        "chunk": "next chunk",
        "refused": "refused",
        "held_back": "held back",
        "waiting": "not looked at",
    }
    for fate, label in labels.items():
        mine = [(number, place, ns) for number, place, ns in known_places if place.fate == fate]
        if mine:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "x": [span.seconds(ns) for _, _, ns in mine],
                    "y": [0 if place.after is None else place.after for _, place, _ in mine],
                    "marker": {"color": VERDICTS[fate].on(desk.theme), "size": 7},
                    "customdata": [[f"pass {number:,}", words.in_chart(place.words, 90)] for number, place, _ in mine],
                    "hovertemplate": "%{customdata[0]}, place %{y}<br>%{customdata[1]}<extra></extra>",
                }
            )
    most = max((place or 0 for place in line), default=0)
    figure = figures.over_time(
        span,
        traces,
        desk.theme,
        y={"range": [most + 1, -1], "rangemode": "normal", "tickformat": ",d"},
        hovermode="closest",
    )
    figure["layout"]["showlegend"] = True
    return figure


def overtaken(desk: Desk) -> Component:
    """Requests that came later and went first."""
    story = chosen(desk)
    title = "Who overtook it"
    if story is None:
        return html.Div()
    try:
        found = ledger_of(desk, story)
    except SchedscopeError as error:
        return parts.card(title, html.P(str(error)))
    sums: dict[str, list[Part]] = {}
    for part in found.parts:
        if part.cause in _OVERTAKING and part.rid is not None:
            sums.setdefault(part.rid, []).append(part)
    if not sums:
        return parts.card(title, html.P("Nobody who came later was admitted before it at its cost."))
    ordered = sorted(sums.items(), key=lambda item: -sum(part.ns for part in item[1]))[:12]
    rows = [
        [
            request_link(desk.cursor, found.rank, rid, 24),
            ", ".join(
                sorted({CAUSES[part.cause].removeprefix("overtaken ").removeprefix("overtaken, ") for part in mine})
            ),
            words.nanoseconds(sum(part.ns for part in mine)),
            pass_link(desk.cursor, found.rank, mine[0].worst_pass),
        ]
        for rid, mine in ordered
    ]
    table = parts.table(
        [Column("request"), Column("how"), Column("cost it", True), Column("in pass", True)], rows, caption=title
    )
    return parts.card(title, table, note=f"{len(sums):,} requests that came later")


def looks(desk: Desk) -> Component:
    """The passes that tell most about it, decided again."""
    story = chosen(desk)
    title = "Why it waited"
    if story is None:
        return html.Div()
    try:
        found = explained_request(desk, story.rank, story.rid)
    except SchedscopeError as error:
        return parts.card(title, html.P(f"It can't be explained: {words.name(str(error), 300)}"), wide=True)
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Deciding the passes again that tell most about it…"), wide=True)
    said: list[Any] = [html.P(html.Strong(words.name(request_sentence(found.ledger), 600)))]
    if found.unseen is not None:
        said.append(html.P(f"No pass could be decided again: {words.name(found.unseen, 300)}"))
    for look in found.looks:
        link = parts.link(
            words.name(look_title(look), 160), desk.cursor.href("/pass", rank=story.rank, pass_number=look.number)
        )
        lines = html.Ul([html.Li(words.name(line, 240)) for line in look_lines(look)])
        said.append(html.Details([html.Summary(link), lines], open=look is found.looks[0], className="look"))
    if found.changes:
        said.append(html.H4("What it could find in the cache"))
        said.append(html.Ul([html.Li(words.name(change_words(each), 300)) for each in found.changes]))
    note = f"{found.checked} claims checked by deciding again"
    return parts.card(title, *said, note=note, wide=True)


def prefix(desk: Desk) -> Component:
    """What it found in the cache over time."""
    story = chosen(desk)
    title = "Its prefix in the cache"
    if story is None:
        return html.Div()
    if not story.places:
        return parts.card(title, html.P("No pass looked it up."))
    rows, before = [], None
    for number, place in story.places:
        if before is None or place.matched != before:
            change = "" if before is None else f"{place.matched - before:+,}"
            rows.append(
                [
                    pass_link(desk.cursor, story.rank, number),
                    words.count(place.matched),
                    change,
                    place.words if place.verdict else FATE_WORDS[place.fate],
                ]
            )
            before = place.matched
    shown = rows[-14:]
    table = parts.table(
        [Column("pass", True), Column("matched", True, "tokens"), Column("change", True), Column("then")],
        shown,
        caption=title,
    )
    note = "each time what was found changed" + (
        f"; the last {len(shown)} of {len(rows)}" if len(rows) > len(shown) else ""
    )
    return parts.card(title, table, note=note)


FATE_WORDS = {
    "waiting": "not looked at",
    "held_back": "held back",
    "refused": "refused",
    "admitted": "admitted",
    "chunk": "next chunk",
}

PAGE = Page(
    path="/request",
    title="Request",
    layout=layout,
    charts={"life": life, "ledger": ledger, "places": places},
    parts={"head": head, "looks": looks, "parts": parts_table, "overtaken": overtaken, "prefix": prefix},
)
