"""The prefix cache against a model that has no tree: a dictionary from token sequences to what is known of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedscope.engine import radix, tokens
from schedscope.engine.eviction import EVICTION_POLICIES
from schedscope.engine.radix import Match, Node, RadixCache, namespace

Place = tuple[bytes, tuple[int, ...]]
"""A namespace and the tokens up to some point."""
NUMBER = st.integers(0, 1000)


# ---- the model -----------------------------------------------------------------------------------------------


@dataclass
class Facts:
    """What is known of a node, which is named by the tokens up to its end."""

    last: int
    born: int
    hits: int
    priority: int
    locks: int


EVICTION_KEYS: dict[str, Callable[[Facts], tuple[int, ...]]] = {
    "lru": lambda facts: (facts.last,),
    "lfu": lambda facts: (facts.hits, facts.last),
    "fifo": lambda facts: (facts.born,),
    "mru": lambda facts: (-facts.last,),
    "filo": lambda facts: (-facts.born,),
    "priority": lambda facts: (facts.priority, facts.last),
    "slru": lambda facts: (facts.hits >= 2, facts.last),
}


class Model:
    """Every cached prefix by itself. A look-up marks all nodes on its way, an eviction looks at all of them."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.key = EVICTION_KEYS[policy]
        self.time = 0
        self.nodes: dict[Place, Facts] = {}
        self.pages: dict[Place, list[int]] = {}
        """The slots of the page in which a prefix ends."""

    def now(self) -> int:
        self.time += 1
        return self.time

    def matched(self, place: Place, limit: int | None = None) -> int:
        """Length of the longest cached prefix."""
        space, ids = place
        longest = len(ids) if limit is None else min(limit, len(ids))
        return max(n for n in range(0, longest + 1, self.page_size) if n == 0 or (space, ids[:n]) in self.pages)

    def path(self, place: Place) -> list[Place]:
        """Nodes on the way, the first one below the root ahead."""
        space, ids = place
        return [(space, ids[:n]) for n in range(1, len(ids) + 1) if (space, ids[:n]) in self.nodes]

    def node_over(self, place: Place) -> Place:
        """The node that spans the last token of a cached prefix."""
        space, ids = place
        return min(
            (node for node in self.nodes if node[0] == space and node[1][: len(ids)] == ids),
            key=lambda node: len(node[1]),
        )

    def pages_of(self, node: Place) -> list[Place]:
        """The pages of a node, in order."""
        space, ids = node
        start = max([len(above[1]) for above in self.path(node)[:-1]], default=0)
        return [(space, ids[:n]) for n in range(start + self.page_size, len(ids) + 1, self.page_size)]

    def slots(self, node: Place) -> list[int]:
        """The slots of a node, in order."""
        return [slot for page in self.pages_of(node) for slot in self.pages[page]]

    def split(self, place: Place) -> None:
        lower = self.nodes[self.node_over(place)]
        self.nodes[place] = replace(lower, last=self.now())
        lower.last = self.now()

    def touch(self, place: Place) -> None:
        if place[1]:
            if place not in self.nodes:
                self.split(place)
            for node in self.path(place):
                self.nodes[node].last = self.now()

    def insert(self, place: Place, slots: array[int], priority: int, inserted_len: int) -> int:
        space, ids = place
        ids = ids[: len(ids) // self.page_size * self.page_size]
        existing = self.matched((space, ids))
        known = (space, ids[:existing])
        if existing and known not in self.nodes:
            for node in [*self.path(known), self.node_over(known)]:
                self.nodes[node].last = self.now()
            self.split(known)
        else:
            for node in self.path(known):
                self.nodes[node].last = self.now()
        if existing < len(ids):
            self.nodes[space, ids] = Facts(self.now(), self.now(), 0, priority, 0)
        for n in range(existing, len(ids), self.page_size):
            end = n + self.page_size
            self.pages[space, ids[:end]] = slots[n:end].tolist()
        for node in self.path((space, ids)):
            facts = self.nodes[node]
            facts.priority = max(facts.priority, priority)
            facts.hits += len(node[1]) > inserted_len
        return existing

    def evict(self, wanted: int) -> list[list[int]]:
        """Slots of the evicted nodes, in order."""
        evicted = []
        while wanted > 0:
            leaves = [
                node
                for node, facts in self.nodes.items()
                if not facts.locks
                and not any(n != node and n[0] == node[0] and n[1][: len(node[1])] == node[1] for n in self.nodes)
            ]
            if not leaves:
                break
            first = min(leaves, key=lambda node: self.key(self.nodes[node]))
            evicted.append(self.slots(first))
            wanted -= len(evicted[-1])
            for page in self.pages_of(first):
                del self.pages[page]
            del self.nodes[first]
        return evicted

    def tokens(self, *, locked: bool) -> int:
        """Cached tokens that are locked, or are not."""
        return sum(len(self.slots(node)) for node, facts in self.nodes.items() if bool(facts.locks) == locked)


# ---- the comparison ------------------------------------------------------------------------------------------


def nodes_of(cache: RadixCache) -> dict[Place, tuple[int, int, int, list[int]]]:
    """All nodes by the model's names, with what doesn't depend on a clock."""
    nodes = {}
    for node in cache.nodes():
        path = cache.path(node)
        space = path[0].edge[: len(path[0].edge) - cache.page_size * tokens.TOKEN_BYTES]
        ids = tuple(tokens.decode(b"".join(above.key for above in path)))
        nodes[space, ids] = node.hit_count, node.priority, node.lock_ref, node.slots.tolist()
    return nodes


def times_of(cache: RadixCache) -> tuple[int, int, list[tuple[int, int, int, int]]]:
    """All that depends on a clock, and the numbers of nodes."""
    nodes = sorted((node.id, node.end, node.last_access, node.creation) for node in cache.nodes())
    return cache.clock, cache.root.last_access, nodes


class CacheMachine(RuleBasedStateMachine):
    """Any life of a cache, in step with the model's."""

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 4]),
        policy=st.sampled_from(list(EVICTION_POLICIES)),
        limit=st.sampled_from([1, 3, 100]),
        places=st.lists(
            st.tuples(
                st.sampled_from([b"", namespace("a", None), namespace(None, "a")]),
                st.lists(st.sampled_from([1, 2]), max_size=12).map(tuple),
            ),
            min_size=4,
            max_size=12,
        ),
    )
    def start(self, page_size: int, policy: str, limit: int, places: list[Place]) -> None:
        self.limits = patch.multiple(radix, _LONG_WALK=limit, _MAX_SOUGHT=limit)
        self.limits.start()
        self.cache = RadixCache(page_size, policy)
        self.model = Model(page_size, policy)
        self.sequences = [(place, tokens.encode(place[1])) for place in places]
        """What is looked for, each by one packed object, as a waiting request has it."""
        self.held: list[tuple[Place, Node, Match, array[int]]] = []
        self.kept: list[tuple[Place, bytes, Match]] = []
        self.used_slots = 0

    def teardown(self) -> None:
        self.limits.stop()

    def sequence(self, number: int) -> tuple[Place, bytes]:
        return self.sequences[number % len(self.sequences)]

    @rule(
        number=NUMBER,
        cut=st.integers(0, 8),
        priority=st.integers(0, 3),
        inserted_len=st.sampled_from([0, 0, 2, 6]),
    )
    def insert(self, number: int, cut: int, priority: int, inserted_len: int) -> None:
        (space, ids), _ = self.sequence(number)
        ids = ids[: max(len(ids) - cut, 0)]
        slots = array("i", range(self.used_slots, self.used_slots + len(ids)))
        self.used_slots += len(ids)
        expected = self.model.insert((space, ids), slots, priority, inserted_len)
        packed = tokens.encode(ids)
        inserted = self.cache.insert(packed, space, slots, priority=priority, inserted_len=inserted_len)
        assert inserted.existing == expected
        assert inserted.node.end == len(ids) // self.cache.page_size * self.cache.page_size

    @rule(number=NUMBER)
    def look_for(self, number: int) -> None:
        place, packed = self.sequence(number)
        self.kept.append((place, packed, self.cache.match(packed, place[0])))

    @rule(numbers=st.lists(NUMBER, max_size=8))
    def touch_many(self, numbers: list[int]) -> None:
        wanted = [self.sequence(number) for number in numbers]
        matches = [self.cache.match(packed, place[0]) for place, packed in wanted]
        copy, twins = self.cache.fork()
        for match in matches:
            copy.touch(Match(match.length, twins[match.node.id]))
        self.cache.touch_many(matches)
        assert times_of(self.cache) == times_of(copy)
        for ((space, ids), _), match in zip(wanted, matches, strict=True):
            self.model.touch((space, ids[: match.length]))

    @rule(number=NUMBER, limit=st.none() | st.integers(0, 12))
    def touch(self, number: int, limit: int | None) -> None:
        (space, ids), packed = self.sequence(number)
        match = self.cache.match(packed, space, limit)
        assert match.length == self.model.matched((space, ids), limit)
        node = self.cache.touch(match)
        self.model.touch((space, ids[: match.length]))
        assert node is self.cache.resolve(match)
        assert node.end == match.length

    @rule(number=NUMBER)
    def lock(self, number: int) -> None:
        (space, ids), packed = self.sequence(number)
        match = self.cache.match(packed, space)
        place = space, ids[: match.length]
        page = self.cache.page_size
        over = [self.model.node_over((space, ids[:n])) for n in range(page, match.length + 1, page)]
        unlocked = [node for node in over if not self.model.nodes[node].locks]
        assert self.cache.pin_cost(match) == page * len(unlocked)
        node = self.cache.touch(match)
        self.model.touch(place)
        self.cache.lock(node)
        for above in self.model.path(place):
            self.model.nodes[above].locks += 1
        self.held.append((place, node, match, self.cache.slots_of(match)))

    @precondition(lambda self: self.held)
    @rule(number=NUMBER)
    def unlock(self, number: int) -> None:
        place, node, _, _ = self.held.pop(number % len(self.held))
        self.cache.unlock(node)
        for above in self.model.path(place):
            self.model.nodes[above].locks -= 1

    @rule(wanted=st.integers(1, 20))
    def evict(self, wanted: int) -> None:
        evicted = self.cache.evict(wanted)
        assert [leaf.node.slots.tolist() for leaf in evicted] == self.model.evict(wanted)
        assert all(leaf.tokens == len(leaf.node.slots) for leaf in evicted)

    @rule(wanted=st.integers(1, 40))
    def fork(self, wanted: int) -> None:
        copy, twins = self.cache.fork()
        assert nodes_of(copy) == nodes_of(self.cache)
        assert (copy.evictable, copy.protected) == (self.cache.evictable, self.cache.protected)
        assert not any(twins[node.id] is node for node in self.cache.nodes())
        expected = deepcopy(self.model).evict(wanted)
        assert [leaf.node.slots.tolist() for leaf in copy.evict(wanted)] == expected
        copy.insert(tokens.encode([3] * 8), b"", array("i", range(8)))

    @invariant()
    def equals_the_model(self) -> None:
        cache, model = self.cache, self.model
        assert nodes_of(cache) == {
            node: (facts.hits, facts.priority, facts.locks, model.slots(node)) for node, facts in model.nodes.items()
        }
        assert cache.evictable == model.tokens(locked=False)
        assert cache.protected == model.tokens(locked=True)

    @invariant()
    def kept_matches_lead_to_those_of_today(self) -> None:
        for place, packed, match in self.kept:
            today = self.cache.again(match, packed, place[0])
            assert today == self.cache.match(packed, place[0])
            assert today.length == self.model.matched(place)
            way = b"".join(node.key for node in self.cache.path(today.node))
            assert way[: today.length * tokens.TOKEN_BYTES] == packed[: today.length * tokens.TOKEN_BYTES]
            if match.node.whole is match:
                assert today is match

    @invariant()
    def held_matches_stay_right(self) -> None:
        for _, node, match, slots in self.held:
            assert self.cache.resolve(match) is node
            assert self.cache.slots_of(match) == slots


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_a_cache_equals_the_model = CacheMachine.TestCase


