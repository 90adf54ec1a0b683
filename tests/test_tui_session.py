"""What the terminal debugger asks an open run: what it keeps of it, and which pass of another run belongs to one."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.hello import Detail
from schedscope.recorder.run import Run
from schedscope.replay.walker import MOMENTS
from schedscope.tui.counterpart import counterpart
from schedscope.tui.session import LIVES, PAGES, Session
from screens import simulated
from simulation import TIGHT, record

BUSY = 19


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A busy run."""
    return simulated(tmp_path_factory.mktemp("runs"))


def test_walking_a_run_keeps_no_more_than_some_of_it(path: Path) -> None:
    session = Session(Run.open(path))
    last = Run.open(path).passes(0).last or 0
    rids = [row["rid"] for row in Run.open(path).rows("requests")]
    for number in range(last):
        session.scene(0, number, session.page(0, number))
        session.life(0, rids[number % len(rids)])
    assert last > PAGES
    assert (len(session._pages), len(session._lives), len(session._walkers[0]._kept)) == (PAGES, LIVES, MOMENTS)
    runs = (session._reach_run, session._page_run, session._life_run, session._walk_run)
    assert {id(run._files) for run in runs} == {id(session._files)}


def test_a_request_that_the_other_run_does_not_know_leaves_the_time(path: Path, tmp_path: Path) -> None:
    other = simulated(tmp_path, seed=3, requests=20)
    here, there = Session(Run.open(path)), Session(Run.open(other))
    begun = [row["start_ns"] for row in Run.open(path).rows("steps") if row["pass"] is not None]
    begun_there = [row["start_ns"] for row in Run.open(other).rows("steps") if row["pass"] is not None]
    for number in (0, 7, BUSY):
        facts = here.page(0, number).facts
        found = counterpart(here, facts, "nobody", there)
        since_ns = begun[number] - begun[0]
        assert begun_there[found.number] - begun_there[0] <= since_ns
        if found.number + 1 < len(begun_there):
            assert begun_there[found.number + 1] - begun_there[0] > since_ns
        assert found.words.startswith("also ")


def test_the_same_run_is_its_own_counterpart(path: Path) -> None:
    here, there = Session(Run.open(path)), Session(Run.open(path))
    for number in range(Run.open(path).passes(0).count):
        facts = here.page(0, number).facts
        assert counterpart(here, facts, None, there)[:2] == (0, number)
        for candidate in here.page(0, number).candidates[:3]:
            assert counterpart(here, facts, candidate.rid, there)[:2] == (0, number)


def test_the_passes_of_a_request_are_the_same_before_and_after_it_was_looked_at(tmp_path: Path) -> None:
    sampled = Detail(level="decisions", sample=5)
    path = record(tmp_path, SchedulerConfig(schedule_policy="lpm", **TIGHT), seed=3, requests=40, detail=sampled)
    rids = [row["rid"] for row in Run.open(path).rows("requests")]
    session, other = Session(Run.open(path)), Session(Run.open(path))
    assert [session.passes_of(0, rid) for rid in rids] == [other.life(0, rid).passes for rid in rids]
    decided = {row["rid"] for row in Run.open(path).rows("decisions")}
    assert decided < set(rids), "some of them only did something between two recorded decisions"
