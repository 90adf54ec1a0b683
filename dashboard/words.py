"""Numbers and names as people read them. What a client sent is shortened and defused here, before it gets anywhere."""

from __future__ import annotations

import math

from schedscope.replay.describe import printable

NOTHING = "–"
"""Where there is no value."""

_SHOWN = 44
"""Characters of a name; longer ones lose their middle."""


def seconds(value: float | None) -> str:
    """A length of time."""
    if value is None:
        return NOTHING
    if value < 0:
        return f"−{seconds(-value)}"
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs" if value else "0 s"


def nanoseconds(value: int | float | None) -> str:
    """A length of time given in nanoseconds."""
    return seconds(None if value is None else value / 1e9)


def share(value: float | None) -> str:
    """A part of one, in percent."""
    if value is None:
        return NOTHING
    return f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """A count, exact up to a million."""
    if value is None:
        return NOTHING
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}"


def clock(value: float, step: float = 1.0) -> str:
    """A moment, in seconds from the run's begin, as precise as the step between two of them asks for."""
    # Rounded first: 59.9996 s is 1:00.
    places = 0 if step >= 1 else min(9, math.ceil(-math.log10(step) - 1e-9))
    whole = round(abs(value), places)
    sign = "−" if value < 0 and whole else ""
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(int(minutes), 60)
    width = places + 3 if places else 2
    ending = f"{rest:0{width}.{places}f}"
    return f"{sign}{hours}:{minutes:02d}:{ending}" if hours else f"{sign}{minutes}:{ending}"


def name(text: str, most: int = _SHOWN) -> str:
    """A name from outside, such as a rid: one short line without control characters."""
    if len(text) > 4 * most:
        # Escapes only lengthen, so what is far too long needs no look at its middle.
        text = text[: 2 * most] + text[-2 * most :]
    clean = printable(text)
    if len(clean) <= most:
        return clean or "(empty)"
    head = (most - 1) * 2 // 3
    return f"{clean[:head]}…{clean[-(most - 1 - head) :]}"


def sentence(said: str) -> str:
    """A text from elsewhere, with its end."""
    return f"{name(said, 300)}."


def in_chart(text: str, most: int = _SHOWN) -> str:
    """A name for a label in a chart, where a few HTML tags would count."""
    return name(text, most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
