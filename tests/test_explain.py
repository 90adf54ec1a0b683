"""What explanations claim is so: read off decisions made again, and every flip decided once more."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crafted import Arrival, ask, play, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.cli.main import main
from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.delayer import Report
from schedscope.engine.errors import ConfigError, DivergenceError, ScenarioError
from schedscope.engine.ordering import POLICIES, resolve_policy
from schedscope.engine.radix import RadixCache
from schedscope.engine.tokens import encode
from schedscope.engine.view import Chunked, Running, View, Waiting
from schedscope.recorder.hello import Detail
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.run import Run
from schedscope.replay.explain_pass import explain_pass
from schedscope.replay.explain_request import explain_request
from schedscope.replay.explain_words import (
    flip_words,
    look_lines,
    mark_words,
    pass_rows,
    pass_sentence,
    request_sentence,
)
from schedscope.replay.explanation import PassExplanation
from schedscope.replay.flip import Flip, Situation, find_flip, find_flips, holds, situation_of, under_policies
from schedscope.replay.ledger import request_ledger
from schedscope.replay.replayer import Replayer
from schedscope.replay.scenario import Placed, read_scenarios
from schedscope.replay.scenario_build import StateBuilder, scenario_config
from shadowing import rewrite
from simulation import TIGHT, any_config, record

CONFORMANCE = Path(__file__).parent / "conformance"


# ---- flips are decided again, here by hand -------------------------------------------------------------------


def redecided(situation: Situation, flip: Flip, amount: int) -> Plan | None:
    """The pass with a lever pulled so far, without the module that found it; None for levers inside a policy."""
    view, config = situation.view, situation.config
    match flip.lever:
        case "memory":
            view = replace(view, available=view.available + amount)
        case "slots":
            config = config.replace(max_running_requests=config.max_running_requests + amount)
            view = replace(view, free_rows=view.free_rows + amount)
        case "chunk" | "input" | "requests":
            assert flip.setting is not None
            config = config.replace(**{flip.setting: getattr(config, flip.setting) + amount})
        case "duplicates":
            config = config.replace(in_batch_prefix_caching_check_threshold=-1)
        case "delayer":
            config = config.replace(enable_prefill_delayer=False)
        case "mark":
            view = replace(view, batch_is_full=False)
        case "output":
            queue = [
                r._replace(max_new_tokens=r.max_new_tokens - amount) if r.rid == flip.rid else r for r in view.queue
            ]
            view = replace(view, queue=tuple(queue))
        case _:
            return None
    return decide(view, config, situation.random_state)


def is_admitted(plan: Plan, rid: str) -> bool:
    return plan.admission is not None and any(verdict.rid == rid for verdict in plan.admission.admitted)


def place_in(plan: Plan, rid: str) -> int:
    assert plan.ordering is not None
    return [r.rid for r in plan.ordering.ranked.requests].index(rid)


def check_flips(situation: Situation, rids: list[str]) -> set[str]:
    """Everything found for these requests stands, and nothing less does. Returns the levers that flipped."""
    seen = set()
    recorded = situation.decide()
    for rid in rids:
        for flip in find_flips(situation, rid):
            seen.add(flip.lever)
            assert holds(situation, flip)
            assert not is_admitted(recorded, rid)
            amount = flip.amount or 1
            then = redecided(situation, flip, amount)
            if then is not None:
                assert is_admitted(then, rid)
                assert place_in(then, rid) == flip.fate.place
                less = recorded if amount == flip.unit else redecided(situation, flip, amount - flip.unit)
                assert less is not None
                assert not is_admitted(less, rid)
            assert flip_words(flip)
            # Claims that are not true don't stand.
            assert not holds(situation, flip._replace(fate=flip.fate._replace(place=10**6)))
            assert flip.unit == (situation.config.page_size if flip.lever in {"memory", "matched"} else 1)
            if flip.amount is not None:
                assert flip.amount % flip.unit == 0, "there is no such thing as a part of a page"
                assert not holds(situation, flip._replace(amount=flip.amount + flip.unit))
                if flip.amount > flip.unit:
                    assert not holds(situation, flip._replace(amount=flip.amount - flip.unit))
        if recorded.ordering is not None and (place := place_in(recorded, rid)) > 0:
            for lever in ("matched", "duplicates"):
                moved = find_flip(situation, rid, lever, place - 1)
                assert moved is None or (moved.fate.place is not None and moved.fate.place < place)
        for other in under_policies(situation, rid):
            config = situation.config.replace(schedule_policy=other.policy)
            again = decide(situation.view, config, situation.random_state)
            assert is_admitted(again, rid) == other.fate.admitted
    return seen


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), data=st.data())
def test_flips_of_random_passes_hold(tmp_path: Path, seed: int, data: st.DataObject) -> None:
    run = Run.open(record(tmp_path, any_config(seed), seed=seed, requests=25))
    count = run.passes(0).count
    numbers = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    for moment in Replayer(run, 0).visit(numbers):
        check_flips(situation_of(moment), [r.rid for r in moment.view.queue[:6]])


@cache
def conformance_passes() -> tuple[Placed, ...]:
    found = read_scenarios([*CONFORMANCE.glob("public.jsonl"), *CONFORMANCE.glob("wide_pass.jsonl.gz")])
    return tuple(placed for placed in found if placed.scenario.kind == "pass")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_flips_of_conformance_scenarios_hold(data: st.DataObject) -> None:
    scenario = data.draw(st.sampled_from(conformance_passes())).scenario
    try:
        config = scenario_config(scenario)
        state = StateBuilder(scenario, config).build()
    except (ConfigError, ScenarioError):
        return
    random_state = seeded(config.random_seed) if config.schedule_policy == "random" else None
    situation = Situation(state.view(), state.config, random_state, resolve_policy(state.config))
    if situation.decide().ordering is None:
        return
    rids = [r.rid for r in situation.view.queue]
    check_flips(situation, data.draw(st.lists(st.sampled_from(rids), max_size=4, unique=True)) if rids else [])


def waiting(rid: str, prompt: list[int], **facts: Any) -> Waiting:
    base = Waiting(rid, encode(prompt), len(prompt), 0, 8, False, 0, None, b"", 0.0, 0, False)
    return base._replace(**facts)


def situation(queue: list[Waiting], available: int = 1_000, **config: Any) -> Situation:
    made = SchedulerConfig(max_total_tokens=1_000, **{"max_running_requests": 8, **config})
    view = View(
        queue=tuple(queue), running=(), cache=RadixCache(), available=available, free_rows=made.max_running_requests
    )
    return Situation(view, made, None, resolve_policy(made))


def test_every_lever_that_is_short_is_found() -> None:
    def found(given: Situation, rid: str = "b") -> dict[str, int | None]:
        check_flips(given, [rid])
        return {flip.lever: flip.amount for flip in find_flips(given, rid)}

    two = [waiting("a", [1] * 40), waiting("b", [2] * 40)]
    assert found(situation(two, max_running_requests=1)) == {"slots": 1, "front": None}
    assert found(situation(two, prefill_max_requests=1)) == {"requests": 1, "front": None}
    assert found(situation(two, chunked_prefill_size=40)) == {"chunk": 1, "front": None}
    assert found(situation(two, max_prefill_tokens=80)) == {"input": 1, "front": None}
    assert found(situation(two, max_prefill_tokens=81)) == {}
    assert found(situation(two, available=98)) == {"memory": 1, "output": 1, "front": None}
    delayed = situation(two, enable_prefill_delayer=True, dp_size=2)
    delayed = delayed.with_view(reports=(Report(),))
    assert found(delayed) == {"delayer": None}
    full = situation(two, chunked_prefill_size=64)
    chunk = Chunked("c", 70, 40, 0, 70, 8, False, False)
    running = Running("x", 4, 1, 8, False, 0, None, 0.0, False, 5, None)
    assert found(full.with_view(chunked=chunk, running=(running,), batch_is_full=True), "a") == {"mark": None}


def test_memory_is_told_to_the_token() -> None:
    given = situation([waiting("r", list(range(50)))], available=40)
    flip = find_flip(given, "r", "memory")
    assert flip is not None
    assert flip.amount == 50 + 8 + 1 - 40 + 1, "need 59 must be less than what there is"
    assert flip_words(flip) == "20 more tokens of free memory (19 would not do) would have let it in"
    shorter = find_flip(given, "r", "output")
    assert shorter is None, "even without output it would not fit"


def test_the_place_that_more_matched_tokens_would_give() -> None:
    given = situation([waiting("a", [1] * 40), waiting("b", [2] * 40)], schedule_policy="lpm")
    flip = find_flip(given, "b", "matched", 0)
    assert flip is not None
    assert (flip.amount, flip.fate.place) == (1, 0)
    assert flip_words(flip) == "1 more matched token would have put it at place 0"
    assert find_flip(given, "a", "matched", 0) is None, "it is there already"


def test_a_duplicate_that_is_not_held_back() -> None:
    shared = list(range(40))
    queue = [waiting("first", [*shared, 1]), waiting("copy", [*shared, 2]), waiting("other", [9] * 5)]
    given = situation(queue, schedule_policy="lpm", prefill_max_requests=2)
    flip = find_flip(given, "copy", "duplicates")
    assert flip is not None
    assert (flip.setting, flip.value, flip.fate.place) == ("in_batch_prefix_caching_check_threshold", -1, 1)
    assert flip_words(flip) == (
        "not holding duplicates back would have let it in (--set in_batch_prefix_caching_check_threshold=-1)"
    )


def test_one_who_could_never_be_let_in_gets_no_flip() -> None:
    given = situation([waiting("big", list(range(900)), max_new_tokens=500)], available=1_000)
    assert {flip.lever for flip in find_flips(given, "big")} == {"memory", "output"}
    with pytest.raises(KeyError):
        find_flip(given, "nobody", "memory")


# ---- passes --------------------------------------------------------------------------------------------------


def explained(run: Run) -> Iterator[tuple[PassExplanation, list[dict[str, Any]]]]:
    count = run.passes(0).count
    for number in random.Random(count).sample(range(count), min(count, 12)):
        yield explain_pass(run, 0, number), run.pass_rows(0, number)["decisions"]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_pass_is_explained_as_it_was_recorded(tmp_path: Path, policy: str) -> None:
    config = SchedulerConfig(
        schedule_policy=policy,
        chunked_prefill_size=48,
        enable_priority_scheduling=policy in {"fcfs", "lof", "priority"},
        **TIGHT,
    )
    run = Run.open(record(tmp_path, config, seed=18, requests=40, outputs=(40, 160)))
    for found, rows in explained(run):
        queue = [row for row in rows if row["place_after"] is not None]
        assert [place.rid for place in found.places] == [row["rid"] for row in queue]
        for place, row in zip(found.places, queue, strict=True):
            assert (place.place, place.place_before, place.matched) == (
                row["place_after"],
                row["place_before"],
                row["matched"],
            )
            assert (place.duplicate is not None) == row["deprioritized"]
            assert (place.verdict is not None) == (row["result"] is not None)
            if place.verdict is not None:
                assert (str(place.verdict.reason), place.verdict.need) == (row["reason"], row["need"])
        for before, place in pairwise(found.places):
            against = place.against
            assert against is not None
            assert against.rid == before.rid
            assert (against.own, against.other) == (place.key[against.field], before.key[against.field])
            assert against.other < against.own
            earlier = list(place.key)[: list(place.key).index(against.field)]
            assert all(place.key[name] == before.key[name] for name in earlier)
        assert pass_sentence(found).startswith(f"Pass {found.number} ")
        assert sum("…" in row[0] for row in pass_rows(found)) <= len(found.places)
        pool = found.pool
        assert pool.free + pool.evictable + pool.locked + pool.held == pool.size
        assert pool.held >= 0


def test_who_inserted_a_match_is_who_computed_it(tmp_path: Path) -> None:
    config = SchedulerConfig(
        schedule_policy="lpm", chunked_prefill_size=48, max_total_tokens=900, max_running_requests=4
    )
    path = record(tmp_path, config, seed=4, requests=60, checkpoint_every=25)
    run = Run.open(path)
    inserts = [row for row in run.rows("events") if row["kind"] == "insert"]
    known = 0
    for number in range(0, run.passes(0).count, 4):
        for place in explain_pass(run, 0, number).places:
            origin = place.origin
            if origin is None or origin.rid is None:
                continue
            known += 1
            mine = [row["pass"] for row in inserts if row["rid"] == origin.rid and row["pass"] is not None]
            chunked = [row["pass"] for row in run.rows("decisions") if row["rid"] == origin.rid and row["chunked"]]
            assert origin.pass_number is None or origin.pass_number in {*mine, *chunked}
            assert origin.pass_number is None or origin.pass_number < number
            assert origin.rid != place.rid or origin.tokens > 0
    assert known > 10


def test_a_mark_tells_when_it_was_set_and_how_long_it_lasted(tmp_path: Path) -> None:
    config = SchedulerConfig(max_total_tokens=400, max_running_requests=3, chunked_prefill_size=64)
    run = Run.open(record(tmp_path, config, seed=3, requests=30, outputs=(10, 30)))
    steps = {row["pass"]: row for row in run.rows("steps") if row["pass"] is not None}
    told = 0
    for number in range(run.passes(0).count - 1):
        mark = explain_pass(run, 0, number).mark_after
        if mark is None or mark.set_in != number:
            continue
        told += 1
        between = [r for r in run.rows("steps") if steps[number]["step"] < r["step"] < steps[number + 1]["step"]]
        assert (mark.until_pass, mark.steps) == (number + 1, len(between))
    assert told > 3


def test_a_mark_that_goes_in_a_pass_still_tells_which_pass_set_it(tmp_path: Path) -> None:
    config = SchedulerConfig(enable_priority_scheduling=True, **TIGHT)
    run = Run.open(record(tmp_path, config, seed=18, requests=50, outputs=(10, 60)))
    steps = {row["pass"]: row for row in run.rows("steps") if row["pass"] is not None}
    under = [row["pass"] for row in run.rows("passes") if row["batch_is_full_before"]]
    gone = [number for number in under if steps[number]["batch_is_full_pass"] is None]
    assert gone
    for number in gone:
        mark = explain_pass(run, 0, number).mark_before
        assert mark is not None
        assert mark.set_in == steps[number - 1]["batch_is_full_pass"]
        assert mark_words(mark).startswith(f"batch_is_full was set in pass {mark.set_in}")


def test_a_pass_that_comes_out_otherwise_is_not_explained(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", max_total_tokens=600, max_running_requests=3)
    path = record(tmp_path, config, seed=3, requests=20)
    (segment,) = list_segments(path, 0)

    def swap(rows: dict[str, Any]) -> None:
        place = [c for c in range(len(rows["passes"][0])) if rows["passes"][0][c] == rows["passes"][0][-1]][-1]
        rows["passes"] = [(*row[:place], "0" * 32, *row[place + 1 :]) for row in rows["passes"]]

    rewrite(segment, swap)
    with pytest.raises(DivergenceError, match="pass 3 does not come out as recorded"):
        explain_pass(Run.open(path), 0, 3)
    assert main(["explain", "pass", "3", "--run", str(path)]) == 3
    request = explain_request(Run.open(path), "r9")
    assert request.looks == ()
    assert "does not come out as recorded" in str(request.unseen)
    assert request.ledger == request_ledger(Run.open(path), "r9")


# ---- requests ------------------------------------------------------------------------------------------------


def test_every_request_has_an_explanation_that_adds_up(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", chunked_prefill_size=48, page_size=4, **TIGHT)
    run = Run.open(record(tmp_path, config, seed=18, requests=40, outputs=(40, 160)))
    grew = checked = 0
    for row in run.rows("requests"):
        found = explain_request(run, row["rid"])
        assert found.unseen is None
        assert sum(part.ns for part in found.ledger.parts) == found.ledger.queued_ns
        assert request_sentence(found.ledger).startswith(f"{row['rid']} waited ")
        checked += found.checked
        passes = {r["pass"]: r for r in run.request_rows(row["rid"])["decisions"] if r["place_before"] is not None}
        assert len(found.looks) <= 4
        for look in found.looks:
            assert look.place.place == passes[look.number]["place_after"]
            assert all(isinstance(line, str) and line for line in look_lines(look))
            assert not math.isnan(look.pool.reserve)
        for change in found.changes:
            assert (change.before, change.after) == (
                passes[change.before_pass]["prefix_len"],
                passes[change.pass_number]["prefix_len"],
            )
            grew += change.origin is not None and change.origin.pass_number == change.pass_number - 1
    assert grew > 3, "growth comes from what was computed in the pass before"
    assert checked > 100


def test_what_shrank_a_match_was_evicted_then(tmp_path: Path) -> None:
    config = SchedulerConfig(
        schedule_policy="priority",
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
        radix_eviction_policy="mru",
        max_total_tokens=300,
        max_running_requests=3,
        chunked_prefill_size=64,
    )
    run = Run.open(record(tmp_path, config, seed=1, requests=40, outputs=(5, 30)))
    evicts = {(row["step"], row["node"]) for row in run.rows("events") if row["kind"] == "evict"}
    losses = 0
    for row in run.rows("requests"):
        for change in explain_request(run, row["rid"]).changes:
            if change.after < change.before:
                losses += 1
                assert change.evicted
                assert {(each.step, each.node) for each in change.evicted} <= evicts
                assert all(each.for_rids for each in change.evicted)
    assert losses > 0


def test_without_tokens_the_ledger_is_all_there_is(tmp_path: Path) -> None:
    config = SchedulerConfig(max_total_tokens=600, max_running_requests=3)
    run = Run.open(record(tmp_path, config, seed=3, requests=20, detail=Detail(level="decisions", tokens="none")))
    found = explain_request(run, "r7")
    assert found.looks == ()
    assert found.unseen is not None
    assert "--tokens none" in found.unseen
    assert sum(part.ns for part in found.ledger.parts) == found.ledger.queued_ns > 0


# ---- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    config = SchedulerConfig(
        schedule_policy="lpm", max_total_tokens=600, max_running_requests=3, chunked_prefill_size=64
    )
    return record(tmp_path, config, seed=3, requests=40)


def test_the_command_says_a_sentence_first(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r9", "--run", str(busy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("r9 waited ")
    assert any("ns in all, each charged once." in line for line in lines)
    assert any("checked by deciding again" in line for line in lines)
    assert main(["explain", "pass", "12", "--run", str(busy)]) == 0
    assert capsys.readouterr().out.startswith("Pass 12 ")
    assert main(["explain", "run", "--run", str(busy)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("40 requests waited ")
    assert "schedscope explain r" in out


def test_as_json_it_is_one_document(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*words: str) -> dict[str, Any]:
        assert main(["explain", *words, "--run", str(busy), "--json"]) == 0
        body: dict[str, Any] = json.loads(capsys.readouterr().out)
        return body

    request = ask("r9")
    assert request["schema"] == "schedscope.explain-request/1"
    ledger = request["ledger"]
    assert sum(part["ns"] for part in ledger["parts"]) == ledger["queued_ns"]
    assert {"rid", "pass", "place"} <= {*request["looks"][0], *request["looks"][0]["place"]}
    found = ask("pass", "12")
    assert (found["schema"], found["pass"]) == ("schedscope.explain-pass/1", 12)
    last = found["places"][-1]["rid"]
    asked = ask("pass", "12", "--request", last)["places"]
    assert [place["rid"] for place in asked if place["elsewhere"]] == [last]
    whole = ask("run")
    assert sum(cause["ns"] for cause in whole["causes"]) == whole["queued_ns"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nobody"], 5),
        (["pass", "9999"], 5),
        (["pass", "3", "--request", "r999"], 5),
        (["r1", "--rank", "4"], 5),
        (["pass", "x"], 2),
    ],
)
def test_what_is_not_there_is_said(busy: Path, words: list[str], code: int) -> None:
    assert main(["explain", *words, "--run", str(busy)]) == code


def test_what_a_policy_did_not_look_up_is_not_claimed(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="fcfs", chunked_prefill_size=48, **TIGHT)
    run = Run.open(record(tmp_path, config, seed=18, requests=30, outputs=(40, 160)))
    refused = 0
    for row in run.rows("requests"):
        found = explain_request(run, row["rid"])
        assert found.changes == ()
        for look in found.looks:
            assert look.place.is_stale
            if look.place.verdict is None:
                assert look.place.origin is None
                refused += 1
                assert any(line.startswith("not looked up") or "last looked up" in line for line in look_lines(look))
    assert refused > 0


def test_a_request_is_told_that_its_pass_fell_back(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", max_running_requests=2, max_total_tokens=20_000)
    arrivals = [Arrival(0.0, ask(f"r{n}", prompt(40, n), new=2)) for n in range(132)]
    run = play(tmp_path, config, arrivals)
    early, late = (explain_request(run, rid).looks[-1] for rid in ("r2", "r131"))
    assert "sorted by lpm running as fcfs (too many waiting requests: neither matched nor sorted)" in look_lines(early)
    assert (late.active, late.fallback) == ("lpm", None)
    assert not any("running as" in line for line in look_lines(late))
