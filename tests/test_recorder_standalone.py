"""Recording a server that was started without `schedscope record`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from schedscope.recorder.hello import Detail
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from schedscope.recorder.standalone import OPTIONS_VARIABLE, RECORD_VARIABLE

SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from rows import pass_frame
from schedscope.recorder.sink import open_sink
from schedscope.recorder.standalone import ensure_companion
ensure_companion()
sink = open_sink(0)
if sink is None:
    sys.exit("serving, unrecorded")
for number in range(20):
    sink.write(pass_frame(number))
os._exit(9) if sys.argv[2] == "die" else sink.close()
"""
SOON_S = 20.0


def run_server(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent), end]
    return subprocess.run(command, env={**os.environ, RECORD_VARIABLE: str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize("end", ["close", "die"])
def test_a_server_can_record_itself(tmp_path: Path, end: str) -> None:
    assert run_server(tmp_path, end).returncode == (9 if end == "die" else 0)
    deadline = time.monotonic() + SOON_S
    while [info.status for info in find_runs(tmp_path)] != ["sealed"]:
        assert time.monotonic() < deadline, "the companion ends with the server"
        time.sleep(0.05)
    (info,) = find_runs(tmp_path)
    run = Run.open(info.path)
    assert run.table("passes", 0, ["pass"])["pass"].to_pylist() == list(range(20))
    assert [gap.reason for gap in run.gaps] == (["cut"] if end == "die" else [])


def test_it_takes_the_options_of_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, "--tokens none --level passes --keep 10m")
    ended = run_server(tmp_path, "close")
    assert "recording into" in ended.stderr
    (info,) = find_runs(tmp_path)
    manifest = Run.open(info.path).manifest
    assert (manifest.detail, manifest.keep) == (Detail(level="passes", tokens="none"), "600 s")


def test_options_that_make_no_sense_cost_the_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, "--tokens some")
    ended = run_server(tmp_path, "close")
    assert "schedscope: SCHEDSCOPE_RECORD_OPTIONS: Invalid value" in ended.stderr
    assert "nothing is recorded" in ended.stderr
    assert find_runs(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_the_recording_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ended = run_server(blocked / "runs", "close")
    assert "can't create a run in" in ended.stderr
    assert "nothing is recorded: the recorder for" in ended.stderr
    assert ended.stderr.endswith("serving, unrecorded\n")
