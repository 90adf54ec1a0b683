"""A pass: the queue before and after, keys, matches, verdicts, and the budgets as one walks down."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from schedscope.replay.describe import FALLBACKS, number, printable, verdict_words
from schedscope.replay.page import Candidate, Page
from schedscope.replay.palette import GREY, POLICIES, SKY, STOPS, VERDICTS
from schedscope.tui.budgets import budget_lines
from schedscope.tui.grid import Column, Grid
from schedscope.tui.look import Look, bar, short, whose
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

CHUNK, STOP = -1, -2
"""Rows of the grid that are no candidates: the continuing chunk, and where the pass ended."""
_WIDE = 96
GLYPHS = {"admitted": "●", "refused": "✗", "held_back": "◌", "waiting": "○"}


class QueueGrid(Grid):
    """The queue of a pass after sorting, with the continuing chunk before it and a line where the pass ended."""

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id, empty="")
        self.look_ = look
        self.page: Page | None = None
        self.rows: tuple[int, ...] = ()
        self.compared: Page | None = None
        self._hits: frozenset[str] = frozenset()
        self._wide = False
        self._longest = self._largest = 0

    def show(
        self, page: Page, rid: str | None, compared: Page | None = None, hits: frozenset[str] = frozenset()
    ) -> None:
        """Show a pass, with a request selected.

        Args:
            compared: another decision of it, to show who stands elsewhere.
            hits: requests on which a breakpoint holds.
        """
        changed = page is not self.page or compared is not self.compared or hits != self._hits
        self.page, self.compared, self._hits = page, compared, hits
        self.empty = "nobody waits"
        if changed:
            self.rows = _rows(page)
            self._longest = max((len(printable(c.rid)) for c in page.candidates[:500]), default=7)
            self._largest = max((c.matched or 0 for c in page.candidates), default=0)
        row = self.row_of(rid)
        if changed:
            self.fill(self._columns(page), len(self.rows), self._cells_of, row)
        elif row is not None and row != self.row:
            self.select(row)

    def on_resize(self) -> None:
        """Columns come and go with the width."""
        if self.page is not None:
            self.fill(self._columns(self.page), len(self.rows), self._cells_of, self.row)
        super().on_resize()

    def row_of(self, rid: str | None) -> int | None:
        """The row of a request; None: it is not shown."""
        if self.page is None or rid is None:
            return None
        place = self.page.places.get(rid)
        if place is not None:
            return self.rows.index(place)
        return 0 if self.page.chunk is not None and self.page.chunk.rid == rid else None

    def rid_at(self, row: int) -> str | None:
        """Whose row it is; None: nobody's."""
        if self.page is None or not 0 <= row < len(self.rows):
            return None
        place = self.rows[row]
        if place == CHUNK:
            assert self.page.chunk is not None
            return self.page.chunk.rid
        return None if place == STOP else self.page.candidates[place].rid

    @property
    def place(self) -> int | None:
        """The place that is selected; None: no candidate is."""
        place = self.rows[self.row] if self.row < len(self.rows) else STOP
        return None if place < 0 else place

    def _columns(self, page: Page) -> list[Column]:
        wide = self._wide = self.size.width >= _WIDE
        key = max(6, min(24, max((len("  ".join(c.key)) for c in page.candidates[:200]), default=6)))
        name = "  ".join(page.key_names) or "key"
        columns = [
            Column("", 2),
            Column("place", 5, right=True),
            Column("before" if self.compared is None else "recorded", 8 if self.compared is not None else 7),
            Column("request", max(8, min(self._longest, 34 if wide else 14))),
        ]
        if wide:
            columns.append(Column(name, max(key, min(len(name), 24)), right=True))
        columns.append(Column("matched", 17 if wide else 7, right=not wide))
        if wide and page.held_back:
            columns.append(Column("held back for", 24))
        columns.append(Column("verdict", 0))
        return columns

    def _cells_of(self, row: int) -> Sequence[Text]:
        page, look = self.page, self.look_
        assert page is not None
        place = self.rows[row]
        wide = self._wide
        columns = len(self.columns)
        if place == CHUNK:
            assert page.chunk is not None
            colour = look.of(VERDICTS, "chunk")
            verdict = Text(verdict_words(page.chunk), colour)
            cells = [Text("◆", colour), Text("chunk"), Text(""), whose(page.chunk.rid)]
            return [*cells, *([Text("")] * (columns - len(cells) - 1)), verdict]
        if place == STOP:
            colour = look.of(STOPS, page.facts.stop)
            rule = Text("─" * 60, colour, overflow="crop")
            return [*([rule] * (columns - 1)), Text(f"─ ended: {page.end}", colour)]
        candidate = page.candidates[place]
        colour = look.of(VERDICTS, candidate.fate)
        mark = "▶" if candidate.rid in self._hits else GLYPHS[candidate.fate]
        cells = [Text(mark, colour), Text(str(place)), self._move(candidate), whose(candidate.rid)]
        if wide:
            cells.append(Text("  ".join(candidate.key)))
        cells.append(self._matched(candidate, wide))
        if wide and page.held_back:
            cells.append(_partner(candidate, look))
        words = verdict_words(candidate.verdict) if candidate.verdict is not None else _waits(candidate, wide)
        cells.append(Text(printable(words), colour))
        return cells

    def _move(self, candidate: Candidate) -> Text:
        before = candidate.before
        if self.compared is not None:
            found = self.compared.find(candidate.rid)
            before = None if found is None else found.after
        if before is None:
            return Text("new", self.look_.hue(GREY))
        moved = before - candidate.after
        if not moved:
            return Text("·", self.look_.hue(GREY))
        return Text(
            f"{'↑' if moved > 0 else '↓'} {before}", self.look_.of(VERDICTS, "admitted" if moved > 0 else "refused")
        )

    def _matched(self, candidate: Candidate, wide: bool) -> Text:
        if candidate.matched is None:
            return Text("-", self.look_.hue(GREY))
        if not wide:
            return Text(short(candidate.matched))
        share = candidate.matched / self._largest if self._largest else 0.0
        return Text.assemble((bar(share, 9), self.look_.hue(SKY)), f" {candidate.matched:>7,}")


