"""A decision as rows of the log.

The recorder writes these rows and replay makes them again from a re-run decision, so the two can be compared field
by field. Rows are tuples in the order of `schedscope.recorder.schema`, without the rank.

On the scheduler's thread every microsecond counts: there a decision about a hundred requests is packed column by
column, which costs a twentieth of making rows. Rows are made of it in another process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from schedscope.engine.budget import Remaining
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.dedup import Duplicate
from schedscope.engine.delayer import Negotiation
from schedscope.engine.ordering import Key, Keys
from schedscope.engine.state import SchedulerState
from schedscope.engine.verdict import Result, Verdict
from schedscope.engine.view import View, Waiting

Row = tuple[Any, ...]

_encode = msgspec.msgpack.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_RID, _PREFIX_LEN, _MATCHED = (itemgetter(Waiting._fields.index(name)) for name in ("rid", "prefix_len", "matched"))


class StateFacts(NamedTuple):
    """The columns of `steps` that tell the state in which a step's batch goes to the model."""

    running: int
    queue_len: int
    available: int
    evictable: int
    protected: int
    pool_size: int
    batch_is_full: bool
    batch_is_full_pass: int | None
    new_token_ratio: float
    processed_tokens: int


def state_facts(state: SchedulerState) -> StateFacts:
    """Those of a scheduler of ours."""
    return StateFacts(
        len(state.running_batch),
        len(state.queue),
        state.pool.available,
        state.cache.evictable,
        state.cache.protected,
        state.pool.size,
        state.batch_is_full,
        state.batch_is_full_pass if state.batch_is_full else None,
        state.new_token_ratio,
        state.processed_tokens,
    )


class PassFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a row of `passes` tells, see its columns."""

    now: float
    configured: str
    active: str
    fallback: str | None
    queue_len: int
    running: int
    chunked_in: str | None
    chunked_out: str | None
    chunk_limit: int | None
    stop: str
    before: Remaining
    after: Remaining
    batch_is_full_before: bool
    batch_is_full: bool
    new_token_ratio: float
    processed_tokens: int
    refresh_calls: int
    random_state: str | None
    """Its hash."""
    negotiation: Negotiation | None
    admitted: int
    preempted: tuple[str, ...]


class Decided(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a pass decided about its requests, as the scheduler's thread tells it.

    In columns: it takes half as long as rows. They are in the order of the queue before sorting.
    """

    names: Sequence[str] | None
    """Of the fields of the keys; None: the keys are not known."""
    keys: Sequence[Sequence[Any]]
    """A column per field."""
    rids: Sequence[str]
    prefix_lens: Sequence[int]
    matched: Sequence[int]
    duplicates: Sequence[Duplicate | None]
    positions: Sequence[int]
    """In the order after sorting: where each request stood before."""
    verdicts: Sequence[Verdict]
    """In the order in which they fell, the continuing chunk's first."""

    @property
    def count(self) -> int:
        """Rows of `decisions` that it makes."""
        return len(self.rids) + (bool(self.verdicts) and self.verdicts[0].result is Result.CHUNK)

    def pack(self) -> bytes:
        """As it goes into a frame."""
        return _encode(self)

    def places(self) -> list[int]:
        """Which of its rows each verdict is about."""
        chunks = self.count - len(self.rids)
        rids, positions = self.rids, self.positions
        # They mostly fall in the order of the queue.
        if all(verdict.rid == rids[at] for verdict, at in zip(self.verdicts[chunks:], positions, strict=False)):
            return list(range(len(self.verdicts)))
        places = {rids[at]: place for place, at in enumerate(positions, chunks)}
        return [*range(chunks), *(places[verdict.rid] for verdict in self.verdicts[chunks:])]


def decided(plan: Plan, block: int = 1) -> Decided:
    """What a pass of ours decided. The rows of `decisions` are made of it by whoever reads.

    Args:
        block: tokens; shared lengths are given in whole ones, see `schedscope.recorder.hashing`.
    """
    assert plan.ordering is not None
    assert plan.admission is not None
    ranked = plan.ordering.ranked
    queue, duplicates = ranked.queue, ranked.duplicates
    if block > 1:
        duplicates = [d and Duplicate(d.partner, d.shared_len - d.shared_len % block) for d in duplicates]
    names, keys = _columns(ranked.keys)
    looks = list(map(_RID, queue)), list(map(_PREFIX_LEN, queue)), list(map(_MATCHED, queue))
    return Decided(names, keys, *looks, duplicates, list(ranked.positions), plan.admission.verdicts)


def pack_decision(plan: Plan, block: int = 1) -> tuple[int, bytes]:
    """The same packed, and as how many rows."""
    told = decided(plan, block)
    return told.count, told.pack()


def _columns(keys: Sequence[Key]) -> tuple[tuple[str, ...], Sequence[Sequence[Any]]]:
    """The fields of keys that say something new, and the values of each."""
    if not keys:
        return (), ()
    if isinstance(keys, Keys):
        names = telling(keys.names)
        return names, keys.columns[: len(names)]
    names = telling(keys[0]._fields)
    return names, tuple(zip(*keys, strict=True))[: len(names)]


