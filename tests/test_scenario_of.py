"""Recorded passes as scenarios: they come to the recorded decision, without a token of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.run import Run
from schedscope.replay.replayer import Replayer
from schedscope.replay.scenario import read_scenarios
from schedscope.replay.scenario_check import check
from schedscope.replay.scenario_of import scenario_of
from schedscope.replay.walker import Walker
from simulation import record

ROOMY = SchedulerConfig(schedule_policy="lpm", max_total_tokens=100_000, max_running_requests=6, page_size=4)


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "hrrn", "shortest-prefill-first", "dfs-weight", "lof"])
def test_a_pass_as_a_scenario_comes_to_the_recorded_decision(tmp_path: Path, policy: str) -> None:
    run = Run.open(record(tmp_path, ROOMY.replace(schedule_policy=policy), seed=3, requests=40))
    walker = Walker(run, 0)
    made = [scenario_of(walker.at(number).moment, f"p{number}") for number in range(run.passes(0).count)]
    assert made
    exact = [scene for scene in made if scene.differs is None]
    assert len(exact) >= 0.9 * len(made), [scene.differs for scene in made if scene.differs]
    for scene in made:
        assert ("reason" in scene.document) == (scene.differs is not None)


def test_its_file_is_read_and_checked_like_any_other(tmp_path: Path) -> None:
    run = Run.open(record(tmp_path, ROOMY, seed=3, requests=40))
    number = max(run.rows("passes"), key=lambda row: row["queue_len"])["pass"]
    scene = scenario_of(Replayer(run, 0).at(number), "busiest")
    file = tmp_path / "busiest.yaml"
    file.write_text(scene.to_yaml())
    (placed,) = read_scenarios([file])
    assert not check(placed).differences
    assert len(placed.scenario.waiting_queue) > 3
