"""How long an explanation takes in a long run, and whether it adds up.

    python benchmarks/bench_explain.py [--passes N] [--requests N] [--keep FOLDER] [--json FILE]

See README.md in this folder for what is recorded and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import traffic
from bench_replay import add_checkpoints
from schedscope.recorder.compact import tidy
from schedscope.recorder.run import Run
from schedscope.replay.explain_pass import explain_pass
from schedscope.replay.explain_request import explain_request
from schedscope.replay.ledger import request_ledger, run_ledger

POLICY = "lpm"
QUEUE = (20, 60)

Json = dict[str, Any]


def record(folder: Path, passes: int) -> Path:
    """Record a long run, with checkpoints and merged as the companion does it."""
    path = traffic.record(folder, POLICY, passes, queue=QUEUE)
    add_checkpoints(path, traffic.config(POLICY))
    tidy(path / "rank=0", grace_s=0.0, final=True)
    return path


class Times:
    """Wall and processor time of calls."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def take(self, call: Any) -> Any:
        """Call it, and note how long that took."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self._wall.append((time.perf_counter() - wall) * 1e3)
        self._cpu.append((time.process_time() - cpu) * 1e3)
        return result

    def figures(self) -> Json:
        """Milliseconds: the median, the 99th percentile and the worst, and the median of the processor's time."""
        wall, cpu = sorted(self._wall), sorted(self._cpu)
        worst = min(len(wall) - 1, len(wall) * 99 // 100)
        middle = len(wall) // 2
        return {
            "calls": len(wall),
            "p50_ms": round(wall[middle], 1),
            "p99_ms": round(wall[worst], 1),
            "max_ms": round(wall[-1], 1),
            "cpu_p50_ms": round(cpu[middle], 1),
            "cpu_max_ms": round(cpu[-1], 1),
        }


def measure(path: Path, requests: int) -> Json:
    """Explain a run, random requests and random passes, each with nothing opened before."""
    chance = random.Random(1)
    whole = Times()
    ledger = whole.take(lambda: run_ledger(Run.open(path)))
    assert sum(each.ns for each in ledger.causes) == ledger.queued_ns
    known = Run.open(path)
    rids = known.table("requests", 0, ["rid"])["rid"].to_pylist()
    passes = known.passes(0).count
    asked = [rid for _, rid, _ in ledger.waited[:3]] + chance.sample(rids, min(requests, len(rids)))
    alone, explained, shown = Times(), Times(), Times()
    checked = 0
    for rid in asked:
        one = alone.take(lambda rid=rid: request_ledger(Run.open(path), rid))
        assert sum(part.ns for part in one.parts) == one.queued_ns
        found = explained.take(lambda rid=rid: explain_request(Run.open(path), rid))
        assert found.ledger == one
        checked += found.checked
    for _ in range(requests):
        number = chance.randrange(passes)
        checked += shown.take(lambda number=number: explain_pass(Run.open(path), 0, number)).checked
    commands = {"longest wait": ["explain", asked[0]], "another": ["explain", asked[3]], "run": ["explain", "run"]}
    return {
        "passes": passes,
        "requests": len(rids),
        "run": whole.figures(),
        "ledger of a request": alone.figures(),
        "a request": explained.figures(),
        "a pass": shown.figures(),
        "command_s": {name: _command_s([*words, "--run", str(path)]) for name, words in commands.items()},
        "claims_checked": checked,
    }


def _command_s(words: Sequence[str]) -> float:
    """How long a command takes, with the start and end of the program, whose byte code is there as of any installed."""
    command = [sys.executable, "-m", "schedscope.cli.main", *words]
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
        for _ in range(2):
            begin = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return round(time.perf_counter() - begin, 2)


def main() -> None:
    """Measure and print."""
    options = _options()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="schedscope-bench-"))
    try:
        runs = sorted(folder.glob("*/manifest.json"))
        path = runs[-1].parent if runs else record(folder, options.passes)
        figures = measure(path, options.requests)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)
    print(f"{figures['passes']:,} passes, {figures['requests']:,} requests; milliseconds")
    print(f"{'':22}{'calls':>7}{'p50':>9}{'p99':>9}{'max':>9}{'CPU p50':>9}{'CPU max':>9}")
    for name in ("run", "ledger of a request", "a request", "a pass"):
        print(f"{name:22}{figures[name]['calls']:7}" + "".join(f"{v:9.1f}" for v in list(figures[name].values())[1:]))
    commands = ", ".join(f"{name} {seconds} s" for name, seconds in figures["command_s"].items())
    print(f"the command, with its start and end: {commands}")
    print(f"{figures['claims_checked']:,} claims of what would have been, each decided again; all ledgers add up")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=100_000, help="passes to record")
    parser.add_argument("--requests", type=int, default=50, help="requests and passes to explain")
    parser.add_argument("--keep", type=Path, help="keep the run in this folder, or use the one that is there")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
