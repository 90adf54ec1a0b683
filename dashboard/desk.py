"""What a panel draws from: a run, and where in it one looks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from dash.development.base_component import Component
from schedscope.dashboard.cursor import Cursor, Theme
from schedscope.dashboard.figures import Span
from schedscope.dashboard.library import Book, Library, Pending
from schedscope.replay.series import Timeline, total
from schedscope.replay.window import Window

BUCKETS = 160
"""Points of a chart over time."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Desk:
    """A reader's place: everything a panel may use."""

    library: Library
    book: Book
    cursor: Cursor
    patient: bool = False
    """Wait for what takes long."""

    @property
    def timeline(self) -> Timeline:
        """Of the run."""
        return self.book.timeline

    @property
    def theme(self) -> Theme:
        """What it is drawn on."""
        return self.cursor.theme

    def window(self, buckets: int = BUCKETS) -> Window:
        """The time that is looked at. Raises UsageError, RunNotFoundError."""
        cursor, extent = self.cursor, self.timeline.extent
        begin, end = cursor.begin_ns, cursor.end_ns
        if begin is None and end is None and cursor.last_s is not None:
            begin = max(extent.last_ns + 1 - int(cursor.last_s * 1e9), extent.first_ns)
        return self.timeline.window(begin, end, buckets=buckets, rank=cursor.rank)

    def whole(self) -> Window:
        """The same time as one bucket."""
        return replace(self.window(), buckets=1)

    def span(self, buckets: int = BUCKETS) -> Span:
        """The axis of charts over time."""
        return Span(self.window(buckets), self.timeline.extent.first_ns, self.cursor.at_ns)

    def once(self, question: Hashable, find: Callable[[], _Answer]) -> _Answer:
        """An answer about the run as it is, shared with all who ask the same."""
        return self.book.answers.get(question, find)

    def later(self, question: Hashable, find: Callable[[], _Answer]) -> _Answer | Pending:
        """The same for what takes long: it is worked out behind the scenes."""
        if self.patient:
            return self.once(question, find)
        return self.book.answers.later(question, find)

    def standing(self, question: Hashable, find: Callable[[], _Answer]) -> _Answer | Pending:
        """The same for what may be a little behind a run that is being recorded."""
        if self.patient:
            return self.once(question, find)
        key = (self.book.name, self.book.run.manifest.created, question)
        return self.library.standing.get(key, self.book.generation, find)

    def load(self) -> dict[str, Any]:
        """`Timeline.load` of all that is looked at."""
        window = self.window()
        return self.once(("total", window), lambda: total(self.table("load", window)))

    def latency(self) -> dict[str, Any]:
        """`Timeline.latency` of all that is looked at."""
        row: dict[str, Any] = self.table("latency", self.whole()).to_pylist()[0]
        return row

    def table(self, what: str, window: Window, *arguments: Any, **options: Any) -> Any:
        """A question to the timeline, asked once."""
        key = (what, window, arguments, tuple(sorted(options.items())))
        return self.once(key, lambda: getattr(self.timeline, what)(*arguments, window, **options))


Draw = Callable[[Desk], Any]


class Page(NamedTuple):
    """A view with a URL of its own.

    Its layout asks for panels by name; each can be drawn again on its own when the cursor moves.
    """

    path: str
    title: str
    """Of the window, and in the navigation."""
    layout: Callable[[Desk, Callable[[str], Any]], list[Component]]
    charts: Mapping[str, Draw]
    """Figures, by name."""
    parts: Mapping[str, Draw]
    """Everything else, by name."""
    first: frozenset[str] = frozenset()
    """Panels that are drawn before the others; empty: all at once."""
