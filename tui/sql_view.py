"""SQL over the log, with completion; a row that names a pass or a request leads there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from schedscope.recorder.schema import TABLES
from schedscope.replay.describe import printable
from schedscope.replay.palette import GREY
from schedscope.tui.grid import Column, Grid
from schedscope.tui.look import Look, plain
from schedscope.tui.session import Answer
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static, TextArea

FIRST = (
    "select rid, count(*) as passes, min(pass) as pass from decisions where deprioritized "
    "group by rid order by passes desc, rid"
)
KEYWORDS = (
    "select",
    "from",
    "where",
    "group by",
    "order by",
    "limit",
    "join",
    "using",
    "count(*)",
    "desc",
    "distinct",
    "between",
    "having",
    "quantile_cont",
    "arg_max",
    "is not null",
    "case when",
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*$")
_WIDEST = 40
_SAMPLE = 200
"""Rows that tell how wide a column is."""


def completions(text: str, most: int = 8) -> list[str]:
    """Words that could stand where the text ends: columns of the tables it names first, then tables and keywords."""
    found = _WORD.search(text)
    word = found.group().lower() if found else ""
    table, dot, rest = word.rpartition(".")
    if dot:
        return [
            f"{table}.{name}" for name in (TABLES[table].names if table in TABLES else ()) if name.startswith(rest)
        ][:most]
    if not word:
        return []
    named = [name for name in TABLES if re.search(rf"\b{name}\b", text.lower())]
    columns = [c for name in named or TABLES for c in TABLES[name].names]
    words = [*dict.fromkeys([*columns, *TABLES, *KEYWORDS])]
    starting = [w for w in words if w.startswith(word) and w != word]
    return (starting + [w for w in words if word in w and w not in starting and w != word])[:most]


class SqlInput(TextArea):
    """Where a query is typed. Enter runs it, Ctrl+J begins a line, Tab completes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    class Asked(Message):
        """Run it."""

        def __init__(self, sql: str) -> None:
            super().__init__()
            self.sql = sql

    def __init__(self, id: str | None = None) -> None:
        super().__init__(FIRST, id=id, show_line_numbers=False, soft_wrap=True, tab_behavior="indent")
        self.cursor_blink = False
        self.asked: list[str] = []
        self._back = 0

    @property
    def before_cursor(self) -> str:
        """The text up to the cursor."""
        return self.get_text_range((0, 0), self.cursor_location)

    async def _on_key(self, event: events.Key) -> None:
        match event.key:
            case "enter":
                event.stop()
                event.prevent_default()
                if self.text.strip():
                    self.asked.append(self.text)
                    self._back = 0
                    self.move_cursor(self.document.end)
                    self.post_message(self.Asked(self.text))
            case "ctrl+j":
                event.stop()
                event.prevent_default()
                self.insert("\n")
            case "tab":
                event.stop()
                event.prevent_default()
                self.complete()
            case "ctrl+up" | "ctrl+down":
                event.stop()
                event.prevent_default()
                self._recall(1 if event.key == "ctrl+up" else -1)
            case _:
                await super()._on_key(event)

    def complete(self) -> None:
        """Finish the word with the first thing it could be."""
        words = completions(self.before_cursor)
        if words:
            found = _WORD.search(self.before_cursor)
            line, column = self.cursor_location
            begin = (line, column - (len(found.group()) if found else 0))
            self.replace(words[0], begin, self.cursor_location)

    def action_leave(self) -> None:
        """To the answer's rows."""
        self.screen.focus_next()

    def _recall(self, step: int) -> None:
        if self.asked:
            self._back = max(1, min(self._back + step, len(self.asked)))
            self.text = self.asked[-self._back]
            self.move_cursor(self.document.end)


class SqlView(Vertical):
    """A query, what could stand next, and the answer."""

    DEFAULT_CSS = """
    SqlView {
        & > SqlInput { height: 5; border: round $primary 50%; padding: 0; }
        & > SqlInput:focus { border: round $primary; }
        & > Static { height: 1; }
        & > Grid { height: 1fr; }
    }
    .-short SqlView > SqlInput { height: 4; }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look
        self.answer: Answer | None = None
        self._rows: list[dict[str, Any]] = []

    def compose(self) -> ComposeResult:
        """Query, hints, answer."""
        yield SqlInput(id="sql")
        yield Static(id="sql-hint")
        yield Grid(id="answer", empty="enter runs the query")

    def on_mount(self) -> None:
        """Say how it is used. What is typed takes the place of the first query."""
        self.query_one(SqlInput).select_all()
        self.hint("enter: run   tab: complete   ctrl+j: new line   ctrl+up: earlier   escape: to the rows")

    def hint(self, words: str, style: str | None = None) -> None:
        """A line under the query."""
        self.query_one("#sql-hint", Static).update(Text(words, self.look_.hue(GREY) if style is None else style))

    def refuse(self, words: str, style: str) -> None:
        """Say why there is no answer."""
        self.hint(printable(words.splitlines()[0]), style)

    def on_text_area_changed(self) -> None:
        """Show what could stand next."""
        words = completions(self.query_one(SqlInput).before_cursor)
        if words:
            self.hint("tab: " + "  ".join(words))

    def show(self, answer: Answer) -> None:
        """Show an answer."""
        self.answer = answer
        table = answer.table
        self._rows = table.to_pylist()
        columns = []
        for field in table.schema:
            values = [len(plain(row[field.name])) for row in self._rows[:_SAMPLE]]
            numeric = any(word in str(field.type) for word in ("int", "double", "float", "decimal"))
            columns.append(Column(field.name, min(_WIDEST, max([len(field.name), *values])), right=numeric))
        names = table.column_names
        grid = self.query_one(Grid)
        grid.empty = "no rows"
        grid.fill(columns, len(self._rows), lambda i: [Text(plain(self._rows[i][name])) for name in names], 0)
        rows = f"{len(self._rows):,} row{'s' * (len(self._rows) != 1)}" + (
            ", and more that are not shown" if answer.more else ""
        )
        leads = "   enter: go to the row's pass or request" if {"pass", "rid"} & set(names) else ""
        self.hint(rows + leads)

    def row(self, place: int) -> dict[str, Any]:
        """A row of the answer."""
        return self._rows[place]

    def cells(self) -> Sequence[Sequence[str]]:
        """All of the answer, the header first."""
        return self.query_one(Grid).text()
