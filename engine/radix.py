"""The prefix cache: a radix tree from token sequences to KV slots.

Reading and changing are apart. `match` and `pin_cost` only read, so a decision, a what-if or a viewer may call
them at any time without changing what is evicted next. `touch` does what SGLang's match does as a side effect:
it splits the node in which the match ends and makes the path recent.

Looking again is cheap: tokens never change under a node, so a match that takes in a whole node stands until that node
is evicted or a new child carries on the sequence. The node then gets another `whole`, and who kept the old one can tell
(see `again`).
Touching is cheap too: only leaves are evicted, so only the end of a path has to be marked.

A node spans the tokens `parent.end .. end` of every sequence below it. `end` never changes: a split gives the
*upper* half to a new node, so a `Match` taken before a split still names the right place after it.

Behaviour, clocks and ties follow `UnifiedRadixCache` of SGLang 0.5.23.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from schedscope.engine import tokens
from schedscope.engine.eviction import EvictionKey, eviction_key
from schedscope.engine.tokens import TOKEN_BYTES

ROOT_PRIORITY = -(2**63)
# A touch marks the end of its path only; a parent takes over the time of an evicted child, less one. Ticks are so far
# apart that the times of two touches never mix.
_TICK = 1 << 20
# Outdated entries that the eviction heap may hold beyond as many as there are leaves.
_MAX_STALE = 64
# Continuations that a node remembers before all that ended there are looked at again.
_MAX_SOUGHT = 1024
# Steps of a walk after which it is worth a short cut.
_LONG_WALK = 4

Memo = TypeVar("Memo")


class Match(NamedTuple):
    """The longest cached prefix of a sequence."""

    length: int
    """Tokens, whole pages."""
    node: Node
    """The node in which the match ends (it may go on beyond), the root if nothing matches."""


class Node:
    """A run of tokens that all sequences through it share."""

    __slots__ = (
        "children",
        "creation",
        "edge",
        "end",
        "evicted",
        "hit_count",
        "id",
        "key",
        "lane",
        "last_access",
        "lock_ref",
        "parent",
        "priority",
        "slots",
        "sought",
        "whole",
    )

    def __init__(self, node_id: int, parent: Node | None, edge: bytes, key: bytes, end: int) -> None:
        self.id = node_id
        self.parent = parent
        self.edge = edge
        """Under what the parent keeps this node: its first page, after the namespace where the parent is the root."""
        self.key = key
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.slots: array[int] = array("i")
        self.lock_ref = 0
        self.last_access = 0
        """Logical time; a node with children is as recent as the most recent of those below it."""
        self.creation = 0
        """Logical time; siblings stand in this order."""
        self.hit_count = 0
        self.priority = ROOT_PRIORITY
        self.evicted = False
        """It is not in the tree any more; nodes above it may be."""
        self.lane: tuple[bytes, Node] | None = None
        """A node further down and the tokens that lead to it, from where this node starts. Only walks look at it."""
        self.whole = Match(end, self)
        """The match that ends with this node. Another object as soon as a sequence that had it may match otherwise."""
        self.sought: set[bytes] | None = None
        """With which pages sequences that ended here go on; None: no match ended here."""

    @property
    def start(self) -> int:
        """First token of the node, counted from the root."""
        return self.parent.end if self.parent is not None else 0

    def __len__(self) -> int:
        return len(self.key) // TOKEN_BYTES

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Node(id={self.id}, {self.start}..{self.end}, lock={self.lock_ref})"


class Inserted(NamedTuple):
    """What `insert` did."""

    existing: int
    """Tokens that were in the tree before."""
    node: Node
    """The node that now ends the sequence."""


class Evicted(NamedTuple):
    """One evicted leaf."""

    node: Node
    tokens: int


def namespace(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The bytes that keep two namespaces apart below the root. No namespace is no bytes; an empty salt is none."""
    if extra_key is None and not cache_salt:
        return b""
    return json.dumps([extra_key, cache_salt or None]).encode()