def _rows(page: Page) -> tuple[int, ...]:
    rows = [CHUNK] if page.chunk is not None else []
    looked = sum(1 for c in page.candidates if c.verdict is not None)
    if page.facts.stop == "queue_end" or looked == len(page.candidates):
        return (*rows, *range(len(page.candidates)))
    last = max((i for i, c in enumerate(page.candidates) if c.verdict is not None), default=-1)
    return (*rows, *range(last + 1), STOP, *range(last + 1, len(page.candidates)))


def _partner(candidate: Candidate, look: Look) -> Text:
    if not candidate.held_back:
        return Text("")
    if candidate.partner is None:
        return Text("everyone", look.of(VERDICTS, "held_back"))
    shared = f" {number(candidate.shared_len)}"
    return Text.assemble((printable(candidate.partner), look.of(VERDICTS, "held_back")), (shared, look.hue(GREY)))


def _waits(candidate: Candidate, wide: bool) -> str:
    if candidate.held_back and not wide:
        return f"held back for {candidate.partner or 'everyone'}"
    return "held back, not looked at" if candidate.held_back else "not looked at"


class PassView(Vertical):
    """The pass that the cursor is in."""

    DEFAULT_CSS = """
    PassView {
        & > #headline { height: auto; max-height: 2; }
        & > #budgets { height: 4; }
        & > QueueGrid { height: 1fr; }
    }
    .-short PassView > #budgets { height: 2; }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look

    def compose(self) -> ComposeResult:
        """Headline, budgets, queue."""
        yield Static(id="headline")
        yield Static(id="budgets")
        yield QueueGrid(self.look_, id="queue")

    @property
    def grid(self) -> QueueGrid:
        """The queue."""
        return self.query_one(QueueGrid)

    def show(self, page: Page, rid: str | None, hits: frozenset[str] = frozenset()) -> None:
        """Show a pass with a request selected."""
        self.query_one("#headline", Static).update(headline(page, self.look_))
        self.grid.show(page, rid, hits=hits)
        self.show_budgets()

    def show_budgets(self) -> None:
        """The budgets at the selected place."""
        page = self.grid.page
        if page is None:
            return
        box = self.query_one("#budgets", Static)
        lines = budget_lines(page, self.grid.place, self.look_, max(40, self.size.width), max(1, box.size.height or 4))
        box.update(Text("\n").join(lines))

    def on_resize(self) -> None:
        """Bars get another length."""
        self.show_budgets()


def headline(page: Page, look: Look) -> Text:
    """A pass in a line."""
    facts = page.facts
    words = Text(no_wrap=True, overflow="ellipsis")
    words.append(facts.active, f"bold {look.of(POLICIES, facts.active)}")
    if facts.fallback is not None:
        words.append(
            f" instead of {facts.configured}: {FALLBACKS.get(facts.fallback, facts.fallback)}",
            look.of(VERDICTS, "refused"),
        )
    words.append(f"  {len(page.candidates)} waiting, {facts.running} running, ")
    words.append(f"{len(page.admitted)} admitted", look.of(VERDICTS, "admitted"))
    if page.held_back:
        words.append(f", {page.held_back} held back", look.of(VERDICTS, "held_back"))
    if facts.preempted:
        words.append(f", {len(facts.preempted)} preempted", look.of(VERDICTS, "refused"))
    if facts.delayer_allow is False:
        words.append(", delayed", look.of(STOPS, "OTHER"))
    return words
