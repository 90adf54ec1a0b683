"""A decision in words and as JSON: what `replay pass` and `scenario run` show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text
from schedscope.engine.decision import Plan
from schedscope.engine.ordering import POLICIES, Key, Ranked
from schedscope.engine.verdict import Reason, Result, Verdict
from schedscope.recorder.rows import finite, key_fields

FOLD_FROM = 5
"""Requests that are alike and not looked at, from which on a table folds them."""
REFUSALS = {
    Reason.PREFILL_MAX_REQUESTS: "this pass has {have} requests, as many as it may",
    Reason.MEMORY: "needs {need} tokens, {have} are left",
    Reason.MEMORY_IGNORE_EOS: "its pages need {need} tokens, {have} are left",
    Reason.MEMORY_FUTURE: "fits now, but outputs will grow: {have} would be free where {need} are needed",
    Reason.INPUT_BUDGET: "needs {need} prefill tokens, {have} are left in this pass",
    Reason.CHUNK_TAKEN: "would have to be cut, and another request is being chunked",
    Reason.CHUNK_TOO_SMALL: "{have} tokens left in the chunk are less than one piece",
    Reason.CHUNK_BUDGET: "no chunk budget left",
    Reason.DELAYED: "the prefill delayer says wait",
    Reason.UNKNOWN: "the server did not say why",
}
ENDINGS = {
    Reason.TOTAL_SPENT: "memory and output reserves are spent",
    Reason.CURRENT_SPENT: "memory is spent",
    Reason.INPUT_SPENT: "the prefill budget is spent",
    Reason.CHUNK_SPENT: "the chunk is spent",
}
STOPS = {
    "queue_end": "everyone was looked at",
    "budget": "the pass's token budget was spent before the next request",
    "no_slot": "no running slot for the next request",
    "preempt_failed": "no running slot, and no set of running requests could be preempted for the next request",
}
GATES = {
    "batch_is_full": "not started: the batch was marked full in an earlier pass",
    "queue_empty": "not started: nothing waits and no chunk is to be continued",
    "min_free_slots_delay": "not started: fewer free slots than min_free_slots_delay asks for",
    "no_slot": "not started: all running slots are taken",
}
FALLBACKS = {
    "queue_too_long": "too many waiting requests: neither matched nor sorted",
    "radix_cache_disabled": "the prefix cache is off",
}


def number(value: float | None) -> str:
    """A token count for people: no decimals where there are none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def verdict_words(verdict: Verdict | None) -> str:
    """What a pass said about a request, with operands."""
    if verdict is None:
        return "not looked at"
    operands = {"need": number(verdict.need), "have": number(verdict.have)}
    if not verdict.admitted:
        return "refused: " + REFUSALS[verdict.reason].format(**operands)
    words = f"admitted: {number(verdict.extend_len)} tokens"
    if verdict.prefix_len:
        words += f" after {number(verdict.prefix_len)} cached"
    if verdict.result is Result.CHUNK:
        words = f"next chunk: {number(verdict.extend_len)} tokens after {number(verdict.prefix_len)}"
    if verdict.chunked:
        words += ", to be continued"
    if verdict.preempted:
        words += f"; preempted {', '.join(verdict.preempted)}"
    if verdict.reason in ENDINGS:
        words += f"; then {ENDINGS[verdict.reason]}"
    return words


def stop_words(plan: Plan) -> str:
    """Why the pass ended where it did, in one sentence."""
    if plan.gate is not None:
        return GATES[plan.gate]
    assert plan.admission is not None
    return ending_words(plan.admission.stop, plan.admission.verdicts)


def ending_words(stop: str, verdicts: Sequence[Verdict]) -> str:
    """Why a pass stopped behind these verdicts."""
    if stop in STOPS or not verdicts:
        return STOPS.get(stop, stop)
    last = verdicts[-1]
    if last.admitted:
        return f"{ENDINGS.get(last.reason, stop)} behind {printable(last.rid)}"
    return f"{printable(last.rid)} was {verdict_words(last)}"


