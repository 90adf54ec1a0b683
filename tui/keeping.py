"""Keeps what was found: marks, copies, files."""

from __future__ import annotations

from typing import Any

from schedscope.engine.errors import SchedscopeError
from schedscope.replay.describe import printable
from schedscope.tui.comparing import Comparing
from schedscope.tui.cursor import permalink
from schedscope.tui.export import export_choices
from schedscope.tui.grid import Grid
from schedscope.tui.marks import Mark, with_mark, write_marks
from schedscope.tui.pick import Choice, Pick, Typed, fuzzy


class Keeping(Comparing):
    """The app, as far as it keeps things."""

    def action_mark(self) -> None:
        """Mark this place."""
        self._pause()
        title = "Mark this place, with a note if you like"
        self.push_screen(Pick(title, lambda _: [], free=True), self._marked)

    def _marked(self, chosen: Any) -> None:
        if not isinstance(chosen, Typed):
            return
        marks = with_mark(self.marks, Mark(self.cursor, self.view, chosen.text.strip()))
        try:
            write_marks(self.session.run.path, marks)
        except SchedscopeError as error:
            self._fail(str(error))
            return
        self.marks = marks
        self.say(f"marked; ' goes to marks ({len(marks)})")

    def action_marks(self) -> None:
        """Go to a mark."""
        if not self.marks:
            self._fail("no marks yet; m makes one")
            return
        choices = [
            Choice(mark.note or "-", f"pass {mark.cursor.number}  {printable(mark.cursor.rid or '')}", mark)
            for mark in self.marks
        ]
        self.push_screen(Pick("Marks", lambda typed: fuzzy(choices, typed)), self._went)

    @property
    def link(self) -> str:
        """The command that comes back here."""
        return permalink(self.session.run.where, self.cursor, self.view)

    def action_copy_link(self) -> None:
        """To the clipboard, through the terminal."""
        self.copy_to_clipboard(self.link)
        self.say(f"copied: {self.link}")

    def shown_cells(self) -> list[list[str]]:
        """The grid of the view, the header first."""
        grid = self.screen_stack[0].query_one(f"#view-{self.view}").query(Grid).first()
        return grid.text()

    def action_copy_text(self) -> None:
        """What the view shows, and why, as text."""
        cells = self.shown_cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells and cells[0] else []
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        self.copy_to_clipboard("\n".join([self.link, "", *lines, "", self._why.plain, ""]))
        self.say("copied what is shown, as text")

    def action_export(self) -> None:
        """Choose what to write to a file."""
        self.push_screen(Pick("Export", lambda typed: fuzzy(export_choices(), typed)), self._export)

    def _export(self, chosen: Any) -> None:
        if chosen is None:
            return
        try:
            words = chosen(self)
        except SchedscopeError as error:
            self._fail(str(error))
            return
        self.say(f"written: {words}")
