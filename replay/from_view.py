"""The views of a scheduler that is not ours, made again from what a recording of it holds.

A view here owes nothing to our own scheduler: the queue, the running batch and the memory are as they were observed,
and the prefix cache is just as much of a tree as the observed look-ups, and the prefixes that running requests hold,
say there was. So each pass can be decided again by itself, whatever came before it.

What this can't show: under dfs-weight, branches of equal weight stand in the order in which the server's tree has
them, which no look-up tells. Here they stand in the order that came out.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from schedscope.engine import tokens
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import NOT_WAITING
from schedscope.engine.errors import RunFormatError
from schedscope.engine.ordering import POLICIES
from schedscope.engine.radix import Node, RadixCache, namespace
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import Chunked, Running, View, Waiting
from schedscope.recorder.files import Within
from schedscope.recorder.observed import Observed, unpack_observed
from schedscope.recorder.parts import Part
from schedscope.replay.columns import Readable, packed_lists, rows_of, values_of
from schedscope.replay.moment import Moment

_UNSEEN = b"unseen"
"""Namespace of what is in the cache and was not observed. No request's begins so."""
_WINDOW = 512
"""Passes that are read at once."""
_VERSION = 3
"""Of the state of Python's generator."""
_DECISION = ("pass", "rid", "place_before", "place_after", "prefix_len", "matched", "admit_prefix_len")
_EVENT = ("seq", "time", "kind", "rid", "detail")


class Look(NamedTuple):
    """What a pass was observed to find out about a request: a row of `decisions`, in part."""

    number: int
    rid: str
    place_before: int | None
    """None: the continuing chunk."""
    place_after: int | None
    prefix_len: int
    matched: int
    admit_prefix_len: int | None


class Seen(NamedTuple):
    """A pass as it was observed."""

    moment: Moment
    row: Mapping[str, Any]
    """Of `passes`."""


def see(parts: Sequence[Part], config: SchedulerConfig, number: int) -> Seen | None:
    """One pass, as it was observed; None: it is not in these parts of a log.

    Looks back as far as the arrival of the oldest request that the pass is about. Raises RunFormatError.
    """
    within = [i for i, part in enumerate(parts) if part.first_pass is not None and part.first_pass <= number]
    if not within:
        return None
    first = last = within[-1]
    only = Within("pass", number, number)
    wanted = {rid for (rid,) in rows_of(parts[last], "decisions", ("rid",), only)}
    for (view,) in rows_of(parts[last], "views", ("view",), only):
        seen = unpack_observed(view)
        wanted.update(seen.running)
        if seen.chunked is not None:
            wanted.add(seen.chunked.rid)
    while True:
        wanted -= {rid for kind, rid in rows_of(parts[first], "events", ("kind", "rid")) if kind == "arrive"}
        if not wanted or first == 0:
            break
        first -= 1
    return next(Observations(config).read(parts[first : last + 1], number), None)


class _Known:
    """A request, as far as it got."""

    def __init__(self, detail: Mapping[str, Any], prompt: bytes) -> None:
        self.tokens = prompt
        self.prompt_len = self.length = tokens.length(prompt)
        self.max_new_tokens: int = detail["max_new_tokens"]
        self.ignore_eos: bool = detail["ignore_eos"]
        self.priority: int | None = detail["priority"]
        self.routing_key: str | None = detail["routing_key"]
        self.space = namespace(detail["extra_key"], detail["cache_salt"])
        self.entry_time = 0.0
        self.arrival_processed_tokens = 0
        self.retracted = False

    @property
    def output_len(self) -> int:
        return self.length - self.prompt_len

    def append(self, ids: bytes) -> None:
        self.tokens += ids
        self.length += len(ids) // TOKEN_BYTES


