"""Turns what is seen of another scheduler than ours into the same rows as `RunTracer` makes of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.engine.tracer import NOTHING_GIVEN, Given
from schedscope.recorder.hashing import block_size
from schedscope.recorder.rows import Decided, PassFacts, Row, StateFacts
from schedscope.recorder.sink import Sink
from schedscope.recorder.tracer import RunTracer, given_text


class StepFacts(NamedTuple):
    """A turn of the loop, after its batch was formed. See the columns of `steps`."""

    step: int
    now: float
    kind: str
    gate: str | None
    pass_number: int | None
    begun_ns: int
    batch_tokens: int | None
    """None: there is nothing to compute."""
    committed: int | None
    """The step whose results this one takes in at its end; None: there are none."""
    retracted: Sequence[str]
    reports: Sequence[Report]
    given: Given


class SourceTracer(RunTracer):
    """Records one rank of another scheduler.

    Args:
        sink: where frames go; it never raises and never blocks for long.
        config: what the other scheduler does, as ours would be told.
    """

    def __init__(self, sink: Sink, config: SchedulerConfig) -> None:
        super().__init__(sink)
        if self._detail.tokens == "hashed":
            self._block = block_size(config.to_dict())
        self._number = 0
        self._formed: tuple[StepFacts, StateFacts] | None = None
        """The step that has not ended."""

    def detach(self, error: BaseException) -> None:
        """Record nothing any more."""
        self._sink.detach(error)

    def spend(self, ns: int) -> None:
        """Note time that recording took; the next row of `steps` tells it."""
        self._spent_ns += ns

    def tick(self) -> int:
        """The moment at which a pass begins: what comes behind it is no input of the pass."""
        return self._next_seq()

    def put_pass(self, number: int, seq: int, facts: PassFacts, told: Decided, decided_ns: int, view: bytes) -> None:
        """Record a pass.

        Args:
            seq: what `tick` gave when it began.
            view: what `pack_observed` made of what the pass could read.
        """
        self._pass = number
        if not self._keeps_stimuli:
            return
        self._put_pass(number, self._number, seq, decided_ns, facts, told)
        self._put("views", (number, seq, view))

    def begin_step(self, record: StepFacts, state: StateFacts) -> None:
        """A batch was formed, or none. The step ends with `end_step`, if there are results to take in."""
        self._pass = None
        self._number = record.step
        self._formed = record, state
        if record.committed is None:
            self.end_step()
        self._flush()  # what led to a forward is handed over before it: it may be long, or the last one
        if record.batch_tokens is not None:
            self._launched_ns[record.step] = self._clock_ns()

    def end_step(self) -> None:
        """The results that were due were taken in. They are handed over with what the next turn decides."""
        if self._formed is None:
            return
        (record, state), self._formed = self._formed, None
        self._put_step(record, state)

    def idle(self, step: int, turns: int, now: float, began_ns: int, state: StateFacts) -> None:
        """So many turns, from this step on, had nothing to do."""
        record = StepFacts(step, now, "idle", None, None, began_ns, None, None, (), (), NOTHING_GIVEN)
        self._put_step(record, state, turns)

    def _put_step(self, record: StepFacts, state: StateFacts, turns: int = 1) -> None:
        now_ns = self._clock_ns()
        spent, self._spent_ns = self._spent_ns, 0
        row: Row = (
            record.step,
            self._next_seq(),
            record.kind,
            record.gate,
            record.pass_number,
            turns,
            record.now,
            record.begun_ns,
            now_ns,
            self._forward_ns(record.committed, now_ns),
            spent,
            *state,
            record.batch_tokens or 0,
            record.committed,
            list(record.retracted),
            json.dumps([report._asdict() for report in record.reports]) if record.reports else None,
            given_text(record.given),
        )
        self._put("steps", row)
        self._number = record.step + turns

    def hand_over(self) -> None:
        """Hold nothing back: there may be no step for a long time."""
        self._flush()

    def hand_over_at_rest(self) -> None:
        """The same between two steps."""
        if self._is_resting():
            self._flush()

    def _step_number(self) -> int:
        return self._number

    def _is_resting(self) -> bool:
        return self._formed is None
