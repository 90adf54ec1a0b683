"""Run a scenario through the decision core, and tell what came of it in the words of the scenario format."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.batch import Batch
from schedscope.engine.chance import seeded
from schedscope.engine.decision import Plan, decide
from schedscope.engine.delayer import DelayerState, Report, delayer_slots, local_report, negotiate
from schedscope.engine.errors import ConfigError, ScenarioError
from schedscope.engine.ordering import POLICIES, SGLANG_POLICIES
from schedscope.engine.pool import PoolExhaustedError
from schedscope.engine.radix import namespace
from schedscope.engine.state import SchedulerState
from schedscope.engine.verdict import Verdict
from schedscope.replay.scenario import CacheEntry, Scenario
from schedscope.replay.scenario_build import StateBuilder, scenario_config


@dataclass
class Outcome:
    """What a scenario did."""

    expect: dict[str, Any]
    """In the vocabulary of `expect`."""
    plans: list[Plan] = field(default_factory=list)
    """One per pass, for showing."""


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


class _PassScenario:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.outcome = Outcome({})
        start = scenario.delayer
        others = start.other_ranks if start else []
        ranks: dict[str, Any] = {"dp_size": 1 + len(others), "enable_dp_attention": True} if others else {}
        self.config = scenario_config(scenario, **ranks)
        self.builder = StateBuilder(scenario, self.config)
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
            self.state = self.builder.build()
        except ConfigError as error:
            expect["error"] = {"type": "ValueError", "message": str(error)}
            return self.outcome
        passes = self.scenario.passes
        if not isinstance(passes, int):
            raise ScenarioError(f"{self.scenario.id}: passes: expected a number for kind pass")
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
                self.state.cache.match(self.builder.words.sequence(p.seq), namespace(p.extra_key, p.cache_salt)).length
                for p in self.scenario.probe
            ]
        return self.outcome

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
                live.append(tokens.decode(self.builder.words.fresh(1))[0])
                if live.output_len >= live.request.sampling.max_new_tokens:
                    live.finished = True
                    state.release(live, checkpoint=True)
                else:
                    state.checkpoint(live, live.extend_end)
        state.last_prefill = [member.live for member in batch.members]
        state.last_prefill_tokens = batch.extend_tokens
        state.last_prefill_only = batch.prefill_only
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
    state = DelayerState(start.delayed_count, -start.age_ms / 1000.0, start.skip_first) if start else DelayerState()
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
    builder = StateBuilder(scenario, config)
    state = SchedulerState(config)
    cache = state.cache
    for number, op in enumerate(scenario.ops):
        actions = [op.insert, op.touch, op.lock, op.probe, op.evict, op.sizes]
        if sum(action is not None for action in actions) != 1:
            raise ScenarioError(f"{scenario.id}: ops[{number}]: expected exactly one action")
    results: list[dict[str, int]] = []
    for op in scenario.ops:
        if op.insert is not None:
            entry = CacheEntry(seq=op.insert, extra_key=op.extra_key, cache_salt=op.cache_salt, priority=op.priority)
            try:
                builder.cache(state, entry)
            except PoolExhaustedError as error:
                raise ScenarioError(f"{scenario.id}: the pool is too small: {error}") from None
        elif op.touch is not None or op.probe is not None or op.lock is not None:
            sequence = builder.words.sequence(op.touch or op.probe or op.lock or [])
            match = cache.match(sequence, namespace(op.extra_key, op.cache_salt))
            node = cache.touch(match) if tokens.length(sequence) >= config.page_size else cache.root
            if op.probe is not None:
                results.append({"matched": match.length})
            if op.lock is not None:
                cache.lock(node)
        elif op.evict is not None:
            results.append({"evicted": sum(evicted.tokens for evicted in state.evict(op.evict))})
        else:
            results.append({"evictable": cache.evictable, "protected": cache.protected})
    return Outcome({"results": results})
