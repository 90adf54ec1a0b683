"""Runs in which little or nothing happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.cli.main import main
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunNotFoundError
from schedscope.recorder.companion import Companion
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.sink import open_sink
from schedscope.replay.follow import follow
from schedscope.replay.replayer import Replayer
from schedscope.replay.verify import verify
from simulation import Workload, record

COMMANDS = [
    ["replay", "all"],
    ["inspect"],
    ["query", "select count(*) from passes"],
    ["replay", "pass", "0"],
    ["doctor"],
]


def run_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    codes = []
    for command in COMMANDS:
        words = [*command, str(path)] if command == ["inspect"] else [*command, "--run", str(path)]
        codes.append(main(words))
        assert "Traceback" not in capsys.readouterr().err
    return codes


def test_a_server_that_got_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = create_run(tmp_path)
    described = Description(source=Source("engine", "1"), config=SchedulerConfig().to_dict())
    with Companion.start(run_dir, follow=follow()) as companion:
        sink = open_sink(0, described, environ=companion.environment())
        assert sink is not None
        assert run_commands(run_dir, capsys) == [0, 0, 0, 5, 5], "live"
        sink.close()
    assert run_commands(run_dir, capsys) == [0, 0, 0, 5, 5]


def test_a_part_that_holds_the_end_only(tmp_path: Path) -> None:
    path = record(tmp_path, SchedulerConfig(), seed=1, requests=3, limits=Limits(passes=1))
    assert verify(Run.open(path), 0).passes == Run.open(path).passes(0).count


@pytest.mark.parametrize(
    ("detail", "why"), [(Detail(level="steps"), "level steps"), (Detail(tokens="none"), "--tokens none")]
)
def test_what_cannot_be_re_run_is_said(
    tmp_path: Path, detail: Detail, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path, SchedulerConfig(), seed=1, requests=3, detail=detail)
    for command in (["replay", "all"], ["replay", "pass", "0"]):
        assert main([*command, "--run", str(path)]) == 6
        assert f"it was recorded {'at' if 'level' in why else 'with'} {why}, so nothing" in capsys.readouterr().err


def test_a_pass_whose_step_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a kill in the midst of a forward leaves it."""
    from test_following import scheduler_of

    run_dir = create_run(tmp_path)
    with Companion.start(run_dir, Options(), follow()) as companion:
        scheduler, _ = scheduler_of(companion)
        workload = Workload(3)
        for number in range(2):
            scheduler.arrive(workload.request(), float(number))
            step = scheduler.step(float(number))
            assert step.batch is not None
            if not number:
                sampled = [None if member.unfinished else 7 for member in step.batch.members]
                scheduler.commit(step.batch, sampled, {}, 0.5)
        run = Run.open(run_dir)
        assert run.passes(0).last == 1
        found = verify(run, 0)
        assert (found.passes, found.open_pass, found.divergence) == (1, 1, None)
        visited = Replayer(run, 0).visit([0, 1, 2])
        assert [next(visited).number, next(visited).number] == [0, 1]
        with pytest.raises(RunNotFoundError, match="no pass 2 on rank 0"):
            next(visited)
        assert main(["replay", "all", "--run", str(run_dir)]) == 0
        assert "pass 1 is not among them: its step has not ended" in capsys.readouterr().out
        assert main(["replay", "pass", "1", "--run", str(run_dir), "--json"]) == 0
        assert '"pass": 1' in capsys.readouterr().out
