"""The parts of a run: in order, each readable for as long as someone holds it, and only those that are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunNotFoundError
from schedscope.recorder.compact import tidy
from schedscope.recorder.files import Within
from schedscope.recorder.listing import Directory
from schedscope.recorder.rank_files import list_segments, read_parts
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from simulation import record as simulate
from test_recorder_run import DECISIONS, SMALL, record, run_dir

__all__ = ["run_dir"]


def test_parts_hold_all_rows_in_recorded_order(run_dir: Path) -> None:
    sink = record(run_dir, range(35))
    run = Run.open(run_dir)
    parts = run.parts(0)
    assert [(part.first_pass, part.last_pass) for part in parts] == [(0, 9), (10, 19), (20, 29), (30, 34)]
    for name in TABLES:
        assert [row for part in parts for row in part.table(name).to_pylist()] == list(run.rows(name, 0))
    assert parts[1].table("decisions", ["rid", "pass"]).column_names == ["rid", "pass"]
    sink.close()
    assert parts[3].table("passes")["pass"].to_pylist() == [30, 31, 32, 33, 34], "sealed meanwhile"
    with pytest.raises(RunNotFoundError):
        run.parts(1)


@pytest.mark.parametrize("passes", [(0, 34), (12, 12), (9, 10), (15, 31), (30, 99), (-5, -1), (40, 50)])
def test_a_table_of_some_passes(run_dir: Path, passes: tuple[int, int]) -> None:
    sink = record(run_dir, range(35))
    run = Run.open(run_dir)
    wanted = [number for number in range(35) if passes[0] <= number <= passes[1]]
    assert run.table("passes", 0, ["pass"], passes)["pass"].to_pylist() == wanted
    decisions = run.table("decisions", 0, ["rid"], passes=passes)
    assert decisions["rid"].to_pylist() == [f"r{number}-{i}" for number in wanted for i in range(DECISIONS)]
    steps = run.table("steps", 0, passes=passes)["pass"].to_pylist()
    reached = {number // SMALL.passes for number in wanted}
    assert steps == [number for number in range(35) if number // SMALL.passes in reached], "whole parts"
    sink.close()


@pytest.mark.parametrize("merged", [False, True])
def test_a_table_of_some_ticks(tmp_path: Path, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("events", "tokens", "steps"):
        monkeypatch.setitem(TABLES, name, replace(TABLES[name], row_group=20))
    config = SchedulerConfig(max_total_tokens=600)
    path = simulate(tmp_path, config, seed=2, requests=40, checkpoint_every=10, limits=Limits(passes=12))
    if merged:
        tidy(path / "rank=0", grace_s=0.0, final=True)
    assert (len(list_segments(path, 0)) == 1) == merged
    run = Run.open(path)
    for name in ("events", "tokens", "steps", "passes", "checkpoints"):
        rows = list(run.rows(name, 0))
        for ticks in ((0, 50), (77, 77), (300, 420), (10**6, 10**7)):
            wanted = [row for row in rows if ticks[0] <= row["seq"] <= ticks[1]]
            within = Within("seq", *ticks)
            found = [row for part in run.parts(0) for row in part.table(name, None, within).to_pylist()]
            assert found == wanted
            steps = [row for part in run.parts(0) for row in part.table(name, ["step"], within).to_pylist()]
            assert steps == [{"step": row["step"]} for row in wanted]
            chunks = [chunk for part in run.parts(0) for chunk in part.chunks(name, ["step"], within)]
            assert [row for chunk in chunks for row in chunk.to_pylist()] == steps


def test_a_table_is_the_same_where_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "decisions", replace(TABLES["decisions"], row_group=20))
    path = simulate(tmp_path, SchedulerConfig(max_total_tokens=600), seed=2, requests=40)
    run = Run.open(path)
    rows = run.request_rows(run.table("requests", 0, ["rid"])["rid"][20].as_py(), 0)["decisions"]
    for first, last in ((0, 10**6), (rows[0]["pass"], rows[-1]["pass"]), (rows[-1]["pass"] + 1, 10**6)):
        for columns in (None, ["rid", "reason"]):
            kept, read = (each.table("decisions", 0, columns, (first, last)) for each in (run, Run.open(path)))
            assert kept.equals(read)
    assert run.table("decisions", 0).equals(Run.open(path).table("decisions", 0))


def test_foreign_files_are_left_out(run_dir: Path) -> None:
    record(run_dir, range(25)).close()
    rank = run_dir / "rank=0"
    before = Directory(rank).look()
    for name in (
        "00000001.p10-19.bak",
        "0000001.p10-19",
        "x00000001.p10-19",
        "00000009.journal.gz",
        "a\n00000009.p1-2",
    ):
        (rank / name).mkdir()
    (rank / ".00000007.tmp").mkdir()
    (rank / "notes.txt").write_text("?")
    (run_dir / "rank=x").mkdir()
    assert Directory(rank).look() == before
    assert Run.open(run_dir).table("passes").num_rows == 25


def test_ten_thousand_segments(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / "rank=0" / f"{number:08d}.p{10 * number}-{10 * number + 9}").mkdir(parents=True)
    parts = read_parts(tmp_path, 0)
    assert [part.first_pass for part in parts] == list(range(0, 100_000, 10))
    assert [part.first_pass for part in parts.of_passes(5005, 5025)] == [5000, 5010, 5020]


def test_numbers_of_nine_digits_come_behind_those_of_eight(tmp_path: Path) -> None:
    for number in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        (tmp_path / f"{number}.p").mkdir()
    (tmp_path / "99999998-100000000.p").mkdir()
    listing = Directory(tmp_path).look()
    assert listing.segments == ("99999998-100000000.p", "100000001.p")
    assert listing.merged == ("99999998.p", "99999999.p", "100000000.p")
