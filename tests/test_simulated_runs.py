"""Recorded runs of the real scheduler under made-up load replay identically, whatever happened in them."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.ordering import POLICIES
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.snapshot import Snapshot, restore_snapshot, take_snapshot
from schedscope.engine.tokens import encode
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Tokens
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.verify import verify
from simulation import TIGHT, Driver, Workload, any_config, drive, record


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_run_replays_from_its_start_and_from_a_checkpoint(tmp_path: Path, seed: int) -> None:
    follows = seed % 3 == 0
    run = Run.open(record(tmp_path, any_config(seed), seed=seed, requests=30, checkpoint_every=20, follows=follows))
    whole = verify(run, 0)
    assert whole.divergence is None
    assert whole.passes == run.passes(0).count > 0
    later = verify(run, 0, start_pass=whole.passes * 2 // 3)
    assert later.divergence is None
    assert later.passes == whole.passes - whole.passes * 2 // 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    detail=st.builds(
        Detail,
        level=st.sampled_from(["passes", "decisions", "full"]),
        sample=st.sampled_from([1, 1, 3]),
        tokens=st.sampled_from(["full", "hashed"]),
    ),
)
def test_whatever_is_left_out_any_run_replays(tmp_path: Path, seed: int, detail: Detail) -> None:
    run = Run.open(record(tmp_path, any_config(seed), seed=seed, requests=30, detail=detail))
    found = verify(run, 0)
    assert found.divergence is None
    assert found.passes == run.passes(0).count > 0
    explained = set(run.table("decisions", 0, ["pass"])["pass"].to_pylist())
    assert all(number % detail.sample == 0 for number in explained)
    assert bool(explained) == (detail.level != "passes")


@pytest.mark.parametrize(("page_size", "threshold"), [(1, 32), (16, 32), (64, 32), (16, 40)])
def test_hashed_tokens_tell_nothing_but_equality(tmp_path: Path, page_size: int, threshold: int) -> None:
    config = SchedulerConfig(
        schedule_policy="lpm",
        page_size=page_size,
        max_total_tokens=1600,
        max_running_requests=4,
        in_batch_prefix_caching_deprioritize_threshold=threshold,
        in_batch_prefix_caching_check_threshold=threshold,
    )
    recorded = {}
    for tokens in ("full", "hashed"):
        path = record(tmp_path / tokens, config, seed=3, requests=80, detail=Detail(tokens=tokens))
        run = Run.open(path)
        assert verify(run, 0).divergence is None
        assert run.table("decisions")["shared_len"].drop_null().to_pylist(), "duplicates occur"
        recorded[tokens] = [row["ids"] for row in run.rows("tokens", 0)]
    assert [len(ids) for ids in recorded["full"]] == [len(ids) for ids in recorded["hashed"]]
    known = {i for ids in recorded["full"] for i in ids}
    assert known.isdisjoint({i for ids in recorded["hashed"] for i in ids if i})


@pytest.mark.parametrize("detail", [Detail(level="full"), Detail(sample=2), Detail(level="passes")], ids=str)
def test_rids_that_are_no_unicode_replay_however_little_is_kept(tmp_path: Path, detail: Detail) -> None:
    class Odd(Workload):
        def request(self) -> Request:
            request = super().request()
            return dataclasses.replace(request, rid=f"{request.rid}\ud800")

    config = SchedulerConfig(schedule_policy="lpm", **TIGHT)
    path = create_run(tmp_path, "odd")
    tracer = RunTracer(DirectSink(path, 0, Description(config=config.to_dict()), detail=detail, key=b"k"))
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    drive(scheduler, Odd(1), 20)
    tracer.close()
    run = Run.open(path)
    found = verify(run, 0)
    assert found.divergence is None
    assert found.passes == run.passes(0).count > 0
    assert run.gaps == []


@pytest.mark.parametrize("tokens", ["hashed", "none"])
def test_nothing_of_a_clients_tokens_or_texts_is_kept(tmp_path: Path, tokens: Tokens) -> None:
    path = create_run(tmp_path, "private")
    config = SchedulerConfig()
    sink = DirectSink(
        path, 0, Description(config=config.to_dict()), detail=Detail(level="full", tokens=tokens), key=b"k"
    )
    tracer = RunTracer(sink)
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    sampling = SamplingParams(stop=("SECRET",), stop_token_ids=(77_123_456,))
    scheduler.arrive(Request(rid="r", prompt=encode([77_123_457] * 40), sampling=sampling), 0.0)
    step = scheduler.step(0.0)
    assert step.batch is not None
    scheduler.commit(step.batch, [77_123_458], {"r": Finish("stop", "SECRET")}, 0.1)
    tracer.close()
    run = Run.open(path)
    for table in TABLES:
        kept = str(run.table(table).to_pylist())
        assert "SECRET" not in kept
        assert "771234" not in kept
    if tokens == "hashed":
        assert verify(run, 0).divergence is None


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_under_pressure(tmp_path: Path, policy: str, page_size: int, overlap: bool) -> None:
    config = SchedulerConfig(
        schedule_policy=policy,
        page_size=page_size,
        chunked_prefill_size=48,
        disable_overlap_schedule=not overlap,
        **TIGHT,
    )
    run = Run.open(record(tmp_path, config, seed=8, requests=70, outputs=(40, 160)))
    assert verify(run, 0).divergence is None
    happened = Counter(row["kind"] for row in run.rows("events", 0))
    assert happened["evict"] > 0
    assert happened["retract"] > 0
    assert any(row["chunked_out"] for row in run.rows("passes", 0))


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_preemption_mixed_chunks_and_retraction_replay(tmp_path: Path, overlap: bool) -> None:
    config = SchedulerConfig(
        schedule_policy="fcfs",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        enable_mixed_chunk=True,
        chunked_prefill_size=64,
        max_running_requests=8,
        max_total_tokens=500,
        schedule_conservativeness=0.02,
        disable_overlap_schedule=not overlap,
    )
    run = Run.open(record(tmp_path, config, seed=2, requests=120, outputs=(20, 100)))
    assert verify(run, 0).divergence is None
    happened = Counter(row["kind"] for row in run.rows("events", 0))
    assert min(happened["preempt"], happened["evict"], happened["retract"]) > 0
    assert any(row["kind"] == "mixed" for row in run.rows("steps", 0))


def test_a_drained_scheduler_holds_nothing() -> None:
    for seed in range(20):
        scheduler = Scheduler(any_config(seed))
        drive(scheduler, Workload(seed), 60)
        state = scheduler.state
        assert not scheduler.lives
        assert state.rows == 0
        assert state.cache.protected == 0
        assert state.pool.available + state.cache.evictable == state.pool.size
        held = sorted(slot for node in state.cache.nodes() for slot in node.slots)
        assert held == sorted(set(held)), "two cache nodes share a slot"


def test_deciding_changes_nothing_and_comes_out_the_same(tmp_path: Path) -> None:
    from schedscope.replay.moment import decide_again
    from schedscope.replay.replayer import Replayer

    run = Run.open(record(tmp_path, any_config(5), seed=5, requests=60))
    for number in range(0, run.passes(0).count, 7):
        moment = Replayer(run, 0).at(number)
        first = decide_again(moment)
        cache = moment.view.cache
        shape = [(node.id, node.end, node.lock_ref, node.last_access) for node in cache.nodes()]
        assert decide_again(moment) == first
        assert shape == [(node.id, node.end, node.lock_ref, node.last_access) for node in cache.nodes()]


def test_a_restored_scheduler_has_the_same_future() -> None:
    for seed in range(6):
        config = any_config(seed)
        original = Scheduler(config)
        workload = Workload(seed)
        drive(original, workload, 25)
        twin = restore_snapshot(take_snapshot(original), config)
        future = random.Random(seed).getrandbits(64)
        steps = [drive(each, Workload(future), 25) for each in (original, twin)]
        assert steps[0] == steps[1]
        assert take_snapshot(original) == take_snapshot(twin)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_scheduler_restored_in_the_midst_of_a_run_goes_on_in_the_same_way(overlap: bool) -> None:
    flying = 0
    for seed in range(12):
        config = any_config(seed).replace(disable_overlap_schedule=not overlap)
        driver = Driver(Scheduler(config), Workload(seed), 30)
        for _ in range(40 + 5 * seed):
            driver.turn()
        flying += len(driver.scheduler.state.in_flight)
        facts, keys, sequences = take_snapshot(driver.scheduler)
        stored = Snapshot(msgspec.msgpack.decode(msgspec.msgpack.encode(facts)), keys, sequences)
        twin = Driver(restore_snapshot(stored, config), copy.deepcopy(driver.workload), driver.left, now=driver.now)
        while not driver.done:
            driver.turn()
            twin.turn()
            assert take_snapshot(twin.scheduler) == take_snapshot(driver.scheduler)
        assert twin.done
    assert bool(flying) == overlap
