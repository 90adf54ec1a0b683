"""What somebody types to go somewhere."""

from __future__ import annotations

import re
from typing import NamedTuple

_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d(?:\.\d+)?)")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|min|h)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Target(NamedTuple):
    """A place as typed."""

    number: int | None = None
    """Of a pass."""
    rid: str | None = None
    seconds: float | None = None
    """Since the run's begin."""


def parse_target(text: str) -> Target:
    """A pass `4821`, a time `12.5s` or `1:02`, `request@pass`, else a request."""
    if text.isascii() and text.isdigit():
        return Target(number=int(text))
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = clock.groups()
        return Target(seconds=int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds))
    if amount := _SECONDS.fullmatch(text):
        return Target(seconds=float(amount[1]) * _UNITS[amount[2]])
    rid, at, number = text.rpartition("@")
    if at and rid and number.isascii() and number.isdigit():
        return Target(number=int(number), rid=rid)
    return Target(rid=text)
