"""What a view shows, as one value: parsed from a URL's query, and written back to one.

Whoever opens the same URL sees the same thing, so there is no other state: a selection, a point, a page of a table are
all in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

from schedscope.engine.errors import UsageError

Theme = Literal["dark", "light"]

_LARGEST = 2**63 - 1
_LONGEST_RID = 100_000
"""Characters; a server takes none that is longer."""


class Box(NamedTuple):
    """A region of the heat map of times to first token."""

    begin_ns: int
    end_ns: int
    low_s: float
    high_s: float

    def __str__(self) -> str:
        return f"{self.begin_ns},{self.end_ns},{self.low_s:.6g},{self.high_s:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where one looks. None: not chosen."""

    run: str | None = None
    """Name of a run's directory."""
    rank: int | None = None
    """Only this scheduler; None: all of them."""
    begin_ns: int | None = None
    end_ns: int | None = None
    """A piece of time, nanoseconds of the run's monotonic clock, the end exclusive."""
    last_s: float | None = None
    """Only the last so many seconds: it moves on with a run that is being recorded."""
    at_ns: int | None = None
    """A moment that was pointed at."""
    pass_number: int | None = None
    rid: str | None = None
    box: Box | None = None
    policy: str | None = None
    """To decide again with."""
    other: str | None = None
    """Name of a run to compare with."""
    theme: Theme = "light"

    @classmethod
    def parse(cls, query: str) -> Cursor:
        """Read a URL's query, with or without `?`. Unknown names are left alone. Raises UsageError."""
        given = dict(parse_qsl(query.removeprefix("?"), keep_blank_values=False, max_num_fields=100))
        return cls(**{name: read(given[key], key) for key, (name, read) in _FIELDS.items() if key in given})

    def query(self, **changes: Any) -> str:
        """As a URL's query, with some fields changed. The theme is the reader's own and left out."""
        other = replace(self, **changes)
        words = {key: _written(getattr(other, name)) for key, (name, _) in _FIELDS.items() if name != "theme"}
        return "?" + urlencode({key: word for key, word in words.items() if word is not None})

    def href(self, path: str, **changes: Any) -> str:
        """The URL of a page, with some fields changed."""
        return path + self.query(**changes)


def _whole(text: str, key: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{key}={text[:40]}: expected a whole number") from None
    if not 0 <= number <= _LARGEST:
        raise UsageError(f"{key}={text[:40]}: expected a number from 0 to {_LARGEST}")
    return number


def _seconds(text: str, key: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise UsageError(f"{key}={text[:40]}: expected a number of seconds")
    return number


def _text(text: str, key: str) -> str:
    if len(text) > _LONGEST_RID:
        raise UsageError(f"{key}: longer than {_LONGEST_RID:,} characters")
    return text


def _theme(text: str, key: str) -> Theme:
    if text == "dark":
        return "dark"
    if text == "light":
        return "light"
    raise UsageError(f"{key}={text[:40]}: expected dark or light")


def _box(text: str, key: str) -> Box:
    words = text.split(",")
    if len(words) != 4:
        raise UsageError(f"{key}={text[:40]}: expected begin,end,low,high")
    box = Box(_whole(words[0], key), _whole(words[1], key), _seconds(words[2], key), _seconds(words[3], key))
    if box.begin_ns >= box.end_ns or box.low_s >= box.high_s:
        raise UsageError(f"{key}={text[:40]}: the box is empty")
    return box


def _written(value: object) -> str | None:
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


_FIELDS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "run": ("run", _text),
    "rank": ("rank", _whole),
    "from": ("begin_ns", _whole),
    "to": ("end_ns", _whole),
    "last": ("last_s", _seconds),
    "at": ("at_ns", _whole),
    "pass": ("pass_number", _whole),
    "rid": ("rid", _text),
    "box": ("box", _box),
    "policy": ("policy", _text),
    "with": ("other", _text),
    "theme": ("theme", _theme),
}
"""Name in a URL: field, reader."""
assert {name for name, _ in _FIELDS.values()} == {field.name for field in fields(Cursor)}
