"""Why a pass came out as it did: facts, read off its decision, which is made again.

Nothing here decides by other logic. A pass is rebuilt and decided with the function that decided it live; that decision
must be the recorded one, or nothing is explained. What would have changed it is found and checked by deciding again
(`schedscope.replay.flip`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan
from schedscope.engine.errors import DivergenceError, RunFormatError, RunNotFoundError
from schedscope.engine.ordering import POLICIES, Key, Ranked
from schedscope.engine.preemption import output_reserve
from schedscope.engine.verdict import Result, Verdict
from schedscope.engine.view import View
from schedscope.recorder.hashing import block_size
from schedscope.recorder.rows import decision_hash, pack_decision
from schedscope.recorder.run import Run
from schedscope.replay.explanation import Against, Ending, Holder, PassExplanation, Place, Pool
from schedscope.replay.flip import (
    Situation,
    find_flip,
    find_flips,
    situation_of,
    under_policies,
)
from schedscope.replay.from_view import see
from schedscope.replay.ledger import Rows
from schedscope.replay.mark import mark_after, mark_before
from schedscope.replay.moment import Moment
from schedscope.replay.provenance import CacheListener, look_back, origin
from schedscope.replay.replayer import Replayer
from schedscope.replay.source import is_observed
from schedscope.replay.verify_view import difference

_HOLDERS = 3
"""Running requests that are named as holding memory."""
_FLIPPED = 3
"""Places of a pass for which changes are searched, unless one is asked for."""


def explain_pass(run: Run, rank: int, number: int, only: str | None = None) -> PassExplanation:
    """Why a recorded pass came out as it did.

    Args:
        only: search what would have been otherwise for this request alone, instead of for the first few refused.

    Raises RunNotFoundError for an unknown pass, rank or request, RunFormatError, and DivergenceError if the pass does
    not come out as recorded.
    """
    replayer = Replayer(run, rank)
    heard = CacheListener()
    moment = deque(replayer.visit(with_neighbours(replayer, [number]), heard), maxlen=1).pop()
    if only is not None and all(request.rid != only for request in moment.view.queue):
        raise RunNotFoundError(f"{run.path}: no request {only!r} in the queue of pass {number} on rank {rank}")
    return explain_moment(replayer, moment, heard, only)


def explain_moment(
    replayer: Replayer, moment: Moment, heard: CacheListener, only: str | None, *, alone: bool = False
) -> PassExplanation:
    """The same of a moment that is there already, rebuilt with this listener.

    Args:
        alone: explain the place of `only` and no other.
    """
    run, rank, number, view = replayer.run, replayer.rank, moment.number, moment.view
    situation = situation_of(moment)
    plan = situation.decide()
    if plan.ordering is None or plan.admission is None:
        raise RunFormatError(f"{run.path}: rank {rank}: no pass comes out where pass {number} was recorded")
    rows = run.pass_rows(rank, number)
    _check_recorded(replayer, number, plan, rows)
    verdicts = {verdict.rid: verdict for verdict in plan.admission.verdicts}
    chunk = next((v for v in plan.admission.verdicts if v.result is Result.CHUNK), None)
    ranked = plan.ordering.ranked
    searched = {only} if only is not None else _worth_flipping([place.request.rid for place in ranked], verdicts)
    matches = POLICIES[plan.ordering.active].cache_aware
    ending = _ending(plan)
    places = []
    for i, place in enumerate(ranked):
        if alone and place.request.rid != only:
            continue
        before = ranked[i - 1] if i else None
        places.append(_place(situation, place, i, before, verdicts, heard, matches, place.request.rid in searched))
    return PassExplanation(
        rank=rank,
        number=number,
        configured=plan.ordering.configured,
        active=plan.ordering.active,
        fallback=plan.ordering.fallback,
        budget=plan.admission.budget,
        chunk=chunk,
        places=tuple(_with_origins(replayer, places, only)),
        ending=ending,
        pool=_pool(view, moment.config),
        mark_before=mark_before(run, rank, rows) if view.batch_is_full else None,
        mark_after=mark_after(run, rank, rows, ending, was_set=view.batch_is_full) if plan.batch_is_full else None,
        delayer=plan.negotiation,
        known_since=heard.known_since,
        checked=sum(len(p.flips) + len(p.ahead) + len(p.elsewhere) for p in places),
    )


def _check_recorded(replayer: Replayer, number: int, plan: Plan, rows: Rows) -> None:
    """Raises DivergenceError unless the plan is the recorded one."""
    run, rank = replayer.run, replayer.rank
    if is_observed(run.manifest):
        seen = see(replayer.parts, replayer.config, number)
        decisions = run.table("decisions", rank, passes=(number, number)).combine_chunks()
        same = seen is not None and difference(seen, plan, rank, decisions) is None
    else:
        block = block_size(replayer.config.to_dict()) if run.manifest.detail.tokens == "hashed" else 1
        recorded = rows["passes"][0]["decision_hash"]
        same = recorded in {None, decision_hash(pack_decision(plan, block)[1])}
    if not same:
        raise DivergenceError(
            f"{run.path}: rank {rank}: pass {number} does not come out as recorded, so nothing of it is explained; "
            f"schedscope replay pass {number} names the first difference"
        )


def _worth_flipping(queue: Sequence[str], verdicts: dict[str, Verdict]) -> set[str]:
    refused = [rid for rid in queue if rid not in verdicts or not verdicts[rid].admitted]
    return set(refused[:_FLIPPED])


def _place(
    situation: Situation,
    ranked: Ranked,
    place: int,
    before: Ranked | None,
    verdicts: dict[str, Verdict],
    heard: CacheListener,
    matches: bool,
    searched: bool,
) -> Place:
    request = ranked.request
    verdict = verdicts.get(request.rid)
    admitted = verdict is not None and verdict.admitted
    ahead = []
    if searched and before is not None:
        found = (find_flip(situation, request.rid, lever, place - 1) for lever in ("matched", "duplicates"))
        ahead = [flip for flip in found if flip is not None]
    return Place(
        rid=request.rid,
        place=place,
        place_before=ranked.position,
        key=dict(zip(ranked.key._fields, ranked.key, strict=True)),
        against=None if before is None else _against(ranked.key, before),
        matched=request.matched,
        is_stale=not matches,
        origin=origin(situation.view, request, heard) if matches or verdict is not None else None,
        duplicate=ranked.duplicate,
        verdict=verdict,
        flips=tuple(find_flips(situation, request.rid)) if searched and not admitted else (),
        ahead=tuple(ahead),
        elsewhere=under_policies(situation, request.rid) if searched else (),
    )


def _with_origins(replayer: Replayer, places: Sequence[Place], only: str | None) -> list[Place]:
    """Places with what the log tells about prefixes that were cached before the rebuilt stretch."""
    if replayer.run.manifest.detail.level != "full":
        return list(places)
    asked = [each.origin for each in places if each.origin is not None and only in {None, each.rid}]
    found = look_back(replayer.parts, asked)
    return [
        each._replace(origin=found.get(each.origin.node, each.origin)) if each.origin is not None else each
        for each in places
    ]


def _against(key: Key, before: Ranked) -> Against:
    fields = zip(key._fields, key, before.key, strict=True)
    field, own, other = next(each for each in fields if each[1] != each[2])
    return Against(before.request.rid, field, own, other)


def _ending(plan: Plan) -> Ending:
    assert plan.admission is not None
    stop, verdicts = plan.admission.stop, plan.admission.verdicts
    if stop == "budget" and verdicts:
        return Ending(stop, verdicts[-1].rid, None, None, None, True)
    if stop in {"queue_end", "no_slot", "preempt_failed"} or not verdicts:
        return Ending(stop, None, None, None, None, False)
    last = verdicts[-1]
    return Ending(stop, last.rid, str(last.reason), last.need, last.have, last.admitted)


def _pool(view: View, config: SchedulerConfig) -> Pool:
    ratio = view.new_token_ratio
    running = [r for r in view.running if not r.finished]
    holders = [Holder(r.rid, r.private, output_reserve(r, config, ratio)) for r in running]
    holders.sort(key=lambda holder: -(holder.tokens + holder.reserve))
    free, evictable, locked = view.available, view.cache.evictable, view.cache.protected
    size = config.num_pages * config.page_size
    return Pool(
        size=size,
        free=free,
        evictable=evictable,
        locked=locked,
        held=size - free - evictable - locked,
        reserve=sum(output_reserve(r, config, ratio) for r in view.running),
        running=len(view.running),
        holders=tuple(holders[:_HOLDERS]),
    )


def with_neighbours(replayer: Replayer, numbers: Iterable[int]) -> list[int]:
    """Passes and the one before each, as far as they can be rebuilt: what is between the two is then heard."""
    found = set(numbers)
    last = replayer.run.passes(replayer.rank).last
    for number in numbers:
        if last is not None and 0 < number <= last and replayer.start_before(number - 1).pass_number <= number - 1:
            found.add(number - 1)
    return sorted(found)
