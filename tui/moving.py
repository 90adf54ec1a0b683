"""Moves: from pass to pass, through the admission loop, over the timeline, back and forth."""

from __future__ import annotations

from schedscope.replay.anomalies import Anomaly
from schedscope.replay.page import Page
from schedscope.tui.cursor import Cursor, Place
from schedscope.tui.showing import Showing


class Moving(Showing):
    """The app, as far as keys move it."""

    # ---- passes and requests ------------------------------------------------------------------------------------

    def action_view(self, name: str) -> None:
        """Another view of the same place."""
        if name != self.view:
            self.places.leave(Place(self.cursor, self.view))
            self.view = name
            self._show_view()

    def action_step(self, passes: int) -> None:
        """Another pass."""
        self._pause()
        reach = self.reach.get(self.cursor.rank)
        if reach is None or reach.first is None or reach.last is None:
            return
        number = max(reach.first, min(self.cursor.number + passes, reach.last))
        if number != self.cursor.number:
            self.go(self.cursor._replace(number=number), jump=False)

    def action_change(self, step: int) -> None:
        """The next pass in which something about this request is other than before."""
        self._pause()
        if self.life is None:
            return
        number = self.life.change(self.cursor.number, step)
        if number is None:
            self._fail(f"nothing changes for it {'after' if step > 0 else 'before'} pass {self.cursor.number}")
            return
        self.go(self.cursor._replace(number=number), jump=False)

    def action_candidate(self, step: int) -> None:
        """Another candidate of the admission loop; at its end, those of the next pass."""
        self._pause()
        page = self.page
        if page is None:
            return
        order = [verdict.rid for verdict in page.verdicts]
        here = order.index(self.cursor.rid) if self.cursor.rid in order else None
        place = (0 if step > 0 else len(order) - 1) if here is None else here + step
        if 0 <= place < len(order):
            self.go(self.cursor._replace(rid=order[place]), jump=False)
            return
        reach = self.reach.get(self.cursor.rank)
        number = self.cursor.number + step
        if (
            reach is not None
            and reach.first is not None
            and reach.last is not None
            and reach.first <= number <= reach.last
        ):
            self._ask("page", lambda: self.session.page(self.cursor.rank, number), lambda p: self._step_in(p, step))

    def _step_in(self, page: Page, step: int) -> None:
        order = [verdict.rid for verdict in page.verdicts]
        rid = (order[0] if step > 0 else order[-1]) if order else None
        self.go(Cursor(page.facts.rank, page.facts.number, rid), jump=False)

    def action_anomaly(self, step: int) -> None:
        """The next thing that stands out, from here."""
        ns = self.page.facts.begin_ns if self.page is not None else None
        if self.anomalies is None or ns is None:
            self._fail("the timeline is not there yet")
            return
        here = self.cursor
        mine = [a for a in self.anomalies if a.pass_number is not None]
        if step > 0:
            found = next((a for a in mine if a.pass_number is not None and a.pass_number > here.number), None)
        else:
            found = next((a for a in reversed(mine) if a.pass_number is not None and a.pass_number < here.number), None)
        if found is None:
            self._fail(f"nothing stands out {'after' if step > 0 else 'before'} this pass")
            return
        self._to_anomaly(found)

    def _to_anomaly(self, anomaly: Anomaly, view: str | None = None, *, jump: bool = True) -> None:
        if anomaly.pass_number is None:
            self._to_moment(anomaly.ns)
            return
        self._pause()
        self.go(Cursor(anomaly.rank, anomaly.pass_number, anomaly.rid), view, jump=jump)
        if jump:
            self.say(anomaly.words)

    def _to_moment(self, ns: int) -> None:
        timeline, rank = self.timeline, self.cursor.rank
        if timeline is None:
            return
        self._pause()

        def there(number: int | None) -> None:
            reach = self.reach.get(rank)
            number = number if number is not None else None if reach is None else reach.first
            if number is not None:
                self.go(self.cursor._replace(number=number))

        self._ask("find", lambda: timeline.pass_at(ns, rank), there)

    def action_go_back(self) -> None:
        """To where one was."""
        self._return(self.places.back(Place(self.cursor, self.view)))

    def action_go_forth(self) -> None:
        """To where one came back from."""
        self._return(self.places.forth(Place(self.cursor, self.view)))

    def _return(self, place: Place | None) -> None:
        if place is None:
            self.bell()
        else:
            self._pause()
            self.go(place.cursor, place.view, jump=False)

    def action_rank(self) -> None:
        """The next rank, at the same moment if it is known."""
        ranks = list(self.reach)
        if len(ranks) < 2:
            self._fail("this run has one rank")
            return
        rank = ranks[(ranks.index(self.cursor.rank) + 1) % len(ranks)]
        reach = self.reach[rank]
        ns = self.page.facts.begin_ns if self.page is not None else None
        timeline = self.timeline

        def there(number: int | None) -> None:
            number = number if number is not None else reach.first
            if number is None:
                self._fail(f"rank {rank} has no pass")
                return
            self.go(Cursor(rank, number, self.cursor.rid))
            self._load_lanes()

        if timeline is not None and ns is not None:
            self._ask("find", lambda: timeline.pass_at(ns, rank), there)
        else:
            there(None)

    # ---- the strip's window -------------------------------------------------------------------------------------

    def action_zoom(self, factor: float) -> None:
        """Closer (above 1), further away (below), or the whole run (0)."""
        timeline = self.timeline
        if timeline is None:
            return
        first, last = timeline.extent.first_ns, timeline.extent.last_ns + 1
        begin, end = self._span or (first, last)
        ns = self.page.facts.begin_ns if self.page is not None and self.page.facts.begin_ns is not None else None
        centre = ns if ns is not None and begin <= ns < end else (begin + end) // 2
        length = round((end - begin) / factor) if factor else last - first
        if length >= last - first:
            self._span = None
        else:
            share = (centre - begin) / (end - begin)
            begin = centre - round(share * length)
            self._span = self._clamped(begin, begin + max(length, 1_000 * self.strip.buckets))
        self._load_lanes()

    def action_pan(self, halves: int) -> None:
        """Half a window on or back."""
        timeline = self.timeline
        if timeline is None or self._span is None:
            return
        begin, end = self._span
        by = (end - begin) // 2 * halves
        self._span = self._clamped(begin + by, end + by)
        self._load_lanes()
