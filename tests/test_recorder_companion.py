"""Recording between processes, and what happens when one of them is killed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import SOON_S, until
from rows import DECISIONS, pass_frame, stamp
from schedscope.engine.errors import UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.frame import SCHEMA_VERSION, Body, Kind, pack
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.manifest import create_run, read_manifest
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import Limits, rank_dir
from schedscope.recorder.ring import LINK, remove_ring
from schedscope.recorder.run import Run
from schedscope.recorder.salvage import salvage
from schedscope.recorder.sink import RUN_VARIABLE, SOCKET_VARIABLE, CompanionSink, open_sink

WRITER = """
import os, sys, time
from schedscope.recorder.frame import HEADER_BYTES, Body
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.sink import open_sink
frames = sys.stdin.buffer
sink = open_sink(int(sys.argv[1]), Description(source=Source("engine", "1"), config={"x": 1}))
while size := frames.read(4):
    sink.write(Body(bytearray(HEADER_BYTES) + frames.read(int.from_bytes(size, "big")), 1))
    sys.stdout.write("."); sys.stdout.flush()
if sys.argv[2] == "close":
    sink.close()
"""

COMPANION = """
import json, sys
from schedscope.recorder.companion import Companion
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import Limits
options = Options(limits=Limits(passes=int(sys.argv[2])), buffer=int(sys.argv[3]), on_full=sys.argv[4])
with Companion.start(sys.argv[1], options) as companion:
    print(json.dumps(companion.environment()), flush=True)
    sys.stdin.read()
"""


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

    def write(self, *bodies: Body) -> None:
        """Returns when the process has handed the frames over."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        for body in bodies:
            payload = body.payload
            stdin.write(len(payload).to_bytes(4, "big") + payload)
            stdin.flush()
            assert stdout.read(1) == b"."

    def end(self) -> None:
        self.process.communicate(timeout=SOON_S)

    def kill(self) -> None:
        self.process.kill()
        self.end()


class OtherCompanion:
    """A companion in a process of its own, which can be stopped and killed."""

    def __init__(self, run_dir: Path, passes: int = 10, buffer: int = 2**20, on_full: str = "drop") -> None:
        command = [sys.executable, "-c", COMPANION, str(run_dir), str(passes), str(buffer), on_full]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.environment: dict[str, str] = json.loads(self.process.stdout.readline())

    def connect(self, rank: int = 0, **options: Any) -> CompanionSink:
        sink = open_sink(rank, Description(source=Source("engine", "1")), environ=self.environment, **options)
        assert isinstance(sink, CompanionSink)
        return sink

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # it may go on for a moment

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.communicate(timeout=SOON_S)

    def kill(self) -> None:
        """Also removes what a companion that isn't killed removes itself."""
        self.process.kill()
        self.stop()
        address = Path(self.environment[SOCKET_VARIABLE])
        address.unlink()
        address.parent.rmdir()


@pytest.fixture
def other(run_dir: Path) -> Iterator[Callable[..., OtherCompanion]]:
    """Starts companions, and ends what is left of them."""
    started: list[OtherCompanion] = []

    def start(**options: Any) -> OtherCompanion:
        started.append(OtherCompanion(run_dir, **options))
        return started[-1]

    yield start
    for companion in started:
        if companion.process.poll() is None:
            companion.go_on()
            companion.kill()
    if run_dir.exists():
        remove_ring(rank_dir(run_dir, 0))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run(tmp_path, "demo")


@pytest.fixture
def companion(run_dir: Path) -> Iterator[Companion]:
    with Companion.start(run_dir, Options(limits=Limits(passes=10), grace_s=0.5)) as companion:
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
    run_dir: Path, other: Callable[..., OtherCompanion], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    companion = other(buffer=2**16)
    assert companion.environment[RUN_VARIABLE] == str(run_dir)
    sink = companion.connect()
    for number in range(count):
        sink.write(pass_frame(number))
    run = Run.open(run_dir)
    assert len(numbers(run)) == count
    assert run.status == "recording"
    companion.kill()
    assert run.status == "interrupted"
    sink.write(pass_frame(count))
    assert numbers(run) == list(range(count + 1)), "the buffer outlives the companion"
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        while sink.attached:
            count += 1
            sink.write(pass_frame(count, padding=1000))
        sink.write(pass_frame(100))
        sink.close()
    assert len(endings(caplog)) == 1
    assert "the companion is gone, and its buffer is full" in caplog.text
    run = Run.open(run_dir)
    assert numbers(run) == list(range(count))
    assert run.table("decisions", 0).num_rows == count * DECISIONS
    assert len(run.pass_rows(0, count - 1)["decisions"]) == DECISIONS
    assert run.connect().execute("SELECT count(DISTINCT pass) FROM passes").fetchall() == [(count,)]
    assert [(gap.reason, gap.after_pass) for gap in run.gaps] == [("interrupted", count - 1)]


