"""The queues that the benchmarks sort: what waits, what is cached, and what arrives and finishes meanwhile."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

PROCESSED_TOKENS = 1_000_000
"""The clock of hrrn in every pass."""


class Arrival(NamedTuple):
    """A request, the same for every scheduler."""

    rid: str
    ids: array[int]
    entry_time: float
    arrival_processed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Token sequences by number; the numbers go on for ever, so a queue can turn over."""

    name: str
    about: str
    waiting: int
    """Requests in the queue."""
    cached: int
    """Finished sequences in the cache before the first pass."""
    request: Callable[[int], array[int]]
    finished: Callable[[int], array[int]]

    def arrivals(self, numbers: Iterable[int]) -> list[Arrival]:
        """Requests, in order of arrival."""
        return [Arrival(f"r{i:06}", self.request(i), i * 0.01, i * 37) for i in numbers]


def _ids(kind: str, number: int, count: int) -> array[int]:
    """Token ids of 16 bits that are the same in every run."""
    drawn = array("H", random.Random(f"{kind}/{number}").randbytes(2 * count))
    return array("q", drawn)


def _shared_prefixes(
    name: str, about: str, *, waiting: int, length: int, prefixes: int, prefix: int, warm: bool
) -> Workload:
    """Requests that spread over a few long prefixes and end differently."""
    heads = [_ids(name, i, prefix) for i in range(prefixes)]
    strangers = [_ids(f"{name}/stranger", i, prefix) for i in range(prefixes)]

    def request(i: int) -> array[int]:
        return heads[i * 7 % prefixes] + _ids(f"{name}/request", i, length - prefix)

    def finished(i: int) -> array[int]:
        known = heads if warm else strangers
        return known[i % prefixes] + _ids(f"{name}/finished", i, length - prefix)

    return Workload(name=name, about=about, waiting=waiting, cached=prefixes, request=request, finished=finished)


def _conversations(name: str, about: str, *, waiting: int, chats: int, turns: int, turn: int) -> Workload:
    """Follow-up turns of long conversations: every turn before left a node of its own in the cache."""
    histories = [_ids(name, i, turns * turn) for i in range(chats)]

    def request(i: int) -> array[int]:
        return histories[i % chats] + _ids(f"{name}/request", i, turn)

    def finished(i: int) -> array[int]:
        chat, last = i % chats, i // chats
        return histories[chat][: (last + 1) * turn] if last < turns else request(i)

    return Workload(name=name, about=about, waiting=waiting, cached=chats * turns, request=request, finished=finished)


WORKLOADS = (
    _shared_prefixes(
        "W1",
        "128 x 2,000 tokens over 10 cached prefixes of 1,500",
        waiting=128,
        length=2_000,
        prefixes=10,
        prefix=1_500,
        warm=True,
    ),
    _shared_prefixes(
        "W2",
        "50 x 20,000 tokens over 10 cached prefixes of 15,000",
        waiting=50,
        length=20_000,
        prefixes=10,
        prefix=15_000,
        warm=True,
    ),
    _shared_prefixes(
        "W3",
        "128 x 4,500 tokens over one prefix of 4,000, nothing cached",
        waiting=128,
        length=4_500,
        prefixes=1,
        prefix=4_000,
        warm=False,
    ),
    _conversations(
        "W4",
        "128 next turns of 32 conversations of 24 cached turns of 100 tokens",
        waiting=128,
        chats=32,
        turns=24,
        turn=100,
    ),
)
