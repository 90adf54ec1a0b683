"""What goes wrong around a recorder costs the recording at most, never the server, and is said in words."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until
from rows import pass_frame, row
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.frame import encode
from schedscope.recorder.manifest import create_run
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import Limits, rank_dir
from schedscope.recorder.ring import LINK
from schedscope.recorder.run import Run
from schedscope.recorder.sink import CompanionSink, open_sink


def connect(companion: Companion, rank: int = 0) -> CompanionSink:
    sink = open_sink(rank, environ=companion.environment())
    assert isinstance(sink, CompanionSink)
    return sink


def passes(run_dir: Path) -> list[int]:
    found: list[int] = Run.open(run_dir).table("passes", 0, ["pass"])["pass"].to_pylist()
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of half a megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = create_run(small_disk)
    ballast = small_disk / "ballast"
    options = Options(buffer=2**18, limits=Limits(passes=1000))
    with caplog.at_level(logging.WARNING, "schedscope.recorder"), Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        ballast.write_bytes(bytes(380_000))
        count = 0
        while not sink.dropped:
            sink.write(pass_frame(count, padding=2_000))
            count += 1
            assert count < 10_000
            if not companion._open[0].failing:
                until(lambda: sink._ring.read == sink._ring.written or companion._open[0].failing)
        assert sink.attached, "the server goes on, and so does its recording once there is space"
        kept = count - sink.dropped
        ballast.unlink()
        until(lambda: sink._ring.read == sink._ring.written)
        sink.write(pass_frame(count))
        sink.close()
    assert "can't write the log of rank 0 now" in caplog.text
    assert "records are being lost" in caplog.text
    assert passes(run_dir) == [*range(kept), count]
    (gap,) = Run.open(run_dir).gaps
    assert (gap.reason, gap.frames, gap.after_pass, gap.before_pass) == ("lost", count - kept, kept - 1, count)


def test_a_disk_without_room_for_a_run(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(508_000))

    def fill_the_rest() -> None:
        for _ in range(200):
            create_run(small_disk)

    with pytest.raises(UsageError, match=r"can't create a run in .*No space left on device"):
        fill_the_rest()


def test_a_run_that_is_deleted_while_it_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = create_run(tmp_path)
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        companion = Companion.start(run_dir, Options(limits=Limits(passes=5)))
        sink = connect(companion)
        memory = (rank_dir(run_dir, 0) / LINK).readlink()
        for number in range(12):
            sink.write(pass_frame(number))
        until(lambda: sink._ring.read == sink._ring.written)
        shutil.rmtree(run_dir)
        for number in range(12, 40):
            sink.write(pass_frame(number))
            time.sleep(0.005)
        assert sink.attached, "the server notices nothing"
        sink.close()
        with pytest.raises(SchedscopeError, match="can't write the manifest"):
            companion.stop()
    assert not memory.exists()
    assert not run_dir.exists()
    assert caplog.text.count("was deleted: what is recorded from now on is lost") == 1
    assert "Traceback" not in caplog.text


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="can't create a run in /proc/runs"):
        create_run("/proc/runs")


def test_a_request_with_a_million_tokens(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    ids = list(range(1_000_000))
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(encode({"tokens": [row("tokens", rid="long", ids=ids)]}))
        sink.write(pass_frame(0))
        sink.close()
        assert not sink.dropped
    (found,) = Run.open(run_dir).table("tokens", 0, ["ids"])["ids"].to_pylist()
    assert found == ids


@pytest.mark.parametrize("rid", ["", "\x00", "\ud800", "ﷺ" * 1000, "a\nb\tc", "'; drop table passes; --", "🜁/../.."])
def test_any_rid(tmp_path: Path, rid: str) -> None:
    run_dir = create_run(tmp_path)
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        frame = {"passes": [row("passes", **{"pass": 3})], "decisions": [row("decisions", rid=rid, **{"pass": 3})]}
        sink.write(encode(frame))
        sink.close()
    run = Run.open(run_dir)
    (found,) = run.pass_rows(0, 3)["decisions"]
    assert found["rid"] == rid.encode(errors="backslashreplace").decode()
    with run.connect() as connection:
        assert connection.execute("select rid from decisions").fetchall() == [(found["rid"],)]


def test_many_ranks_at_once(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    with Companion.start(run_dir, Options(buffer=2**16, limits=Limits(passes=7))) as companion:
        sinks = [connect(companion, rank) for rank in range(24)]
        for number in range(30):
            for sink in sinks:
                sink.write(pass_frame(number))
        for sink in sinks:
            sink.close()
        assert not any(sink.dropped for sink in sinks)
    run = Run.open(run_dir)
    assert run.ranks == list(range(24))
    assert all(run.passes(rank).count == 30 for rank in run.ranks)
    assert run.gaps == []
