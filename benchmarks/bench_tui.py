"""How long the terminal debugger takes to open a long run, and to show another place.

    python benchmarks/bench_tui.py [--passes N] [--run RUN] [--json FILE]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from schedscope.recorder.run import Run
from schedscope.tui.app import ScopeApp
from schedscope.tui.cursor import Cursor, parse_at
from schedscope.tui.grid import Grid
from schedscope.tui.session import Session
from schedscope.tui.thrift import ARROW, economize

SIZE = (160, 45)
READING_S = 0.6
"""What a person takes to read before the next key."""
PATIENCE_S = 120.0
TARGETS = {"open_s": 1.5, "p95_ms": 100, "memory_mb": 400}


async def painted(app: ScopeApp) -> None:
    """Wait until what has changed is on the screen."""
    done = asyncio.Event()
    app.screen_stack[0].call_after_refresh(done.set)
    await done.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the screen does not get there")
        await asyncio.sleep(0.001)


async def at_rest(app: ScopeApp) -> None:
    """Wait until nothing is worked out any more."""
    await until(lambda: not app.busy)


def memory_mb() -> float:
    """What this process took at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


async def opened(path: Path, spawned: float) -> dict[str, Any]:
    """How long it takes to open the run once, and what that takes of memory."""
    app = ScopeApp(Session(Run.open(path)))
    async with app.run_test(size=SIZE):
        await until(lambda: app.page is not None)
        await painted(app)
        first_s = time.time() - spawned
        await until(lambda: app.strip.lanes is not None)
        await painted(app)
        strip_s = time.time() - spawned
        await at_rest(app)
        rest_s = time.time() - spawned
    cpu_s = time.process_time()
    return {
        "first_page_s": first_s,
        "timeline_s": strip_s,
        "all_s": rest_s,
        "all_cpu_s": cpu_s,
        "memory_mb": memory_mb(),
    }


async def moved(path: Path, times: int) -> dict[str, Any]:
    """How long another place takes, from the key to the screen, in milliseconds."""
    app = ScopeApp(Session(Run.open(path)), parse_at("pass=1000"))
    chance = random.Random(1)
    figures: dict[str, Any] = {}
    async with app.run_test(size=SIZE):
        await until(lambda: app.page is not None and app.strip.lanes is not None)
        await at_rest(app)
        last = app.reach[0].last or 0

        async def page(number: int) -> None:
            app.go(Cursor(0, number))
            await until(lambda: app.page is not None and app.page.facts.number == number)

        async def anywhere() -> None:
            await page(chance.randint(0, last))

        async def next_pass() -> None:
            number = app.cursor.number + 1
            app.simulate_key("right")
            await until(lambda: app.page is not None and app.page.facts.number == number)

        async def next_row() -> None:
            grid = app.screen_stack[0].query_one("#queue", Grid)
            row = grid.row
            app.simulate_key("up" if row == grid.count - 1 else "down")
            await until(lambda: grid.row != row)

        kinds: dict[str, tuple[Callable[[], Awaitable[None]], float]] = {
            "any pass": (anywhere, READING_S),
            "the next pass": (next_pass, READING_S),
            "the next pass, key held": (next_pass, 0.0),
            "the next request": (next_row, READING_S / 4),
        }
        for name, (move, pause_s) in kinds.items():
            took, cpu = [], []
            for _ in range(times):
                begin, worked = time.perf_counter(), time.thread_time()
                await move()
                await painted(app)
                took.append((time.perf_counter() - begin) * 1e3)
                cpu.append((time.thread_time() - worked) * 1e3)
                await asyncio.sleep(pause_s)
            await at_rest(app)
            figures[name] = {
                "p50": statistics.median(took),
                "p95": statistics.quantiles(took, n=20)[-1],
                "screen_cpu_p50": statistics.median(cpu),
                "screen_cpu_p95": statistics.quantiles(cpu, n=20)[-1],
            }
    figures["memory_mb"] = memory_mb()
    return figures


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.only is not None:
        economize()
        spawned, path = options.spawned, options.run
        print(json.dumps(asyncio.run(opened(path, spawned) if options.only == "open" else moved(path, options.times))))
        return
    with tempfile.TemporaryDirectory(prefix="schedscope-bench-", dir=options.folder) as folder:
        path = options.run or _record(Path(folder), options.passes)
        passes = Run.open(path).passes(0).count
        opens = [_alone("open", path, options) for _ in range(options.opens)]
        figures: dict[str, Any] = {
            "passes": passes,
            "open": {name: statistics.median(each[name] for each in opens) for name in opens[0]},
            "moves": _alone("move", path, options),
        }
    _print(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _record(folder: Path, passes: int) -> Path:
    from bench_explain import record  # which loads far more than the terminal does, and that is measured here

    return record(folder, passes)


def _alone(only: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, as the command would run."""
    command = [sys.executable, __file__, "--run", str(path), "--only", only, "--times", str(options.times)]
    ended = subprocess.run(
        [*command, "--spawned", repr(time.time())],
        env={**os.environ, **ARROW},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _print(figures: dict[str, Any]) -> None:
    found, moves = figures["open"], figures["moves"]
    print(f"{figures['passes']:,} passes, a screen of {SIZE[0]} x {SIZE[1]}")
    print(f"open: first pass {found['first_page_s']:.2f} s (target {TARGETS['open_s']}), ", end="")
    print(
        f"timeline {found['timeline_s']:.2f} s, all of it {found['all_s']:.2f} s ({found['all_cpu_s']:.2f} s of CPU), ",
        end="",
    )
    print(f"at most {found['memory_mb']:.0f} MB (target {TARGETS['memory_mb']})")
    print(f"{'milliseconds to':26}{'p50':>8}{'p95':>8}{'own CPU':>9}{'p95':>8}   target {TARGETS['p95_ms']}")
    for name, each in moves.items():
        if isinstance(each, dict):
            print(f"{name:26}{each['p50']:8.1f}{each['p95']:8.1f}{each['screen_cpu_p50']:9.1f}", end="")
            print(f"{each['screen_cpu_p95']:8.1f}")
    print(f"after all of it: at most {moves['memory_mb']:.0f} MB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passes", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=60, help="how often each move is made")
    parser.add_argument("--opens", type=int, default=3, help="how often the run is opened")
    parser.add_argument("--run", type=Path, help="use this run instead of making one")
    parser.add_argument("--folder", help="where to make the run, which is removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", choices=("open", "move"), help=argparse.SUPPRESS)
    parser.add_argument("--spawned", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
