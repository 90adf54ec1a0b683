"""Why a request waited: its ledger, and the passes that tell most about it, decided again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from schedscope.engine.errors import DivergenceError, RunFormatError, RunNotFoundError
from schedscope.engine.ordering import POLICIES
from schedscope.recorder.run import Run
from schedscope.replay.explain_pass import explain_moment, with_neighbours
from schedscope.replay.explanation import Change, Look, RequestExplanation
from schedscope.replay.ledger import RequestLedger, ledger_of
from schedscope.replay.provenance import CacheListener, Eviction, Origin
from schedscope.replay.replayer import Replayer

_REBUILT = 250
"""Passes that are re-run at most to look at a second, third and fourth pass of a request."""


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
        for moment in replayer.visit(with_neighbours(replayer, passes), heard):
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
    if ledger.worst_pass is not None and ledger.worst_pass in seen:
        found[ledger.worst_pass] = "worst"
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
