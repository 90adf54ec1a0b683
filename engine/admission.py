"""Admission: who of the ordered queue joins the prefill batch, and why the next one doesn't.

`admit` folds a `Budget` over the queue. Nothing is changed: locks, touches and preemptions of the pass are kept as
a list of operations (`Operation`), which the state applies afterwards, in that order. Every request that is looked at
gets a `Verdict` with its reason and operands.

Source: `PrefillAdder` in `schedule_policy.py` and `_get_new_batch_prefill_raw` in `scheduler.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.budget import Budget, Remaining
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Negotiation, Report, delayer_slots, local_report, negotiate
from schedscope.engine.operations import Lock, Operation, Preempt, Touch
from schedscope.engine.ordering import shortest_prefill_work
from schedscope.engine.preemption import Preemption, find_victims, output_reserve, output_reserves
from schedscope.engine.radix import Match
from schedscope.engine.scratch import ScratchCache
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.engine.view import Chunked, Running, View, Waiting


class Admission(NamedTuple):
    """The admission loop of a pass."""

    budget: Remaining
    """Before anyone is admitted."""
    chunk_limit: int | None
    """Cap that shortest-prefill-first puts on the continuing chunk."""
    verdicts: tuple[Verdict, ...]
    stop: str
    """`queue_end`, `NO_TOKEN`, `OTHER`, `budget`, `no_slot` or `preempt_failed`."""
    chunked_rid: str | None
    """The unfinished chunked request after the pass."""
    preempted: tuple[str, ...]
    """In the order in which they were released."""
    batch_is_full: bool
    looked: dict[str, Waiting]
    """Requests that were matched again, with their new `prefix_len`, `matched` and `fill_len`."""
    operations: tuple[Operation, ...]
    negotiation: Negotiation | None
    attempted_prefill_bs: int
    """Batch size the delayer notes when nothing is admitted."""

    @property
    def admitted(self) -> tuple[Verdict, ...]:
        """The prefill batch, in order."""
        return tuple(verdict for verdict in self.verdicts if verdict.admitted)


def allocatable(config: SchedulerConfig, running: int, free_rows: int) -> int:
    """Requests that could still join: limited by the batch and by request rows."""
    return min(config.max_running_requests - running, max(free_rows, 0))


def admit(
    queue: Sequence[Waiting],
    view: View,
    config: SchedulerConfig,
    touches: Sequence[Match],
    batch_is_full: bool,
) -> Admission:
    """Run the admission loop over an ordered queue.

    Args:
        touches: look-ups that ordering made before, in order; an eviction in this pass has to know them.
        batch_is_full: the mark as the gates left it.
    """
    return _Pass(view, config, touches, batch_is_full).run(queue)


class _Pass:
    """The fold of one pass. Lives as long as `admit`; what it holds never leaves it but as an `Admission`."""

    def __init__(self, view: View, config: SchedulerConfig, touches: Sequence[Match], batch_is_full: bool) -> None:
        self.view = view
        self.config = config
        self.cache = ScratchCache(view.cache, touches)
        self.available = view.available
        self.running: Sequence[Running] = view.running
        """Requests that run and were not preempted in this pass."""
        self.free_rows = view.free_rows
        self.batch_is_full = batch_is_full
        self.verdicts: list[Verdict] = []
        self.batch: list[Waiting | Chunked] = []
        self.operations: list[Operation] = []
        self.preempted: list[str] = []
        self.looked: dict[str, Waiting] = {}
        self.negotiation: Negotiation | None = None
        self.attempted_prefill_bs = 0
        self.new_chunked: str | None = None
        self.outputs: list[tuple[float, int]] | None = None
        mixed = len(view.running) if config.enable_mixed_chunk and config.chunked_prefill_size else 0
        chunk = config.chunked_prefill_size
        reserve = sum(output_reserves(view.running, config, view.new_token_ratio))
        self.budget = Budget(
            page_size=config.page_size,
            input=config.max_prefill_tokens - mixed,
            chunk=None if chunk is None else chunk - mixed,
            total_offset=mixed + reserve,
            current_offset=mixed,
        )

    # ---- the loop ------------------------------------------------------------------------------------------

    def run(self, queue: Sequence[Waiting]) -> Admission:
        before = self.remaining()
        chunk_limit = None
        chunked_rid = None
        if self.view.chunked is not None:
            chunk_limit = self._chunk_limit(queue)
            chunked_rid = self._continue_chunk(chunk_limit)
        held_rows = len(self.batch)
        stop = "queue_end"
        for request in queue:
            if self._budget_result()[0] is Result.OTHER:
                stop = "budget"
                break
            slots = allocatable(self.config, len(self.running), self.free_rows + held_rows)
            if len(self.batch) >= slots:
                self.batch_is_full = True
            preemption = None
            if self.batch_is_full:
                preemption = self._preempt(request) if self.config.priority_preemption else None
                if preemption is None:
                    stop = "preempt_failed" if self.config.priority_preemption else "no_slot"
                    break
            verdict = self._look_at(request, chunked_rid is not None)
            if preemption is not None:
                verdict = verdict._replace(preempted=preemption.rids)
            self.verdicts.append(verdict)
            if verdict.result is not Result.CONTINUE:
                if verdict.result is Result.NO_TOKEN:
                    self.batch_is_full = bool(self.batch) or len(self.running) > 0
                stop = str(verdict.result)
                break
        return Admission(
            budget=before,
            chunk_limit=chunk_limit,
            verdicts=tuple(self.verdicts),
            stop=stop,
            chunked_rid=self.new_chunked or chunked_rid,
            preempted=tuple(self.preempted),
            batch_is_full=self.batch_is_full,
            looked=self.looked,
            operations=tuple(self.operations),
            negotiation=self.negotiation,
            attempted_prefill_bs=self.attempted_prefill_bs,
        )

    def remaining(self, pinned: int = 0) -> Remaining:
        """Budgets now; `pinned` evictable tokens are spoken for."""
        return self.budget.remaining(self.available + self.cache.evictable - pinned)

    def _budget_result(self) -> tuple[Result, Reason]:
        left = self.remaining()
        if left.total <= 0:
            return Result.NO_TOKEN, Reason.TOTAL_SPENT
        if left.current <= 0:
            return Result.NO_TOKEN, Reason.CURRENT_SPENT
        if left.input <= 0:
            return Result.OTHER, Reason.INPUT_SPENT
        if left.chunk is not None and left.chunk <= 0:
            return Result.OTHER, Reason.CHUNK_SPENT
        return Result.CONTINUE, Reason.ADMITTED

    # ---- the continuing chunk ------------------------------------------------------------------------------

    def _chunk_limit(self, queue: Sequence[Waiting]) -> int | None:
        """Tokens that shortest-prefill-first leaves to the continuing chunk; None: no cap."""
        chunked, page = self.view.chunked, self.config.page_size
        assert chunked is not None
        budget = self.budget.chunk or 0
        if self.config.schedule_policy != "shortest-prefill-first" or budget < 2 * page:
            return None
        left = chunked.length - chunked.prefix_len
        reserved = 0
        for request in queue:
            work = shortest_prefill_work(request)
            charge = self.budget.ceil_to_page(work)
            if work >= left or reserved + charge > budget - page:
                break
            reserved += charge
        return (budget - reserved) // page * page if reserved else None

    def _continue_chunk(self, chunk_limit: int | None) -> str | None:
        """Give the chunked request its next piece. Returns its rid while it stays unfinished."""
        chunked = self.view.chunked
        assert chunked is not None
        chunk = self.budget.chunk
        assert chunk is not None, "a chunked request without chunked prefill"
        limit = min(chunk, int(self.remaining().total))
        if limit <= 0:
            # It must go on to ever give its memory back; SGLang then takes the whole chunk.
            limit = chunk
        self._negotiate()
        if chunk_limit is not None:
            limit = min(limit, chunk_limit)
        wanted = chunked.length - chunked.prefix_len
        unfinished = wanted > limit
        extend_len = min(wanted, limit)
        output = 0 if unfinished else min(chunked.max_new_tokens, self.config.clip_max_new_tokens)
        self.budget = self.budget.charge(extend_len, output)
        operands = (chunked.prefix_len, extend_len, unfinished, wanted, limit)
        verdict = Verdict(chunked.rid, Result.CHUNK, Reason.CHUNK_CONTINUED, *operands, self.remaining())
        self.verdicts.append(verdict)
        self.batch.append(chunked)
        return chunked.rid if unfinished else None

    # ---- a waiting request ---------------------------------------------------------------------------------

    def _look_at(self, request: Waiting, has_chunked: bool) -> Verdict:
        """Match the request again, as admission does, and decide."""
        limit = max(request.length - 1, 0)
        match = self.cache.match(request, limit)
        prefix_len = 0 if self.config.radix_force_miss else match.length
        if not self.cache.disabled and limit >= self.config.page_size:
            self.cache.touch(match)
            self.operations.append(Touch(request.rid, match.length))
        if self.config.radix_force_miss:
            match = self.cache.nothing
        found = prefix_len, min(prefix_len, limit), request.length
        if found != (request.prefix_len, request.matched, request.fill_len):
            request = request._replace(prefix_len=found[0], matched=found[1], fill_len=found[2])
        self.looked[request.rid] = request
        if self._at_prefill_max_requests():
            most = self.config.prefill_max_requests
            return self._refuse(request, Result.OTHER, Reason.PREFILL_MAX_REQUESTS, len(self.batch) + 1, most)
        if request.ignore_eos and self.cache.disabled:
            return self._admit_ignoring_eos(request)
        return self._admit(request, match, has_chunked)

    def _at_prefill_max_requests(self) -> bool:
        most = self.config.prefill_max_requests
        return most is not None and len(self.batch) >= most

    def _admit(self, request: Waiting, match: Match, has_chunked: bool) -> Verdict:
        config = self.config
        clip = config.clip_max_new_tokens
        extend_len = request.length - request.prefix_len
        output_left = min(max(request.max_new_tokens - request.output_len, 0), clip)
        need = extend_len + output_left + config.page_size
        have = self.remaining(self.cache.pin_cost(match)).total
        if need >= have:
            return self._refuse(request, Result.NO_TOKEN, Reason.MEMORY, need, have)
        paged = self.budget.ceil_to_page(extend_len)
        chunk = self.budget.chunk
        if chunk is None and self.batch and paged >= self.budget.input:
            return self._refuse(request, Result.OTHER, Reason.INPUT_BUDGET, paged, self.budget.input)
        max_new = min(request.max_new_tokens, clip)
        unfinished = chunk is not None and paged > chunk
        if chunk is not None and unfinished:
            if has_chunked and config.schedule_policy == "shortest-prefill-first":
                return self._refuse(request, Result.OTHER, Reason.CHUNK_TAKEN, paged, chunk)
            piece = chunk // config.page_size * config.page_size
            if (align := config.truncation_align_size) is not None:
                piece = piece // align * align
            end = (request.prefix_len + piece) // config.page_size * config.page_size
            piece = end - request.prefix_len
            if piece <= 0:
                return self._refuse(request, Result.OTHER, Reason.CHUNK_TOO_SMALL, config.page_size, chunk)
            extend_len, max_new = piece, 0
        if not self._negotiate():
            return self._refuse(request, Result.OTHER, Reason.DELAYED, None, None)
        self.cache.lock(match)
        self.operations.append(Lock(request.rid, match.length))
        return self._commit(request, extend_len, max_new, unfinished, need, have)

    def _admit_ignoring_eos(self, request: Waiting) -> Verdict:
        """With ignore_eos and without a prefix cache the future is known: play it through."""
        config = self.config
        extend_len = request.length - request.prefix_len
        paged = self.budget.ceil_to_page(extend_len) + config.page_size
        left = self.remaining()
        have = min(left.current, left.total)
        if paged > have:
            return self._refuse(request, Result.NO_TOKEN, Reason.MEMORY_IGNORE_EOS, paged, have)
        short = self._future_shortfall(request, left.current - paged)
        if short is not None:
            return self._refuse(request, Result.NO_TOKEN, Reason.MEMORY_FUTURE, *short)
        if not self._negotiate():
            return self._refuse(request, Result.OTHER, Reason.DELAYED, None, None)
        chunk = self.budget.chunk
        if chunk is None or extend_len <= chunk:
            max_new = min(request.max_new_tokens, config.clip_max_new_tokens)
            return self._commit(request, extend_len, max_new, False, paged, have)
        if chunk <= 0:
            return self._refuse(request, Result.OTHER, Reason.CHUNK_BUDGET, extend_len, chunk)
        return self._commit(request, chunk, 0, True, paged, have)

    def _future_shortfall(self, request: Waiting, free: float) -> tuple[float, float] | None:
        """Let all outputs grow and end, shortest first; (need, have) at the first moment without enough memory."""
        own = self._growth(request)
        if self.outputs is None:
            states = [self._growth(r) for r in (request, *self.running, *self.batch)]
            self.outputs = [state for state in states if state[0] > 0]
            self.outputs.sort(key=lambda state: state[0])
        elif own[0] > 0:
            # SGLang's own insertion: before the first that is not shorter, else before the last.
            place = 0
            for place in range(len(self.outputs)):
                if own[0] <= self.outputs[place][0]:
                    break
            self.outputs.insert(place, own)
        freed = 0
        for i, (left, occupied) in enumerate(self.outputs):
            batch = len(self.outputs) - i
            have = free + freed - left * batch
            need = self.config.ignore_eos_reserve_tokens * batch
            if have <= need:
                return need, have
            freed += occupied
        return None

    def _growth(self, request: Waiting | Running | Chunked) -> tuple[float, int]:
        """Output tokens it will still get, by the estimate, and tokens it holds."""
        ratio = 1.0 if request.ignore_eos else self.view.new_token_ratio
        left = request.max_new_tokens * ratio - request.output_len
        return left, request.prompt_len + request.output_len

    def _commit(
        self, request: Waiting, extend_len: int, max_new: int, unfinished: bool, need: float, have: float
    ) -> Verdict:
        self.budget = self.budget.charge(extend_len, max_new)
        if unfinished:
            self.new_chunked = request.rid
        result, reason = self._budget_result()
        self.batch.append(request)
        operands = (request.prefix_len, extend_len, unfinished, need, have)
        return Verdict(request.rid, result, reason, *operands, self.remaining())

    def _refuse(
        self, request: Waiting, result: Result, reason: Reason, need: float | None, have: float | None
    ) -> Verdict:
        operands = (request.prefix_len, None, False, need, have)
        return Verdict(request.rid, result, reason, *operands, self.remaining())

    # ---- others --------------------------------------------------------------------------------------------

    def _negotiate(self) -> bool:
        """Ask the prefill delayer; the first answer of a pass holds for all of it."""
        config, view = self.config, self.view
        if not config.enable_prefill_delayer:
            return True
        free_slots = max(delayer_slots(config, config.max_running_requests) - len(self.running), 1)
        attempted = min(max(len(view.queue), 1), free_slots)
        self.attempted_prefill_bs = max(self.attempted_prefill_bs, attempted)
        if self.negotiation is None:
            own = local_report(
                config,
                view.delayer,
                view.now,
                prefillable=True,
                token_usage=view.token_usage,
                running_batch=len(self.running),
                max_prefill_bs=view.max_prefill_bs,
                waiting_queue_len=len(view.queue),
            )
            self.negotiation = negotiate(config, view.delayer, own, view.reports, view.now, config.max_running_requests)
        return self.negotiation.allow

    def _preempt(self, request: Waiting) -> Preemption | None:
        """Release running requests of lower priority for this one, if enough can be freed."""
        found = find_victims(request, self.running, self.config, self.view.new_token_ratio, self.remaining().total)
        if found is None:
            return None
        room = []
        for victim in found.victims:
            self.budget = self.budget.release(output_reserve(victim, self.config, self.view.new_token_ratio))
            self.running = [each for each in self.running if each is not victim]
            self.available += victim.private
            if victim.lock is not None:
                self.cache.unlock(victim.lock)
            self.free_rows += 1
            wanted = len(self.running) * self.config.retract_decode_steps
            room.append(wanted)
            if wanted > self.available:
                self.available += self.cache.evict(wanted - self.available)
        self.preempted.extend(found.rids)
        self.operations.append(Preempt(found.rids, tuple(room)))
        return found


def no_negotiation(config: SchedulerConfig, view: View) -> Negotiation:
    """How a rank that had nothing to prefill takes part in the pass."""
    own = Report()._replace(
        queue_timeout_expired=local_report(
            config, view.delayer, view.now, prefillable=False, token_usage=view.token_usage
        ).queue_timeout_expired
    )
    # SGLang leaves out the request limit in this call: it counts as none.
    return negotiate(config, view.delayer, own, view.reports, view.now, 0)
