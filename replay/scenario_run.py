"""Run a scenario through the decision core, and tell what came of it in the words of the scenario format."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.admission import Verdict
from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.delayer import DelayerState, Report, delayer_slots, local_report, negotiate
from schedscope.engine.errors import ConfigError, ScenarioError
from schedscope.engine.ordering import POLICIES, SGLANG_POLICIES
from schedscope.engine.pool import PoolExhaustedError
from schedscope.engine.radix import RadixCache, namespace
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.state import Batch, Live, SchedulerState
from schedscope.replay.scenario import CacheEntry, Part, Scenario, SceneRequest

FIRST_SEGMENT_TOKEN = 2**30


@dataclass
class Outcome:
    """What a scenario did."""

    expect: dict[str, Any]
    """In the vocabulary of `expect`."""
    plans: list[Plan] = field(default_factory=list)
    """One per pass, for showing."""


class Vocabulary:
    """Token ids for segments: all different, within a segment and between segments."""

    def __init__(self, scenario: Scenario) -> None:
        self._id = scenario.id
        self._lengths = dict(scenario.segments)
        for part in _all_parts(scenario):
            if isinstance(part, str) and ":" in part:
                name, length = self._split(part)
                if name not in scenario.segments:
                    self._lengths[name] = max(self._lengths.get(name, 0), length)
        self._segments: dict[str, bytes] = {}
        self._next = FIRST_SEGMENT_TOKEN

    def fresh(self, count: int) -> bytes:
        """Tokens used nowhere else."""
        made = tokens.encode(range(self._next, self._next + count))
        self._next += count
        return made

    def sequence(self, parts: Sequence[Part]) -> bytes:
        """The tokens of a sequence."""
        return b"".join(self._part(part) for part in parts)

    def _part(self, part: Part) -> bytes:
        if isinstance(part, dict):
            if set(part) != {"tokens"}:
                raise ScenarioError(f"{self._id}: a sequence part is a name, name:n or {{tokens: [...]}}")
            for token in part["tokens"]:
                if not 0 <= token < FIRST_SEGMENT_TOKEN:
                    raise ScenarioError(f"{self._id}: literal token {token} is not in 0..2**30-1")
            return tokens.encode(part["tokens"])
        name, _, _ = part.partition(":")
        if name not in self._lengths:
            raise ScenarioError(f"{self._id}: segment {name!r} has no length")
        if name not in self._segments:
            self._segments[name] = self.fresh(self._lengths[name])
        whole = self._segments[name]
        if ":" not in part:
            return whole
        length = self._split(part)[1]
        if length > self._lengths[name]:
            raise ScenarioError(f"{self._id}: {part!r} is longer than its segment ({self._lengths[name]} tokens)")
        return whole[: length * tokens.TOKEN_BYTES]

    def _split(self, part: str) -> tuple[str, int]:
        name, _, length = part.partition(":")
        if not length.isdigit():
            raise ScenarioError(f"{self._id}: {part!r}: expected name:count")
        return name, int(length)


def _all_parts(scenario: Scenario) -> list[Part]:
    parts: list[Part] = []
    for entry in scenario.cache:
        parts += entry.seq
    chunked = [scenario.chunked_req] if scenario.chunked_req else []
    for request in (*scenario.running, *chunked, *scenario.queue()):
        parts += request.input
        parts += request.output if isinstance(request.output, list) else []
    for probe in scenario.probe:
        parts += probe.seq
    for action in scenario.ops:
        parts += action.insert or action.touch or action.lock or action.probe or []
    return parts


def run_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario of kind pass, delayer or evict. Raises ScenarioError for input that makes no sense."""
    match scenario.kind:
        case "pass":
            return _PassScenario(scenario).run()
        case "delayer":
            return _run_delayer(scenario)
        case "evict":
            return _run_evict(scenario)
        case "check":
            raise ScenarioError(f"{scenario.id}: scenarios of kind check can't be run")


