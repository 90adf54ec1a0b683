"""Turns what a scheduler tells into rows, and hands them over at the end of each step.

Runs on the scheduler's thread, so it only builds tuples; files are another process's work. Clocks are read here,
never in a decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from schedscope.engine import tokens
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.live import Live
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import EVENT_KINDS, NOTHING_GIVEN, Event, Given, StepRecord, Tracer
from schedscope.engine.view import View
from schedscope.recorder.checkpoint import CheckpointWriter
from schedscope.recorder.frame import DECIDED, HAPPENED, OUTPUTS, PROMPTS, encode, pack_decided
from schedscope.recorder.hashing import Hasher, block_size
from schedscope.recorder.hello import Level
from schedscope.recorder.rows import Decided, PassFacts, Row, decided, decision_hash, pass_facts, state_facts
from schedscope.recorder.sink import Sink

_STIMULI = frozenset({"arrive", "abort", "flush", "finish"})
"""What a re-run has to be told."""
_OF_THE_CACHE = frozenset({"insert", "evict"})
_KINDS: dict[Level, frozenset[str]] = {
    "steps": frozenset(),
    "passes": _STIMULI,
    "decisions": frozenset(EVENT_KINDS) - _OF_THE_CACHE,
    "full": frozenset(EVENT_KINDS),
}
"""Kinds of events that are kept."""

_AFTER_A_GAP = 100
"""Passes at least between two checkpoints that are taken because something was lost."""


def _without_content(kind: str, detail: dict[str, Any]) -> dict[str, Any]:
    """An event's detail without token ids and texts of a client. A re-run needs none of them."""
    if kind == "arrive":
        return {**detail, "stop": [], "stop_token_ids": []}
    return {**detail, "detail": None} if kind == "finish" and detail["kind"] == "stop" else detail


def given_text(given: Given) -> str | None:
    """The column `given` of `steps`."""
    if given is NOTHING_GIVEN:
        return None
    return json.dumps({"entry_times": dict(given.entry_times), "random_state": given.random_state})


class Lived(Protocol):
    """What the row of a request tells of its life."""

    @property
    def rid(self) -> str: ...

    prompt_len: int
    output_len: int
    cached_tokens: int
    retractions: int
    preemptions: int


