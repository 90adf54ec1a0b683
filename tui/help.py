"""Every key, and what the signs mean."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from schedscope.replay.palette import GREY, VERDICTS
from schedscope.tui.keys import GROUPS
from schedscope.tui.look import Look
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

SIGNS = (
    ("●", "admitted", "admitted: it is in this pass's batch"),
    ("✗", "refused", "looked at and refused"),
    ("◌", "held_back", "held back: an earlier request brings the same prefix"),
    ("○", "waiting", "not looked at: the pass ended before it"),
    ("◆", "chunk", "the continuing chunk"),
    ("▶", "refused", "a breakpoint's condition holds"),
)

_WIDE = 138
"""Columns of the screen from which on two columns of keys fit beside each other."""


class Help(ModalScreen[None]):
    """Closed by any of its keys."""

    DEFAULT_CSS = """
    Help {
        align: center middle;
        background: $background 60%;
        & > VerticalScroll {
            width: 90%; max-width: 124; height: auto; max-height: 94%;
            background: $surface; border: round $primary; padding: 0 2;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look_ = look

    def compose(self) -> ComposeResult:
        """All in one scrolled text."""
        with VerticalScroll():
            yield Static(help_text(self.look_, wide=self.app.size.width >= _WIDE))


def help_text(look: Look, *, wide: bool) -> Text:
    """Keys by group, in two columns where there is room; then the signs."""
    blocks: list[list[Text]] = []
    for name, keys in GROUPS.items():
        style = f"bold {look.of(VERDICTS, 'chunk')}"
        lines = [Text(name, "bold"), *(Text.assemble((f"{key.shown:>7}  ", style), key.words) for key in keys)]
        blocks.append([*lines, Text("")])
    signs = [Text("Signs", "bold")]
    signs += [Text.assemble((f"{glyph:>7}  ", look.of(VERDICTS, fate)), words) for glyph, fate, words in SIGNS]
    blocks.append([*signs, Text("")])
    moving = Text("The grids move with ↑↓ jk, page up and down, home, end; enter follows a row.", look.hue(GREY))
    if not wide:
        return Text("\n").join([*(line for block in blocks for line in block), moving])
    half = sum(map(len, blocks)) // 2
    columns: list[list[Text]] = [[], []]
    for block in blocks:
        columns[0 if len(columns[0]) + len(block) // 2 <= half else 1].extend(block)
    width = 56
    lines = []
    for place in range(max(map(len, columns))):
        left, right = (column[place] if place < len(column) else Text("") for column in columns)
        lines.append(Text.assemble(left, " " * max(1, width - left.cell_len), right))
    return Text("\n").join([*lines, moving])
