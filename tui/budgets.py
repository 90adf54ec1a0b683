"""The budgets of a pass as bars that shrink while one walks down the queue."""

from __future__ import annotations

from typing import NamedTuple

from rich.text import Text
from schedscope.engine.budget import Remaining
from schedscope.replay.describe import number
from schedscope.replay.page import Page
from schedscope.replay.palette import GREY, SKY, VERDICTS
from schedscope.tui.look import Look

NAMES = ("memory", "without reserve", "prefill", "chunk")
"""Of the four budgets, in the order of `Remaining`."""
_LABEL = 16
_NUMBERS = 34


class Fall(NamedTuple):
    """A budget around one request."""

    name: str
    first: float
    """Before the pass."""
    before: float
    """When it was the request's turn."""
    after: float


def falls(page: Page, place: int | None) -> list[Fall]:
    """The budgets around the request at a place; None: around the whole pass. Without those that don't apply."""
    first = page.facts.budget
    if place is None:
        before: Remaining = first
        after = page.verdicts[-1].remaining if page.verdicts else first
    else:
        before = page.left_before(place)
        verdict = page.candidates[place].verdict if place < len(page.candidates) else None
        after = before if verdict is None else verdict.remaining
    found = []
    for name, start, earlier, later in zip(NAMES, first, before, after, strict=True):
        if start is not None and earlier is not None and later is not None:
            found.append(Fall(name, start, earlier, later))
    return found


def budget_lines(page: Page, place: int | None, look: Look, width: int, lines: int) -> list[Text]:
    """As many bars as there is room for, the tightest first if not all fit."""
    shown = falls(page, place)
    if len(shown) > lines:
        order = {fall.name: fall.after / fall.first if fall.first > 0 else 0.0 for fall in shown}
        tightest = sorted(shown, key=lambda fall: order[fall.name])[:lines]
        shown = [fall for fall in shown if fall in tightest]
    fate = "admitted" if place is None else page.candidates[place].fate
    return [_line(fall, look, fate, width) for fall in shown]


def _line(fall: Fall, look: Look, fate: str, width: int) -> Text:
    room = max(8, width - _LABEL - _NUMBERS)
    whole = max(fall.first, 1.0)

    def cells(value: float) -> int:
        return round(max(0.0, min(1.0, value / whole)) * room)

    left, before = cells(fall.after), cells(fall.before)
    if fall.after > 0 and not left:
        left = 1
    line = Text(no_wrap=True)
    line.append(f"{fall.name:<{_LABEL}}", look.hue(GREY))
    line.append("█" * left, look.hue(SKY))
    line.append("▓" * max(0, before - left), look.of(VERDICTS, fate))
    line.append("░" * (room - max(before, left)), look.hue(GREY))
    spent = fall.before - fall.after
    words = f" {number(fall.after)} of {number(fall.first)}"
    if spent:
        words += f" (-{number(spent)})" if spent > 0 else f" (+{number(-spent)})"
    line.append(words)
    return line
