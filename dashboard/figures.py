"""Charts: from tables and stretches to what Plotly draws. Pure functions of their arguments.

All charts over time share one axis, in seconds from the run's first step, so that they can be laid below each other.
A figure is a plain dictionary, as it goes to the browser; `layout.meta` tells what its axes stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from schedscope.dashboard import words
from schedscope.dashboard.cursor import Theme
from schedscope.replay.palette import BLUE, GREY, PURPLE, Hue, colour
from schedscope.replay.told import HeatMap, Stretch
from schedscope.replay.window import Window

Figure = dict[str, Any]
Trace = dict[str, Any]

FONT = "Inter, 'Segoe UI', system-ui, -apple-system, 'Helvetica Neue', Arial, sans-serif"
_INK = {"dark": "#aab3be", "light": "#525c68"}
_GRID = {"dark": "rgba(255,255,255,0.07)", "light": "rgba(15,25,40,0.08)"}
_PAPER = {"dark": "#161b22", "light": "#ffffff"}
_LINE = {"dark": "#39424e", "light": "#c9d0d8"}
_TICKS = 7
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


class Span(NamedTuple):
    """The time that a chart shows."""

    window: Window
    origin_ns: int
    """What the axis counts from."""
    at_ns: int | None = None
    """A moment to mark."""

    def seconds(self, ns: float) -> float:
        """A moment on the axis."""
        return (ns - self.origin_ns) / 1e9

    @property
    def centres(self) -> dict[str, float]:
        """The middles of the buckets, for a trace."""
        return {"x0": self.seconds(self.window.begin_ns) + self.width_s / 2, "dx": self.width_s}

    @property
    def width_s(self) -> float:
        """Of a bucket."""
        return self.window.width_ns / 1e9


def over_time(
    span: Span,
    traces: Sequence[Trace],
    theme: Theme,
    *,
    y: Mapping[str, Any] | None = None,
    legend: bool = True,
    **layout: Any,
) -> Figure:
    """A chart over time: zooming and pointing choose a time, y stays as it is."""
    begin, end = span.seconds(span.window.begin_ns), span.seconds(span.window.end_ns)
    axis = {
        "range": [begin, end],
        "tickvals": (ticks := time_ticks(begin, end))[0],
        "ticktext": ticks[1],
        "showgrid": True,
        "gridcolor": _GRID[theme],
        "zeroline": False,
        "fixedrange": False,
        "showspikes": False,
        "hoverformat": ".3f",
        "linecolor": _LINE[theme],
        "showline": True,
    }
    y_axis = {
        "gridcolor": _GRID[theme],
        "zeroline": False,
        "fixedrange": True,
        "rangemode": "tozero",
        "nticks": 4,
        **(y or {}),
    }
    shapes = []
    if span.at_ns is not None:
        at = span.seconds(span.at_ns)
        line = {"color": _INK[theme], "width": 1.5, "dash": "dot"}
        shapes.append({"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line})
    return {
        "data": list(traces),
        "layout": {
            **base(theme),
            "xaxis": axis,
            "yaxis": y_axis,
            "hovermode": "x unified",
            "dragmode": "zoom",
            "showlegend": legend and len(traces) > 1,
            "shapes": shapes,
            "meta": {"time": True, "origin": str(span.origin_ns)},
            **layout,
        },
    }


def base(theme: Theme) -> dict[str, Any]:
    """What all layouts share."""
    ink = _INK[theme]
    return {
        "font": {"family": FONT, "size": 12, "color": ink},
        "paper_bgcolor": _PAPER[theme],
        "plot_bgcolor": _PAPER[theme],
        "margin": {"l": 52, "r": 10, "t": 8, "b": 24},
        "autosize": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"size": 12, "color": ink},
            "bgcolor": "rgba(0,0,0,0)",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "hoverlabel": {
            "bgcolor": "#0d1117" if theme == "dark" else "#ffffff",
            "bordercolor": _LINE[theme],
            "font": {"family": FONT, "size": 12, "color": "#e6edf3" if theme == "dark" else "#1b2430"},
            "namelength": 40,
        },
        "barmode": "stack",
        "bargap": 0,
        "selections": [],
    }


def time_ticks(begin: float, end: float, most: int = _TICKS) -> tuple[list[float], list[str]]:
    """Round moments between two, and what to call them."""
    length = max(end - begin, 1e-9)
    fine = 10.0 ** math.floor(math.log10(length / most))
    small = [fine * factor for factor in (1, 2, 5, 10)]
    steps = [step for step in (*small, *_STEPS_S) if step >= 1 or step in small]
    step = next((each for each in sorted(steps) if length / each <= most), 86400 * math.ceil(length / 86400 / most))
    first = math.ceil(begin / step - 1e-9)
    values = [n * step for n in range(first, math.floor(end / step + 1e-9) + 1)]
    return values, [words.clock(value, step) for value in values]


def line(
    span: Span,
    name: str,
    values: Sequence[float | None],
    hue: Hue,
    theme: Theme,
    *,
    form: str = ",.0f",
    fill: bool = False,
    dash: str = "solid",
    width: float = 1.8,
    stack: str | None = None,
) -> Trace:
    """A line with a point per bucket; None interrupts it."""
    shade = hue.on(theme)
    alone = lonely(values)
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if alone else "lines",
        "name": name,
        **span.centres,
        "y": list(values),
        "line": {"color": shade, "width": width, "dash": dash},
        "connectgaps": False,
        "hovertemplate": f"%{{y:{form}}}",
    }
    if alone:
        sizes = [5 if place in alone else 0 for place in range(len(values))]
        trace["marker"] = {"size": sizes, "color": shade, "line": {"width": 0}}
    if fill and None not in values:
        trace |= {"fill": "tozeroy", "fillcolor": faint(shade, 0.18)}
    if stack is not None:
        trace |= {"stackgroup": stack, "fillcolor": faint(shade, 0.55), "line": {"color": shade, "width": 0.5}}
    return trace


def lonely(values: Sequence[float | None]) -> set[int]:
    """Points without a neighbour, which a line would not show."""
    known = [value is not None for value in values]
    return {
        place
        for place, here in enumerate(known)
        if here and not (place and known[place - 1]) and not (place + 1 < len(known) and known[place + 1])
    }


def bars(span: Span, name: str, values: Sequence[float | None], hue: Hue, theme: Theme, *, form: str = ",.0f") -> Trace:
    """A bar per bucket."""
    return {
        "type": "bar",
        "name": name,
        **span.centres,
        "y": list(values),
        "width": span.width_s,
        "marker": {"color": hue.on(theme), "line": {"width": 0}},
        "hovertemplate": f"%{{y:{form}}}",
    }


def spread(table: pa.Table, value: str, buckets: int) -> dict[str, list[float]]:
    """A series per `what` of a table of shares, most first."""
    found: dict[str, list[float]] = {}
    columns = (table[name].to_pylist() for name in ("bucket", "what", value))
    for bucket, what, amount in zip(*columns, strict=True):
        found.setdefault(what, [0.0] * buckets)[bucket] += float(amount or 0)
    return dict(sorted(found.items(), key=lambda item: (-sum(item[1]), item[0])))


def stacked(
    span: Span,
    series: Mapping[str, Sequence[float]],
    names: Mapping[str, Hue],
    theme: Theme,
    *,
    form: str = ",.0f",
    called: Mapping[str, str] | None = None,
) -> list[Trace]:
    """Bars on each other, one colour per name."""
    called = called or {}
    return [
        bars(
            span, called.get(what, words.in_chart(what)), values, names.get(what.split(" ")[0], GREY), theme, form=form
        )
        for what, values in series.items()
    ]


class Lane(NamedTuple):
    """A row of bands."""

    name: str
    stretches: tuple[Stretch, ...]
    colours: Mapping[str, Hue]


def bands(span: Span, lanes: Sequence[Lane], theme: Theme) -> Figure:
    """When something stayed the same: a row for each lane, a band for each stretch, a trace for each thing."""
    traces: dict[tuple[str, str], Trace] = {}
    low, high = span.window.begin_ns, span.window.end_ns
    for lane in lanes:
        for stretch in lane.stretches:
            begin, end = max(stretch.begin_ns, low), min(stretch.end_ns, high)
            trace = traces.setdefault((lane.name, stretch.what), _band(lane, stretch.what, theme))
            trace["x"].append(max(end - begin, 0) / 1e9)
            trace["base"].append(span.seconds(begin))
            trace["y"].append(lane.name)
            ends = (words.count(stretch.first_pass), words.count(stretch.last_pass))
            passes = "" if ends == (words.NOTHING, words.NOTHING) else f"passes {ends[0]} to {ends[1]}"
            trace["customdata"].append([words.nanoseconds(stretch.end_ns - stretch.begin_ns), passes])
    figure = over_time(
        span,
        list(traces.values()),
        theme,
        y={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [lane.name for lane in reversed(lanes)],
            "range": [-0.5, len(lanes) - 0.5],
            "showgrid": False,
            "automargin": False,
        },
        barmode="overlay",
        bargap=0.28,
        hovermode="closest",
    )
    figure["layout"]["showlegend"] = bool(traces)
    return figure


def _band(lane: Lane, what: str, theme: Theme) -> Trace:
    shade = colour(lane.colours, what.split(" ")[0], theme)
    pattern = (
        {"shape": "/", "size": 5, "solidity": 0.35, "fgcolor": _PAPER[theme], "bgcolor": shade} if "(" in what else None
    )
    return {
        "type": "bar",
        "orientation": "h",
        "name": words.in_chart(what),
        "x": [],
        "base": [],
        "y": [],
        "customdata": [],
        "marker": {"color": shade, "line": {"width": 0}, **({"pattern": pattern} if pattern else {})},
        "hovertemplate": f"{words.in_chart(what)}<br>%{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>",
    }


def heat(span: Span, found: HeatMap, theme: Theme, box: Sequence[float] | None = None) -> Figure:
    """How many requests had which time to first token when; the vertical axis is logarithmic.

    Args:
        box: begin and end, seconds on the axis, and the lowest and highest time of a chosen region.
    """
    rows = len(found.edges_s) - 1
    cells: list[list[int | None]] = [[None] * span.window.buckets for _ in range(rows)]
    columns = (found.cells[name].to_pylist() for name in ("bucket", "row", "requests"))
    for bucket, row, requests in zip(*columns, strict=True):
        cells[row][bucket] = requests
    middles = [math.sqrt(low * high) for low, high in zip(found.edges_s, found.edges_s[1:], strict=False)]
    shade = PURPLE.on(theme)
    trace: Trace = {
        "type": "heatmap",
        **span.centres,
        "y": [math.log10(middle) for middle in middles],
        "z": cells,
        "customdata": [[words.seconds(middle)] * span.window.buckets for middle in middles],
        "colorscale": [[0, faint(shade, 0.28)], [0.3, faint(shade, 0.6)], [1, shade]],
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": "%{z:,} requests<br>first token after %{customdata}<extra></extra>",
        "xgap": 0,
        "ygap": 0.5,
    }
    low, high = math.log10(found.edges_s[0]), math.log10(found.edges_s[-1])
    marks = [
        factor * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for factor in ((1,) if high - low > 2 else (1, 2, 5))
        if low - 0.02 <= math.log10(factor * 10.0**power) <= high + 0.02
    ]
    figure = over_time(
        span,
        [trace],
        theme,
        y={
            "range": [low, high],
            "tickvals": [math.log10(mark) for mark in marks],
            "ticktext": [words.seconds(mark) for mark in marks],
            "rangemode": "normal",
            "fixedrange": True,
        },
        hovermode="closest",
        dragmode="select",
    )
    figure["layout"]["meta"]["box"] = True
    figure["layout"]["newselection"] = {"line": {"color": _INK[theme], "width": 1.5, "dash": "solid"}}
    if box is not None:
        begin, end, bottom, top = box
        figure["layout"]["shapes"].append(
            {
                "type": "rect",
                "x0": begin,
                "x1": end,
                "y0": math.log10(bottom),
                "y1": math.log10(top),
                "line": {"color": BLUE.on(theme), "width": 2},
                "fillcolor": faint(BLUE.on(theme), 0.1),
            }
        )
    return figure


def blank(theme: Theme, said: str) -> Figure:
    """A chart without anything to draw, that says why."""
    return {
        "data": [],
        "layout": {
            **base(theme),
            "xaxis": {"visible": False},
            "yaxis": {"visible": False},
            "annotations": [
                {
                    "text": words.in_chart(said, 200),
                    "showarrow": False,
                    "x": 0.5,
                    "y": 0.5,
                    "xref": "paper",
                    "yref": "paper",
                    "font": {"size": 13, "color": _INK[theme]},
                }
            ],
            "meta": {},
        },
    }


class Piece(NamedTuple):
    """A part of a bar."""

    name: str
    value: float
    hue: Hue
    said: str
    """What it shows when pointed at."""


def one_bar(pieces: Iterable[Piece], theme: Theme, *, unit: str, total: float) -> Figure:
    """One bar of parts that add up to a whole."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words.in_chart(piece.name, 80),
            "x": [piece.value],
            "y": [""],
            "marker": {"color": piece.hue.on(theme), "line": {"width": 1, "color": _PAPER[theme]}},
            "customdata": [[words.in_chart(piece.said, 300)]],
            "hovertemplate": "%{customdata[0]}<extra></extra>",
        }
        for piece in pieces
    ]
    return {
        "data": traces,
        "layout": {
            **base(theme),
            "barmode": "stack",
            "bargap": 0.1,
            "margin": {"l": 8, "r": 8, "t": 4, "b": 24},
            "xaxis": {
                "range": [0, total or 1],
                "ticksuffix": f" {unit}",
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "nticks": 6,
                "linecolor": _LINE[theme],
            },
            "yaxis": {"visible": False, "fixedrange": True},
            "hovermode": "closest",
            "showlegend": False,
            "meta": {},
        },
    }


def faint(shade: str, alpha: float) -> str:
    """A colour let through."""
    red, green, blue = (int(shade[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"
