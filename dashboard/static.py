"""Components as plain HTML, for a file that needs no server."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

from dash import dcc
from dash.development.base_component import Component

Href = Callable[[str], str | None]
"""Where a link leads in the file; None: nowhere, and only its words are kept."""

_VOID = {"br", "hr", "img", "input"}
_NAMES = {"className": "class", "tabIndex": "tabindex", "htmlFor": "for", "colSpan": "colspan"}
_LEFT_OUT = {"button", "select", "option", "input"}
"""Nothing would happen."""


def to_html(content: Any, href: Href) -> str:
    """Content as HTML; all text is escaped, and graphs become places that assets of the report fill."""
    if content is None or isinstance(content, bool):
        return ""
    if isinstance(content, str | int | float):
        return escape(str(content))
    if isinstance(content, list | tuple):
        return "".join(to_html(each, href) for each in content)
    assert isinstance(content, Component), content
    if isinstance(content, dcc.Graph):
        return _graph(content)
    return _element(content, href)


def _graph(graph: Any) -> str:
    # In a script of data, only its end would be read as anything else.
    data = json.dumps(graph.figure, allow_nan=False).replace("<", "\\u003c")
    return f'<div class="plot"></div><script type="application/json" class="figure">{data}</script>'


def _element(component: Component, href: Href) -> str:
    properties = {name: value for name, value in component.to_plotly_json()["props"].items() if value is not None}
    tag = type(component).__name__.lower()
    classes = str(properties.get("className", "")).split()
    if tag in _LEFT_OUT or "save" in classes or "data-select" in properties or "data-pending" in properties:
        return ""
    inner = to_html(properties.pop("children", None), href)
    if tag == "a":
        target = href(str(properties.pop("href", "")))
        if target is None:
            return f"<span>{inner}</span>" if "action" not in classes else ""
        properties["href"] = target
    if isinstance(properties.get("id"), dict):
        properties["id"] = "-".join(properties["id"].values())
    attributes = "".join(_attribute(name, value) for name, value in properties.items())
    return f"<{tag}{attributes}>" if tag in _VOID else f"<{tag}{attributes}>{inner}</{tag}>"


def _attribute(name: str, value: Any) -> str:
    if value is False:
        return ""
    if value is True:
        return f" {name}"
    if name == "style":
        value = ";".join(f"{_dashed(key)}:{each}" for key, each in value.items())
    return f' {_NAMES.get(name, name)}="{escape(str(value))}"'


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)
