"""A table of any length: only the rows on the screen are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

_GAP = 1
"""Cells between columns."""


class Column(NamedTuple):
    """A column of a grid."""

    name: str
    width: int
    """Cells; 0: what the others leave."""
    right: bool = False


Cells = Callable[[int], Sequence[Text]]
"""Makes a row, a text per column."""


class Grid(ScrollView, can_focus=True, inherit_bindings=False):
    """Rows under a header, one of them selected."""

    DEFAULT_CSS = """
    Grid {
        & > .grid--header { color: $foreground 70%; text-style: bold; }
        & > .grid--cursor { background: $primary 22%; }
        &:focus > .grid--cursor { background: $primary 40%; }
        & > .grid--empty { color: $foreground 60%; }
        scrollbar-size-horizontal: 0;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"grid--header", "grid--cursor", "grid--empty"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup,ctrl+u", "page(-1)", "Page up", show=False),
        Binding("pagedown,ctrl+d", "page(1)", "Page down", show=False),
        Binding("home", "edge(-1)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Follow", show=False),
        Binding("ctrl+left", "aside(-1)", "Columns before", show=False),
        Binding("ctrl+right", "aside(1)", "More columns", show=False),
    ]

    class Moved(Message):
        """Another row is selected."""

        def __init__(self, grid: Grid, row: int) -> None:
            super().__init__()
            self.grid = grid
            self.row = row

        @property
        def control(self) -> Grid:
            """The grid."""
            return self.grid

        def can_replace(self, message: Message) -> bool:
            """Only the last of many moves counts."""
            return isinstance(message, Grid.Moved) and message.grid is self.grid

    class Chosen(Message):
        """A row was followed: Enter, or a second click."""

        def __init__(self, grid: Grid, row: int) -> None:
            super().__init__()
            self.grid = grid
            self.row = row

        @property
        def control(self) -> Grid:
            """The grid."""
            return self.grid

    def __init__(self, *, empty: str = "nothing", id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.columns: tuple[Column, ...] = ()
        self.count = 0
        self.row = 0
        self.empty = empty
        """What an empty grid says."""
        self._cells: Cells = lambda _: ()
        self._made: dict[tuple[int, bool], Strip] = {}

    # ---- contents ------------------------------------------------------------------------------------------

    def fill(self, columns: Sequence[Column], count: int, cells: Cells, row: int | None = None) -> None:
        """Show other rows, with one of them selected; None: as far down as before."""
        self.columns = tuple(columns)
        self.count = count
        self._cells = cells
        self.row = max(0, min(self.row if row is None else row, count - 1))
        self._forget()
        self.virtual_size = Size(self._width(), count + 1)
        self._show_row(centre=row is not None)

    def repaint(self) -> None:
        """The rows look differently now."""
        self._forget()

    def select(self, row: int) -> None:
        """Select a row, without saying so."""
        self.row = max(0, min(row, self.count - 1))
        self._show_row()
        self.refresh()

    def text(self) -> list[list[str]]:
        """All cells, the header first, for copies and files."""
        return [[c.name for c in self.columns], *([cell.plain for cell in self._cells(i)] for i in range(self.count))]

    def _forget(self) -> None:
        self._made.clear()
        self.refresh()

    # ---- moving --------------------------------------------------------------------------------------------

    def action_move(self, rows: int) -> None:
        """Select a row further down, or up."""
        self._go(self.row + rows)

    def action_page(self, pages: int) -> None:
        """As many rows as are shown."""
        self._go(self.row + pages * max(1, self.size.height - 2))

    def action_edge(self, edge: int) -> None:
        """The first or the last row."""
        self._go(0 if edge < 0 else self.count - 1)

    def action_choose(self) -> None:
        """Follow the row."""
        if self.count:
            self.post_message(self.Chosen(self, self.row))

    def action_aside(self, pages: int) -> None:
        """Half a width to the left or right, where the columns don't fit."""
        self.scroll_to(x=self.scroll_offset.x + pages * self.size.width // 2, animate=False, force=True)

    def _go(self, row: int) -> None:
        row = max(0, min(row, self.count - 1))
        if self.count and row != self.row:
            self.select(row)
            self.post_message(self.Moved(self, row))

    def on_click(self, event: events.Click) -> None:
        """Select the row; follow it with a second click."""
        row = self.scroll_offset.y + event.y - 1
        if event.y < 1 or not 0 <= row < self.count:
            return
        if event.chain > 1:
            self.post_message(self.Chosen(self, row))
            return
        self._go(row)

    def _show_row(self, *, centre: bool = False) -> None:
        shown = self.size.height - 1
        if shown < 1:  # not laid out yet
            return
        top = self.scroll_offset.y
        if self.row < top:
            top = self.row - (shown // 2 if centre else 0)
        elif self.row >= top + shown:
            top = self.row - (shown // 2 if centre else shown - 1)
        self.scroll_to(y=max(0, min(top, self.count + 1 - shown)), animate=False, force=True)

    # ---- painting ------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Flexible columns get another width."""
        self.virtual_size = Size(self._width(), self.count + 1)
        self._show_row(centre=True)
        self._forget()

    def notify_style_update(self) -> None:
        """Another theme."""
        super().notify_style_update()
        self._forget()

    def _width(self) -> int:
        return sum(self._widths()) + _GAP * max(0, len(self.columns) - 1)

    def _widths(self) -> list[int]:
        given = sum(c.width for c in self.columns) + _GAP * max(0, len(self.columns) - 1)
        flexible = [c for c in self.columns if not c.width]
        room = max(6 * len(flexible), self.scrollable_content_region.width - given)
        share = room // len(flexible) if flexible else 0
        return [c.width or share for c in self.columns]

    def render_line(self, y: int) -> Strip:
        """One line of it."""
        width = self.scrollable_content_region.width
        if y == 0:
            line = self._line([Text(c.name) for c in self.columns])
            return self._cropped(line.apply_style(self.get_component_rich_style("grid--header")), width)
        row = self.scroll_offset.y + y - 1
        if row >= self.count:
            empty = self.empty if self.count == 0 and y == 1 else ""
            style = self.get_component_rich_style("grid--empty")
            return Strip([Segment(empty, style)], len(empty)).adjust_cell_length(width, self.rich_style)
        chosen = row == self.row
        strip = self._made.get((row, chosen))
        if strip is None:
            strip = self._line(self._cells(row))
            if chosen:
                strip = strip.apply_style(Style(bgcolor=self.get_component_rich_style("grid--cursor").bgcolor))
            if len(self._made) > 500:
                self._made.clear()
            self._made[row, chosen] = strip
        return self._cropped(strip, width)

    def _cropped(self, strip: Strip, width: int) -> Strip:
        left = self.scroll_offset.x
        return strip.crop(left, left + width).apply_style(self.rich_style)

    def _line(self, cells: Sequence[Text]) -> Strip:
        line = Text(end="", no_wrap=True)
        for place, (column, width, cell) in enumerate(zip(self.columns, self._widths(), cells, strict=True)):
            if place:
                line.append(" " * _GAP)
            fitted = cell.copy()
            fitted.truncate(width, overflow=cell.overflow or "ellipsis")
            padding = " " * (width - fitted.cell_len)
            line.append(padding if column.right else "")
            line.append_text(fitted)
            line.append("" if column.right else padding)
        strip = Strip(line.render(self.app.console), line.cell_len)
        return strip.adjust_cell_length(max(strip.cell_length, self.scrollable_content_region.width))
