"""Every nanosecond in the queue is charged once, to the right cause and the right name."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.engine.errors import RunNotFoundError
from schedscope.engine.ordering import POLICIES
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tokens import encode
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.charges import charge
from schedscope.replay.explain_words import ledger_rows, total_words
from schedscope.replay.ledger import CAUSES, Part, RequestLedger, request_ledger, run_ledger
from shadowing import rewrite
from simulation import TIGHT, any_config, record

MS = 10**6


class Bench:
    """A recorded scheduler whose clock goes only when it is told to; a step's forward takes 10 ms."""

    def __init__(
        self, folder: Path, *, detail: Detail | None = None, limits: Limits | None = None, **config: Any
    ) -> None:
        self.path = create_run(folder, "bench")
        self.ns = 10**12
        config = {"max_running_requests": 1, "max_total_tokens": 10_000, **config}
        self.config = SchedulerConfig(**config)
        described = Description(config=self.config.to_dict())
        sink = DirectSink(self.path, 0, described, limits or Limits(), detail=detail or Detail(level="full"))
        self.tracer = RunTracer(sink, clock_ns=lambda: self.ns)
        self.scheduler = Scheduler(self.config, self.tracer)
        self.tracer.attach(self.scheduler)

    def arrive(self, rid: str, prompt: list[int], output: int = 1, **facts: Any) -> None:
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=facts.pop("ignore_eos", False))
        self.scheduler.arrive(Request(rid=rid, prompt=encode(prompt), sampling=sampling, **facts), self.ns / 1e9)

    def step(self, reports: tuple[Report, ...] = (), forward_ms: int = 10) -> list[str]:
        """Make a step; returns whose tokens it computed."""
        step = self.scheduler.step(self.ns / 1e9, reports)
        self.ns += forward_ms * MS
        if step.batch is None:
            return []
        finishes, sampled = {}, []
        for member in step.batch.members:
            live = member.live
            sampled.append(None if member.unfinished else 7)
            if not member.unfinished and live.output_len + 1 >= live.request.sampling.max_new_tokens:
                finishes[live.rid] = Finish("length", live.output_len + 1)
        self.scheduler.commit(step.batch, sampled, finishes, self.ns / 1e9)
        return [member.live.rid for member in step.batch.members]

    def run(self) -> Run:
        """What was recorded, after all requests have ended."""
        for _ in range(200):
            if not self.scheduler.busy:
                break
            self.step()
        assert not self.scheduler.busy
        return self.stop()

    def stop(self) -> Run:
        self.tracer.close()
        return Run.open(self.path)


def causes(ledger: RequestLedger) -> dict[str, float]:
    """Milliseconds by cause, without what took no time."""
    sums: Counter[str] = Counter()
    for part in ledger.parts:
        sums[part.cause if part.after is None else f"{part.cause}/{part.after}"] += part.ns
    return {cause: ns / MS for cause, ns in sums.items() if ns}


def part(ledger: RequestLedger, cause: str) -> Part:
    (found,) = (each for each in ledger.parts if each.cause == cause)
    return found


# ---- it adds up ----------------------------------------------------------------------------------------------


