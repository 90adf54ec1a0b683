"""Why a pass came out as it did, and why a request waited: facts, read off decisions that are made again.

Nothing here decides by other logic. A pass is rebuilt and decided with the function that decided it live; that decision
must be the recorded one, or nothing is explained. What would have changed it is found and checked by deciding again
(`schedscope.replay.flip`).

Facts point on: whatever has a rank, a pass or an rid can be followed from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow.compute as pc
from schedscope.engine.budget import Remaining
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan
from schedscope.engine.dedup import Duplicate
from schedscope.engine.delayer import Negotiation
from schedscope.engine.errors import DivergenceError, RunFormatError, RunNotFoundError
from schedscope.engine.ordering import POLICIES, Key, Ranked
from schedscope.engine.preemption import output_reserve
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.engine.view import View
from schedscope.recorder.hashing import block_size
from schedscope.recorder.rows import decision_hash, pack_decision
from schedscope.recorder.run import Run
from schedscope.replay.flip import (
    Elsewhere,
    Flip,
    Situation,
    find_flip,
    find_flips,
    situation_of,
    under_policies,
)
from schedscope.replay.from_view import see
from schedscope.replay.ledger import RequestLedger, Rows, ledger_of
from schedscope.replay.moment import Moment
from schedscope.replay.provenance import CacheListener, Eviction, Origin, look_back, origin
from schedscope.replay.replayer import Replayer
from schedscope.replay.source import is_observed
from schedscope.replay.verify_view import difference

_HOLDERS = 3
"""Running requests that are named as holding memory."""
_FLIPPED = 3
"""Places of a pass for which changes are searched, unless one is asked for."""
_REBUILT = 250
"""Passes that are re-run at most to look at a second, third and fourth pass of a request."""


class Against(NamedTuple):
    """Why a request stands behind the one directly before it: the first field in which their keys differ."""

    rid: str
    """Who stands before it."""
    field: str
    own: Any
    other: Any


class Place(NamedTuple):
    """A request in the queue of a pass."""

    rid: str
    place: int
    """After sorting, from 0."""
    place_before: int
    key: dict[str, Any]
    """All fields, smallest first."""
    against: Against | None
    """None: it is the first."""
    matched: int
    """Cached tokens as the policy counted them."""
    is_stale: bool
    """They are of an earlier look: in this pass nobody was looked up before admission."""
    origin: Origin | None
    """Who brought what is cached of it now; None: nothing is, or it was not looked up."""
    duplicate: Duplicate | None
    """Set if it was held back."""
    verdict: Verdict | None
    """None: the pass ended before it was looked at."""
    flips: tuple[Flip, ...]
    """What alone would have had it admitted here, each as small as can be."""
    ahead: tuple[Flip, ...]
    """What would have put it before the one that stands before it."""
    elsewhere: tuple[Elsewhere, ...]
    """What other policies would have made of it."""


class Ending(NamedTuple):
    """What ended the admission loop."""

    stop: str
    """`queue_end`, `NO_TOKEN`, `OTHER`, `budget`, `no_slot` or `preempt_failed`."""
    rid: str | None
    """The request whose verdict ended it, or whose chunk spent the budget; None: none did."""
    reason: str | None
    """Of that verdict."""
    need: float | None
    have: float | None
    admitted: bool
    """It was admitted, and the pass ended behind it."""


class Holder(NamedTuple):
    """Memory of a running request."""

    rid: str
    tokens: int
    """Held by it alone, whole pages."""
    reserve: float
    """Kept free for the rest of its output."""


class Pool(NamedTuple):
    """What the KV pool was full of, in tokens."""

    size: int
    free: int
    evictable: int
    """Cached and used by no one."""
    locked: int
    """Cached and used by running requests."""
    held: int
    """Of running requests, not in the cache."""
    reserve: float
    """Kept free for outputs of running requests: it counts as taken."""
    running: int
    """Requests."""
    holders: tuple[Holder, ...]
    """Those that hold most."""


class Mark(NamedTuple):
    """The mark that the batch is full: while it is set, steps end before a pass."""

    set_in: int | None
    """The pass that set it; None: not known. Under one that a gate set there is no pass."""
    stop: str | None
    """How that pass ended; None: not known."""
    rid: str | None
    """The request that did not fit."""
    reason: str | None
    short: int | None
    """Tokens it was short of."""
    until_pass: int | None
    """The next pass; None: none was recorded."""
    steps: int | None
    """Steps that made no pass until then; None: not known."""
    ns: int | None
    """Their time."""


class PassExplanation(NamedTuple):
    """Why a pass came out as it did."""

    rank: int
    number: int
    configured: str
    active: str
    """The policy that sorted."""
    fallback: str | None
    budget: Remaining
    """Before anyone was admitted."""
    chunk: Verdict | None
    """The continuing chunk."""
    places: tuple[Place, ...]
    """The queue after sorting."""
    ending: Ending
    pool: Pool
    mark_before: Mark | None
    """Set when the pass began."""
    mark_after: Mark | None
    """Set by the pass or left set."""
    delayer: Negotiation | None
    known_since: int
    """The pass from which on it is known who cached what."""
    checked: int
    """Claims about what would have been otherwise, each decided again."""

    def place_of(self, rid: str) -> Place | None:
        """A request's place."""
        return next((place for place in self.places if place.rid == rid), None)


