"""Puts another decision beside the recorded one: of another policy, or of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedscope.engine.errors import SchedscopeError
from schedscope.engine.ordering import POLICIES
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from schedscope.replay.describe import printable
from schedscope.replay.palette import POLICIES as POLICY_HUES
from schedscope.tui.base import Beside
from schedscope.tui.cursor import At, Cursor, History
from schedscope.tui.findings_view import FindingsView
from schedscope.tui.following import Following
from schedscope.tui.marks import read_marks
from schedscope.tui.pick import Choice, Pick, fuzzy
from schedscope.tui.session import Session


class Comparing(Following):
    """The app, as far as it compares."""

    def action_policy(self) -> None:
        """Choose a policy to decide this pass under."""
        place = None if self.explained is None else self.explained.place_of(self.cursor.rid or "")
        fates = {} if place is None else {each.policy: each.fate for each in place.elsewhere}
        choices = []
        for name in POLICIES:
            facts = ["as recorded"] if self.page is not None and name == self.page.facts.active else []
            fate = fates.get(name)
            if fate is not None and fate.place is not None:
                rid = printable(self.cursor.rid or "")
                facts.append(f"{rid} at place {fate.place}{', admitted' if fate.admitted else ''}")
            choices.append(Choice(name, ", ".join(facts), name, self.look.of(POLICY_HUES, name)))
        self.push_screen(Pick("This pass under another policy", lambda typed: fuzzy(choices, typed)), self._decided)

    def _decided(self, policy: str | None) -> None:
        if policy is not None:
            self.action_other(policy)

    def action_other(self, policy: str) -> None:
        """Put the pass under a policy beside the recorded one."""
        self.beside = Beside(policy=policy)
        if self.view == "compare":
            self._load_other()
        else:
            self.action_view("compare")

    def action_beside(self) -> None:
        """Choose a run to compare with."""
        self._pick_run("Compare with another run", self._put_beside)

    def _put_beside(self, chosen: Any) -> None:
        if isinstance(chosen, Path):
            try:
                self.beside = Beside(session=Session(Run.open(chosen)))
            except SchedscopeError as error:
                self._fail(str(error))
                return
            self.view = "compare"
            self._show_view()

    def action_runs(self) -> None:
        """Choose another run."""
        self._pick_run("Open another run", self._opened)

    def _pick_run(self, title: str, then: Callable[[Any], None]) -> None:
        folder = self.session.run.path.parent

        def there(choices: list[Choice]) -> None:
            self.push_screen(Pick(title, lambda typed: fuzzy(choices, typed)), then)

        def look() -> list[Choice]:
            return [
                Choice(printable(info.path.name), f"{info.status}, {info.passes:,} passes", info.path)
                for info in find_runs(folder)
                if info.status != "unreadable"
            ]

        self._ask("runs", look, there)

    def _opened(self, chosen: Any) -> None:
        if not isinstance(chosen, Path):
            return
        try:
            session = Session(Run.open(chosen))
            marks = read_marks(chosen)
        except SchedscopeError as error:
            self._fail(str(error))
            return
        for desk in self._desks.values():
            desk.forget()
        self.session, self.start, self.marks = session, At(), marks
        self.cursor, self.page, self.scene, self.life = Cursor(0, 0), None, None, None
        self.timeline, self.anomalies, self._examined, self._span = None, None, None, None
        self.condition, self.hits, self.beside, self.places = None, (), Beside(), History()
        self._part(FindingsView).findings = None
        self.strip.lanes = None
        self.view = "pass"
        self._show_view()
        self._ask("reach", self._look_first, self._arrive)