def check_sums(run: Run, every: int = 6) -> set[tuple[str, str | None]]:
    """The parts of every request sum to its queue time, and the requests' times to the run's.

    Of every so many, the ledger that looks at one request says the same as the one that looks at all. Returns the
    causes seen.
    """
    connection = run.connect()
    charge(connection)
    spans = connection.execute(
        "SELECT rid, after, leave_ns - enter_ns, coalesce(ns, 0), least FROM span LEFT JOIN "
        "(SELECT id, sum(ns) AS ns, min(ns) AS least FROM charge GROUP BY id) USING (id)"
    ).fetchall()
    assert all(length == charged and (least or 0) >= 0 for _, _, length, charged, least in spans)
    whole = run_ledger(run)
    assert whole.queued_ns == sum(each.ns for each in whole.causes) == sum(span[2] for span in spans)
    stays = Counter((rid, after) for rid, after, *_ in spans)
    of_one = (
        "SELECT c.cause, s.after, n.rid, c.reason, c.running, min(c.step), max(c.step), sum(c.ns)::BIGINT FROM charge "
        "c JOIN span s USING (id) LEFT JOIN name n ON n.name = c.name WHERE s.rid = ? GROUP BY ALL"
    )
    for number, row in enumerate(run.rows("requests")):
        rid = row["rid"]
        assert stays[rid, None] == (row["queue_ns"] is not None)
        if run.manifest.detail.level == "full":
            assert stays[rid, "retracted"] == row["retractions"]
            assert stays[rid, "preempted"] == row["preemptions"]
        if number % every or row["queue_ns"] is None:
            continue
        ledger = request_ledger(run, rid)
        left = row["admit_ns"] if row["admit_ns"] is not None else row["finish_ns"]
        assert ledger.spans[0].ns == left - row["queue_ns"]
        assert sum(each.ns for each in ledger.parts) == ledger.queued_ns
        assert all(each.ns >= each.gated_ns >= 0 for each in ledger.parts)
        among = connection.execute(of_one, [rid]).fetchall()
        assert {
            (p.cause, p.after, p.rid, p.reason, p.running, p.first_step, p.last_step, p.ns) for p in ledger.parts
        } == (set(among))
    causes = {(each.cause, each.after) for each in whole.causes}
    assert {cause for cause, _ in causes} <= set(CAUSES)
    return causes


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_parts_sum_to_the_queue_time_of_every_request(tmp_path: Path, seed: int) -> None:
    check_sums(Run.open(record(tmp_path, any_config(seed), seed=seed, requests=25)))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_it_adds_up_under_every_policy_and_pressure(tmp_path: Path, policy: str, page_size: int) -> None:
    config = SchedulerConfig(
        schedule_policy=policy,
        page_size=page_size,
        chunked_prefill_size=48,
        enable_priority_scheduling=policy in {"fcfs", "lof", "priority"},
        **TIGHT,
    )
    run = Run.open(record(tmp_path, config, seed=18, requests=70, outputs=(40, 160)))
    seen = check_sums(run, every=30)
    assert any(after is not None for _, after in seen), "someone lost its memory and came back"
    marks = [each.mark for each in run_ledger(run).causes if each.cause == "batch_full"]
    assert None not in marks, "nobody waits under a mark of which it is not known what set it"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), level=st.sampled_from(["steps", "passes", "decisions"]), sample=st.integers(1, 3))
def test_it_adds_up_whatever_is_recorded(tmp_path: Path, seed: int, level: Any, sample: int) -> None:
    detail = Detail(level=level, sample=sample)
    run = Run.open(record(tmp_path, any_config(seed), seed=seed, requests=20, detail=detail))
    seen = {cause for cause, _ in check_sums(run)}
    if level in {"steps", "passes"}:
        assert seen <= {"unrecorded", "deciding", "step_in_progress", "batch_full", "no_slot", "min_free_slots_delay"}


# ---- to the right cause --------------------------------------------------------------------------------------


def test_it_is_the_same_however_few_steps_are_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(schedule_policy="lpm", chunked_prefill_size=48, **TIGHT)
    run = Run.open(record(tmp_path, config, seed=18, requests=70, outputs=(40, 160)))
    rids = sorted({row["rid"] for row in run.rows("requests")})
    found = []
    for near in (1, 3, 16, 10**6):
        monkeypatch.setattr("schedscope.replay.ledger._NEAR", near)
        found.append([request_ledger(run, rid) for rid in rids])
    assert found[0] == found[1] == found[2] == found[3]
    assert any(part.cause == "batch_full" for ledger in found[0] for part in ledger.parts)


