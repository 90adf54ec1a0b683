"""Which pass of another run belongs beside one of this run: two runs seldom agree on numbers for long."""

from __future__ import annotations

from typing import NamedTuple

from schedscope.engine.errors import RunNotFoundError
from schedscope.replay.page import Facts
from schedscope.tui.look import seconds
from schedscope.tui.session import Session


class Counterpart(NamedTuple):
    """A pass of the other run."""

    rank: int
    number: int
    words: str
    """What it has in common with this one."""


def counterpart(here: Session, facts: Facts, rid: str | None, there: Session) -> Counterpart:
    """The pass in which the same request waits for as many passes; if one run doesn't know it, that at the same time.

    Raises RunNotFoundError if the other run has no pass.
    """
    reach = {rank: passes for rank, passes in there.reach().items() if passes.count}
    if not reach:
        raise RunNotFoundError(f"run {there.run.where} has no pass")
    rank = facts.rank if facts.rank in reach else min(reach)
    if rid is not None:
        waited, waits = here.passes_of(facts.rank, rid), there.passes_of(rank, rid)
        if facts.number in waited and waits:
            place = min(waited.index(facts.number), len(waits) - 1)
            return Counterpart(rank, waits[place], f"{_ordinal(place + 1)} of its passes")
    since_ns = None if facts.begin_ns is None else here.since_start(facts.rank, facts.begin_ns)
    number = None if since_ns is None else there.pass_since(rank, since_ns)
    if since_ns is not None and number is not None:
        return Counterpart(rank, number, f"also at {seconds(since_ns / 1e9)}")
    first, last = reach[rank].first or 0, reach[rank].last or 0
    return Counterpart(rank, max(first, min(facts.number, last)), "the same number")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
