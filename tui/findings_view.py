"""What the doctor found; each piece of evidence is a jump."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from schedscope.replay.describe import printable
from schedscope.replay.finding import Finding, span
from schedscope.replay.palette import GREY, SEVERITIES, VERDICTS
from schedscope.tui.cursor import Cursor, Place
from schedscope.tui.grid import Column, Grid
from schedscope.tui.linked import Line, Link, Linked, Span
from schedscope.tui.look import Look
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static


class FindingsView(Vertical):
    """Findings, the worst first, and the details of the selected one."""

    DEFAULT_CSS = """
    FindingsView {
        & > Static { height: 1; }
        & > Grid { height: 1fr; }
        & > Linked { height: 50%; border-top: solid $primary 40%; }
    }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look
        self.findings: tuple[Finding, ...] | None = None

    def compose(self) -> ComposeResult:
        """List and details."""
        yield Static(id="findings-title")
        yield Grid(id="findings", empty="nothing was found to be wrong")
        yield Linked(id="finding")

    def say(self, words: str) -> None:
        """A line above the list."""
        self.query_one("#findings-title", Static).update(Text(words, self.look_.hue(GREY)))

    def show(self, findings: Sequence[Finding]) -> None:
        """Show them."""
        self.findings = tuple(findings)
        count = len(self.findings)
        self.say(
            f"{count} finding{'s' * (count != 1)}" + ("   enter: go to the evidence   tab: all of it" if count else "")
        )
        columns = [Column("", 8), Column("costs", 10, right=True), Column("detector", 18), Column("what", 0)]
        self.query_one(Grid).fill(columns, count, self._cells, 0)
        self._details(0)

    def on_grid_moved(self, message: Grid.Moved) -> None:
        """Show the details of another one."""
        message.stop()
        self._details(message.row)

    def place_of(self, row: int) -> Place | None:
        """Where the worst evidence of a finding is."""
        found = self.findings[row] if self.findings and row < len(self.findings) else None
        return None if found is None or not found.evidence else _place(found, 0)

    def _details(self, row: int) -> None:
        found = self.findings[row] if self.findings and row < len(self.findings) else None
        self.query_one(Linked).show([] if found is None else finding_lines(found, self.look_))

    def _cells(self, row: int) -> Sequence[Text]:
        assert self.findings is not None
        found = self.findings[row]
        colour = self.look_.of(SEVERITIES, str(found.severity))
        cost = span(found.cost_s) if found.cost_s else ""
        return [Text(str(found.severity), colour), Text(cost), Text(found.detector), Text(printable(found.title))]


def _place(found: Finding, which: int) -> Place | None:
    evidence = found.evidence[which]
    if evidence.pass_number is None and evidence.rid is None:
        return None
    view = "pass" if evidence.pass_number is not None else "request"
    return Place(Cursor(evidence.rank, evidence.pass_number or 0, evidence.rid), view)


def finding_lines(found: Finding, look: Look) -> list[Line]:
    """A finding with its evidence as links, and what came of trying the advice."""
    lines: list[Line] = [(Span(printable(found.title), "bold"),), ()]
    for which, evidence in enumerate(found.evidence):
        place = _place(found, which)
        lines.append((Span("· "), Span(printable(evidence.words), "", None if place is None else Link(place))))
    lines += [(), (Span("Try: ", "bold"), Span(printable(found.advice)))]
    for checked in found.checked:
        mark, fate = ("✓", "admitted") if checked.helps else ("✗", "refused")
        words = printable(checked.words)
        place = Place(Cursor(checked.trial.rank, checked.trial.pass_number, checked.trial.rid), "pass")
        lines.append((Span(f"{mark} ", look.of(VERDICTS, fate)), Span(words, "", Link(place))))
    if found.unchecked is not None:
        lines.append((Span(printable(found.unchecked), look.hue(GREY)),))
    return lines
