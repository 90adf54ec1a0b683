"""One prompt for everything that is chosen or typed: a line, and what it could mean under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from schedscope.tui.grid import Column, Grid
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.fuzzy import Matcher
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class Choice(NamedTuple):
    """Something to pick."""

    label: str
    detail: str
    value: Any
    style: str = ""


class Typed(NamedTuple):
    """What was typed, where nothing was picked."""

    text: str


Source = Callable[[str], Sequence[Choice]]
"""Choices for what is typed so far, at once."""
Later = Callable[[str, Callable[[Sequence[Choice]], None]], None]
"""More choices, which take time: handed over when they are there."""


def fuzzy(choices: Iterable[Choice], typed: str, most: int = 200) -> list[Choice]:
    """Those that hold the typed letters in this order: in their label first, and the closest first."""
    if not typed:
        return list(choices)[:most]
    matcher = Matcher(typed)
    scored = []
    for place, choice in enumerate(choices):
        own = matcher.match(choice.label)
        score = own or matcher.match(choice.detail)
        if score > 0:
            scored.append((not own, -score, place, choice))
    return [choice for *_, choice in sorted(scored, key=lambda each: each[:3])][:most]


class Pick(ModalScreen[Any]):
    """Ends with the value of a choice, with `Typed` where typing is free, or with None.

    Args:
        free: what is typed counts if nothing is picked.
        later: asked besides `source` for what takes time.
    """

    DEFAULT_CSS = """
    Pick {
        align: center top;
        background: $background 60%;
        & > Vertical {
            width: 90%; max-width: 110; height: auto; max-height: 80%; margin: 1 0;
            background: $surface; border: round $primary;
        }
        & Input { border: none; height: 1; padding: 0 1; background: $surface; }
        & Input:focus { border: none; }
        & .title { color: $foreground 75%; padding: 0 1; height: auto; }
        & Grid { height: auto; max-height: 16; padding: 0 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("down", "move(1)", "Next", show=False, priority=True),
        Binding("up", "move(-1)", "Before", show=False, priority=True),
    ]

    def __init__(
        self, title: str, source: Source, *, free: bool = False, later: Later | None = None, text: str = ""
    ) -> None:
        super().__init__()
        self._title = title
        self._source = source
        self._free = free
        self._later = later
        self._text = text
        self._choices: list[Choice] = []
        self._picked = False
        """A choice was moved to."""

    def compose(self) -> ComposeResult:
        """Title, line, choices."""
        with Vertical():
            yield Static(Text(self._title), classes="title")
            yield Input(self._text, id="typed")
            yield Grid(id="choices", empty="")

    def on_mount(self) -> None:
        """Show the first choices."""
        field = self.query_one(Input)
        field.cursor_blink = False
        field.focus()
        self._list(self._source(self._text))

    def on_input_changed(self, message: Input.Changed) -> None:
        """Other choices."""
        message.stop()
        typed = message.value
        self._picked = False
        self._list(self._source(typed))
        if self._later is not None:
            first = list(self._choices)

            def more(found: Sequence[Choice]) -> None:
                if self.is_attached and self.query_one(Input).value == typed:
                    known = {choice.label for choice in first}
                    self._list([*first, *(choice for choice in found if choice.label not in known)])

            self._later(typed, more)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Take it."""
        message.stop()
        row = self.query_one(Grid).row
        if self._choices and (self._picked or not self._free):
            self.dismiss(self._choices[row].value)
        elif self._free:
            exact = next((c for c in self._choices if c.label == message.value), None)
            self.dismiss(Typed(message.value) if exact is None else exact.value)
        else:
            self.dismiss(None)

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        """Clicked."""
        message.stop()
        self.dismiss(self._choices[message.row].value)

    def on_grid_moved(self, message: Grid.Moved) -> None:
        """Clicked once."""
        message.stop()
        self._picked = True

    def action_move(self, rows: int) -> None:
        """Another choice."""
        grid = self.query_one(Grid)
        grid.select(grid.row + rows if self._picked or not self._free else grid.row)
        self._picked = True

    def action_cancel(self) -> None:
        """None of them."""
        self.dismiss(None)

    def _list(self, choices: Sequence[Choice]) -> None:
        self._choices = list(choices)
        width = min(48, max((len(c.label) for c in self._choices), default=1))
        columns = [Column("", width), Column("", 0)]
        grid = self.query_one(Grid)
        grid.fill(columns, len(self._choices), self._cells, 0)
        grid.styles.height = min(16, len(self._choices) + 1) if self._choices else 0

    def _cells(self, row: int) -> Sequence[Text]:
        choice = self._choices[row]
        return [Text(choice.label, choice.style), Text(choice.detail)]