def scenario_config(scenario: Scenario, **changes: Any) -> SchedulerConfig:
    """The scheduler configuration that a scenario's `config` means."""
    settings = {k: v for k, v in scenario.config.items() if k != "new_token_ratio"}
    chunk = settings.get("chunked_prefill_size")
    if chunk is not None and chunk <= 0:
        settings["chunked_prefill_size"] = None
    if settings.get("chunked_prefill_size") is None:
        settings.pop("enable_mixed_chunk", None)
    if settings.get("prefill_delayer_max_delay_ms", 0) is None:
        del settings["prefill_delayer_max_delay_ms"]
    settings.update(changes)
    try:
        return SchedulerConfig.from_dict(settings)
    except (TypeError, ConfigError) as error:
        raise ScenarioError(f"{scenario.id}: config: {error}") from None


class _PassScenario:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.outcome = Outcome({})
        start = scenario.delayer
        others = start.other_ranks if start else []
        ranks: dict[str, Any] = {"dp_size": 1 + len(others), "enable_dp_attention": True} if others else {}
        self.config = scenario_config(scenario, **ranks)
        self.reports = tuple(
            Report(
                rank.prefillable,
                rank.force_allow,
                rank.running_batch,
                rank.max_prefill_bs,
                rank.waiting_queue_len,
                rank.queue_timeout_expired,
            )
            for rank in others
        )

    def run(self) -> Outcome:
        expect = self.outcome.expect
        try:
            if self.config.schedule_policy not in SGLANG_POLICIES:
                raise ConfigError(f"Unknown schedule_policy: policy={self.config.schedule_policy!r}")
            self.state = self._build()
        except ConfigError as error:
            expect["error"] = {"type": "ValueError", "message": str(error)}
            return self.outcome
        passes = self.scenario.passes
        assert isinstance(passes, int)
        seen: list[dict[str, Any]] = []
        batch: Batch | None = None
        for _ in range(passes):
            if batch is not None:
                self._finish(batch)
            outcome, batch = self._step()
            seen.append(outcome)
            if "error" in outcome:
                break
        if "passes" in self.scenario.expect or passes > 1:
            expect["passes"] = seen
        else:
            expect.update(seen[0])
        if "error" not in seen[-1]:
            expect["probe"] = [
                self.state.cache.match(
                    self.words.sequence(p.seq), namespace(p.extra_key, p.cache_salt)
                ).length
                for p in self.scenario.probe
            ]
        return self.outcome

    # ---- the state before ----------------------------------------------------------------------------------

    def _build(self) -> SchedulerState:
        if self.scenario.pool is None:
            return self._build_with(self.config)
        room = self.config.replace(max_total_tokens=2**22)
        state = self._build_with(room)
        used = state.pool.size - state.pool.available
        free = self.scenario.pool.free // self.config.page_size * self.config.page_size
        if used + free == 0:
            raise ScenarioError(f"{self.scenario.id}: pool: no page at all")
        return self._build_with(self.config.replace(max_total_tokens=used + free))

    def _build_with(self, config: SchedulerConfig) -> SchedulerState:
        scenario = self.scenario
        self.words = Vocabulary(scenario)
        state = SchedulerState(config)
        for entry in scenario.cache:
            self._cache(state, entry)
        for request in scenario.running:
            self._run_request(state, request)
        if scenario.chunked_req is not None:
            request = scenario.chunked_req
            live = self._live(state, request)
            if request.done is None:
                raise ScenarioError(f"{scenario.id}: chunked_req needs `done`")
            self._prefill(state, live, request.done)
            live.extend_end = live.prefix_len
            state.chunked = live
        for request in scenario.queue():
            live = self._live(state, request)
            self._generate(live, request)
            live.retracted = request.retracted if request.retracted is not None else live.output_len > 0
            state.queue.append(live)
        state.processed_tokens = scenario.processed_tokens
        state.batch_is_full = scenario.batch_is_full
        state.new_token_ratio = scenario.config.get("new_token_ratio", 0.7)
        if scenario.delayer is not None:
            start = scenario.delayer
            state.delayer = DelayerState(start.delayed_count, -start.age_ms / 1000.0, start.skip_first)
            if start.max_prefill_bs:
                state.prefill_batch_sizes.append(start.max_prefill_bs)
        state.evictions.clear()
        return state

    def _cache(self, state: SchedulerState, entry: CacheEntry) -> None:
        request = Request(
            rid="cache",
            prompt=self.words.sequence(entry.seq),
            priority=entry.priority,
            extra_key=entry.extra_key,
            cache_salt=entry.cache_salt,
        )
        live = Live(request, state.resolved_priority(request) if entry.priority is not None else 0)
        self._prefill(state, live, live.prompt_len)
        lock = live.lock
        if entry.locked and lock is not None:
            state.cache.lock(lock)
        state.release(live, checkpoint=False)

    def _live(self, state: SchedulerState, request: SceneRequest) -> Live:
        made = Request(
            rid=request.rid,
            prompt=self.words.sequence(request.input),
            sampling=SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos),
            priority=request.priority,
            routing_key=request.routing_key,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
        )
        live = Live(made, state.resolved_priority(made))
        live.entry_time = request.entry_time
        live.arrival_processed_tokens = request.arrival_processed_tokens
        return live

    def _prefill(self, state: SchedulerState, live: Live, end: int) -> None:
        """Compute the first `end` tokens alone, and keep them in the cache, locked."""
        cache = state.cache
        match = cache.match(live.tokens, live.space, max(end - 1, 0))
        if match.length:
            node = cache.touch(match)
        else:
            node = cache.root
        if state.config.radix_force_miss:
            match, node = match._replace(length=0), cache.root
        cache.lock(node)
        live.lock = node
        live.protected_len = live.prefix_len = match.length
        for above in cache.path(node):
            live.row.extend(above.slots)
        state.rows += 1
        wanted = end - match.length + (state.config.page_size if state.config.page_size > 1 else 0)
        if not cache.disabled:
            state.make_room(wanted)
        state.pool.extend(live.row, end)
        live.kv_len = live.extend_end = end
        state.checkpoint(live, end)

    def _generate(self, live: Live, request: SceneRequest) -> None:
        output = request.output
        made = self.words.fresh(output) if isinstance(output, int) else self.words.sequence(output)
        live.tokens += made
        live.output_len = tokens.length(made)

    def _run_request(self, state: SchedulerState, request: SceneRequest) -> None:
        live = self._live(state, request)
        self._prefill(state, live, live.prompt_len)
        output = request.output
        made = self.words.fresh(max(output, 1)) if isinstance(output, int) else self.words.sequence(output)
        for i, token in enumerate(tokens.decode(made)):
            if i > 0:
                state.allocate_decode([live])
            live.append(token)
        if request.finished:
            live.finished = True
            state.release(live, checkpoint=True)
        state.running.append(live)

    # ---- passes --------------------------------------------------------------------------------------------

    def _step(self) -> tuple[dict[str, Any], Batch | None]:
        state = self.state
        if state.random_state is not None:
            state.random_state = seeded(self.config.random_seed)
        evictable, protected, available = state.cache.evictable, state.cache.protected, state.pool.available
        seen: dict[str, Any] = {
            "configured_policy": state.policy.name,
            "pool_before": {"available": available, "evictable": evictable, "protected": protected},
        }
        plan = decide(state.view(0.0, self.reports), state.config, state.random_state, state.policy)
        self.outcome.plans.append(plan)
        seen |= describe_plan(plan)
        error = None
        batch = None
        try:
            batch = state.apply(plan, 0.0)
        except PoolExhaustedError as exhausted:
            error = {"type": "RuntimeError", "message": str(exhausted)}
        seen["chunked_req"] = state.chunked.rid if state.chunked else None
        seen["batch_is_full"] = state.batch_is_full
        seen["waiting_after"] = [live.rid for live in state.queue]
        if error is not None:
            seen["error"] = error
            return seen, None
        seen["running_after"] = [live.rid for live in state.running]
        if self.config.enable_mixed_chunk:
            mixed = batch is not None and batch.kind == "mixed"
            members = batch.members if batch is not None and mixed else ()
            seen["mixed_decoding"] = [member.live.rid for member in members if member.decode]
        seen["evicted"] = sum(evicted.tokens for evicted in state.evictions)
        state.evictions.clear()
        seen["pool_after"] = {
            "available": state.pool.available,
            "evictable": state.cache.evictable,
            "protected": state.cache.protected,
        }
        if plan.negotiation is not None:
            verdict = plan.negotiation
            seen["delayer"] = {
                "allow": verdict.allow,
                "reason": verdict.reason,
                "estimation": verdict.estimation,
                "delayed_count": verdict.next_state.delayed_count,
                "skip_first": verdict.next_state.skip_first,
                "observed_bs": plan.attempted_prefill_bs if batch is None else len(batch.members),
            }
        return seen, batch

    def _finish(self, batch: Batch) -> None:
        """One output token for every prefilled request; an unfinished chunk is stored."""
        state = self.state
        state.processed_tokens += batch.extend_tokens
        for member in batch.members:
            if member.unfinished:
                continue
            live = member.live
            if not member.decode:
                live.append(tokens.decode(self.words.fresh(1))[0])
                if live.output_len >= live.request.sampling.max_new_tokens:
                    live.finished = True
                    state.release(live, checkpoint=True)
                else:
                    state.checkpoint(live, live.extend_end)
        state.last_prefill = [member.live for member in batch.members]
        state.last_prefill_tokens = batch.extend_tokens
        state.stash_chunked()
        state.merge_prefill()
        state.drop_finished()


