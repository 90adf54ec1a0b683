"""dfs-weight by sort keys gives the order of a depth-first walk through the tree, as SGLang does it."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.ordering import DfsWeightKey, order
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.view import Waiting
from waiting import waiting

SEQUENCES = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=8)
CONFIG = SchedulerConfig(schedule_policy="dfs-weight")


def walk(queue: list[Waiting], cache: RadixCache) -> list[str]:
    """The queue by a walk through the tree that the look-ups leave behind: heavy children, then own requests."""
    for request in queue:
        cache.touch(cache.match(request.tokens))
    ends = [cache.match(request.tokens).node for request in queue]
    weights = Counter(node.id for end in ends for node in cache.path(end))

    def visit(node: Node) -> list[str]:
        children = sorted(node.children.values(), key=lambda child: -weights[child.id])
        below = [rid for child in children for rid in visit(child)]
        return below + [request.rid for request, end in zip(queue, ends, strict=True) if end is node]

    return visit(cache.root)


@settings(max_examples=300, deadline=None)
@given(
    cached=st.lists(st.tuples(SEQUENCES, st.integers(0, 3)), max_size=10),
    queue=st.lists(SEQUENCES, max_size=14),
    touched=st.booleans(),
)
def test_keys_sort_like_a_walk(cached: list[tuple[list[int], int]], queue: list[list[int]], touched: bool) -> None:
    cache = RadixCache()
    for ids, evicted in cached:
        cache.insert(tokens.encode(ids), b"", array("i", range(len(ids))))
        cache.evict(evicted)
    line = [waiting(i, ids) for i, ids in enumerate(queue)]
    if touched:
        for match in order(line, cache, CONFIG).touches:
            cache.touch(match)
    ordering = order(line, cache, CONFIG)
    assert [place.request.rid for place in ordering.ranked] == walk(line, cache.fork()[0])


def test_a_long_path_without_forks_is_one_level() -> None:
    cache = RadixCache()
    for end in range(1, 30):
        cache.insert(tokens.encode(range(end)), b"", array("i", range(end)))
    line = [waiting(0, list(range(40))), waiting(1, list(range(10))), waiting(2, [50])]
    levels = {}
    for place in order(line, cache, CONFIG).ranked:
        assert isinstance(place.key, DfsWeightKey)
        levels[place.request.rid] = len(place.key.branches)
    assert levels == {"r0": 3, "r1": 2, "r2": 1}
