"""A run on disk: sealing, reading, looking up, and saying what is wrong with it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest
from rows import stamp
from schedscope.engine.errors import RunFormatError, RunNotFoundError, UsageError
from schedscope.recorder import rank_log
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.frame import Body, encode, parse_header
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.journal import JournalTail, read_journal
from schedscope.recorder.lock import hold, is_held
from schedscope.recorder.manifest import create_run, read_manifest
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits, RankLog
from schedscope.recorder.run import Run
from schedscope.recorder.runs import default_log_dir, find_runs, resolve_run
from schedscope.recorder.schema import SCHEMA_VERSION, TABLES
from schedscope.recorder.segment import Segment, write_segment

FILLING: dict[str, Any] = {
    "int32": 0,
    "int64": 0,
    "double": 0.0,
    "bool": False,
    "string": "",
    "list": [],
    "binary": b"",
}
DECISIONS = 3
SMALL = Limits(passes=10)


def row(table: str, **given: Any) -> tuple[Any, ...]:
    columns = TABLES[table].row
    filled = {c.name: None if c.null else FILLING[str(c.type).partition("<")[0]] for c in columns}
    assert given.keys() <= filled.keys()
    return tuple((filled | given).values())


def pass_frame(number: int) -> Body:
    rows = {
        "passes": [row("passes", seq=2 * number, now=number / 8, **{"pass": number})],
        "decisions": [row("decisions", rid=f"r{number}-{i}", **{"pass": number}) for i in range(DECISIONS)],
        "steps": [row("steps", step=number, **{"pass": number})],
    }
    if number % 2:
        rows["requests"] = [row("requests", rid=f"r{number}-0", prompt_tokens=number)]
    return encode(rows)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run(tmp_path / "logs", "demo", command=["serve", "--x"])


def record(run_dir: Path, passes: range, rank: int = 0, limits: Limits = SMALL) -> DirectSink:
    sink = DirectSink(run_dir, rank, Description(source=Source("engine", "1"), config={"rank": 0}), limits)
    for number in passes:
        sink.write(pass_frame(number))
    return sink


def numbers(run: Run, rank: int | None = 0) -> list[int]:
    found: list[int] = run.table("passes", rank, ["pass"])["pass"].to_pylist()
    return found


# ---- writing and reading -------------------------------------------------------------------------------------


def test_a_run_can_be_read_while_it_grows_and_when_sealed(run_dir: Path) -> None:
    run = Run.open(run_dir)
    assert run.status == "interrupted"  # no one records yet
    assert run.table("passes").num_rows == 0
    assert run.table("passes").schema.equals(TABLES["passes"].arrow)
    sink = record(run_dir, range(0))
    assert run.status == "recording"
    assert run.passes(0).count == 0
    for number in range(25):
        sink.write(pass_frame(number))
        assert numbers(run) == list(range(number + 1))
        assert run.passes(0).last == number
    assert [segment.path.name for segment in list_segments(run_dir, 0)] == ["00000000.p0-9", "00000001.p10-19"]
    assert (run.status, run.gaps, run.manifest.totals) == ("recording", [], {})
    sink.close()
    sink.close()
    assert (run.status, run.gaps) == ("sealed", [])
    assert run.manifest.totals["0"] == dict.fromkeys(TABLES, 0) | {
        "passes": 25,
        "decisions": 75,
        "steps": 25,
        "requests": 12,
    }
    assert not list(run_dir.rglob("*.journal")) + list(run_dir.rglob(".*"))
    assert numbers(run) == list(range(25))
    passes = run.passes(0)
    assert (passes.count, passes.first, passes.last) == (25, 0, 24)


def test_rows_are_the_same_from_journal_and_segment(run_dir: Path) -> None:
    sink = record(run_dir, range(5), limits=Limits())
    run = Run.open(run_dir)
    tail = {name: list(run.rows(name, 0)) for name in TABLES}
    table = run.table("decisions", columns=["rid", "pass"])
    sink.close()
    assert {name: list(run.rows(name, 0)) for name in TABLES} == tail
    assert run.table("decisions", columns=["rid", "pass"]).equals(table)
    assert table.column_names == ["rid", "pass"]
    assert tail["requests"][1]["prompt_tokens"] == 3
    assert tail["passes"][0].keys() == set(TABLES["passes"].names)


def test_the_rows_of_a_pass_come_from_its_segment_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = record(run_dir, range(35))
    run = Run.open(run_dir)
    opened: list[str] = []
    real = Segment.read_pass

    def read_pass(self: Segment, table: Any, number: int) -> Any:
        opened.append(self.path.name)
        return real(self, table, number)

    monkeypatch.setattr(Segment, "read_pass", read_pass)
    for number in (0, 9, 17, 29, 34):
        found = run.pass_rows(0, number)
        assert {r["pass"] for rows in found.values() for r in rows} == {number}
        assert {name: len(rows) for name, rows in found.items()} == {
            "passes": 1,
            "decisions": DECISIONS,
            "steps": 1,
            "events": 0,
        }
        assert found["decisions"][1] == {r["rid"]: r for r in run.rows("decisions")}[f"r{number}-1"]
    assert set(opened) == {"00000000.p0-9", "00000001.p10-19", "00000002.p20-29"}
    sink.close()
    for number in (-1, 35):
        with pytest.raises(RunNotFoundError, match=f"no pass {number} of rank 0 in run .*: it has passes 0 to 34$"):
            run.pass_rows(0, number)
    with pytest.raises(RunNotFoundError, match=r"no rank 3 in run .*; it has: 0"):
        run.pass_rows(3, 0)


def test_a_pass_whose_step_is_in_the_next_segment_is_whole(run_dir: Path) -> None:
    sink = DirectSink(run_dir, 0, limits=Limits(passes=1))
    for number in range(4):
        sink.write(encode({"passes": [row("passes", **{"pass": number})]}))
        sink.write(encode({"steps": [row("steps", step=number, **{"pass": number})]}))
        assert len(Run.open(run_dir).pass_rows(0, number)["steps"]) == 1
    sink.close()
    run = Run.open(run_dir)
    for number in range(4):
        assert [r["step"] for r in run.pass_rows(0, number)["steps"]] == [number]


def test_sql_sees_segments_and_tail_as_one(run_dir: Path) -> None:
    sinks = [record(run_dir, range(15), rank) for rank in (0, 2)]
    run = Run.open(run_dir)
    query = "SELECT rank, count(*), max(now) FROM passes JOIN decisions USING (rank, pass) GROUP BY rank ORDER BY rank"
    connection = run.connect()
    expected = [(0, 15 * DECISIONS, 14 / 8), (2, 15 * DECISIONS, 14 / 8)]
    assert connection.execute(query).fetchall() == expected
    sinks[0].write(pass_frame(15))
    assert connection.execute(query).fetchall() == expected
    for sink in sinks:
        sink.close()
    assert run.connect().execute("SELECT count(*) FROM passes").fetchall() == [(31,)]
    for name, table in TABLES.items():
        connection = run.connect()
        assert [column[0] for column in connection.execute(f"SELECT * FROM {name}").description] == list(table.names)
    assert numbers(run, None) == [*range(16), *range(15)]


def test_other_readers_of_parquet_can_read_it(run_dir: Path) -> None:
    record(run_dir, range(25)).close()
    query = f"SELECT count(*) FROM read_parquet('{run_dir}/rank=*/*.p*/passes.parquet', hive_partitioning=false)"
    assert duckdb.connect().execute(query).fetchall() == [(25,)]


def test_old_and_big_journals_are_sealed_too(run_dir: Path) -> None:
    now = [0.0]
    sealed: list[Path] = []
    log = RankLog(run_dir, 0, sealed.append, Limits(seconds=60), clock=lambda: now[0])
    log.tick()
    now[0] = 100
    log.tick()
    assert sealed == []  # nothing to seal
    frame = stamp(pass_frame(0), 0)
    log.append(parse_header(frame), frame)
    now[0] = 159
    log.tick()
    assert sealed == []  # its first frame is younger than 60 s
    now[0] = 160
    log.tick()
    assert [path.name for path in sealed] == ["00000000.journal"]
    log.close()
    log.release()
    shutil.rmtree(run_dir / "rank=0")
    record(run_dir, range(20), limits=Limits(size=2_000)).close()
    ranges = [(s.first_pass, s.last_pass) for s in list_segments(run_dir, 0)]
    assert len(ranges) > 2
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges) if before[1] is not None)


def test_ranks_describe_themselves(run_dir: Path) -> None:
    source = Source("engine", "0.1.0")
    first = DirectSink(run_dir, 0, Description(source=source, config={"policy": "lpm", "sizes": (1, 2)}, model="m"))
    same = DirectSink(run_dir, 1, Description(source=source, config={"policy": "lpm", "sizes": (1, 2)}, model="m"))
    other = DirectSink(
        run_dir, 2, Description(source=source, config={"policy": "fcfs", "odd": {1, 2} - {2}}, model="m")
    )
    manifest = read_manifest(run_dir)
    assert (manifest.source, manifest.model, manifest.ranks) == (source, "m", [0, 1, 2])
    assert manifest.config_of(1) == {"policy": "lpm", "sizes": [1, 2]}
    assert manifest.config_of(2) == {"policy": "fcfs", "odd": [1]}
    assert list(manifest.rank_configs) == ["2"]
    first.close()
    same.close()
    assert Run.open(run_dir).status == "recording"
    other.close()
    manifest = read_manifest(run_dir)
    assert (manifest.status, manifest.command, manifest.name) == ("sealed", ["serve", "--x"], "demo")
    plain = json.loads((run_dir / "manifest.json").read_text())
    assert (plain["schema"], plain["version"]) == ("schedscope.run", SCHEMA_VERSION)
    assert (plain["gaps"], plain["source_gaps"]) == ([], [])


def test_a_rank_is_recorded_once(run_dir: Path) -> None:
    sink = record(run_dir, range(1))
    with pytest.raises(FileExistsError, match="another process records this rank"):
        DirectSink(run_dir, 0)
    sink.close()
    with pytest.raises(FileExistsError, match="recorded already"):
        DirectSink(run_dir, 0)
    with pytest.raises(RunNotFoundError, match="no manifest"):
        DirectSink(run_dir / "nothing", 0)


def test_a_failure_detaches_once_and_never_raises(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = record(run_dir, range(3))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "schedscope.recorder"):
        patch.setattr(os, "write", fail)
        for number in range(3, 6):
            sink.write(pass_frame(number))
    assert not sink.attached
    sink.write(pass_frame(6))
    sink.close()
    assert len(caplog.records) == 1
    assert "recording of rank 0 ended at frame 3" in caplog.text
    run = Run.open(run_dir)
    assert (numbers(run), run.status) == ([0, 1, 2], "interrupted")
    assert [(gap.reason, gap.after_pass) for gap in run.gaps] == [("interrupted", 2)]


def test_what_cannot_be_sealed_stays_readable(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(rank_log, "write_segment", fail)
    record(run_dir, range(25)).close()
    assert len(list(run_dir.rglob("*.journal"))) == 3
    run = Run.open(run_dir)
    assert (numbers(run), run.status, run.passes(0).count, run.gaps) == (list(range(25)), "sealed", 25, [])
    assert len(run.pass_rows(0, 3)["decisions"]) == DECISIONS


# ---- consistency and damage ----------------------------------------------------------------------------------


def test_no_row_is_doubled_or_missing_at_any_point_of_sealing(run_dir: Path) -> None:
    sink = record(run_dir, range(15))
    (path,) = (run_dir / "rank=0").glob("*.journal")
    content = path.read_bytes()
    (path.parent / ".00000001.tmp").mkdir()  # a seal that was killed
    (path.parent / ".00000001.tmp" / "passes.parquet").write_bytes(b"PAR1")
    run = Run.open(run_dir)
    assert numbers(run) == list(range(15))
    write_segment(read_journal(path))
    assert numbers(run) == list(range(15))
    path.write_bytes(content)  # killed before the journal was removed
    assert numbers(run) == list(range(15))
    assert run.connect().execute("SELECT count(*), count(DISTINCT pass) FROM passes").fetchall() == [(15, 15)]
    del sink


def test_a_reader_follows_a_journal_that_is_sealed_under_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = record(run_dir, range(15))
    run = Run.open(run_dir)

    def seal_first(tail: JournalTail) -> Any:
        monkeypatch.undo()
        write_segment(read_journal(tail.path))
        return tail.look()

    monkeypatch.setattr(JournalTail, "look", seal_first)
    assert numbers(run) == list(range(15))
    del sink


def test_a_missing_segment_is_a_gap(run_dir: Path) -> None:
    sink = record(run_dir, range(45))
    shutil.rmtree(run_dir / "rank=0" / "00000000.p0-9")
    shutil.rmtree(run_dir / "rank=0" / "00000002.p20-29")
    run = Run.open(run_dir)
    assert [(g.reason, g.frame, g.frames, g.after_pass, g.before_pass) for g in run.gaps] == [
        ("lost", 0, 10, None, 10),
        ("lost", 20, 10, 19, 30),
    ]
    with pytest.raises(RunNotFoundError, match=r"passes 10 to 44; the pass may have been lost \(lost\)"):
        run.pass_rows(0, 25)
    assert sink.attached


def test_a_damaged_frame_is_a_gap_and_everything_else_is_read(run_dir: Path) -> None:
    sink = record(run_dir, range(15))
    (path,) = (run_dir / "rank=0").glob("*.journal")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    run = Run.open(run_dir)
    (gap,) = run.gaps
    assert (gap.reason, gap.frames) == ("corrupt", 1)
    assert gap.after_pass is not None
    lost = gap.after_pass + 1
    assert gap.before_pass == lost + 1
    assert numbers(run) == [n for n in range(15) if n != lost]
    sink.close()
    assert Run.open(run_dir).gaps == [gap]
    assert numbers(Run.open(run_dir)) == [n for n in range(15) if n != lost]


def test_unreadable_files_are_named(run_dir: Path) -> None:
    record(run_dir, range(25)).close()
    run = Run.open(run_dir)
    segment = run_dir / "rank=0" / "00000001.p10-19"
    file = segment / "passes.parquet"
    whole = file.read_bytes()
    for content, problem in (
        (whole[: len(whole) // 2], "damaged: it has"),
        (b"", "damaged: it has 0 bytes"),
        ((segment / "steps.parquet").read_bytes(), "damaged: it has"),
    ):
        file.write_bytes(content)
        with pytest.raises(RunFormatError, match=rf"p10-19/passes\.parquet: {problem}"):
            run.table("passes")
        with pytest.raises(RunFormatError, match=rf"p10-19/passes\.parquet: {problem}"):
            run.pass_rows(0, 12)
        file.unlink()
        with pytest.raises(RunFormatError, match=r"p10-19/passes\.parquet: .*there is no such file"):
            run.table("passes")
    file.write_bytes(whole)
    assert len(run.pass_rows(0, 12)["passes"]) == 1
    (segment / "index.json").write_text("{")
    with pytest.raises(RunFormatError, match=r"index\.json: not the index of a segment"):
        Run.open(run_dir).table("passes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not the manifest of a schedscope run"),
        (b'{"schema": "schedscope.run", "ver', "not the manifest of a schedscope run"),
        (b"[1, 2]", "not the manifest of a schedscope run"),
        (b'{"name": "some package", "version": "1.0.0"}', "not the manifest of a schedscope run"),
        (b'{"schema": "other.thing", "version": 1}', "a manifest of 'other.thing'"),
        (b'{"schema": "schedscope.run", "version": 1, "name": 5}', r"Expected `str`, got `int` - at `\$.name`"),
        (
            b'{"schema": "schedscope.run", "version": 3, "schedscope": "9.1.0"}',
            r"log version 3, written by schedscope 9\.1\.0; this one, .*, reads up to version 2: "
            r"upgrade to schedscope>=9\.1\.0",
        ),
    ],
)
def test_foreign_and_newer_manifests_are_refused(run_dir: Path, content: bytes, message: str) -> None:
    (run_dir / "manifest.json").write_bytes(content)
    with pytest.raises(RunFormatError, match=rf"manifest\.json: .*{message}"):
        Run.open(run_dir)
    (info,) = find_runs(run_dir.parent)
    assert (info.status, info.name) == ("unreadable", run_dir.name)
    assert info.problem is not None
    assert "manifest.json" in info.problem


def test_unknown_names_are_refused_with_the_known_ones(run_dir: Path) -> None:
    run = Run.open(run_dir)
    with pytest.raises(UsageError, match="no table 'pass'; there are: steps, passes"):
        run.table("pass")
    with pytest.raises(UsageError, match="no column 'size' in steps; there are: rank, step"):
        run.table("steps", columns=["size"])
    with pytest.raises(UsageError):
        run.rows("nothing")
    with pytest.raises(RunNotFoundError, match=r"no rank 0 in run .*; it has: none yet"):
        run.rows("steps", 0)


# ---- many runs -----------------------------------------------------------------------------------------------


def test_directories_of_runs_have_unique_dated_names(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 16, 25, 7, tzinfo=UTC).astimezone()
    names = [create_run(tmp_path, "a b/../ü", now=now).name for _ in range(3)]
    assert names == ["20260131-162507-a-b", "20260131-162507-a-b-2", "20260131-162507-a-b-3"]
    assert create_run(tmp_path, "/", now=now).name == "20260131-162507-run"
    assert read_manifest(tmp_path / names[0]).created == "2026-01-31T16:25:07.000Z"
    odd = create_run(tmp_path, command=["serve", "\udcff"])
    assert read_manifest(odd).command == ["serve", "\\udcff"]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't create a run in"):
        create_run(tmp_path / "file")


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "none") == []
    now = datetime(2026, 1, 31, tzinfo=UTC)
    paths = [create_run(tmp_path, name, now=now + timedelta(days=i)) for i, name in enumerate("abc")]
    record(paths[0], range(25), 0).close()
    live = [record(paths[1], range(15), rank) for rank in (0, 1)]
    (tmp_path / "something else").mkdir()
    found = find_runs(tmp_path)
    assert [(r.name, r.status, r.ranks, r.passes, r.requests) for r in found] == [
        ("c", "interrupted", 0, 0, 0),
        ("b", "recording", 2, 30, 14),
        ("a", "sealed", 1, 25, 12),
    ]
    assert [r.path for r in found] == paths[::-1]
    assert found[2].bytes == sum(f.stat().st_size for f in paths[0].rglob("*") if f.is_file())
    for sink in live:
        sink.close()


def test_a_run_is_found_by_path_by_name_or_as_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCHEDSCOPE_LOG_DIR", raising=False)
    assert default_log_dir() == Path("schedscope-logs")
    with pytest.raises(RunNotFoundError, match=r"no run in schedscope-logs; record one with"):
        resolve_run()
    with pytest.raises(RunNotFoundError, match=r"no run 'x': .* in schedscope-logs, which has no run"):
        resolve_run("x")
    now = datetime(2026, 1, 31, tzinfo=UTC)
    names = ["same", "same", "third", "4", "5", "6", "7"]
    paths = [create_run("schedscope-logs", name, now=now + timedelta(days=i)) for i, name in enumerate(names)]
    assert resolve_run() == paths[-1]
    assert resolve_run("same") == paths[1]
    assert resolve_run(paths[0].name) == paths[0]
    assert resolve_run(paths[0]) == resolve_run(str(paths[0])) == paths[0]
    with pytest.raises(RunNotFoundError, match=r"which has 20260206-000000-7, .* and 2 more"):
        resolve_run("nope")
    elsewhere = create_run(tmp_path / "other", "elsewhere")
    monkeypatch.setenv("SCHEDSCOPE_LOG_DIR", str(tmp_path / "other"))
    assert resolve_run() == resolve_run("elsewhere") == elsewhere
    assert [run.name for run in find_runs()] == ["elsewhere"]


def test_locks_tell_who_is_there(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    assert not is_held(tmp_path / "none")
    lock = hold(tmp_path)
    assert lock is not None
    assert is_held(tmp_path)
    assert hold(tmp_path, 0.01) is None
    lock.release()
    lock.release()
    assert not is_held(tmp_path)