def describe_plan(plan: Plan) -> dict[str, Any]:
    """A decision in the vocabulary of `expect`."""
    seen: dict[str, Any] = {"admitted": [], "preempted": []}
    if plan.ordering is None or plan.admission is None:
        gate = "idle" if plan.gate == "queue_empty" else plan.gate
        seen["stop"] = f"not_started:{gate}"
        return seen
    ranked = plan.ordering.ranked
    seen["active_policy"] = plan.ordering.active
    seen["order"] = [place.request.rid for place in ranked]
    seen["order_head"] = seen["order_tail"] = seen["order"]
    # A policy that didn't look leaves old numbers on the requests; they are not this pass's.
    looked = POLICIES[plan.ordering.active].cache_aware
    seen["matched"] = {place.request.rid: place.request.matched if looked else 0 for place in ranked}
    seen["prefix_len"] = {place.request.rid: place.request.prefix_len if looked else 0 for place in ranked}
    seen["deprioritized"] = [place.request.rid for place in ranked if place.duplicate is not None]
    admission = plan.admission
    seen["budget"] = dict(
        zip(
            ("rem_total_tokens", "cur_rem_tokens", "rem_input_tokens", "rem_chunk_tokens"),
            admission.budget,
            strict=True,
        )
    )
    seen["chunk_limit"] = admission.chunk_limit
    seen["admission"] = [describe_verdict(verdict) for verdict in admission.verdicts]
    seen["admitted"] = [
        {"rid": v.rid, "prefix_len": v.prefix_len, "extend_len": v.extend_len} for v in admission.admitted
    ]
    seen["stop"] = admission.stop
    seen["preempted"] = list(admission.preempted)
    return seen


