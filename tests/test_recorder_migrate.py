"""Runs of older versions: read, replayed and merged as if they had been written today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from schedscope.recorder.compact import MergeLimits, tidy
from schedscope.recorder.journal import read_journal
from schedscope.recorder.manifest import read_manifest
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.run import Run
from schedscope.recorder.schema import SCHEMA_VERSION, TABLES
from schedscope.recorder.segment import write_segment
from schedscope.replay.verify import verify

VERSION_1 = Path(__file__).parent / "data" / "run-v1"


def test_a_run_of_version_1_is_read_and_replays() -> None:
    assert read_manifest(VERSION_1).version == 1 < SCHEMA_VERSION
    run = Run.open(VERSION_1)
    assert run.status == "interrupted"
    assert (run.passes(0).first, run.passes(0).last) == (0, 18)
    verdict = verify(run, 0)
    assert verdict.divergence is None
    assert (verdict.passes, verdict.decisions) == (19, 100)


def test_keys_are_those_that_were_recorded_without_what_they_repeat() -> None:
    rows = list(Run.open(VERSION_1).rows("decisions", 0))
    assert {row["key_names"] for row in rows} == {"negative_ratio", None}
    file = VERSION_1 / "rank=0" / "00000000.p0-14" / "decisions.parquet"
    for old, new in zip(pq.read_table(file, partitioning=None).to_pylist(), rows, strict=False):
        assert {**old, "key": new["key"], "key_names": new["key_names"]} == new
        if old["key"] is not None:
            assert json.loads(old["key"]) == [*json.loads(new["key"]), old["rid"], old["place_before"]]


def test_look_ups_and_sql_see_the_upgraded_rows() -> None:
    run = Run.open(VERSION_1)
    rows = {name: list(run.rows(name, 0)) for name in TABLES}
    for number in (0, 7, 14, 15, 18):
        found = run.pass_rows(0, number)
        assert found["decisions"] == [row for row in rows["decisions"] if row["pass"] == number]
        assert found["passes"] == [row for row in rows["passes"] if row["pass"] == number]
    for rid in ("r1", "r9", "r18"):
        assert run.request_rows(rid)["decisions"] == [row for row in rows["decisions"] if row["rid"] == rid]
    connection = run.connect()
    for name in TABLES:
        relation = connection.sql(f"SELECT * FROM {name}")
        assert relation.to_arrow_table().to_pylist() == rows[name]


def test_merging_and_sealing_make_them_new(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(VERSION_1, copy)
    rows = {name: list(Run.open(copy).rows(name, 0)) for name in TABLES}
    (journal,) = (copy / "rank=0").glob("*.journal")
    write_segment(read_journal(journal))
    assert {name: list(Run.open(copy).rows(name, 0)) for name in TABLES} == rows
    tidy(copy / "rank=0", MergeLimits(), 0.0, final=True)
    (segment,) = list_segments(copy, 0)
    assert segment.index.version == SCHEMA_VERSION
    assert {name: list(Run.open(copy).rows(name, 0)) for name in TABLES} == rows
    query = f"SELECT count(*), min(key) FROM '{segment.path}/decisions.parquet'"
    assert duckdb.connect().execute(query).fetchall() == [(100, '["inf"]')]


@pytest.mark.parametrize("table", TABLES)
def test_files_of_version_1_have_its_columns(table: str) -> None:
    (segment,) = list_segments(VERSION_1, 0)
    if segment.count(table):
        assert segment.read(TABLES[table]).schema.equals(TABLES[table].arrow)