def test_a_companion_killed_at_any_moment_leaves_a_run_that_can_be_read(
    run_dir: Path, other: Callable[..., OtherCompanion]
) -> None:
    companion = other(passes=2)
    sink = companion.connect()
    killer = threading.Timer(0.3, companion.process.kill)
    killer.start()
    number = 0
    while companion.process.poll() is None:
        sink.write(pass_frame(number))
        number += 1
        time.sleep(0.0005)
    sink.close()
    companion.kill()
    run = Run.open(run_dir)
    assert numbers(run) == list(range(number))
    assert number > 2
    assert run.table("decisions").num_rows == number * DECISIONS
    assert run.gaps == []


def test_when_both_are_killed_the_run_can_be_read_and_its_memory_is_given_back(
    run_dir: Path, other: Callable[..., OtherCompanion], caplog: pytest.LogCaptureFixture
) -> None:
    salvage()  # what others left
    companion = other(passes=10)
    writer = Writer(companion.environment, 0, "close")
    writer.write(*(pass_frame(number) for number in range(25)))
    companion.pause()
    writer.write(*(pass_frame(number) for number in range(25, 40)))
    assert salvage() == 0, "both live"
    companion.kill()
    assert salvage() == 0, "the writer lives"
    writer.write(pass_frame(40))
    writer.kill()

    def check(status: str) -> None:
        run = Run.open(run_dir)
        assert run.status == status
        assert numbers(run) == list(range(41))
        assert run.table("decisions").num_rows == 41 * DECISIONS
        assert [(gap.reason, gap.after_pass) for gap in run.gaps] == [("interrupted", 40)]

    check("interrupted")
    memory = (rank_dir(run_dir, 0) / LINK).readlink()
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        assert salvage() == 1
    assert str(run_dir) not in caplog.text
    assert not memory.exists()
    check("sealed")
    assert not list(run_dir.rglob("*.journal"))
    assert salvage() == 0


def test_memory_of_a_run_that_moved_is_kept_while_it_holds_something(
    run_dir: Path, other: Callable[..., OtherCompanion], caplog: pytest.LogCaptureFixture
) -> None:
    salvage()  # what others left
    companion = other()
    writer = Writer(companion.environment, 0, "close")
    writer.write(pass_frame(0))
    companion.pause()
    writer.write(pass_frame(1))
    memory = (rank_dir(run_dir, 0) / LINK).readlink()
    companion.kill()
    writer.kill()
    moved = run_dir.rename(run_dir.with_name("moved"))
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        assert salvage() == 0
    assert "which was moved or deleted" in caplog.text
    assert numbers(Run.open(moved)) == [0, 1]
    moved.rename(run_dir)
    assert salvage() == 1
    assert not memory.exists()
    assert numbers(Run.open(run_dir)) == [0, 1]


def test_memory_of_a_deleted_run_without_anything_new_is_given_back(
    run_dir: Path, other: Callable[..., OtherCompanion]
) -> None:
    companion = other()
    sink = companion.connect()
    sink.write(pass_frame(0))
    memory = (rank_dir(run_dir, 0) / LINK).readlink()
    until(lambda: sink._ring.read == sink._ring.written)
    companion.kill()
    sink._abandon()
    shutil.rmtree(run_dir)
    salvage()
    assert not memory.exists()


