"""One scheduling pass: `decide` reads a `View` and returns a `Plan`. It changes nothing.

Live scheduling, replay and what-if call this same function. `schedscope.engine.state` applies the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    batch_is_full = view.batch_is_full and not config.priority_preemption and bool(view.running)
    gate = _gate(view, config, batch_is_full)
    if gate is not None:
        negotiation = no_negotiation(config, view) if config.enable_prefill_delayer else None
        return Plan(gate, batch_is_full or gate == "no_slot", None, None, negotiation, 0)
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


def _gate(view: View, config: SchedulerConfig, batch_is_full: bool) -> str | None:
    if view.chunked is not None:
        return None
    if batch_is_full:
        return "batch_is_full"
    if not view.queue:
        return "queue_empty"
    running = len(view.running)
    slots = allocatable(config, running, view.free_rows)
    if running > 0 and slots < config.min_free_slots:
        return "min_free_slots_delay"
    if slots <= 0 and not config.priority_preemption:
        return "no_slot"
    return None