class Look(NamedTuple):
    """A pass that tells about a request."""

    why: str
    """`worst`: it cost the request most; `admitted`: it let it in; `last`: the last one it waited in; `grew`, `fell`:
    its cached prefix did most between the pass before and this one."""
    number: int
    configured: str
    active: str
    """The policy that sorted."""
    fallback: str | None
    """Why it was not the configured one."""
    place: Place
    queue_len: int
    ending: Ending
    pool: Pool
    mark_after: Mark | None


class Change(NamedTuple):
    """A request's cached prefix became another between two passes."""

    before_pass: int
    """The pass that still saw the old one."""
    pass_number: int
    before: int
    after: int
    origin: Origin | None
    """Who brought what there is now, where that was looked at."""
    evicted: tuple[Eviction, ...]
    """Leaves that left the cache in between, where that was looked at."""


class RequestExplanation(NamedTuple):
    """Why a request waited."""

    ledger: RequestLedger
    facts: dict[str, Any] | None
    """Its row of `requests`; None: it has not ended."""
    passes: int
    """That it stood in the queue of, as far as decisions were recorded."""
    looks: tuple[Look, ...]
    """In ascending order of passes."""
    changes: tuple[Change, ...]
    """Of its cached prefix: the largest growth and loss, and those before a pass that was looked at."""
    unseen: str | None
    """Why passes could not be decided again."""
    checked: int
    """Claims about what would have been otherwise, each decided again."""


# ---- a pass --------------------------------------------------------------------------------------------------


def explain_pass(run: Run, rank: int, number: int, only: str | None = None) -> PassExplanation:
    """Why a recorded pass came out as it did.

    Args:
        only: search what would have been otherwise for this request alone, instead of for the first few refused.

    Raises RunNotFoundError for an unknown pass, rank or request, RunFormatError, and DivergenceError if the pass does
    not come out as recorded.
    """
    replayer = Replayer(run, rank)
    heard = CacheListener()
    moment = deque(replayer.visit(_with_neighbours(replayer, [number]), heard), maxlen=1).pop()
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
        ending=_ending(plan),
        pool=_pool(view, moment.config),
        mark_before=_mark_before(run, rank, rows) if view.batch_is_full else None,
        mark_after=_mark_after(run, rank, plan, rows, view.batch_is_full) if plan.batch_is_full else None,
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


# ---- the mark ------------------------------------------------------------------------------------------------


def _mark_before(run: Run, rank: int, rows: Rows) -> Mark | None:
    set_in = _set_before(run, rank, rows)
    return Mark(set_in, *_cause_of_mark(run, rank, set_in, rows), rows["passes"][0]["pass"], None, None)