def test_a_longer_match_that_comes_later_goes_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, schedule_policy="lpm")
    hot = list(range(100, 140))
    bench.arrive("warm", [*hot, 1])
    bench.step()
    bench.arrive("cold", [5, 6, 7])
    bench.arrive("hot", [*hot, 2])
    assert bench.step() == ["hot"]
    assert bench.step() == ["cold"]
    ledger = request_ledger(bench.run(), "cold")
    assert causes(ledger) == {"longer_match": 10}
    found = part(ledger, "longer_match")
    assert (found.rid, found.times, found.worst_pass) == ("hot", 1, 1)
    (span,) = ledger.spans
    assert (span.first_pass, span.last_pass, span.left_as) == (1, 2, "admitted")


def test_the_gate_that_an_overtaker_shuts_is_its_doing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, schedule_policy="lpm")
    hot = list(range(100, 140))
    bench.arrive("warm", [*hot, 1])
    bench.step()
    bench.arrive("cold", [5, 6, 7])
    bench.arrive("hot", [*hot, 2], output=4)
    for _ in range(4):
        assert bench.step() == ["hot"]
    assert bench.step() == ["cold"]
    found = part(request_ledger(bench.run(), "cold"), "longer_match")
    assert (found.ns, found.gated_ns) == (40 * MS, 30 * MS)


def test_whoever_came_first_keeps_no_one_waiting_but_the_slots_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("first", [1, 2, 3], output=3)
    bench.arrive("second", [4, 5, 6])
    run = bench.run()
    ledger = request_ledger(run, "second")
    # SGLang forgets the mark when a prefill becomes the running batch; then the gate finds no slot and sets it again.
    assert causes(ledger) == {"no_slot": 20, "batch_full": 10}
    assert [(each.reason, each.times, each.first_pass) for each in ledger.parts if each.cause == "no_slot"] == [
        ("no_slot", 1, 0),
        (None, 1, None),
    ]
    marked = part(ledger, "batch_full")
    assert (marked.first_step, marked.last_step, marked.running, marked.slots) == (1, 1, 1, 1)


def test_whoever_comes_under_a_mark_learns_what_set_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_running_requests=2, limits=Limits(passes=1))
    for rid in ("a", "b"):
        bench.arrive(rid, [ord(rid), 2, 3], output=9)
    bench.step()
    bench.arrive("early", [7, 8, 9])
    for _ in range(3):
        bench.step()
    bench.arrive("late", [4, 5, 6])
    run = bench.run()
    (gate,) = [row["step"] for row in run.rows("steps") if row["gate"] == "no_slot"]
    for rid in ("early", "late"):
        ledger = request_ledger(run, rid)
        marked = part(ledger, "batch_full")
        assert (marked.reason, marked.rid, marked.first_pass) == (None, None, None)
        assert (marked.first_step, marked.last_step, marked.running, marked.slots) == (gate, gate, 2, 2)
        words = "the batch was marked full earlier: no running slot, 2 of 2 running"
        assert (words, "", f"set at step {gate}") in [row[2:] for row in ledger_rows(ledger)]
    (total,) = [each for each in run_ledger(run).causes if each.cause == "batch_full"]
    assert total.mark == (None, 0, None, gate, 2, 2)
    assert total_words(total).endswith(f"no running slot, 2 of 2 running (the costliest set at step {gate})")
    assert check_sums(run, every=1)


def test_a_blocked_head_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_running_requests=8, max_total_tokens=100)
    bench.arrive("runs", list(range(40)), output=20, ignore_eos=True)
    bench.step()
    bench.arrive("head", list(range(200, 260)), output=3)
    bench.arrive("small", [5, 6])
    bench.step()
    run = bench.run()
    behind = part(request_ledger(run, "small"), "blocked_head")
    row = next(r for r in run.rows("decisions") if r["rid"] == "head" and r["reason"] == "memory")
    assert (behind.rid, behind.reason) == ("head", "memory")
    assert behind.short == int(row["need"] - row["have"]) + 1 > 1
    own = part(request_ledger(run, "head"), "memory")
    assert (own.rid, own.short) == (None, behind.short)
    marked = part(request_ledger(run, "small"), "batch_full")
    assert (marked.rid, marked.reason, marked.short) == ("head", "memory", behind.short)


