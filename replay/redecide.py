"""Decide a recorded pass again under other settings: same queue, same cache, same moment, another policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.errors import UsageError
from schedscope.engine.ordering import POLICIES
from schedscope.replay.moment import Moment, decide_again

SHAPED_THE_STATE = frozenset(
    {
        "compat",
        "disable_radix_cache",
        "dp_size",
        "init_new_token_ratio",
        "max_total_tokens",
        "min_new_token_ratio_factor",
        "new_token_ratio_decay_steps",
        "page_size",
        "prefill_delayer_max_prefill_bs_window_size",
        "radix_eviction_policy",
        "schedule_conservativeness",
        "slru_protected_hits",
    }
)
"""Another value would need another past."""
NO_PART_IN_A_PASS = frozenset(
    {
        "abort_on_priority_when_disabled",
        "max_queued_requests",
        "random_seed",
        "req_waiting_timeout",
        "retraction_policy",
    }
)
"""Read before or after passes, never in one."""


class Redecided(NamedTuple):
    """A pass as it was and as it would have been."""

    moment: Moment
    recorded: Plan
    other: Plan
    config: SchedulerConfig

    def changes(self) -> dict[str, Any]:
        """Settings that differ from the recorded ones."""
        recorded, other = self.moment.config.to_dict(), self.config.to_dict()
        return {name: value for name, value in other.items() if recorded[name] != value}

    def moves(self) -> dict[str, tuple[int, int]]:
        """Requests that stand elsewhere in the queue: recorded place, other place."""
        recorded, other = _places(self.recorded), _places(self.other)
        return {rid: (recorded[rid], place) for rid, place in other.items() if recorded.get(rid, place) != place}


def _places(plan: Plan) -> dict[str, int]:
    if plan.ordering is None:
        return {}
    return {place.request.rid: after for after, place in enumerate(plan.ordering.ranked)}


def redecide(moment: Moment, policy: str | None, settings: Mapping[str, str]) -> Redecided:
    """Decide a pass under another policy or other settings. Raises UsageError or ConfigError."""
    for name in settings:
        if name in SHAPED_THE_STATE:
            raise UsageError(f"--set {name}: it shaped the recorded state, so one pass can't be decided with another")
        if name in NO_PART_IN_A_PASS:
            raise UsageError(f"--set {name}: it has no part in deciding a pass, so nothing could change")
    changed = dict(settings)
    if policy is not None:
        if policy not in POLICIES:
            raise UsageError(f"--policy {policy}: unknown policy; choose from {', '.join(POLICIES)}")
        changed["schedule_policy"] = policy
    config = moment.config.with_settings(changed)
    if moment.view.chunked is not None and config.chunked_prefill_size is None:
        raise UsageError("--set chunked_prefill_size=none: this pass continues a chunk, which needs a chunk size")
    more_rows = config.max_running_requests - moment.config.max_running_requests
    view = replace(moment.view, free_rows=moment.view.free_rows + more_rows)
    random_state = moment.random_state or (seeded(config.random_seed) if config.schedule_policy == "random" else None)
    return Redecided(moment, decide_again(moment), decide(view, config, random_state), config)
