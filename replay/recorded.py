"""A pass as its rows tell it, for people: no re-run, whatever the length of the run."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from schedscope.engine.budget import Remaining
from schedscope.engine.verdict import Result, Verdict
from schedscope.recorder.run import Run
from schedscope.replay.describe import FALLBACKS, ending_words, verdict_words
from schedscope.replay.page import verdict_of

Row = dict[str, Any]


class Place(NamedTuple):
    """A request in a recorded pass."""

    rid: str
    before: int | None
    """Place in the queue before sorting; None: the continuing chunk."""
    after: int | None
    key: tuple[tuple[str, Any], ...]
    """Names and values, compared from left to right."""
    matched: int
    deprioritized: bool
    partner: str | None
    shared_len: int | None
    verdict: Verdict | None
    """None: the pass ended before it was looked at."""

    @property
    def words(self) -> str:
        """What the pass said about it."""
        return verdict_words(self.verdict)

    @property
    def fate(self) -> str:
        """`admitted`, `chunk`, `refused`, `held_back` or `waiting`."""
        if self.verdict is None:
            return "held_back" if self.deprioritized else "waiting"
        if not self.verdict.admitted:
            return "refused"
        return "chunk" if self.verdict.result is Result.CHUNK else "admitted"


class RecordedPass(NamedTuple):
    """A pass as it was recorded."""

    rank: int
    number: int
    row: Row
    """Of `passes`."""
    step: Row | None
    """Of `steps`; None: it has not ended."""
    places: tuple[Place, ...]
    """The continuing chunk, then the queue as sorted. Empty where its decisions were not recorded."""

    @property
    def looked_at(self) -> tuple[Place, ...]:
        """Requests with a verdict, in the order in which they were looked at."""
        return tuple(place for place in self.places if place.verdict is not None)

    @property
    def before(self) -> Remaining:
        """Budgets before anyone was admitted."""
        row = self.row
        return Remaining(row["rem_total"], row["cur_rem"], row["rem_input"], row["rem_chunk"])

    @property
    def policy_words(self) -> str:
        """The policy, and why it is not the one asked for."""
        row = self.row
        if row["fallback"] is None:
            return str(row["active_policy"])
        why = FALLBACKS.get(row["fallback"], row["fallback"])
        return f"{row['configured_policy']} running as {row['active_policy']} ({why})"

    @property
    def stop_words(self) -> str:
        """Why it ended where it did."""
        return ending_words(self.row["stop"], [place.verdict for place in self.looked_at if place.verdict is not None])


def read_pass(run: Run, rank: int, number: int) -> RecordedPass:
    """Read one pass. Raises RunNotFoundError, RunFormatError."""
    rows = run.pass_rows(rank, number)
    places = sorted(map(place_of, rows["decisions"]), key=lambda place: -1 if place.after is None else place.after)
    return RecordedPass(rank, number, rows["passes"][0], next(iter(rows["steps"]), None), tuple(places))


def place_of(row: Row) -> Place:
    """A row of `decisions`."""
    names = [name for name in (row["key_names"] or "").split(",") if name]
    values = json.loads(row["key"]) if row["key"] is not None else []
    return Place(
        rid=row["rid"],
        before=row["place_before"],
        after=row["place_after"],
        key=tuple(zip(names, values, strict=False)),
        matched=row["matched"],
        deprioritized=row["deprioritized"],
        partner=row["partner"],
        shared_len=row["shared_len"],
        verdict=None if row["result"] is None else verdict_of(row),
    )
