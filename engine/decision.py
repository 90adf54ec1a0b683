"""One scheduling pass: `decide` reads a `View` and returns a `Plan`. It changes nothing.

Live scheduling, replay and what-if call this same function. `schedscope.engine.state` applies the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedscope.engine.admission import Admission, admit, allocatable, no_negotiation
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Negotiation
from schedscope.engine.ordering import Ordering, Policy, order, resolve_policy
from schedscope.engine.view import View


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step will do before its forward."""

    gate: str | None
    """What ended the step without a pass: `batch_is_full`, `queue_empty`, `min_free_slots_delay`, `no_slot`."""
    batch_is_full: bool
    """The mark after the step."""
    ordering: Ordering | None
    admission: Admission | None
    negotiation: Negotiation | None
    """Set whenever the prefill delayer is on, in gated steps too: all ranks take part in every step."""
    attempted_prefill_bs: int
    """Batch size that the delayer's window notes if nothing is admitted; 0: none."""


def decide(
    view: View,
    config: SchedulerConfig,
    random_state: RandomState | None = None,
    policy: Policy | None = None,
) -> Plan:
    """Decide a step. A pure function of its arguments; `policy` saves looking it up in every step."""
    facts = (view.batch_is_full, view.chunked is not None, len(view.queue), len(view.running), view.free_rows)
    gated = gate(config, *facts)
    if gated is not None:
        negotiation = no_negotiation(config, view) if config.enable_prefill_delayer else None
        return replace(gated, negotiation=negotiation)
    batch_is_full = _is_full(config, view.batch_is_full, len(view.running))
    ordering = order(
        view.queue,
        view.cache,
        config,
        running=view.running,
        processed_tokens=view.processed_tokens,
        random_state=random_state,
        refresh_calls=view.refresh_calls,
        policy=policy or resolve_policy(config),
    )
    admission = admit(ordering.ranked.requests, view, config, ordering.touches, batch_is_full)
    negotiation = admission.negotiation
    if config.enable_prefill_delayer:
        negotiation = negotiation or no_negotiation(config, view)
    return Plan(None, admission.batch_is_full, ordering, admission, negotiation, admission.attempted_prefill_bs)


def gate(
    config: SchedulerConfig, batch_is_full: bool, chunked: bool, waiting: int, running: int, free_rows: int
) -> Plan | None:
    """The plan of a step that ends without a pass, but for the delayer's part; None: there will be a pass.

    Args:
        batch_is_full: the mark before the step.
        chunked: a prompt is being computed chunk by chunk.
        waiting: requests in the queue.
        running: requests in the batch.
        free_rows: requests that could get a row of their own.
    """
    reason = gate_name(config, batch_is_full, chunked, waiting, running, free_rows)
    if reason is None:
        return None
    return Plan(reason, _is_full(config, batch_is_full, running) or reason == "no_slot", None, None, None, 0)


def _is_full(config: SchedulerConfig, batch_is_full: bool, running: int) -> bool:
    return batch_is_full and not config.priority_preemption and running > 0


def gate_name(
    config: SchedulerConfig, batch_is_full: bool, chunked: bool, waiting: int, running: int, free_rows: int
) -> str | None:
    """What ends a step without a pass, see `gate`."""
    if chunked:
        return None
    if _is_full(config, batch_is_full, running):
        return "batch_is_full"
    if not waiting:
        return "queue_empty"
    slots = allocatable(config, running, free_rows)
    if running > 0 and slots < config.min_free_slots:
        return "min_free_slots_delay"
    if slots <= 0 and not config.priority_preemption:
        return "no_slot"
    return None
