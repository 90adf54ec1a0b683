"""Checkpoints: a scheduler's state as a row of the log, from which replay goes on.

Token ids are most of a state, and most of them are in the log already. So a checkpoint says for every token sequence
where it is written: pieces of requests in `tokens`, pieces of what this or an earlier checkpoint had to carry. A
checkpoint that stands alone carries all its tokens itself; later ones may refer to it and to everything behind it, so
a log whose older parts were deleted can be replayed from the first one that stands alone. What stays for long, such as
a system prompt that is always in use, is carried once more, so that going on from any checkpoint takes reading only
what was written shortly before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from schedscope.engine import tokens
from schedscope.engine.live import Live
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.snapshot import Snapshot, held_requests, pack_facts
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.recorder.rows import Row

_NEAR = 4
"""Checkpoints. What a later one needs of requests that came before the last so many is carried."""
_PIECES = 32
"""Of one request, after which it is carried whole: one more is added by each checkpoint that it lives to see."""


class Place(NamedTuple):
    """Where a cache node's tokens are written."""

    tick: int
    """Of the arrival or checkpoint that holds them."""
    first: int
    """Where what is known of the node's path begins in it, tokens."""
    end: int
    """Where the node ends in it, tokens."""


class Piece(NamedTuple):
    """Where a part of a request's sequence is written."""

    start: int
    """In the sequence, tokens."""
    tick: int
    offset: int
    """In the request that arrived then, or in what the checkpoint carried then, tokens."""
    length: int


