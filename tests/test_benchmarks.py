"""Benchmarks that tell right from wrong, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_nothing_is_lost_or_misread_after_kills(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "bench_kill.py"), "--kills", "6", "--seed", "7", "--json", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    assert (found["acknowledged_and_lost"], found["misread"]) == (0, 0)
    assert found["passes_read"] >= found["passes_acknowledged"] > 100


def test_a_live_reader_misses_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "bench_live.py"), "--seconds", "3", "--json", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    looks = json.loads(figures.read_text())
    assert [look["passes_behind_max"] for look in looks.values()] == [0, 0, 0]


def test_a_kept_run_is_verified_again(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_replay.py"), "--passes", "60", "--at", "2", "--race", "20"]
    command += ["--jobs", "1", "--keep", str(tmp_path / "run"), "--json", str(tmp_path / "figures.json")]
    environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "tests")}
    for parts in ({"run", "access", "rebuild", "verify", "command"}, {"access", "rebuild", "verify", "command"}):
        ended = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert parts == figures.keys() - {"python"}
        assert figures["verify"]["passes"] == 20


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("bench_*.py")))
def test_benchmarks_start(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS, env=environ)
    if "No module named 'sglang'" in ended.stderr:
        pytest.skip("needs SGLang")
    assert ended.returncode == 0, ended.stderr
