"""Kill recorded servers, and their recorders, at random moments: is anything lost that was acknowledged, or misread?

    python benchmarks/bench_kill.py [--json FILE] [--kills N] [--seed N]

See README.md in this folder for what is counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from schedscope.recorder.companion import Companion
from schedscope.recorder.manifest import create_run
from schedscope.recorder.options import OPTIONS
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.ring import remove_ring
from schedscope.recorder.run import Run
from schedscope.recorder.sink import open_sink
from traffic import describe, drive, record, recorded_scheduler

POLICY = "lpm"
ENDLESS = 10**9
LONGEST_S = 1.5
"""Of a recording before its kill."""


def serve(ledger: Path) -> None:
    """Schedule for ever; after each step the number of passes made is in the ledger, as a client would know them."""
    sink = open_sink(0, describe(POLICY))
    assert sink is not None
    scheduler, _ = recorded_scheduler(POLICY, sink)
    with ledger.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        acknowledged = memoryview(memory).cast("Q")
        for passes in drive(scheduler, ENDLESS):
            acknowledged[0] = passes


def keep(run_dir: Path) -> None:
    """Record until killed."""
    with Companion.start(run_dir, OPTIONS._replace(limits=Limits(passes=50))) as companion:
        print(json.dumps(companion.environment()), flush=True)
        sys.stdin.read()


def kill_one(folder: Path, chance: random.Random, *, both: bool) -> dict[str, Any]:
    """One recording that ends with a kill."""
    run_dir = create_run(folder, "killed")
    ledger = folder / "ledger"
    ledger.write_bytes(bytes(8))
    recorder = _start("keep", run_dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert recorder.stdout is not None
    environment = json.loads(recorder.stdout.readline())
    server = _start("serve", ledger, env={**os.environ, **environment})
    while not any(ledger.read_bytes()):
        time.sleep(0.001)
    time.sleep(chance.random() * LONGEST_S)
    first, second = (server, recorder) if chance.random() < 0.5 or not both else (recorder, server)
    first.send_signal(signal.SIGKILL)
    if both:
        time.sleep(chance.choice([0.0, chance.random() * 0.05]))
        second.send_signal(signal.SIGKILL)
    server.wait()
    recorder.communicate()
    acknowledged = int.from_bytes(ledger.read_bytes(), sys.byteorder)
    run = Run.open(run_dir)
    passes = run.table("passes", 0, ["pass", "queue_len", "chunked_in", "decision_hash"]).to_pylist()
    told = run.table("decisions", 0, ["pass"])["pass"].value_counts().to_pylist()
    remove_ring(run_dir / "rank=0")
    return {
        "acknowledged": acknowledged,
        "passes": passes,
        "decisions": {each["values"]: each["counts"] for each in told},
        "gaps": [gap.reason for gap in run.gaps],
    }


def check(found: dict[str, Any], truth: list[str]) -> tuple[int, int]:
    """Passes that were acknowledged and are lost, and rows that are not what was recorded."""
    passes = found["passes"]
    recorded = {row["pass"] for row in passes}
    lost = sum(number not in recorded for number in range(found["acknowledged"]))
    misread = sum(row["decision_hash"] != truth[row["pass"]] for row in passes)
    misread += sum(found["decisions"].get(row["pass"]) != row["queue_len"] + bool(row["chunked_in"]) for row in passes)
    misread += len(passes) - len(recorded)
    return lost, misread


def _start(*words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], **options)


def _truth(folder: Path, passes: int) -> list[str]:
    """What the decisions are, from a recording that nobody disturbed."""
    run_dir = record(folder, POLICY, passes)
    hashes: list[str] = Run.open(run_dir).table("passes", 0, ["decision_hash"])["decision_hash"].to_pylist()
    return hashes


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["keep"]:
        keep(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        found = [kill_one(Path(name), chance, both=bool(i % 2)) for i in range(args.kills)]
        truth = _truth(Path(name), max(row["pass"] for each in found for row in each["passes"]) + 1)
    checks = [check(each, truth) for each in found]
    result = {
        "kills": args.kills,
        "of_both": args.kills // 2,
        "passes_acknowledged": sum(each["acknowledged"] for each in found),
        "passes_read": sum(len(each["passes"]) for each in found),
        "acknowledged_and_lost": sum(lost for lost, _ in checks),
        "misread": sum(misread for _, misread in checks),
        "gaps": sorted({gap for each in found for gap in each["gaps"]}),
    }
    for label, value in result.items():
        print(f"{label.replace('_', ' '):24} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(result["acknowledged_and_lost"] or result["misread"]))


if __name__ == "__main__":
    sys.exit(main())
