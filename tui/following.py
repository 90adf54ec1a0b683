"""Arrives at a run, and goes along with one that is being recorded."""

from __future__ import annotations

import time

from schedscope.recorder.parts import PassRange
from schedscope.replay.anomalies import Anomaly
from schedscope.replay.series import Timeline
from schedscope.tui.cursor import At, Cursor
from schedscope.tui.finding import Finding
from schedscope.tui.pass_view import PassView
from schedscope.tui.timeline_view import TimelineView
from textual.widgets import Static

POLL_S = 1.0
_REFRESH_SHARE = 5
"""A live run's timeline is read anew after so many times what reading it took."""


class Following(Finding):
    """The app, as far as it reads what a run has, again and again."""

    # ---- arriving -----------------------------------------------------------------------------------------------

    def _look_around(self) -> tuple[dict[int, PassRange], bool]:
        return self.session.reach(), self.session.is_recorded()

    def _look_first(self) -> tuple[dict[int, PassRange], bool, Cursor | None]:
        reach, live = self._look_around()
        start = None
        if self.start.number is None and not (live and self.start == At()):
            start = self.session.longest_queue(self.start.rank)
        return reach, live, start

    def _arrive(self, found: tuple[dict[int, PassRange], bool, Cursor | None]) -> None:
        """The first look at the run."""
        self.reach, self.live, busiest = found
        rank = self.start.rank
        if rank is None:
            rank = busiest.rank if busiest is not None else next(iter(self.reach), 0)
        passes = self.reach.get(rank)
        if passes is None or not passes.count or passes.first is None or passes.last is None:
            self._nothing_yet()
        else:
            at_end = self.live and self.start == At()
            number = self.start.number
            if number is None:
                number = busiest.number if busiest is not None and busiest.rank == rank else passes.last
            self.following = at_end
            self.go(Cursor(rank, number, self.start.rid), jump=False)
            if self.start.number is None and self.start.rid is not None:
                self._find_request(self.start.rid)
        self._read_timeline()

    def _nothing_yet(self) -> None:
        words = "no pass yet; this view follows the run" if self.live else "this run has no pass"
        self._part(PassView).query_one("#headline", Static).update(words)
        self._crumbs()

    def _read_timeline(self, *, again: bool = False) -> None:
        def read() -> tuple[Timeline, tuple[Anomaly, ...], float]:

            begin = time.perf_counter()
            timeline = self.session.timeline(again=again)
            return timeline, timeline.anomalies(), time.perf_counter() - begin

        def failed(words: str) -> None:
            self.strip.note = words
            self.strip.refresh()

        self._ask("timeline", read, self._timeline_there, failed)

    def _timeline_there(self, found: tuple[Timeline, tuple[Anomaly, ...], float]) -> None:
        self.timeline, self.anomalies, self._timeline_took = found
        self._part(TimelineView).show(self.anomalies, self.timeline.extent.first_ns)
        self._load_lanes()
        self._load_gates()
        self._point()
        if self.life is not None:
            self._show_life()

    # ---- live ---------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self.live and not self._desks["reach"].busy:
            self._ask("reach", self._look_around, self._grown, self._vanished)

    def _vanished(self, words: str) -> None:
        if self.live:
            self.live = self.following = False
            self._fail(words)
            self._crumbs()

    def _grown(self, found: tuple[dict[int, PassRange], bool]) -> None:
        before = self.reach.get(self.cursor.rank)
        self.reach, self.live = found
        now = self.reach.get(self.cursor.rank)
        if self.page is None and now is not None and now.count:
            self._arrive((*found, None))
            return
        if now is not None and now != before:
            if self.following and now.last is not None:
                self.go(self.cursor._replace(number=now.last, rid=None), jump=False)
            if not self._desks["timeline"].busy:
                self.set_timer(max(POLL_S, self._timeline_took * _REFRESH_SHARE), self._refresh_timeline)
        self._crumbs()

    def _refresh_timeline(self) -> None:
        if not self._desks["timeline"].busy:
            self._read_timeline(again=True)

    def action_follow(self) -> None:
        """Go along with the run's end."""
        reach = self.reach.get(self.cursor.rank)
        if reach is not None and reach.last is not None:
            self.following = self.live
            self.go(self.cursor._replace(number=reach.last, rid=None))

    def action_pause(self) -> None:
        """Stay here, or follow again."""
        if self.following:
            self._pause()
        elif self.live:
            self.action_follow()
