"""Recording between processes, and what happens when one of them is killed."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from schedscope.engine.errors import UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.frame import SCHEMA_VERSION, Kind, encode_frame, pack
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.manifest import create_run, read_manifest
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.sink import RUN_VARIABLE, SOCKET_VARIABLE, CompanionSink, open_sink

FILLING: dict[str, Any] = {"int32": 0, "int64": 0, "double": 0.0, "bool": False, "string": "", "list": []}
DECISIONS = 3
SOON_S = 20.0

WRITER = """
import os, sys, time
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.sink import open_sink
frames = sys.stdin.buffer
sink = open_sink(int(sys.argv[1]), Description(source=Source("engine", "1"), config={"x": 1}))
while size := frames.read(4):
    sink.write(frames.read(int.from_bytes(size, "big")))
    sys.stdout.write("."); sys.stdout.flush()
if sys.argv[2] == "close":
    sink.close()
"""

COMPANION = """
import json, sys, time
from schedscope.recorder.companion import Companion
from schedscope.recorder.rank_log import Limits
companion = Companion.start(sys.argv[1], Limits(passes=int(sys.argv[2])))
print(json.dumps(companion.environment()), flush=True)
time.sleep(600)
"""


def pass_frame(number: int, padding: int = 0) -> bytes:
    from schedscope.recorder.schema import TABLES

    def row(table: str, **given: Any) -> tuple[Any, ...]:
        columns = TABLES[table].row
        filled = {c.name: None if c.null else FILLING[str(c.type).partition("<")[0]] for c in columns}
        return tuple((filled | given).values())

    return encode_frame(
        {
            "passes": [row("passes", stop="x" * padding, **{"pass": number})],
            "decisions": [row("decisions", rid=f"r{number}-{i}", **{"pass": number}) for i in range(DECISIONS)],
        }
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def numbers(run: Run, rank: int = 0) -> list[int]:
    found: list[int] = run.table("passes", rank, ["pass"])["pass"].to_pylist() if rank in run.ranks else []
    return found


def endings(caplog: pytest.LogCaptureFixture, rank: int = 0) -> list[str]:
    """What sinks of a rank said when they detached; companions in this process log too."""
    return [text for text in caplog.messages if text.startswith(f"recording of rank {rank} ended")]


class Writer:
    """A recorded process: writes the frames it is sent."""

    def __init__(self, environment: dict[str, str], rank: int, end: str) -> None:
        command = [sys.executable, "-c", WRITER, str(rank), end]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )

    def write(self, *frames: bytes) -> None:
        """Returns when the process has handed the frames over."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        for frame in frames:
            stdin.write(len(frame).to_bytes(4, "big") + frame)
            stdin.flush()
            assert stdout.read(1) == b"."

    def end(self) -> None:
        self.process.communicate(timeout=SOON_S)

    def kill(self) -> None:
        self.process.kill()
        self.end()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run(tmp_path, "demo")


@pytest.fixture
def companion(run_dir: Path) -> Iterator[Companion]:
    with Companion.start(run_dir, Limits(passes=10), grace_s=0.5) as companion:
        yield companion


def connect(companion: Companion, rank: int = 0, **options: Any) -> CompanionSink:
    sink = open_sink(rank, Description(source=Source("engine", "1")), environ=companion.environment(), **options)
    assert isinstance(sink, CompanionSink)
    return sink


# ---- between processes -----------------------------------------------------------------------------------------


def test_ranks_record_while_others_read(companion: Companion, run_dir: Path) -> None:
    writers = [Writer(companion.environment(), rank, "close") for rank in (0, 1)]
    failures: list[str] = []
    looks: list[int] = []
    done = threading.Event()

    def read() -> None:
        run = Run.open(run_dir)
        seen = 0
        while not done.is_set():
            passes = numbers(run)
            decisions = run.table("decisions", 0, ["rid"]).num_rows if 0 in run.ranks else 0
            if passes != list(range(len(passes))) or len(passes) < seen or decisions < len(passes) * DECISIONS:
                failures.append(f"{passes} {decisions} {seen}")
            seen = len(passes)
            looks.append(seen)

    def has_looked_again(before: int) -> bool:
        return len(looks) > before + 1

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        for number in range(150):
            if number % 30 == 29:
                until(partial(has_looked_again, len(looks)))
            for writer in writers:
                writer.write(pass_frame(number))
        for writer in writers:
            writer.end()
        manifest = companion.stop()
    finally:
        done.set()
        reader.join()
    assert not failures
    assert len(set(looks)) > 3
    assert (manifest.status, manifest.ranks, manifest.config) == ("sealed", [0, 1], {"x": 1})
    assert manifest == read_manifest(run_dir)
    run = Run.open(run_dir)
    for rank in (0, 1):
        assert numbers(run, rank) == list(range(150))
    assert run.gaps == []
    assert not list(run_dir.rglob("*.journal"))


