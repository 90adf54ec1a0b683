"""Checkpoints that a shadow takes behind the scheduler are as good as the scheduler's own state."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import SchedscopeError
from schedscope.engine.ordering import POLICIES
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.snapshot import Snapshot, take_snapshot
from schedscope.engine.state import SchedulerState
from schedscope.recorder.compact import merge
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.replayer import Replayer, Start
from schedscope.replay.verify import verify
from shadowing import rewrite, shadow_run
from simulation import Workload, drive, record

NEVER = 10**9
BUSY = SchedulerConfig(
    schedule_policy="lpm",
    max_total_tokens=900,
    max_running_requests=12,
    chunked_prefill_size=64,
    schedule_conservativeness=0.1,
)


class Witness(RunTracer):
    """Records a rank, and keeps its whole state after every step."""

    def __init__(self, sink: DirectSink) -> None:
        super().__init__(sink, checkpoint_every=NEVER)
        self.states: dict[int, Snapshot] = {}

    def on_committed(self, state: SchedulerState) -> None:
        super().on_committed(state)
        assert self._scheduler is not None
        self.states[self._scheduler.steps] = take_snapshot(self._scheduler)


def some_config(seed: int) -> SchedulerConfig:
    """A configuration under which a lot happens."""
    chance = random.Random(seed)
    policy = chance.choice(list(POLICIES))
    return SchedulerConfig(
        schedule_policy=policy,
        page_size=chance.choice([1, 1, 4]),
        max_total_tokens=chance.choice([400, 900, 3000]),
        chunked_prefill_size=chance.choice([None, 32, 100]),
        max_running_requests=chance.choice([8, 20]),
        radix_eviction_policy=chance.choice(["lru", "lfu", "slru"]),
        enable_priority_scheduling=policy in {"fcfs", "lof"} and chance.random() < 0.5,
        max_queued_requests=chance.choice([None, 20]),
        schedule_conservativeness=chance.choice([1.0, 0.1]),
        random_seed=seed,
        disable_overlap_schedule=chance.random() < 0.5,
    )


def busy_run(folder: Path, **options: Any) -> Path:
    """A recorded run of many small parts."""
    return record(folder, BUSY, seed=5, requests=120, checkpoint_every=NEVER, limits=Limits(passes=20), **options)


def checkpoints(run: Run) -> list[Start]:
    """All places from which a run can be replayed, but its beginning."""
    replayer = Replayer(run, 0)
    rows = run.table("checkpoints", 0, ["pass"])["pass"].to_pylist()
    return [start for number in dict.fromkeys(rows) if (start := replayer.start_before(number)).is_checkpoint]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_every_checkpoint_is_the_state_that_the_scheduler_had(tmp_path: Path, seed: int) -> None:
    config = some_config(seed)
    path = create_run(tmp_path, "witnessed")
    described = Description(source=Source("simulation", "1"), config=config.to_dict())
    witness = Witness(DirectSink(path, 0, described, Limits(passes=15), detail=Detail(level="full")))
    scheduler = Scheduler(config, witness)
    witness.attach(scheduler)
    drive(scheduler, Workload(seed), 60)
    witness.close()

    assert shadow_run(path, config, work=300).stopped is None
    run = Run.open(path)
    replayer = Replayer(run, 0)
    starts = checkpoints(run)
    assert len(starts) > 2
    for start in starts:
        rebuilt = replayer.rebuild(start).scheduler
        assert take_snapshot(rebuilt) == witness.states[start.step]
        held = sorted(slot for node in rebuilt.state.cache.nodes() for slot in node.slots)
        held += [slot for live in rebuilt.lives.values() for slot in live.row[live.protected_len :]]
        assert len(held) == len(set(held)), "two hold the same slot"


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (16, False), (1, True)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_replay_from_any_checkpoint_is_identical(tmp_path: Path, policy: str, page_size: int, overlap: bool) -> None:
    config = SchedulerConfig(
        schedule_policy=policy,
        page_size=page_size,
        chunked_prefill_size=48,
        max_total_tokens=600,
        max_running_requests=60,
        schedule_conservativeness=0.02,
        disable_overlap_schedule=not overlap,
    )
    limits = Limits(passes=40)
    path = record(tmp_path, config, seed=18, requests=70, outputs=(40, 160), checkpoint_every=NEVER, limits=limits)
    assert shadow_run(path, config, work=2_000).stopped is None
    run = Run.open(path)
    starts = checkpoints(run)
    assert len(starts) > 3
    for start in starts[:: max(1, len(starts) // 6)]:
        found = verify(run, 0, start_pass=start.pass_number)
        assert found.divergence is None
        assert found.passes == run.passes(0).count - start.pass_number


def test_what_the_log_has_is_not_carried_again(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY)
    rows = Run.open(path).table("checkpoints", 0, ["seq", "since", "carried"]).to_pylist()
    alone = [row for row in rows if row["since"] == row["seq"]]
    first = alone[0]["seq"]
    assert all(not row["carried"] for row in rows if row["seq"] < first), "all is in `tokens` since the beginning"
    others = [len(row["carried"]) for row in rows if row["seq"] > first and row not in alone]
    assert sum(others) < sum(len(row["carried"]) for row in alone)


def test_requests_that_live_long_do_not_make_checkpoints_grow(tmp_path: Path) -> None:
    config = BUSY.replace(max_total_tokens=20_000)
    path = record(tmp_path, config, seed=3, requests=6, checkpoint_every=NEVER, outputs=(400, 500))
    shadow_run(path, config, work=1, repeat=NEVER)
    run = Run.open(path)
    rows = run.table("checkpoints", 0, ["step", "state", "carried"]).to_pylist()
    pieces = [max(map(len, msgspec.msgpack.decode(row["state"])["requests"]), default=0) for row in rows]
    assert len(rows) > 100
    assert 10 < max(pieces) <= 33
    starts = checkpoints(run)
    assert verify(run, 0, start_pass=starts[-1].pass_number).divergence is None


def test_passes_in_a_row_are_visited_across_a_gap_that_a_checkpoint_bridges(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY, work=1)
    segment = list_segments(path, 0)[1]
    step, seq, made = (TABLES["steps"].names[1:].index(name) for name in ("step", "seq", "pass"))
    found: list[int] = []

    def lose_a_step(rows: Rows) -> None:
        steps = sorted(rows["steps"])
        passes = [place for place, row in enumerate(steps) if row[made] is not None]
        here = next(one for one, other in pairwise(passes) if other - one > 4)
        found.extend((steps[here][made], steps[here][made] + 1))
        lost = steps[here + 2]
        assert lost[made] is None
        assert lost[step] == steps[here][step] + 2
        rows["steps"] = [row for row in steps if row[seq] != lost[seq]]

    rewrite(segment, lose_a_step)
    replayer = Replayer(Run.open(path), 0)
    assert [moment.number for moment in replayer.visit(found)] == found
    views = [moment.view for moment in (replayer.at(found[1]), list(replayer.visit(found))[1])]
    assert [each.rid for each in views[0].queue] == [each.rid for each in views[1].queue]


def test_merged_parts_replay_from_their_checkpoints(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY)
    apart = checkpoints(Run.open(path))
    merge(list_segments(path, 0))
    run = Run.open(path)
    assert len(run.parts(0)) == 1
    merged = checkpoints(run)
    assert [start.tick for start in merged] == [start.tick for start in apart]
    for start in merged[::4]:
        assert verify(run, 0, start_pass=start.pass_number).divergence is None
    assert verify(run, 0, jobs=2).passes == run.passes(0).count


# ---- deleted, lost, damaged ----------------------------------------------------------------------------------


def test_a_run_without_its_oldest_parts_replays_from_its_first_checkpoint(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY, repeat=0)
    whole = Run.open(path)
    last = whole.passes(0).last
    segments = list_segments(path, 0)
    for segment in segments[: len(segments) // 2]:
        shutil.rmtree(segment.path)
    run = Run.open(path)
    found = verify(run, 0)
    first = run.passes(0).first
    assert found.divergence is None
    assert first is not None
    assert last is not None
    assert first <= found.first_pass <= first + 1, "the very first pass may begin in a part that is gone"
    assert found.passes == last + 1 - found.first_pass
    assert verify(run, 0, jobs=2) == found
    assert Replayer(run, 0).at(found.first_pass).number == found.first_pass
    with pytest.raises(SchedscopeError, match=str(found.first_pass)):
        Replayer(run, 0).at(found.first_pass - 1)


def test_a_pass_is_rebuilt_though_other_parts_cannot_be_read(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY)
    run = Run.open(path)
    start = checkpoints(run)[-1]
    replayer = Replayer(run, 0)
    number = start.pass_number + 1
    before = replayer.at(number).view
    needed = [i for i in range(len(replayer.parts)) if any(s.tick >= start.since for s in replayer._checkpoints(i))]
    for i, segment in enumerate(list_segments(path, 0)):
        if i not in needed:
            for file in segment.path.glob("*.parquet"):
                file.write_bytes(b"damaged")
    after = Replayer(Run.open(path), 0).at(number).view
    assert [r.rid for r in after.queue] == [r.rid for r in before.queue]
    assert after.queue == before.queue


def test_a_shadow_that_misses_a_part_says_so_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = busy_run(tmp_path)
    shadow = shadow_run(path, BUSY, skip=(2,))
    assert shadow.stopped is not None
    assert "records are missing behind step" in shadow.stopped
    assert caplog.text.count("no more checkpoints") == 1
    parts = Run.open(path).parts(0)
    assert all(part.table("checkpoints").num_rows == 0 for part in parts[3:])


def test_behind_a_gap_it_goes_on_from_a_checkpoint_of_the_recorder(tmp_path: Path) -> None:
    path = record(tmp_path, BUSY, seed=5, requests=120, checkpoint_every=70, limits=Limits(passes=20))
    own = Run.open(path).table("checkpoints", 0, ["seq"])["seq"].to_pylist()
    shadow = shadow_run(path, BUSY, work=300, skip=(2,))
    assert shadow.stopped is None
    lost = list_segments(path, 0)[2]
    shutil.rmtree(lost.path)
    run = Run.open(path)
    replayer = Replayer(run, 0)
    made = [s for i in range(2, len(replayer.parts)) for s in replayer._checkpoints(i) if s.tick not in own]
    assert len(made) > 3
    for start in made[::3]:
        assert start.tick > own[0]
        assert verify(run, 0, start_pass=start.pass_number).divergence is None


def test_a_shadow_that_comes_to_another_state_names_it(tmp_path: Path) -> None:
    path = busy_run(tmp_path)
    place = [column.name for column in TABLES["steps"].row].index("available")

    def take_a_token(rows: Rows) -> None:
        rows["steps"] = [(*row[:place], row[place] - 1, *row[place + 1 :]) for row in rows["steps"]]

    rewrite(list_segments(path, 0)[1], take_a_token)
    shadow = shadow_run(path, BUSY)
    assert shadow.stopped is not None
    assert shadow.stopped.startswith("available was")


def test_without_token_ids_there_is_nothing_to_follow(tmp_path: Path) -> None:
    path = busy_run(tmp_path, detail=Detail(tokens="none"))
    shadow = shadow_run(path, BUSY)
    assert shadow.stopped is not None
    assert "was not recorded" in shadow.stopped
    assert Run.open(path).table("checkpoints").num_rows == 0


def test_checkpoints_of_hashed_tokens_hold_hashes_only(tmp_path: Path) -> None:
    plain = Run.open(busy_run(tmp_path / "plain"))
    path = busy_run(tmp_path / "hashed", detail=Detail(tokens="hashed"))
    assert shadow_run(path, BUSY, work=300).stopped is None
    run = Run.open(path)
    known = {i for row in plain.rows("tokens", 0) for i in row["ids"]}
    carried = {i for row in run.rows("checkpoints", 0) for i in row["carried"]}
    assert carried
    assert known.isdisjoint(carried - {0})
    for start in checkpoints(run)[::4]:
        assert verify(run, 0, start_pass=start.pass_number).divergence is None


# ---- many processes ------------------------------------------------------------------------------------------


def test_many_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = busy_run(tmp_path)
    shadow_run(path, BUSY)
    one = verify(Run.open(path), 0)
    assert one.divergence is None
    assert verify(Run.open(path), 0, jobs=2) == one

    monkeypatch.setattr("schedscope.replay.verify._RANGES_PER_JOB", 1)
    monkeypatch.setattr("schedscope.replay.verify._RANGE", one.passes // 12)
    done: list[int] = []
    assert verify(Run.open(path), 0, jobs=2, progress=done.append) == one
    assert len(done) > 4, "who waits hears of it often"
    assert done == sorted(done)
    assert done[-1] == one.passes

    def lie(rows: Rows) -> None:
        number, rid, *rest = rows["decisions"][30]
        rows["decisions"][30] = (number, rid, *rest[:4], rest[4] + 1, *rest[5:])

    for segment in list_segments(path, 0)[3:5]:
        rewrite(segment, lie)
    one = verify(Run.open(path), 0)
    assert one.divergence is not None
    assert (one.divergence.table, one.divergence.field) == ("decisions", "prefix_len")
    two = verify(Run.open(path), 0, jobs=2)
    assert two.divergence == one.divergence
