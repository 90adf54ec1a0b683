"""A decision as rows of the log.

The recorder writes these rows and replay makes them again from a re-run decision, so the two can be compared field
by field. Rows are tuples in the order of `schedscope.recorder.schema`, without the rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.ordering import Key, Ranked
from schedscope.engine.state import SchedulerState
from schedscope.engine.verdict import Verdict
from schedscope.engine.view import View

Row = tuple[Any, ...]


def state_facts(state: SchedulerState) -> dict[str, Any]:
    """The columns of `steps` that tell the state in which a step's batch goes to the model."""
    return {
        "running": len(state.running),
        "queue_len": len(state.queue),
        "available": state.pool.available,
        "evictable": state.cache.evictable,
        "protected": state.cache.protected,
        "pool_size": state.pool.size,
        "batch_is_full": state.batch_is_full,
        "batch_is_full_pass": state.batch_is_full_pass,
        "new_token_ratio": state.new_token_ratio,
        "processed_tokens": state.processed_tokens,
    }


def decision_rows(number: int, plan: Plan) -> list[Row]:
    """One `decisions` row per request of the pass: the continuing chunk first, then the queue as sorted."""
    assert plan.ordering is not None
    assert plan.admission is not None
    verdicts = {verdict.rid: verdict for verdict in plan.admission.verdicts}
    ranked = {place.request.rid for place in plan.ordering.ranked}
    rows = [_row(number, v.rid, None, None, v) for v in plan.admission.verdicts if v.rid not in ranked]
    for after, place in enumerate(plan.ordering.ranked):
        rid = place.request.rid
        rows.append(_row(number, rid, after, place, verdicts.get(rid)))
    return rows


def _row(number: int, rid: str, after: int | None, place: Ranked | None, verdict: Verdict | None) -> Row:
    duplicate = place.duplicate if place is not None else None
    queue_part = (
        number,
        rid,
        place.position if place is not None else None,
        after,
        key_text(place.key) if place is not None else None,
        ",".join(key_fields(place.key)) if place is not None else None,
        place.request.prefix_len if place is not None else 0,
        place.request.matched if place is not None else 0,
        duplicate is not None,
        duplicate.partner if duplicate is not None else None,
        duplicate.shared_len if duplicate is not None else None,
    )
    if verdict is None:
        return (*queue_part, None, None, False, None, None, False, *(None,) * 6, [])
    return (
        *queue_part,
        str(verdict.result),
        str(verdict.reason),
        verdict.admitted,
        verdict.prefix_len,
        verdict.extend_len,
        verdict.chunked,
        _float(verdict.need),
        _float(verdict.have),
        float(verdict.remaining.total),
        float(verdict.remaining.current),
        verdict.remaining.input,
        verdict.remaining.chunk,
        list(verdict.preempted),
    )


REPEATED = frozenset({"rid", "position"})
"""Fields that end keys and repeat other columns of the row: `rid` and `place_before`."""


def key_fields(key: Key) -> tuple[str, ...]:
    """The names of a key's fields, without those at its end that say nothing new."""
    return telling(key._fields)


@cache
def telling(names: tuple[str, ...]) -> tuple[str, ...]:
    """A key's fields without those at its end that say nothing new."""
    while names and names[-1] in REPEATED:
        names = names[:-1]
    return names


def key_text(key: Key) -> str:
    """The values of `key_fields` as a JSON array; infinite numbers, which JSON lacks, as "inf" and "-inf"."""
    values = key[: len(key_fields(key))]
    try:
        return json.dumps(values, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(finite(values), separators=(",", ":"))


def finite(value: Any) -> Any:
    """The same JSON value with the numbers that JSON lacks as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def pass_row(
    number: int,
    step: int,
    seq: int,
    view: View,
    plan: Plan,
    random_state: RandomState | None,
    digest: str,
    decide_ns: int,
) -> Row:
    """The `passes` row of a pass."""
    assert plan.ordering is not None
    assert plan.admission is not None
    ordering, admission = plan.ordering, plan.admission
    before = admission.budget
    after = admission.verdicts[-1].remaining if admission.verdicts else before
    verdict = plan.negotiation
    return (
        number,
        step,
        seq,
        view.now,
        ordering.configured,
        ordering.active,
        ordering.fallback,
        len(view.queue),
        len(view.running),
        view.chunked.rid if view.chunked is not None else None,
        admission.chunked_rid,
        admission.chunk_limit,
        admission.stop,
        float(before.total),
        float(before.current),
        before.input,
        before.chunk,
        float(after.total),
        float(after.current),
        after.input,
        after.chunk,
        view.batch_is_full,
        plan.batch_is_full,
        view.new_token_ratio,
        view.processed_tokens,
        view.refresh_calls,
        None if random_state is None else _hash(random_state),
        None if verdict is None else verdict.allow,
        None if verdict is None else verdict.reason,
        None if verdict is None else verdict.estimation,
        None if verdict is None else verdict.num_prefillable,
        None if verdict is None else verdict.next_state.delayed_count,
        None if verdict is None else verdict.next_state.skip_first,
        None if verdict is None else verdict.slot_condition,
        None if verdict is None else verdict.queue_condition,
        None if verdict is None else json.dumps(verdict.report._asdict()),
        len(admission.admitted),
        list(admission.preempted),
        decide_ns,
        digest,
    )


def decision_hash(rows: list[Row]) -> str:
    """A digest of a pass's decisions: equal on every machine, and on every rank that decided alike."""
    return _hash(rows)


def _hash(value: Any) -> str:
    return blake2b(msgspec.msgpack.encode(value), digest_size=16).hexdigest()


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
