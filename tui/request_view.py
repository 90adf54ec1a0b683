"""A request's life: its place from pass to pass, what it waited for, and what was said about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.text import Text
from schedscope.replay.describe import number, printable, verdict_words
from schedscope.replay.ledger import CAUSES as CAUSE_WORDS
from schedscope.replay.ledger import RequestLedger
from schedscope.replay.page import verdict_of
from schedscope.replay.palette import CAUSES, GREY, REASONS, SERIES, VERDICTS
from schedscope.tui.grid import Column, Grid
from schedscope.tui.look import Look, seconds, whose
from schedscope.tui.session import Life
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell, by row and column."""


class RequestView(Vertical):
    """The selected request over all its passes. Following a row leads to the pass."""

    DEFAULT_CSS = """
    RequestView {
        & > #life { height: auto; max-height: 3; }
        & > #places { height: 9; }
        & > Grid { height: 1fr; }
    }
    .-short RequestView > #places { height: 5; }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look
        self.life: Life | None = None
        self._number = 0

    def compose(self) -> ComposeResult:
        """Milestones, chart, table."""
        yield Static("no request is selected: choose one in the pass, or find one with /", id="life")
        yield Static(id="places")
        yield Grid(id="decisions", empty="no pass said anything about it")

    def show(self, life: Life, first_ns: int, at: int) -> None:
        """Show a life, with a pass selected."""
        same = life is self.life
        self.life, self._number = life, at
        self.query_one("#life", Static).update(milestones(life, first_ns, self.look_, max(40, self.size.width)))
        self._draw()
        grid = self.query_one("#decisions", Grid)
        nearest = life.nearest(at)
        row = life.passes.index(nearest) if nearest is not None else None
        if not same:
            if life.decisions:
                grid.fill(_columns(life, self.size.width), len(life.decisions), self._cells, row)
            else:
                passes = life.passes
                grid.fill([Column("pass", 9, right=True)], len(passes), lambda i: [Text(str(passes[i]))], row)
        elif row is not None and row != grid.row:
            grid.select(row)

    def on_resize(self) -> None:
        """The chart gets another width."""
        self._draw()

    def pass_at(self, row: int) -> int | None:
        """The pass of a row."""
        passes = () if self.life is None else self.life.passes
        return passes[row] if row < len(passes) else None

    def _draw(self) -> None:
        if self.life is not None:
            box = self.query_one("#places", Static)
            lines = max(3, (box.size.height or 9))
            box.update(place_chart(self.life, self._number, self.look_, max(40, self.size.width), lines))

    def _cells(self, row: int) -> Sequence[Text]:
        assert self.life is not None
        decision, look = self.life.decisions[row], self.look_
        before, after = decision["place_before"], decision["place_after"]
        place = "chunk" if after is None else f"{before} → {after}"
        held = Text("")
        if decision["deprioritized"]:
            held = whose(decision["partner"], look.of(VERDICTS, "held_back"))
        cells = [
            Text(str(decision["pass"])),
            Text(place),
            Text(_key(decision["key"])),
            Text(f"{decision['matched']:,}"),
        ]
        if any(each["deprioritized"] for each in self.life.decisions):
            cells.append(held)
        return [*cells, _verdict(decision, look)]


def _columns(life: Life, width: int) -> list[Column]:
    columns = [
        Column("pass", 7, right=True),
        Column("place", 11, right=True),
        Column("key", 18 if width >= 90 else 10, right=True),
        Column("matched", 8, right=True),
    ]
    if any(each["deprioritized"] for each in life.decisions):
        columns.append(Column("held back for", 20 if width >= 90 else 12))
    return [*columns, Column("verdict", 0)]


def _key(text: str | None) -> str:
    if not text:
        return ""
    return "  ".join("/".join(map(str, v)) if isinstance(v, list) else str(v) for v in json.loads(text))


def _verdict(row: dict[str, Any], look: Look) -> Text:
    """What a recorded decision said, with operands."""
    if row["result"] is None:
        words = "held back, not looked at" if row["deprioritized"] else "not looked at"
        return Text(words, look.of(VERDICTS, "held_back" if row["deprioritized"] else "waiting"))
    return Text(
        printable(verdict_words(verdict_of(row))), look.of(VERDICTS, "admitted" if row["admitted"] else "refused")
    )


def milestones(life: Life, first_ns: int, look: Look, width: int) -> Text:
    """When it came, was admitted, answered and ended; and a band of what it waited for."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(printable(life.rid), "bold")
    row = life.request
    if row is None:
        text.append("  it has not ended", look.hue(GREY))
        arrived = next((e for e in life.events if e["kind"] == "arrive"), None)
        if arrived is not None:
            text.append(f"  {number(arrived['tokens'])} prompt tokens")
    else:
        arrive = row["arrive_ns"]
        text.append(
            f"  {row['prompt_tokens']:,} + {row['output_tokens']:,} tokens, {row['cached_tokens']:,} cached",
            look.hue(GREY),
        )
        text.append(f"\narrived {seconds((arrive - first_ns) / 1e9)}")
        for name, column in (
            ("admitted", "admit_ns"),
            ("first token", "first_token_ns"),
            (row["end_reason"], "finish_ns"),
        ):
            if row[column] is not None:
                text.append(f"  ─ {name} ", look.hue(GREY))
                text.append(f"+{seconds((row[column] - arrive) / 1e9)}", "bold" if column == "first_token_ns" else "")
        for name in ("retractions", "preemptions"):
            if row[name]:
                text.append(f"  {row[name]} {name}", look.of(VERDICTS, "refused"))
    if life.ledger is not None and life.ledger.queued_ns:
        text.append("\n")
        text.append_text(cause_band(life.ledger, look, width))
    elif life.problem is not None:
        text.append(f"\n{life.problem}", look.hue(GREY))
    return text