def _mark_after(run: Run, rank: int, plan: Plan, rows: Rows, was_set: bool) -> Mark:
    number = rows["passes"][0]["pass"]
    set_in = _set_before(run, rank, rows) if was_set else number
    try:
        following = run.pass_rows(rank, number + 1)["steps"]
    except RunNotFoundError:
        following = []
    steps = ns = None
    if following and rows["steps"]:
        steps = following[0]["step"] - rows["steps"][0]["step"] - 1
        ns = following[0]["start_ns"] - rows["steps"][0]["end_ns"]
    until = number + 1 if following else None
    if set_in == number:
        ending = _ending(plan)
        return Mark(number, ending.stop, ending.rid, ending.reason, short_of(ending), until, steps, ns)
    return Mark(set_in, *_cause_of_mark(run, rank, set_in, rows), until, steps, ns)


def _set_before(run: Run, rank: int, rows: Rows) -> int | None:
    """The pass that set the mark under which this one began: a step's row has the mark after it."""
    (row,) = rows["passes"]
    steps = run.table("steps", rank, ["step", "count", "batch_is_full_pass"], (row["pass"] - 1, row["pass"]))
    before = steps.filter(pc.equal(pc.add(steps["step"], steps["count"]), row["step"]))["batch_is_full_pass"]
    set_in: int | None = before[0].as_py() if len(before) else None
    return set_in


def _cause_of_mark(
    run: Run, rank: int, set_in: int | None, rows: Rows
) -> tuple[str | None, str | None, str | None, int | None]:
    """How the pass that set the mark ended: stop, who did not fit, why, and by how many tokens."""
    if set_in is None:
        return None, None, None, None
    if rows["passes"][0]["pass"] != set_in:
        try:
            rows = run.pass_rows(rank, set_in)
        except RunNotFoundError:
            return None, None, None, None
    looked = [row for row in rows["decisions"] if row["result"] is not None]
    stop = rows["passes"][0]["stop"]
    if stop not in {"NO_TOKEN", "OTHER"} or not looked:
        return stop, None, None, None
    last = max(looked, key=lambda row: -1 if row["place_after"] is None else row["place_after"])
    ending = Ending(stop, last["rid"], last["reason"], last["need"], last["have"], last["admitted"])
    return stop, ending.rid, ending.reason, short_of(ending)


