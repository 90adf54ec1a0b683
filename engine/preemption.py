"""Priority preemption: which running requests make room for a waiting one.

Source: `preempt_to_schedule` in `schedule_policy.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.view import Running, RunningRequests, Waiting


class Preemption(NamedTuple):
    """Enough victims for one waiting request."""

    victims: tuple[Running, ...]
    """In running order."""

    @property
    def rids(self) -> tuple[str, ...]:
        """Their rids."""
        return tuple(victim.rid for victim in self.victims)


def output_reserve(running: Running, config: SchedulerConfig, new_token_ratio: float) -> float:
    """Tokens kept free for the rest of a running request's output."""
    ratio = 1.0 if running.ignore_eos else new_token_ratio
    return min(running.max_new_tokens - running.output_len, config.clip_max_new_tokens) * ratio


def output_reserves(running: Sequence[Running], config: SchedulerConfig, new_token_ratio: float) -> list[float]:
    """The same for each of them."""
    if not isinstance(running, RunningRequests) or running.ignores_eos:
        return [output_reserve(request, config, new_token_ratio) for request in running]
    clip, got = config.clip_max_new_tokens, running.got
    return [min(asked - got, clip) * new_token_ratio for asked in running.asked]


def find_victims(
    request: Waiting,
    running: Sequence[Running],
    config: SchedulerConfig,
    new_token_ratio: float,
    rem_total: float,
) -> Preemption | None:
    """The running requests to release for `request`; None if they would not free enough.

    Worst priority first, among equals the newest. A victim's priority must be behind by more than the threshold.
    A request that admission never looked at counts as having no prompt here, as upstream.
    """
    sign = config.priority_sign
    candidates = sorted((r for r in running if not r.finished), key=lambda r: (r.priority * -sign, -r.entry_time))
    missing = (
        request.fill_len - request.prefix_len + min(request.max_new_tokens, config.clip_max_new_tokens) - rem_total
    )
    chosen: set[str] = set()
    for candidate in candidates:
        lead = (request.priority - candidate.priority) * -sign
        if lead <= config.priority_scheduling_preemption_threshold:
            break
        chosen.add(candidate.rid)
        missing -= output_reserve(candidate, config, new_token_ratio)
        if missing <= 0:
            break
    if not chosen or missing > 0:
        return None
    return Preemption(tuple(r for r in running if r.rid in chosen))