class RadixCache:
    """Radix tree over packed token ids, in whole pages.

    Args:
        page_size: tokens per KV page; only whole pages are kept.
        eviction_policy: a name of `EVICTION_POLICIES`.
        disabled: keep nothing and match nothing.
        slru_protected_hits: hits that protect a node under slru.
    """

    def __init__(
        self,
        page_size: int = 1,
        eviction_policy: str = "lru",
        disabled: bool = False,
        slru_protected_hits: int = 2,
    ) -> None:
        self.page_size = page_size
        self.eviction_policy = eviction_policy
        self.disabled = disabled
        self._eviction_key = eviction_key(eviction_policy, slru_protected_hits)
        self._slru_protected_hits = slru_protected_hits
        self._page_bytes = page_size * TOKEN_BYTES
        self.clock = 0
        """Logical time: grows with every access, so no two nodes are equally old."""
        self.next_id = 1
        self.root = Node(0, None, b"", b"", 0)
        self.root.lock_ref = 1
        self.evictable = 0
        """Tokens that nobody holds."""
        self.protected = 0
        """Tokens under a lock."""
        self._leaves: dict[int, Node] = {}
        """What may be evicted."""
        self._heap: list[tuple[EvictionKey, int, Node]] = []
        """Every leaf, under a key that was its own once. Keys only grow, except under mru, so the first entry whose
        key is still right is the least. Nodes that are no longer leaves stay until they come up."""
        self.version = 0
        """Grows with every change that may change a match."""
        self._memos: dict[type[Any], Any] = {}

    # ---- reading -------------------------------------------------------------------------------------------

    def match(self, sequence: bytes, space: bytes = b"", limit: int | None = None) -> Match:
        """Longest cached prefix of `sequence`, of at most `limit` tokens, in whole pages. Changes nothing."""
        match = self._walk(sequence, space + sequence[: self._page_bytes], self.root)
        return match if limit is None else self.cut(match, limit)

    def cut(self, match: Match, limit: int) -> Match:
        """At most `limit` tokens of a match, in whole pages."""
        if match.length <= limit:
            return match
        match = Match(limit - limit % self.page_size, match.node)
        return Match(match.length, self.resolve(match))

    def again(self, match: Match, sequence: bytes, space: bytes) -> Match:
        """What `match` gives today for a sequence for which it gave this before.

        The same object if that is the `whole` of its node still; else it goes on from where it ended.
        """
        length, node = match
        if node.whole is match:
            return match
        if length == node.end and not node.evicted and node.parent is not None:
            edge = sequence[length * TOKEN_BYTES : length * TOKEN_BYTES + self._page_bytes]
            if edge not in node.children:
                # Mostly another request went on from there, and this one still ends where it did.
                return self._ends(node, edge)
        while node.evicted:
            assert node.parent is not None
            node = node.parent
        length = min(length, node.end)
        node = self.resolve(Match(length, node))
        if length < node.end:
            return self._inside(length, node)
        edge = sequence[length * TOKEN_BYTES : length * TOKEN_BYTES + self._page_bytes]
        return self._walk(sequence, space + edge if node.parent is None else edge, node)

    def memo(self, kind: type[Memo]) -> Memo:
        """An object of this class that lives with the cache: for those who read it often, to be faster next time."""
        memo: Memo | None = self._memos.get(kind)
        if memo is None:
            memo = self._memos[kind] = kind()
        return memo

    def resolve(self, match: Match) -> Node:
        """The node that spans the last matched token today, after splits that came since."""
        length, node = match
        while node.parent is not None and node.parent.end >= length:
            node = node.parent
        return node

    def pin_cost(self, match: Match) -> int:
        """Evictable tokens that locking this match would take."""
        length, node = match
        cost = 0
        while node.parent is not None and node.lock_ref == 0:
            start = node.parent.end
            if length > start:
                cost += min(length, node.end) - start
            node = node.parent
        return cost

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root down to `node`."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def slots_of(self, match: Match) -> array[int]:
        """KV slots of the matched tokens, in order."""
        slots: array[int] = array("i")
        for node in self.path(self.resolve(match)):
            slots.extend(node.slots)
        return slots[: match.length]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first, children in insertion order."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    # ---- changing ------------------------------------------------------------------------------------------

    def touch(self, match: Match) -> Node:
        """Make the matched path recent, splitting the node in which it ends. Returns the node that now ends it."""
        node = self.resolve(match)
        if node.end > match.length:
            node = self._split(node, match.length)
        node.last_access = self._tick()
        return node

    def touch_many(self, matches: Sequence[Match]) -> None:
        """`touch` each, in this order. Many end alike and only the last time counts, so each node is set once."""
        last = dict(zip(map(id, matches), range(len(matches)), strict=True))
        whole = [(matches[i].node, i) for i in last.values() if matches[i].node.whole is matches[i]]
        if len(whole) < len(last):
            for match in matches:
                self.touch(match)
            return
        for node, i in whole:
            node.last_access = self.clock + (i + 1) * _TICK
        self.clock += len(matches) * _TICK

    def insert(
        self,
        sequence: bytes,
        space: bytes,
        slots: array[int],
        *,
        priority: int = 0,
        inserted_len: int = 0,
    ) -> Inserted:
        """Keep the whole pages of `sequence`, whose tokens are in `slots`.

        Nodes that end within `inserted_len` tokens were counted as a hit when the same request inserted them.
        Slots of tokens that were there already are not taken over; the caller frees them.
        """
        page = self._page_bytes
        stop = len(sequence) - len(sequence) % page
        root = self.root
        root.last_access = self._tick()
        root.priority = max(root.priority, priority)
        node, offset, prefix = root, 0, space
        while offset < stop:
            child = node.children.get(prefix + sequence[offset : offset + page])
            if child is None:
                break
            prefix = b""
            child.last_access = self._tick()
            shared = len(child.key)
            if stop - offset < shared or not sequence.startswith(child.key, offset):
                shared = tokens.common_prefix(child.key, sequence, 0, offset // TOKEN_BYTES) * TOKEN_BYTES
                shared = min(shared, stop - offset)
                shared -= shared % page
                child = self._split(child, node.end + shared // TOKEN_BYTES)
            child.priority = max(child.priority, priority)
            offset += shared
            if offset // TOKEN_BYTES > inserted_len:
                child.hit_count += 1
            node = child
        existing = offset // TOKEN_BYTES
        if offset < stop:
            edge = prefix + sequence[offset : offset + page]
            leaf = self._new_node(node, edge, sequence[offset:stop], stop // TOKEN_BYTES)
            leaf.slots = slots[existing : stop // TOKEN_BYTES]
            leaf.priority = priority
            node.children[edge] = leaf
            if node.sought and edge in node.sought:
                self._renew(node)
            self.evictable += len(leaf)
            self._update_leaf(node)
            self._update_leaf(leaf)
            if leaf.end > inserted_len:
                leaf.hit_count += 1
            node = leaf
        return Inserted(existing, node)

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction, once more."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable -= len(node)
                self.protected += len(node)
                self._leaves.pop(node.id, None)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            assert node.lock_ref > 0, f"unlocking {node} which nobody holds"
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable += len(node)
                self.protected -= len(node)
                self._update_leaf(node)
            node = node.parent

    def evict(self, wanted: int) -> list[Evicted]:
        """Drop unlocked leaves, whole, until `wanted` tokens are gone or none is left."""
        if self.eviction_policy == "mru":
            self._rebuild_heap()
        evicted: list[Evicted] = []
        while wanted > 0 and self._heap:
            key, node_id, node = heapq.heappop(self._heap)
            if self._leaves.get(node_id) is not node:
                continue
            if key != self._eviction_key(node):
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            node.evicted = True
            if node.sought is not None:
                self._renew(node)
            parent.last_access = max(parent.last_access, node.last_access - 1)
            del self._leaves[node_id]
            del parent.children[node.edge]
            self.evictable -= len(node)
            wanted -= len(node)
            evicted.append(Evicted(node, len(node)))
            self._update_leaf(parent)
        return evicted

    # ---- copies --------------------------------------------------------------------------------------------

    def fork(self) -> tuple[RadixCache, dict[int, Node]]:
        """An independent copy, and its nodes by the id they have in both."""
        copy = RadixCache(self.page_size, self.eviction_policy, self.disabled, self._slru_protected_hits)
        copy.clock, copy.next_id = self.clock, self.next_id
        twins: dict[int, Node] = {0: copy.root}
        self._copy_facts(self.root, copy.root)
        for node in self.nodes():
            assert node.parent is not None
            parent = twins[node.parent.id]
            twin = Node(node.id, parent, node.edge, node.key, node.end)
            self._copy_facts(node, twin)
            copy.adopt(twin)
            twins[node.id] = twin
        return copy, twins

    def adopt(self, node: Node) -> None:
        """Hang up a ready-made node, for copies and checkpoints; parents come first, siblings oldest first."""
        parent = node.parent
        assert parent is not None
        parent.children[node.edge] = node
        self._renew(parent)
        if node.lock_ref:
            self.protected += len(node)
        else:
            self.evictable += len(node)
        self._update_leaf(parent)
        self._update_leaf(node)

    @staticmethod
    def _copy_facts(node: Node, twin: Node) -> None:
        twin.slots = node.slots
        twin.lock_ref = node.lock_ref
        twin.last_access = node.last_access
        twin.creation = node.creation
        twin.hit_count = node.hit_count
        twin.priority = node.priority

    # ---- inner ---------------------------------------------------------------------------------------------

    def _walk(self, sequence: bytes, edge: bytes, node: Node) -> Match:
        """The match of a sequence that leads through `node` and goes on with `edge` below it."""
        page = self._page_bytes
        stop = len(sequence) - len(sequence) % page
        offset = node.end * TOKEN_BYTES
        steps = 0
        while offset < stop and (child := node.children.get(edge)) is not None:
            lane = child.lane
            if lane is not None and not lane[1].evicted and sequence.startswith(lane[0], offset):
                key, node = lane
            else:
                key, node = child.key, child
                if not sequence.startswith(key, offset):
                    shared = tokens.common_prefix(key, sequence, 0, offset // TOKEN_BYTES) * TOKEN_BYTES
                    return self._inside((offset + shared - shared % page) // TOKEN_BYTES, node)
                steps += 1
            offset += len(key)
            edge = sequence[offset : offset + page]
        if steps > _LONG_WALK:
            self._lay_lane(node)
        return self._ends(node, edge)

    def _ends(self, node: Node, edge: bytes) -> Match:
        """A match that ends with a node, and would go on with `edge` below it."""
        if node.sought is None:
            node.sought = {edge}
        elif len(node.sought) > _MAX_SOUGHT:
            self._renew(node)
            node.sought = {edge}
        else:
            node.sought.add(edge)
        return node.whole

    @staticmethod
    def _inside(length: int, node: Node) -> Match:
        """A match that ends within a node."""
        if node.sought is None:
            node.sought = set()
        return Match(length, node)

    def _lay_lane(self, node: Node) -> None:
        """Let the next walk go straight to `node` from where its only children in a row begin."""
        keys, first = [node.key], node
        while (parent := first.parent) is not None and parent.parent is not None and len(parent.children) == 1:
            first = parent
            keys.append(first.key)
        key = b"".join(reversed(keys))
        if first.lane is None or first.lane[1].evicted or len(first.lane[0]) < len(key):
            first.lane = key, node

    def _renew(self, node: Node) -> None:
        """What matched up to this node may match more or less from now on."""
        node.whole = Match(node.end, node)
        node.sought = None
        self.version += 1

    def _tick(self) -> int:
        self.clock += _TICK
        return self.clock

    def _new_node(self, parent: Node, edge: bytes, key: bytes, end: int) -> Node:
        node = Node(self.next_id, parent, edge, key, end)
        self.next_id += 1
        node.last_access = self._tick()
        node.creation = self._tick()
        return node

    def _split(self, lower: Node, end: int) -> Node:
        """Give the tokens of `lower` before `end` to a new node above it, which is returned."""
        parent = lower.parent
        assert parent is not None
        cut = end - parent.end
        upper = self._new_node(parent, lower.edge, lower.key[: cut * TOKEN_BYTES], end)
        upper.slots = lower.slots[:cut]
        upper.lock_ref = lower.lock_ref
        upper.hit_count = lower.hit_count
        upper.creation = lower.creation
        upper.priority = lower.priority
        parent.children[upper.edge] = upper
        lower.parent = upper
        lower.key = lower.key[cut * TOKEN_BYTES :]
        lower.lane = None
        lower.slots = lower.slots[cut:]
        lower.edge = lower.key[: self._page_bytes]
        upper.children[lower.edge] = lower
        self.version += 1
        lower.last_access = self._tick()
        return upper

    def _update_leaf(self, node: Node) -> None:
        if node.lock_ref or node.children or node.parent is None:
            self._leaves.pop(node.id, None)
        elif node.id not in self._leaves:
            self._leaves[node.id] = node
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Put a leaf where `evict` looks."""
        heapq.heappush(self._heap, (self._eviction_key(node), node.id, node))
        if len(self._heap) > 2 * len(self._leaves) + _MAX_STALE:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [(self._eviction_key(leaf), leaf.id, leaf) for leaf in self._leaves.values()]
        heapq.heapify(self._heap)
