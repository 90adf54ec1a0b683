"""What every part of the app stands on: its state, its threads, its one line of words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.text import Text
from schedscope.recorder.parts import PassRange
from schedscope.replay.anomalies import Anomaly
from schedscope.replay.describe import printable
from schedscope.replay.explanation import PassExplanation
from schedscope.replay.page import Page
from schedscope.replay.palette import SEVERITIES, VERDICTS
from schedscope.replay.series import Timeline
from schedscope.tui.cache_view import Tree
from schedscope.tui.cursor import At, Cursor, History
from schedscope.tui.latest import Latest
from schedscope.tui.linked import Linked
from schedscope.tui.look import Look
from schedscope.tui.marks import Mark
from schedscope.tui.session import Life, Scene, Session
from schedscope.tui.strip import TimelineStrip
from schedscope.tui.thrift import Sweeper
from textual import events
from textual.app import App
from textual.widgets import Static

REST_S = 0.12
"""Time without a key after which one is taken to read, not to leaf through."""
SWITCH_S = 5e-4
"""How long a thread that computes may keep the screen waiting."""
SWEEP_S = 0.3
"""Time between two looks whether one reads and garbage can be collected."""
DESKS = {
    "page": 0.0,
    "reach": 0.0,
    "lanes": 0.0,
    "gates": REST_S,
    "scene": REST_S,
    "life": REST_S,
    "explain": REST_S,
    "tree": 0.0,
    "other": 0.0,
    "timeline": 0.0,
    "anomalies": 0.0,
    "findings": 0.0,
    "ask": 0.0,
    "find": 0.0,
    "runs": 0.0,
}
"""Threads, one per kind of question, and how long a question waits for one that overtakes it."""
HINTS = (
    ("←→", "pass"),
    ("↑↓", "request"),
    ("/", "go to"),
    ("n", "next anomaly"),
    ("o", "other policy"),
    ("w", "why"),
    ("1-7", "views"),
    ("?", "all keys"),
)


class Beside(NamedTuple):
    """What the right side of a comparison shows."""

    policy: str | None = None
    session: Session | None = None


class Base(App[None]):
    """State, and how questions are asked and words said.

    Args:
        session: the run.
        at: where to begin; by default at the last pass of a run that is recorded, else where the queue was longest.
        other: another run, to compare with.
    """

    _sweeper: Sweeper
    """From `on_mount` on."""

    def __init__(self, session: Session, at: At = At(), other: Session | None = None) -> None:  # noqa: B008
        super().__init__()
        self.session = session
        self.start = at
        self.look = Look()
        self.cursor = Cursor(at.rank or 0, at.number or 0, at.rid)
        self.view = at.view or "pass"
        self.places = History()
        self.page: Page | None = None
        self.scene: Scene | None = None
        self.life: Life | None = None
        self.tree_: Tree | None = None
        self.explained: PassExplanation | None = None
        self.gates: tuple[tuple[str, int, float], ...] = ()
        self.problem: str | None = None
        """Why the pass can't be re-run."""
        self.timeline: Timeline | None = None
        self.anomalies: tuple[Anomaly, ...] | None = None
        """None: they are not found yet."""
        self._examined: Timeline | None = None
        """The one whose anomalies were asked for."""
        self.reach: dict[int, PassRange] = {}
        self.following = False
        self.live = False
        self.condition: str | None = None
        self.hits: tuple[Cursor, ...] = ()
        self.marks: tuple[Mark, ...] = ()
        self.beside = Beside(session=other)
        self._desks: dict[str, Latest] = {}
        self._span: tuple[int, int] | None = None
        """The window of the strip; None: the whole run."""
        self._timeline_took = 0.0
        self._keys_pressed = 0
        self._touched = 0.0
        """When there was a key, the mouse was moved, or another place was gone to, last."""
        self._said: int | None = None
        """Keys that were pressed when something was said that still stands."""

    @property
    def busy(self) -> bool:
        """Whether something is still being read or worked out."""
        return any(desk.busy for desk in self._desks.values())

    @property
    def strip(self) -> TimelineStrip:
        """The timeline on top."""
        return self.screen_stack[0].query_one(TimelineStrip)

    def _part(self, kind: type[Any]) -> Any:
        """The widget of a kind, also while something lies over it."""
        return self.screen_stack[0].query_one(kind)

    @property
    def _why(self) -> Linked:
        found: Linked = self.screen_stack[0].query_one("#why", Linked)
        return found

    def _ask(
        self,
        desk: str,
        question: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        self._desks[desk].ask(question, done, failed or self._fail)

    def say(self, words: str, style: str = "") -> None:
        """A line at the bottom, until the next key."""
        self._said = self._keys_pressed
        line = Text(f" {printable(words)}", style or "bold", no_wrap=True, overflow="ellipsis")
        self.screen_stack[0].query_one("#keys", Static).update(line)

    def _fail(self, words: str) -> None:
        self.say(words, f"bold {self.look.of(SEVERITIES, 'warning')}")

    def on_event(self, event: Any) -> Any:
        """Hints come back with the first key after what was said."""
        if isinstance(event, events.InputEvent):
            self._touched = time.monotonic()
        if isinstance(event, events.Key):
            self._keys_pressed += 1
            if self._said is not None and self._keys_pressed > self._said + 1:
                self._said = None
                self._hint()
        return super().on_event(event)

    def _sweep(self) -> None:
        if time.monotonic() - self._touched > SWEEP_S:
            self._sweeper.sweep(busy=self.busy)

    def _hint(self) -> None:
        words = Text(no_wrap=True, overflow="ellipsis")
        for key, what in HINTS:
            words.append(f" {key} ", f"bold {self.look.of(VERDICTS, 'chunk')}").append(f"{what} ")
        self.screen_stack[0].query_one("#keys", Static).update(words)
