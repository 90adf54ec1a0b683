"""Turns what is seen of another scheduler than ours into the same rows as `RunTracer` makes of ours.

Such a scheduler may form its next batch before the results of the last one are there, so several steps may be open.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.recorder.frame import DECIDED
from schedscope.recorder.hashing import block_size
from schedscope.recorder.rows import PassFacts, Row, StateFacts, decision_hash, pass_row
from schedscope.recorder.sink import Sink
from schedscope.recorder.tracer import RunTracer


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
    retracted: Sequence[str]
    reports: Sequence[Report]


class _Open(NamedTuple):
    """A step whose batch is being computed."""

    record: StepFacts
    state: StateFacts
    seq: int
    formed_ns: int


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
        self._open: deque[_Open] = deque()

    @property
    def attached(self) -> bool:
        """Whether records still go anywhere."""
        return self._sink.attached

    def tick(self) -> int:
        """The moment at which a pass begins: what comes behind it is no input of the pass."""
        return self._next_seq()

    def put_pass(
        self, number: int, seq: int, facts: PassFacts, count: int, packed: bytes, decided_ns: int, view: bytes
    ) -> None:
        """Record a pass.

        Args:
            seq: what `tick` gave when it began.
            count: rows of `decisions` in `packed`.
            packed: what `pack_columns` made of it.
            view: what `pack_observed` made of what the pass could read.
        """
        begin_ns = self._clock_ns()
        self._pass = number
        if not self._keeps_stimuli:
            return
        kept = self._keeps_decisions and number % self._detail.sample == 0
        digest = "" if kept else decision_hash(packed)
        self._put("passes", pass_row(number, self._number, seq, facts, digest, decided_ns))
        self._put(DECIDED, (count, packed) if kept else (0, b""))
        self._put("views", (number, seq, view))
        self._spent_ns += self._clock_ns() - begin_ns

    def begin_step(self, record: StepFacts, state: StateFacts) -> None:
        """A batch was formed, or none."""
        begin_ns = self._clock_ns()
        self._pass = None
        self._number = record.step + 1
        opened = _Open(record, state, self._next_seq(), begin_ns)
        if record.batch_tokens is None:
            self._put_step(opened, begin_ns, None)
        else:
            self._open.append(opened)
        self._flush()  # what led to a forward is handed over before it: it may be long, or the last one
        self._spent_ns += self._clock_ns() - begin_ns

    def end_step(self) -> None:
        """The results of the oldest open step were taken in."""
        if not self._open:
            return
        now_ns = self._clock_ns()
        opened = self._open.popleft()
        self._put_step(opened, now_ns, now_ns - opened.formed_ns)
        self._flush()
        self._spent_ns += self._clock_ns() - now_ns

    def idle(self, step: int, turns: int, now: float, began_ns: int, state: StateFacts) -> None:
        """So many turns, from this step on, had nothing to do."""
        ended_ns = time.monotonic_ns()
        self._number = step + turns
        spent, self._spent_ns = self._spent_ns, 0
        head = (step, self._next_seq(), "idle", None, None, turns, now, began_ns, ended_ns, None, spent)
        self._put("steps", (*head, *state, 0, [], None))
        self._flush()

    def _put_step(self, opened: _Open, end_ns: int, forward_ns: int | None) -> None:
        record = opened.record
        reports = json.dumps([report._asdict() for report in record.reports]) if record.reports else None
        head = (record.step, opened.seq, record.kind, record.gate, record.pass_number, 1, record.now)
        spent, self._spent_ns = self._spent_ns, 0
        row: Row = (
            *head,
            record.begun_ns,
            end_ns,
            forward_ns,
            spent,
            *opened.state,
            record.batch_tokens or 0,
            list(record.retracted),
            reports,
        )
        self._put("steps", row)

    def _step_number(self) -> int:
        return self._number

    def _is_resting(self) -> bool:
        return not self._open
