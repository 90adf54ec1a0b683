"""Recording into an object store and reading from it, over HTTP, with everything that networks do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_store import BUCKET, CREDENTIALS, Line, S3Server
from rows import DECISIONS, pass_frame, row
from schedscope.cli.main import main
from schedscope.engine.errors import RunFormatError, RunNotFoundError, StoreError, UsageError
from schedscope.recorder import mirror
from schedscope.recorder.companion import Companion
from schedscope.recorder.keep import Keep
from schedscope.recorder.options import Options
from schedscope.recorder.parcel import parcels
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs, resolve_run
from schedscope.recorder.sink import CompanionSink, open_sink
from schedscope.recorder.store import Store, join_url
from schedscope.recorder.upload import Uploader, begin_run

SOON_S = 60.0
TESTS = Path(__file__).parent

RECORDED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from rows import pass_frame
from schedscope.recorder.sink import open_sink
sink = open_sink(0)
for number in range(int(sys.argv[2])):
    sink.write(pass_frame(number))
    time.sleep(float(sys.argv[3]))
sink.close()
raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    server.fs.create_dir(BUCKET)
    yield server
    server.close()


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own, with a cache of its own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SCHEDSCOPE_LOG_DIR", raising=False)
    return f"logs/{tmp_path.name}"


@pytest.fixture
def url(server: S3Server, prefix: str) -> str:
    return server.url(prefix)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def begin(url: str, spool: Path, name: str = "job") -> tuple[Path, Uploader]:
    run_dir, uploader = begin_run(url, name, ["serve"], spool)
    assert uploader is not None
    return run_dir, uploader


def connect(companion: Companion, rank: int = 0) -> CompanionSink:
    sink = open_sink(rank, environ=companion.environment())
    assert isinstance(sink, CompanionSink)
    return sink


def passes(run: Run, rank: int = 0) -> list[int]:
    found: list[int] = run.table("passes", rank, ["pass"])["pass"].to_pylist() if rank in run.ranks else []
    return found


def run_url(url: str, uploader: Uploader, run_dir: Path) -> str:
    return join_url(url, uploader.parcel.name_of(run_dir))


def schedscope(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schedscope.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# ---- as typed ----------------------------------------------------------------------------------------------------


def test_record_and_read_back_by_url(
    server: S3Server, url: str, prefix: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = [sys.executable, "-c", RECORDED, TESTS, 25, 0]
    done = schedscope("record", "--log", url, "--spool", spool, "--name", "nightly", "--", *recorded)
    assert done.returncode == 7, done.stderr
    assert "Recorded 25 passes" in done.stderr
    where = done.stdout.splitlines()[-1]
    assert where.startswith(f"s3://{BUCKET}/{prefix}/2")
    assert list(spool.iterdir()) == [], "all of it is uploaded"
    assert [key for key in server.keys(prefix) if key.endswith((".journal", ".tmp"))] == []
    listed = schedscope("runs", "--log", url, "--json")
    (entry,) = json.loads(listed.stdout)["runs"]
    assert (entry["status"], entry["passes"], entry["name"], entry["path"]) == ("sealed", 25, "nightly", where)
    assert entry["bytes"] > 1000
    sql = "select count(*) as n from decisions"
    for words in (["--run", where], ["--log", url], ["--log", url, "--run", "nightly"]):
        asked = schedscope("query", sql, *words, "--format", "json")
        assert json.loads(asked.stdout)["rows"] == [{"n": 25 * DECISIONS}], asked.stderr
    inspected = json.loads(schedscope("inspect", where, "--json").stdout)
    assert (inspected["run"], inspected["bytes"] < entry["bytes"]) == (where, True), "all but the manifest"
    assert len(Run.open(where).request_rows("r7-1")["decisions"]) == 1
    monkeypatch.setenv("SCHEDSCOPE_LOG_DIR", url)
    assert "nightly" in schedscope("runs").stdout
    assert json.loads(schedscope("query", sql, "--format", "json").stdout)["run"] == where


def test_a_served_model_is_recorded_and_replayed_by_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSCOPE_LOG_DIR", url)
    demo = schedscope("demo", "--speed", 50)
    assert demo.returncode == 0, demo.stderr
    replayed = schedscope("replay", "all", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["identical"] is True
    assert json.loads(replayed.stdout)["run"].startswith("s3://")
    assert schedscope("replay", "pass", 3).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["runs", "--log", "ftp://host/x"], 2, "unknown scheme 'ftp'"),
        (["record", "--log", "ftp://host/x", "--", "touch", "MARK"], 2, "unknown scheme 'ftp'"),
        (["runs", "--log", "s3:///x"], 2, "names no bucket"),
        (["runs", "--log", "s3://bucket/x?colour=red"], 2, "unknown option 'colour'"),
        (["runs", "--log", "NO_BUCKET"], 10, "no bucket 'nobody'"),
        (["query", "select 1", "--log", "NO_BUCKET"], 10, "no bucket 'nobody'"),
        (["replay", "all", "--run", "NO_BUCKET"], 10, "no bucket 'nobody'"),
        (["record", "--log", "NO_BUCKET", "--", "touch", "MARK"], 10, "no such bucket"),
        (["runs", "--log", "DENIED"], 10, "access denied"),
        (["record", "--log", "DENIED", "--", "touch", "MARK"], 10, "access denied"),
        (["runs", "--log", "DOWN"], 10, "can't be reached"),
        (["replay", "all", "--run", "DOWN"], 10, "can't be reached"),
        (["replay", "all", "--run", "URL/none"], 5, "is not a run"),
        (["query", "select 1", "--log", "URL"], 5, "no run in s3://"),
        (["query", "select 1", "--log", "URL", "--run", "tuesday"], 5, "no run 'tuesday'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_stores_that_do_not_play_along_get_clear_words(
    server: S3Server,
    denying: S3Server,
    prefix: str,
    url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    mark = tmp_path / "mark"
    stand_ins = {
        "NO_BUCKET": url.replace(BUCKET, "nobody"),
        "DENIED": denying.url(prefix),
        "DOWN": server.url(prefix, port=Line(server.port, up=False).port),
        "URL": url,
        "URL/none": join_url(url, "none"),
        "MARK": str(mark),
    }
    assert main([stand_ins.get(word, word) for word in words]) == code
    captured = capfd.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err + captured.out
    assert not mark.exists(), "a command whose recording can't go anywhere is not started"
    assert parcels(tmp_path / "cache" / "schedscope" / "spool") == []


@pytest.fixture(scope="module")
def denying() -> Iterator[S3Server]:
    server = S3Server(denying=True)
    yield server
    server.close()


def test_the_environment_may_name_the_server(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.delenv("AWS_REGION")
    recorded = [sys.executable, "-c", RECORDED, str(TESTS), "3", "0"]
    assert main(["record", "--log", f"s3://{BUCKET}/{prefix}", "--", *recorded]) == 7
    where = capsys.readouterr().out.splitlines()[-1]
    assert where.startswith(f"s3://{BUCKET}/{prefix}/")
    assert passes(Run.open(where)) == [0, 1, 2]


def test_an_empty_prefix_has_no_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--log", url]) == 0
    assert "No runs in s3://" in capsys.readouterr().out


def test_a_command_that_can_not_be_started_leaves_nothing(server: S3Server, url: str, prefix: str, spool: Path) -> None:
    assert main(["record", "--log", url, "--spool", str(spool), "--", "/no/such/command"]) == 9
    assert server.keys(prefix) == []
    assert list(spool.iterdir()) == []


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(UsageError) as error:
        Store("s3://key:geheim@bucket/x?colour=red")
    assert "geheim" not in str(error.value)
    assert Store("s3://key:geheim@bucket/x").shown == "s3://***@bucket/x"


def test_any_other_file_system_works_too(tmp_path: Path, prefix: str, spool: Path) -> None:
    del prefix
    url = f"file://{tmp_path}/far/away"
    run_dir, uploader = begin(url, spool)
    with Companion.start(run_dir, Options(limits=Limits(passes=2))) as companion:
        sink = connect(companion)
        for number in range(7):
            sink.write(pass_frame(number))
        until(lambda: len(passes(Run.open(run_url(url, uploader, run_dir)))) >= 4)
        sink.close()
    assert uploader.finish() is None
    assert passes(Run.open(resolve_run(None, url))) == list(range(7))
    assert list((tmp_path / "far").rglob("*.tmp")) == []


# ---- while it is recorded ----------------------------------------------------------------------------------------


def test_a_reader_follows_a_recording_through_merges(server: S3Server, url: str, prefix: str, spool: Path) -> None:
    """Many tiny segments, merged again and again and at the end: each look sees a prefix, every row once."""
    run_dir, uploader = begin(url, spool)
    seen: list[int] = []
    wrong: list[str] = []
    stop = threading.Event()
    address = run_url(url, uploader, run_dir)

    def follow() -> None:
        run = Run.open(address)
        while not stop.is_set():
            found = passes(run)
            if found != list(range(len(found))) or len(found) < (seen[-1] if seen else 0):
                wrong.append(f"passes {found}")
            (rows, distinct) = (
                run.connect(["decisions"]).execute("SELECT count(*), count(DISTINCT rid) FROM decisions").fetchall()[0]
            )
            if rows != distinct or rows < len(found) * DECISIONS:
                wrong.append(f"{rows} decisions, {distinct} different ones, of {len(found)} passes")
            if run.gaps:
                wrong.append(f"gaps {run.gaps}")
            seen.append(len(found))

    reader = threading.Thread(target=follow)
    with Companion.start(run_dir, Options(limits=Limits(passes=2))) as companion:
        sink = connect(companion)
        reader.start()
        for number in range(160):
            sink.write(pass_frame(number))
            time.sleep(0.05)
        assert Run.open(address).status == "recording"
        sink.close()
    assert uploader.finish() is None
    until(lambda: seen and seen[-1] == 160)
    stop.set()
    reader.join()
    assert wrong == []
    assert len(set(seen)) > 3, "it saw the run grow"
    run = Run.open(address)
    assert (run.status, run.gaps) == ("sealed", [])
    segments = {key.split("/")[2] for key in server.keys(prefix) if key.count("/") == 3}
    assert len(segments) == 1, "what was merged is gone"


def test_only_what_is_asked_for_is_fetched(url: str, spool: Path, tmp_path: Path) -> None:
    run_dir, uploader = begin(url, spool)
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(pass_frame(0, tokens=[row("tokens", rid="a", ids=[1, 2, 3])]))
        sink.close()
    assert uploader.finish() is None
    cache = tmp_path / "cache"
    run = Run.open(run_url(url, uploader, run_dir))
    assert run.passes().count == 1
    assert list(cache.rglob("*.parquet")) == []
    assert len(run.pass_rows(0, 0)["decisions"]) == DECISIONS
    assert {path.name for path in cache.rglob("*.parquet")} == {"passes.parquet", "decisions.parquet"}
    assert run.table("tokens")["ids"].to_pylist() == [[1, 2, 3]]
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.parquet")}
    assert Run.open(run.path).table("tokens").num_rows == 1, "by the cache's path, too"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.parquet")} == before


def test_a_file_that_someone_removed_or_damaged_is_named(server: S3Server, url: str, prefix: str, spool: Path) -> None:
    run_dir, uploader = begin(url, spool)
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(pass_frame(0))
        sink.close()
    assert uploader.finish() is None
    for key in server.keys(prefix):
        if key.endswith("decisions.parquet"):
            server.fs.delete_file(f"{BUCKET}/{prefix}/{key}")
        if key.endswith("passes.parquet"):
            server.put(f"{prefix}/{key}", b"nonsense")
    run = Run.open(run_url(url, uploader, run_dir))
    with pytest.raises(RunFormatError, match=r"decisions\.parquet.*there is no such file"):
        run.table("decisions")
    with pytest.raises(RunFormatError, match=r"passes\.parquet: damaged"):
        run.table("passes")


def test_foreign_objects_do_not_matter(server: S3Server, url: str, prefix: str, spool: Path) -> None:
    run_dir, uploader = begin(url, spool)
    name = uploader.parcel.name_of(run_dir)
    foreign = [
        f"{prefix}/README.txt",
        f"{prefix}/other/data.bin",
        f"{prefix}/{name}/notes.txt",
        f"{prefix}/{name}/rank=0/notes.txt",
        f"{prefix}/{name}/rank=0/index.json",
        f"{prefix}/{name}/rank=0/deep/er/index.json",
        f"{prefix}/{name}/rank=0/mine/index.json",
        f"{prefix}/{name}/rank=0/00000099.p500-600/passes.parquet",
        f"{prefix}/{name}/rank=x/00000099.p500-600/index.json",
    ]
    for key in foreign:
        server.put(key, b"?")
    with Companion.start(run_dir, Options(limits=Limits(passes=2))) as companion:
        sink = connect(companion)
        for number in range(9):
            sink.write(pass_frame(number))
        sink.close()
    assert uploader.finish() is None
    assert [info.status for info in find_runs(url)] == ["sealed"]
    run = Run.open(resolve_run("job", url))
    assert (run.ranks, passes(run), run.gaps) == ([0], list(range(9)), [])
    left = {f"{prefix}/{key}" for key in server.keys(prefix)}
    assert set(foreign) - left == {foreign[-2]}, "only what looks like a torn segment of the rank was cleaned up"


def test_many_ranks_and_many_recorders_share_a_prefix(url: str, spool: Path) -> None:
    begun = [begin(url, spool, "same") for _ in range(3)]
    for run_dir, _ in begun:
        with Companion.start(run_dir, Options(limits=Limits(passes=2), buffer=2**16)) as companion:
            sinks = [connect(companion, rank) for rank in range(12)]
            for number in range(5):
                for sink in sinks:
                    sink.write(pass_frame(number))
            for sink in sinks:
                sink.close()
    assert [uploader.finish() for _, uploader in begun] == [None] * 3
    runs = find_runs(url)
    assert [(info.name, info.ranks, info.passes, info.status) for info in runs] == [("same", 12, 60, "sealed")] * 3
    assert len({info.path for info in runs}) == 3
    run = Run.open(runs[0].path)
    assert run.connect().execute("SELECT count(*), count(DISTINCT rank) FROM passes").fetchall() == [(60, 12)]


def test_a_flight_recorder_lets_go_and_keeps_in_the_store(server: S3Server, url: str, prefix: str, spool: Path) -> None:
    run_dir, uploader = begin(url, spool, "flight")
    options = Options(limits=Limits(passes=5), keep=Keep(size=100_000), after_s=0.1)
    with Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        address = run_url(url, uploader, run_dir)
        for number in range(20):
            sink.write(pass_frame(number))
        until(lambda: len(passes(Run.open(address))) >= 15)
        companion.keep("someone asked")
        until(lambda: len(find_runs(url)) == 2)
        for number in range(20, 200):
            sink.write(pass_frame(number))
            time.sleep(0.005)
        until(lambda: passes(Run.open(address))[0] > 100)
        sink.close()
    assert uploader.finish() is None
    found = passes(Run.open(address))
    assert found == list(range(found[0], 200))
    assert [gap.reason for gap in Run.open(address).gaps] == ["expired"]
    kept = next(info for info in find_runs(url) if info.path.name != uploader.parcel.name_of(run_dir))
    run = Run.open(kept.path)
    assert passes(run) == list(range(20))
    assert run.manifest.kept is not None
    assert (run.status, run.manifest.kept.run) == ("sealed", uploader.parcel.name_of(run_dir))
    keys = server.keys(f"{prefix}/{uploader.parcel.name_of(run_dir)}/rank=0")
    first = min(int(key.split(".p")[1].split("-")[0]) for key in keys if ".p/" not in key)
    assert first == found[0], "what expired is gone there, too"


# ---- stores that fail --------------------------------------------------------------------------------------------


def test_a_store_that_is_down_at_the_start_gets_all_of_it_later(
    server: S3Server, prefix: str, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(server.port, up=False)
    begin_s = time.monotonic()
    run_dir, uploader = begin(server.url(prefix, line.port), spool)
    assert time.monotonic() - begin_s < 10
    assert "can't be reached" in caplog.text
    with Companion.start(run_dir, Options(limits=Limits(passes=5))) as companion:
        sink = connect(companion)
        for number in range(50):
            sink.write(pass_frame(number))
        assert sink.dropped == 0
        line.up()
        until(lambda: server.keys(prefix))
        sink.close()
    assert uploader.finish() is None
    line.down()
    run = Run.open(resolve_run(None, server.url(prefix)))
    assert (run.status, passes(run), run.gaps) == ("sealed", list(range(50)), [])


def test_a_store_that_goes_away_in_the_middle_harms_nothing(
    server: S3Server, prefix: str, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(server.port)
    run_dir, uploader = begin(server.url(prefix, line.port), spool)
    address = run_url(server.url(prefix), uploader, run_dir)
    with Companion.start(run_dir, Options(limits=Limits(passes=5))) as companion:
        sink = connect(companion)
        for number in range(50):
            sink.write(pass_frame(number))
        until(lambda: len(passes(Run.open(address))) >= 45)
        line.down()
        for number in range(50, 400):
            sink.write(pass_frame(number))
        assert passes(Run.open(run_dir)) == list(range(400)), "it is here all the same"
        until(lambda: "can't upload now" in caplog.text)
        found = passes(Run.open(address))
        assert found == list(range(len(found)))
        line.up()
        until(lambda: "takes what is recorded again" in caplog.text)
        sink.close()
    assert uploader.finish() is None
    line.down()
    assert caplog.text.count("can't upload now") == 1
    run = Run.open(address)
    assert (run.status, passes(run), run.gaps) == ("sealed", list(range(400)), [])


def test_what_a_store_does_not_take_at_the_end_is_uploaded_later(
    server: S3Server, url: str, prefix: str, spool: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = Line(server.port)
    run_dir, uploader = begin(server.url(prefix, line.port), spool)
    with Companion.start(run_dir, Options(limits=Limits(passes=5))) as companion:
        sink = connect(companion)
        for number in range(23):
            sink.write(pass_frame(number))
        until(lambda: len(server.keys(prefix)) > 4)
        line.down()
        sink.close()
    left = uploader.finish(patience_s=0.5)
    assert left is not None
    assert (left.path, left.files > 2) == (uploader.parcel.path, True)
    assert "can't be reached" in str(left)
    assert "schedscope upload" in str(left)
    assert Run.open(run_dir).status == "sealed"
    assert main(["upload", "--spool", str(spool), "--to", url.replace(BUCKET, "nobody")]) == 10
    assert "no such bucket" in capfd.readouterr().err
    assert main(["upload", "--spool", str(spool), "--to", url]) == 0
    assert capfd.readouterr().out.splitlines() == [run_url(url, uploader, run_dir)]
    assert list(spool.iterdir()) == []
    run = Run.open(run_url(url, uploader, run_dir))
    assert (run.status, passes(run), run.gaps) == ("sealed", list(range(23)), [])
    segments = {key.split("/")[2] for key in server.keys(prefix) if key.count("/") == 3}
    assert len(segments) == 1, "what it had taken before the merge is gone"
    assert main(["upload", "--spool", str(spool)]) == 0
    assert "Nothing waits" in capfd.readouterr().out


def test_record_says_what_it_could_not_upload_and_keeps_the_exit_code(
    server: S3Server, prefix: str, spool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("schedscope.cli.record.PATIENCE_S", 0.5)
    url = server.url(prefix, Line(server.port, up=False).port)
    words = ["record", "--log", url, "--spool", str(spool), "--", sys.executable, "-c", RECORDED, str(TESTS), "5", "0"]
    assert main(words) == 7
    captured = capfd.readouterr()
    assert "Not uploaded: " in captured.err
    assert "can't be reached" in captured.err
    path = Path(captured.out.splitlines()[-1])
    assert path.is_relative_to(spool)
    assert passes(Run.open(path)) == list(range(5))


def test_a_store_that_hangs_does_not_hold_up_the_recording(server: S3Server, url: str, spool: Path) -> None:
    run_dir, uploader = begin(url, spool)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with Companion.start(run_dir, Options(limits=Limits(passes=5))) as companion:
            sink = connect(companion)
            begun = time.monotonic()
            for number in range(500):
                sink.write(pass_frame(number))
            assert time.monotonic() - begun < 2
            sink.close()
        assert sink.dropped == 0
        assert passes(Run.open(run_dir)) == list(range(500))
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert uploader.finish() is None
    assert passes(Run.open(run_url(url, uploader, run_dir))) == list(range(500))


def test_a_killed_recorder_leaves_what_it_uploaded_and_the_rest_in_the_spool(
    server: S3Server,
    url: str,
    prefix: str,
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recorded = [sys.executable, "-c", RECORDED, str(TESTS), "100000", "0.002"]
    words = ["record", "--log", url, "--spool", str(spool), "--keep", "1h", "--", *recorded]
    recorder = subprocess.Popen(
        [sys.executable, "-m", "schedscope.cli.main", *words], stdout=subprocess.PIPE, text=True
    )
    until(lambda: any(key.endswith("passes.parquet") for key in server.keys(prefix)))
    (child,) = Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children").read_text().split()
    recorder.kill()
    os.kill(int(child), signal.SIGKILL)
    recorder.wait()
    run = Run.open(resolve_run(None, url))
    assert run.status == "recording", "it may have been a moment ago"
    in_store = passes(run)
    assert in_store == list(range(len(in_store)))
    monkeypatch.setattr(mirror, "ALIVE_S", 0.0)
    mirror._mirrors.clear()
    run = Run.open(resolve_run(None, url))
    assert run.status == "interrupted"
    assert [gap.reason for gap in run.gaps] == ["interrupted"]
    (parcel,) = parcels(spool)
    local = passes(Run.open(next(path.parent for path in parcel.glob("*/manifest.json"))))
    assert len(local) > len(in_store)
    assert main(["upload", "--spool", str(spool)]) == 0
    assert capfd.readouterr().out.strip() == run.where
    mirror._mirrors.clear()
    run = Run.open(resolve_run(None, url))
    assert (run.status, passes(run)) == ("sealed", local)
    assert [gap.reason for gap in run.gaps] == ["interrupted"]


def test_upload_leaves_a_living_recording_alone(url: str, spool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, uploader = begin(url, spool)
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(pass_frame(0))
        assert main(["upload", "--spool", str(spool)]) == 0
        sink.close()
    assert "Nothing waits" in capsys.readouterr().out
    assert uploader.finish() is None
    assert passes(Run.open(run_url(url, uploader, run_dir))) == [0]


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_a_run_that_was_deleted_is_not_read_from_the_cache(
    server: S3Server, url: str, prefix: str, spool: Path
) -> None:
    run_dir, uploader = begin(url, spool)
    with Companion.start(run_dir) as companion:
        sink = connect(companion)
        sink.write(pass_frame(0))
        sink.close()
    assert uploader.finish() is None
    address = run_url(url, uploader, run_dir)
    assert passes(Run.open(address)) == [0]
    server.fs.delete_dir(f"{BUCKET}/{prefix}")
    mirror._mirrors.clear()
    assert find_runs(url) == []
    with pytest.raises(RunNotFoundError, match="is not a run"):
        Run.open(address)


def test_the_cache_keeps_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_IN_USE_S", -1.0)
    for number in range(10):
        file = tmp_path / "log" / "run" / "rank=0" / f"{number:08d}.p0-9" / "passes.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 100)
        (file.parent / "index.json").write_bytes(b"{}")
        os.utime(file, (1000 + number, 1000 + number))
    mirror._make_room(tmp_path, 350)
    assert [path.parent.name[:8] for path in sorted(tmp_path.rglob("*.parquet"))] == [
        "00000007",
        "00000008",
        "00000009",
    ]
    assert len(list(tmp_path.rglob("index.json"))) == 10


def test_errors_of_a_store_that_may_pass_are_told_from_those_that_stay(server: S3Server, prefix: str) -> None:
    for url, final in ((server.url(prefix).replace(BUCKET, "nobody"), True), (server.url(prefix, 1), False)):
        with pytest.raises(StoreError) as error:
            Store(url).write("x", b"y")
        assert error.value.final is final