def test_a_damaged_ring_is_in_nobodys_way(
    run_dir: Path, other: Callable[..., OtherCompanion], caplog: pytest.LogCaptureFixture
) -> None:
    companion = other()
    writer = Writer(companion.environment, 0, "close")
    writer.write(pass_frame(0))
    companion.pause()
    writer.write(pass_frame(1))
    memory = (rank_dir(run_dir, 0) / LINK).readlink()
    companion.kill()
    writer.kill()
    data = bytearray(memory.read_bytes())
    data[8192:] = bytes(len(data) - 8192)
    memory.write_bytes(data)
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        salvage()  # others may have left something, too
    told = [record.getMessage() for record in caplog.records if str(memory) in record.getMessage()]
    assert len(told) == 1
    assert "can't be written to disk: no frame starts here" in told[0]
    assert len(list((run_dir / "rank=0").glob("*.journal"))) == 1, "and nothing half done is left"
    assert Run.open(run_dir).status == "interrupted"
    memory.unlink()


def test_dead_companions_leave_no_sockets(other: Callable[..., OtherCompanion]) -> None:
    companion = other()
    address = Path(companion.environment[SOCKET_VARIABLE])
    salvage()
    assert address.exists(), "it lives"
    companion.process.kill()
    companion.stop()
    salvage()
    assert not address.parent.exists()
    address.parent.mkdir()
    address.touch()


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


