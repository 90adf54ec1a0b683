"""What passes keep for the next ones changes no decision: each decides as over a copy that nobody looked at."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.dedup import Herds
from schedscope.engine.looks import Looks
from schedscope.engine.ordering import POLICIES, Ordering, order
from schedscope.engine.radix import RadixCache, namespace
from schedscope.engine.view import Waiting
from waiting import waiting

IDS = st.lists(st.sampled_from([1, 1, 2]), max_size=12)
SPACES = st.sampled_from([b"", b"", namespace("a", None)])
NUMBER = st.integers(0, 1000)


def decided(ordering: Ordering) -> tuple[object, ...]:
    """An ordering in words that are the same in a copy of the cache."""
    touches = [(match.length, match.node.id) for match in ordering.touches]
    return (*ordering._replace(touches=()), tuple(ordering.ranked), ordering.ranked.requests, touches)


class PassMachine(RuleBasedStateMachine):
    """Any life of a queue and its cache."""

    @initialize(page_size=st.sampled_from([1, 1, 2]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.queue: list[Waiting] = []
        self.arrived = 0

    @rule(sequences=st.lists(IDS, min_size=1, max_size=4), space=SPACES, prefix_len=st.sampled_from([0, 0, 3]))
    def arrive(self, sequences: list[list[int]], space: bytes, prefix_len: int) -> None:
        for ids in sequences:
            request = waiting(self.arrived, ids, prefix_len, space)
            self.queue.append(request._replace(arrival_processed_tokens=7 * self.arrived, entry_time=-self.arrived))
            self.arrived += 1

    @precondition(lambda self: self.queue)
    @rule(number=NUMBER, back=st.booleans())
    def leave(self, number: int, back: bool) -> None:
        request = self.queue.pop(number % len(self.queue))
        if back:
            self.queue.append(request)

    @rule(ids=IDS, space=SPACES)
    def insert(self, ids: list[int], space: bytes) -> None:
        self.cache.insert(tokens.encode(ids), space, array("i", range(len(ids))))

    @rule(wanted=st.integers(1, 12))
    def evict(self, wanted: int) -> None:
        self.cache.evict(wanted)

    @rule(
        policy=st.sampled_from(list(POLICIES)),
        check=st.sampled_from([0, 0, 0, 3]),
        threshold=st.sampled_from([2, 2, 2, 0, 4]),
        force_miss=st.sampled_from([False, False, False, True]),
        processed_tokens=st.sampled_from([0, 50, 50]),
        touches=st.booleans(),
        sorts=st.booleans(),
        again=st.booleans(),
    )
    def sort(
        self,
        policy: str,
        check: int,
        threshold: int,
        force_miss: bool,
        processed_tokens: int,
        touches: bool,
        sorts: bool,
        again: bool,
    ) -> None:
        if policy == "random":
            return
        config = SchedulerConfig(
            schedule_policy=policy,
            in_batch_prefix_caching_check_threshold=check,
            in_batch_prefix_caching_deprioritize_threshold=threshold,
            radix_force_miss=force_miss,
        )
        copy, _ = self.cache.fork()
        ordering = order(self.queue, self.cache, config, processed_tokens=processed_tokens)
        assert decided(ordering) == decided(order(self.queue, copy, config, processed_tokens=processed_tokens))
        if again:
            assert decided(order(self.queue, self.cache, config, processed_tokens=processed_tokens)) == decided(
                ordering
            )
        if touches:
            self.cache.touch_many(ordering.touches)
        if sorts:
            self.queue = list(ordering.ranked.requests)


PassMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_a_pass_decides_as_if_it_were_the_first = PassMachine.TestCase


def test_an_unchanged_queue_over_an_unchanged_tree_is_not_sorted_again() -> None:
    cache = RadixCache()
    config = SchedulerConfig(schedule_policy="hrrn")
    queue = [waiting(i, [1, 2, i]) for i in range(5)]
    first = order(queue, cache, config, processed_tokens=10)
    assert order(tuple(queue), cache, config, processed_tokens=10) is first
    cache.insert(tokens.encode([7]), b"", array("i", range(1)))
    assert order(queue, cache, config, processed_tokens=10) is first
    cache.insert(tokens.encode([1, 2]), b"", array("i", range(2)))
    second = order(queue, cache, config, processed_tokens=10)
    assert second is not first
    third = order(queue, cache, config, processed_tokens=11)
    assert third is not second
    assert order(queue[1:], cache, config, processed_tokens=11) is not third


def test_a_ranking_is_of_the_queue_as_it_was() -> None:
    queue = [waiting(i, [i]) for i in range(3)]
    ranked = order(queue, RadixCache(), SchedulerConfig(schedule_policy="lpm")).ranked
    queue.clear()
    assert [place.request.rid for place in ranked] == ["r0", "r1", "r2"]
    assert [place.position for place in ranked[1:]] == [1, 2]


def test_requests_that_left_are_forgotten() -> None:
    cache = RadixCache()
    config = SchedulerConfig(schedule_policy="lpm")
    for turn in range(200):
        order([waiting(turn * 10 + i, [1] * 40 + [turn, i]) for i in range(10)], cache, config)
    looks, herds = cache.memo(Looks), cache.memo(Herds)
    assert max(map(len, (looks._matches, looks._kept, herds._members, herds._herds))) < 100
