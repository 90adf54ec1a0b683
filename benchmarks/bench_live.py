"""How far a reader is behind a run that is being recorded.

    python benchmarks/bench_live.py [--json FILE] [--seconds N] [--rate PASSES_PER_SECOND]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedscope.recorder.companion import Companion
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.sink import open_sink
from traffic import describe, drive, recorded_scheduler

POLICY = "lpm"
ENDLESS = 10**9


def serve(ledger: Path, rate: float) -> None:
    """Schedule at a rate; after each step the number of passes made, and when, is in the ledger."""
    sink = open_sink(0, describe(POLICY))
    assert sink is not None
    scheduler, tracer = recorded_scheduler(POLICY, sink)
    with ledger.open("r+b") as file, mmap.mmap(file.fileno(), 16) as memory:
        words = memoryview(memory).cast("Q")
        next_step = time.monotonic()
        for passes in drive(scheduler, ENDLESS):
            words[1] = time.monotonic_ns()
            words[0] = passes
            if words[1] and ledger.with_suffix(".stop").exists():
                break
            next_step += 1 / rate
            time.sleep(max(0.0, next_step - time.monotonic()))
        words.release()
    tracer.close()


def look(ledger: memoryview, last_pass: Callable[[], int | None]) -> tuple[int, float]:
    """Passes that a look missed of those made before it began, and how long it took, milliseconds."""
    made = ledger[0]
    begin = time.monotonic()
    last = last_pass()
    return made - 1 - (-1 if last is None else last), (time.monotonic() - begin) * 1e3


def measure(seconds: float, rate: float, folder: Path) -> dict[str, Any]:
    """Looks of one reader in this process, while another process schedules and a third one records."""
    run_dir = create_run(folder, "live")
    ledger = folder / "ledger"
    ledger.write_bytes(bytes(16))
    with Companion.start(run_dir) as companion:
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(ledger), str(rate)],
            env={**os.environ, **companion.environment()},
        )
        reader = subprocess.run(
            [sys.executable, __file__, "read", str(run_dir), str(ledger), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        ledger.with_suffix(".stop").touch()
        server.wait()
    found: dict[str, Any] = json.loads(reader.stdout)
    return found


def read(run_dir: Path, ledger: Path, seconds: float) -> dict[str, Any]:
    """Look again and again: how many passes there are, the newest one whole, and SQL over all."""
    with ledger.open("rb") as file, mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ) as memory:
        words = memoryview(memory).cast("Q")
        while words[0] < 20:
            time.sleep(0.01)
        run = Run.open(run_dir)

        def newest() -> int | None:
            return run.passes(0).last

        def newest_rows() -> int | None:
            last = run.passes(0).last
            assert last is not None
            assert run.pass_rows(0, last)["decisions"]
            return last

        def query() -> int | None:
            with run.connect() as connection:
                found = connection.execute("select max(pass), count(*) from decisions").fetchall()
            last: int = found[0][0]
            return last

        result = {}
        for name, last_pass in (("passes", newest), ("pass_rows", newest_rows), ("sql", query)):
            behind, took = [], []
            end = time.monotonic() + seconds / 3
            while time.monotonic() < end:
                missed, milliseconds = look(words, last_pass)
                behind.append(missed)
                took.append(milliseconds)
                time.sleep(0.005)
            took.sort()
            result[name] = {
                "looks": len(took),
                "passes_behind_max": max(behind),
                "ms_median": round(statistics.median(took), 2),
                "ms_p99": round(took[int(len(took) * 0.99)], 2),
            }
        result["made"] = {"passes": words[0]}
        words.release()
    return result


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), float(sys.argv[3]))
        return 0
    if sys.argv[1:2] == ["read"]:
        print(json.dumps(read(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=50.0, help="steps per second; a big model makes 10 to 50")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.seconds, args.rate, Path(folder))
    print(f"{result.pop('made')['passes']} passes at {args.rate:g} a second")
    print(f"{'look':10} {'looks':>6} {'passes behind':>14} {'median':>9} {'p99':>9}")
    for name, row in result.items():
        print(
            f"{name:10} {row['looks']:>6} {row['passes_behind_max']:>14} {row['ms_median']:>6} ms {row['ms_p99']:>6} ms"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
