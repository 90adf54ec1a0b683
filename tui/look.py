"""How things look: two themes, the palette on either ground, bars and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from schedscope.replay.describe import number, printable
from schedscope.replay.palette import GROUNDS, Ground, Hue, colour
from textual.theme import Theme

BLOCKS = " ▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"
HATCH = "\N{BOX DRAWINGS LIGHT DIAGONAL UPPER RIGHT TO LOWER LEFT}"

DARK = Theme(
    name="schedscope-dark",
    primary="#56b4e9",
    secondary="#dd92bd",
    accent="#e69f00",
    warning="#e69f00",
    error="#ff7f4d",
    success="#2fbf8f",
    foreground="#e4e4e4",
    background=GROUNDS["dark"],
    surface="#1a1a1a",
    panel="#262626",
    dark=True,
)
LIGHT = Theme(
    name="schedscope-light",
    primary="#1b6ca8",
    secondary="#94447a",
    accent="#8a5a00",
    warning="#8a5a00",
    error="#b34700",
    success="#00704f",
    foreground="#1c1c1c",
    background=GROUNDS["light"],
    surface="#f6f6f6",
    panel="#e6e6e6",
    dark=False,
)


class Look:
    """The palette on the ground of the theme in use."""

    def __init__(self, ground: Ground = "dark") -> None:
        self.ground: Ground = ground

    def of(self, names: Mapping[str, Hue], name: str | None) -> str:
        """The colour of a name, for a style."""
        return colour(names, name, self.ground)

    def hue(self, hue: Hue) -> str:
        """A colour on this ground."""
        return hue.on(self.ground)


def bar(share: float, width: int) -> str:
    """A bar of at most `width` cells, to an eighth of a cell. `share` is 0..1."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0 and not eighths:
        eighths = 1
    full, part = divmod(eighths, 8)
    return ("█" * full + (PARTS[part] if part else "")).ljust(width)


def seconds(value: float | None) -> str:
    """A time for people: three digits and a unit."""
    if value is None:
        return "-"
    size = abs(value)
    if size < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if size < 1:
        return f"{value * 1e3:.3g} ms" if size < 0.1 else f"{value * 1e3:.0f} ms"
    if size < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(size), 60)
    hours, minutes = divmod(minutes, 60)
    sign = "-" if value < 0 else ""
    return f"{sign}{hours}:{minutes:02}:{rest:02}" if hours else f"{sign}{minutes}:{rest:02}"


def short(value: float | None) -> str:
    """A count in at most five cells."""
    if value is None:
        return "-"
    if abs(value) < 10_000:
        return number(round(value)) if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    if abs(value) < 1e6:
        return f"{value / 1e3:.0f}k" if abs(value) >= 1e5 else f"{value / 1e3:.1f}k"
    return f"{value / 1e6:.1f}M" if abs(value) < 1e8 else f"{value / 1e6:.0f}M"


def whose(rid: str | None, style: str = "") -> Text:
    """A request's name: never markup, never control characters."""
    return Text("-" if rid is None else printable(rid), style=style)


def plain(value: Any) -> str:
    """A value of the log in words."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value))
