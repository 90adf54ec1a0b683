"""The prefill delayer: data-parallel ranks agree whether to prefill now or to wait for fuller batches.

`negotiate` is pure: what every rank reports and this rank's clock go in, a verdict and the next state come out.
Source: `prefill_delayer.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.config import SchedulerConfig


class Report(NamedTuple):
    """What one rank tells the others in a pass."""

    prefillable: bool = False
    """It has a request it could admit now."""
    force_allow: bool = False
    """Its KV pool is used less than the low watermark."""
    running_batch: int = 0
    max_prefill_bs: int = 0
    """Largest of its recent prefill batches."""
    waiting_queue_len: int = 0
    queue_timeout_expired: bool = False
    """Its own wait lasted longer than `prefill_delayer_max_delay_ms`."""


class DelayerState(NamedTuple):
    """What a rank remembers from pass to pass."""

    delayed_count: int | None = None
    """Passes delayed in a row; None when not waiting."""
    start_time: float = 0.0
    """When the wait in progress began, seconds."""
    skip_first: bool = True
    """The first wish to wait is still to be let through."""


NOT_WAITING = DelayerState()


class Negotiation(NamedTuple):
    """The verdict of a pass, with its operands."""

    allow: bool
    reason: str
    """`token_watermark`, `delay`, `wait_timeout`, `wait_success`, `no_wait`, or empty where no rank can prefill."""
    estimation: str
    """Which ranks can prefill: `all`, `mixed`, `none`."""
    num_prefillable: int
    wait_forward_passes: int
    """Passes waited before this release; 0 while waiting."""
    wait_seconds: float
    next_state: DelayerState
    report: Report
    """What this rank reported."""
    slot_condition: bool = False
    """Fewer free slots than the largest recent prefill batch."""
    queue_condition: bool = False
    """Fewer waiting than would fill a batch."""


def local_report(
    config: SchedulerConfig,
    state: DelayerState,
    now: float,
    *,
    prefillable: bool,
    token_usage: float,
    running_batch: int = 0,
    max_prefill_bs: int = 0,
    waiting_queue_len: int = 0,
) -> Report:
    """What this rank has to say. A rank that can't prefill takes part with zeros."""
    watermark = config.prefill_delayer_token_usage_low_watermark
    expired = (
        config.prefill_delayer_queue_min_ratio is not None
        and state.delayed_count is not None
        and (now - state.start_time) * 1000.0 >= config.prefill_delayer_max_delay_ms
    )
    return Report(
        prefillable=prefillable,
        force_allow=prefillable and watermark is not None and token_usage < watermark,
        running_batch=running_batch,
        max_prefill_bs=max_prefill_bs,
        waiting_queue_len=waiting_queue_len,
        queue_timeout_expired=expired,
    )


def negotiate(
    config: SchedulerConfig,
    state: DelayerState,
    own: Report,
    others: Sequence[Report],
    now: float,
    max_running_requests: int,
) -> Negotiation:
    """Whether this pass may prefill. Every rank that gets the same reports comes to the same verdict."""
    reports = (own, *others)
    prefillable = sum(report.prefillable for report in reports)
    delayed = state.delayed_count
    waited_passes = delayed or 0
    waited_seconds = now - state.start_time if delayed is not None else 0.0
    estimation = "all" if prefillable == len(reports) else "none" if prefillable == 0 else "mixed"
    slot_condition = queue_condition = False
    skip_first = state.skip_first

    def release(reason: str) -> Negotiation:
        return Negotiation(
            allow=True,
            reason=reason,
            estimation=estimation,
            num_prefillable=prefillable,
            wait_forward_passes=waited_passes,
            wait_seconds=waited_seconds,
            next_state=DelayerState(None, 0.0, skip_first),
            report=own,
            slot_condition=slot_condition,
            queue_condition=queue_condition,
        )

    def delay_or_time_out() -> Negotiation:
        if waited_passes >= config.prefill_delayer_max_delay_passes - 1:
            return release("wait_timeout")
        start = state.start_time if delayed is not None else now
        return Negotiation(
            allow=False,
            reason="delay",
            estimation=estimation,
            num_prefillable=prefillable,
            wait_forward_passes=0,
            wait_seconds=0.0,
            next_state=DelayerState(waited_passes + 1, start, skip_first),
            report=own,
            slot_condition=slot_condition,
            queue_condition=queue_condition,
        )

    if estimation == "none":
        return release("")
    if any(report.force_allow for report in reports):
        return release("token_watermark")
    if estimation == "mixed":
        return delay_or_time_out()

    running = max(report.running_batch for report in reports)
    largest_batch = max(report.max_prefill_bs for report in reports)
    waiting = max(report.waiting_queue_len for report in reports)
    slot_condition = delayer_slots(config, max_running_requests) - running < largest_batch
    if config.prefill_delayer_queue_min_ratio is not None and running > 0:
        capacity = config.prefill_max_requests if config.prefill_max_requests is not None else largest_batch
        enough = min(int(running * config.prefill_delayer_queue_min_ratio), capacity)
        timed_out = any(report.queue_timeout_expired for report in reports)
        queue_condition = enough > 0 and waiting < enough and not timed_out
    if slot_condition or queue_condition:
        if not skip_first:
            return delay_or_time_out()
        skip_first = False
    return release("no_wait" if delayed is None else "wait_success")


def delayer_slots(config: SchedulerConfig, max_running_requests: int) -> int:
    """Request slots of one rank: without DP attention the limit is shared by all ranks, rounded up."""
    if config.enable_dp_attention:
        return max_running_requests
    return -(-max_running_requests // config.dp_size)
