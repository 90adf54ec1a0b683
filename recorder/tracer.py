"""Turns what a scheduler tells into rows, and hands them over at the end of each step.

Runs on the scheduler's thread, so it only builds tuples; files are another process's work. Clocks are read here,
never in a decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.live import Live
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import Event, StepRecord, Tracer
from schedscope.engine.view import View
from schedscope.recorder.checkpoint import CheckpointWriter
from schedscope.recorder.frame import encode_frame
from schedscope.recorder.rows import Row, decision_hash, decision_rows, pass_row, state_facts
from schedscope.recorder.sink import Sink

CHECKPOINT_EVERY = 500
"""Passes between checkpoints: what it takes at most to rebuild any pass."""


class RunTracer(Tracer):
    """Records one rank.

    Args:
        sink: where frames go; it never raises and never blocks for long.
        checkpoint_every: passes between checkpoints.
        clock_ns: monotonic nanoseconds, for people to read.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        checkpoint_every: int = CHECKPOINT_EVERY,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sink = sink
        self._checkpoint_every = checkpoint_every
        self._clock_ns = clock_ns
        self._scheduler: Scheduler | None = None
        self._rows: dict[str, list[Row]] = {}
        self._seq = 0
        self._pass: int | None = None
        self._decide_ns = 0
        self._step: tuple[StepRecord, int, tuple[Any, ...]] | None = None
        self._times: dict[str, dict[str, int]] = {}
        self._last_checkpoint = 0

    def attach(self, scheduler: Scheduler) -> None:
        """Learn whose state checkpoints hold."""
        self._scheduler = scheduler

    # ---- requests and cache --------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Note an event, and when a request reached each station."""
        if event.rid is not None:
            if event.kind == "arrive":
                self._times[event.rid] = {}
            times = self._times.get(event.rid)
            if times is not None:
                times.setdefault(event.kind, self._clock_ns())
        detail = None if event.detail is None else json.dumps(event.detail, ensure_ascii=False)
        self._put(
            "events",
            (
                self._next_seq(),
                self._step_number(),
                self._pass,
                event.time,
                event.kind,
                event.rid,
                event.tokens,
                event.node,
                detail,
            ),
        )
        if self._step is None and event.kind in {"queue", "abort", "flush"}:
            self._flush()

    def on_prompt(self, live: Live) -> None:
        """Keep a prompt's tokens, once."""
        self._put("tokens", (self._seq, self._step_number(), live.rid, 0, tokens.decode(live.request.prompt)))

    def on_output(self, live: Live, token: int) -> None:
        """Keep an output token."""
        self._put("tokens", (self._seq, self._step_number(), live.rid, live.length - 1, [token]))

    def on_end(self, live: Live, kind: str, detail: Any) -> None:
        """Write the row of a request that is gone."""
        times = self._times.pop(live.rid, {})
        request = live.request
        now = self._clock_ns()
        self._put(
            "requests",
            (
                live.rid,
                live.prompt_len,
                live.output_len,
                live.cached_tokens,
                request.sampling.max_new_tokens,
                request.sampling.ignore_eos,
                request.priority,
                request.routing_key,
                request.extra_key,
                request.cache_salt,
                times.get("arrive", now),
                times.get("queue"),
                times.get("admit"),
                times.get("first_token"),
                now,
                live.retractions,
                live.preemptions,
                kind,
                None if detail is None else str(detail),
            ),
        )
        if self._step is None:
            self._flush()

    # ---- steps ---------------------------------------------------------------------------------------------

    def on_decide(self) -> None:
        """Start a step's clock."""
        self._decide_ns = self._clock_ns()

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        """Record a decision."""
        decided_ns = self._clock_ns() - self._decide_ns
        self._pass = number
        rows = decision_rows(number, plan)
        self._rows.setdefault("decisions", []).extend(rows)
        digest = decision_hash(rows)
        step = self._step_number()
        row = pass_row(number, step, self._next_seq(), view, plan, random_state, digest, decided_ns)
        self._put("passes", row)

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        """Note the state a step leaves; its times follow with `on_committed`."""
        facts = tuple(state_facts(state).values())
        self._step = (record, self._clock_ns(), facts)
        if record.batch is None:
            self.on_committed(state)

    def on_committed(self, state: SchedulerState) -> None:
        """Finish the step's row and hand everything over."""
        del state
        assert self._step is not None
        record, formed_ns, facts = self._step
        now_ns = self._clock_ns()
        batch = record.batch
        self._put(
            "steps",
            (
                record.step,
                self._next_seq(),
                record.kind,
                record.gate,
                record.pass_number,
                1,
                record.now,
                self._decide_ns if record.kind != "idle" else formed_ns,
                now_ns,
                None if batch is None else now_ns - formed_ns,
                *facts,
                0 if batch is None else sum(m.end - m.start for m in batch.members),
                list(record.retracted),
                json.dumps([report._asdict() for report in record.reports]) if record.reports else None,
            ),
        )
        self._step = None
        self._pass = None
        self._checkpoint()
        self._flush()

    def _checkpoint(self) -> None:
        scheduler = self._scheduler
        if scheduler is None or scheduler.passes - self._last_checkpoint < self._checkpoint_every:
            return
        self._last_checkpoint = scheduler.passes
        self._put("checkpoints", CheckpointWriter().write(scheduler, self._next_seq(), alone=True))

    # ---- rows ----------------------------------------------------------------------------------------------

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _step_number(self) -> int:
        scheduler = self._scheduler
        if self._step is not None:
            return self._step[0].step
        return 0 if scheduler is None else scheduler.steps

    def _put(self, table: str, row: Row) -> None:
        self._rows.setdefault(table, []).append(row)

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, {}
            self._hand_over(rows)

    def _hand_over(self, rows: dict[str, list[Row]]) -> None:
        self._sink.write(encode_frame(rows))

    def close(self) -> None:
        """Hand over what is left."""
        self._flush()
        self._sink.close()
