"""New scenarios and workloads through SGLang's own classes and through ours.

SGLang is installed for that, see `sglang_server.py`; SCHEDSCOPE_SGLANG_SEED gives other scenarios.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from schedscope.replay.scenario import read_scenarios
from schedscope.replay.scenario_check import check
from schedscope.replay.verify import verify
from schedscope.replay.verify_view import verify_views
from sglang_server import environment, sglang_python

ORACLE = Path(__file__).parent / "oracle"
SEED = os.environ.get("SCHEDSCOPE_SGLANG_SEED", "1")


@pytest.mark.parametrize(("kind", "count"), [("pass", 60), ("delayer", 20), ("evict", 30)])
def test_new_scenarios_come_out_as_in_sglang(tmp_path: Path, kind: str, count: int) -> None:
    file = tmp_path / "scenarios.jsonl"
    generate = [sys.executable, str(ORACLE / "generate.py"), "--seed", SEED, "--count", str(count), "--kind", kind]
    with file.open("w") as out:
        subprocess.run([*generate, "--oracle", str(sglang_python())], stdout=out, check=True, env=environment())
    checked = [check(placed) for placed in read_scenarios([file])]
    assert len(checked) >= count
    assert not [f"{c.scenario.id}: {c.differences[0]}" for c in checked if c.differences]


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize("options", [[], ["--aborts"]], ids=["", "aborts"])
def test_the_whole_loop_goes_as_in_sglang(options: list[str], overlap: str) -> None:
    done = compare(overlap, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "64 workloads" in done.stdout  # and four known ones


def test_sglang_decides_the_same_under_the_eyes_of_the_plugin_and_every_pass_is_replayed(tmp_path: Path) -> None:
    done = compare("--aborts", "--watch", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "the observer failed" not in done.stdout, done.stdout[-3000:]
    runs = find_runs(tmp_path)
    assert len(runs) > 55
    passes = 0
    for info in runs:
        run = Run.open(info.path)
        seen, rebuilt = verify_views(run, 0), verify(run, 0)
        assert seen.divergence is None, f"{info.name}: {seen.divergence}"
        assert rebuilt.divergence is None, f"{info.name}: {rebuilt.divergence}"
        assert seen.passes == rebuilt.passes == run.passes(0).count
        passes += seen.passes
    assert passes > 2_000


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    """Sixty random workloads through both, and some known ones."""
    command = [sys.executable, ORACLE / "loop_compare.py", "--oracle", sglang_python(), "--seed", SEED, "--count", "60"]
    return subprocess.run([*map(str, command), *options], capture_output=True, text=True, env=environment())