class CheckpointWriter:
    """Writes the checkpoints of one rank, and remembers which tokens are in the log since one stood alone.

    Holds the requests that arrived since the last checkpoint, and those that live.

    Args:
        since: 0 if it sees the log from its very beginning, so that the first checkpoint needn't stand alone.
    """

    def __init__(self, since: int | None = None) -> None:
        self._since = since
        self._places: dict[Node, Place] = {}
        self._arrivals: dict[Live, int] = {}
        """Requests that came since then, and when: `tokens` has their prompts and outputs."""
        self._pieces: dict[Live, list[Piece]] = {}
        """Requests that were there before, or came long ago."""
        self._taken: deque[int] = deque(maxlen=_NEAR)
        """Ticks of the last checkpoints since one stood alone."""
        self._carriers: set[int] = set()
        """Of all since then, that one included."""

    def arrived(self, live: Live, tick: int) -> None:
        """A request came whose prompt is in `tokens` under this tick."""
        if self._since is not None:
            self._arrivals[live] = tick

    def write(self, scheduler: Scheduler, tick: int, *, alone: bool) -> Row:
        """The row of a checkpoint, as `checkpoints` in `schedscope.recorder.schema`. To be made between two steps.

        Args:
            tick: of the last thing that is in the state.
            alone: carry all tokens; the first checkpoint does anyway, unless `since` is 0.
        """
        if alone or self._since is None:
            self._since = tick
            self._places.clear()
            self._arrivals.clear()
            self._pieces.clear()
            self._taken.clear()
            self._carriers.clear()
        self._leave_behind()
        cache = scheduler.state.cache
        nodes = list(cache.nodes())
        held = held_requests(scheduler)
        carried = bytearray()
        self._place_sequences(cache)
        self._places = self._place_nodes(nodes, tick, carried)
        pieces = [self._place_request(live, cache, tick, carried) for live in held]
        self._arrivals = {live: self._arrivals[live] for live in held if live in self._arrivals}
        self._pieces = {live: each for live, each in zip(held, pieces, strict=True) if live not in self._arrivals}

        placed = [self._places[node] for node in nodes]
        sources = sorted({place.tick for place in placed} | {piece.tick for each in pieces for piece in each})
        index = {source: i for i, source in enumerate(sources)}
        state = {
            "facts": pack_facts(scheduler, held, nodes),
            "sources": sources,
            "nodes": {
                "source": [index[place.tick] for place in placed],
                "offset": [place.end - len(node) for node, place in zip(nodes, placed, strict=True)],
                "length": [len(node) for node in nodes],
            },
            "requests": [[(index[p.tick], p.offset, p.length) for p in each] for each in pieces],
        }
        packed = msgspec.msgpack.encode(state)
        self._taken.append(tick)
        self._carriers.add(tick)
        return tick, scheduler.steps, scheduler.passes, self._since, packed, tokens.decode(bytes(carried))

    def _leave_behind(self) -> None:
        """Forget what is written far back, so that it is carried."""
        if len(self._taken) < _NEAR:
            return
        near, carriers = self._taken[0], self._carriers
        self._arrivals = {live: tick for live, tick in self._arrivals.items() if tick > near}
        self._places = {node: at for node, at in self._places.items() if at.tick > near or at.tick in carriers}
        self._pieces = {
            live: pieces
            for live, pieces in self._pieces.items()
            if len(pieces) <= _PIECES and all(piece.tick > near or piece.tick in carriers for piece in pieces)
        }

    def _place_sequences(self, cache: RadixCache) -> None:
        """Find the nodes that requests have left in the cache."""
        arrived = [(live, [_whole(live, tick)]) for live, tick in self._arrivals.items()]
        for live, pieces in (*self._pieces.items(), *arrived):
            match = cache.match(live.tokens, live.space)
            node = cache.resolve(match)
            while node.parent is not None:
                if node.end <= match.length and node not in self._places:
                    place = _place_in(pieces, node)
                    if place is not None:
                        self._places[node] = place
                node = node.parent

    def _place_nodes(self, nodes: list[Node], tick: int, carried: bytearray) -> dict[Node, Place]:
        """Where each node is written; those that are nowhere are carried."""
        places: dict[Node, Place] = {}
        for node in reversed(nodes):
            place = self._places.get(node) or _place_above(node, places)
            if place is None:
                first = len(carried) // TOKEN_BYTES
                carried += node.key
                place = Place(tick, first, first + len(node))
            places[node] = place
        return places

    def _place_request(self, live: Live, cache: RadixCache, tick: int, carried: bytearray) -> list[Piece]:
        arrival = self._arrivals.get(live)
        if arrival is not None:
            return [_whole(live, arrival)]
        pieces = self._pieces.get(live)
        if pieces is None:
            pieces = self._cached_pieces(live, cache)
        done = pieces[-1].start + pieces[-1].length if pieces else 0
        rest = live.tokens[done * TOKEN_BYTES :]
        if rest:
            pieces = [*pieces, Piece(done, tick, len(carried) // TOKEN_BYTES, len(rest) // TOKEN_BYTES)]
            carried += rest
        return pieces

    def _cached_pieces(self, live: Live, cache: RadixCache) -> list[Piece]:
        """Where the cached prefix of a request is written."""
        match = cache.match(live.tokens, live.space)
        pieces = []
        for node in cache.path(cache.resolve(match)):
            place = self._places[node]
            length = min(node.end, match.length) - node.start
            pieces.append(Piece(node.start, place.tick, place.end - len(node), length))
        return pieces


def _whole(live: Live, tick: int) -> Piece:
    """All of a request that arrived then."""
    return Piece(0, tick, 0, live.length)


def _place_in(pieces: Iterable[Piece], node: Node) -> Place | None:
    """A node's place in the sequence of a request, if one piece has all of it."""
    start = node.start
    for piece in pieces:
        if piece.start <= start and node.end <= piece.start + piece.length:
            return Place(piece.tick, piece.offset, piece.offset + node.end - piece.start)
    return None


def _place_above(node: Node, places: Mapping[Node, Place]) -> Place | None:
    """A node that was split off the top of one whose tokens are written."""
    for child in node.children.values():
        place = places[child]
        end = place.end - len(child)
        if end - len(node) >= place.first:
            return Place(place.tick, place.first, end)
    return None


class Checkpoint:
    """A checkpoint as it was read: it needs the texts of its sources to become a state.

    Args:
        state: what `CheckpointWriter` packed. Raises ValueError for anything else.
    """

    def __init__(self, state: bytes) -> None:
        self._state: dict[str, Any] = msgspec.msgpack.decode(state)

    @property
    def sources(self) -> list[int]:
        """Ticks of the arrivals and checkpoints that hold its tokens."""
        return list(self._state["sources"])

    def unpack(self, texts: Mapping[int, bytes]) -> Snapshot:
        """The state.

        Args:
            texts: per source the packed prompt and outputs of the request that arrived then, or what the checkpoint
                carried. Raises KeyError if one is missing.
        """
        found = [texts[tick] for tick in self._state["sources"]]
        nodes = self._state["nodes"]
        places = zip(nodes["source"], nodes["offset"], nodes["length"], strict=True)
        keys = [_cut(found, *place) for place in places]
        sequences = [b"".join([_cut(found, *piece) for piece in pieces]) for pieces in self._state["requests"]]
        return Snapshot(self._state["facts"], keys, sequences)


def _cut(texts: list[bytes], source: int, offset: int, length: int) -> bytes:
    return texts[source][offset * TOKEN_BYTES : (offset + length) * TOKEN_BYTES]
