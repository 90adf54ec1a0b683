"""The running batch notes what happens to all of its requests at once; whoever looks sees each up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.engine.chance import RandomState
from schedscope.engine.decision import Plan
from schedscope.engine.live import Live
from schedscope.engine.request import Request
from schedscope.engine.running import RunningBatch
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import StepRecord, Tracer
from schedscope.engine.view import Running, View
from schedscope.recorder.run import Run
from schedscope.replay.rebuild import Rebuild
from schedscope.replay.replayer import Replayer
from schedscope.replay.script import read_scripts
from simulation import any_config, record


def test_a_commit_takes_a_token_for_each() -> None:
    lives = [Live(Request(rid=rid, prompt=b""), 0) for rid in "abc"]
    batch = RunningBatch(lives)
    sampled = [1, 2, 3]
    batch.take(sampled)
    sampled[:] = [7, 8, 9]
    with pytest.raises(ValueError, match="2 tokens for 3 requests"):
        batch.take([4, 5])
    with pytest.raises(OverflowError):
        batch.take([4, 5, 2**31])
    assert [list(live.said) for live in batch.lives] == [[1], [2], [3]]


class Views(Tracer):
    """Keeps what each pass could read of the running batch, looked at in time or only at the end."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._kept: list[View] = []

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        del number, plan, random_state
        if self._at_once:
            list(view.running)
        self._kept.append(view)

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        if self._at_once:
            for live in state.running:
                assert len(live.row) == live.kv_len
                assert len(live.tokens) == 4 * live.length
            if record.batch is not None:
                assert record.batch.computed == sum(member.end - member.start for member in record.batch.members)
                assert all(member.end <= len(member.live.row) for member in record.batch.members)

    @property
    def seen(self) -> list[list[tuple[object, ...]]]:
        return [[_facts(each) for each in view.running] for view in self._kept]


def _facts(running: Running) -> tuple[object, ...]:
    lock = None if running.lock is None else (running.lock.id, running.lock.end)
    return (*running[:-1], lock)


def rerun(run: Run, tracer: Tracer) -> None:
    """A re-run looks at single requests only where it must."""
    replayer = Replayer(run, 0)
    rebuild = Rebuild(Scheduler(replayer.config, tracer))
    for part in replayer.parts:
        for script in read_scripts(part):
            for turn in rebuild.turns(script):
                rebuild.take(turn, script)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_who_looks_late_sees_what_was_there(tmp_path: Path, overlap: bool) -> None:
    running = 0
    for seed in range(25):
        config = any_config(seed).replace(disable_overlap_schedule=not overlap)
        run = Run.open(record(tmp_path / str(seed), config, seed=seed, requests=30))
        early, late = Views(at_once=True), Views(at_once=False)
        rerun(run, early)
        rerun(run, late)
        assert early.seen == late.seen
        running += sum(map(len, late.seen))
    assert running > 1000
