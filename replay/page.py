"""A pass as a screen shows it: who stood where, with which key, and what was said about whom.

A page is made of what was recorded, which takes milliseconds however long the run, or of a decision made again, which
is exact for any level of detail and any policy. Both give the same page where the replay is identical.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from schedscope.engine.budget import Remaining
from schedscope.engine.decision import Plan
from schedscope.engine.ordering import POLICIES
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.recorder.rows import key_fields
from schedscope.replay.describe import ending_words, key_value
from schedscope.replay.moment import Moment

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


class Candidate(NamedTuple):
    """A waiting request in a pass."""

    rid: str
    before: int | None
    """Place before sorting."""
    after: int
    key: tuple[str, ...]
    """The key's values in words, the decisive one first."""
    matched: int | None
    """Tokens; None: the policy didn't look."""
    held_back: bool
    partner: str | None
    shared_len: int | None
    verdict: Verdict | None
    """None: not looked at."""

    @property
    def fate(self) -> str:
        """`admitted`, `refused`, `held_back` or `waiting`, a name of the palette's verdicts."""
        if self.verdict is not None:
            return "admitted" if self.verdict.admitted else "refused"
        return "held_back" if self.held_back else "waiting"


class Facts(NamedTuple):
    """What holds for a pass as a whole."""

    rank: int
    number: int
    configured: str
    active: str
    fallback: str | None
    running: int
    """Requests in the running batch before it."""
    budget: Remaining
    """Before anyone was looked at."""
    stop: str
    preempted: tuple[str, ...]
    chunk_limit: int | None
    batch_is_full: bool
    """The mark after it."""
    delayer_allow: bool | None
    """None: the prefill delayer is off."""
    delayer_reason: str | None
    begin_ns: int | None
    """When its step began; None: unknown."""
    now: float
    """The scheduler's clock, seconds."""