def decision_hash(packed: bytes) -> str:
    """A digest of what was packed: equal on every machine, and on every rank that decided alike."""
    return blake2b(packed, digest_size=16).hexdigest()


REPEATED = frozenset({"rid", "position"})
"""Fields that end keys and repeat other columns of the row: `rid` and `place_before`."""


def key_fields(key: Key) -> tuple[str, ...]:
    """The names of the fields of a key that `telling` leaves."""
    return telling(key._fields)


@cache
def telling(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of a key's fields all but those at its end that say nothing new."""
    while names and names[-1] in REPEATED:
        names = names[:-1]
    return names


def key_text(values: Sequence[Any]) -> str:
    """The values of `key_fields` as a JSON array; infinite numbers, which JSON lacks, as "inf" and "-inf"."""
    text = msgspec.json.encode(values).decode()
    return text if "null" not in text else _spelled(_encode(values))


def key_texts(columns: Sequence[Sequence[Any]]) -> list[str]:
    """`key_text` of many keys, a column per field: a call for each would take most of the time of making rows."""
    keys = list(zip(*columns, strict=True))
    lines = _encode_lines(keys).decode()
    texts = lines.split("\n")[:-1]
    if "null" not in lines:
        return texts
    return [_spelled(_encode(key)) if "null" in text else text for key, text in zip(keys, texts, strict=True)]


@lru_cache(maxsize=4096)
def _spelled(packed: bytes) -> str:
    """A key, packed, with infinite numbers as text. Most of a queue may have the same one. Unlike the values
    themselves, what is packed is equal only if their texts are: 0.0 is not -0.0 there, and 1 is not 1.0.
    """
    return json.dumps(finite(msgspec.msgpack.decode(packed)), separators=(",", ":"))


def finite(value: Any) -> Any:
    """The same JSON value with the numbers that JSON lacks as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


NOT_LOOKED_AT: Row = (None, None, False, None, None, False, *(None,) * 6, [])
"""What rows of `decisions` say about a request that the pass ended before."""


def said(verdict: Verdict) -> Row:
    """What they say about one that it looked at."""
    remaining = verdict.remaining
    return (
        str(verdict.result),
        str(verdict.reason),
        verdict.admitted,
        verdict.prefix_len,
        verdict.extend_len,
        verdict.chunked,
        verdict.need,
        verdict.have,
        remaining.total,
        remaining.current,
        remaining.input,
        remaining.chunk,
        list(verdict.preempted),
    )


def pass_facts(view: View, plan: Plan, random_state: RandomState | None) -> PassFacts:
    """What to tell of a pass that was decided here."""
    assert plan.ordering is not None
    assert plan.admission is not None
    ordering, admission = plan.ordering, plan.admission
    return PassFacts(
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
        admission.budget,
        admission.verdicts[-1].remaining if admission.verdicts else admission.budget,
        view.batch_is_full,
        plan.batch_is_full,
        view.new_token_ratio,
        view.processed_tokens,
        view.refresh_calls,
        None if random_state is None else hash_of(random_state),
        plan.negotiation,
        sum([verdict.extend_len is not None for verdict in admission.verdicts]),
        admission.preempted,
    )


def pass_row(number: int, step: int, seq: int, facts: PassFacts, digest: str, decide_ns: int) -> Row:
    """The `passes` row of a pass. An empty digest is filled in where the decision is unpacked."""
    before, after, verdict = facts.before, facts.after, facts.negotiation
    return (
        number,
        step,
        seq,
        facts.now,
        facts.configured,
        facts.active,
        facts.fallback,
        facts.queue_len,
        facts.running,
        facts.chunked_in,
        facts.chunked_out,
        facts.chunk_limit,
        facts.stop,
        float(before.total),
        float(before.current),
        before.input,
        before.chunk,
        float(after.total),
        float(after.current),
        after.input,
        after.chunk,
        facts.batch_is_full_before,
        facts.batch_is_full,
        facts.new_token_ratio,
        facts.processed_tokens,
        facts.refresh_calls,
        facts.random_state,
        None if verdict is None else verdict.allow,
        None if verdict is None else verdict.reason,
        None if verdict is None else verdict.estimation,
        None if verdict is None else verdict.num_prefillable,
        None if verdict is None else verdict.next_state.delayed_count,
        None if verdict is None else verdict.next_state.skip_first,
        None if verdict is None else verdict.slot_condition,
        None if verdict is None else verdict.queue_condition,
        None if verdict is None else json.dumps(verdict.report._asdict()),
        facts.admitted,
        list(facts.preempted),
        decide_ns,
        None,
        digest,
    )


def hash_of(value: Any) -> str:
    """A digest of a value: of the random generator's state."""
    return blake2b(msgspec.msgpack.encode(value), digest_size=16).hexdigest()
