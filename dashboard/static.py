"""Components as HTML: for the screen, and for a file that needs no server."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

from dash.development.base_component import Component

Href = Callable[[str], str | None]
"""Where a link leads in the file; None: nowhere, and only its words are kept."""

_VOID = {"br", "hr", "img", "input"}
_NAMES = {"className": "class", "tabIndex": "tabindex", "htmlFor": "for", "colSpan": "colspan"}
_LEFT_OUT = {"button", "label", "select", "option", "input"}
"""In a file nothing would happen."""


def to_html(content: Any, href: Href | None = None) -> str:
    """Content as HTML; all text is escaped.

    Args:
        href: None: it is for the screen; else for a file, without what can't be done there, where graphs become places
            that a script fills.
    """
    if content is None or isinstance(content, bool):
        return ""
    if isinstance(content, str | int | float):
        return escape(str(content))
    if isinstance(content, list | tuple):
        return "".join(to_html(each, href) for each in content)
    assert isinstance(content, Component), content
    return _element(content, href)


def _figure(figure: Any) -> str:
    # In a script of data, only its end would be read as anything else.
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    return f'<div class="plot"></div><script type="application/json" class="figure">{data}</script>'


def _element(component: Component, href: Href | None) -> str:
    properties = {name: value for name, value in component.to_plotly_json()["props"].items() if value is not None}
    if "data-figure" in properties:
        return _figure(properties["data-figure"])
    tag = type(component).__name__.lower()
    classes = str(properties.get("className", "")).split()
    if href is not None and (tag in _LEFT_OUT or "save" in classes or "data-pending" in properties):
        return ""
    inner = to_html(properties.pop("children", None), href)
    if href is not None and tag == "a":
        target = href(str(properties.pop("href", "")))
        if target is None:
            return f"<span>{inner}</span>" if "action" not in classes else ""
        properties["href"] = target
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
