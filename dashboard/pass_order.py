"""Where requests stood before a pass and after it."""

from __future__ import annotations

from collections.abc import Sequence

from schedscope.dashboard import figures, words
from schedscope.dashboard.chosen_pass import chosen
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.library import Pending
from schedscope.dashboard.rebuilt import alternatives
from schedscope.replay.palette import VERDICTS
from schedscope.replay.recorded import Place

FATES = {
    "admitted": "admitted",
    "chunk": "next chunk",
    "refused": "refused",
    "held_back": "held back",
    "waiting": "not looked at",
}


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