def test_a_duplicate_waits_for_its_partner(tmp_path: Path) -> None:
    bench = Bench(tmp_path, schedule_policy="lpm", max_running_requests=4, prefill_max_requests=2)
    shared = list(range(300, 400))
    bench.arrive("leader", [*shared, 1])
    bench.arrive("copy", [*shared, 2])
    bench.arrive("other", [8, 9])
    assert bench.step() == ["leader", "other"]
    assert bench.step() == ["copy"]
    ledger = request_ledger(bench.run(), "copy")
    assert causes(ledger) == {"held_back": 10}
    assert part(ledger, "held_back").rid == "leader"


def test_what_others_compute_is_their_share_of_the_budget(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_running_requests=4, chunked_prefill_size=64)
    bench.arrive("short", [1] * 16)
    bench.arrive("long", [2] * 100)
    bench.arrive("last", [3] * 70)
    run = bench.run()
    by = {(each.rid, each.first_pass): each.ns / MS for each in request_ledger(run, "last").parts if each.rid}
    assert by == {("short", 0): 2.5, ("long", 0): 7.5}
    assert {each.cause for each in request_ledger(run, "last").parts if each.ns} == {"chunk_budget"}


def test_a_pass_is_shared_by_what_was_computed_for_each(tmp_path: Path) -> None:
    bench = Bench(tmp_path, schedule_policy="shortest-prefill-first", max_running_requests=2)
    bench.arrive("long", list(range(50)))
    bench.arrive("one", [1] * 10)
    bench.arrive("two", [2] * 30)
    bench.step()
    ledger = request_ledger(bench.run(), "long")
    by = {each.rid: each.ns for each in ledger.parts if each.cause == "order"}
    assert by == {"one": 10 * MS // 4, "two": 10 * MS * 3 // 4}


def test_priority_is_told_from_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, enable_priority_scheduling=True, disable_priority_preemption=True)
    bench.arrive("low", [1, 2], priority=0)
    bench.arrive("high", [3, 4], priority=9)
    bench.step()
    assert causes(request_ledger(bench.run(), "low")) == {"priority": 10}


def test_preempted_requests_wait_again_for_whom_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path, enable_priority_scheduling=True, priority_scheduling_preemption_threshold=1)
    bench.arrive("low", [1, 2, 3], output=3, priority=0)
    bench.step()
    bench.arrive("high", [4, 5], output=2, priority=9)
    assert bench.step() == ["high"]
    bench.step()
    run = bench.run()
    ledger = request_ledger(run, "low")
    (first, again) = ledger.spans
    assert (first.after, again.after, again.by, again.lost_pass) == (None, "preempted", "high", 1)
    assert again.ns == sum(each.ns for each in ledger.parts if each.after == "preempted") == 20 * MS
    assert run_ledger(run).queued_ns == ledger.queued_ns + request_ledger(run, "high").queued_ns


def test_the_delayer_and_free_slots_are_charged_as_such(tmp_path: Path) -> None:
    other = (Report(prefillable=False),)
    bench = Bench(tmp_path / "delayer", enable_prefill_delayer=True, dp_size=2, max_running_requests=8)
    bench.arrive("r", [1, 2, 3])
    assert bench.step(other) == []
    assert bench.step((Report(prefillable=True),)) == ["r"]
    assert causes(request_ledger(bench.run(), "r")) == {"delayer": 10}

    bench = Bench(tmp_path / "slots", min_free_slots_delay=3, max_running_requests=4)
    for rid in ("a", "b"):
        bench.arrive(rid, [ord(rid), 2], output=3)
    bench.step()
    bench.arrive("c", [9, 9])
    bench.step()
    assert causes(request_ledger(bench.run(), "c")) == {"min_free_slots_delay": 20}