class Observations:
    """Reads the passes of a rank, in order.

    Args:
        config: of the observed scheduler.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._known: dict[str, _Known] = {}
        self._zeros = array("i")

    def read(self, parts: Iterable[Readable], only: int | None = None) -> Iterator[Seen]:
        """The passes of these parts, or one of them. Raises RunFormatError.

        The parts must begin with the arrivals of all requests that the passes are about.
        """
        for part in parts:
            yield from self._of_part(part, only)
            for (rid,) in rows_of(part, "requests", ("rid",)):
                self._known.pop(rid, None)

    def _of_part(self, part: Readable, only: int | None) -> Iterator[Seen]:
        passes = part.table("passes", None, None if only is None else Within("pass", only, only)).to_pylist()
        views: dict[int, bytes] = dict(rows_of(part, "views", ("pass", "view")))
        after = -1
        for begin in range(0, len(passes), _WINDOW):
            rows = passes[begin : begin + _WINDOW]
            is_last = begin + _WINDOW >= len(passes)
            within = Within("pass", rows[0]["pass"], rows[-1]["pass"])
            found = map(Look._make, rows_of(part, "decisions", _DECISION, within))
            looks = {number: list(group) for number, group in groupby(found, itemgetter(0))}
            until = 2**62 if is_last else rows[-1]["seq"]
            happenings = self._happenings(part, Within("seq", after + 1, until))
            after = until
            pending = next(happenings, None)
            for row in rows:
                while pending is not None and pending[0] < row["seq"]:
                    self._take(*pending[1:])
                    pending = next(happenings, None)
                number = row["pass"]
                if number not in views:
                    raise RunFormatError(f"pass {number}: what it could read was not recorded")
                yield Seen(self._moment(row, unpack_observed(views[number]), looks.get(number, [])), row)
            while pending is not None:
                self._take(*pending[1:])
                pending = next(happenings, None)
        if not passes:
            for happening in self._happenings(part, Within("seq", 0, 2**62)):
                self._take(*happening[1:])

    # ---- what happened -------------------------------------------------------------------------------------

    def _happenings(self, part: Readable, within: Within) -> Iterator[tuple[int, str, Any]]:
        """Arrivals, outputs and queueing by tick: tick, kind and what it is about."""
        found = part.table("tokens", ("seq", "rid", "position", "ids"), within)
        ids = packed_lists(found.column("ids"))
        written = zip(*(values_of(found.column(name)) for name in ("seq", "rid", "position")), ids, strict=True)
        prompts: dict[tuple[int, str], bytes] = {}
        happenings: list[tuple[int, str, Any]] = []
        for seq, rid, position, packed in written:
            if position == 0:
                prompts[seq, rid] = packed
            else:
                happenings.append((seq, "output", (rid, packed)))
        for seq, time, kind, rid, detail in rows_of(part, "events", _EVENT, within):
            if kind == "arrive":
                happenings.append((seq, kind, (rid, json.loads(detail), prompts.get((seq, rid), b""))))
            elif kind in {"queue", "retract", "preempt"}:
                happenings.append((seq, kind, (rid, time, None if detail is None else json.loads(detail))))
        return iter(sorted(happenings, key=itemgetter(0)))

    def _take(self, kind: str, about: tuple[Any, ...]) -> None:
        if kind == "arrive":
            rid, detail, prompt = about
            self._known[rid] = _Known(detail, prompt)
            return
        known = self._known.get(about[0])
        if known is None:
            return
        if kind == "output":
            known.append(about[1])
        elif kind == "queue":
            _, known.entry_time, detail = about
            if detail is not None:
                known.arrival_processed_tokens = detail["processed_tokens"]
        else:
            known.retracted = True

    # ---- the view ------------------------------------------------------------------------------------------

    def _moment(self, row: Mapping[str, Any], seen: Observed, looks: Sequence[Look]) -> Moment:
        queued = sorted((look for look in looks if look.place_before is not None), key=itemgetter(2))
        fills = seen.fill_lens or [0] * len(queued)
        running = [self._request(rid) for rid in seen.running]
        cache, locks = self._cache(row, seen, looks, running)
        view = View(
            queue=tuple(self._waiting(look, fill) for look, fill in zip(queued, fills, strict=True)),
            running=tuple(map(self._running, range(len(running)), running, [seen] * len(running), locks)),
            cache=cache,
            available=seen.available,
            free_rows=seen.free_rows,
            chunked=self._chunked(seen),
            batch_is_full=row["batch_is_full_before"],
            processed_tokens=row["processed_tokens"],
            new_token_ratio=row["new_token_ratio"],
            refresh_calls=row["refresh_calls"],
            delayer=seen.delayer or NOT_WAITING,
            reports=tuple(seen.reports),
            max_prefill_bs=seen.max_prefill_bs,
            token_usage=seen.token_usage,
            now=seen.now,
        )
        chance = RandomState((_VERSION, tuple(seen.random_state), None)) if seen.random_state else None
        return Moment(row["pass"], view, chance, self._config)

    def _request(self, rid: str) -> _Known:
        known = self._known.get(rid)
        if known is None:
            raise RunFormatError(f"request {rid}: its arrival is not in the log")
        return known

    def _priority(self, known: _Known) -> int:
        if known.priority is None:
            return self._config.lowest_priority if self._config.enable_priority_scheduling else 0
        return known.priority

    def _waiting(self, look: Look, fill_len: int) -> Waiting:
        known = self._request(look.rid)
        return Waiting(
            rid=look.rid,
            tokens=known.tokens,
            prompt_len=known.prompt_len,
            output_len=known.output_len,
            max_new_tokens=known.max_new_tokens,
            ignore_eos=known.ignore_eos,
            priority=self._priority(known),
            routing_key=known.routing_key,
            space=known.space,
            entry_time=known.entry_time,
            arrival_processed_tokens=known.arrival_processed_tokens,
            retracted=known.retracted,
            prefix_len=look.prefix_len,
            matched=look.matched,
            fill_len=fill_len,
        )

    def _running(self, place: int, known: _Known, seen: Observed, lock: Node | None) -> Running:
        page = self._config.page_size
        finished = place in seen.finished
        private = 0
        if seen.allocated and not finished:
            private = -(-seen.allocated[place] // page) * page - seen.protected[place]
        return Running(
            rid=seen.running[place],
            prompt_len=known.prompt_len,
            output_len=seen.output_lens[place],
            max_new_tokens=known.max_new_tokens,
            ignore_eos=known.ignore_eos,
            priority=self._priority(known),
            routing_key=known.routing_key,
            entry_time=known.entry_time,
            finished=finished,
            private=private,
            lock=lock,
        )

    def _chunked(self, seen: Observed) -> Chunked | None:
        chunk = seen.chunked
        if chunk is None:
            return None
        known = self._request(chunk.rid)
        return Chunked(
            rid=chunk.rid,
            length=known.prompt_len + chunk.output_len,
            prefix_len=chunk.prefix_len,
            output_len=chunk.output_len,
            prompt_len=known.prompt_len,
            max_new_tokens=known.max_new_tokens,
            ignore_eos=known.ignore_eos,
            retracted=chunk.retracted,
        )

    # ---- the cache -----------------------------------------------------------------------------------------

    def _cache(
        self, row: Mapping[str, Any], seen: Observed, looks: Sequence[Look], running: Sequence[_Known]
    ) -> tuple[RadixCache, list[Node | None]]:
        """As much of the tree as was observed, and the node that each running request holds."""
        config = self._config
        # Whatever the server evicts first: within a pass it is nothing of what was found in it, see below.
        cache = RadixCache(config.page_size, "lru", config.disable_radix_cache)
        if config.disable_radix_cache:
            return cache, [None] * len(running)
        aware = POLICIES[row["active_policy"]].cache_aware
        for look in sorted(looks, key=_by_outcome):
            length = max(look.admit_prefix_len or 0, look.prefix_len if aware else 0)
            if look.place_before is not None and length:
                self._insert(cache, self._request(look.rid), length)
        locks: list[Node | None] = []
        for place, known in enumerate(running):
            held = 0 if place in seen.finished else seen.protected[place]
            locks.append(self._lock(cache, known, held))
        if seen.chunked is not None:
            self._lock(cache, self._request(seen.chunked.rid), seen.chunked.protected)
        if seen.allocated:
            # A preemption may evict, and does so on a copy of the tree, which counts for itself. What a request was
            # found to match afterwards was not evicted, so what nobody looked at goes first.
            unseen = max(seen.evictable - cache.evictable, 0)
            node = cache.insert(bytes(unseen * TOKEN_BYTES), _UNSEEN, array("i", bytes(unseen * TOKEN_BYTES))).node
            node.last_access = 0
        cache.evictable = seen.evictable
        return cache, locks

    def _lock(self, cache: RadixCache, known: _Known, length: int) -> Node | None:
        if not length:
            return cache.root
        node = self._insert(cache, known, length)
        cache.lock(node)
        return node

    def _insert(self, cache: RadixCache, known: _Known, length: int) -> Node:
        if len(self._zeros) < length:
            self._zeros = array("i", bytes(TOKEN_BYTES * 2 * length))
        return cache.insert(known.tokens[: length * TOKEN_BYTES], known.space, self._zeros).node


def _by_outcome(look: Look) -> int:
    return -1 if look.place_after is None else look.place_after