def cause_band(ledger: RequestLedger, look: Look, width: int) -> Text:
    """A request's time in the queue as one bar, a piece per cause, with the largest ones named."""
    sums: dict[str, int] = {}
    for part in ledger.parts:
        sums[part.cause] = sums.get(part.cause, 0) + part.ns
    total = max(1, ledger.queued_ns)
    text = Text(no_wrap=True, overflow="crop")
    left = width
    for cause, ns in sorted(sums.items(), key=lambda item: -item[1]):
        cells = min(left, round(ns / total * width))
        if cells:
            words = f" {ns / total:.0%} {CAUSE_WORDS[cause]} "
            style = f"{look.of(CAUSES, cause)} reverse"
            text.append(words[:cells].ljust(cells), style)
        left -= cells
    return text


def place_chart(life: Life, at: int, look: Look, width: int, lines: int) -> Text:
    """Its place in the queue over its passes, the front on top; under it what was said, and where the cursor is."""
    rows = [row for row in life.decisions if row["place_after"] is not None]
    if not rows:
        return Text(
            "its places were not recorded" if not life.decisions else "it was never in the queue", look.hue(GREY)
        )
    label = 6
    columns = max(10, width - label - 1)
    levels = max(1, lines - 2)
    deepest = max(row["place_after"] for row in rows)
    first: int = rows[0]["pass"]
    last: int = rows[-1]["pass"]
    span = max(1, last - first)

    def column(pass_number: int, cells: int) -> int:
        return round((pass_number - first) / span * (cells - 1))

    cells = [[0] * columns for _ in range(levels)]
    words: list[tuple[str, str]] = [(" ", "")] * columns
    dots = levels * 4 - 1
    reached = 0
    for row in rows:
        x = column(row["pass"], columns * 2)
        y = round(row["place_after"] / max(1, deepest) * dots)
        for each in range(min(reached, x), x + 1):
            cells[y // 4][each // 2] |= _DOTS[y % 4][each % 2]
        reached = x + 1
        if row["result"] is not None:
            style = look.of(VERDICTS, "admitted") if row["admitted"] else look.of(REASONS, row["reason"])
            words[x // 2] = ("●" if row["admitted"] else "✗", style)
        elif row["deprioritized"] and words[x // 2][0] == " ":
            words[x // 2] = ("◌", look.of(VERDICTS, "held_back"))
    cursor = column(at, columns) if first <= at <= last else None
    text = Text(no_wrap=True, overflow="crop")
    for level, line in enumerate(cells):
        name = "0" if level == 0 else str(deepest) if level == levels - 1 else "place" if level == 1 else ""
        text.append(f"{name:>{label}} ", look.hue(GREY))
        for x, bits in enumerate(line):
            style = look.of(SERIES, "queue")
            text.append(chr(0x2800 + bits), f"{style} on {look.hue(GREY)}" if x == cursor else style)
        text.append("\n")
    text.append(" " * (label + 1))
    for glyph, style in words:
        text.append(glyph, style)
    ruler = [" "] * columns
    for place, words_ in ((0, f"pass {first}"), (columns - len(str(last)), str(last))):
        ruler[place : place + len(words_)] = list(words_)
    if cursor is not None:
        here = f"▲ {at}"
        place = min(cursor, columns - len(here))
        ruler[place : place + len(here)] = list(here)
    text.append("\n" + " " * (label + 1) + "".join(ruler[:columns]), look.hue(GREY))
    return text
