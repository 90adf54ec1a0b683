"""What a request waited for: its time in the queue, charged to causes and to other requests.

Every nanosecond between joining the queue and leaving it is charged once, as whole numbers: the parts of a request sum
to its queue time exactly, and a run's ledger is the sum of its requests'. Time goes to the decision that was in force:
what a step decided about a request is why it still waited until the next step began.
"""

from __future__ import annotations

from typing import NamedTuple

CAUSES = {
    "longer_match": "overtaken by requests with a longer match",
    "priority": "overtaken by requests of higher priority",
    "order": "overtaken, as the policy orders",
    "held_back": "held back as a duplicate",
    "memory": "did not fit into memory itself",
    "blocked_head": "behind a request that did not fit into memory",
    "memory_spent": "memory was spent by others",
    "input_budget": "the prefill budget was spent by others",
    "chunk_budget": "the chunk was spent by others",
    "prefill_max_requests": "the prefill batch had all the requests it may",
    "no_slot": "no running slot",
    "batch_full": "the batch was marked full earlier",
    "min_free_slots_delay": "fewer free slots than min_free_slots_delay asks for",
    "delayer": "the prefill delayer said wait",
    "step_in_progress": "a step was under way",
    "deciding": "being admitted",
    "gap": "records are missing",
    "unrecorded": "what was decided about it was not recorded",
}
"""Everything that a part can be charged to, with words for people."""


class Part(NamedTuple):
    """Some of a request's time in the queue."""

    cause: str
    """A key of CAUSES."""
    after: str | None
    """`retracted` or `preempted`: back in the queue after that; None: before it was first admitted."""
    rid: str | None
    """Whom it is charged to: who overtook it, whom it was held back for, who blocked the queue or spent the budget;
    None if to no request."""
    reason: str | None
    """Finer: the verdict's reason behind a refusal, the stop that set the batch-full mark."""
    ns: int
    times: int
    """Steps that decided so; idle and gated ones count each."""
    first_pass: int | None
    last_pass: int | None
    worst_pass: int | None
    """The pass that cost most of it."""
    short: int | None
    """Tokens that were missing, at most; None where no tokens were counted."""


class Span(NamedTuple):
    """A stay in the queue."""

    after: str | None
    """`retracted`, `preempted`, or None: the first one."""
    by: str | None
    """The request that it was preempted for."""
    lost_pass: int | None
    """The pass that preempted it."""
    enter_ns: int
    leave_ns: int
    left_as: str | None
    """`admitted`, or the request's `end_reason` if it ended in the queue; None: it still waits."""
    first_pass: int | None
    """The first pass that looked at the queue with it; None: none did."""
    last_pass: int | None
    """The pass that admitted it, or the last one without."""

    @property
    def ns(self) -> int:
        """Its length."""
        return self.leave_ns - self.enter_ns


class RequestLedger(NamedTuple):
    """A request's time in the queue."""

    rank: int
    rid: str
    spans: tuple[Span, ...]
    parts: tuple[Part, ...]
    """Largest first. They sum to `queue_ns`."""
    lives: int
    """Requests of this name on this rank; this is the last of them."""
    unmeasured: int
    """Stays after a retraction or preemption that were not recorded, at levels below `decisions`."""

    @property
    def queue_ns(self) -> int:
        """All its time in the queue."""
        return sum(span.ns for span in self.spans)


class CauseTotal(NamedTuple):
    """What a cause cost all requests of a run."""

    cause: str
    after: str | None
    ns: int
    requests: int
    """That it was charged to."""
    times: int
    worst_rank: int
    worst_rid: str
    """The request that it cost most."""
    worst_ns: int


class Blame(NamedTuple):
    """What one request cost others by one cause."""

    cause: str
    rank: int
    rid: str
    ns: int
    requests: int
    times: int
    worst_pass: int | None


class RunLedger(NamedTuple):
    """The time in the queue of all requests of a run."""

    queue_ns: int
    requests: int
    causes: tuple[CauseTotal, ...]
    """Largest first. They sum to `queue_ns`."""
    blamed: tuple[Blame, ...]
    """The requests that cost others most, largest first."""
    waited: tuple[tuple[int, str, int], ...]
    """Who waited longest: rank, rid, ns."""
    open: int
    """Requests that still wait."""
    unmeasured: int
    """Stays after a retraction or preemption that were not recorded, at levels below `decisions`."""