def describe_verdict(verdict: Verdict) -> dict[str, Any]:
    """One `admission` item."""
    item: dict[str, Any] = {
        "rid": verdict.rid,
        "result": str(verdict.result),
        "chunked": verdict.chunked,
        "prefix_len": verdict.prefix_len,
        "extend_len": verdict.extend_len,
        "rem_total_tokens": verdict.remaining.total,
        "cur_rem_tokens": verdict.remaining.current,
        "rem_input_tokens": verdict.remaining.input,
        "rem_chunk_tokens": verdict.remaining.chunk,
    }
    if verdict.preempted:
        item["preempted"] = list(verdict.preempted)
    return item


# ---- delayer -------------------------------------------------------------------------------------------------


def _run_delayer(scenario: Scenario) -> Outcome:
    config = scenario_config(scenario)
    count = config.dp_size if config.enable_dp_attention else 1
    start = scenario.delayer
    state = (
        DelayerState(start.delayed_count, -start.age_ms / 1000.0, start.skip_first) if start else DelayerState()
    )
    states = [state] * count
    windows = [deque[int](maxlen=config.prefill_delayer_max_prefill_bs_window_size) for _ in range(count)]
    passes = scenario.passes
    if not isinstance(passes, list):
        raise ScenarioError(f"{scenario.id}: passes: expected a list")
    seen = []
    for step in passes:
        if len(step.ranks) != count:
            raise ScenarioError(f"{scenario.id}: {len(step.ranks)} ranks given, {count} expected")
        for _ in range(step.repeat):
            clocks = [rank.now if rank.now is not None else step.now for rank in step.ranks]
            limits = [rank.max_running_requests or config.max_running_requests for rank in step.ranks]
            largest = [
                rank.max_prefill_bs if rank.max_prefill_bs is not None else max(window, default=0)
                for rank, window in zip(step.ranks, windows, strict=True)
            ]
            reports = []
            for rank, own_state, now, most in zip(step.ranks, states, clocks, largest, strict=True):
                facts = (rank.running_batch, most, rank.waiting_queue_len) if rank.prefillable else (0, 0, 0)
                reports.append(
                    local_report(
                        config,
                        own_state,
                        now,
                        prefillable=rank.prefillable,
                        token_usage=rank.token_usage,
                        running_batch=facts[0],
                        max_prefill_bs=facts[1],
                        waiting_queue_len=facts[2],
                    )
                )
            verdicts = []
            observed = []
            for i, rank in enumerate(step.ranks):
                others = reports[:i] + reports[i + 1 :]
                limit = limits[i] if rank.prefillable else 0
                verdict = negotiate(config, states[i], reports[i], others, clocks[i], limit)
                verdicts.append(verdict)
                attempted = 0
                if rank.prefillable:
                    free = max(delayer_slots(config, limits[i]) - rank.running_batch, 1)
                    attempted = min(max(rank.waiting_queue_len, 1), free)
                batch_size = rank.actual_prefill_bs if verdict.allow else 0
                observed.append(batch_size or attempted)
                if observed[-1] > 0:
                    windows[i].append(observed[-1])
            states = [verdict.next_state for verdict in verdicts]
            first = verdicts[0]
            seen.append(
                {
                    "allow": first.allow,
                    "reason": first.reason,
                    "estimation": first.estimation,
                    "num_prefillable": first.num_prefillable,
                    "wait_forward_passes": first.wait_forward_passes,
                    "delayed_count": first.next_state.delayed_count,
                    "skip_first": first.next_state.skip_first,
                    "wait_seconds": [verdict.wait_seconds for verdict in verdicts],
                    "observed_bs": observed,
                    "max_prefill_bs": [max(window, default=0) for window in windows],
                }
            )
    return Outcome({"passes": seen})


