"""Duplicates found by dictionary are those that SGLang's scratch tree finds."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.dedup import Duplicate, find_duplicates
from schedscope.engine.view import Waiting
from waiting import waiting


def shared(left: Waiting, right: Waiting) -> int:
    """Leading tokens that two requests share, counted one by one."""
    if left.space != right.space:
        return 0
    count = 0
    for a, b in zip(tokens.decode(left.tokens), tokens.decode(right.tokens), strict=False):
        if a != b:
            break
        count += 1
    return count


def scratch_tree(queue: list[Waiting], check: int, threshold: int) -> list[Duplicate | None]:
    """What SGLang does: look a request up among those inserted before; insert it if it shares too little."""
    inserted: list[Waiting] = []
    found: list[Duplicate | None] = []
    for request in queue:
        duplicate = None
        if request.prefix_len <= check:
            matched = max([shared(request, other) for other in inserted], default=0)
            if matched < threshold:
                inserted.append(request)
            else:
                partners = [other.rid for other in inserted if shared(request, other) == matched]
                duplicate = Duplicate(partners[0] if threshold > 0 else None, matched)
        found.append(duplicate)
    return found


requests = st.tuples(
    st.lists(st.sampled_from([1, 1, 1, 2]), max_size=12),
    st.integers(0, 4),
    st.sampled_from([b"", b"", b"x"]),
)


@settings(max_examples=400, deadline=None)
@given(queue=st.lists(requests, max_size=16), check=st.integers(-1, 4), threshold=st.integers(-1, 6))
@example(queue=[([1] * 5, 0, b"")] * 3, check=0, threshold=2)
def test_duplicates_are_those_of_a_scratch_tree(
    queue: list[tuple[list[int], int, bytes]], check: int, threshold: int
) -> None:
    config = SchedulerConfig(
        schedule_policy="lpm",
        in_batch_prefix_caching_check_threshold=check,
        in_batch_prefix_caching_deprioritize_threshold=threshold,
    )
    line = [waiting(i, *request) for i, request in enumerate(queue)]
    assert find_duplicates(line, config) == scratch_tree(line, check, threshold)


@settings(max_examples=100, deadline=None)
@given(ends=st.lists(st.integers(0, 300), max_size=12))
def test_the_shared_length_is_counted_to_the_token(ends: list[int]) -> None:
    """Long prefixes, some of which repeat."""
    leader = waiting(0, list(range(300)))
    others = [waiting(i + 1, [*range(end), 999]) for i, end in enumerate(ends)]
    found = find_duplicates([leader, *others], SchedulerConfig(schedule_policy="lpm"))
    for other, duplicate in zip(others, found[1:], strict=True):
        if duplicate is not None and duplicate.partner == leader.rid:
            assert duplicate.shared_len == shared(leader, other)


def test_a_forced_miss_finds_no_duplicates() -> None:
    config = SchedulerConfig(schedule_policy="lpm", radix_force_miss=True)
    assert find_duplicates([waiting(i, [1] * 50) for i in range(3)], config) == [None] * 3


def test_the_first_of_the_queue_leads() -> None:
    queue = [waiting(i, [1] * 40 + [i]) for i in range(3)]
    found = find_duplicates(queue, SchedulerConfig(schedule_policy="lpm"))
    assert found == [None, Duplicate("r0", 40), Duplicate("r0", 40)]
