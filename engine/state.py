"""One rank's scheduler state, and the only code that changes it.

`view()` freezes what a decision may read, `apply(plan)` carries a decision out. Nothing here reads a clock, a
device or the network: times are arguments, tokens come from outside, and two states that get the same calls are
equal. That is what makes a recorded run replayable from its inputs.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import NamedTuple

from schedscope.engine import tokens
from schedscope.engine.batch import Batch, DecodeBatch, InFlight, Member
from schedscope.engine.chance import RandomState, seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, gate
from schedscope.engine.delayer import DelayerState, Report
from schedscope.engine.errors import ConfigError
from schedscope.engine.live import Live
from schedscope.engine.looks import Looks
from schedscope.engine.operations import Lock, Preempt, Touch
from schedscope.engine.ordering import resolve_policy
from schedscope.engine.pool import KVPool
from schedscope.engine.radix import Evicted, Match, Node, RadixCache
from schedscope.engine.request import Request
from schedscope.engine.running import RunningBatch
from schedscope.engine.verdict import Verdict
from schedscope.engine.view import Chunked, View, Waiting

# Without the step through Python that takes most of the time.
_WAITING = attrgetter("waiting")
_member: Callable[[tuple[object, ...]], Member] = partial(tuple.__new__, Member)

QUEUE_FULL = "The request queue is full."
OUTRANKED = "The request is aborted by a higher priority request."


class Refused(NamedTuple):
    """A request that the queue's limit turned away."""

    live: Live
    message: str