def test_a_second_writer_of_a_rank_is_refused_and_shows(
    companion: Companion, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = connect(companion)
    first.write(pass_frame(0))
    until(lambda: read_manifest(run_dir).ranks == [0])
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        assert open_sink(0, environ=companion.environment()) is None
    assert "rank 0: a second process wanted to record this rank" in caplog.text
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
        while stranger.recv(4096):
            pass
    assert "hanging up on a process" in caplog.text
    sink = connect(companion)
    sink.write(pass_frame(0))
    sink.close()
    assert companion.stop().gaps == []
    assert numbers(Run.open(run_dir)) == [0]


def test_a_companion_with_a_full_disk_catches_up_when_there_is_space_again(
    companion: Companion, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from schedscope.recorder.journal import JournalWriter

    sink = connect(companion)
    run = Run.open(run_dir)
    sink.write(pass_frame(0))
    failed: list[bytes] = []

    def fail(_: JournalWriter, data: bytes) -> None:
        failed.append(data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "schedscope.recorder"):
        patch.setattr(JournalWriter, "_write", fail)
        sink.write(pass_frame(1))
        sink.write(pass_frame(2))
        until(lambda: len(failed) > 2)
        assert numbers(run) == [0, 1, 2], "they can be read from the buffer"
    assert caplog.text.count("can't write the log of rank 0 now: [Errno 28] No space left on device") == 1
    sink.write(pass_frame(3))
    sink.close()
    assert companion.stop().gaps == []
    assert numbers(Run.open(run_dir)) == [0, 1, 2, 3]


def test_a_disk_that_stays_full_leaves_the_rest_in_the_buffer(
    companion: Companion, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedscope.recorder.journal import JournalWriter

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sink = connect(companion)
    sink.write(pass_frame(0))
    until(lambda: companion._open[0].ring.read > 0)
    monkeypatch.setattr(JournalWriter, "_write", fail)
    sink.write(pass_frame(1))
    sink.close()
    companion.stop()
    assert numbers(Run.open(run_dir)) == [0, 1]
    remove_ring(rank_dir(run_dir, 0))


# ---- the sink ----------------------------------------------------------------------------------------------------


def test_a_full_sink_drops_counts_and_shows_it(
    run_dir: Path, other: Callable[..., OtherCompanion], caplog: pytest.LogCaptureFixture
) -> None:
    companion = other(buffer=30_000)
    sink = companion.connect()
    companion.pause()
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        for number in range(100):
            sink.write(pass_frame(number, padding=1000))
    assert 0 < sink.dropped < 100
    assert caplog.text.count("records are being lost") == 1
    companion.go_on()
    until(lambda: sink._ring.read == sink._ring.written)
    for number in range(100, 110):
        sink.write(pass_frame(number))
    sink.close()
    companion.stop()
    run = Run.open(run_dir)
    kept = 100 - sink.dropped
    assert numbers(run) == [*range(kept), *range(100, 110)]
    assert [(g.reason, g.frame, g.frames, g.after_pass, g.before_pass) for g in run.gaps] == [
        ("lost", kept, sink.dropped, kept - 1, 100)
    ]


def test_frames_dropped_at_the_very_end_show_too(run_dir: Path, other: Callable[..., OtherCompanion]) -> None:
    companion = other(buffer=30_000)
    sink = companion.connect()
    sink.write(pass_frame(0))
    sink.write(pass_frame(1, padding=40_000))
    sink.close()
    companion.stop()
    assert sink.dropped == 1
    assert [(g.reason, g.frame, g.frames) for g in Run.open(run_dir).gaps] == [("lost", 1, 1)]


def test_a_blocking_sink_waits_and_loses_nothing(run_dir: Path, other: Callable[..., OtherCompanion]) -> None:
    companion = other(buffer=8_000, on_full="block")
    sink = companion.connect()
    for number in range(60):
        sink.write(pass_frame(number, padding=3_000))
    sink.close()
    companion.stop()
    assert sink.dropped == 0
    assert numbers(Run.open(run_dir)) == list(range(60))


def test_a_blocking_sink_gives_up_on_a_companion_that_hangs(other: Callable[..., OtherCompanion]) -> None:
    companion = other(buffer=8_000, on_full="block")
    sink = companion.connect(block_s=0.1)
    companion.pause()
    begin = time.monotonic()
    for number in range(20):
        sink.write(pass_frame(number, padding=3_000))
    assert 0.1 <= time.monotonic() - begin < 1.0, "it waits once, not for each frame"
    assert sink.dropped > 5
    companion.go_on()
    until(lambda: sink._ring.read == sink._ring.written)
    sink.write(pass_frame(20))
    companion.pause()
    sink.write(pass_frame(21, padding=3_000))
    sink.write(pass_frame(22, padding=3_000))
    begin = time.monotonic()
    sink.write(pass_frame(23, padding=3_000))
    assert time.monotonic() - begin >= 0.1, "it trusts a companion that came back"


def test_closing_gives_up_on_a_companion_that_hangs(
    other: Callable[..., OtherCompanion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("schedscope.recorder.sink._CLOSE_S", 0.1)
    page = 4096
    companion = other(buffer=page)
    sink = companion.connect()
    companion.pause()
    sink.write(pass_frame(0, padding=1000 + page - len(stamp(pass_frame(0, padding=1000), 0)) - 10))
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        sink.close()
    assert not sink.attached
    assert len(endings(caplog)) == 1
    assert "rank 0 ended at frame 1" in caplog.text
    assert "did not make room for the end" in caplog.text


def test_a_ring_lives_in_memory_and_goes_away(companion: Companion, run_dir: Path) -> None:
    sink = connect(companion)
    link = rank_dir(run_dir, 0) / LINK
    memory = link.readlink()
    assert memory.stat().st_mode & 0o777 == 0o600
    sink.close()
    companion.stop()
    assert not memory.exists()
    assert not link.is_symlink()


def test_a_broken_frame_detaches_without_raising(companion: Companion, caplog: pytest.LogCaptureFixture) -> None:
    sink = connect(companion)
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        sink.write("not a frame")  # type: ignore[arg-type]
        sink.write(pass_frame(0))
        sink.close()
    assert not sink.attached
    assert len(endings(caplog)) == 1


def test_without_a_companion_nothing_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_sink(0, environ={}) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "schedscope.recorder"):
        assert open_sink(3, environ={SOCKET_VARIABLE: str(tmp_path / "none")}) is None
    assert "rank 3 is not recorded: the companion at" in caplog.text


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


def test_without_room_in_memory_the_ring_is_on_disk(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("schedscope.recorder.ring.MEMORY", Path("/nowhere"))
    with caplog.at_level(logging.WARNING, "schedscope.recorder"), Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(pass_frame(0))
        assert (rank_dir(run_dir, 0) / LINK).is_file()
        assert not (rank_dir(run_dir, 0) / LINK).is_symlink()
        assert numbers(Run.open(run_dir)) == [0]
        sink.close()
    assert "the buffer is on disk, which may slow the scheduler: /nowhere: No such file or directory" in caplog.text
    assert not (rank_dir(run_dir, 0) / LINK).exists()
    assert numbers(Run.open(run_dir)) == [0]


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
