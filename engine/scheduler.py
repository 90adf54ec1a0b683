"""The scheduler of one rank: stimuli in, batches out.

`arrive`, `abort`, `flush`, `step`, `commit` and `idle` are all that ever reaches it, and all a recording needs to keep:
a second scheduler that gets the same calls does the same, decision by decision. Times and tokens are arguments.

The loop follows SGLang 0.5.23: merge, filter, prefill first, else decode, retracting if memory is short. A step's
batch is committed right after it; with overlap (`disable_overlap_schedule` off) right after the next step: step 1,
step 2, commit 1, step 3, commit 2. What a step then can't know yet is whether a token ends a request: it decodes on for
one step, of which nothing is kept, unless the token in flight is the last that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from schedscope.engine.batch import Batch, DecodeBatch, InFlight
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.delayer import Report
from schedscope.engine.live import Live
from schedscope.engine.pool import PoolExhaustedError
from schedscope.engine.request import Request
from schedscope.engine.running import RunningBatch
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import NOTHING_GIVEN, Event, Given, StepRecord, Tracer
from schedscope.engine.view import View


class Finish(NamedTuple):
    """Why a request ended."""

    kind: str
    """`stop`, `length` or `abort`."""
    detail: Any = None
    """What matched (token id or text), or a message."""


class Ended(NamedTuple):
    """A request that ended without the model: refused, timed out, aborted while waiting, out of memory."""

    live: Live
    finish: Finish


class Step(NamedTuple):
    """What a step decided."""

    number: int
    plan: Plan
    batch: Batch | None
    """To compute; None: nothing to do."""
    due: Batch | None
    """To commit before anything else is done: the same batch; with overlap the one of the step before. None: none."""
    ended: tuple[Ended, ...]


WAITED_TOO_LONG = "Request waiting timeout reached."
OUT_OF_MEMORY = "Out of memory even after retracting all other requests in the decode batch."
POOL_EXHAUSTED = "The KV pool could not give what admission had promised to this request."
PRIORITY_OFF = "Priority scheduling is off on this server; send the request without a priority."


class Scheduler:
    """One rank.

    Args:
        config: raises ConfigError for a policy that can't run under it.
        tracer: who is told what happens.
    """

    def __init__(self, config: SchedulerConfig, tracer: Tracer | None = None) -> None:
        self.config = config
        self.state = SchedulerState(config)
        self.tracer = tracer or Tracer()
        self._tells_outputs = type(self.tracer).on_outputs is not Tracer.on_outputs
        self.steps = 0
        self.passes = 0
        self._lives: dict[str, Live] = {}
        self._ended: list[Ended] = []

    @property
    def lives(self) -> dict[str, Live]:
        """Requests that have not ended, by rid."""
        self.state.running_batch.settle()
        return self._lives

    @lives.setter
    def lives(self, lives: dict[str, Live]) -> None:
        self._lives = lives

    @property
    def busy(self) -> bool:
        """Whether a step could do anything."""
        state = self.state
        return bool(state.queue or state.running_batch or state.last_prefill or state.chunked or state.in_flight)

    # ---- stimuli -------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float, entry_time: float | None = None) -> list[Ended]:
        """A new request joins the queue. Returns what the queue's limit turned away: it, or another.

        Args:
            entry_time: when it joined, if a server that is followed has read its clock for that. None: now, or as
                little later as makes it the last.
        """
        live = Live(request, self.state.resolved_priority(request))
        self._lives[request.rid] = live
        self.tracer.on_event(
            Event("arrive", now, request.rid, live.prompt_len, detail=_describe_arrival(request, entry_time))
        )
        self.tracer.on_prompt(live)
        config = self.config
        priority_off = config.abort_on_priority_when_disabled and not config.enable_priority_scheduling
        if priority_off and request.priority is not None:
            return [self._refuse(live, PRIORITY_OFF, now)]
        return self._enqueue(live, now, entry_time)

    def abort(self, rid: str, now: float) -> list[Ended]:
        """A client takes its request back. One that holds memory ends with its next token or chunk."""
        live = self.lives.get(rid)
        if live is None:
            return []
        self.tracer.on_event(Event("abort", now, rid))
        if live in self.state.queue:
            self.state.queue.remove(live)
            return [self._end(live, Finish("abort", "Aborted"))]
        live.to_finish = "Aborted"
        self.state.running_batch.mark()
        live.ends_between_chunks = live is self.state.chunked
        return []

    def idle(self, now: float, turns: int = 1) -> None:
        """There is nothing to do, so many steps in a row: estimates start afresh."""
        self._settle(now)
        self.state.new_token_ratio = self.state.first_new_token_ratio
        number = self.steps
        self.steps += turns
        record = StepRecord(number, now, "idle", None, None, None, None, (), (), NOTHING_GIVEN, turns)
        self.tracer.on_step(record, self.state)

    def flush(self, now: float) -> bool:
        """Forget the prefix cache. False, and nothing done, while requests wait or run."""
        if self.busy:
            return False
        self.tracer.on_event(Event("flush", now))
        self.state.forget_cache()
        return True

    def report(self, now: float) -> Report:
        """What this rank tells the prefill delayer of the others in the step that comes next, at the same `now`."""
        plan = decide(self.look(now), self.config, self.state.random_state, self.state.policy)
        assert plan.negotiation is not None, "asked for a report without a prefill delayer"
        return plan.negotiation.report

    def step(self, now: float, reports: tuple[Report, ...] = (), given: Given = NOTHING_GIVEN) -> Step:
        """Form the next batch.

        Args:
            now: this rank's clock, seconds.
            reports: what the other ranks tell the prefill delayer.
            given: what a server that is followed has read elsewhere.
        """
        state = self.state
        overlap = not self.config.disable_overlap_schedule
        assert len(state.in_flight) <= overlap, "a batch before this step is to be committed"
        due = state.in_flight[0] if state.in_flight else None
        if given.random_state is not None:
            state.random_state = given.random_state
        self._settle(now)
        ended, self._ended = self._ended, []
        # A gated step, as most decodes are, needs no view: unless the delayer has a say in it.
        plan = None if self.config.enable_prefill_delayer else state.gate()
        view = state.view(now, reports) if plan is None else None
        self.tracer.on_decide()
        if plan is None:
            assert view is not None
            plan = decide(view, self.config, state.random_state, state.policy)
        pass_number = None
        if plan.ordering is not None:
            assert view is not None
            pass_number = self.passes
            self.passes += 1
            self.tracer.on_pass(pass_number, view, plan, state.random_state)
        view = None  # what nobody has any more need not be kept as it was
        try:
            batch = state.apply(plan, now, pass_number, given.entry_times)
        except PoolExhaustedError:
            batch = None
            ended += self._give_up_prefill(plan)
        self._tell_plan(plan, now)
        ended += self._turn_away(now)
        retracted: tuple[str, ...] = ()
        if batch is not None:
            state.last_prefill = [member.live for member in batch.members]
            state.last_prefill_tokens = batch.extend_tokens
            state.last_prefill_only = batch.prefill_only
            state.processed_tokens += batch.extend_tokens
        elif state.running_batch and not state.running_prefill_only:
            batch, retracted, lost = self._decode(now, given.entry_times)
            ended += lost
        self._tell_evictions(now)
        kind = batch.kind if batch is not None else "none"
        number = self.steps
        self.steps += 1
        if batch is not None:
            state.in_flight.append(InFlight(number, batch))
            due = due if overlap else state.in_flight[0]
        record = StepRecord(number, now, kind, plan.gate, pass_number, batch, due, retracted, reports, given)
        self.tracer.on_step(record, state)
        return Step(number, plan, batch, None if due is None else due.batch, tuple(ended))

    def commit(self, batch: Batch, sampled: Sequence[int | None], finishes: Mapping[str, Finish], now: float) -> None:
        """Take in the tokens of the batch that is due: one per row, None where the prompt goes on.

        Tokens of requests that ended or lost their memory since the batch was formed are ignored.

        Args:
            finishes: why requests end with this token, by rid.
        """
        state = self.state
        flying = state.in_flight.popleft()
        assert flying.batch is batch, "another batch is due"
        running = state.running_batch
        if isinstance(batch, DecodeBatch) and batch.running is running and running.plain and None not in sampled:
            self._commit_decode(running, cast("Sequence[int]", sampled), finishes, now)
        else:
            self._commit_each(batch, sampled, finishes, now)
        self.tracer.on_committed(state)

    def _commit_decode(
        self, running: RunningBatch, sampled: Sequence[int], finishes: Mapping[str, Finish], now: float
    ) -> None:
        """Take in a token for each running request. Most decode on, and nothing else happens to them."""
        if self._tells_outputs:
            self.tracer.on_outputs(running.lives, sampled)
        running.take(sampled)
        if finishes:
            for live in running.lives:
                if live.rid in finishes:
                    self._take_in(live, finishes[live.rid], now)

    def _commit_each(
        self, batch: Batch, sampled: Sequence[int | None], finishes: Mapping[str, Finish], now: float
    ) -> None:
        taken = [
            (member, token)
            for member, token in zip(batch.members, sampled, strict=True)
            if token is not None and not member.live.finished and not member.live.retracted
        ]
        self.tracer.on_outputs([member.live for member, _ in taken], [token for _, token in taken])
        self.state.running_batch.changed()
        for member, token in taken:
            live = member.live
            live.append(token)
            if live.rid in finishes or live.to_finish is not None or not member.decode or live.output_len == 1:
                self._take_in(live, finishes.get(live.rid), now, None if member.decode else member.end)

    def _take_in(self, live: Live, finish: Finish | None, now: float, prefilled: int | None = None) -> None:
        """What a token that was taken in leads to: the request's end, or its place in the cache.

        Args:
            prefilled: tokens that its prefill has computed with this one; None: it decodes.
        """
        if live.output_len == 1:
            self.tracer.on_event(Event("first_token", now, live.rid))
        if live.to_finish is not None:
            finish = Finish("abort", live.to_finish)
        if finish is not None:
            live.finished = True
            self.state.release(live, checkpoint=True)
            detail = {"kind": finish.kind, "detail": finish.detail}
            self.tracer.on_event(Event("finish", now, live.rid, live.output_len, detail=detail))
            self._end(live, finish)
        elif prefilled is not None:
            self.state.checkpoint(live, prefilled)
            node = live.lock.id if live.lock is not None else None
            self.tracer.on_event(Event("insert", now, live.rid, live.protected_len, node))

    def look(self, now: float, reports: tuple[Report, ...] = ()) -> View:
        """What the next step, at the same `now`, will decide on. Looking twice changes nothing."""
        self._settle(now)
        return self.state.view(now, reports)

    def _settle(self, now: float) -> None:
        """What happens before a step is decided."""
        self._ended += self._time_out(now)
        self._ended += self._abort_chunked()
        self.state.stash_chunked()
        self.state.merge_prefill()
        self.state.drop_finished()

    # ---- the queue -----------------------------------------------------------------------------------------

    def _enqueue(self, live: Live, now: float, entry_time: float | None) -> list[Ended]:
        """Join the queue's tail, if its limit allows. Returns whom that turned away: it, or another."""
        self.state.admit_to_queue(live, now, entry_time)
        if self.state.queue and self.state.queue[-1] is live:
            self.tracer.on_event(Event("queue", now, live.rid))
        return self._turn_away(now)

    def _turn_away(self, now: float) -> list[Ended]:
        refused, self.state.turned_away = self.state.turned_away, []
        return [self._refuse(live, message, now) for live, message in refused]

    def _refuse(self, live: Live, message: str, now: float) -> Ended:
        self.tracer.on_event(Event("refuse", now, live.rid, detail={"message": message}))
        return self._end(live, Finish("abort", message))

    def _end(self, live: Live, finish: Finish) -> Ended:
        live.finished = True
        self._lives.pop(live.rid, None)
        self.tracer.on_end(live, finish.kind, finish.detail)
        return Ended(live, finish)

    def _time_out(self, now: float) -> list[Ended]:
        limit = self.config.req_waiting_timeout
        if limit is None:
            return []
        late = [live for live in self.state.queue if 0 < live.entry_time < now - limit]
        ended = []
        for live in late:
            self.state.queue.remove(live)
            self.tracer.on_event(Event("timeout", now, live.rid, detail={"message": WAITED_TOO_LONG}))
            ended.append(self._end(live, Finish("abort", WAITED_TOO_LONG)))
        return ended

    def _abort_chunked(self) -> list[Ended]:
        """A chunked request that its client took back ends between two chunks.

        One that was taken back while it decoded, and then lost its memory, ends with its next token.
        """
        live = self.state.chunked
        if live is None or live.to_finish is None or not live.ends_between_chunks:
            return []
        self.state.release(live, checkpoint=False)
        self.state.chunked = None
        return [self._end(live, Finish("abort", live.to_finish))]

    # ---- batches -------------------------------------------------------------------------------------------

    def _give_up_prefill(self, plan: Plan) -> list[Ended]:
        """Admission promised memory that is not there. SGLang's server dies here; ours ends the batch's requests."""
        assert plan.admission is not None
        state = self.state
        ended = []
        for verdict in plan.admission.admitted:
            live = self.lives[verdict.rid]
            state.release(live, checkpoint=False)
            ended.append(self._end(live, Finish("abort", POOL_EXHAUSTED)))
        state.chunked = None
        return ended

    def _decode(
        self, now: float, entry_times: Mapping[str, float]
    ) -> tuple[Batch | None, tuple[str, ...], list[Ended]]:
        """One token for every running request; retract some first if memory is short."""
        state = self.state
        before = len(state.running_batch)
        retracted: list[Live] = []
        ended: list[Ended] = []
        ending = state.drop_ending()
        if not state.running_batch or (ending and not state.fits_decode()):
            # Nothing is left to decode, or there will be room when those that end have given back their memory.
            state.batch_is_full = False
            return None, (), []
        if state.fits_decode():
            config = self.config
            decay = (state.first_new_token_ratio - state.least_new_token_ratio) / config.new_token_ratio_decay_steps
            state.new_token_ratio = max(state.new_token_ratio - decay, state.least_new_token_ratio)
        else:
            retracted, ended = self._retract(now)
        if len(state.running_batch) < before:
            state.batch_is_full = False
        for live in retracted:
            ended += self._enqueue(live, now, entry_times.get(live.rid))
        if not state.running_batch:
            return None, tuple(live.rid for live in retracted), ended
        batch = state.decode()
        state.processed_tokens += state.running_extend_tokens
        return batch, tuple(live.rid for live in retracted), ended

    def _retract(self, now: float) -> tuple[list[Live], list[Ended]]:
        """Take memory from the requests with the least output, until the others can decode."""
        state, config = self.state, self.config

        def worth_keeping(live: Live) -> tuple[int, ...]:
            length = (live.output_len, -live.prompt_len)
            if config.retraction_policy == "priority":
                return (live.priority * -config.priority_sign, *length)
            return length

        keep = sorted(state.running, key=worth_keeping, reverse=True)
        retracted: list[Live] = []
        while (not retracted or not state.fits_decode(keep)) and len(keep) > 1:
            live = keep.pop()
            state.retract(live, len(keep) * config.retract_decode_steps)
            live.retractions += 1
            retracted.append(live)
            self.tracer.on_event(Event("retract", now, live.rid, live.output_len))
        ended = []
        if len(keep) <= 1 and not state.fits_decode(keep):
            last = keep.pop()
            state.retract(last, 0)
            ended.append(self._end(last, Finish("abort", OUT_OF_MEMORY)))
        state.running = keep
        outputs = sum(live.output_len for live in keep)
        allowed = sum(live.request.sampling.max_new_tokens for live in keep)
        estimate = (outputs + config.retract_decode_steps * len(keep)) / (allowed + 1)
        state.new_token_ratio = min(1.0, estimate)
        return retracted, ended

    # ---- telling -------------------------------------------------------------------------------------------

    def _tell_plan(self, plan: Plan, now: float) -> None:
        if plan.admission is None:
            return
        for rid in plan.admission.preempted:
            live = self.lives[rid]
            self.tracer.on_event(Event("preempt", now, rid, live.output_len))
            if live in self.state.queue:
                self.tracer.on_event(Event("queue", now, rid))
        for verdict in plan.admission.admitted:
            detail = {"extend": verdict.extend_len, "chunked": verdict.chunked}
            self.tracer.on_event(Event("admit", now, verdict.rid, verdict.prefix_len, detail=detail))

    def _tell_evictions(self, now: float) -> None:
        for evicted in self.state.evictions:
            self.tracer.on_event(Event("evict", now, tokens=evicted.tokens, node=evicted.node.id))
        self.state.evictions.clear()


def _describe_arrival(request: Request, entry_time: float | None) -> dict[str, Any]:
    described = describe_request(request)
    return described if entry_time is None else {**described, "entry_time": entry_time}


def describe_request(request: Request) -> dict[str, Any]:
    """A request's parameters without its prompt, as JSON values."""
    sampling = request.sampling
    return {
        "priority": request.priority,
        "routing_key": request.routing_key,
        "extra_key": request.extra_key,
        "cache_salt": request.cache_salt,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": sampling.seed,
    }
