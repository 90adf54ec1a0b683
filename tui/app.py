"""`schedscope tui`: the parts of the app put together, and what its widgets say to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pyarrow as pa
from schedscope.engine.errors import SchedscopeError
from schedscope.replay.palette import VERDICTS
from schedscope.tui.base import DESKS, SWEEP_S, SWITCH_S
from schedscope.tui.cache_view import CacheView
from schedscope.tui.compare_view import CompareView
from schedscope.tui.findings_view import FindingsView
from schedscope.tui.following import POLL_S
from schedscope.tui.grid import Grid
from schedscope.tui.help import Help
from schedscope.tui.keeping import Keeping
from schedscope.tui.keys import GROUPS
from schedscope.tui.latest import Latest
from schedscope.tui.linked import Linked
from schedscope.tui.look import DARK, LIGHT
from schedscope.tui.marks import read_marks
from schedscope.tui.pass_view import PassView, QueueGrid
from schedscope.tui.request_view import RequestView
from schedscope.tui.sql_view import SqlInput, SqlView
from schedscope.tui.strip import TimelineStrip
from schedscope.tui.thrift import Sweeper
from schedscope.tui.timeline_view import TimelineView
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Static


class ScopeApp(Keeping):
    """`schedscope tui`."""

    TITLE = "schedscope"
    CSS_PATH = "scope.tcss"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012 - as Textual declares it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, key.words, show=False) for keys in GROUPS.values() for key in keys),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def compose(self) -> ComposeResult:
        """Crumbs, strip, views and the reasons, keys."""
        look = self.look
        yield Static(id="crumbs")
        yield TimelineStrip(id="strip")
        with Container(id="work"):
            with ContentSwitcher(initial=f"view-{self.view}", id="views"):
                yield TimelineView(look, id="view-timeline")
                yield PassView(look, id="view-pass")
                yield RequestView(look, id="view-request")
                yield CacheView(look, id="view-cache")
                yield FindingsView(look, id="view-findings")
                yield SqlView(look, id="view-sql")
                yield CompareView(look, id="view-compare")
            yield Linked(id="why")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Start to read."""
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name
        sys.setswitchinterval(SWITCH_S)
        # Arrow's own pools keep what was freed, one per thread; there are many threads here.
        pa.set_memory_pool(pa.system_memory_pool())
        self._desks = {name: Latest(f"schedscope {name}", self.call_later, rest) for name, rest in DESKS.items()}
        self.strip.look = self.look
        self._show_view()
        self._hint()
        self._ask("reach", self._look_first, self._arrive)
        self.set_interval(POLL_S, self._poll)
        self._sweeper = Sweeper()
        self.set_interval(SWEEP_S, self._sweep)
        try:
            self.marks = read_marks(self.session.run.path)
        except SchedscopeError as error:
            self._fail(str(error))

    def on_unmount(self) -> None:
        """Let the threads end."""
        for desk in self._desks.values():
            desk.close()
        self._sweeper.close()

    # ---- what widgets say ---------------------------------------------------------------------------------------

    def on_grid_moved(self, message: Grid.Moved) -> None:
        """Another request of the pass."""
        grid = message.grid
        if isinstance(grid, QueueGrid):
            rid = grid.rid_at(message.row)
            self._pause()
            if rid is not None and rid != self.cursor.rid:
                self.go(self.cursor._replace(rid=rid), jump=False)
            self._part(PassView).show_budgets()

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        """A row was followed."""
        grid, row = message.grid, message.row
        if isinstance(grid, QueueGrid):
            rid = grid.rid_at(row)
            if rid is not None:
                self.go(self.cursor._replace(rid=rid), "request")
        elif grid.id == "decisions":
            number = self._part(RequestView).pass_at(row)
            if number is not None:
                self.go(self.cursor._replace(number=number), "pass")
        elif grid.id == "anomalies" and self.anomalies is not None:
            self._to_anomaly(self.anomalies[row], view="pass")
        elif grid.id == "findings":
            place = self._part(FindingsView).place_of(row)
            if place is not None:
                self.go(place.cursor, place.view)
        elif grid.id == "answer":
            self._follow_row(self._part(SqlView).row(row))
        elif grid.id == "tree" and self.tree_ is not None:
            waiters = self.tree_.branches[row].waiters
            if waiters:
                self.go(self.cursor._replace(rid=waiters[0]))

    def _follow_row(self, row: dict[str, Any]) -> None:
        rank = row.get("rank")
        number, rid = row.get("pass"), row.get("rid")
        cursor = self.cursor._replace(rank=rank if isinstance(rank, int) else self.cursor.rank)
        if isinstance(number, int):
            self.go(cursor._replace(number=number, rid=rid if isinstance(rid, str) else None), "pass")
        elif isinstance(rid, str):
            self._find_request(rid, cursor.rank)
        else:
            self._fail("this row names no pass and no request: select pass or rid")

    def on_linked_followed(self, message: Linked.Followed) -> None:
        """A link was followed."""
        link = message.link
        if link.place is not None:
            self.go(link.place.cursor, link.place.view)
        elif link.command is not None:
            self.call_later(self.run_action, link.command)

    def on_timeline_strip_picked(self, message: TimelineStrip.Picked) -> None:
        """A moment was clicked."""
        self._to_moment(message.ns)

    def on_timeline_strip_resized(self) -> None:
        """It wants another number of buckets."""
        self._load_lanes()

    def on_timeline_strip_scrolled(self, message: TimelineStrip.Scrolled) -> None:
        """The wheel."""
        self.action_zoom(2.0 if message.closer else 0.5)

    def on_sql_input_asked(self, message: SqlInput.Asked) -> None:
        """Run a query."""
        view, sql, session = self._part(SqlView), message.sql, self.session
        view.hint("asking …")
        error = self.look.of(VERDICTS, "refused")
        self._ask("ask", lambda: session.sql(sql), view.show, lambda words: view.refuse(words, error))

    # ---- else ---------------------------------------------------------------------------------------------------

    def action_why(self) -> None:
        """Into the reasons."""
        if self._why.display:
            self._why.focus()

    def action_leave(self) -> None:
        """Out of a pane; from another view back to the pass."""
        screen = self.screen_stack[0]
        if self.view != "pass":
            self.action_view("pass")
        else:
            screen.query_one("#queue").focus()

    def action_theme(self) -> None:
        """Dark or light."""
        light = self.theme == DARK.name
        self.theme = LIGHT.name if light else DARK.name
        self.look.ground = "light" if light else "dark"
        for grid in self.screen_stack[0].query(Grid):
            grid.repaint()
        self._repaint()

    def _repaint(self) -> None:
        self._hint()
        self._crumbs()
        self._show_selected()
        if self.life is not None:
            self._show_life()

    def action_help(self) -> None:
        """Every key."""
        self.push_screen(Help(self.look))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the palette offers: every key's action, by its words."""
        del screen
        for name, keys in GROUPS.items():
            for key in keys:
                yield SystemCommand(f"{key.words} ({key.shown})", name, self._runner(key.action))

    def _runner(self, action: str) -> Callable[[], Any]:
        async def run() -> None:
            await self.run_action(action)

        return run
