"""The seam between a scheduler and whoever records it: what happened is told where it is done.

A tracer only listens. It gets frozen values, or state that it must not keep or change, and its own clock; nothing
it does can reach a decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from schedscope.engine.batch import Batch, InFlight
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.delayer import Report
from schedscope.engine.live import Live
from schedscope.engine.state import SchedulerState
from schedscope.engine.view import View


class Event(NamedTuple):
    """Something that happened to a request or to the cache."""

    kind: str
    """One of EVENT_KINDS."""
    time: float
    """Scheduler's clock, seconds."""
    rid: str | None = None
    tokens: int | None = None
    node: int | None = None
    """Cache node."""
    detail: dict[str, Any] | None = None


EVENT_KINDS = {
    "arrive": "a request reached the scheduler (stimulus); detail: all its parameters",
    "abort": "a client took its request back (stimulus)",
    "flush": "the prefix cache was emptied (stimulus)",
    "queue": "it joined the waiting queue",
    "refuse": "it was turned away, or pushed out of a full queue; detail: message",
    "timeout": "it waited longer than allowed and was aborted",
    "admit": "it joined a prefill batch; tokens: cached prefix; detail: extend",
    "first_token": "its first output token",
    "finish": "it ended (stimulus: the reason comes from outside); tokens: output; detail: kind, what matched",
    "retract": "it lost its memory to decoding and went back to the queue; tokens: output so far",
    "preempt": "it lost its memory to a request of higher priority; tokens: output so far",
    "insert": "its tokens were kept in the cache; tokens: how many; node: where they end",
    "evict": "a leaf left the cache; tokens: how many; node: which",
}


class Given(NamedTuple):
    """What a step is told from outside beside its clock, where a server is followed that reads others, and chance."""

    entry_times: Mapping[str, float] = MappingProxyType({})
    """When requests that this step retracts or preempts joined the queue again, by rid; seconds. The others: now, or
    as little later as makes each the last."""
    random_state: RandomState | None = None
    """The random generator's state before the step; None: as the pass before left it."""


NOTHING_GIVEN = Given()


class StepRecord(NamedTuple):
    """One turn of the scheduler's loop, after its batch was formed."""

    step: int
    now: float
    kind: str
    """`prefill`, `decode`, `mixed`, `none` or `idle`."""
    gate: str | None
    pass_number: int | None
    batch: Batch | None
    due: InFlight | None
    """Whose tokens are taken in before the next step: the same batch, with overlap the one before."""
    retracted: tuple[str, ...]
    reports: tuple[Report, ...]
    """What other ranks told the prefill delayer."""
    given: Given
    turns: int = 1
    """Idle steps in a row that it stands for."""


class Tracer:
    """Listens to one rank's scheduler. This one ignores everything; override what you want to hear."""

    def on_event(self, event: Event) -> None:
        """A request's or the cache's life."""

    def on_prompt(self, live: Live) -> None:
        """A request's prompt, once."""

    def on_decide(self) -> None:
        """A step is about to be decided; for clocks."""

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        """A pass was decided, and not carried out yet."""

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        """A step's batch is formed; the forward comes next, and `on_committed` if a batch is due."""

    def on_outputs(self, lives: Sequence[Live], sampled: Sequence[int]) -> None:
        """Tokens, one for each request, are about to be taken in."""

    def on_end(self, live: Live, kind: str, detail: Any) -> None:
        """A request is gone."""

    def on_committed(self, state: SchedulerState) -> None:
        """The step is over: all tokens that were due are taken in."""
