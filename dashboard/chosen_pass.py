"""The pass that is looked at."""

from __future__ import annotations

from schedscope.dashboard.desk import Desk
from schedscope.engine.errors import RunFormatError, RunNotFoundError
from schedscope.replay.recorded import RecordedPass, read_pass


def number_of(desk: Desk) -> tuple[int, int]:
    """Rank and number of the pass that is looked at; by default the last. Raises RunNotFoundError, RunFormatError."""
    rank = desk.cursor.rank if desk.cursor.rank is not None else desk.timeline.extent.ranks[0].rank
    number = desk.cursor.pass_number
    if number is None:
        number = desk.timeline.pass_at(desk.cursor.at_ns or desk.timeline.extent.last_ns, rank)
    if desk.timeline.extent.level == "steps":
        raise RunFormatError(f"run {desk.book.name} was recorded at level steps: its passes are not in the log")
    if number is None:
        raise RunNotFoundError(f"rank {rank} of run {desk.book.name} has no pass yet")
    return rank, number


def chosen(desk: Desk) -> RecordedPass:
    """The pass that is looked at. Raises RunNotFoundError, RunFormatError."""
    rank, number = number_of(desk)
    return desk.once(("pass", rank, number), lambda: read_pass(desk.book.run, rank, number))
