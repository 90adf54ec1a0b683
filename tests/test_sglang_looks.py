"""Of a queue of SGLang's only what may have changed is looked at."""

from __future__ import annotations

import random

import pytest
from schedscope.recorder.sglang_looks import Looking, Looks, read


class Req:
    """A request, which counts how often somebody looks."""

    looks = 0

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.found = 0

    @property
    def prefix_len(self) -> int:
        Req.looks += 1
        return self.found

    @property
    def num_matched_prefix_tokens(self) -> int:
        return self.found


def looked(looking: Looking, queue: list[Req], active: str = "fcfs") -> tuple[Looks, int]:
    before = Req.looks
    looks = looking.look(queue, active)
    return looks, Req.looks - before


def test_who_stands_as_before_is_not_looked_at_again() -> None:
    looking, queue = Looking(), [Req(f"r{i}") for i in range(10)]
    looks, count = looked(looking, queue)
    assert (looks, count) == (read(queue), 10)
    looking.keep(queue, looks, queue[2], stayed=True)
    for req in queue[:3]:
        req.found = 7  # admission matched it
    queue = [*queue[1:], Req("new")]
    looks, count = looked(looking, queue)
    assert (looks, count) == (read(queue), 3)


@pytest.mark.parametrize("active", ["lpm", "dfs-weight", "hrrn", "unknown"])
def test_who_is_matched_is_looked_at(active: str) -> None:
    looking, queue = Looking(), [Req(f"r{i}") for i in range(10)]
    looking.keep(queue, looked(looking, queue, active)[0], None, stayed=True)
    assert looked(looking, queue, active)[1] == 10


def test_nothing_is_kept_where_others_may_change_it_or_the_queue_was_sorted() -> None:
    for looking, stayed in ((Looking(always=True), True), (Looking(), False)):
        queue = [Req(f"r{i}") for i in range(10)]
        looking.keep(queue, looked(looking, queue)[0], None, stayed)
        assert looked(looking, queue)[1] == 10


def test_it_is_as_if_all_were_looked_at() -> None:
    chance = random.Random(1)
    looking, queue, spared = Looking(), [], 0
    for number in range(500):
        queue += [Req(f"r{number}-{i}") for i in range(chance.randint(0, 3))]
        active = chance.choice(["fcfs", "fcfs", "fcfs", "lpm", "priority"])
        if active == "lpm":
            for req in queue:
                req.found = chance.randint(0, 99)
        order = queue.copy()
        if chance.random() < 0.2:
            chance.shuffle(queue)
        looks, count = looked(looking, order, active)
        assert looks == read(order)
        spared += len(order) - count
        tried = queue[: chance.randint(0, 4)]
        for req in tried:
            req.found = chance.randint(0, 99)
        looking.keep(order, looks, tried[-1] if tried else None, stayed=order == queue)
        gone = chance.sample(queue, min(len(queue), chance.randint(0, 3) if chance.random() < 0.2 else 0))
        back = [req for req in tried[:2] if chance.random() < 0.2]
        queue = [req for req in queue if req not in tried[:2] and req not in gone] + back
    assert spared > 500