# ---- single facts --------------------------------------------------------------------------------------------


def cache_of(*sequences: list[int], policy: str = "lru") -> RadixCache:
    """A cache with these sequences, whose slots are their tokens."""
    cache = RadixCache(eviction_policy=policy)
    for ids in sequences:
        cache.insert(tokens.encode(ids), b"", array("i", ids))
    return cache


@pytest.mark.parametrize("seed", range(5))
def test_what_was_touched_last_is_evicted_last(seed: int) -> None:
    sequences = [[1, 2, n, n + 100] for n in range(10, 30)]
    cache = cache_of(*sequences)
    random.Random(seed).shuffle(sequences)
    for ids in sequences:
        cache.touch(cache.match(tokens.encode(ids)))
    gone = [cache.evict(1)[0].node.slots.tolist()[-1] - 100 for _ in sequences]
    assert gone == [ids[2] for ids in sequences]


def test_a_parent_is_as_recent_as_its_last_child() -> None:
    cache = cache_of([1, 2], [1, 2, 3], [7, 8])
    cache.touch(cache.match(tokens.encode([1, 2, 3])))
    gone = [leaf.node.slots.tolist() for leaf in cache.evict(100)]
    assert gone == [[7, 8], [3], [1, 2]]


def test_reading_changes_nothing() -> None:
    cache = cache_of([1, 2, 3, 4])
    before = nodes_of(cache), cache.clock, [node.last_access for node in cache.nodes()]
    packed = tokens.encode([1, 2, 9])
    match = cache.match(packed)
    assert cache.again(match, packed, b"") == match
    cache.pin_cost(match)
    cache.slots_of(match)
    assert (nodes_of(cache), cache.clock, [node.last_access for node in cache.nodes()]) == before


def test_a_match_is_not_made_again_while_it_stands() -> None:
    cache = cache_of([1, 2, 3], [7])
    packed = tokens.encode([1, 2, 3, 4, 5])
    first = cache.match(packed)
    cache.touch(first)
    cache.insert(tokens.encode([8, 9]), b"", array("i", range(2)))
    assert cache.again(first, packed, b"") is first
    cache.insert(tokens.encode([1, 2, 3, 4]), b"", array("i", range(4)))
    assert cache.again(first, packed, b"").length == 4
    cache.evict(100)
    assert cache.again(first, packed, b"") == Match(0, cache.root)


def test_locks_that_come_and_go_leave_nothing_behind() -> None:
    cache = cache_of([1], [2])
    node = cache.match(tokens.encode([1])).node
    for _ in range(1_000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._heap) < 100
    assert [leaf.node.slots.tolist() for leaf in cache.evict(2)] == [[1], [2]]
