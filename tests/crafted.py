"""Runs of the real scheduler under a script: who arrives when, how long forwards take, who gives up.

The recorder's clock is the script's, so seconds in a test are seconds in the run. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schedscope.engine.batch import Batch
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tokens import encode
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import LIMITS, Limits
from schedscope.recorder.run import Run
from schedscope.recorder.sink import Sink
from schedscope.recorder.tracer import RunTracer
from simulation import EVERYTHING

STEP_S = 0.01
TOKEN_S = 0.0001
"""Of prefill."""


class Arrival(NamedTuple):
    """A request and when it comes, seconds."""

    at: float
    request: Request
    rank: int = 0


def prompt(length: int, seed: int = 1) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    return [seed * 100_000 + place for place in range(length)]


def ask(rid: str, tokens: Sequence[int], new: int = 4, **options: object) -> Request:
    """A request."""
    ignore_eos = bool(options.pop("ignore_eos", False))
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos)
    return Request(rid=rid, prompt=encode(tokens), sampling=sampling, **options)  # type: ignore[arg-type]


class Clock:
    """Nanoseconds; each look takes one."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1
        return self.ns


def forward_s(batch: Batch) -> float:
    """Ten milliseconds, and a tenth of one for each prompt token."""
    return STEP_S + TOKEN_S * sum(member.end - member.start for member in batch.members if not member.decode)


def play(
    folder: Path,
    config: SchedulerConfig,
    arrivals: Iterable[Arrival],
    *,
    ranks: int = 1,
    detail: Detail = EVERYTHING,
    limits: Limits = LIMITS,
    clock: Callable[[], int] | None = None,
    **script: Any,
) -> Run:
    """Record what comes of them.

    Args:
        clock: of the recorder; None: the script's own.
        script: as `play_into`.
    """
    path = create_run(folder, "crafted")
    described = Description(source=Source("simulation", "1"), config=config.to_dict())
    sinks = [DirectSink(path, rank, described, limits, detail=detail, key=b"secret") for rank in range(ranks)]
    play_into(sinks, config, arrivals, clock=clock, **script)
    return Run.open(path)


def play_into(
    sinks: Sequence[Sink],
    config: SchedulerConfig,
    arrivals: Iterable[Arrival],
    *,
    clock: Callable[[], int] | None = None,
    aborts: Mapping[str, float] | None = None,
    outputs: Mapping[str, int] | None = None,
    until: float = 10_000.0,
) -> None:
    """Let them arrive and run until all have ended or nothing moves any more, a rank for each sink.

    Args:
        aborts: when clients give up, by rid.
        outputs: tokens after which a request stops by itself, by rid; others use all they may.
        until: seconds after which the script ends.
    """
    ticking = Clock()
    schedulers = []
    for sink in sinks:
        tracer = RunTracer(sink, checkpoint_every=50, clock_ns=clock or ticking)
        scheduler = Scheduler(config, tracer)
        tracer.attach(scheduler)
        schedulers.append((scheduler, tracer))
    pending = sorted(arrivals, key=lambda each: each.at)
    leaving = sorted((at, rid) for rid, at in (aborts or {}).items())
    now, still = 0.0, 0
    while now < until and still < 200:
        ticking.ns = max(ticking.ns, int(now * 1e9))
        while leaving and leaving[0][0] <= now:
            rid = leaving.pop(0)[1]
            for scheduler, _ in schedulers:
                scheduler.abort(rid, now)
        while pending and pending[0].at <= now:
            arrival = pending.pop(0)
            schedulers[arrival.rank][0].arrive(arrival.request, now)
        busy = [scheduler.busy for scheduler, _ in schedulers]
        if not any(busy):
            if not pending:
                break
            now = pending[0].at
            for scheduler, _ in schedulers:
                scheduler.idle(now)
            continue
        took = _turn([scheduler for scheduler, _ in schedulers], config, now, ticking, outputs or {})
        still = 0 if took or pending or leaving else still + 1
        now += took or STEP_S
    for _, tracer in schedulers:
        tracer.close()


def _turn(
    schedulers: Sequence[Scheduler], config: SchedulerConfig, now: float, clock: Clock, outputs: Mapping[str, int]
) -> float:
    """A step of every rank, in lockstep where they talk; returns how long the longest forward took."""
    talks = config.enable_prefill_delayer and len(schedulers) > 1
    reports = [scheduler.report(now) for scheduler in schedulers] if talks else []
    steps = []
    for rank, scheduler in enumerate(schedulers):
        if not talks and not scheduler.busy:
            continue
        steps.append((scheduler, scheduler.step(now, tuple(reports[:rank] + reports[rank + 1 :]))))
    batches = [step.due for _, step in steps if step.due is not None]
    took = max(map(forward_s, batches), default=0.0)
    clock.ns = max(clock.ns, int((now + took) * 1e9))
    for scheduler, step in steps:
        if step.due is not None:
            sampled, ends = _answers(step.due, outputs)
            scheduler.commit(step.due, sampled, ends, now + took)
    return took


def _answers(batch: Batch, outputs: Mapping[str, int]) -> tuple[list[int | None], dict[str, Finish]]:
    sampled: list[int | None] = []
    ends: dict[str, Finish] = {}
    for member in batch.members:
        live = member.live
        if member.unfinished:
            sampled.append(None)
            continue
        sampled.append(7)
        most = live.request.sampling.max_new_tokens
        if live.output_len + 1 >= most:
            ends[live.rid] = Finish("length", most)
        elif live.output_len + 1 >= outputs.get(live.rid, most):
            ends[live.rid] = Finish("stop", 7)
    return sampled, ends
