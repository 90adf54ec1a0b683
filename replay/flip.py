"""The smallest change that would have decided otherwise: found by deciding again, and checked by deciding again.

A lever changes one thing of what a pass could read. It is pulled further until the request gets what it is wanted for,
then back as far as that holds. What comes of it is a `Flip`; `holds` decides once more with the change, and with one
unit less of it, and only a flip that stands this is ever returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.dedup import Duplicate
from schedscope.engine.errors import ConfigError
from schedscope.engine.ordering import POLICIES, Facts, Key, Keyed, Policy, resolve_policy
from schedscope.engine.verdict import Verdict
from schedscope.engine.view import View, Waiting
from schedscope.replay.moment import Moment

UNTOLD = frozenset({"random", "routing-key"})
"""Policies that nobody would choose for one request's sake."""


class Situation(NamedTuple):
    """All that a pass is decided by."""

    view: View
    config: SchedulerConfig
    random_state: RandomState | None
    policy: Policy

    def decide(self) -> Plan:
        """The pass. Pure."""
        return decide(self.view, self.config, self.random_state, self.policy)

    def with_config(self, **changes: Any) -> Situation:
        """Other settings. Raises ConfigError."""
        config = self.config.replace(**changes)
        return self._replace(config=config, policy=resolve_policy(config))

    def with_view(self, **changes: Any) -> Situation:
        """Another state of the scheduler."""
        return self._replace(view=replace(self.view, **changes))

    def with_request(self, rid: str, **changes: Any) -> Situation:
        """A request in the queue that is another."""
        queue = tuple([r._replace(**changes) if r.rid == rid else r for r in self.view.queue])
        return self.with_view(queue=queue)

    def waiting(self, rid: str) -> Waiting:
        """A request of the queue. Raises KeyError."""
        found = next((r for r in self.view.queue if r.rid == rid), None)
        if found is None:
            raise KeyError(rid)
        return found


def situation_of(moment: Moment) -> Situation:
    """What a recorded pass was decided by."""
    return Situation(moment.view, moment.config, moment.random_state, resolve_policy(moment.config))


class Fate(NamedTuple):
    """What a pass makes of a request in its queue."""

    place: int | None
    """In the queue after sorting, from 0; None where no pass is made."""
    admitted: bool
    verdict: Verdict | None
    """None: it was not looked at."""


def fate_of(plan: Plan, rid: str) -> Fate:
    """What a plan makes of a request."""
    if plan.ordering is None or plan.admission is None:
        return Fate(None, False, None)
    place = next((i for i, r in enumerate(plan.ordering.ranked.requests) if r.rid == rid), None)
    verdict = next((v for v in plan.admission.verdicts if v.rid == rid), None)
    return Fate(place, verdict is not None and verdict.admitted, verdict)


# ---- levers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lever:
    """One thing that can be different."""

    name: str
    pull: Callable[[Situation, str, int], Situation]
    """The situation of a request with so much more of it. Raises ConfigError where that can't be."""
    most: Callable[[Situation, str], int]
    """How far it can be pulled for a request; 0: not at all."""
    setting: str | None = None
    """The scheduler setting behind it."""
    graded: bool = True
    """It can be pulled more or less; else it is on or off."""
    in_pages: bool = False
    """Only so many whole pages of tokens can be."""

    def unit(self, situation: Situation) -> int:
        """By how much it is pulled at least."""
        return situation.config.page_size if self.in_pages else 1


def _longest(situation: Situation) -> int:
    """Tokens beyond which no budget of a pass is ever short: all that waits and runs."""
    view = situation.view
    sizes = [r.length + r.max_new_tokens for r in view.queue]
    sizes += [r.prompt_len + r.output_len + r.max_new_tokens for r in view.running]
    pages = (len(sizes) + 1) * situation.config.page_size
    return sum(sizes) + pages + (view.chunked.length if view.chunked is not None else 0)


def _plus(name: str) -> Callable[[Situation, str, int], Situation]:
    def pull(situation: Situation, _: str, amount: int) -> Situation:
        return situation.with_config(**{name: getattr(situation.config, name) + amount})

    return pull