def test_the_step_under_way_comes_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("a", [1, 2])
    step = bench.scheduler.step(0.0)
    bench.ns += 4 * MS
    bench.arrive("b", [3, 4])
    bench.ns += 6 * MS
    assert step.batch is not None
    bench.scheduler.commit(step.batch, [7], {"a": Finish("length", 1)}, 0.0)
    assert causes(request_ledger(bench.run(), "b")) == {"step_in_progress": 6}


def test_what_lost_records_would_tell_is_charged_as_lost(tmp_path: Path) -> None:
    limits = Limits(passes=1)
    bench = Bench(tmp_path, limits=limits)
    for rid in "abcdef":
        bench.arrive(rid, [ord(rid), 2, 3])
    run = bench.run()
    assert causes(request_ledger(run, "f")) == {"no_slot": 50}
    lost = list_segments(run.path, 0)[2]

    def without_steps(rows: dict[str, Any]) -> None:
        for table in ("steps", "passes", "decisions"):
            rows.pop(table, None)

    rewrite(lost, without_steps)
    ledger = request_ledger(Run.open(run.path), "f")
    # The part had the step of one pass and the decisions of the next one.
    assert causes(ledger) == {"no_slot": 30, "gap": 10, "unrecorded": 10}
    assert check_sums(Run.open(run.path))


def test_who_still_waits_is_charged_up_to_the_end_of_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("runs", [1, 2], output=50)
    bench.arrive("waits", [3, 4])
    for _ in range(5):
        bench.step()
    run = bench.stop()
    ledger = request_ledger(run, "waits")
    assert ledger.waits
    assert ledger.queued_ns == sum(each.ns for each in ledger.parts) == 50 * MS
    assert run_ledger(run).open == 1
    assert run_ledger(run).queued_ns == 50 * MS


def test_of_those_who_waited_as_long_the_first_by_name_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("runs", [1, 2], output=50)
    for number in random.Random(1).sample(range(60), 60):
        bench.arrive(f"r{number:02}", [3, number])
    for _ in range(5):
        bench.step()
    (cause, *_) = run_ledger(bench.stop()).causes
    assert (cause.requests, cause.worst_rid) == (60, "r00")


def test_of_requests_of_one_name_it_is_the_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for forward_ms in (10, 30):
        bench.arrive("before", [1, 2])
        bench.arrive("again", [3, 4])
        bench.step(forward_ms=forward_ms)
        bench.step()
        bench.step()
    run = bench.run()
    ledger = request_ledger(run, "again")
    assert (ledger.lives, ledger.queued_ns) == (2, 30 * MS)
    assert run_ledger(run).queued_ns == 40 * MS


def test_who_left_the_queue_otherwise_has_waited_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("runs", [1, 2], output=9)
    bench.arrive("gives up", [3, 4])
    for _ in range(3):
        bench.step()
    bench.scheduler.abort("gives up", 0.0)
    ledger = request_ledger(bench.run(), "gives up")
    assert (ledger.queued_ns, ledger.spans[-1].left_as) == (30 * MS, "abort")


def test_an_unknown_request_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.arrive("a", [1])
    with pytest.raises(RunNotFoundError, match="no request 'b'"):
        request_ledger(bench.run(), "b")


@pytest.mark.parametrize("requests", [0, 1])
def test_a_run_in_which_no_one_waits_has_a_ledger(tmp_path: Path, requests: int) -> None:
    bench = Bench(tmp_path)
    for number in range(requests):
        bench.arrive(f"r{number}", [1])
    ledger = run_ledger(bench.run())
    assert ledger.queued_ns == sum(each.ns for each in ledger.causes) == 0


def test_the_shares_of_a_piece_are_whole_however_it_divides(tmp_path: Path) -> None:
    chance = random.Random(5)
    bench = Bench(tmp_path, schedule_policy="shortest-prefill-first", max_running_requests=3)
    for number in range(30):
        bench.arrive(f"r{number}", [chance.randint(1, 9)] * chance.randint(1, 40))
        if number % 3 == 0:
            bench.ns += chance.randint(1, 999_999)
            bench.step(forward_ms=chance.choice([1, 7, 13]))
    check_sums(bench.run())
