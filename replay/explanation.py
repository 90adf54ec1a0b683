"""What an explanation holds: facts about a pass, and about a request over all its passes.

They point on: whatever has a rank, a pass or an rid can be followed from there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from schedscope.engine.budget import Remaining
from schedscope.engine.dedup import Duplicate
from schedscope.engine.delayer import Negotiation
from schedscope.engine.verdict import Reason, Verdict
from schedscope.replay.flip import Elsewhere, Flip
from schedscope.replay.ledger import RequestLedger
from schedscope.replay.provenance import Eviction, Origin


class Against(NamedTuple):
    """Why a request stands behind the one directly before it: the first field in which their keys differ."""

    rid: str
    """Who stands before it."""
    field: str
    own: Any
    other: Any


class Place(NamedTuple):
    """A request in the queue of a pass."""

    rid: str
    place: int
    """After sorting, from 0."""
    place_before: int
    key: dict[str, Any]
    """All fields, smallest first."""
    against: Against | None
    """None: it is the first."""
    matched: int
    """Cached tokens as the policy counted them."""
    is_stale: bool
    """They are of an earlier look: in this pass nobody was looked up before admission."""
    origin: Origin | None
    """Who brought what is cached of it now; None: nothing is, or it was not looked up."""
    duplicate: Duplicate | None
    """Set if it was held back."""
    verdict: Verdict | None
    """None: the pass ended before it was looked at."""
    flips: tuple[Flip, ...]
    """What alone would have had it admitted here, each as small as can be."""
    ahead: tuple[Flip, ...]
    """What would have put it before the one that stands before it."""
    elsewhere: tuple[Elsewhere, ...]
    """What other policies would have made of it."""


class Ending(NamedTuple):
    """What ended the admission loop."""

    stop: str
    """`queue_end`, `NO_TOKEN`, `OTHER`, `budget`, `no_slot` or `preempt_failed`."""
    rid: str | None
    """The request whose verdict ended it, or whose chunk spent the budget; None: none did."""
    reason: str | None
    """Of that verdict."""
    need: float | None
    have: float | None
    admitted: bool
    """It was admitted, and the pass ended behind it."""


class Holder(NamedTuple):
    """Memory of a running request."""

    rid: str
    tokens: int
    """Held by it alone, whole pages."""
    reserve: float
    """Kept free for the rest of its output."""


class Pool(NamedTuple):
    """What the KV pool was full of, in tokens."""

    size: int
    free: int
    evictable: int
    """Cached and used by no one."""
    locked: int
    """Cached and used by running requests."""
    held: int
    """Of running requests, not in the cache."""
    reserve: float
    """Kept free for outputs of running requests: it counts as taken."""
    running: int
    """Requests."""
    holders: tuple[Holder, ...]
    """Those that hold most."""


class Mark(NamedTuple):
    """The mark that the batch is full: while it is set, steps end before a pass."""

    set_in: int | None
    """The pass that set it; None: not known. Under one that a gate set there is no pass."""
    stop: str | None
    """How that pass ended; None: not known."""
    rid: str | None
    """The request that did not fit."""
    reason: str | None
    short: int | None
    """Tokens it was short of."""
    until_pass: int | None
    """The next pass; None: none was recorded."""
    steps: int | None
    """Steps that made no pass until then; None: not known."""
    ns: int | None
    """Their time."""


class PassExplanation(NamedTuple):
    """Why a pass came out as it did."""

    rank: int
    number: int
    configured: str
    active: str
    """The policy that sorted."""
    fallback: str | None
    budget: Remaining
    """Before anyone was admitted."""
    chunk: Verdict | None
    """The continuing chunk."""
    places: tuple[Place, ...]
    """The queue after sorting."""
    ending: Ending
    pool: Pool
    mark_before: Mark | None
    """Set when the pass began."""
    mark_after: Mark | None
    """Set by the pass or left set."""
    delayer: Negotiation | None
    known_since: int
    """The pass from which on it is known who cached what."""
    checked: int
    """Claims about what would have been otherwise, each decided again."""

    def place_of(self, rid: str) -> Place | None:
        """A request's place."""
        return next((place for place in self.places if place.rid == rid), None)


class Look(NamedTuple):
    """A pass that tells about a request."""

    why: str
    """`worst`: it cost the request most; `admitted`: it let it in; `last`: the last one it waited in; `grew`, `fell`:
    its cached prefix did most between the pass before and this one."""
    number: int
    configured: str
    active: str
    """The policy that sorted."""
    fallback: str | None
    """Why it was not the configured one."""
    place: Place
    queue_len: int
    ending: Ending
    pool: Pool
    mark_after: Mark | None


class Change(NamedTuple):
    """A request's cached prefix became another between two passes."""

    before_pass: int
    """The pass that still saw the old one."""
    pass_number: int
    before: int
    after: int
    origin: Origin | None
    """Who brought what there is now, where that was looked at."""
    evicted: tuple[Eviction, ...]
    """Leaves that left the cache in between, where that was looked at."""


class RequestExplanation(NamedTuple):
    """Why a request waited."""

    ledger: RequestLedger
    facts: dict[str, Any] | None
    """Its row of `requests`; None: it has not ended."""
    passes: int
    """That it stood in the queue of, as far as decisions were recorded."""
    looks: tuple[Look, ...]
    """In ascending order of passes."""
    changes: tuple[Change, ...]
    """Of its cached prefix: the largest growth and loss, and those before a pass that was looked at."""
    unseen: str | None
    """Why passes could not be decided again."""
    checked: int
    """Claims about what would have been otherwise, each decided again."""


def short_of(ending: Ending | Verdict) -> int | None:
    """Tokens that a refused request was short of; None where no tokens of memory or budget were counted."""
    if ending.need is None or ending.have is None or ending.admitted:
        return None
    missing = ending.need - ending.have
    if ending.reason == Reason.MEMORY_IGNORE_EOS:
        return -int(-missing // 1)
    if ending.reason in {Reason.MEMORY, Reason.MEMORY_FUTURE, Reason.INPUT_BUDGET}:
        return int(missing // 1) + 1
    return None
