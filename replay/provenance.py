"""Where cached tokens came from, and why they went: which request brought a prefix, in which pass, and who evicted it.

What the log keeps of the cache depends on its level; but a scheduler that is rebuilt tells of every insertion and
eviction on the way. So whatever happened since the checkpoint before a pass is known at any level. What lies further
back is looked up in `insert` events, if they were recorded, a few parts of the log back and no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from schedscope.engine.live import Live
from schedscope.engine.radix import Node
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tracer import Event, StepRecord
from schedscope.engine.view import View, Waiting
from schedscope.recorder.parts import Part
from schedscope.replay.columns import rows_of
from schedscope.replay.replayer import Listener

_PARTS_BACK = 3
"""Parts of the log in which insertions are looked up."""


class Insertion(NamedTuple):
    """Tokens of a request that were kept in the cache."""

    rid: str
    step: int
    pass_number: int | None
    """The pass that computed them; None: they were kept because it ended."""


class Eviction(NamedTuple):
    """A leaf that left the cache."""

    node: int
    tokens: int
    step: int
    pass_number: int | None
    """The pass of that step; None: it decoded."""
    before_pass: int
    """The first pass behind it."""
    for_rids: tuple[str, ...]
    """The batch whose memory it made room for."""


class Origin(NamedTuple):
    """Who brought the cached prefix of a request."""

    tokens: int
    """Its length, whole pages."""
    rid: str | None
    """None: not known; it was cached before pass `known_since`."""
    pass_number: int | None
    """The pass that computed it; None: it came when that request ended, or is not known."""
    step: int | None
    exact: bool
    """False: this request brought it at the latest; an earlier one may have before it."""
    known_since: int
    """The pass from which on insertions are known."""
    holders: tuple[str, ...]
    """Running requests that kept it in the cache then."""
    node: int
    """The cache node as which it came."""


class CacheListener(Listener):
    """Hears what happens in the cache. Give it to `Replayer.visit`."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self.known_since = 0
        """The first pass whose insertions it hears."""
        self.insertions: dict[int, Insertion] = {}
        """By the node that ended them, the first one that did."""
        self.evictions: list[Eviction] = []
        self._evicted: list[tuple[int, int]] = []
        self._chunk: Live | None = None
        """Whose chunk the last step computed: it is kept when the next one begins."""
        self._computed: dict[str, tuple[int, int | None]] = {}
        """The last step, and its pass, that computed a part of a request's prompt; it may be kept a step later."""
        self._step = 0

    def attach(self, scheduler: Scheduler) -> None:
        """Forget what was heard of another one."""
        self.__init__()  # type: ignore[misc]
        self._scheduler = scheduler
        self.known_since = scheduler.passes

    def detach(self, number: int) -> None:
        """Nothing is known of what was cached before this pass."""
        self.__init__()  # type: ignore[misc]
        self.known_since = number

    def on_event(self, event: Event) -> None:
        """Note insertions, evictions, and the ends of requests, whose outputs are kept."""
        if event.kind == "evict":
            assert event.node is not None
            self._evicted.append((event.node, event.tokens or 0))
        elif event.kind == "flush":
            self.insertions.clear()
        elif event.kind == "insert" and event.rid is not None and event.node is not None:
            self._keep(event.node, event.rid, *self._computed.get(event.rid, (self._step, None)))
        elif event.kind == "finish" and event.rid is not None:
            assert self._scheduler is not None
            cache, live = self._scheduler.state.cache, self._scheduler.lives[event.rid]
            self._keep(cache.resolve(cache.match(live.tokens, live.space)).id, event.rid, self._step, None)

    def on_step(self, record: StepRecord, state: object) -> None:
        """Note whose batch the step's evictions made room for."""
        del state
        assert self._scheduler is not None
        self.catch_up()
        self._step = record.step
        members = () if record.batch is None else record.batch.members
        self._chunk = next((member.live for member in members if member.unfinished), None)
        self._computed |= {m.live.rid: (record.step, record.pass_number) for m in members if not m.decode}
        for_rids = tuple(member.live.rid for member in members)
        for node, count in self._evicted:
            at = (record.step, record.pass_number, self._scheduler.passes)
            self.evictions.append(Eviction(node, count, *at, for_rids))
        self._evicted.clear()

    def catch_up(self) -> None:
        """Take note of the last chunk. Between a step and the look at the next one it has been kept."""
        live, self._chunk = self._chunk, None
        if live is not None and live.lock is not None and live.lock.parent is not None:
            self._keep(live.lock.id, live.rid, *self._computed[live.rid])

    def _keep(self, node: int, rid: str, step: int, number: int | None) -> None:
        self.insertions.setdefault(node, Insertion(rid, step, number))


def origin(view: View, request: Waiting, heard: CacheListener) -> Origin | None:
    """Who brought what a waiting request finds in the cache; None if it finds nothing."""
    cache = view.cache
    match = cache.match(request.tokens, request.space)
    node = cache.resolve(match)
    if node.parent is None:
        return None
    heard.catch_up()
    below = list(_below(node))
    locked = set(below)
    holders = tuple(r.rid for r in view.running if r.lock in locked)
    first = _first_of(node).id
    found = heard.insertions.get(first)
    exact = found is not None
    if found is None:
        later = [heard.insertions[each.id] for each in below if each.id in heard.insertions]
        found = min(later, key=lambda insertion: insertion.step, default=None)
    rid, step, number = (None, None, None) if found is None else found
    return Origin(match.length, rid, number, step, exact, heard.known_since, holders, first)


def look_back(parts: Sequence[Part], origins: Iterable[Origin]) -> dict[int, Origin]:
    """By node, what recorded insertions tell about prefixes that were cached before anyone listened.

    Looks a few parts back at most. What it finds is exact only if it sees the beginning of the log.

    Args:
        parts: of the log, in recorded order.
    """
    unknown = {each.node: each for each in origins if not each.exact}
    if not unknown:
        return {}
    until = max(each.known_since for each in unknown.values())
    before = [part for part in parts if part.first_pass is not None and part.first_pass < until]
    found: dict[int, Insertion] = {}
    whole = len(before) <= _PARTS_BACK
    for part in reversed(before[-_PARTS_BACK:]):
        first: dict[int, Insertion] = {}
        flushed = False
        for step, number, kind, rid, node in rows_of(part, "events", ("step", "pass", "kind", "rid", "node")):
            if kind == "flush":
                first, flushed = {}, True
            elif kind == "insert" and node in unknown and number is not None and number < unknown[node].known_since:
                first.setdefault(node, Insertion(rid, step, number))
        found |= first
        if flushed:
            whole = True
            break
    return {
        node: unknown[node]._replace(rid=each.rid, pass_number=each.pass_number, step=each.step, exact=whole)
        for node, each in found.items()
    }


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
