"""Watches SGLang make a scheduling pass, from the look at the queue to the last verdict.

Methods stand in the order in which a pass calls them, see `schedscope.recorder.sglang_hooks`. Outside of a pass they do
nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from schedscope.engine.budget import Remaining
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.dedup import Duplicate
from schedscope.engine.delayer import DelayerState, Negotiation, Report
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.recorder.observed import Observed, ObservedChunk
from schedscope.recorder.rows import Decided, PassFacts, hash_of
from schedscope.recorder.sglang_looks import Looking, Looks
from schedscope.recorder.sglang_request import Req
from schedscope.recorder.source_tracer import SourceTracer

Batch = Any
"""`sglang.srt.managers.schedule_batch.ScheduleBatch`."""

MIXING = "mixing"
"""Where the running batch is mixed into one that is prefilled, hooks are needed that others can do without."""

_UNHELD = Duplicate(None, 0)
"""Held back; for whom is not known."""
_RESULTS = {result.value: result for result in Result}
_GOING_ON = (Result.CONTINUE, Result.CHUNK)
_rid = attrgetter("rid")
_output_ids = attrgetter("output_ids")
_protected = attrgetter("kv.cache_protected_len")
_allocated = attrgetter("kv.kv_allocated_len")


class Entered(msgspec.Struct, frozen=True):
    """What a turn found before its pass."""

    batch: Batch
    batch_is_full: bool
    chunked: ObservedChunk | None
    waiting: int
    running: list[Req]
    free_rows: int


class Pass:
    """A pass while it is made."""

    active = ""
    positions: Sequence[int] | None = None
    """In the order after sorting: where each stood before; None: as they stood."""
    fill_lens: Sequence[int] = ()
    """Of the queue before it was sorted, if somebody may be preempted."""
    looks: Looks
    """Of that queue."""
    last: Req | None = None
    """The last of it that admission looked at."""
    held: frozenset[str] | set[str] = frozenset()
    adder: Any = None
    observed: Observed | None = None
    before: Remaining | None = None
    preempted: tuple[str, ...] = ()
    preempting: tuple[str, ...] = ()
    """Released to look at the request that comes next."""
    negotiation: Negotiation | None = None
    chance: RandomState | None = None
    batch_is_full: bool | None = None
    """The mark when admission was over; None: nothing was mixed in behind it, and so it stayed."""
    is_spent = False
    """Of what a batch may compute nothing is left."""

    def __init__(self, number: int, seq: int, entered: Entered, queue: Sequence[Req], calls: int) -> None:
        self.number = number
        self.seq = seq
        self.entered = entered
        self.order = list(queue)
        """The queue before it was sorted."""
        self.calls = calls
        self.verdicts: list[Verdict] = []
        self.began_ns = time.monotonic_ns()


class PassWatch:
    """Records the passes of one scheduler.

    Args:
        scheduler: `sglang.srt.managers.scheduler.Scheduler`, built.
        config: what `schedscope.recorder.sglang_config` read off it.
        place: of this rank among the rows that ranks tell each other for the prefill delayer.
        is_known: whether our core knows all that this scheduler does.
    """

    def __init__(
        self, scheduler: Any, config: SchedulerConfig, tracer: SourceTracer, place: int, is_known: bool
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._pool = scheduler.token_to_kv_pool_allocator
        self._cache = scheduler.tree_cache
        self._tracer = tracer
        self._place = place
        self._keeps_fills = config.priority_preemption
        self._has_plain_cache = not self._cache.supports_mamba()
        self._looking = Looking(always=self._cache.supports_fast_match_prefix() or not is_known)
        self._passes = 0
        self._entered: Entered | None = None
        self._pass: Pass | None = None
        self._chance: RandomState | None = None
        """Before this step's pass, if it is not how the last pass left it: others use the same generator."""
        self._chance_left: RandomState | None = None
        self._reports: tuple[Report, ...] = ()
        self._own_report = Report()

    def enter(self, entered: Entered) -> None:
        """A turn looks for requests to prefill; there may be a pass."""
        self._entered = entered

    def leave(self) -> tuple[Entered | None, Pass | None]:
        """It has looked: what it found, and the pass that it made."""
        left = self._entered, self._pass
        self._entered = self._pass = None
        return left

    def inputs(self) -> tuple[tuple[Report, ...], RandomState | None]:
        """What this step was given from outside: reports of other ranks, and chance. Told once."""
        given = self._reports, self._chance
        self._reports, self._chance = (), None
        return given

    # ---- the order -----------------------------------------------------------------------------------------

    def sorts(self, queue: Sequence[Req]) -> None:
        """Before the queue is sorted."""
        assert self._entered is not None
        calls = self._scheduler.policy._waiting_prefix_refresh_calls
        made = self._pass = Pass(self._passes, self._tracer.tick(), self._entered, queue, calls)
        self._passes += 1
        if self._keeps_fills:
            made.fill_lens = [len(req.full_untruncated_fill_ids) for req in queue]
        if self._config.schedule_policy == "random":
            made.chance = RandomState(random.getstate())
            if made.chance != self._chance_left:
                self._chance = made.chance

    def held(self, rids: set[str]) -> None:
        """After the queue was matched: who was held back as a duplicate."""
        if self._pass is not None:
            self._pass.held = rids

    def sorted(self, queue: Sequence[Req]) -> None:
        """After the queue was sorted."""
        made = self._pass
        assert made is not None
        order = made.order
        made.active = self._scheduler.policy._determine_active_policy(queue)._value_
        made.looks = self._looking.look(order, made.active)  # admission looks again, and may find another length
        if order != queue:
            places = dict(zip(order, range(len(order)), strict=True))
            made.positions = list(map(places.__getitem__, queue))
        if made.chance is not None:
            self._chance_left = RandomState(random.getstate())

    # ---- admission -----------------------------------------------------------------------------------------

    def begins(self, adder: Any) -> None:
        """After the budgets of a pass were set up."""
        made = self._pass
        if made is None:
            return
        made.adder = adder
        made.observed = seen = self._observe(made)
        made.before = left = _remaining(adder, seen.available + seen.evictable if self._has_plain_cache else None)
        made.is_spent = _is_spent(adder, left)

    def _observe(self, made: Pass) -> Observed:
        scheduler, entered = self._scheduler, made.entered
        running = entered.running
        delayer = scheduler.prefill_delayer
        return Observed(
            running=list(map(_rid, running)),
            output_lens=list(map(len, map(_output_ids, running))),
            finished=[place for place, req in enumerate(running) if req.finished_reason is not None],
            protected=list(map(_protected, running)),
            allocated=list(map(_allocated, running)) if self._keeps_fills else [],
            available=self._pool.available_size(),
            evictable=self._cache.evictable_size(),
            free_rows=entered.free_rows,
            chunked=entered.chunked,
            fill_lens=list(made.fill_lens),
            max_prefill_bs=int(scheduler.max_prefill_bs),
            delayer=None if delayer is None else _delayer_state(delayer),
            random_state=[] if made.chance is None else list(made.chance[1]),
        )

    def continued(self, adder: Any, req: Req) -> None:
        """After the chunked request got its next piece."""
        made = self._pass
        if made is None:
            return
        unfinished, left = req.extend_end < len(req.full_untruncated_fill_ids), _remaining(adder)
        made.is_spent = _is_spent(adder, left)
        said = (req.prefix_len, req.extend_end - req.prefix_len, unfinished, None, None, left)
        made.verdicts.append(Verdict(req.rid, Result.CHUNK, Reason.CHUNK_CONTINUED, *said))

    def looked(self, adder: Any, req: Req, result: str) -> None:
        """After a waiting request was offered to the batch."""
        made = self._pass
        if made is None:
            return
        admitted, left = bool(adder.can_run_list) and adder.can_run_list[-1] is req, _remaining(adder)
        made.is_spent = _is_spent(adder, left)
        made.verdicts.append(
            Verdict(
                req.rid,
                _RESULTS[result],
                Reason.ADMITTED if result == "CONTINUE" else Reason.UNKNOWN,
                req.prefix_len,
                req.extend_end - req.prefix_len if admitted else None,
                admitted and adder.new_chunked_req is req,
                None,
                None,
                left,
                made.preempting,
            )
        )
        made.preempting, made.last = (), req

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

    def has_preempted(self, rid: str) -> bool:
        """Whether the pass under way took this request's memory."""
        return self._pass is not None and rid in self._pass.preempted

    def admitted(self) -> None:
        """After the admission loop, if it admitted anyone. Mixing in the running batch may then change the mark."""
        if self._pass is not None:
            self._pass.batch_is_full = self._pass.entered.batch.batch_is_full

    def _stop(self, made: Pass) -> str:
        verdicts = made.verdicts
        last = verdicts[-1] if verdicts else None
        if last is not None and last.result not in _GOING_ON:
            return last.result.value
        if len(verdicts) - (last is not None and verdicts[0].result is Result.CHUNK) == len(made.order):
            return "queue_end"
        if made.is_spent:
            return "budget"
        return "preempt_failed" if self._config.priority_preemption else "no_slot"

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
        if made is None or made.observed is None:
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
        made.observed = msgspec.structs.replace(made.observed, **told)

    # ---- telling -------------------------------------------------------------------------------------------

    def tell(self, made: Pass, now: float, batch_is_full: bool) -> None:
        """Record a pass that was made.

        Args:
            now: the clock of its turn, seconds.
            batch_is_full: the mark behind it.
        """
        adder, verdicts, entered, seen, before = made.adder, made.verdicts, made.entered, made.observed, made.before
        assert seen is not None
        assert before is not None
        count, held = len(made.order), made.held
        positions = list(range(count)) if made.positions is None else made.positions
        self._looking.keep(made.order, made.looks, made.last, made.positions is None)
        duplicates = [_UNHELD if rid in held else None for rid in made.looks[0]] if held else [None] * count
        told = Decided(None, (), *made.looks, duplicates, positions, verdicts)
        scheduler = self._scheduler
        configured, chunked = scheduler.policy.policy._value_, scheduler.chunked_req
        fallback = None if configured == made.active else "queue_too_long"
        if configured != self._config.schedule_policy:
            fallback = "radix_cache_disabled"
        facts = PassFacts(
            now=now,
            configured=configured,
            active=made.active,
            fallback=fallback,
            queue_len=count,
            running=len(seen.running),
            chunked_in=entered.chunked.rid if entered.chunked is not None else None,
            chunked_out=chunked.rid if chunked is not None else None,
            chunk_limit=adder.chunked_req_limit,
            stop=self._stop(made),
            before=before,
            after=verdicts[-1].remaining if verdicts else before,
            batch_is_full_before=entered.batch_is_full,
            batch_is_full=batch_is_full if made.batch_is_full is None else made.batch_is_full,
            new_token_ratio=scheduler.new_token_ratio_tracker.current,
            processed_tokens=scheduler.processed_tokens_counter,
            refresh_calls=made.calls,
            random_state=None if made.chance is None else hash_of(made.chance),
            negotiation=made.negotiation,
            admitted=len(adder.can_run_list),
            preempted=made.preempted,
        )
        decided_ns = time.monotonic_ns() - made.began_ns
        self._tracer.put_pass(made.number, made.seq, facts, told, decided_ns, seen)


def _remaining(adder: Any, memory: int | None = None) -> Remaining:
    """What is left of the budgets.

    Args:
        memory: free and evictable tokens, if that was just read: to read it takes as long as all else.
    """
    budget = adder.memory_budget
    if type(budget).__name__ != "PrefillBudget":
        return Remaining(adder.rem_total_tokens, adder.cur_rem_tokens, adder.rem_input_tokens, adder.rem_chunk_tokens)
    if memory is None:
        memory = budget._available_and_evictable()
    left = memory - budget.total_offset, memory - budget.current_offset
    return Remaining(*left, adder.rem_input_tokens, adder.rem_chunk_tokens)


def _is_spent(adder: Any, left: Remaining) -> bool:
    """Whether nothing is left of what a batch may compute, and that ends the pass."""
    return (left.input <= 0 or (left.chunk is not None and left.chunk <= 0)) and adder.budget_state()._name_ == "OTHER"


def _delayer_state(delayer: Any) -> DelayerState:
    state = delayer._curr_state
    if state is None:
        return DelayerState(None, 0.0, delayer.skip_first_delayer)
    return DelayerState(state.delayed_count, state.start_time, delayer.skip_first_delayer)