# ---- evict ---------------------------------------------------------------------------------------------------


def _run_evict(scenario: Scenario) -> Outcome:
    config = scenario_config(scenario)
    words = Vocabulary(scenario)
    cache = RadixCache(config.page_size, config.radix_eviction_policy)
    results: list[dict[str, int]] = []
    for op in scenario.ops:
        space = namespace(op.extra_key, op.cache_salt)
        if op.insert is not None:
            sequence = words.sequence(op.insert)
            match = cache.match(sequence, space, max(tokens.length(sequence) - 1, 0))
            if match.length or tokens.length(sequence) > config.page_size:
                cache.touch(match)
            slots = array("i", bytes(len(sequence)))
            cache.insert(sequence, space, slots, priority=op.priority or 0)
        elif op.touch is not None or op.probe is not None or op.lock is not None:
            sequence = words.sequence(op.touch or op.probe or op.lock or [])
            match = cache.match(sequence, space)
            node = cache.touch(match) if tokens.length(sequence) >= config.page_size else cache.root
            if op.probe is not None:
                results.append({"matched": match.length})
            if op.lock is not None:
                cache.lock(node)
        elif op.evict is not None:
            results.append({"evicted": sum(evicted.tokens for evicted in cache.evict(op.evict))})
        elif op.sizes:
            results.append({"evictable": cache.evictable, "protected": cache.protected})
        else:
            raise ScenarioError(f"{scenario.id}: ops: an item without an action")
    return Outcome({"results": results})
