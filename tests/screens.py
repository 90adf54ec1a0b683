"""Runs and drivers for tests of the terminal: no wall clock, no name that changes, no waiting for luck."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.tui.app import ScopeApp
from schedscope.tui.cursor import At, parse_at
from schedscope.tui.session import Session
from simulation import EVERYTHING, record
from textual.pilot import Pilot

TIGHT = SchedulerConfig(
    schedule_policy="lpm",
    chunked_prefill_size=48,
    max_total_tokens=600,
    max_running_requests=60,
    schedule_conservativeness=0.02,
    waiting_queue_prefix_match_max=20,
)
NAME = "20260131-142500-simulated"
TICK_NS = 1_000_000
WAIT_S = 30.0


def ticking() -> Callable[[], int]:
    """A clock that goes on by a millisecond whenever it is looked at."""
    ticks = count(1)
    return lambda: next(ticks) * TICK_NS


def simulated(folder: Path, config: SchedulerConfig = TIGHT, **options: Any) -> Path:
    """A run that is the same every time."""
    wanted = {"seed": 26, "requests": 70, "outputs": (40, 160), "clock_ns": ticking()} | options
    path = record(folder, config, **wanted)
    return path.rename(folder / NAME)


def queued(folder: Path, rids: Iterable[str], steps: int = 1, *, detail: Detail = EVERYTHING) -> Path:
    """A run in which all these requests arrive at once, and so many steps are made."""
    config = SchedulerConfig(schedule_policy="lpm", waiting_queue_prefix_match_max=10_000, max_running_requests=4)
    path = create_run(folder, "queued")
    sink = DirectSink(path, 0, Description(source=Source("simulation", "1"), config=config.to_dict()), detail=detail)
    tracer = RunTracer(sink, clock_ns=ticking())
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    prefix = list(range(100, 140))
    for number, rid in enumerate(rids):
        prompt = tokens.encode([*prefix[: number % 40], 1_000 + number, 5, 6])
        scheduler.arrive(Request(rid=rid, prompt=prompt, sampling=SamplingParams(max_new_tokens=2)), float(number))
    for step in range(steps):
        made = scheduler.step(1e6 + step)
        if made.batch is not None:
            sampled = [None if member.unfinished else 7 for member in made.batch.members]
            finishes = {
                member.live.rid: Finish("length", 2)
                for member in made.batch.members
                if not member.unfinished and member.live.output_len + 1 >= 2
            }
            scheduler.commit(made.batch, sampled, finishes, 1e6 + step)
    tracer.close()
    return path


def app_of(path: Path, at: str = "", other: Path | None = None) -> ScopeApp:
    """The app on a run."""
    compared = None if other is None else Session(Run.open(other))
    return ScopeApp(Session(Run.open(path)), parse_at(at) if at else At(), compared)


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until everything is read, worked out and painted."""
    app: Any = pilot.app
    deadline = time.monotonic() + WAIT_S
    calm = 0
    while calm < 3:
        await pilot.pause(0.01)
        calm = 0 if app.busy else calm + 1
        assert time.monotonic() < deadline, "it never comes to rest"


async def press(pilot: Pilot[Any], keys: Sequence[str]) -> None:
    """Press keys one by one, and let each have its effect."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def pressing(*keys: str) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """For snapshots: come to rest, then press keys."""

    async def run(pilot: Pilot[Any]) -> None:
        await settle(pilot)
        await press(pilot, keys)

    return run
