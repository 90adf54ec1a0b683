"""What is packed on the scheduler's thread comes out as the rows that the decision itself tells."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan
from schedscope.engine.errors import RunFormatError
from schedscope.engine.ordering import POLICIES
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tracer import Tracer
from schedscope.engine.view import View
from schedscope.recorder.decisions import Decisions, append
from schedscope.recorder.rows import key_fields, key_text, pack_decision
from schedscope.recorder.schema import TABLES, to_arrow
from simulation import Workload, drive


class Plans(Tracer):
    """Keeps the plans of all passes."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Plan]] = []

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        del view, random_state
        self.made.append((number, plan))


def plans(seed: int, policy: str, requests: int = 30) -> list[tuple[int, Plan]]:
    chance = random.Random(seed)
    config = SchedulerConfig(
        schedule_policy=policy,
        page_size=chance.choice([1, 4]),
        max_total_tokens=chance.choice([300, 800]),
        chunked_prefill_size=chance.choice([None, 32]),
        max_running_requests=chance.choice([3, 20]),
        enable_priority_scheduling=policy in {"fcfs", "lof", "priority"} and chance.random() < 0.5,
        random_seed=seed,
    )
    kept = Plans()
    drive(Scheduler(config, kept), Workload(seed), requests)
    return kept.made


def told(number: int, plan: Plan) -> list[tuple[Any, ...]]:
    """The rows of a pass, read off the decision place by place."""
    assert plan.ordering is not None
    assert plan.admission is not None
    verdicts = {verdict.rid: verdict for verdict in plan.admission.verdicts}
    waiting = {place.request.rid for place in plan.ordering.ranked}
    chunks = [verdict.rid for verdict in plan.admission.verdicts if verdict.rid not in waiting]
    rows: list[tuple[Any, ...]] = [(number, rid, None, None, None, None, 0, 0, False, None, None) for rid in chunks]
    for after, (request, key, before, duplicate) in enumerate(plan.ordering.ranked):
        names = key_fields(key)
        partner, shared = duplicate or (None, None)
        text = key_text(key[: len(names)])
        row = (number, request.rid, before, after, text, ",".join(names), request.prefix_len, request.matched)
        rows.append((*row, duplicate is not None, partner, shared))
    for i, row in enumerate(rows):
        v = verdicts.get(row[1])
        if v is None:
            rows[i] = (*row, None, None, False, None, None, False, *[None] * 6, [])
            continue
        said = (v.result.value, v.reason.value, v.extend_len is not None, v.prefix_len, v.extend_len, v.chunked)
        rows[i] = (*row, *said, v.need, v.have, *v.remaining, list(v.preempted))
    return rows


def packed(made: list[tuple[int, Plan]]) -> Decisions:
    decisions = Decisions()
    for number, plan in made:
        decisions.add(number, *pack_decision(plan))
    return decisions


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(list(POLICIES)))
def test_rows_are_what_the_decision_tells(seed: int, policy: str) -> None:
    made = plans(seed, policy)
    expected = [row for number, plan in made for row in told(number, plan)]
    decisions = packed(made)
    assert list(decisions) == expected
    assert len(decisions) == len(expected)
    table = to_arrow(TABLES["decisions"], 3, decisions)
    assert table.equals(to_arrow(TABLES["decisions"], 3, expected))


def test_they_grow_and_are_cut_like_a_list() -> None:
    made = plans(1, "lpm")
    first, rest = packed(made[:20]), packed(made[20:])
    whole: dict[str, Any] = {}
    append(whole, {"decisions": first})
    append(whole, {"decisions": rest})
    assert list(whole["decisions"]) == [*first, *rest]
    assert len(first) == sum(len(told(*each)) for each in made[:20]), "the pieces stay as they are"
    assert list(whole["decisions"].behind(len(first))) == list(rest)
    assert len(whole["decisions"].behind(len(first))) == len(rest)
    assert list(whole["decisions"].behind(len(whole["decisions"]))) == []
    number, plan = made[7]
    assert list(whole["decisions"].of_pass(number)) == told(number, plan)
    assert whole["decisions"].pass_range() == (made[0][0], made[-1][0])
    whole["decisions"].extend(told(*made[0]))
    assert list(whole["decisions"].of_pass(made[0][0])) == told(*made[0]) * 2
    assert Decisions().pass_range() is None


def test_what_was_not_packed_so_is_named() -> None:
    decisions = Decisions()
    decisions.add(7, 1, b"\x90")
    with pytest.raises(RunFormatError, match="the decisions of pass 7 can't be read"):
        list(decisions)
