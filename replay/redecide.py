"""Decide a recorded pass again under other settings: same queue, same cache, same moment, another policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.errors import UsageError
from schedscope.engine.ordering import POLICIES
from schedscope.replay.replayer import Moment

FIXED = (
    "page_size",
    "max_total_tokens",
    "radix_eviction_policy",
    "disable_radix_cache",
    "dp_size",
    "compat",
)
"""What shaped the recorded state itself; another value would need another past."""


class Redecided(NamedTuple):
    """A pass as it was and as it would have been."""

    moment: Moment
    recorded: Plan
    other: Plan
    config: SchedulerConfig

    def moves(self) -> dict[str, tuple[int, int]]:
        """Requests that stand elsewhere in the queue: recorded place, other place."""
        recorded, other = _places(self.recorded), _places(self.other)
        return {rid: (recorded[rid], place) for rid, place in other.items() if recorded.get(rid, place) != place}


def _places(plan: Plan) -> dict[str, int]:
    if plan.ordering is None:
        return {}
    return {place.request.rid: after for after, place in enumerate(plan.ordering.ranked)}


def decide_again(moment: Moment) -> Plan:
    """The recorded decision, made again."""
    return decide(moment.view, moment.config, moment.random_state)


def redecide(moment: Moment, policy: str | None, settings: Mapping[str, str]) -> Redecided:
    """Decide a pass under another policy or other settings. Raises UsageError or ConfigError."""
    for name in settings:
        if name in FIXED:
            raise UsageError(f"--set {name}: it shaped the recorded state, so one pass can't be decided with another")
    changed = dict(settings)
    if policy is not None:
        if policy not in POLICIES:
            raise UsageError(f"--policy {policy}: unknown policy; choose from {', '.join(POLICIES)}")
        changed["schedule_policy"] = policy
    config = moment.config.with_settings(changed)
    more_rows = config.max_running_requests - moment.config.max_running_requests
    view = replace(moment.view, free_rows=moment.view.free_rows + more_rows)
    random_state = moment.random_state or (seeded(config.random_seed) if config.schedule_policy == "random" else None)
    return Redecided(moment, decide_again(moment), decide(view, config, random_state), config)
