"""Finds: places by name, and decisions by condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from schedscope.replay.describe import printable
from schedscope.tui.cursor import Cursor
from schedscope.tui.look import seconds
from schedscope.tui.marks import Mark
from schedscope.tui.moving import Moving
from schedscope.tui.pick import Choice, Pick, Typed, fuzzy
from schedscope.tui.session import Life
from schedscope.tui.target import parse_target

EXAMPLES = (
    ("deprioritized and matched > 1000", "held back although much of it is cached"),
    ("reason = 'memory'", "refused: it doesn't fit into memory (rem_total)"),
    ("refused and place_after = 0", "the head of the queue was refused"),
    ("moved > 20", "fell back more than 20 places"),
    ("reason = 'delayed'", "the prefill delayer said wait"),
    ("len(preempted) > 0", "somebody was preempted for it"),
    ("fallback is not null", "the policy fell back"),
)


class Finding(Moving):
    """The app, as far as it looks for things."""

    # ---- by name ------------------------------------------------------------------------------------------------

    def action_find(self) -> None:
        """Go somewhere by name."""
        title = "Go to: a pass (4821), a request, request@pass, a time (12.5s, 1:02), a mark"
        self.push_screen(Pick(title, self._near, free=True, later=self._afar), self._went)

    def _near(self, typed: str) -> list[Choice]:
        """What is at hand: this pass's requests, marks."""
        choices = [
            Choice(f"{mark.note or 'mark'}", f"pass {mark.cursor.number} {printable(mark.cursor.rid or '')}", mark)
            for mark in self.marks
        ]
        if self.page is not None:
            glyphs = {"admitted": "admitted", "refused": "refused", "held_back": "held back", "waiting": "waits"}
            choices += [
                Choice(printable(c.rid), f"place {c.after}, {glyphs[c.fate]}", self.cursor._replace(rid=c.rid))
                for c in self.page.candidates
            ]
        return fuzzy(choices, typed, 40) if typed else choices[:40]

    def _afar(self, typed: str, more: Callable[[Sequence[Choice]], None]) -> None:
        """Requests of the whole run that begin so."""
        timeline = self.timeline
        if timeline is None or not typed:
            return

        def there(found: Iterable[Any]) -> None:
            more(
                [
                    Choice(printable(each.rid), f"first token after {seconds(each.ttft_s)}", Typed(each.rid))
                    for each in found
                ]
            )

        self._ask("find", lambda: timeline.find(typed), there)

    def _went(self, chosen: Any) -> None:
        match chosen:
            case Cursor():
                self._pause()
                self.go(chosen)
            case Mark():
                self._pause()
                self.go(chosen.cursor, chosen.view)
            case Typed():
                self._to_target(chosen.text.strip())

    def _to_target(self, text: str) -> None:
        if not text:
            return
        target = parse_target(text)
        self._pause()
        if target.seconds is not None and self.timeline is not None:
            self._to_moment(self.timeline.extent.first_ns + round(target.seconds * 1e9))
        elif target.number is not None:
            self.go(self.cursor._replace(number=target.number, rid=target.rid or self.cursor.rid))
        elif target.rid is not None:
            self._find_request(target.rid)

    def _find_request(self, rid: str, rank: int | None = None) -> None:
        """Go to a request, in this pass if it is in it, else in its nearest one."""
        rank = self.cursor.rank if rank is None else rank
        if self.page is not None and self.page.facts.rank == rank and rid in self.page.places:
            self.go(self.cursor._replace(rid=rid))
            return
        session, number = self.session, self.cursor.number

        def there(life: Life) -> None:
            nearest = life.nearest(number)
            if nearest is None:
                self.go(Cursor(rank, number, rid), "request")
            else:
                self.go(Cursor(rank, nearest, rid))

        self._ask("find", lambda: session.life(rank, rid), there)

    # ---- by condition -------------------------------------------------------------------------------------------

    def action_breakpoint(self) -> None:
        """Type a condition to stop at."""
        choices = [Choice(sql, words, Typed(sql)) for sql, words in EXAMPLES]
        title = "Stop where this holds: SQL over the columns of decisions and passes; empty: nowhere"
        picked = Pick(title, lambda typed: fuzzy(choices, typed), free=True, text=self.condition or "")
        self.push_screen(picked, self._broken)

    def _broken(self, chosen: Any) -> None:
        if not isinstance(chosen, Typed):
            return
        condition = chosen.text.strip()
        if not condition:
            self.condition, self.hits = None, ()
            self._show_selected()
            self._crumbs()
            return
        session, rank = self.session, self.cursor.rank

        def there(hits: tuple[Cursor, ...]) -> None:
            self.condition, self.hits = condition, hits
            self._crumbs()
            self.say(f"{len(hits):,} decisions; c goes to the next one")
            self._show_selected()

        self._ask("ask", lambda: session.hits(condition, rank), there)

    def action_hit(self, step: int) -> None:
        """The next decision on which the condition holds."""
        if self.condition is None:
            self.action_breakpoint()
            return
        here = self._order(self.cursor)
        ahead = [hit for hit in self.hits if (self._order(hit) > here if step > 0 else self._order(hit) < here)]
        if not ahead:
            self._fail(f"no hit {'after' if step > 0 else 'before'} this one")
            return
        self._pause()
        self.go(ahead[0] if step > 0 else ahead[-1])

    def _order(self, cursor: Cursor) -> tuple[int, int]:
        """Where a decision stands, for continuing: by pass, within the shown one by place."""
        place = -1
        if self.page is not None and self.page.facts[:2] == cursor[:2] and cursor.rid is not None:
            place = self.page.places.get(cursor.rid, -1)
        return cursor.number, place
