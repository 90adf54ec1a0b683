"""The pieces that pages are built of. Plain HTML; how it looks is in assets/style.css."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard.cursor import Theme
from schedscope.dashboard.figures import Figure
from schedscope.replay.palette import Hue

Content = Any
"""A component, a text, or a list of them."""


def chart(
    name: str,
    title: str,
    figure: Figure | None,
    *,
    note: Content = None,
    tall: bool = False,
    wide: bool = False,
    flat: bool = False,
) -> Component:
    """A chart with its heading and what can be done with it.

    Args:
        figure: None: it comes by itself.
    """
    size = "tall" if tall else "flat" if flat else "normal"
    return html.Figure(
        [
            html.Figcaption(
                [
                    html.H3(title, id=f"{name}-title"),
                    html.Span(note or "", className="note"),
                    html.Details(
                        [
                            html.Summary("Save", title=f"Save {title.lower()} as a picture or a table"),
                            html.Div(
                                [html.Button(form.upper(), **{"data-export": form}) for form in ("png", "svg", "csv")],
                                className="menu",
                            ),
                        ],
                        className="save",
                    ),
                ]
            ),
            html.Div(
                html.Div(className="plot", **({} if figure is None else {"data-figure": figure})),
                className=f"chart {size}",
                tabIndex=0,
                role="group",
                **{"aria-labelledby": f"{name}-title", "data-chart": name},
            ),
        ],
        className=f"card{' wide' if wide else ''}",
        id=f"card-{name}",
    )


def part(name: str, content: Content, *, className: str = "") -> Component:
    """A panel that is not a chart."""
    return html.Div(content, id=f"part-{name}", className=f"part {className}".strip(), **{"data-part": name})


def card(title: str, *content: Content, note: Content = None, wide: bool = False, id: str | None = None) -> Component:
    """A titled box."""
    caption = html.Header([html.H3(title), html.Span(note or "", className="note")])
    options = {} if id is None else {"id": id}
    return html.Section([caption, *content], className=f"card{' wide' if wide else ''}", **options)


class Tile(NamedTuple):
    """A number."""

    key: str
    label: str
    value: str
    said: str = ""
    """A line below it."""
    tone: str = ""
    big: bool = False


def tiles(shown: Iterable[Tile]) -> Component:
    """Numbers beside each other."""
    return html.Dl(
        [
            html.Div(
                [
                    html.Dt(tile.label),
                    html.Dd(tile.value, className="value", **{"data-tile": tile.key}),
                    html.Dd(tile.said, className="said"),
                ],
                className=" ".join(["tile", *(["big"] if tile.big else []), *([tile.tone] if tile.tone else [])]),
            )
            for tile in shown
        ],
        className="tiles",
    )


class Column(NamedTuple):
    """Of a table."""

    label: str
    numeric: bool = False
    hint: str = ""


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str,
    classes: Sequence[str] = (),
    id: str | None = None,
) -> Component:
    """A table; it scrolls sideways where it has to.

    Args:
        classes: one for each row.
    """

    def cell(column: Column, value: Content) -> Component:
        return html.Td(value, className="number" if column.numeric else "")

    body = [
        html.Tr(
            [cell(column, value) for column, value in zip(columns, row, strict=True)],
            className=classes[place] if place < len(classes) else "",
        )
        for place, row in enumerate(rows)
    ]
    head = [
        html.Th(
            column.label,
            scope="col",
            className="number" if column.numeric else "",
            **({"title": column.hint} if column.hint else {}),
        )
        for column in columns
    ]
    options = {} if id is None else {"id": id}
    return html.Div(
        html.Table([html.Caption(caption), html.Thead(html.Tr(head)), html.Tbody(body)]),
        className="scroll",
        tabIndex=0,
        role="region",
        **{"aria-label": caption},
        **options,
    )


def link(words: Content, href: str, *, className: str = "", title: str = "") -> Component:
    """A link to another view."""
    return html.A(words, href=href, className=className, **({"title": title} if title else {}))


def select(label: str, parameter: str, options: list[tuple[str, str]], chosen: str) -> Component:
    """A choice that changes the URL."""
    return html.Label(
        [
            html.Span(label),
            html.Select(
                [html.Option(text, value=value, selected=value == chosen) for text, value in options],
                **{"data-key": parameter},
            ),
        ],
        className="choice",
    )


def chip(words: str, hue: Hue, theme: Theme) -> Component:
    """A name in the colour that it has everywhere."""
    return html.Span([html.I(style={"background": hue.on(theme)}, **{"aria-hidden": "true"}), words], className="chip")


def notice(title: str, *said: Content, tone: str = "info") -> Component:
    """What is to be known, and what to do."""
    return html.Div([html.Strong(title), *(html.P(each) for each in said)], className=f"notice {tone}", role="status")


def code(words: str) -> Component:
    """A command to type."""
    return html.Code(words)


def working(words: str) -> Component:
    """Something is being worked out; the view asks again by itself."""
    return html.Div(
        [html.Span(className="spinner", **{"aria-hidden": "true"}), words],
        className="working",
        role="status",
        **{"data-pending": "1"},
    )


def waits() -> Component:
    """Tells the view to ask for this part again."""
    return html.Span(hidden=True, **{"data-pending": "1"})
