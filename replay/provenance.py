"""Where cached tokens came from, and why they went: which request brought a prefix, in which pass, and who evicted it.

What the log keeps of the cache depends on its level; but a scheduler that is rebuilt tells of every insertion and
eviction on the way. So whatever happened since the checkpoint before a pass is known exactly at any level, and what lies
further back as far as `insert` events were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schedscope.engine.radix import Match, Node, RadixCache
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tracer import Event, StepRecord, Tracer
from schedscope.engine.view import View, Waiting


class Insertion(NamedTuple):
    """Tokens of a request that were kept in the cache."""

    rid: str
    tokens: int
    """From the beginning of its sequence."""
    step: int
    pass_number: int | None
    """The pass of that step; None: it decoded."""


class Eviction(NamedTuple):
    """A leaf that left the cache."""

    node: int
    tokens: int
    step: int
    pass_number: int | None
    """The pass of that step; None: it decoded."""
    for_rids: tuple[str, ...]
    """The batch whose memory it made room for."""


class Origin(NamedTuple):
    """Who brought the cached prefix of a request."""

    tokens: int
    """Its length, whole pages."""
    rid: str | None
    """None: not known; it was cached before `known_since`."""
    pass_number: int | None
    """The pass that computed it."""
    step: int | None
    exact: bool
    """False: this request brought it at the latest, or brought it again; an earlier one may have before."""
    known_since: int
    """The pass from which on insertions are known."""
    holders: tuple[str, ...]
    """Running requests that kept it in the cache then."""


class Listener(Tracer):
    """Hears what happens in the cache while a scheduler is rebuilt. Attach it before the first step."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self.known_since = 0
        """The first pass whose insertions it hears."""
        self.insertions: dict[int, Insertion] = {}
        """By the node that ended them: the first one that did, since evicted nodes never come back."""
        self.evictions: list[Eviction] = []
        self._evicted: list[tuple[int, int]] = []
        self._step = 0
        self._pass: int | None = None

    def attach(self, scheduler: Scheduler) -> None:
        """Listen to another scheduler, whose past is unknown."""
        self._scheduler = scheduler
        self.known_since = scheduler.passes
        self.insertions.clear()
        self.evictions.clear()
        self._evicted.clear()

    def on_event(self, event: Event) -> None:
        """Note insertions, evictions, and the ends of requests, whose outputs are kept."""
        assert self._scheduler is not None
        if event.kind == "evict":
            assert event.node is not None
            self._evicted.append((event.node, event.tokens or 0))
        elif event.kind in {"insert", "finish"} and event.rid is not None:
            live = self._scheduler.lives[event.rid]
            cache = self._scheduler.state.cache
            match = cache.match(live.tokens, live.space)
            self._keep(cache, match, event.rid)

    def on_step(self, record: StepRecord, state: object) -> None:
        """Note whose batch the step's evictions made room for."""
        del state
        self._step, self._pass = record.step, record.pass_number
        members = () if record.batch is None else tuple(member.live.rid for member in record.batch.members)
        for node, count in self._evicted:
            self.evictions.append(Eviction(node, count, record.step, record.pass_number, members))
        self._evicted.clear()

    def _keep(self, cache: RadixCache, match: Match, rid: str) -> None:
        node = cache.resolve(match)
        if node.parent is not None:
            self.insertions.setdefault(node.id, Insertion(rid, match.length, self._step, self._pass))


def origin(view: View, request: Waiting, heard: Listener) -> Origin | None:
    """Who brought what a waiting request finds in the cache; None if it finds nothing."""
    cache = view.cache
    match = cache.match(request.tokens, request.space)
    node = cache.resolve(match)
    if node.parent is None:
        return None
    below = set(_below(node))
    holders = tuple(r.rid for r in view.running if r.lock in below)
    first = heard.insertions.get(_first_of(node).id)
    if first is not None:
        return Origin(match.length, first.rid, first.pass_number, first.step, True, heard.known_since, holders)
    again = [heard.insertions[each.id] for each in below if each.id in heard.insertions]
    if again:
        latest = min(again, key=lambda insertion: insertion.step)
        return Origin(match.length, latest.rid, latest.pass_number, latest.step, False, heard.known_since, holders)
    return Origin(match.length, None, None, None, False, heard.known_since, holders)


def _first_of(node: Node) -> Node:
    """The leaf as which a node's tokens came.

    A split gives the upper half a new number, so of the children only the lower half has a smaller one: siblings came
    later.
    """
    while (lower := min(node.children.values(), key=lambda child: child.id, default=node)).id < node.id:
        node = lower
    return node


def _below(node: Node) -> Iterator[Node]:
    """A node and all under it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