def test_another_process_reads_a_run_while_it_is_recorded(companion: Companion, run_dir: Path) -> None:
    sink = connect(companion)
    for number in range(25):
        sink.write(pass_frame(number))
    until(lambda: Run.open(run_dir).ranks == [0] and Run.open(run_dir).passes(0).count == 25)
    code = (
        "import sys; from schedscope.recorder.run import Run; run = Run.open(sys.argv[1]);"
        "print(run.status, run.connect().execute('SELECT count(*), max(pass) FROM passes').fetchall())"
    )
    printed = subprocess.run([sys.executable, "-c", code, run_dir], capture_output=True, text=True, check=True)
    assert printed.stdout == "recording [(25, 24)]\n"
    sink.close()


def test_a_killed_writer_loses_nothing_it_handed_over(companion: Companion, run_dir: Path) -> None:
    writer = Writer(companion.environment(), 0, "close")
    writer.write(*(pass_frame(number) for number in range(57)))
    writer.kill()
    manifest = companion.stop()
    run = Run.open(run_dir)
    assert numbers(run) == list(range(57))
    assert (run.status, run.passes(0).count) == ("sealed", 57)
    (gap,) = manifest.gaps
    assert (gap.reason, gap.frame, gap.frames, gap.after_pass) == ("cut", 57, None, 56)
    assert not list(run_dir.rglob("*.journal"))


def test_a_writer_that_forgets_to_close_loses_nothing(companion: Companion, run_dir: Path) -> None:
    writer = Writer(companion.environment(), 0, "forget")
    writer.write(*(pass_frame(number) for number in range(3)))
    writer.end()
    assert companion.stop().gaps == []
    assert numbers(Run.open(run_dir)) == [0, 1, 2]