class RunTracer(Tracer):
    """Records one rank.

    Args:
        sink: where frames go; it never raises and never blocks for long.
        checkpoint_every: passes between checkpoints. None: the companion takes them, and this only where its records
            have a gap, over which it can't follow.
        clock_ns: monotonic nanoseconds, for people to read.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        checkpoint_every: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sink = sink
        self._detail = sink.detail
        self._keeps_stimuli = self._detail.level != "steps"
        self.keeps_tokens = self._keeps_stimuli and self._detail.tokens != "none"
        self._hides = self._detail.tokens != "full"
        """Whether token ids and texts of clients are kept out of the log."""
        self._sample = self._detail.sample
        self._keeps_decisions = self._detail.level in {"decisions", "full"}
        self.kinds = _KINDS[self._detail.level]
        """Kinds of events that are recorded."""
        self._hashers: dict[str, Hasher] = {}
        self._block = 1
        """Tokens that hashing keeps together."""
        self._checkpoint_every = checkpoint_every
        self._clock_ns = clock_ns
        self._scheduler: Scheduler | None = None
        self._rows: dict[str, list[Any]] = {}
        self._memory = bytearray()
        """In which they are packed."""
        self._seq = 0
        self._pass: int | None = None
        self._decide_began_ns = 0
        self._launched_ns: dict[int, int] = {}
        """When batches in flight were handed to the model, by step."""
        self._model_free_ns = 0
        """When the last tokens came: the model may have begun with the next batch."""
        self.spent_ns = 0
        """On recording, since the last step's row."""
        self._step: tuple[StepRecord, int, tuple[Any, ...]] | None = None
        self._times: dict[str, dict[str, int]] = {}
        self._last_checkpoint = 0
        self._lost = 0
        """Frames that were dropped up to the last checkpoint."""

    def attach(self, scheduler: Scheduler) -> None:
        """Learn whose state checkpoints hold."""
        self._scheduler = scheduler
        if self._detail.tokens == "hashed":
            self._block = block_size(scheduler.config.to_dict())

    # ---- requests and cache --------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Note an event, and when a request reached each station."""
        kind, time, rid, count, node, detail = event
        if rid is not None:
            if kind == "arrive":
                self._times[rid] = {}
            times = self._times.get(rid)
            if times is not None:
                times.setdefault(kind, self._clock_ns())
        if kind not in self.kinds:
            return
        if detail is not None and self._hides:
            detail = _without_content(kind, detail)
        row = (self._next_seq(), self._step_number(), self._pass, time, kind, rid, count, node, detail)
        self._put(HAPPENED, row)

    def on_prompt(self, live: Live) -> None:
        """Keep a prompt's tokens, once."""
        if self.keeps_tokens:
            self.put_prompt(live.rid, live.request.prompt)

    def put_prompt(self, rid: str, prompt: bytes) -> None:
        """The same, packed by `schedscope.engine.tokens`."""
        if self._detail.tokens == "hashed":
            hasher = self._hashers[rid] = Hasher(self._sink.key, self._block)
            prompt = hasher.hash(prompt)
        self._put(PROMPTS, (self._seq, self._step_number(), rid, 0, prompt))

    def on_outputs(self, lives: Sequence[Live], sampled: Sequence[int]) -> None:
        """Keep output tokens."""
        rids, positions = [live.request.rid for live in lives], [live.prompt_len + live.output_len for live in lives]
        self.put_outputs(rids, positions, sampled)

    def put_outputs(self, rids: Sequence[str], positions: Sequence[int], sampled: Sequence[int]) -> None:
        """The same, column by column."""
        if not sampled or not self.keeps_tokens:
            return
        if self._detail.tokens == "hashed":
            pairs = zip(rids, sampled, strict=True)
            sampled = [tokens.decode(self._hashers[rid].hash(tokens.encode((id_,))))[0] for rid, id_ in pairs]
        self._put(OUTPUTS, (self._seq, self._step_number(), rids, positions, sampled))

    def on_end(self, live: Live, kind: str, detail: Any) -> None:
        """Write the row of a request that is gone."""
        request = live.request
        sampling = request.sampling
        asked = sampling.max_new_tokens, sampling.ignore_eos
        named = request.priority, request.routing_key, request.extra_key, request.cache_salt
        self.put_request(live, (*asked, *named), kind, detail)

    def put_request(self, live: Lived, asked: Row, kind: str, detail: Any) -> None:
        """Write the row of a request that is gone.

        Args:
            asked: the columns of `requests` from `max_new_tokens` to `cache_salt`.
        """
        if kind == "stop" and self._hides:
            detail = None
        times = self._times.pop(live.rid, {})
        self._hashers.pop(live.rid, None)
        now = self._clock_ns()
        self._put(
            "requests",
            (
                live.rid,
                live.prompt_len,
                live.output_len,
                live.cached_tokens,
                *asked,
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
        if self._is_resting():
            self._flush()  # there may be no step for a long time

    def _is_resting(self) -> bool:
        return self._step is None and not (self._scheduler and self._scheduler.busy)

    # ---- steps ---------------------------------------------------------------------------------------------

    def on_decide(self) -> None:
        """Start a step's clock."""
        self._decide_began_ns = self._clock_ns()

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        """Record a decision."""
        begin_ns = self._clock_ns()
        decided_ns = begin_ns - self._decide_began_ns
        self._pass = number
        if not self._keeps_stimuli:
            return
        facts = pass_facts(view, plan, random_state)
        self._put_pass(number, self._step_number(), self._next_seq(), decided_ns, facts, decided(plan, self._block))
        self.spent_ns += self._clock_ns() - begin_ns

    def _put_pass(self, number: int, step: int, seq: int, decide_ns: int, facts: PassFacts, told: Decided) -> None:
        """Keep a pass, packed where it is handed over."""
        digest, told_ = ("", told) if self._keeps(number) else (decision_hash(pack_decided(told)), None)
        self._put(DECIDED, (number, step, seq, decide_ns, facts, digest, told.count, told_))

    def _keeps(self, number: int) -> bool:
        """Whether what a pass decided is kept."""
        return self._keeps_decisions and number % self._sample == 0

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        """Note the state a step leaves; it ends with `on_committed`, if a batch is due."""
        begin_ns = self._clock_ns()
        self._step = (record, begin_ns, state_facts(state))
        if record.due is None:
            if record.batch is not None:
                self._launched_ns[record.step] = begin_ns
            self.on_committed(state)
            return
        self._flush()  # what led to a forward is handed over before it: it may be long, or the last one
        flushed_ns = self._clock_ns()
        if record.batch is not None:
            self._launched_ns[record.step] = flushed_ns
        self.spent_ns += flushed_ns - begin_ns

    def on_committed(self, state: SchedulerState) -> None:
        """Finish the step's row and hand everything over."""
        del state
        assert self._step is not None
        record, formed_ns, facts = self._step
        now_ns = self._clock_ns()
        batch = record.batch
        committed = None if record.due is None else record.due.step
        self._put(
            "steps",
            (
                record.step,
                self._next_seq(),
                record.kind,
                record.gate,
                record.pass_number,
                record.turns,
                record.now,
                self._decide_began_ns if record.kind != "idle" else formed_ns,
                now_ns,
                self._forward_ns(committed, now_ns),
                self.spent_ns,
                *facts,
                0 if batch is None else batch.computed,
                committed,
                list(record.retracted),
                json.dumps([report._asdict() for report in record.reports]) if record.reports else None,
                given_text(record.given),
            ),
        )
        self._step = None
        self._pass = None
        self._checkpoint()
        self._flush()
        self.spent_ns = self._clock_ns() - now_ns

    def _forward_ns(self, committed: int | None, now_ns: int) -> int | None:
        """How long the model took for a batch whose tokens are there now; it computes one at a time."""
        launched_ns = None if committed is None else self._launched_ns.pop(committed, None)
        if launched_ns is None:
            return None
        began_ns, self._model_free_ns = max(launched_ns, self._model_free_ns), now_ns
        return now_ns - began_ns

    def _checkpoint(self) -> None:
        scheduler = self._scheduler
        if scheduler is None or not self._needs_checkpoint(scheduler.passes - self._last_checkpoint):
            return
        self._last_checkpoint = scheduler.passes
        self._lost = self._sink.dropped
        self._put("checkpoints", CheckpointWriter().write(scheduler, self._next_seq(), alone=True))

    def _needs_checkpoint(self, passes: int) -> bool:
        """Whether to take one, so many passes behind the last one. Never where token ids are kept out of the log."""
        if not self._keeps_stimuli or self._detail.tokens != "full":
            return False
        if self._checkpoint_every is not None:
            return passes >= self._checkpoint_every
        return self._sink.dropped > self._lost and passes >= _AFTER_A_GAP

    # ---- rows ----------------------------------------------------------------------------------------------

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _step_number(self) -> int:
        scheduler = self._scheduler
        if self._step is not None:
            return self._step[0].step
        return 0 if scheduler is None else scheduler.steps

    def _put(self, table: str, row: Any) -> None:
        self._rows.setdefault(table, []).append(row)

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, {}
            self._hand_over(rows)

    def _hand_over(self, rows: dict[str, list[Any]]) -> None:
        self._sink.write(encode(rows, self._memory))

    def close(self) -> None:
        """Hand over what is left."""
        self._flush()
        self._sink.close()