def short_of(ending: Ending | Verdict) -> int | None:
    """Tokens that a refused request was short of; None where no tokens of memory or budget were counted."""
    if ending.need is None or ending.have is None or ending.admitted:
        return None
    missing = ending.need - ending.have
    if ending.reason == Reason.MEMORY_IGNORE_EOS:
        return -int(-missing // 1)
    if ending.reason in {Reason.MEMORY, Reason.MEMORY_FUTURE, Reason.INPUT_BUDGET}:
        return int(missing // 1) + 1
    return None


# ---- a request -----------------------------------------------------------------------------------------------


def explain_request(run: Run, rid: str, rank: int | None = None) -> RequestExplanation:
    """Why a request waited: its ledger, and the few passes that tell most about it, decided again.

    Where passes can't be rebuilt, or one does not come out as recorded, `unseen` says so, and the ledger stands alone.
    Raises RunNotFoundError for an unknown request or rank.
    """
    ledger, life = ledger_of(run, rid, rank)
    waiting = [row for row in life["decisions"] if row["place_before"] is not None]
    matched = _matched(run, ledger.rank, waiting)
    passes = _telling_passes(ledger, waiting, matched)
    looks: list[Look] = []
    looked: dict[int, tuple[Origin | None, list[Eviction]]] = {}
    unseen = None
    try:
        replayer = Replayer(run, ledger.rank)
        heard = CacheListener()
        passes = _within_reach(replayer, passes)
        for moment in replayer.visit(_with_neighbours(replayer, passes), heard):
            why = passes.get(moment.number)
            if why is None or all(r.rid != rid for r in moment.view.queue):
                continue
            found = explain_moment(replayer, moment, heard, rid)
            place = found.place_of(rid)
            assert place is not None
            about = (found.number, found.configured, found.active, found.fallback, place, len(found.places))
            looks.append(Look(why, *about, found.ending, found.pool, found.mark_after))
            looked[found.number] = place.origin, list(heard.evictions)
    except (RunFormatError, RunNotFoundError, DivergenceError) as error:
        unseen = str(error)
    return RequestExplanation(
        ledger=ledger,
        facts=life["requests"][-1] if life["requests"] else None,
        passes=len(waiting),
        looks=tuple(looks),
        changes=tuple(_changes(matched, looked)),
        unseen=unseen,
        checked=sum(len(look.place.flips) + len(look.place.ahead) + len(look.place.elsewhere) for look in looks),
    )


def _matched(run: Run, rank: int, waiting: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of passes whose policy looked everyone up in the cache."""
    if not waiting:
        return []
    around = min(row["pass"] for row in waiting), max(row["pass"] for row in waiting)
    table = run.table("passes", rank, ["pass", "active_policy"], around)
    active = dict(zip(table["pass"].to_pylist(), table["active_policy"].to_pylist(), strict=True))
    return [row for row in waiting if row["pass"] in active and POLICIES[active[row["pass"]]].cache_aware]


def _telling_passes(
    ledger: RequestLedger, waiting: Sequence[dict[str, Any]], matched: Sequence[dict[str, Any]]
) -> dict[int, str]:
    """Passes to look at, with the reason, the most important first."""
    found: dict[int, str] = {}
    seen = {row["pass"] for row in waiting}
    parts = [part for part in ledger.parts if part.cause != "deciding"]
    worst = next((part.worst_pass for part in parts if part.worst_pass in seen), None)
    if worst is not None:
        found[worst] = "worst"
    if ledger.spans and (last := ledger.spans[-1].last_pass) is not None:
        found.setdefault(last, "admitted" if ledger.spans[-1].left_as == "admitted" else "last")
    for name, row in zip(("fell", "grew"), _extremes(matched), strict=True):
        if row is not None:
            found.setdefault(row["pass"], name)
    return found


def _within_reach(replayer: Replayer, passes: dict[int, str]) -> dict[int, str]:
    """The first of these passes, and of the others those that take little more to rebuild."""
    chosen: dict[int, str] = {}
    for number, why in passes.items():
        if not chosen or _re_run(replayer, [*chosen, number]) <= _REBUILT:
            chosen[number] = why
    return chosen


def _re_run(replayer: Replayer, numbers: Iterable[int]) -> int:
    """Passes that have to be re-run to visit some."""
    count = reached = 0
    for number in sorted(numbers):
        start = max(replayer.start_before(number).pass_number, reached)
        count, reached = count + number - start, number
    return count


def _extremes(matched: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The rows before which the cached prefix lost most and grew most."""
    steps = [(row["prefix_len"] - before["prefix_len"], row) for before, row in pairwise(matched)]
    loss = min(steps, key=lambda step: step[0], default=(0, None))
    growth = max(steps, key=lambda step: step[0], default=(0, None))
    return loss[1] if loss[0] < 0 else None, growth[1] if growth[0] > 0 else None


def _changes(
    matched: Sequence[dict[str, Any]], looked: dict[int, tuple[Origin | None, list[Eviction]]]
) -> Iterable[Change]:
    """The largest loss and growth of the cached prefix, and those that passes looked at saw, with who did it."""
    wanted = {*looked, *(row["pass"] for row in _extremes(matched) if row is not None)}
    for before, row in pairwise(matched):
        by = row["prefix_len"] - before["prefix_len"]
        if by and row["pass"] in wanted:
            origin, evictions = looked.get(row["pass"], (None, []))
            evicted = [each for each in evictions if each.before_pass > before["pass"]] if by < 0 else []
            lens = before["prefix_len"], row["prefix_len"]
            yield Change(before["pass"], row["pass"], *lens, origin if by > 0 else None, tuple(evicted))


def _with_neighbours(replayer: Replayer, numbers: Iterable[int]) -> list[int]:
    """Passes and the one before each, as far as they can be rebuilt: what is between the two is then heard."""
    found = set(numbers)
    last = replayer.run.passes(replayer.rank).last
    for number in numbers:
        if last is not None and 0 < number <= last and replayer.start_before(number - 1).pass_number <= number - 1:
            found.add(number - 1)
    return sorted(found)
