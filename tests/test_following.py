"""A run as `schedscope record` makes it: handed over through a ring, sealed in parts, followed by a shadow."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunFormatError
from schedscope.engine.scheduler import Scheduler
from schedscope.recorder.companion import Companion
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.keep import Keep
from schedscope.recorder.manifest import create_run
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.ring import RingWriter
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from schedscope.recorder.sink import CompanionSink, open_sink
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.follow import follow
from schedscope.replay.replayer import Replayer
from schedscope.replay.verify import verify
from simulation import Workload, drive

CONFIG = SchedulerConfig(schedule_policy="lpm", page_size=4, max_total_tokens=600, chunked_prefill_size=48)
SMALL = Limits(passes=20)


def scheduler_of(companion: Companion) -> tuple[Scheduler, RunTracer]:
    """A scheduler that a companion records."""
    described = Description(source=Source("simulation", "1"), config=CONFIG.to_dict())
    sink = open_sink(0, described, environ=companion.environment())
    assert isinstance(sink, CompanionSink)
    tracer = RunTracer(sink)
    scheduler = Scheduler(CONFIG, tracer)
    tracer.attach(scheduler)
    return scheduler, tracer


def record(run_dir: Path, options: Options, requests: int = 150, seed: int = 4) -> None:
    with Companion.start(run_dir, options, follow(alone_s=0.5)) as companion:
        scheduler, tracer = scheduler_of(companion)
        drive(scheduler, Workload(seed, outputs=(5, 60)), requests)
        tracer.close()


@pytest.mark.parametrize("tokens", ["full", "hashed"])
def test_the_companion_takes_the_checkpoints(tmp_path: Path, tokens: str) -> None:
    run_dir = create_run(tmp_path)
    detail = Detail(level="full", tokens=tokens)  # type: ignore[arg-type]
    record(run_dir, Options(detail=detail, key=b"0123456789abcdef", limits=SMALL))
    run = Run.open(run_dir)
    whole = verify(run, 0)
    assert whole.divergence is None
    assert whole.passes == run.passes(0).count > 100
    assert run.table("checkpoints", 0).num_rows > 1
    later = verify(run, 0, start_pass=whole.passes - 10)
    assert later.divergence is None
    assert later.passes == 10


def test_what_a_flight_recorder_kept_replays(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    record(run_dir, Options(limits=SMALL, keep=Keep(size=60_000)))
    run = Run.open(run_dir)
    recorded = run.passes(0)
    assert recorded.first is not None
    assert recorded.first > 0
    found = verify(run, 0)
    assert found.divergence is None
    assert found.passes > recorded.count // 2


def test_what_was_kept_around_an_event_replays(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    options = Options(limits=SMALL, after_s=0.0, before_s=3600)
    with Companion.start(run_dir, options, follow(alone_s=0.1)) as companion:
        scheduler, tracer = scheduler_of(companion)
        drive(scheduler, Workload(9), 60)
        companion.keep("here")
        deadline = time.monotonic() + 20
        while len(find_runs(tmp_path)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tracer.close()
    kept = Run.open(next(info.path for info in find_runs(tmp_path) if info.path != run_dir))
    found = verify(kept, 0)
    assert found.divergence is None
    assert found.passes == kept.passes(0).count > 50


@pytest.mark.parametrize(("jobs", "passes_each"), [(1, 4_000), (2, 4_000), (2, 1)])
def test_over_a_gap_replay_goes_on_behind_it(
    tmp_path: Path, jobs: int, passes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedscope.replay.verify._RANGE", passes_each)
    written = itertools.count()
    write = RingWriter.write

    def full_for_a_while(ring: RingWriter, frame: bytes) -> bool:
        return next(written) not in range(300, 320) and write(ring, frame)

    monkeypatch.setattr(RingWriter, "write", full_for_a_while)
    run_dir = create_run(tmp_path)
    record(run_dir, Options(limits=SMALL), requests=400)
    run = Run.open(run_dir)
    (gap,) = run.gaps
    assert (gap.reason, gap.frames) == ("lost", 20)
    assert gap.after_pass is not None
    assert gap.before_pass is not None
    found = verify(run, 0, jobs=jobs)
    assert found.divergence is None, "what is missing is no difference"
    ((last, again),) = found.lost
    assert last == gap.after_pass
    assert again is not None
    assert gap.before_pass <= again <= gap.before_pass + 200, "the recorder takes a checkpoint behind a gap"
    assert found.passes == run.passes(0).count - (again - gap.before_pass) > 300
    with pytest.raises(RunFormatError, match="records are missing behind step"):
        Replayer(run).at(gap.before_pass)
    assert Replayer(run).at(again + 5).number == again + 5


def test_a_gap_without_a_checkpoint_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = itertools.count()
    write = RingWriter.write
    monkeypatch.setattr(RingWriter, "write", lambda ring, frame: next(written) != 100 and write(ring, frame))
    run_dir = create_run(tmp_path)
    record(run_dir, Options(detail=Detail(tokens="hashed"), key=b"0123456789abcdef"))
    run = Run.open(run_dir)
    found = verify(run, 0)
    assert found.divergence is None
    assert [again for _, again in found.lost] == [None]
    assert 0 < found.passes < run.passes(0).count
