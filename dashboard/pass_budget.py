"""What each request took of the budgets of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedscope.dashboard import figures, words
from schedscope.dashboard.chosen_pass import chosen
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.figures import Figure
from schedscope.replay.palette import GREY, VERDICTS, VERMILION
from schedscope.replay.recorded import RecordedPass


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
