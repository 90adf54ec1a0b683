"""New scenarios through SGLang's own classes and through ours, where SGLang is installed.

Set SCHEDSCOPE_SGLANG_PYTHON to the python of an environment with sglang 0.5.23 (and PYTHONPATH to what it needs to be
imported without a GPU), and SCHEDSCOPE_SGLANG_SEED for other scenarios.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from schedscope.replay.scenario import read_scenarios
from schedscope.replay.scenario_check import check

ORACLE = Path(__file__).parent / "oracle"
PYTHON = os.environ.get("SCHEDSCOPE_SGLANG_PYTHON")
SEED = os.environ.get("SCHEDSCOPE_SGLANG_SEED", "1")


with_sglang = pytest.mark.skipif(
    PYTHON is None, reason="NOT COMPARED WITH SGLANG: set SCHEDSCOPE_SGLANG_PYTHON to a python that has sglang 0.5.23"
)


@with_sglang
@pytest.mark.parametrize(("kind", "count"), [("pass", 60), ("delayer", 20), ("evict", 30)])
def test_new_scenarios_come_out_as_in_sglang(tmp_path: Path, kind: str, count: int) -> None:
    assert PYTHON is not None
    file = tmp_path / "scenarios.jsonl"
    generate = [sys.executable, str(ORACLE / "generate.py"), "--seed", SEED, "--count", str(count), "--kind", kind]
    with file.open("w") as out:
        subprocess.run([*generate, "--oracle", PYTHON], stdout=out, check=True)
    checked = [check(placed) for placed in read_scenarios([file])]
    assert len(checked) >= count
    assert not [f"{c.scenario.id}: {c.differences[0]}" for c in checked if c.differences]


@with_sglang
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize("options", [[], ["--aborts"]], ids=["", "aborts"])
def test_the_whole_loop_goes_as_in_sglang(options: list[str], overlap: str) -> None:
    assert PYTHON is not None
    compare = [sys.executable, str(ORACLE / "loop_compare.py"), "--oracle", PYTHON, "--seed", SEED, "--count", "60"]
    done = subprocess.run([*compare, overlap, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "64 workloads" in done.stdout  # and four known ones