def key_words(key: Key) -> str:
    """A sort key's values, without the request's own name and the position, which end it."""
    return "  ".join(key_value(value) for name, value in _shown(key))


def _shown(key: Key) -> list[tuple[str, Any]]:
    return list(zip(key_fields(key), key, strict=False))


def _key_names(plan: Plan) -> str:
    """What the values of the keys are called, and what decides between equal ones."""
    assert plan.ordering is not None
    if not plan.ordering.ranked:
        return ""
    key = plan.ordering.ranked[0].key
    names = [name for name, _ in _shown(key)]
    if not names:
        return "key: place in the queue"
    return f"key: {', '.join(names)}, then {'rid' if 'rid' in key._fields else 'place in the queue'}"


def key_value(value: Any) -> str:
    """One value of a sort key."""
    if isinstance(value, float):
        # Adding nothing makes a plain zero of a negative one.
        return f"{value + 0.0:g}"
    if isinstance(value, tuple):
        return "/".join(f"{-weight:g}" for weight, _ in value[:-1]) or "root"
    return str(value)


def pass_table(plan: Plan, compared: Plan | None = None) -> Table:
    """The pass as a table; with `compared`, a column tells where each request stood in that other plan.

    A run of requests that share key and fate and were not looked at is folded into one row.
    """
    assert plan.ordering is not None
    assert plan.admission is not None
    looks = POLICIES[plan.ordering.active].cache_aware
    verdicts = {verdict.rid: verdict for verdict in plan.admission.verdicts}
    places = _places(compared)
    held_back = any(place.duplicate is not None for place in plan.ordering.ranked)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("queue", justify="right", no_wrap=True)
    if compared is not None:
        table.add_column("recorded", justify="right", no_wrap=True)
    table.add_column("request", overflow="fold")
    table.add_column("key", overflow="fold")
    table.add_column("matched", justify="right", no_wrap=True)
    if held_back:
        table.add_column("held back for", overflow="fold")
    table.add_column("verdict", overflow="fold")

    def add(where: list[Text], whose: str, key: str, matched: str, partner: str, verdict: Text) -> None:
        cells = [*where, Text(whose), Text(key), Text(matched)]
        table.add_row(*cells, *([Text(partner)] if held_back else []), verdict)

    for verdict in plan.admission.verdicts:
        if verdict.result is Result.CHUNK:
            where = [Text("chunk"), *([Text("")] if compared is not None else [])]
            add(where, printable(verdict.rid), "", number(verdict.prefix_len), "", _styled(verdict))
    for start, end in _folds(plan, verdicts, compared):
        place = plan.ordering.ranked[start]
        rid = place.request.rid
        where = [_move(place.position, start)]
        if compared is not None:
            where.append(_move(places.get(rid, start), start, arrow_only=True))
        whose = printable(rid)
        if end - start > 1:
            where = [Text(f"{start} … {end - 1}", style="dim"), *([Text("")] if compared is not None else [])]
            whose = f"{end - start} requests"
        matched = number(place.request.matched) if looks else "-"
        add(where, whose, key_words(place.key), matched, _held_back(place), _styled(verdicts.get(rid)))
    return table


def _folds(plan: Plan, verdicts: Mapping[str, Verdict], compared: Plan | None) -> Iterator[tuple[int, int]]:
    """Spans of the ordered queue to show as one row each."""
    assert plan.ordering is not None
    ranked = plan.ordering.ranked

    def fate(place: Ranked) -> object:
        if compared is not None or place.request.rid in verdicts:
            return object()
        return key_words(place.key), place.request.matched, place.duplicate

    start = 0
    for _, group in groupby(ranked, fate):
        size = len(list(group))
        if size >= FOLD_FROM:
            yield start, start + 1
            yield start + 1, start + size
        else:
            yield from ((i, i + 1) for i in range(start, start + size))
        start += size


def _places(plan: Plan | None) -> dict[str, int]:
    if plan is None or plan.ordering is None:
        return {}
    return {place.request.rid: after for after, place in enumerate(plan.ordering.ranked)}


