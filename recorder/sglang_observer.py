"""Watches a scheduler of SGLang at work, and records what it does. It reads; it never changes anything.

Its methods are called by the hooks of `schedscope.recorder.sglang_plugin`, before or after the method of SGLang that
each is named for. They run on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import gate
from schedscope.engine.live import Live
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import describe_request
from schedscope.engine.tokens import MAX_TOKEN_ID
from schedscope.engine.tracer import NOTHING_GIVEN, Event, Given
from schedscope.engine.verdict import Result
from schedscope.recorder.observed import ObservedChunk
from schedscope.recorder.rows import StateFacts
from schedscope.recorder.sglang_pass import Batch, Entered, Pass, PassWatch, Req
from schedscope.recorder.sink import Sink
from schedscope.recorder.source_tracer import SourceTracer, StepFacts

IDLE_NS = 1_000_000_000
"""Idle turns are noted at least so often, as one step."""
_ENDS = {"FINISH_ABORT": "abort", "FINISH_LENGTH": "length"}


class _Idle(NamedTuple):
    """Turns in a row that had nothing to do."""

    began_ns: int
    began: float
    """Seconds on the scheduler's clock."""
    state: StateFacts


class Observer:
    """Records one scheduler.

    Args:
        scheduler: `sglang.srt.managers.scheduler.Scheduler`, built.
        config: what `schedscope.recorder.sglang_config` read off it.
        sink: where records go.
        place: of this rank among the rows that ranks tell each other for the prefill delayer.
    """

    def __init__(self, scheduler: Any, config: SchedulerConfig, sink: Sink, place: int = 0) -> None:
        self._scheduler = scheduler
        self._config = config
        self._pool = scheduler.token_to_kv_pool_allocator
        self._cache = scheduler.tree_cache
        self._tracer = SourceTracer(sink, self._config)
        self._lives: dict[str, Live] = {}
        self.passes = PassWatch(scheduler, config, self._tracer, place)
        self._step = 0
        self._now = 0.0
        self._begun_ns = 0
        self._idle: _Idle | None = None
        self._idle_turns = 0
        self._in_flight: deque[int] = deque()
        """Steps whose batches are being computed, oldest first."""
        self._gate: str | None = None
        self._full_since: int | None = None
        self._arriving: str | None = None
        """The request that is being offered to the queue for the first time."""
        self._entry_times: dict[str, float] = {}
        """Of requests that this step sent back to the queue."""
        self._retracted: list[str] = []
        self._forms_pass: int | None = None
        self._before_sampling: list[int] = []

    def spend(self, ns: int) -> None:
        """Note time that was spent in here."""
        self._tracer.spend(ns)

    def detach(self, error: BaseException) -> None:
        """Record nothing any more."""
        self._tracer.detach(error)

    def close(self) -> None:
        """Hand over what is left."""
        self._end_idle()
        self._tracer.close()

    # ---- requests ------------------------------------------------------------------------------------------

    def arrives(self, req: Req) -> None:
        """Before it joins the queue for the first time."""
        self._end_idle()
        if req.rid in self._lives:
            return
        request = _request(req)
        self._lives[req.rid] = Live(request, req.priority or 0)
        self._arriving = req.rid

    def _tell_arrival(self, entry_time: float | None) -> None:
        """The clock that the queue read for a request is known only once it has joined."""
        if self._arriving is None:
            return
        live, self._arriving = self._lives[self._arriving], None
        detail = describe_request(live.request)
        if entry_time is not None:
            detail["entry_time"] = entry_time
        self._tracer.on_event(Event("arrive", time.perf_counter(), live.rid, live.prompt_len, detail=detail))
        self._tracer.on_prompt(live)

    def joined(self, req: Req) -> None:
        """After it was offered to the queue."""
        queue = self._scheduler.waiting_queue
        if not queue or queue[-1] is not req:
            return
        entry_time = req.time_stats.wait_queue_entry_time
        if self._arriving is not None:
            self._tell_arrival(entry_time)
        else:
            self._entry_times[req.rid] = entry_time
        detail = {"processed_tokens": req.arrival_processed_tokens}
        self._tracer.on_event(Event("queue", entry_time, req.rid, detail=detail))
        self._tracer.hand_over_at_rest()

    def aborts(self, rid: str, everyone: bool) -> None:
        """Before requests are taken back: those whose ids begin so, or all."""
        self._end_idle()
        for own in [own for own in self._lives if everyone or own.startswith(rid)]:
            self._tracer.on_event(Event("abort", time.perf_counter(), own))

    def turned_away(self, req: Req, message: str | None) -> None:
        """After a request ended outside of a batch."""
        self._tell_arrival(None)  # it may be what pushed another one out
        live = self._lives.pop(req.rid, None)
        if live is not None:
            self._tracer.on_end(live, "abort", message)

    def flushed(self) -> None:
        """After the prefix cache was emptied."""
        self._end_idle()
        self._tracer.on_event(Event("flush", time.perf_counter()))

    def retracted(self, reqs: Sequence[Req]) -> None:
        """After running requests lost their memory."""
        for req in reqs:
            self._lives[req.rid].retractions += 1
            self._retracted.append(req.rid)
            self._tracer.on_event(Event("retract", self._now, req.rid, len(req.output_ids)))

    def inserted(self, req: Req, count: int) -> None:
        """After the cache took in what a request has computed."""
        if self._tracer.keeps("insert"):
            self._tracer.on_event(Event("insert", self._now, req.rid, count))

    def evicted(self, count: int) -> None:
        """After the cache let go of tokens."""
        if count and self._tracer.keeps("evict"):
            self._tracer.on_event(Event("evict", self._now, tokens=count))

    # ---- a turn of the loop --------------------------------------------------------------------------------

    def turns(self) -> None:
        """Before a turn is decided."""
        self._begun_ns = time.monotonic_ns()
        self._now = time.perf_counter()

    def enters(self, running: Batch) -> None:
        """Before a turn looks for requests to prefill."""
        scheduler = self._scheduler
        chunk = scheduler.chunked_req
        if chunk is None and not scheduler.waiting_queue:
            if running.reqs:
                self._gate = self._name_gate(running.batch_is_full, False, 0, len(running.reqs), 1)
            return
        seen = (
            None
            if chunk is None
            else ObservedChunk(
                chunk.rid, chunk.prefix_len, len(chunk.output_ids), chunk.is_retracted, chunk.kv.cache_protected_len
            )
        )
        waiting, free_rows = len(scheduler.waiting_queue), scheduler.req_to_token_pool.available_size()
        self.passes.enter(Entered(running, running.batch_is_full, seen, waiting, running.reqs, free_rows))

    def _name_gate(self, batch_is_full: bool, chunked: bool, waiting: int, running: int, free_rows: int) -> str | None:
        plan = gate(self._config, batch_is_full, chunked, waiting, running, free_rows)
        return None if plan is None else plan.gate

    def leaves(self, running: Batch) -> None:
        """After a turn has looked for requests to prefill."""
        entered, made = self.passes.leave()
        if made is not None:
            self._forms_pass = made.number
            self.passes.tell(made, self._now, running.batch_is_full)
            self._tell_outcome(made)
        elif entered is not None:
            facts = (entered.waiting, len(entered.running), entered.free_rows)
            self._gate = self._name_gate(entered.batch_is_full, entered.chunked is not None, *facts)
        if not running.batch_is_full:
            self._full_since = None
        elif entered is not None and not entered.batch_is_full:
            self._full_since = made.number if made is not None else None

    def _tell_outcome(self, made: Pass) -> None:
        for rid in made.preempted:
            self._lives[rid].preemptions += 1
            self._tracer.on_event(Event("preempt", self._now, rid, self._lives[rid].output_len))
        for verdict in made.verdicts:
            if verdict.admitted:
                live = self._lives.get(verdict.rid)
                if live is not None and live.output_len == 0 and verdict.result is not Result.CHUNK:
                    live.cached_tokens = verdict.prefix_len
                detail = {"extend": verdict.extend_len, "chunked": verdict.chunked}
                self._tracer.on_event(Event("admit", self._now, verdict.rid, verdict.prefix_len, detail=detail))

    def formed(self, batch: Batch | None, running: Batch) -> None:
        """After a turn has decided what to compute."""
        scheduler = self._scheduler
        if (
            batch is None
            and not running.reqs
            and not scheduler.waiting_queue
            and scheduler.chunked_req is None
            and not (scheduler.enable_overlap and scheduler.last_batch)
            and self._forms_pass is None
        ):
            self._go_idle(running)
            return
        self._end_idle()
        kind = _kind(batch)
        if self._gate is None and self._forms_pass is None:
            self._gate = "queue_empty"
        extend = (batch.extend_num_tokens or 0) if batch is not None else 0
        reports, chance = self.passes.inputs()
        record = StepFacts(
            step=self._step,
            now=self._now,
            kind=kind,
            gate=self._gate,
            pass_number=self._forms_pass,
            begun_ns=self._begun_ns,
            batch_tokens=None if batch is None else extend if kind != "decode" else len(batch.reqs),
            committed=self._due(batch),
            retracted=self._retracted,
            reports=reports,
            given=Given(self._entry_times, chance) if self._entry_times or chance else NOTHING_GIVEN,
        )
        state = self._state(running, extend)
        self._gate, self._forms_pass, self._retracted, self._entry_times = None, None, [], {}
        self._tracer.begin_step(record, state)
        self._step += 1

    def _due(self, batch: Batch | None) -> int | None:
        """The step whose results are taken in next, before another turn begins."""
        if batch is not None:
            self._in_flight.append(self._step)
        if batch is not None and not self._scheduler.enable_overlap:
            return self._in_flight.popleft()
        if self._scheduler.last_batch:
            return self._in_flight.popleft() if self._in_flight else None
        return None

    def _state(self, running: Batch, extend: int) -> StateFacts:
        scheduler = self._scheduler
        return StateFacts(
            running=len(running.reqs),
            queue_len=len(scheduler.waiting_queue),
            available=self._pool.available_size(),
            evictable=self._cache.evictable_size(),
            protected=self._cache.protected_size(),
            pool_size=self._pool.size,
            batch_is_full=running.batch_is_full,
            batch_is_full_pass=self._full_since if running.batch_is_full else None,
            new_token_ratio=scheduler.new_token_ratio_tracker.current,
            processed_tokens=scheduler.processed_tokens_counter + extend,
        )

    def _go_idle(self, running: Batch) -> None:
        self._gate = None
        self._idle_turns += 1
        if self._idle is None:
            self._tracer.hand_over()
            self._idle = _Idle(self._begun_ns, self._now, self._state(running, 0))
        elif self._begun_ns - self._idle.began_ns > IDLE_NS:
            self._end_idle()

    def rests(self) -> None:
        """After turns were stopped: the next one may be hours away."""
        self._tracer.hand_over()

    def _end_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is None:
            return
        turns, self._idle_turns = self._idle_turns, 0
        # The turn itself resets this, once it is told.
        state = idle.state._replace(new_token_ratio=self._scheduler.new_token_ratio_tracker.current)
        self._tracer.idle(self._step, turns, idle.began, idle.began_ns, state)
        self._step += turns

    def computes(self, batch: Batch) -> None:
        """Before a batch's results are taken in."""
        self._before_sampling = [len(req.output_ids) for req in batch.reqs]

    def computed(self, batch: Batch) -> None:
        """After a batch's results were taken in."""
        now = time.perf_counter()
        lives: list[Live] = []
        sampled: list[int] = []
        for req, before in zip(batch.reqs, self._before_sampling, strict=True):
            live = self._lives.get(req.rid)
            if live is not None and len(req.output_ids) > before:
                lives.append(live)
                sampled.append(req.output_ids[before])
        self._tracer.on_outputs(lives, sampled)
        for live, token in zip(lives, sampled, strict=True):
            live.append(token)
            if live.output_len == 1:
                self._tracer.on_event(Event("first_token", now, live.rid))
        for req in batch.reqs:
            if req.finished() and (live := self._lives.pop(req.rid, None)) is not None:
                reason = req.finished_reason
                kind = _ENDS.get(type(reason).__name__, "stop")
                told = reason.to_json()
                detail = told.get("matched") if kind == "stop" else told.get("message")
                self._tracer.on_event(
                    Event("finish", now, req.rid, live.output_len, detail={"kind": kind, "detail": detail})
                )
                self._tracer.on_end(live, kind, detail)
        self._tracer.end_step()


def _encode(ids: Sequence[int]) -> bytes:
    """As `schedscope.engine.tokens.encode` does, in a tenth of the time for the wide integers of SGLang."""
    wide = np.asarray(ids)
    if wide.size and not 0 <= wide.min() <= wide.max() <= MAX_TOKEN_ID:
        raise OverflowError(f"token ids from {wide.min()} to {wide.max()}")
    return wide.astype("<i4").tobytes()


def _request(req: Req) -> Request:
    """A request as it arrived."""
    sampling = req.sampling_params
    return Request(
        rid=req.rid,
        prompt=_encode(req.origin_input_ids),
        sampling=SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=tuple(sampling.stop_strs or ()),
            stop_token_ids=tuple(sorted(sampling.stop_token_ids or ())),
            ignore_eos=sampling.ignore_eos,
            seed=sampling.sampling_seed,
        ),
        priority=req.priority,
        routing_key=req.routing_key,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )


def _kind(batch: Batch | None) -> str:
    if batch is None or batch.forward_mode.is_idle():
        return "none"
    mode = batch.forward_mode
    return "mixed" if mode.is_mixed() else "prefill" if mode.is_extend() else "decode"