class Page:
    """A pass. `candidates` stand in the order after sorting."""

    def __init__(
        self,
        facts: Facts,
        key_names: tuple[str, ...],
        candidates: tuple[Candidate, ...],
        chunk: Verdict | None,
        reports: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        self.facts = facts
        self.key_names = key_names
        self.candidates = candidates
        self.chunk = chunk
        """What the continuing chunk got."""
        self.reports = reports
        """What each rank told the prefill delayer, this one first; empty if it is off."""

    @cached_property
    def places(self) -> dict[str, int]:
        """Place after sorting, by rid."""
        return {candidate.rid: place for place, candidate in enumerate(self.candidates)}

    def find(self, rid: str | None) -> Candidate | None:
        """A waiting request; None: it is not in the queue."""
        place = None if rid is None else self.places.get(rid)
        return None if place is None else self.candidates[place]

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """In the order in which they were given, the continuing chunk's first."""
        chunk = () if self.chunk is None else (self.chunk,)
        return (*chunk, *(c.verdict for c in self.candidates if c.verdict is not None))

    @property
    def admitted(self) -> tuple[Verdict, ...]:
        """The prefill batch."""
        return tuple(verdict for verdict in self.verdicts if verdict.admitted)

    @property
    def held_back(self) -> int:
        """Requests held back as duplicates."""
        return sum(candidate.held_back for candidate in self.candidates)

    @property
    def end(self) -> str:
        """Why it ended where it did, in one sentence."""
        return ending_words(self.facts.stop, self.verdicts)

    def left_before(self, place: int) -> Remaining:
        """The budgets when the request at a place was looked at, or would have been."""
        left = self.facts.budget if self.chunk is None else self.chunk.remaining
        for candidate in self.candidates[:place]:
            if candidate.verdict is None:
                break
            left = candidate.verdict.remaining
        return left

    def same_outcome(self, other: Page) -> bool:
        """Whether order, keys and verdicts are the same."""
        return (self.candidates, self.chunk, self.facts.stop) == (other.candidates, other.chunk, other.facts.stop)


def page_of_rows(rows: Rows) -> Page | None:
    """A page from `Run.pass_rows`; None: the decisions of this pass were not recorded, so it has to be re-run."""
    row = rows["passes"][0]
    decided = rows["decisions"]
    if not decided and (row["queue_len"] or row["chunked_in"] is not None):
        return None
    step = next((step for step in rows["steps"] if step["pass"] == row["pass"]), None)
    names = next((d["key_names"] for d in decided if d["key_names"]), None)
    looks = POLICIES[row["active_policy"]].cache_aware if row["active_policy"] in POLICIES else True
    chunk = next((verdict_of(d) for d in decided if d["place_after"] is None), None)
    queued = sorted((d for d in decided if d["place_after"] is not None), key=lambda d: d["place_after"])
    return Page(
        facts=Facts(
            rank=row["rank"],
            number=row["pass"],
            configured=row["configured_policy"],
            active=row["active_policy"],
            fallback=row["fallback"],
            running=row["running"],
            budget=Remaining(row["rem_total"], row["cur_rem"], row["rem_input"], row["rem_chunk"]),
            stop=row["stop"],
            preempted=tuple(row["preempted"]),
            chunk_limit=row["chunk_limit"],
            batch_is_full=row["batch_is_full"],
            delayer_allow=row["delayer_allow"],
            delayer_reason=row["delayer_reason"],
            begin_ns=None if step is None else step["start_ns"],
            now=row["now"],
        ),
        key_names=tuple(names.split(",")) if names else (),
        candidates=tuple(_candidate(d, looks) for d in queued),
        chunk=chunk,
        reports=_reports(row["delayer_report"], None if step is None else step["reports"]),
    )


def page_of_plan(moment: Moment, plan: Plan, rank: int, begin_ns: int | None = None) -> Page | None:
    """A page from a decision made again; None: a gate ended the step, so there was no pass."""
    if plan.ordering is None or plan.admission is None:
        return None
    ordering, admission, negotiation = plan.ordering, plan.admission, plan.negotiation
    verdicts = {verdict.rid: verdict for verdict in admission.verdicts if verdict.result is not Result.CHUNK}
    looks = POLICIES[ordering.active].cache_aware if ordering.active in POLICIES else True
    names = key_fields(ordering.ranked[0].key) if ordering.ranked else ()
    candidates = tuple(
        Candidate(
            rid=ranked.request.rid,
            before=ranked.position,
            after=place,
            key=tuple(key_value(value) for value in ranked.key[: len(names)]),
            matched=ranked.request.matched if looks else None,
            held_back=ranked.duplicate is not None,
            partner=None if ranked.duplicate is None else ranked.duplicate.partner,
            shared_len=None if ranked.duplicate is None else ranked.duplicate.shared_len,
            verdict=verdicts.get(ranked.request.rid),
        )
        for place, ranked in enumerate(ordering.ranked)
    )
    reports: tuple[Mapping[str, Any], ...] = ()
    if negotiation is not None:
        reports = tuple(report._asdict() for report in (negotiation.report, *moment.view.reports))
    return Page(
        facts=Facts(
            rank=rank,
            number=moment.number,
            configured=ordering.configured,
            active=ordering.active,
            fallback=ordering.fallback,
            running=len(moment.view.running),
            budget=admission.budget,
            stop=admission.stop,
            preempted=admission.preempted,
            chunk_limit=admission.chunk_limit,
            batch_is_full=plan.batch_is_full,
            delayer_allow=None if negotiation is None else negotiation.allow,
            delayer_reason=None if negotiation is None else negotiation.reason,
            begin_ns=begin_ns,
            now=moment.view.now,
        ),
        key_names=names,
        candidates=candidates,
        chunk=next((v for v in admission.verdicts if v.result is Result.CHUNK), None),
        reports=reports,
    )


def _candidate(row: Mapping[str, Any], looks: bool) -> Candidate:
    values = json.loads(row["key"]) if row["key"] else []
    return Candidate(
        rid=row["rid"],
        before=row["place_before"],
        after=row["place_after"],
        key=tuple(key_value(_number(value)) for value in values),
        matched=row["matched"] if looks else None,
        held_back=row["deprioritized"],
        partner=row["partner"],
        shared_len=row["shared_len"],
        verdict=None if row["result"] is None else verdict_of(row),
    )


def _number(value: Any) -> Any:
    """A key's value as the policy had it."""
    if isinstance(value, list):
        return tuple(map(_number, value))
    return float(value) if value in ("inf", "-inf") else value


def verdict_of(row: Mapping[str, Any]) -> Verdict:
    """The verdict in a row of `decisions` that was looked at."""
    return Verdict(
        rid=row["rid"],
        result=Result(row["result"]),
        reason=Reason(row["reason"]),
        prefix_len=row["admit_prefix_len"],
        extend_len=row["extend_len"],
        chunked=row["chunked"],
        need=row["need"],
        have=row["have"],
        remaining=Remaining(row["rem_total"], row["cur_rem"], row["rem_input"], row["rem_chunk"]),
        preempted=tuple(row["preempted"]),
    )


def _reports(own: str | None, others: str | None) -> tuple[Mapping[str, Any], ...]:
    if own is None:
        return ()
    return (json.loads(own), *(json.loads(others) if others else ()))