@pytest.mark.parametrize("count", [15, 20, 33])
def test_a_killed_companion_leaves_a_run_that_can_be_read(
    run_dir: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    process = subprocess.Popen([sys.executable, "-c", COMPANION, str(run_dir), "10"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    environment = json.loads(process.stdout.readline())
    assert environment[RUN_VARIABLE] == str(run_dir)
    sink = open_sink(0, environ=environment)
    assert sink is not None
    for number in range(count):
        sink.write(pass_frame(number))
    run = Run.open(run_dir)
    until(lambda: len(numbers(run)) == count)
    assert run.status == "recording"
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        process.kill()
        process.wait()
        process.stdout.close()
        assert run.status == "interrupted"
        until(lambda: sink.write(pass_frame(99)) or not sink.attached)  # type: ignore[func-returns-value]
        sink.write(pass_frame(100))
        sink.close()
    assert len(endings(caplog)) == 1
    assert "recording of rank 0 ended" in caplog.text
    Path(environment[SOCKET_VARIABLE]).unlink()
    Path(environment[SOCKET_VARIABLE]).parent.rmdir()
    run = Run.open(run_dir)
    assert numbers(run) == list(range(count))
    assert run.table("decisions", 0).num_rows == count * DECISIONS
    assert len(run.pass_rows(0, count - 1)["decisions"]) == DECISIONS
    assert run.connect().execute("SELECT count(DISTINCT pass) FROM passes").fetchall() == [(count,)]
    assert [(gap.reason, gap.after_pass) for gap in run.gaps] == [("interrupted", count - 1)]


def test_a_companion_killed_at_any_moment_leaves_a_run_that_can_be_read(run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", COMPANION, str(run_dir), "2"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    environment = json.loads(process.stdout.readline())
    sink = open_sink(0, environ=environment)
    assert sink is not None
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    number = 0
    while sink.attached:
        sink.write(pass_frame(number))
        number += 1
        time.sleep(0.0005)
    process.wait()
    process.stdout.close()
    Path(environment[SOCKET_VARIABLE]).unlink()
    Path(environment[SOCKET_VARIABLE]).parent.rmdir()
    run = Run.open(run_dir)
    passes = numbers(run)
    assert passes == list(range(len(passes)))
    assert len(passes) > 2
    assert run.table("decisions").num_rows == len(passes) * DECISIONS
    assert [(gap.reason, gap.after_pass) for gap in run.gaps] == [("interrupted", passes[-1])]


def test_stop_does_not_wait_forever_for_a_writer(companion: Companion, run_dir: Path) -> None:
    sink = connect(companion)
    sink.write(pass_frame(0))
    begin = time.monotonic()
    manifest = companion.stop()
    assert time.monotonic() - begin < 5
    assert companion.stop() is manifest
    assert [gap.reason for gap in manifest.gaps] == ["cut"]
    sink.close()
    assert numbers(Run.open(run_dir)) == [0]


def test_a_run_is_recorded_once(companion: Companion, run_dir: Path) -> None:
    with pytest.raises(UsageError, match="is being recorded by another process"):
        Companion.start(run_dir)
    companion.stop()
    with pytest.raises(UsageError, match="has been recorded already"):
        Companion.start(run_dir)


def test_a_second_writer_of_a_rank_is_refused_and_shows(companion: Companion, run_dir: Path) -> None:
    first = connect(companion)
    first.write(pass_frame(0))
    until(lambda: read_manifest(run_dir).ranks == [0])
    second = connect(companion)
    until(lambda: second.write(pass_frame(7)) or not second.attached)  # type: ignore[func-returns-value]
    first.write(pass_frame(1))
    first.close()
    assert [(gap.rank, gap.reason) for gap in companion.stop().gaps] == [(0, "refused")]
    assert numbers(Run.open(run_dir)) == [0, 1]


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\n\r\n",
        pack(Kind.ROWS, b"\x80"),
        pack(Kind.HELLO, b"\x90"),
        pack(Kind.HELLO, b"\x82\xa7version" + bytes([SCHEMA_VERSION + 1]) + b"\xa4rank\x00"),
    ],
)
def test_strangers_are_turned_away(
    companion: Companion, run_dir: Path, greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger, caplog.at_level(logging.WARNING, "schedscope.recorder"):
        stranger.connect(companion.environment()[SOCKET_VARIABLE])
        stranger.sendall(greeting)
        stranger.settimeout(SOON_S)
        assert stranger.recv(1) == b""
    assert "hanging up on a process" in caplog.text
    sink = connect(companion)
    sink.write(pass_frame(0))
    sink.close()
    assert companion.stop().gaps == []
    assert numbers(Run.open(run_dir)) == [0]


def test_a_companion_with_a_full_disk_goes_on_and_shows_what_it_lost(
    companion: Companion, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedscope.recorder.journal import JournalWriter

    sink = connect(companion)
    run = Run.open(run_dir)
    sink.write(pass_frame(0))
    until(lambda: numbers(run) == [0])
    failed: list[bytes] = []

    def fail(_: JournalWriter, data: bytes) -> None:
        failed.append(data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JournalWriter, "_write", fail)
        sink.write(pass_frame(1))
        sink.write(pass_frame(2))
        until(lambda: len(failed) == 2)
    sink.write(pass_frame(3))
    sink.close()
    manifest = companion.stop()
    assert numbers(run) == [0, 3]
    assert [(g.reason, g.frame, g.frames, g.after_pass, g.before_pass) for g in manifest.gaps] == [("lost", 1, 2, 0, 3)]


# ---- the sink ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, IO[bytes]]]:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with near, far, far.makefile("rb") as file:
        yield near, file


def test_a_full_sink_drops_counts_and_shows_it(companion: Companion, run_dir: Path) -> None:
    """A companion that doesn't read for a while."""
    os.environ.pop(SOCKET_VARIABLE, None)
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sink = CompanionSink(near, 0, capacity=30_000)
    begin = time.monotonic()
    for number in range(100):
        sink.write(pass_frame(number, padding=1000))
    assert time.monotonic() - begin < 10
    assert 0 < sink.dropped < 100
    # Now it reads: what arrives goes to a real companion.
    onward = socket.socket(socket.AF_UNIX)
    onward.connect(companion.environment()[SOCKET_VARIABLE])

    def relay() -> None:
        while chunk := far.recv(65536):
            onward.sendall(chunk)
        onward.close()
        far.close()

    thread = threading.Thread(target=relay)
    thread.start()
    until(lambda: sink._queued == 0)
    for number in range(100, 110):
        sink.write(pass_frame(number))
    sink.close()
    thread.join()
    manifest = companion.stop()
    passes = numbers(Run.open(run_dir))
    kept = 100 - sink.dropped
    assert passes == [*range(kept), *range(100, 110)]
    assert [(g.reason, g.frame, g.frames, g.after_pass, g.before_pass) for g in manifest.gaps] == [
        ("lost", kept, sink.dropped, kept - 1, 100)
    ]


def test_frames_dropped_at_the_very_end_show_too(companion: Companion, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = connect(companion)
    sink.write(pass_frame(0))
    monkeypatch.setattr(sink, "_has_room", lambda _: False)
    sink._queue.append(b"")  # as if the companion were behind
    sink.write(pass_frame(1))
    sink._queue.clear()
    sink.close()
    assert sink.dropped == 1
    assert [(g.reason, g.frame, g.frames) for g in companion.stop().gaps] == [("lost", 1, 1)]


def test_a_blocking_sink_waits_and_loses_nothing(ends: tuple[socket.socket, IO[bytes]]) -> None:
    near, far = ends
    sink = CompanionSink(near, 0, on_full="block", capacity=8_000)
    received: list[bytes] = []

    def read() -> None:
        while chunk := far.read(512):
            received.append(chunk)
            time.sleep(0.0002)

    thread = threading.Thread(target=read)
    thread.start()
    bodies = [pass_frame(number, padding=3_000) for number in range(60)]
    for body in bodies:
        sink.write(body)
    sink.close()
    thread.join(SOON_S)
    assert sink.dropped == 0
    assert sum(map(len, received)) > sum(map(len, bodies))


def test_a_blocking_sink_gives_up_on_a_companion_that_hangs(ends: tuple[socket.socket, IO[bytes]]) -> None:
    near, _ = ends
    sink = CompanionSink(near, 0, on_full="block", capacity=8_000, block_s=0.05)
    begin = time.monotonic()
    for number in range(20):
        sink.write(pass_frame(number, padding=3_000))
    assert 0.05 <= time.monotonic() - begin < 5
    assert sink.dropped > 5


def test_closing_gives_up_on_a_companion_that_hangs(
    ends: tuple[socket.socket, IO[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("schedscope.recorder.sink._CLOSE_S", 0.1)
    near, _ = ends
    sink = CompanionSink(near, 4)
    for number in range(20):
        sink.write(pass_frame(number, padding=3_000))
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        sink.close()
    assert not sink.attached
    assert len(endings(caplog, 4)) == 1
    assert "rank 4 ended at frame 20" in caplog.text
    assert "did not take the last frames" in caplog.text
    assert sink._thread is not None
    sink._thread.join(SOON_S)
    assert not sink._thread.is_alive()


def test_a_broken_frame_detaches_without_raising(companion: Companion, caplog: pytest.LogCaptureFixture) -> None:
    sink = connect(companion)
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        sink.write(b"not a frame, but long enough to be taken for one")
        sink.write(pass_frame(0))
        sink.close()
    assert not sink.attached
    assert len(endings(caplog)) == 1


def test_without_a_companion_nothing_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_sink(0, environ={}) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        assert open_sink(3, environ={SOCKET_VARIABLE: str(tmp_path / "none")}) is None
    assert "rank 3 is not recorded: no companion at" in caplog.text


def test_a_forked_child_leaves_the_stream_alone(companion: Companion, run_dir: Path) -> None:
    sink = connect(companion)
    sink.write(pass_frame(0))
    child = os.fork()
    if not child:
        sink.write(pass_frame(100))
        sink.close()
        os._exit(0 if not sink.attached else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sink.write(pass_frame(1))
    sink.close()
    assert companion.stop().gaps == []
    assert numbers(Run.open(run_dir)) == [0, 1]


def test_long_temporary_directories_do_not_matter(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Companion.start(run_dir) as companion:
        assert len(companion.environment()[SOCKET_VARIABLE]) < 108
        sink = connect(companion)
        sink.write(pass_frame(0))
        sink.close()
    assert not Path(companion.environment()[SOCKET_VARIABLE]).parent.exists()
    assert numbers(Run.open(run_dir)) == [0]
