"""Watches a scheduler of SGLang at work, and records what it does. It reads; it never changes anything.

Its methods are called by the hooks of `schedscope.recorder.sglang_plugin`, before or after the method of SGLang that
each is named for. They run on the scheduler's thread.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import gate_name
from schedscope.engine.tracer import Event, Given
from schedscope.engine.verdict import Result
from schedscope.recorder.observed import ObservedChunk
from schedscope.recorder.sglang_pass import MIXING, Batch, Entered, Pass, PassWatch
from schedscope.recorder.sglang_request import Req, WatchedRequest, asked
from schedscope.recorder.sink import Sink
from schedscope.recorder.source_tracer import SourceTracer, StepRow
from schedscope.recorder.tracer import given_text

IDLE_NS = 1_000_000_000
"""Idle turns are noted at least so often, as one step."""
_ASKED = itemgetter("max_new_tokens", "ignore_eos", "priority", "routing_key", "extra_key", "cache_salt")
"""What the row of a request tells of what was asked for."""
_KINDS = {
    "IDLE": "none",
    "MIXED": "mixed",
    **dict.fromkeys(("EXTEND", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"), "prefill"),
}
"""Of steps, by the mode of their batch; all others decode."""
_ENDS = {"FINISH_ABORT": "abort", "FINISH_LENGTH": "length"}


class Observer:
    """Records one scheduler.

    Args:
        scheduler: `sglang.srt.managers.scheduler.Scheduler`, built.
        config: what `schedscope.recorder.sglang_config` read off it.
        sink: where records go.
        place: of this rank among the rows that ranks tell each other for the prefill delayer.
    """

    def __init__(
        self, scheduler: Any, config: SchedulerConfig, sink: Sink, place: int = 0, is_known: bool = True
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._pool = scheduler.token_to_kv_pool_allocator
        self._cache = scheduler.tree_cache
        self._overlaps: bool = scheduler.enable_overlap
        self.tracer = SourceTracer(sink, self._config)
        """Hooks note in it what time they took."""
        self.needs = self.tracer.kinds | ({MIXING} if config.enable_mixed_chunk else set())
        """Of what is recorded, what some hooks are for, see `schedscope.recorder.sglang_hooks`."""
        self._lives: dict[str, WatchedRequest] = {}
        self._preempted_ends: list[tuple[str, str | None]] = []
        """Requests that the pass under way preempted and that were one too many for the queue then, with the words."""
        self.passes = PassWatch(scheduler, config, self.tracer, place, is_known)
        self._step = 0
        self._now = 0.0
        self._begun_ns = 0
        self._idle: StepRow | None = None
        """Of turns in a row that had nothing to do."""
        self._idle_turns = 0
        self._in_flight: deque[int] = deque()
        """Steps whose batches are being computed, oldest first."""
        self._gate: str | None = None
        self._full_since: int | None = None
        self._arriving: tuple[Req, int | None] | None = None
        """The request that is being offered to the queue for the first time, and the priority that it came with."""
        self._paused = False
        self._entry_times: dict[str, float] = {}
        """Of requests that this step sent back to the queue."""
        self._retracted: list[str] = []
        self._forms_pass: int | None = None

    def detach(self, error: BaseException) -> None:
        """Record nothing any more."""
        self.tracer.detach(error)

    def close(self) -> None:
        """Hand over what is left."""
        self._end_idle()
        self.tracer.close()

    # ---- requests ------------------------------------------------------------------------------------------

    def arrives(self, req: Req) -> None:
        """Before it joins the queue for the first time."""
        self._end_idle()
        if req.rid not in self._lives:
            self._arriving = req, req.priority

    def _tell_arrival(self, entry_time: float | None) -> None:
        """The clock that the queue read for a request is known only once it has joined."""
        if self._arriving is None:
            return
        (req, priority), self._arriving = self._arriving, None
        rid, prompt, detail = req.rid, req.origin_input_ids, asked(req, priority)
        prompt_len = len(prompt)
        self._lives[rid] = WatchedRequest(rid, prompt_len, detail)
        if entry_time is not None:
            detail["entry_time"] = entry_time
        self.tracer.on_event(Event("arrive", time.perf_counter(), rid, prompt_len, None, detail))
        if self.tracer.keeps_tokens:
            self.tracer.put_ids(rid, prompt)

    def joined(self, req: Req) -> None:
        """After it was offered to the queue."""
        queue = self._scheduler.waiting_queue
        if not queue or queue[-1] is not req:
            return
        rid, entry_time = req.rid, req.time_stats.wait_queue_entry_time
        if self._arriving is not None:
            self._tell_arrival(entry_time)
        else:
            self._entry_times[rid] = entry_time
        detail = {"processed_tokens": req.arrival_processed_tokens}
        self.tracer.on_event(Event("queue", entry_time, rid, None, None, detail))
        self._hold_nothing_back()

    def aborts(self, rid: str, everyone: bool) -> None:
        """Before requests are taken back: those whose ids begin so, or all."""
        self._end_idle()
        for own in [own for own in self._lives if everyone or own.startswith(rid)]:
            self.tracer.on_event(Event("abort", time.perf_counter(), own))
        self._hold_nothing_back()

    def turned_away(self, req: Req, message: str | None) -> None:
        """After a request ended outside of a batch."""
        self._tell_arrival(None)  # it may be what pushed another one out
        if self.passes.has_preempted(req.rid):
            self._preempted_ends.append((req.rid, message))
            return
        self._tell_abort(req.rid, message)
        self._hold_nothing_back()

    def _tell_abort(self, rid: str, message: str | None) -> None:
        live = self._lives.pop(rid, None)
        if live is not None:
            self.tracer.put_request(live, _ASKED(live.asked), "abort", message)

    def flushed(self) -> None:
        """After the prefix cache was emptied."""
        self._end_idle()
        self.tracer.on_event(Event("flush", time.perf_counter()))
        self._hold_nothing_back()

    def _hold_nothing_back(self) -> None:
        """While turns are stopped: the next one, with which things are handed over, may be hours away."""
        if self._paused:
            self.tracer.hand_over()

    def retracted(self, reqs: Sequence[Req]) -> None:
        """After running requests lost their memory."""
        for req in reqs:
            live = self._lives[req.rid]
            live.retractions += 1
            live.taken = len(req.output_ids)
            self._retracted.append(req.rid)
            self.tracer.on_event(Event("retract", self._now, req.rid, len(req.output_ids)))

    def inserted(self, req: Req, count: int) -> None:
        """After the cache took in what a request has computed."""
        self.tracer.on_event(Event("insert", self._now, req.rid, count))

    def evicted(self, count: int) -> None:
        """After the cache let go of tokens."""
        if count:
            self.tracer.on_event(Event("evict", self._now, tokens=count))

    # ---- a turn of the loop --------------------------------------------------------------------------------

    def turns(self) -> None:
        """Before a turn is decided."""
        self._begun_ns = time.monotonic_ns()
        self._now = time.perf_counter()
        self._paused = False

    def enters(self, running: Batch) -> None:
        """Before a turn looks for requests to prefill."""
        scheduler = self._scheduler
        chunk = scheduler.chunked_req
        if chunk is None and not scheduler.waiting_queue:
            if running.reqs:
                self._gate = gate_name(self._config, running.batch_is_full, False, 0, len(running.reqs), 1)
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

    def leaves(self, running: Batch) -> None:
        """After a turn has looked for requests to prefill."""
        entered, made = self.passes.leave()
        if made is not None:
            self._forms_pass = made.number
            self.passes.tell(made, self._now, running.batch_is_full)
            self._tell_outcome(made)
            for rid, message in self._preempted_ends:
                self._tell_abort(rid, message)
            self._preempted_ends = []
        elif entered is not None:
            facts = (entered.waiting, len(entered.running), entered.free_rows)
            self._gate = gate_name(self._config, entered.batch_is_full, entered.chunked is not None, *facts)
        if not running.batch_is_full:
            self._full_since = None
        elif entered is not None and not entered.batch_is_full:
            self._full_since = made.number if made is not None else None

    def _tell_outcome(self, made: Pass) -> None:
        for rid in made.preempted:
            self._lives[rid].preemptions += 1
            self.tracer.on_event(Event("preempt", self._now, rid, self._lives[rid].output_len))
        for verdict in made.verdicts:
            if verdict.extend_len is not None:
                live = self._lives.get(verdict.rid)
                if live is not None and live.output_len == 0 and verdict.result is not Result.CHUNK:
                    live.cached_tokens = verdict.prefix_len
                detail = {"extend": verdict.extend_len, "chunked": verdict.chunked}
                self.tracer.on_event(Event("admit", self._now, verdict.rid, verdict.prefix_len, detail=detail))

    def formed(self, batch: Batch | None, running: Batch) -> None:
        """After a turn has decided what to compute."""
        scheduler = self._scheduler
        if (
            batch is None
            and not running.reqs
            and not scheduler.waiting_queue
            and scheduler.chunked_req is None
            and not (self._overlaps and scheduler.last_batch)
            and self._forms_pass is None
        ):
            self._go_idle(running)
            return
        if self._idle is not None:
            self._end_idle()
        extend = (batch.extend_num_tokens or 0) if batch is not None else 0
        kind = "none" if batch is None else _KINDS.get(batch.forward_mode._name_, "decode")
        row = self._row(kind, running, extend)
        row.gate, row.pass_ = self._gate, self._forms_pass
        if row.gate is None and row.pass_ is None:
            row.gate = "queue_empty"
        if batch is not None:
            row.batch_tokens = len(batch.reqs) if kind == "decode" else extend
        row.committed = self._due(batch)
        row.retracted = self._retracted
        reports, chance = self.passes.inputs()
        if reports:
            row.reports = json.dumps([report._asdict() for report in reports])
        if self._entry_times or chance is not None:
            row.given = given_text(Given(self._entry_times, chance))
            self._entry_times = {}
        self._gate, self._forms_pass, self._retracted = None, None, []
        self.tracer.begin_step(row, batch is not None)
        self._step += 1

    def _due(self, batch: Batch | None) -> int | None:
        """The step whose results are taken in next, before another turn begins."""
        if batch is not None:
            self._in_flight.append(self._step)
        if batch is not None and not self._overlaps:
            return self._in_flight.popleft()
        if self._scheduler.last_batch:
            return self._in_flight.popleft() if self._in_flight else None
        return None

    def _row(self, kind: str, running: Batch, extend: int) -> StepRow:
        scheduler = self._scheduler
        return StepRow(
            step=self._step,
            kind=kind,
            now=self._now,
            start_ns=self._begun_ns,
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
            self.tracer.hand_over()
            self._idle = self._row("idle", running, 0)
        elif self._begun_ns - self._idle.start_ns > IDLE_NS:
            self._end_idle()

    def rests(self) -> None:
        """After turns were stopped."""
        self._paused = True
        self.tracer.hand_over()

    def _end_idle(self) -> None:
        row, self._idle = self._idle, None
        if row is None:
            return
        row.count, self._idle_turns = self._idle_turns, 0
        # The turn itself resets this, once it is told.
        row.new_token_ratio = self._scheduler.new_token_ratio_tracker.current
        self.tracer.idle(row)
        self._step += row.count

    def computed(self, batch: Batch) -> None:
        """After a batch's results were taken in."""
        now = time.perf_counter()
        lives = self._lives
        rids, positions, sampled, begun, ended = [], [], [], [], []
        for req in batch.reqs:
            live = lives.get(req.rid)
            if live is None:
                continue
            outputs = req.output_ids
            if len(outputs) < live.taken:  # preempted, it may have begun a new list
                live.taken = 0
            if len(outputs) > live.taken:
                rids.append(live.rid)
                positions.append(live.prompt_len + live.output_len)
                sampled.append(outputs[live.taken])
                if not live.output_len:
                    begun.append(live.rid)
                live.output_len += 1
                live.taken = len(outputs)
            if req.finished_reason is not None:
                ended.append((live, req.finished_reason))
        self.tracer.put_outputs(rids, positions, sampled)
        for rid in begun:
            self.tracer.on_event(Event("first_token", now, rid))
        for live, reason in ended:
            del lives[live.rid]
            kind = _ENDS.get(type(reason).__name__, "stop")
            told = reason.to_json()
            detail = told.get("matched") if kind == "stop" else told.get("message")
            told = {"kind": kind, "detail": detail}
            self.tracer.on_event(Event("finish", now, live.rid, live.output_len, detail=told))
            self.tracer.put_request(live, _ASKED(live.asked), kind, detail)
        self.tracer.end_step()
