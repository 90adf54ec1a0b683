"""A flight recorder: what it lets go of, what makes it keep something, and what it then keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from patience import SOON_S, until
from rows import pass_frame, row
from schedscope.cli.main import main
from schedscope.engine.errors import UsageError
from schedscope.recorder import rids
from schedscope.recorder.companion import Companion
from schedscope.recorder.control import Control
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.keep import Keep, expire, parse_keep
from schedscope.recorder.manifest import create_run, read_manifest
from schedscope.recorder.options import Options
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs, resolve_run
from schedscope.recorder.sink import CompanionSink, open_sink
from schedscope.recorder.trigger import Trigger


def connect(companion: Companion) -> CompanionSink:
    sink = open_sink(0, environ=companion.environment())
    assert isinstance(sink, CompanionSink)
    return sink


def passes(run: Run) -> list[int]:
    found: list[int] = run.table("passes", 0, ["pass"])["pass"].to_pylist()
    return found


def ended(rid: str, ttft_ms: float) -> tuple[object, ...]:
    return row("requests", rid=rid, arrive_ns=5, first_token_ns=5 + int(ttft_ms * 1e6), finish_ns=10)


def kept_runs(run_dir: Path) -> list[Path]:
    return [info.path for info in find_runs(run_dir.parent) if info.path != run_dir]


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("10m", Keep(seconds=600)),
        ("90s", Keep(seconds=90)),
        ("1.5h", Keep(seconds=5400)),
        ("2d", Keep(seconds=172800)),
        ("500MB", Keep(size=500_000_000)),
        ("2 GiB", Keep(size=2**31)),
    ],
)
def test_amounts(text: str, keep: Keep) -> None:
    assert parse_keep(text) == keep


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "0s", "10 parsecs", "1e3s"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a time such as 10m"):
        parse_keep(text)


@pytest.mark.parametrize("keep", [Keep(size=1), Keep(seconds=0.001)])
def test_what_is_too_old_goes_and_shows(tmp_path: Path, keep: Keep) -> None:
    run_dir = create_run(tmp_path)
    options = Options(limits=Limits(passes=10), keep=keep)
    with Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        for number in range(100):
            sink.write(pass_frame(number))
        until(lambda: passes(Run.open(run_dir))[0] >= 80)
        sink.close()
    run = Run.open(run_dir)
    found = passes(run)
    assert found == list(range(found[0], 100))
    assert found[0] >= 80
    (gap,) = run.gaps
    assert (gap.reason, gap.frame, gap.frames, gap.before_pass) == ("expired", 0, found[0], found[0])
    assert run.status == "sealed"


def test_what_stays_is_found_by_request_in_one_look(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    with Companion.start(run_dir, Options(limits=Limits(passes=1), keep=Keep(seconds=3600))) as companion:
        sink = connect(companion)
        for number in range(60):
            sink.write(pass_frame(number))
        until(lambda: len(list_segments(run_dir, 0)) >= 50)
        until(lambda: (run_dir / "rank=0" / rids.NAME).exists())
        for number in range(45):
            assert [r["pass"] for r in Run.open(run_dir).request_rows(f"r{number}-0")["decisions"]] == [number]
        sink.close()


def test_what_is_young_and_small_enough_stays(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    sink = DirectSink(run_dir, 0, limits=Limits(passes=10))
    for number in range(50):
        sink.write(pass_frame(number))
    assert expire(run_dir, 0, Keep(seconds=3600), lambda segment: 3600.0 - segment.first_number) == []
    assert expire(run_dir, 0, Keep(size=10**9), lambda _: 1e9) == []
    gone = expire(run_dir, 0, Keep(seconds=3600), lambda segment: 3602.0 - segment.first_number)
    assert [(segment.first_pass, segment.last_pass) for segment in gone] == [(0, 9), (10, 19)]
    assert passes(Run.open(run_dir)) == list(range(20, 50))
    sink.close()


def test_a_slow_request_is_kept_with_what_lies_around_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = create_run(tmp_path, "prod")
    options = Options(
        limits=Limits(passes=10),
        keep=Keep(size=30_000),
        triggers=(Trigger("ttft_ms > 2000"),),
        before_s=60,
        after_s=0.2,
    )
    with Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        for number in range(100):
            slow = 2500.0 if number == 73 else 30.0
            sink.write(pass_frame(number, requests=[ended(f"q{number}", slow)]))
            time.sleep(0.002)
        until(lambda: kept_runs(run_dir))
        for number in range(100, 400):
            sink.write(pass_frame(number))
        sink.close()
    (path,) = kept_runs(run_dir)
    assert path.name.endswith("-prod-kept")
    kept = Run.open(path)
    assert kept.status == "sealed"
    assert kept.manifest.kept is not None
    assert kept.manifest.kept.reason == "ttft_ms > 2000 (request q73)"
    assert kept.manifest.kept.run == run_dir.name
    assert 73 in passes(kept)
    assert passes(kept) == list(range(passes(kept)[0], passes(kept)[-1] + 1))
    assert {gap.reason for gap in kept.gaps} <= {"expired"}
    assert 73 not in passes(Run.open(run_dir)), "the recorder itself has let go of it"
    assert len(kept.pass_rows(0, 73)["decisions"]) == 3
    assert resolve_run(None, run_dir.parent) == run_dir, "not the newest: a moment of a run isn't what one looks at"
    assert main(["inspect", "--run", str(path)]) == 0
    assert f"cut out of {run_dir.name}, from " in capsys.readouterr().out


def test_events_in_a_row_share_a_run_and_their_number_is_limited(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    options = Options(limits=Limits(passes=10), after_s=0.15, most_kept=2)
    with Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        for number in range(4):
            sink.write(pass_frame(number))
            companion.keep(f"event {number}")
            companion.keep("at the same time")
            until(lambda: companion._sealer._coming is None)
        sink.close()
    reasons = {read_manifest(path).kept.reason for path in kept_runs(run_dir)}  # type: ignore[union-attr]
    assert reasons == {"event 0", "event 1"}


def test_passes_and_steps_can_be_watched_too() -> None:
    trigger = Trigger("passes: queue_len > 100 and stop = 'NO_TOKEN'")
    assert trigger.check({"passes": [row("passes", queue_len=101, stop="OTHER")]}) is None
    found = trigger.check({"passes": [row("passes", queue_len=101, stop="NO_TOKEN", **{"pass": 7})]})
    assert found is not None
    assert found.endswith("(pass 7)")
    assert Trigger("steps: available < 10").check({"steps": [row("steps", step=3)]}) == "steps: available < 10 (step 3)"
    assert Trigger("end_reason = 'abort: by whom'").check({}) is None
    assert Trigger("steps: rank = 2").check({"steps": [row("steps", step=3)]}, 2) == "steps: rank = 2 (step 3)"
    assert Trigger("steps: rank = 2").check({"steps": [row("steps", step=3)]}, 1) is None


@pytest.mark.parametrize(
    "text",
    [
        "ttft > 5",
        "passes: nonsense",
        "decisions: need > 1",
        "1 = 1; drop table x",
        "true; select 1 --",
        "rid::int > 5",
        "rid in (select * from read_csv('/etc/passwd'))",
        "",
    ],
)
def test_conditions_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-when"):
        Trigger(text)


def test_a_condition_that_fails_later_is_given_up_and_the_recorder_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = create_run(tmp_path)
    failing, good = Trigger("case when rid = 'x' then false else end_reason::int > 5 end"), Trigger("ttft_ms > 2000")
    options = Options(limits=Limits(passes=1), triggers=(failing, good), after_s=0.05)
    with caplog.at_level("WARNING", "schedscope.recorder"), Companion.start(run_dir, options) as companion:
        sink = connect(companion)
        for number in range(5):
            bad = row("requests", rid="y", end_reason="no number")
            sink.write(pass_frame(number, requests=[bad, ended(f"q{number}", 2500)]))
        until(lambda: kept_runs(run_dir))
        sink.close()
    assert caplog.text.count("it is not looked at any more") == 1
    assert passes(Run.open(run_dir)) == list(range(5))


def test_control_over_http(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path)
    with Companion.start(run_dir, Options(after_s=0.05)) as companion, Control(companion, "0") as control:
        sink = connect(companion)
        sink.write(pass_frame(0))
        keep = urllib.request.Request(f"{control.url}/keep?reason=p99%20jumped", method="POST")
        with urllib.request.urlopen(keep) as answer:
            assert answer.status == 202
        until(lambda: kept_runs(run_dir))
        with urllib.request.urlopen(f"{control.url}/status") as answer:
            status = json.load(answer)
        assert status["run"] == str(run_dir)
        assert (status["kept"], status["ranks"]["0"]["failing"]) == (1, False)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{control.url}/elsewhere")
        with pytest.raises(UsageError, match="can't listen there"):
            Control(companion, control.url.removeprefix("http://"))
        sink.close()
    assert passes(Run.open(kept_runs(run_dir)[0])) == [0]
    assert read_manifest(kept_runs(run_dir)[0]).kept.reason == "p99 jumped"  # type: ignore[union-attr]


RECORDED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from rows import pass_frame
from schedscope.recorder.sink import open_sink
sink = open_sink(0)
for number in range(100000):
    sink.write(pass_frame(number))
    time.sleep(0.002)
"""


def test_a_signal_to_record_keeps_the_moment(tmp_path: Path) -> None:
    name = f"flight{os.getpid()}"
    words = ["record", "--log", str(tmp_path), "--keep", "1h", "--keep-after", "0.1", "--name", name]
    script = ["--", sys.executable, "-c", RECORDED, str(Path(__file__).parent)]
    command = [sys.executable, "-m", "schedscope.cli.main", *words, *script]
    recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: any(info.passes > 5 for info in find_runs(tmp_path)))
        recorder.send_signal(signal.SIGUSR1)
        until(lambda: any(info.path.name.endswith("-kept") and info.status == "sealed" for info in find_runs(tmp_path)))
    finally:
        recorder.send_signal(signal.SIGTERM)
        _, said = recorder.communicate(timeout=SOON_S)
    assert "SIGUSR1" in said
    kept = next(info for info in find_runs(tmp_path) if info.path.name.endswith("-kept"))
    assert kept.passes > 5
    assert not list(Path("/dev/shm").glob(f"schedscope-*{name}*"))
