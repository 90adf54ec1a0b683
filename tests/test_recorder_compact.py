"""Merging segments: nothing is missing or doubled, whoever reads meanwhile and whenever it is killed."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import stamp
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.compact import MergeLimits, choose, compact, merge, tidy
from schedscope.recorder.companion import Companion
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.files import Within
from schedscope.recorder.frame import encode
from schedscope.recorder.journal import JournalWriter, read_journal
from schedscope.recorder.options import Options
from schedscope.recorder.rank_files import list_segments, read_parts
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import write_segment
from schedscope.recorder.sink import open_sink
from test_recorder_run import DECISIONS, numbers, pass_frame, record, row, run_dir

__all__ = ["run_dir"]

ALL = MergeLimits(fan_in=2)

COMPACTOR = """
import sys
from pathlib import Path
from schedscope.recorder.companion import Companion
from schedscope.recorder.options import Options
from schedscope.recorder.compact import MergeLimits, compact
print("ready", flush=True)
while compact(Path(sys.argv[1]), MergeLimits(passes=int(sys.argv[2]), fan_in=2), 0.0):
    pass
"""


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "rank=0").iterdir())


def content(run: Run) -> dict[str, list[Any]]:
    return {name: list(run.rows(name, 0)) for name in TABLES}


def sealed(run_dir: Path, passes: int, per_segment: int = 10) -> Path:
    record(run_dir, range(passes), limits=Limits(passes=per_segment)).close()
    return run_dir / "rank=0"


# ---- what is merged --------------------------------------------------------------------------------------------


def test_small_segments_become_a_big_one_with_the_same_rows(run_dir: Path) -> None:
    rank = sealed(run_dir, 109)
    before = content(Run.open(run_dir))
    run = Run.open(run_dir)
    parts = run.parts(0)
    assert compact(rank, ALL, 0.0, final=True)
    assert not compact(rank, ALL, 0.0, final=True)
    assert names(run_dir) == ["00000000-00000010.p0-108"]
    assert content(run) == content(Run.open(run_dir)) == before
    for number in (0, 9, 10, 57, 108):
        assert len(run.pass_rows(0, number)["decisions"]) == DECISIONS
    assert (run.passes(0).count, run.passes(0).first, run.passes(0).last, run.gaps) == (109, 0, 108, [])
    assert read_parts(run_dir, 0).ended
    assert [part.table("passes")["pass"].to_pylist() for part in parts[4:6]] == [[*range(40, 50)], [*range(50, 60)]]
    assert parts[7].table("decisions", ["rid"], Within("pass", 73, 74))["rid"].to_pylist() == [
        f"r{number}-{i}" for number in (73, 74) for i in range(DECISIONS)
    ]


def test_a_merged_segment_is_no_bigger_than_allowed(run_dir: Path) -> None:
    rank = sealed(run_dir, 99)
    before = content(Run.open(run_dir))
    while compact(rank, MergeLimits(passes=35), 0.0, final=True):
        assert content(Run.open(run_dir)) == before
    assert names(run_dir) == [
        "00000000-00000002.p0-29",
        "00000003-00000005.p30-59",
        "00000006-00000008.p60-89",
        "00000009.p90-98",
    ]
    while compact(rank, MergeLimits(decisions=DECISIONS * 60), 0.0, final=True):
        assert content(Run.open(run_dir)) == before
    assert names(run_dir) == ["00000000-00000005.p0-59", "00000006-00000009.p60-98"]


def test_sources_stay_for_a_while(run_dir: Path) -> None:
    rank = sealed(run_dir, 39)
    run = Run.open(run_dir)
    connection = run.connect()
    assert compact(rank, ALL, 60.0)
    assert not compact(rank, ALL, 60.0)
    assert len(names(run_dir)) == 5
    assert numbers(run) == list(range(39))
    assert run.connect().execute("SELECT count(*) FROM passes").fetchall() == [(39,)]
    assert connection.execute("SELECT count(*) FROM passes").fetchall() == [(39,)]
    for name in names(run_dir):
        if name.startswith("00000000-"):
            os.utime(rank / name / "index.json", (0, time.time() - 61))
    assert not compact(rank, ALL, 60.0)
    assert names(run_dir) == ["00000000-00000003.p0-38"]


def test_nothing_is_merged_across_a_hole(run_dir: Path) -> None:
    rank = sealed(run_dir, 59)
    shutil.rmtree(rank / "00000001.p10-19")
    tidy(rank, ALL, 0.0, final=True)
    assert names(run_dir) == ["00000000.p0-9", "00000002-00000005.p20-58"]
    run = Run.open(run_dir)
    assert numbers(run) == [*range(10), *range(20, 59)]
    gaps = read_parts(run_dir, 0).gaps()
    assert [(gap.reason, gap.frame, gap.frames, gap.after_pass, gap.before_pass) for gap in gaps] == [
        ("lost", 10, 10, 9, 20)
    ]


def test_gaps_keep_their_place(run_dir: Path) -> None:
    directory = run_dir / "rank=0"
    directory.mkdir()
    frame = 0
    for number in range(6):
        writer = JournalWriter(directory, 0, number, frame)
        lost = number in (2, 5)
        frame += lost
        if number not in (3, 5):
            writer.append(stamp(encode({"passes": [row("passes", **{"pass": number})]}), frame), 1)
            frame += 1
        if number == 3:
            writer._write(b"\xc1SSF and then nothing")
        writer.close()
        if number != 4:
            write_segment(read_journal(writer.path))
    (directory / "00000004.journal").rename(directory / "x")
    before = read_parts(run_dir, 0).gaps()
    assert [gap.reason for gap in before] == ["lost", "torn", "lost"]
    (directory / "x").rename(directory / "00000004.journal")
    before = read_parts(run_dir, 0).gaps()
    tidy(directory, ALL, 0.0, final=True)
    assert [s.path.name for s in list_segments(run_dir, 0)] == ["00000000-00000003.p0-2", "00000005.p"]
    assert read_parts(run_dir, 0).gaps() == before
    write_segment(read_journal(directory / "00000004.journal"))
    tidy(directory, ALL, 0.0, final=True)
    assert [s.path.name for s in list_segments(run_dir, 0)] == ["00000000-00000005.p0-4"]
    assert read_parts(run_dir, 0).gaps() == before


def test_a_broken_segment_stays_as_it_is_and_the_others_are_merged(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = sealed(run_dir, 69)
    path = rank / "00000003.p30-39" / "decisions.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        tidy(rank, ALL, 0.0, final=True)
    assert names(run_dir) == ["00000000-00000002.p0-29", "00000003.p30-39", "00000004-00000006.p40-68"]
    assert caplog.text.count("00000003.p30-39 is not merged with its neighbours") == 1
    assert numbers(Run.open(run_dir)) == list(range(69))
    with pytest.raises(RunFormatError, match=r"p30-39/decisions\.parquet"):
        Run.open(run_dir).table("decisions")


def test_a_full_disk_leaves_small_segments(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = sealed(run_dir, 39)
    before = content(Run.open(run_dir))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        tidy(rank, ALL, 0.0)
    assert "can't merge the segments" in caplog.text
    assert content(Run.open(run_dir)) == before
    assert any(name.startswith(".") for name in names(run_dir))
    tidy(rank, ALL, 0.0)
    assert names(run_dir) == ["00000000-00000003.p0-38"]
    assert content(Run.open(run_dir)) == before


@given(
    st.lists(st.one_of(st.floats(0.0001, 1.3), st.floats(0.0001, 0.05)), max_size=60), st.integers(2, 16), st.booleans()
)
def test_choices_end_and_are_never_too_big(shares: list[float], fan_in: int, final: bool) -> None:
    written = 0.0
    total = sum(shares)
    while (chosen := choose(shares, fan_in, final=final)) is not None:
        start, stop = chosen
        assert stop - start > 1
        assert sum(shares[start:stop]) <= 1.0001
        written += sum(shares[start:stop])
        shares = [*shares[:start], sum(shares[start:stop]), *shares[stop:]]
    assert written <= 7 * total
    if final:
        assert all(a + b > 1 for a, b in pairwise(shares))


def test_a_growing_log_stays_short() -> None:
    shares: list[float] = []
    longest = 0
    for _ in range(20_000):
        shares.append(0.0005)
        while (chosen := choose(shares, 16, final=False)) is not None:
            shares[slice(*chosen)] = [sum(shares[slice(*chosen)])]
        longest = max(longest, len(shares))
    assert longest < 70


# ---- while others read -------------------------------------------------------------------------------------------


def test_readers_never_miss_or_double_a_row_while_segments_are_merged(run_dir: Path) -> None:
    rank = sealed(run_dir, 299, per_segment=6)
    expected = content(Run.open(run_dir))
    failures: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            run = Run.open(run_dir)
            try:
                parts = run.parts(0)
                found = run.connect().execute("SELECT count(*), count(DISTINCT pass) FROM passes").fetchall()
                time.sleep(0.02)
                if found != [(299, 299)]:
                    failures.append(found)
                if [row for part in parts for row in part.table("decisions").to_pylist()] != expected["decisions"]:
                    failures.append("parts")
                if list(run.rows("steps", 0)) != expected["steps"]:
                    failures.append("rows")
                number = random.randrange(299)
                if len(run.pass_rows(0, number)["decisions"]) != DECISIONS:
                    failures.append(number)
            except Exception as error:
                failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for passes in range(12, 303, 48):
            while compact(rank, MergeLimits(passes=passes, fan_in=2), 2.0, final=True):
                pass
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert failures == []


def test_a_killed_compactor_loses_nothing_and_the_next_one_goes_on(run_dir: Path) -> None:
    rank = sealed(run_dir, 199, per_segment=4)
    expected = content(Run.open(run_dir))
    chance = random.Random(7)
    killed = 0
    for passes in range(24, 208, 24):
        command = [sys.executable, "-c", COMPACTOR, str(rank), str(passes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.15 * chance.random())
            killed += process.poll() is None
            process.kill()
        assert content(Run.open(run_dir)) == expected
    assert killed > 2
    tidy(rank, MergeLimits(), 0.0, final=True)
    assert names(run_dir) == ["00000000-00000049.p0-198"]
    assert content(Run.open(run_dir)) == expected


def test_readers_go_on_while_sources_are_removed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = sealed(run_dir, 39)
    before = content(Run.open(run_dir))
    held = Run.open(run_dir).parts(0)
    looks = []
    real = shutil.rmtree

    def remove(path: Path) -> None:
        for file in sorted(path.iterdir()):
            assert [row for part in held for row in part.table("decisions").to_pylist()] == before["decisions"]
            assert content(Run.open(run_dir)) == before
            file.unlink()
            looks.append(file)
        real(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    assert compact(rank, ALL, 0.0, final=True)
    assert len(looks) > 20
    assert names(run_dir) == ["00000000-00000003.p0-38"]


def test_what_a_killed_compactor_leaves_is_removed(run_dir: Path) -> None:
    rank = sealed(run_dir, 39)
    for name in (".00000000-00000003.tmp", ".00000001.p10-19.gone"):
        shutil.copytree(rank / "00000001.p10-19", rank / name)
    assert numbers(Run.open(run_dir)) == list(range(39))
    tidy(rank, MergeLimits(), 0.0)
    assert all(not name.startswith(".") for name in names(run_dir))


def test_a_half_removed_source_is_not_read(run_dir: Path) -> None:
    rank = sealed(run_dir, 39)
    before = content(Run.open(run_dir))
    merge(list_segments(run_dir, 0))
    (rank / "00000001.p10-19" / "decisions.parquet").unlink()
    (rank / "00000002.p20-29" / "index.json").unlink()
    assert content(Run.open(run_dir)) == before
    assert not compact(rank, ALL, 0.0)
    assert names(run_dir) == ["00000000-00000003.p0-38"]


def test_token_lists_of_a_million_are_merged(run_dir: Path) -> None:
    sink = DirectSink(run_dir, 0, limits=Limits(passes=1))
    for number in range(3):
        ids = list(range(1_000_000)) if number == 1 else [number]
        passes = [row("passes", **{"pass": number})]
        sink.write(encode({"tokens": [row("tokens", rid=f"r{number}", ids=ids)], "passes": passes}))
    sink.close()
    before = Run.open(run_dir).table("tokens")
    tidy(run_dir / "rank=0", ALL, 0.0, final=True)
    assert len(names(run_dir)) == 1
    assert Run.open(run_dir).table("tokens").equals(before)
    assert len(before["ids"][1].as_py()) == 1_000_000


def test_a_companion_merges_while_it_records_and_leaves_no_small_segments(run_dir: Path) -> None:
    with Companion.start(run_dir, Options(limits=Limits(passes=1))) as companion:
        sink = open_sink(0, environ=companion.environment())
        assert sink is not None
        for number in range(60):
            sink.write(pass_frame(number))
        deadline = time.monotonic() + 20
        while not list(run_dir.glob("rank=0/????????-????????.p*")):
            assert time.monotonic() < deadline, "nothing was merged"
            time.sleep(0.01)
        assert numbers(Run.open(run_dir)) == list(range(60))
        sink.close()
        manifest = companion.stop()
    assert len(names(run_dir)) == 1
    assert (manifest.totals["0"]["passes"], manifest.gaps) == (60, [])
    assert numbers(Run.open(run_dir)) == list(range(60))
