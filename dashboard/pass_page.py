"""One pass: who stood where, who got in, which numbers decided, and what other policies would have done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.chosen_pass import chosen
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.links import request_link
from schedscope.dashboard.pass_budget import budget
from schedscope.dashboard.pass_order import order
from schedscope.dashboard.pass_policies import policies
from schedscope.dashboard.pass_queue import queue
from schedscope.dashboard.pass_why import why
from schedscope.replay.palette import GREY
from schedscope.replay.palette import POLICIES as POLICY_HUES
from schedscope.replay.recorded import RecordedPass


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
                    html.Dd(words.sentence(it.stop_words), id="stopped"),
                    *_delayer(it),
                    *_chunk(it, cursor),
                ],
                className="facts",
            ),
        ],
        className="card wide lead",
    )


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


PAGE = Page(
    path="/pass",
    title="Pass",
    layout=layout,
    charts={"order": order, "total": budget("total"), "input": budget("input"), "chunk": budget("chunk")},
    parts={"head": head, "why": why, "queue": queue, "policies": policies},
)
