"""Watches a scheduler of SGLang at work, and records what it does. It reads; it never changes anything.

Its methods are called by the hooks of `schedscope.recorder.sglang_plugin`, before or after the method of SGLang that
each is named for. They run on the scheduler's thread.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from schedscope.engine import tokens
from schedscope.engine.budget import Remaining
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import gate
from schedscope.engine.dedup import Duplicate
from schedscope.engine.delayer import DelayerState, Negotiation, Report
from schedscope.engine.live import Live
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import describe_request
from schedscope.engine.tracer import NOTHING_GIVEN, Event, Given
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.recorder.observed import Observed, ObservedChunk, pack_observed
from schedscope.recorder.rows import Decided, PassFacts, StateFacts, hash_of
from schedscope.recorder.sink import Sink
from schedscope.recorder.source_tracer import SourceTracer, StepFacts

Req = Any
"""`sglang.srt.managers.schedule_batch.Req`."""
Batch = Any
"""`sglang.srt.managers.schedule_batch.ScheduleBatch`."""

IDLE_NS = 1_000_000_000
"""Idle turns are noted at least so often, as one step."""
_ENDS = {"FINISH_ABORT": "abort", "FINISH_LENGTH": "length"}
_UNHELD = Duplicate(None, 0)
"""Held back; for whom is not known."""
_rid = attrgetter("rid")
_protected = attrgetter("kv.cache_protected_len")
_allocated = attrgetter("kv.kv_allocated_len")


class _Pass:
    """A pass while it is made."""

    def __init__(self, number: int, seq: int) -> None:
        self.number = number
        self.seq = seq
        self.active = ""
        self.order: list[Req] = []
        """The queue before it was sorted."""
        self.positions: Sequence[int] | None = None
        """In the order after sorting: where each stood before; None: as they stood."""
        self.looks: tuple[list[str], list[int], list[int]] = ([], [], [])
        """Of the queue before it was sorted: rid, and what was found of each in the cache."""
        self.held: frozenset[str] | set[str] = frozenset()
        self.adder: Any = None
        self.before: Remaining | None = None
        self.verdicts: list[Verdict] = []
        self.preempted: list[str] = []
        self.preempting: tuple[str, ...] = ()
        """Released to look at the request that comes next."""
        self.negotiation: Negotiation | None = None
        self.began_ns = 0
        self.calls = 0
        self.chance: RandomState | None = None
        self.batch_is_full: bool | None = None
        """The mark when admission was over; None: nobody was admitted, and so it stayed."""
        self.stop: str | None = None
        """What ended admission; None: nobody was admitted, and so the budget is still what it was."""


class _Entered(NamedTuple):
    """What a turn found before its pass."""

    batch: Batch
    batch_is_full: bool
    chunked: ObservedChunk | None
    waiting: int
    running: list[Req]
    free_rows: int


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
        self._step = self._passes = 0
        self._now = 0.0
        self._begun_ns = 0
        self._idle: _Idle | None = None
        self._idle_turns = 0
        self._pass: _Pass | None = None
        self._entered: _Entered | None = None
        self._in_flight: deque[int] = deque()
        """Steps whose batches are being computed, oldest first."""
        self._gate: str | None = None
        self._full_since: int | None = None
        self._arriving: str | None = None
        """The request that is being offered to the queue for the first time."""
        self._entry_times: dict[str, float] = {}
        """Of requests that this step sent back to the queue."""
        self._chance: RandomState | None = None
        """Before this step's pass, if it is not how the last pass left it: others use the same generator."""
        self._chance_left: RandomState | None = None
        self._retracted: list[str] = []
        self._forms_pass: int | None = None
        self._reports: tuple[Report, ...] = ()
        self._own_report = Report()
        self._before_sampling: list[int] = []
        self._observed: Observed
        self._keeps_fills = config.priority_preemption
        self._place = place

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
        self._tracer.on_event(Event("insert", self._now, req.rid, count))

    def evicted(self, count: int) -> None:
        """After the cache let go of tokens."""
        if count:
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
        self._entered = _Entered(
            running,
            running.batch_is_full,
            None
            if chunk is None
            else ObservedChunk(
                chunk.rid, chunk.prefix_len, len(chunk.output_ids), chunk.is_retracted, chunk.kv.cache_protected_len
            ),
            len(scheduler.waiting_queue),
            running.reqs,
            scheduler.req_to_token_pool.available_size(),
        )

    def _name_gate(self, batch_is_full: bool, chunked: bool, waiting: int, running: int, free_rows: int) -> str | None:
        plan = gate(self._config, batch_is_full, chunked, waiting, running, free_rows)
        return None if plan is None else plan.gate

    def leaves(self, running: Batch) -> None:
        """After a turn has looked for requests to prefill."""
        entered, self._entered = self._entered, None
        made, self._pass = self._pass, None
        if made is not None:
            assert entered is not None
            full = running.batch_is_full if made.batch_is_full is None else made.batch_is_full
            self._finish_pass(made, entered, full)
        elif entered is not None:
            facts = (entered.waiting, len(entered.running), entered.free_rows)
            self._gate = self._name_gate(entered.batch_is_full, entered.chunked is not None, *facts)
        if not running.batch_is_full:
            self._full_since = None
        elif entered is not None and not entered.batch_is_full:
            self._full_since = made.number if made is not None else None

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
            reports=self._reports,
            given=Given(self._entry_times, self._chance) if self._entry_times or self._chance else NOTHING_GIVEN,
        )
        state = self._state(running, extend)
        self._gate, self._forms_pass, self._retracted, self._reports = None, None, [], ()
        self._entry_times, self._chance = {}, None
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
            self._idle = _Idle(self._begun_ns, self._now, self._state(running, 0))
        elif self._begun_ns - self._idle.began_ns > IDLE_NS:
            self._end_idle()

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

    # ---- a pass --------------------------------------------------------------------------------------------

    def sorts(self, queue: Sequence[Req]) -> None:
        """Before the queue is sorted."""
        made = self._pass = _Pass(self._passes, self._tracer.tick())
        self._passes += 1
        made.began_ns = time.monotonic_ns()
        made.order = list(queue)
        made.calls = self._scheduler.policy._waiting_prefix_refresh_calls
        entered = self._entered
        assert entered is not None
        self._observed = self._observe(made, entered, queue)

    def _observe(self, made: _Pass, entered: _Entered, queue: Sequence[Req]) -> Observed:
        running = entered.running
        scheduler = self._scheduler
        delayer = scheduler.prefill_delayer
        if self._config.schedule_policy == "random":
            made.chance = RandomState(random.getstate())
            if made.chance != self._chance_left:
                self._chance = made.chance
        return Observed(
            running=list(map(_rid, running)),
            output_lens=[len(req.output_ids) for req in running],
            finished=[place for place, req in enumerate(running) if req.finished_reason is not None],
            protected=list(map(_protected, running)),
            allocated=list(map(_allocated, running)) if self._keeps_fills else [],
            available=self._pool.available_size(),
            evictable=self._cache.evictable_size(),
            free_rows=entered.free_rows,
            chunked=entered.chunked,
            fill_lens=[len(req.full_untruncated_fill_ids) for req in queue] if self._keeps_fills else [],
            max_prefill_bs=int(scheduler.max_prefill_bs),
            delayer=None if delayer is None else _delayer_state(delayer),
            random_state=[] if made.chance is None else list(made.chance[1]),
        )

    def held(self, rids: set[str]) -> None:
        """After the queue was matched: who was held back as a duplicate."""
        if self._pass is not None:
            self._pass.held = rids

    def sorted(self, queue: Sequence[Req]) -> None:
        """After the queue was sorted."""
        made = self._pass
        assert made is not None
        order = made.order
        # Admission looks again, and may find another length. Column by column takes half as long as row by row.
        made.looks = (
            [req.rid for req in order],
            [req.prefix_len for req in order],
            [req.num_matched_prefix_tokens for req in order],
        )
        if order != queue:
            places = {id(req): place for place, req in enumerate(order)}
            made.positions = [places[id(req)] for req in queue]
        policy = self._scheduler.policy
        made.active = policy._determine_active_policy(queue).value
        if made.chance is not None:
            self._chance_left = RandomState(random.getstate())

    def begins(self, adder: Any) -> None:
        """After the budgets of a pass were set up."""
        made = self._pass
        if made is not None:
            made.adder = adder
            made.before = _remaining(adder)

    def continued(self, adder: Any, req: Req) -> None:
        """After the chunked request got its next piece."""
        made = self._pass
        if made is None:
            return
        unfinished = req.extend_end < len(req.full_untruncated_fill_ids)
        said = (req.prefix_len, req.extend_end - req.prefix_len, unfinished, None, None, _remaining(adder))
        made.verdicts.append(Verdict(req.rid, Result.CHUNK, Reason.CHUNK_CONTINUED, *said))

    def looked(self, adder: Any, req: Req, result: str) -> None:
        """After a waiting request was offered to the batch."""
        made = self._pass
        if made is None:
            return
        admitted = bool(adder.can_run_list) and adder.can_run_list[-1] is req
        made.verdicts.append(
            Verdict(
                req.rid,
                Result(result),
                Reason.ADMITTED if result == "CONTINUE" else Reason.UNKNOWN,
                req.prefix_len,
                req.extend_end - req.prefix_len if admitted else None,
                admitted and adder.new_chunked_req is req,
                None,
                None,
                _remaining(adder),
                made.preempting,
            )
        )
        made.preempting = ()

    def preempted(self, before: Sequence[Req], adder: Any) -> None:
        """After running requests were released for the next one.

        Args:
            before: the running batch as it was.
        """
        made = self._pass
        if made is None:
            return
        left = set(map(id, adder.running_batch.reqs))
        made.preempting = tuple(req.rid for req in before if id(req) not in left)
        made.preempted += made.preempting

    def admitted(self) -> None:
        """After the admission loop, if it admitted anyone. Mixing in the running batch may then change the mark."""
        if self._pass is not None and self._entered is not None:
            self._pass.batch_is_full = self._entered.batch.batch_is_full
            self._pass.stop = self._stop(self._pass)

    # ---- the prefill delayer -------------------------------------------------------------------------------

    def gathered(self, table: list[list[int]]) -> None:
        """After the ranks told each other what they could do: a row each."""
        reports = [Report(bool(a), bool(b), c, d, e, bool(f)) for a, b, c, d, e, f in table]
        self._own_report = reports.pop(self._place)
        self._reports = tuple(reports)

    def negotiates(self, delayer: Any) -> tuple[float, Any]:
        """Before the delayer decides: the clock, and what it remembers."""
        return time.perf_counter(), delayer._curr_state

    def negotiated(self, delayer: Any, began: float, state: Any, token_usage: float, output: Any) -> None:
        """After the delayer decided, from a state in which it was before."""
        made = self._pass
        if made is None:
            return
        own = self._own_report
        now = began
        if own.queue_timeout_expired and state is not None:
            # It read its clock a moment later.
            now = max(now, state.start_time + self._config.prefill_delayer_max_delay_ms / 1000.0)
        made.negotiation = Negotiation(
            allow=output.output_allow,
            reason=output.output_reason,
            estimation=output.input_estimation,
            num_prefillable=output.num_prefillable,
            wait_forward_passes=output.wait_forward_passes,
            wait_seconds=output.wait_seconds,
            next_state=_delayer_state(delayer),
            report=own,
        )
        told = {"reports": list(self._reports), "now": now, "token_usage": float(token_usage)}
        self._observed = msgspec.structs.replace(self._observed, **told)

    # ---- telling -------------------------------------------------------------------------------------------

    def _finish_pass(self, made: _Pass, entered: _Entered, batch_is_full: bool) -> None:
        adder, verdicts = made.adder, made.verdicts
        before = made.before
        assert before is not None
        count, held = len(made.order), made.held
        positions = list(range(count)) if made.positions is None else made.positions
        duplicates = [_UNHELD if rid in held else None for rid in made.looks[0]] if held else [None] * count
        told = Decided(None, (), *made.looks, duplicates, positions, verdicts)
        after = verdicts[-1].remaining if verdicts else before
        chunked = self._scheduler.chunked_req
        facts = PassFacts(
            now=self._now,
            configured=self._scheduler.policy.policy.value,
            active=made.active,
            fallback=self._fallback(made),
            queue_len=len(made.order),
            running=len(self._observed.running),
            chunked_in=entered.chunked.rid if entered.chunked is not None else None,
            chunked_out=chunked.rid if chunked is not None else None,
            chunk_limit=adder.chunked_req_limit,
            stop=made.stop or self._stop(made),
            before=before,
            after=after,
            batch_is_full_before=entered.batch_is_full,
            batch_is_full=batch_is_full,
            new_token_ratio=self._scheduler.new_token_ratio_tracker.current,
            processed_tokens=self._scheduler.processed_tokens_counter,
            refresh_calls=made.calls,
            random_state=None if made.chance is None else hash_of(made.chance),
            negotiation=made.negotiation,
            admitted=len(adder.can_run_list),
            preempted=tuple(made.preempted),
        )
        self._forms_pass = made.number
        decided_ns = time.monotonic_ns() - made.began_ns
        self._tracer.put_pass(made.number, made.seq, facts, told, decided_ns, pack_observed(self._observed))
        for rid in made.preempted:
            self._lives[rid].preemptions += 1
            self._tracer.on_event(Event("preempt", self._now, rid, self._lives[rid].output_len))
        for verdict in verdicts:
            if verdict.admitted:
                live = self._lives.get(verdict.rid)
                if live is not None and live.output_len == 0 and verdict.result is not Result.CHUNK:
                    live.cached_tokens = verdict.prefix_len
                detail = {"extend": verdict.extend_len, "chunked": verdict.chunked}
                self._tracer.on_event(Event("admit", self._now, verdict.rid, verdict.prefix_len, detail=detail))

    def _fallback(self, made: _Pass) -> str | None:
        asked, policy = self._config.schedule_policy, self._scheduler.policy.policy.value
        if policy != asked:
            return "radix_cache_disabled"
        return "queue_too_long" if made.active != policy else None

    def _stop(self, made: _Pass) -> str:
        looked = [verdict for verdict in made.verdicts if verdict.result is not Result.CHUNK]
        if looked and looked[-1].result is not Result.CONTINUE:
            return str(looked[-1].result)
        if len(looked) == len(made.order):
            return "queue_end"
        if made.adder.budget_state().name == "OTHER":
            return "budget"
        return "preempt_failed" if self._config.priority_preemption else "no_slot"


def _request(req: Req) -> Request:
    """A request as it arrived."""
    sampling = req.sampling_params
    return Request(
        rid=req.rid,
        prompt=tokens.encode(req.origin_input_ids),
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


def _remaining(adder: Any) -> Remaining:
    budget = adder.memory_budget
    if type(budget).__name__ != "PrefillBudget":
        return Remaining(adder.rem_total_tokens, adder.cur_rem_tokens, adder.rem_input_tokens, adder.rem_chunk_tokens)
    memory = budget._available_and_evictable()  # once for both, which takes half as long
    left = memory - budget.total_offset, memory - budget.current_offset
    return Remaining(*left, adder.rem_input_tokens, adder.rem_chunk_tokens)


def _delayer_state(delayer: Any) -> DelayerState:
    state = delayer._curr_state
    if state is None:
        return DelayerState(None, 0.0, delayer.skip_first_delayer)
    return DelayerState(state.delayed_count, state.start_time, delayer.skip_first_delayer)
