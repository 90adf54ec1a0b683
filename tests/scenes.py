"""Recorded runs worth looking at: a busy server over a simulated clock, whose model takes as long as it has tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.tracer import RunTracer

FULL = Detail(level="full")
BUSY = SchedulerConfig(
    schedule_policy="lpm",
    max_total_tokens=16_000,
    max_running_requests=64,
    chunked_prefill_size=1_024,
    max_prefill_tokens=2_048,
    waiting_queue_prefix_match_max=32,
    schedule_conservativeness=0.02,
    page_size=1,
)


class Clock:
    """Simulated time, seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def ns(self) -> int:
        """As a recorder reads it."""
        return int(self.now * 1e9)


class Clients:
    """Tenants with long system prompts, whose load swells and ebbs; some of them come in bursts."""

    def __init__(self, seed: int, names: Callable[[int], str]) -> None:
        self.random = random.Random(seed)
        self._names = names
        self._systems = [self._words(self.random.randint(300, 1_500)) for _ in range(14)]
        self._count = 0
        self._next: float | None = None

    def _words(self, count: int) -> list[int]:
        return [self.random.randint(3, 30_000) for _ in range(count)]

    def due(self, now: float, load: float) -> Iterator[Request]:
        """What arrives until a moment, at so many requests a second."""
        following = now if self._next is None else self._next
        while following <= now:
            following += self.random.expovariate(load)
            yield self.request()
        self._next = following

    def request(self) -> Request:
        """The next request."""
        chance = self.random
        tenant = min(int(chance.expovariate(0.35)), len(self._systems) - 1)
        self._count += 1
        return Request(
            rid=self._names(self._count),
            prompt=tokens.encode(self._systems[tenant] + self._words(int(chance.lognormvariate(4.4, 0.9)) + 1)),
            sampling=SamplingParams(max_new_tokens=chance.randint(8, 240)),
            routing_key=f"tenant-{tenant}",
        )


def record_busy(
    folder: Path,
    name: str = "busy",
    *,
    config: SchedulerConfig = BUSY,
    seconds: float = 90.0,
    seed: int = 5,
    ranks: int = 1,
    detail: Detail = FULL,
    checkpoint_every: int = 200,
    names: Callable[[int], str] = "req-{:05d}".format,
    limits: Limits | None = None,
) -> Path:
    """Record a busy server; returns the run's path, sealed."""
    path = create_run(folder, name)
    for rank in range(ranks):
        clock = Clock()
        description = Description(source=Source("simulation", "1"), config=config.to_dict())
        sink = DirectSink(path, rank, description, limits or Limits(), detail=detail)
        tracer = RunTracer(sink, checkpoint_every=checkpoint_every, clock_ns=clock.ns)
        scheduler = Scheduler(config, tracer)
        tracer.attach(scheduler)
        for _ in serve(scheduler, clock, Clients(seed + rank, names), seconds, speed=1.0 - 0.15 * rank):
            pass
        tracer.close()
    return path


def serve(
    scheduler: Scheduler, clock: Clock, clients: Clients, seconds: float, *, speed: float = 1.0
) -> Iterator[float]:
    """Schedule so long, and until all that has come has ended; yields the time that has passed after every step."""
    begin = clock.now
    while clock.now < begin + seconds or scheduler.busy:
        passed = clock.now - begin
        load = 8.0 + 7.0 * (passed % 40 > 24)
        if passed < seconds:
            for request in clients.due(clock.now, load):
                scheduler.arrive(request, clock.now)
        clock.now += 0.0006
        if not scheduler.busy:
            scheduler.idle(clock.now)
            clock.now += 0.01
            continue
        step = scheduler.step(clock.now)
        if step.batch is None:
            clock.now += 0.002
            continue
        computed = sum(member.end - member.start for member in step.batch.members)
        clock.now += (0.012 + computed / 9_000) / speed
        sampled: list[int | None] = []
        finishes: dict[str, Finish] = {}
        for member in step.batch.members:
            live = member.live
            if member.unfinished:
                sampled.append(None)
                continue
            sampled.append(clients.random.randrange(3, 30_000))
            if live.output_len + 1 >= live.request.sampling.max_new_tokens:
                finishes[live.rid] = Finish("length", live.request.sampling.max_new_tokens)
        scheduler.commit(step.batch, sampled, finishes, clock.now)
        yield passed