def _if_set(name: str, most: Callable[[Situation], int]) -> Callable[[Situation, str], int]:
    return lambda situation, _: 0 if getattr(situation.config, name) is None else most(situation)


def _more_memory(situation: Situation, _: str, amount: int) -> Situation:
    return situation.with_view(available=situation.view.available + amount)


def _more_slots(situation: Situation, _: str, amount: int) -> Situation:
    more = situation.with_config(max_running_requests=situation.config.max_running_requests + amount)
    return more.with_view(free_rows=situation.view.free_rows + amount)


def _shorter_output(situation: Situation, rid: str, amount: int) -> Situation:
    return situation.with_request(rid, max_new_tokens=situation.waiting(rid).max_new_tokens - amount)


def _spare_output(situation: Situation, rid: str) -> int:
    request = situation.waiting(rid)
    return max(request.max_new_tokens - max(request.output_len, 1), 0)


def _more_matched(situation: Situation, rid: str, amount: int) -> Situation:
    """The policy counts more matched tokens; the cache is as it was."""
    inner = situation.policy

    def keys(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
        more = [r._replace(matched=min(r.matched + amount, r.length - 1)) if r.rid == rid else r for r in queue]
        return inner.keys(more, duplicates, facts)

    return situation._replace(policy=inner._replace(keys=keys, steady=False))


def _unmatched(situation: Situation, rid: str) -> int:
    request = situation.waiting(rid)
    return max(request.length - request.matched, 0) if situation.policy.cache_aware else 0


class FrontKey(NamedTuple):
    """One request first, the others as they were."""

    behind: bool
    place: int
    position: int


def _to_the_front(situation: Situation, rid: str, _: int) -> Situation:
    inner = situation.policy

    def keys(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
        made, random_state = inner.keys(queue, duplicates, facts)
        own: list[Key] = [] if made is None else list(made)
        order = sorted(range(len(queue)), key=own.__getitem__) if own else range(len(queue))
        places = {position: place for place, position in enumerate(order)}
        front = [FrontKey(r.rid != rid, places[i], i) for i, r in enumerate(queue)]
        return front, random_state  # type: ignore[return-value]  # a key of nobody's policy

    limit = situation.config.waiting_queue_prefix_match_max
    if inner.limited and len(situation.view.queue) > limit:
        # Nothing is sorted then: the queue's own order is all there is.
        queue = situation.view.queue
        first = situation.waiting(rid)
        return situation.with_view(queue=(first, *(r for r in queue if r is not first)))
    return situation._replace(policy=inner._replace(keys=keys, steady=False))


def _off(name: str, value: Any) -> Callable[[Situation, str, int], Situation]:
    return lambda situation, _rid, _amount: situation.with_config(**{name: value})


LEVERS = {
    lever.name: lever
    for lever in (
        Lever("memory", _more_memory, lambda s, _: _longest(s), in_pages=True),
        Lever("slots", _more_slots, lambda s, _: len(s.view.queue) + 1, "max_running_requests"),
        Lever(
            "chunk",
            _plus("chunked_prefill_size"),
            _if_set("chunked_prefill_size", _longest),
            "chunked_prefill_size",
        ),
        Lever("input", _plus("max_prefill_tokens"), lambda s, _: _longest(s), "max_prefill_tokens"),
        Lever(
            "requests",
            _plus("prefill_max_requests"),
            _if_set("prefill_max_requests", lambda s: len(s.view.queue) + 1),
            "prefill_max_requests",
        ),
        Lever("output", _shorter_output, _spare_output),
        Lever("matched", _more_matched, _unmatched, in_pages=True),
        Lever("front", _to_the_front, lambda _s, _r: 1, graded=False),
        Lever(
            "duplicates",
            _off("in_batch_prefix_caching_check_threshold", -1),
            lambda s, _: int(s.policy.cache_aware and s.config.in_batch_prefix_caching_check_threshold >= 0),
            "in_batch_prefix_caching_check_threshold",
            graded=False,
        ),
        Lever(
            "delayer",
            _off("enable_prefill_delayer", False),
            lambda s, _: int(s.config.enable_prefill_delayer),
            "enable_prefill_delayer",
            graded=False,
        ),
        Lever(
            "mark",
            lambda s, _r, _n: s.with_view(batch_is_full=False),
            lambda s, _: int(s.view.batch_is_full),
            graded=False,
        ),
    )
}


# ---- flips ---------------------------------------------------------------------------------------------------


class Flip(NamedTuple):
    """A change that gives a request what it did not get."""

    rid: str
    lever: str
    """A key of LEVERS."""
    amount: int | None
    """The smallest that does: with a `unit` less it stays as it was. None: there is no less."""
    unit: int
    """By what it is counted: 1, or the tokens of a page."""
    setting: str | None
    """The scheduler setting that it changes."""
    value: Any
    """What the setting would be."""
    goal: int | None
    """The place it was to reach; None: to be admitted."""
    fate: Fate
    """What it then gets."""


def reached(fate: Fate, goal: int | None) -> bool:
    """Whether a fate is what was wanted: to be admitted, or a place in the queue."""
    return fate.admitted if goal is None else fate.place is not None and fate.place <= goal


def find_flip(situation: Situation, rid: str, name: str, goal: int | None = None) -> Flip | None:
    """The smallest pull of a lever that has a request admitted, or at a place; None: it alone never does.

    Raises KeyError for a request that is not in the queue.
    """
    lever = LEVERS[name]
    situation.waiting(rid)
    unit = lever.unit(situation)
    most = lever.most(situation, rid) // unit
    if most < 1 or reached(fate_of(situation.decide(), rid), goal):
        return None
    try:
        units = _smallest(lambda n: _reaches(situation, lever, rid, n * unit, goal), most if lever.graded else 1)
        if units is None:
            return None
        amount = units * unit
        changed = lever.pull(situation, rid, amount)
    except ConfigError:
        return None
    flip = Flip(
        rid,
        name,
        amount if lever.graded else None,
        unit,
        lever.setting,
        None if lever.setting is None else getattr(changed.config, lever.setting),
        goal,
        fate_of(changed.decide(), rid),
    )
    return flip if holds(situation, flip) else None


def holds(situation: Situation, flip: Flip) -> bool:
    """Whether a flip does what it says, and nothing less of it does."""
    lever, amount = LEVERS[flip.lever], flip.amount or flip.unit
    then = fate_of(lever.pull(situation, flip.rid, amount).decide(), flip.rid)
    less = situation if amount == flip.unit else lever.pull(situation, flip.rid, amount - flip.unit)
    return then == flip.fate and reached(then, flip.goal) and not reached(fate_of(less.decide(), flip.rid), flip.goal)


def find_flips(situation: Situation, rid: str) -> Iterator[Flip]:
    """For each lever that alone would have a request admitted, how little of it does."""
    for name in LEVERS:
        flip = find_flip(situation, rid, name)
        if flip is not None:
            yield flip


def _reaches(situation: Situation, lever: Lever, rid: str, amount: int, goal: int | None) -> bool:
    return reached(fate_of(lever.pull(situation, rid, amount).decide(), rid), goal)


def _smallest(works: Callable[[int], bool], most: int) -> int | None:
    """The smallest amount that works, where more of what works does too; None: not even all of it works."""
    if not works(most):
        return None
    fails, amount = 0, 1
    while amount < most and not works(amount):
        fails, amount = amount, amount * 2
    amount = min(amount, most)
    while amount - fails > 1:
        middle = (amount + fails) // 2
        if works(middle):
            amount = middle
        else:
            fails = middle
    return amount


# ---- other policies ------------------------------------------------------------------------------------------


class Elsewhere(NamedTuple):
    """What another policy makes of a request in the same pass."""

    policy: str
    fate: Fate


def under_policies(situation: Situation, rid: str) -> tuple[Elsewhere, ...]:
    """What each policy that can run under the other settings makes of a request."""
    found = []
    for name in POLICIES:
        if name == situation.config.schedule_policy or name in UNTOLD:
            continue
        try:
            other = situation.with_config(schedule_policy=name)
        except ConfigError:
            continue
        found.append(Elsewhere(name, fate_of(other.decide(), rid)))
    return tuple(found)