def _move(before: int, after: int, *, arrow_only: bool = False) -> Text:
    style = "green" if after < before else "yellow" if after > before else "dim"
    arrow = "↑" if after < before else "↓" if after > before else "·"
    return Text(f"{before} {arrow}" if arrow_only else f"{before} → {after}", style=style)


def _held_back(place: Ranked) -> str:
    if place.duplicate is None:
        return ""
    partner = place.duplicate.partner
    return "everyone" if partner is None else f"{printable(partner)} ({place.duplicate.shared_len:,} shared)"


def _styled(verdict: Verdict | None) -> Text:
    words = printable(verdict_words(verdict))
    if verdict is None:
        return Text(words, style="dim")
    return Text(words, style="green" if verdict.admitted else "red")


def printable(text: str) -> str:
    """Text without control characters, so that a rid can't steer a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def heading(plan: Plan) -> str:
    """Policy, key and budgets of a pass, in a line or two."""
    assert plan.ordering is not None
    assert plan.admission is not None
    ordering, left = plan.ordering, plan.admission.budget
    policy = ordering.active
    if ordering.fallback is not None:
        policy = f"{ordering.configured} running as {ordering.active} ({FALLBACKS[ordering.fallback]})"
    chunk = "no chunking" if left.chunk is None else f"chunk {number(left.chunk)}"
    return (
        f"policy {policy}; {_key_names(plan)}\n"
        f"budget: memory {number(left.total)} after output reserves ({number(left.current)} before), "
        f"prefill {number(left.input)}, {chunk}"
    )


def batch_words(plan: Plan) -> str:
    """Who joins the batch."""
    admitted = plan.admission.admitted if plan.admission is not None else ()
    return ", ".join(printable(verdict.rid) for verdict in admitted) or "nobody"


def plan_json(plan: Plan) -> dict[str, Any]:
    """A decision as JSON values."""
    if plan.ordering is None or plan.admission is None:
        return {"gate": plan.gate, "batch_is_full": plan.batch_is_full}
    verdicts = {verdict.rid: verdict for verdict in plan.admission.verdicts}
    queue = []
    for after, place in enumerate(plan.ordering.ranked):
        request = place.request
        queue.append(
            {
                "rid": request.rid,
                "place_before": place.position,
                "place_after": after,
                "key": _json_key(place.key),
                "prefix_len": request.prefix_len,
                "matched": request.matched,
                "deprioritized": place.duplicate is not None,
                "partner": place.duplicate.partner if place.duplicate else None,
                "shared_len": place.duplicate.shared_len if place.duplicate else None,
                "verdict": _verdict_json(verdicts.get(request.rid)),
            }
        )
    queued = {place.request.rid for place in plan.ordering.ranked}
    chunk = next((v for v in plan.admission.verdicts if v.rid not in queued), None)
    admission = plan.admission
    return {
        "gate": None,
        "batch_is_full": plan.batch_is_full,
        "configured_policy": plan.ordering.configured,
        "active_policy": plan.ordering.active,
        "fallback": plan.ordering.fallback,
        "budget": admission.budget._asdict(),
        "chunk_limit": admission.chunk_limit,
        "chunk": _verdict_json(chunk),
        "queue": queue,
        "admitted": [verdict.rid for verdict in admission.admitted],
        "preempted": list(admission.preempted),
        "chunked_rid": admission.chunked_rid,
        "stop": admission.stop,
        "why": stop_words(plan),
        "delayer": None if plan.negotiation is None else json.loads(json.dumps(plan.negotiation._asdict())),
    }


def _json_key(key: Key) -> dict[str, Any]:
    """A key by field name; infinite numbers as text, since JSON has none."""
    return {name: finite(value) for name, value in key._asdict().items()}


def _verdict_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "rid": verdict.rid,
        "admitted": verdict.admitted,
        "result": str(verdict.result),
        "reason": str(verdict.reason),
        "need": verdict.need,
        "have": verdict.have,
        "prefix_len": verdict.prefix_len,
        "extend_len": verdict.extend_len,
        "chunked": verdict.chunked,
        "remaining": verdict.remaining._asdict(),
        "preempted": list(verdict.preempted),
        "words": verdict_words(verdict),
    }
