"""With overlap a step is decided before the last one's tokens are there; the log says so, and replays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from schedscope.engine import tokens
from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler, Step
from schedscope.engine.tracer import Given
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.moment import decide_again
from schedscope.replay.replayer import Replayer
from schedscope.replay.verify import verify
from simulation import record

OVERLAP = SchedulerConfig(disable_overlap_schedule=False)


def request(rid: str, length: int = 10, limit: int = 4, priority: int | None = None) -> Request:
    """A request whose prompt is like no other's."""
    prompt = [100 * int(rid[1:]) + i for i in range(length)]
    sampling = SamplingParams(max_new_tokens=limit)
    return Request(rid=rid, prompt=tokens.encode(prompt), sampling=sampling, priority=priority)


def rids(step: Step) -> list[str]:
    """Who is computed."""
    return [] if step.batch is None else [member.live.rid for member in step.batch.members]


def commit(scheduler: Scheduler, step: Step, *, stop: bool = False) -> None:
    """The model says 7 to everyone."""
    assert step.due is not None
    lives = [member.live for member in step.due.members]
    finishes = {live.rid: Finish("stop", 7) for live in lives} if stop else {}
    for live in lives:
        if live.output_len + 1 >= live.request.sampling.max_new_tokens:
            finishes[live.rid] = Finish("length", live.request.sampling.max_new_tokens)
    scheduler.commit(step.due, [7] * len(lives), finishes, 0.0)


def recorded(folder: Path, config: SchedulerConfig) -> tuple[Path, Scheduler, RunTracer]:
    """A scheduler that is recorded."""
    path = create_run(folder, "overlap")
    sink = DirectSink(path, 0, Description(config=config.to_dict()), detail=Detail(level="full"))
    tracer = RunTracer(sink)
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    return path, scheduler, tracer


def test_each_batch_is_due_after_the_next_step() -> None:
    scheduler = Scheduler(OVERLAP)
    scheduler.arrive(request("r1"), 0.0)
    first = scheduler.step(0.0)
    assert rids(first) == ["r1"]
    assert first.due is None
    second = scheduler.step(0.1)
    assert second.batch is not None
    assert second.batch.kind == "decode"
    assert second.due is first.batch
    assert not scheduler.flush(0.1), "a batch is in flight"


def test_a_request_that_stops_is_decoded_once_too_often_and_that_token_is_dropped() -> None:
    scheduler = Scheduler(OVERLAP)
    scheduler.arrive(request("r1"), 0.0)
    scheduler.step(0.0)
    commit(scheduler, scheduler.step(0.1), stop=True)
    assert not scheduler.lives
    assert scheduler.state.rows == 0
    last = scheduler.step(0.2)
    assert rids(last) == []
    assert last.due is not None
    before = scheduler.state.pool.available
    commit(scheduler, last)
    assert scheduler.state.pool.available == before
    assert not scheduler.busy


def test_a_request_whose_last_token_is_in_flight_is_not_decoded_again() -> None:
    scheduler = Scheduler(OVERLAP)
    scheduler.arrive(request("r1", limit=1), 0.0)
    assert rids(scheduler.step(0.0)) == ["r1"]
    step = scheduler.step(0.1)
    assert rids(step) == []
    commit(scheduler, step)
    assert not scheduler.busy


def test_without_overlap_a_step_waits_for_the_batch_before() -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.arrive(request("r1"), 0.0)
    step = scheduler.step(0.0)
    assert step.due is step.batch
    with pytest.raises(AssertionError, match="to be committed"):
        scheduler.step(0.1)


def test_the_log_says_whose_tokens_a_step_took_in(tmp_path: Path) -> None:
    run = Run.open(record(tmp_path, OVERLAP, seed=1, requests=20))
    assert verify(run, 0).divergence is None
    steps = {row["step"]: row for row in run.rows("steps", 0)}
    ran = [step for step, row in steps.items() if row["batch_tokens"]]
    assert len(ran) > 20
    for step, row in steps.items():
        assert row["committed"] == (step - 1 if step - 1 in ran else None)
        assert (row["forward_ns"] is None) == (row["committed"] is None)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_pass_is_re_run_while_the_step_before_it_is_still_computed(tmp_path: Path, overlap: bool) -> None:
    path, scheduler, tracer = recorded(tmp_path, SchedulerConfig(disable_overlap_schedule=not overlap))
    scheduler.arrive(request("r1"), 0.0)
    step = scheduler.step(0.0)
    if step.due is not None:
        commit(scheduler, step)
    scheduler.arrive(request("r2"), 0.1)
    assert rids(scheduler.step(0.1)) == ["r2"]
    tracer.close()  # nothing that was in flight came back
    replayer = Replayer(Run.open(path), 0)
    assert replayer.open_pass() == 1
    again = decide_again(replayer.at(1))
    assert [verdict.rid for verdict in again.admission.admitted] == ["r2"]
    assert verify(Run.open(path), 0).divergence is None


def test_clocks_and_chance_of_a_server_that_is_followed_are_kept(tmp_path: Path) -> None:
    path, scheduler, tracer = recorded(tmp_path, SchedulerConfig(schedule_policy="random"))
    for number in range(1, 9):
        scheduler.arrive(request(f"r{number}"), 0.0, entry_time=100.0 - number)
    assert [live.entry_time for live in scheduler.state.queue] == [100.0 - number for number in range(1, 9)]
    step = scheduler.step(0.0, given=Given(random_state=seeded(42)))
    order = [f"r{number}" for number in range(1, 9)]
    random.Random(42).shuffle(order)
    assert rids(step) == order
    commit(scheduler, step)
    tracer.close()
    run = Run.open(path)
    assert verify(run, 0).divergence is None
    moment = Replayer(run, 0).at(0)
    assert [verdict.rid for verdict in decide_again(moment).admission.admitted] == order


def test_a_request_that_loses_its_memory_is_given_the_time_of_its_return() -> None:
    config = SchedulerConfig(
        enable_priority_scheduling=True, max_running_requests=1, priority_scheduling_preemption_threshold=1
    )
    scheduler = Scheduler(config)
    scheduler.arrive(request("r1", priority=0), 0.0, entry_time=1.0)
    commit(scheduler, scheduler.step(0.0))
    scheduler.arrive(request("r2", priority=9), 0.1, entry_time=2.0)
    step = scheduler.step(0.1, given=Given(entry_times={"r1": 3.5}))
    assert rids(step) == ["r2"]
    assert [(live.rid, live.entry_time) for live in scheduler.state.queue] == [("r1", 3.5)]