class SchedulerState:
    """Everything that scheduling remembers from step to step.

    Args:
        config: raises ConfigError for a policy that can't run under it, or chunks that could never be cut.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        align, chunk = config.truncation_align_size, config.chunked_prefill_size
        if align is not None and chunk is not None and chunk < align:
            raise ConfigError(
                f"Chunked prefill is aligned to {align} tokens, but each rank's chunked prefill size is {chunk}: "
                "a longer prompt could never be scheduled"
            )
        self.config = config
        self.policy = resolve_policy(config)
        self.forget_cache()
        self.queue: list[Live] = []
        self.running_batch = RunningBatch()
        self.chunked: Live | None = None
        self.rows = 0
        """Request rows taken."""
        self.batch_is_full = False
        self.batch_is_full_pass: int | None = None
        """The pass that set the mark."""
        self.processed_tokens = 0
        self.new_token_ratio = self.first_new_token_ratio
        self.refresh_calls = 0
        self.random_state: RandomState | None = (
            seeded(config.random_seed) if config.schedule_policy == "random" else None
        )
        self.delayer = DelayerState()
        self.in_flight: deque[InFlight] = deque()
        """Batches whose tokens are to come, oldest first. Between two steps: one with overlap, none without."""
        self.last_prefill: list[Live] = []
        """The prefill of the step before; it joins the running batch at the start of the next one."""
        self.last_prefill_tokens = 0
        self.last_prefill_only = False
        self.running_extend_tokens = 0
        """Prefill tokens of the batch that the running batch began as. SGLang adds them again in each decode step."""
        self.running_prefill_only = False
        """No request that the running batch is made of wanted a token: SGLang waits for them to end, not decoding."""
        self.prefill_batch_sizes: deque[int] = deque(maxlen=config.prefill_delayer_max_prefill_bs_window_size)
        self.max_prefill_bs = 0
        self.turned_away: list[Refused] = []
        """Whom the queue's limit turned away since the list was last emptied."""
        self.last_entry_time = -math.inf
        self.evictions: list[Evicted] = []
        """What was evicted since the list was last emptied."""

    def forget_cache(self) -> None:
        """Start with an empty prefix cache and a free pool; nobody may hold memory."""
        config = self.config
        self.cache = RadixCache(
            config.page_size, config.radix_eviction_policy, config.disable_radix_cache, config.slru_protected_hits
        )
        self.pool = KVPool(config.num_pages, config.page_size)

    # ---- reading -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Live]:
        """The requests that decode."""
        return self.running_batch.lives

    @running.setter
    def running(self, lives: Iterable[Live]) -> None:
        self.running_batch.changed()
        self.running_batch = RunningBatch(lives)

    @property
    def first_new_token_ratio(self) -> float:
        """Where the estimate of outputs starts."""
        return min(self.config.init_new_token_ratio * self.config.schedule_conservativeness, 1.0)

    @property
    def least_new_token_ratio(self) -> float:
        """Below this the estimate doesn't fall."""
        return min(self.first_new_token_ratio * self.config.min_new_token_ratio_factor, 1.0)

    @property
    def token_usage(self) -> float:
        """Used share of the KV pool, 0..1; what can be evicted is not used."""
        used = self.pool.size - self.pool.available - self.cache.evictable
        return used / self.pool.size if used else 0.0

    def view(self, now: float = 0.0, reports: tuple[Report, ...] = ()) -> View:
        """What a decision may read, frozen."""
        return View(
            queue=tuple([live.waiting or self._waiting(live) for live in self.queue]),
            running=self.running_batch.freeze(self.config.page_size),
            cache=self.cache,
            available=self.pool.available,
            free_rows=self.config.max_running_requests - self.rows,
            chunked=self._chunked(),
            batch_is_full=self.batch_is_full,
            processed_tokens=self.processed_tokens,
            new_token_ratio=self.new_token_ratio,
            refresh_calls=self.refresh_calls,
            delayer=self.delayer,
            reports=reports,
            max_prefill_bs=self.max_prefill_bs,
            token_usage=self.token_usage,
            now=now,
        )

    def gate(self) -> Plan | None:
        """The plan of a step that a gate ends, from what can be told without a view; None: it needs one."""
        free_rows = self.config.max_running_requests - self.rows
        facts = (self.batch_is_full, self.chunked is not None, len(self.queue), len(self.running_batch), free_rows)
        return gate(self.config, *facts)

    @staticmethod
    def _waiting(live: Live) -> Waiting:
        request = live.request
        live.waiting = Waiting(
            rid=request.rid,
            tokens=live.tokens,
            prompt_len=live.prompt_len,
            output_len=live.output_len,
            max_new_tokens=request.sampling.max_new_tokens,
            ignore_eos=request.sampling.ignore_eos,
            priority=live.priority,
            routing_key=request.routing_key,
            space=live.space,
            entry_time=live.entry_time,
            arrival_processed_tokens=live.arrival_processed_tokens,
            retracted=live.retracted,
            prefix_len=live.prefix_len,
            matched=live.matched,
            fill_len=live.fill_len,
        )
        return live.waiting

    def _chunked(self) -> Chunked | None:
        live = self.chunked
        if live is None:
            return None
        return Chunked(
            rid=live.rid,
            length=live.length,
            prefix_len=live.prefix_len,
            output_len=live.output_len,
            prompt_len=live.prompt_len,
            max_new_tokens=live.request.sampling.max_new_tokens,
            ignore_eos=live.request.sampling.ignore_eos,
            retracted=live.retracted,
        )

    # ---- the queue -----------------------------------------------------------------------------------------

    def admit_to_queue(self, live: Live, now: float, entry_time: float | None = None) -> None:
        """Join the queue's tail if its limit allows: a new request, or one that was retracted or preempted.

        Under priority scheduling the least wanted one goes instead. Who goes is in `turned_away`.

        Args:
            entry_time: None: now, or as little later as makes it the last. SGLang reads a clock for each request, so
                that no two have the same time; ours stands still in a step.
        """
        config = self.config
        if config.max_queued_requests is not None and len(self.queue) + 1 > config.max_queued_requests:
            if not config.enable_priority_scheduling:
                self.turned_away.append(Refused(live, QUEUE_FULL))
                return
            sign = config.priority_sign
            least = max(self.queue, key=lambda waiting: (sign * waiting.priority, waiting.entry_time))
            if not sign * live.priority < sign * least.priority:
                self.turned_away.append(Refused(live, QUEUE_FULL))
                return
            self.queue.remove(least)
            self.turned_away.append(Refused(least, OUTRANKED))
        if entry_time is None:
            entry_time = max(now, math.nextafter(self.last_entry_time, math.inf))
        live.entry_time = self.last_entry_time = entry_time
        live.arrival_processed_tokens = self.processed_tokens
        live.waiting = None
        self.queue.append(live)

    def resolved_priority(self, request: Request) -> int:
        """A request's priority, with the default of priority scheduling filled in."""
        if request.priority is None:
            return self.config.lowest_priority if self.config.enable_priority_scheduling else 0
        return request.priority

    # ---- a decision carried out ----------------------------------------------------------------------------

    def apply(
        self,
        plan: Plan,
        now: float,
        pass_number: int | None = None,
        entry_times: Mapping[str, float] = MappingProxyType({}),
    ) -> Batch | None:
        """Carry out a plan made from this state's view. Returns the prefill batch, with its memory allocated.

        Args:
            entry_times: see `admit_to_queue`; of preempted requests, by rid.

        Raises PoolExhaustedError after everything else was carried out, as SGLang does.
        """
        if plan.batch_is_full != self.batch_is_full:
            self.batch_is_full_pass = pass_number if plan.batch_is_full else None
        self.batch_is_full = plan.batch_is_full
        batch = self._carry_out(plan, now, entry_times)
        if plan.negotiation is not None:
            self.delayer = plan.negotiation.next_state
            observed = plan.attempted_prefill_bs if batch is None else len(batch.members)
            if observed > 0:
                self.prefill_batch_sizes.append(observed)
                self.max_prefill_bs = max(self.prefill_batch_sizes)
        return batch

    def _carry_out(self, plan: Plan, now: float, entry_times: Mapping[str, float]) -> Batch | None:
        if plan.ordering is None or plan.admission is None:
            return None

        requests = plan.ordering.ranked.requests
        self.queue = list(map(self.queue.__getitem__, plan.ordering.ranked.positions))
        looked_at = len(plan.admission.looked)
        by_rid = {live.rid: live for live in self.queue[:looked_at]}
        """Admission looks at the queue from its head on."""
        changed = map(is_not, map(_WAITING, self.queue), requests)
        for live, request in compress(zip(self.queue, requests, strict=True), changed):
            live.waiting = request
            live.prefix_len, live.matched = request.prefix_len, request.matched
        self.random_state = plan.ordering.random_state
        self.refresh_calls = plan.ordering.refresh_calls
        self.cache.touch_many(plan.ordering.touches)

        preempted: list[Live] = []
        locks: dict[str, Node] = {}
        for operation in plan.admission.operations:
            match operation:
                case Touch(rid, length):
                    self.cache.touch(self._match(by_rid[rid], length))
                case Lock(rid, length):
                    locks[rid] = self.cache.resolve(self._match(by_rid[rid], length))
                    self.cache.lock(locks[rid])
                case Preempt():
                    preempted += self._preempt(operation)
        for rid, looked in plan.admission.looked.items():
            live = by_rid[rid]
            live.waiting = looked
            live.prefix_len, live.matched, live.fill_len = looked.prefix_len, looked.matched, looked.fill_len

        admitted = plan.admission.admitted
        if self.chunked is not None:
            by_rid[self.chunked.rid] = self.chunked
        joining = [by_rid[verdict.rid] for verdict in admitted]
        if admitted:
            gone = set(joining)
            self.queue[:looked_at] = [live for live in self.queue[:looked_at] if live not in gone]
        for live in preempted:
            live.preemptions += 1
            self.admit_to_queue(live, now, entry_times.get(live.rid))
        if not admitted:
            return None
        unfinished = plan.admission.chunked_rid
        self.chunked = None if unfinished is None else by_rid[unfinished]
        members = []
        for live, verdict in zip(joining, admitted, strict=True):
            self._bind(live, verdict, locks.get(live.rid))
            members.append(Member(live, verdict.prefix_len, live.extend_end, False, live is self.chunked))
        self._allocate(members)
        return self._mix(Batch("prefill", tuple(members)))

    def _match(self, live: Live, limit: int) -> Match:
        assert live.waiting is not None
        return self.cache.cut(self.cache.memo(Looks).find(live.waiting, self.cache), limit)

    def _preempt(self, operation: Preempt) -> list[Live]:
        victims = [live for live in self.running if live.rid in operation.rids]
        self.running = [live for live in self.running if live not in victims]
        for live, room in zip(victims, operation.room, strict=True):
            self.retract(live, room)
        return victims

    def _bind(self, live: Live, verdict: Verdict, lock: Node | None) -> None:
        """An admitted request takes over its cached prefix."""
        assert verdict.extend_len is not None
        live.extend_end = verdict.prefix_len + verdict.extend_len
        live.retracted = False
        if live.row:
            return
        if live.output_len == 0:
            live.cached_tokens = verdict.prefix_len
        self.rows += 1
        live.lock = lock
        live.protected_len = verdict.prefix_len
        if lock is not None and verdict.prefix_len:
            live.row = array("i")
            for node in self.cache.path(lock):
                live.row.extend(node.slots)

    def _allocate(self, members: Sequence[Member]) -> None:
        """Slots for a prefill; each request may need one page more than its tokens."""
        wanted = sum(member.end - member.start for member in members)
        if self.config.page_size > 1:
            wanted += len(members) * self.config.page_size
        self.make_room(wanted)
        for member in members:
            self.pool.extend(member.live.row, member.end)
            member.live.kv_len = member.end

    def _mix(self, batch: Batch) -> Batch:
        """With mixed chunks the running requests decode in the prefill's forward, if their next tokens fit."""
        if not self.config.enable_mixed_chunk or not self.running_batch:
            return batch
        self.running_batch = self.running_batch.drop_finished()
        if self.drop_ending():
            self.batch_is_full = False
        if not self.running or not self.fits_decode(self.running):
            return batch
        for live in self.running:
            live.fill_len = live.length
        decoding = self.allocate_decode(self.running)
        for live in self.running:
            live.extend_end = live.kv_len
        self.running = []
        return Batch("mixed", (*batch.members, *decoding))

    # ---- memory --------------------------------------------------------------------------------------------

    def make_room(self, wanted: int) -> None:
        """Evict until `wanted` tokens are free or nothing is left to evict."""
        missing = wanted - self.pool.available
        if missing > 0:
            self.evict(missing)

    def evict(self, wanted: int) -> list[Evicted]:
        """Evict leaves of `wanted` tokens or more, and free their memory."""
        evicted = self.cache.evict(wanted)
        for leaf in evicted:
            self.pool.free(leaf.node.slots)
        self.evictions += evicted
        return evicted

    def checkpoint(self, live: Live, up_to: int) -> None:
        """Keep the first `up_to` tokens of a request in the cache, and move its lock onto them.

        `up_to` doesn't reach behind its tokens, as what it holds may: the slot of a token that is still to come.
        """
        live.prefix_len = live.extend_end
        if self.cache.disabled:
            return
        sequence = live.tokens[: up_to * tokens.TOKEN_BYTES]
        priority = live.priority
        inserted = self.cache.insert(sequence, live.space, live.row, priority=priority, inserted_len=live.inserted_len)
        page = self.config.page_size
        whole = up_to // page * page
        live.inserted_len = max(live.inserted_len, whole)
        prompt = live.prompt_len // page * page
        if 0 < prompt < whole:
            # Split at the end of the prompt, so that the output can be evicted alone.
            self.cache.insert(
                live.request.prompt,
                live.space,
                live.row,
                priority=min(priority + 1, 2**63 - 1),
                inserted_len=prompt,
            )
        if inserted.existing > live.protected_len:
            self.pool.free(live.row[live.protected_len : inserted.existing])
            held = array("i")
            for node in self.cache.path(inserted.node):
                held.extend(node.slots)
            live.row[live.protected_len : whole] = held[live.protected_len : whole]
        if live.lock is not None:
            self.cache.unlock(live.lock)
        self.cache.lock(inserted.node)
        live.lock = inserted.node
        live.protected_len = whole

    def release(self, live: Live, *, checkpoint: bool) -> None:
        """Give a request's memory back; with `checkpoint` the cache keeps what it computed."""
        self.running_batch.mark()
        if checkpoint:
            self.checkpoint(live, min(live.kv_len, live.length))
        if len(live.row) > live.protected_len:
            self.pool.free(live.row[live.protected_len :])
        if live.lock is not None:
            self.cache.unlock(live.lock)
        live.lock = None
        live.row = array("i")
        live.kv_len = 0
        live.protected_len = 0
        live.inserted_len = 0
        self.rows -= 1

    def retract(self, live: Live, room: int) -> None:
        """Take a running request's memory without keeping it, and have `room` tokens free."""
        self.release(live, checkpoint=False)
        if not self.cache.disabled:
            self.make_room(room)
        live.prefix_len = 0
        live.matched = 0
        live.retracted = True

    # ---- between passes ------------------------------------------------------------------------------------

    def stash_chunked(self) -> None:
        """The chunk that was just computed goes into the cache."""
        if self.chunked is not None and self.chunked.extend_end > self.chunked.prefix_len:
            self.checkpoint(self.chunked, self.chunked.extend_end)

    def merge_prefill(self) -> None:
        """The requests prefilled in the last step join the running batch."""
        joining = [live for live in self.last_prefill if not live.finished and live is not self.chunked]
        if len(joining) < len(self.last_prefill):
            self.batch_is_full = False
        if joining:
            if not self.running_batch:
                # SGLang then takes over the prefill batch as it is, and its mark, which is not set.
                self.running_extend_tokens = self.last_prefill_tokens
                self.running_prefill_only = True
                self.batch_is_full = False
            self.running_prefill_only &= self.last_prefill_only
            self.running = [*self.running, *joining]
        self.last_prefill = []

    def drop_finished(self) -> None:
        """Requests that ended leave the running batch."""
        left = self.running_batch.drop_finished()
        if left is not self.running_batch:
            self.batch_is_full = False
            self.running_batch = left

    def drop_ending(self) -> bool:
        """Requests whose token in flight is the last they asked for leave the running batch. Whether any did."""
        if not self.in_flight or self.running_batch.left > 1:
            return False
        coming = {member.live for flying in self.in_flight for member in flying.batch.members}
        ending = {
            live
            for live in coming.intersection(self.running)
            if live.output_len + 1 >= live.request.sampling.max_new_tokens
        }
        if ending:
            self.running = [live for live in self.running if live not in ending]
        return bool(ending)

    def decode_room(self, lives: Sequence[Live]) -> int:
        """Tokens, whole pages, that the next decode of these requests allocates."""
        page = self.config.page_size
        return len(lives) if page == 1 else sum([live.kv_len % page == 0 for live in lives]) * page

    def fits_decode(self, lives: Sequence[Live] | None = None) -> bool:
        """Whether these requests, or all that run, can decode one token each, after evicting what can go."""
        if lives is None and self.config.page_size == 1:
            wanted = len(self.running_batch)
        else:
            wanted = self.decode_room(self.running if lives is None else lives)
        if not self.cache.disabled:
            self.make_room(wanted)
        return self.pool.available >= wanted

    def decode(self) -> Batch:
        """A slot for one more token of each running request. Raises PoolExhaustedError."""
        running = self.running_batch
        if self.config.page_size > 1:
            return Batch("decode", self.allocate_decode(self.running))
        if not self.cache.disabled:
            self.make_room(len(running))
        running.grow(self.pool.take(len(running)))
        return DecodeBatch(running)

    def allocate_decode(self, lives: Sequence[Live]) -> list[Member]:
        """A slot for one more token each. Raises PoolExhaustedError."""
        if not self.cache.disabled:
            self.make_room(len(lives) * self.config.page_size)
        self.pool.extend_each([live.row for live in lives])
        members = []
        for live in lives:
            start = live.kv_len
            live.kv_len = end = start + 1
            members.append(_member((live, start, end, True, False)))
        return members
