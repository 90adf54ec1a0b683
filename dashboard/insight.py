"""What the doctor found in a run, and what is different about some of its requests."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import parts, words
from schedscope.dashboard.cursor import Box
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.examine import Examined, examine_apart
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import pass_link, request_link
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.contrast import Contrast, Difference, contrast, fates
from schedscope.replay.doctor import Examination
from schedscope.replay.finding import Finding
from schedscope.replay.palette import SEVERITIES

_SHOWN = 3
"""Findings that are open from the beginning."""
_FIELDS = 6
_VALUES = 4


def examined(desk: Desk) -> Examined | Pending:
    """What the doctor says about the run. Raises SchedscopeError."""
    return desk.standing("examined", lambda: examine_apart(desk.book.run))


def findings(desk: Desk) -> Component:
    """All findings, in words, the worst first."""
    try:
        known = examined(desk)
    except SchedscopeError as error:
        return parts.notice("The run could not be examined.", str(error), tone="warning")
    if isinstance(known, Pending):
        return parts.card("Findings", parts.working("Examining the run…"), wide=True)
    return findings_card(desk, known.examination)


def findings_card(desk: Desk, found: Examination) -> Component:
    """The findings as a list."""
    judged = f"{len(found.examined)} detectors looked"
    if found.not_judged:
        judged += f", {len(found.not_judged)} could not judge"
    if not found.findings:
        return parts.card("Findings", html.P(f"Nothing stands out: {judged}."), wide=True)
    shown = [finding_row(desk, each) for each in found.findings[:_SHOWN]]
    rest = found.findings[_SHOWN:]
    more = [
        html.Details(
            [
                html.Summary(f"{len(rest)} more"),
                html.Ul([finding_row(desk, each) for each in rest], className="findings"),
            ],
            className="more",
        )
    ]
    listed = html.Ul(shown, className="findings")
    return parts.card(
        "Findings",
        listed,
        *(more if rest else []),
        note=f"{judged}; {words.seconds(found.waiting_s)} of waiting in all",
        wide=True,
    )


def finding_row(desk: Desk, finding: Finding) -> Component:
    """A finding with its evidence and its advice."""
    hue = SEVERITIES[str(finding.severity)]
    where = [
        html.Li([words.name(each.words, 200), " ", *_to(desk, each.rank, each.pass_number, each.rid)])
        for each in finding.evidence[:3]
    ]
    tried = [html.Li(f"Tried on a recorded pass: {words.name(check.words, 200)}.") for check in finding.checked]
    if finding.unchecked is not None:
        tried.append(html.Li(f"Not tried: {words.name(finding.unchecked, 200)}."))
    cost = f", {words.seconds(finding.cost_s)} of waiting" if finding.cost_s else ""
    rank = "" if finding.rank is None or len(desk.timeline.extent.ranks) == 1 else f"rank {finding.rank}: "
    return html.Li(
        [
            html.Span(
                str(finding.severity),
                className="severity",
                style={"color": hue.on(desk.theme), "borderColor": hue.on(desk.theme)},
            ),
            html.Div(
                [
                    html.Strong(f"{rank}{words.name(finding.title, 400)}"),
                    html.Span(f" ({finding.detector}{cost})", className="quiet"),
                    html.P(words.name(finding.advice, 600)),
                    html.Details([html.Summary("Evidence"), html.Ul([*where, *tried])]),
                ]
            ),
        ]
    )


def _to(desk: Desk, rank: int, number: int | None, rid: str | None) -> list[Any]:
    links: list[Any] = []
    if number is not None:
        links += ["pass ", pass_link(desk.cursor, rank, number), " "]
    if rid is not None:
        links.append(request_link(desk.cursor, rank, rid))
    return links


# ---- BubbleUp ----------------------------------------------------------------------------------------------------


def contrasted(desk: Desk, box: Box) -> Contrast | Pending:
    """What is different about the requests in a box. Raises SchedscopeError."""
    known = desk.standing("fates", lambda: fates(desk.book.run))
    if isinstance(known, Pending):
        return known
    window = desk.whole()
    return desk.once(("contrast", window, box), lambda: contrast(desk.timeline, window, *box, known))


def inside(desk: Desk) -> Any:
    """The fields that tell the requests in the box from the others, the most telling first."""
    box = desk.cursor.box
    if box is None:
        return [
            html.Header([html.H3("What is different?")]),
            html.P(
                "Drag a box around requests in the chart of first tokens: what tells them from all others is listed "
                "here, the most telling first.",
                className="hint",
            ),
            html.P(
                "Compared are policy, matched share, routing key, prompt length, partner, rank, verdict, priority, and "
                "the queue at admission.",
                className="hint",
            ),
        ]
    try:
        found = contrasted(desk, box)
    except SchedscopeError as error:
        return [html.Header([html.H3("What is different?")]), html.P(str(error))]
    if isinstance(found, Pending):
        return [html.Header([html.H3("What is different?")]), parts.working("Reading what passes said about requests…")]
    clear = parts.link("clear the box", desk.cursor.href("/", box=None), className="action")
    title = html.Header(
        [
            html.H3("What is different?"),
            html.Span(f"{found.inside:,} requests in the box, {found.outside:,} outside", className="note"),
            clear,
        ]
    )
    if not found.differences:
        said = (
            "No request is in the box."
            if not found.inside
            else "All requests are in the box: there is nothing to compare with."
        )
        return [title, html.P(said)]
    telling = [each for each in found.differences if each.score > 0][:_FIELDS]
    if not telling:
        return [title, html.P("Nothing: all fields are alike inside and outside.")]
    sides = [
        html.Span([html.I(**{"aria-hidden": "true"}), f"{side} the box"], className=side)
        for side in ("inside", "outside")
    ]
    told = html.P([*sides, html.Span("share of the requests there that have a value")], className="sides")
    return [title, told, html.Div([_difference(each) for each in telling], className="differences")]


def _difference(found: Difference) -> Component:
    rows = []
    for value in found.values[:_VALUES]:
        rows.append(html.Span(words.name(value.name, 26), className="what", title=words.name(value.name, 120)))
        for share, side in ((value.inside, "inside"), (value.outside, "outside")):
            rows.append(
                html.Span(
                    [html.I(style={"width": f"{share * 100:.1f}%"}), html.B(f"{share * 100:.0f} %")],
                    className=f"share {side}",
                    title=f"{words.share(share)} {side} the box",
                )
            )
    return html.Section(
        [
            html.H4([found.field, html.Span(f" {found.score * 100:.0f} % different", className="quiet")]),
            html.Div(rows, className="shares"),
        ]
    )
