"""Where a person is looking, and where they have been."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from schedscope.engine.errors import UsageError

VIEWS = ("timeline", "pass", "request", "cache", "findings", "sql", "compare")
"""In the order of their keys, 1 to 7."""


class Cursor(NamedTuple):
    """A request in a pass of a rank; or the pass alone."""

    rank: int
    number: int
    """Of the pass."""
    rid: str | None = None


class At(NamedTuple):
    """A place as a permalink names it; None: not said."""

    rank: int | None = None
    number: int | None = None
    rid: str | None = None
    view: str | None = None


def parse_at(text: str) -> At:
    """What `--at pass=4821,rank=0,view=cache,rid=abc` says. A rid takes all the rest. Raises UsageError."""
    found = At()
    rest = text
    while rest:
        name, equals, value = rest.partition("=")
        if not equals:
            raise UsageError(f"--at {text}: expected pass=N, rank=N, view=NAME or rid=ID, joined by commas")
        if name == "rid":
            return found._replace(rid=value)
        value, _, rest = value.partition(",")
        match name:
            case "pass" | "rank":
                if not (value.isascii() and value.isdigit()):
                    raise UsageError(f"--at {text}: {name}={value}: expected a number from 0")
                found = found._replace(number=int(value)) if name == "pass" else found._replace(rank=int(value))
            case "view":
                if value not in VIEWS:
                    raise UsageError(f"--at {text}: no view {value!r}; there are: {', '.join(VIEWS)}")
                found = found._replace(view=value)
            case _:
                raise UsageError(f"--at {text}: {name}: expected pass, rank, view or rid")
    return found


def permalink(run: str, cursor: Cursor, view: str) -> str:
    """The command that comes back to a place."""
    where = [f"pass={cursor.number}"]
    if cursor.rank:
        where.append(f"rank={cursor.rank}")
    if view != "pass":
        where.append(f"view={view}")
    if cursor.rid is not None:
        where.append(f"rid={cursor.rid}")
    return f"schedscope tui {shlex.quote(run)} --at {shlex.quote(','.join(where))}"


class Place(NamedTuple):
    """A cursor and the view it was looked at in."""

    cursor: Cursor
    view: str


class History:
    """Places one has been at, to go back to and forth again."""

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._back: list[Place] = []
        self._forth: list[Place] = []

    def leave(self, place: Place) -> None:
        """Remember a place that is left by a jump."""
        if not self._back or self._back[-1] != place:
            self._back = [*self._back[-self._most :], place]
        self._forth.clear()

    def back(self, now: Place) -> Place | None:
        """The place before; None: there is none."""
        return self._step(self._back, self._forth, now)

    def forth(self, now: Place) -> Place | None:
        """The place that was come back from."""
        return self._step(self._forth, self._back, now)

    @staticmethod
    def _step(source: list[Place], target: list[Place], now: Place) -> Place | None:
        while source:
            place = source.pop()
            if place != now:
                target.append(now)
                return place
        return None
