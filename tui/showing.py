"""Goes to a place, loads what there is to know of it, and shows it."""

from __future__ import annotations

import time

from rich.text import Text
from schedscope.replay.anomalies import Anomaly
from schedscope.replay.describe import printable
from schedscope.replay.explanation import PassExplanation
from schedscope.replay.page import Page
from schedscope.replay.palette import GREY, SEVERITIES, VERDICTS
from schedscope.replay.series import Timeline
from schedscope.tui.base import Base
from schedscope.tui.cache_view import CacheView, Tree, tree_of
from schedscope.tui.compare_view import CompareView
from schedscope.tui.counterpart import Counterpart, counterpart
from schedscope.tui.cursor import VIEWS, Cursor, Place
from schedscope.tui.findings_view import FindingsView
from schedscope.tui.pass_view import PassView
from schedscope.tui.request_view import RequestView
from schedscope.tui.session import Life, Scene
from schedscope.tui.strip import Lanes, load_lanes
from schedscope.tui.timeline_view import TimelineView
from schedscope.tui.why import Known, why_lines
from textual.widgets import ContentSwitcher, Static

_THEN = " \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "
"""Between crumbs."""


class Showing(Base):
    """The app, as far as it shows where one is."""

    # ---- going --------------------------------------------------------------------------------------------------

    def go(self, cursor: Cursor, view: str | None = None, *, jump: bool = True) -> None:
        """Look somewhere else.

        Args:
            jump: remember the place that is left, to come back to.
        """
        if jump and (cursor != self.cursor or (view or self.view) != self.view):
            self.places.leave(Place(self.cursor, self.view))
        before, self.cursor = self.cursor, cursor
        if not self.following:
            self._touched = time.monotonic()
        if view is not None and view != self.view:
            self.view = view
            self._show_view()
        if self.page is None or before[:2] != cursor[:2] or self.page.facts[:2] != cursor[:2]:
            self._load_page()
        else:
            self._show_selected()
        if cursor.rid != before.rid or cursor.rank != before.rank or self.life is None:
            self._load_life()
        elif self.view == "request":
            self._show_life()
        self._crumbs()

    def _load_page(self) -> None:
        cursor, session = self.cursor, self.session
        if cursor.number < 0:
            return
        self._ask("page", lambda: session.page(cursor.rank, cursor.number), self._page_there, self._no_page)

    def _no_page(self, words: str) -> None:
        self._fail(words)
        if self.page is not None:
            self.cursor = self.cursor._replace(rank=self.page.facts.rank, number=self.page.facts.number)
        self._crumbs()

    def _page_there(self, page: Page) -> None:
        self.page = page
        self.scene = self.tree_ = self.explained = self.problem = None
        self.gates = ()
        self._load_gates()
        if self.cursor.rid is None:
            self.cursor = self.cursor._replace(rid=most_telling(page))
            self._load_life()
        self._load_scene(page)
        self._point()
        self._show_selected()
        if self.view == "request" and self.life is not None:
            self._show_life()
        self._crumbs()

    def _load_scene(self, page: Page) -> None:
        session, rank, number = self.session, page.facts.rank, page.facts.number

        def wanted() -> bool:
            return self.session is session and self.cursor[:2] == (rank, number)

        def failed(words: str) -> None:
            if wanted():
                self._no_scene(words)

        self._ask("scene", lambda: session.scene(rank, number, page, wanted), self._scene_there, failed)

    def _scene_there(self, scene: Scene) -> None:
        self.scene = scene
        self._load_explanation()
        if self.view == "cache":
            self._load_tree()
        elif self.view == "compare":
            self._load_other()
        self._show_why()

    def _no_scene(self, words: str) -> None:
        self.problem = words
        if self.view == "cache":
            self._part(CacheView).say(f"no cache to show: {words}")
        elif self.view == "compare" and self.beside.policy is not None:
            self._part(CompareView).say(f"nothing to compare with: {words}")
        self._show_why()

    def _load_explanation(self) -> None:
        scene, rid, session = self.scene, self.cursor.rid, self.session
        self.explained = None
        if scene is None or rid is None or rid not in scene.page.places:
            return

        def there(found: PassExplanation) -> None:
            self.explained = found
            self._show_why()

        self._ask("explain", lambda: session.explain(scene, rid), there)

    def _load_gates(self) -> None:
        timeline, cursor = self.timeline, self.cursor
        if timeline is None:
            return

        def there(found: tuple[tuple[str, int, float], ...]) -> None:
            self.gates = found
            self._show_why()

        self._ask("gates", lambda: timeline.gates_before(cursor.rank, cursor.number), there)

    def _load_life(self) -> None:
        cursor, session = self.cursor, self.session
        self.life = None
        if cursor.rid is None:
            return
        rid = cursor.rid

        def there(life: Life) -> None:
            self.life = life
            self._show_life()
            self._show_why()

        def failed(words: str) -> None:
            self._fail(words)

        self._ask("life", lambda: session.life(cursor.rank, rid), there, failed)

    def _load_tree(self) -> None:
        scene = self.scene
        if scene is None:
            words = "re-running up to this pass …" if self.problem is None else f"no cache to show: {self.problem}"
            self._part(CacheView).say(words)
            return
        if self.tree_ is not None:
            self._part(CacheView).show(self.tree_, self.cursor.rid)
            return

        def there(tree: Tree) -> None:
            self.tree_ = tree
            self._part(CacheView).show(tree, self.cursor.rid)

        self._ask("tree", lambda: tree_of(scene.visited.moment.view), there)

    def _load_other(self) -> None:
        """What the comparison's right side shows."""
        page, scene, session, cursor = self.page, self.scene, self.session, self.cursor
        view = self._part(CompareView)
        beside = self.beside
        if page is None:
            return
        if beside.session is not None:
            other_session = beside.session

            def find() -> tuple[Counterpart, Page]:
                found = counterpart(session, page.facts, cursor.rid, other_session)
                return found, other_session.page(found.rank, found.number)

            def there(answer: tuple[Counterpart, Page]) -> None:
                found, other = answer
                title = f"{other_session.name}, pass {found.number}, {found.words}"
                view.show(f"{session.name}, pass {page.facts.number}", page, title, other, self.cursor.rid)

            self._ask("ask", find, there, view.say)
        elif beside.policy is not None:
            if scene is None:
                view.say("re-running up to this pass …" if self.problem is None else self.problem)
                return
            policy = beside.policy

            def decided(other: Page) -> None:
                view.show("as recorded", page, f"under {policy}", other, self.cursor.rid)

            self._ask("ask", lambda: session.other(scene, policy), decided, view.say)

    def _pause(self) -> None:
        if self.following:
            self.following = False
            self._crumbs()

    # ---- showing ------------------------------------------------------------------------------------------------

    def _show_view(self) -> None:
        screen = self.screen_stack[0]
        for name in VIEWS:
            screen.set_class(name == self.view, f"view-{name}")
        screen.query_one("#views", ContentSwitcher).current = f"view-{self.view}"
        focus = {"sql": "#sql", "findings": "#findings", "timeline": "#anomalies", "request": "#decisions"}
        focus |= {"cache": "#tree", "compare": "#left-queue", "pass": "#queue"}
        screen.query_one(focus[self.view]).focus()
        if self.view == "cache":
            self._load_tree()
        elif self.view == "compare":
            self._load_other()
        elif self.view == "findings":
            self._load_findings()
        elif self.view == "request" and self.life is not None:
            self._show_life()
        self._crumbs()

    def _show_selected(self) -> None:
        """The page, or another request of it."""
        page = self.page
        if page is None:
            return
        hits = frozenset(hit.rid for hit in self.hits if hit[:2] == self.cursor[:2] and hit.rid is not None)
        self._part(PassView).show(page, self.cursor.rid, hits)
        if self.view == "compare":
            self._load_other()
        elif self.view == "cache":
            self._load_tree()
        if self.scene is not None and (
            self.explained is None or self.explained.place_of(self.cursor.rid or "") is None
        ):
            self._load_explanation()
        self._show_why()

    def _show_why(self) -> None:
        page = self.page
        if page is None:
            return
        rid = self.cursor.rid
        explained = self.explained
        if explained is not None and (explained.number != page.facts.number or explained.place_of(rid or "") is None):
            explained = None
        ledger = self.life.ledger if self.life is not None and self.life.rid == rid else None
        known = Known(
            page=page,
            rid=rid,
            identical=None if self.scene is None else self.scene.identical,
            replaying=self.scene is None and self.problem is None,
            problem=self.problem,
            explained=explained,
            ledger=ledger,
            gates=self.gates,
        )
        self._why.show(why_lines(known, self.look))

    def _show_life(self) -> None:
        if self.life is not None:
            first_ns = 0 if self.timeline is None else self.timeline.extent.first_ns
            self._part(RequestView).show(self.life, first_ns, self.cursor.number)

    def _load_findings(self) -> None:
        view = self._part(FindingsView)
        if view.findings is not None:
            return
        view.say("examining the run …")
        self._ask("findings", self.session.findings, view.show, view.say)

    def _point(self) -> None:
        """Show on the strip where the cursor is, and take the window along."""
        ns = None if self.page is None else self.page.facts.begin_ns
        self.strip.point_at(ns)
        if ns is not None and self._span is not None:
            begin, end = self._span
            if not begin <= ns < end:
                half = (end - begin) // 2
                self._span = self._clamped(ns - half, ns + half)
                self._load_lanes()

    def _clamped(self, begin: int, end: int) -> tuple[int, int]:
        assert self.timeline is not None
        first, last = self.timeline.extent.first_ns, self.timeline.extent.last_ns + 1
        length = min(end - begin, last - first)
        begin = max(first, min(begin, last - length))
        return begin, begin + length

    def _load_lanes(self) -> None:
        timeline = self.timeline
        if timeline is None:
            return
        rank, buckets, span = self.cursor.rank, self.strip.buckets, self._span

        def load() -> Lanes:
            extent = timeline.extent
            begin, end = span or (extent.first_ns, extent.last_ns + 1)
            return load_lanes(timeline, timeline.window(begin, end, buckets=buckets, rank=rank))

        def there(lanes: Lanes) -> None:
            self.strip.show(lanes, timeline.extent.first_ns)
            self._load_anomalies(timeline)

        def failed(words: str) -> None:
            self._fail(words)
            self._load_anomalies(timeline)

        self._ask("lanes", load, there, failed)

    def _load_anomalies(self, timeline: Timeline) -> None:
        """What stands out takes a while; it is looked for when the strip is painted."""
        if self._examined is timeline:
            return
        self._examined = timeline

        def there(anomalies: tuple[Anomaly, ...]) -> None:
            self.anomalies = anomalies
            self._part(TimelineView).show(anomalies, timeline.extent.first_ns)

        self._ask("anomalies", timeline.anomalies, there)

    def _crumbs(self) -> None:
        cursor, look = self.cursor, self.look
        passes = self.reach.get(cursor.rank)
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append("schedscope ", f"bold {look.of(VERDICTS, 'chunk')}")
        words.append(printable(self.session.name))
        if len(self.reach) > 1:
            words.append(_THEN, look.hue(GREY)).append(f"rank {cursor.rank}")
        words.append(_THEN, look.hue(GREY)).append(f"pass {cursor.number}", "bold")
        if passes is not None and passes.last is not None:
            words.append(f" of {passes.last}", look.hue(GREY))
        if cursor.rid is not None:
            words.append(_THEN, look.hue(GREY)).append(printable(cursor.rid), "bold")
        if self.view != "pass":
            words.append(f"{_THEN}{self.view}", look.hue(GREY))
        if self.live:
            following = self.following
            words.append("  ● live" if following else "  ❚❚ paused, f follows", look.of(SEVERITIES, "critical"))
        if self.condition is not None:
            words.append(f"  ▶ {len(self.hits):,} hits: {printable(self.condition)}", look.of(VERDICTS, "refused"))
        self.screen_stack[0].query_one("#crumbs", Static).update(words)


def most_telling(page: Page) -> str | None:
    """The request to look at first: who ended the pass, else who was held back, else the first."""
    refused = next((v.rid for v in page.verdicts if not v.admitted), None)
    if refused is not None:
        return refused
    waiting = next((c.rid for c in page.candidates if c.verdict is None), None)
    if waiting is not None:
        return waiting
    return page.verdicts[0].rid if page.verdicts else None
