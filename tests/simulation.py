"""Drives the real scheduler with a made-up workload and made-up tokens: every path of it, thousands of steps a second.

Everything random comes from one seed, so a failing case can be run again.
"""

from __future__ import annotations

import random
from pathlib import Path

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import LIMITS, Limits
from schedscope.recorder.tracer import RunTracer

STEP_S = 0.01
EVERYTHING = Detail(level="full")


class Workload:
    """Requests over shared prefixes, with everything that a client can ask for."""

    def __init__(self, seed: int, *, outputs: tuple[int, int] = (1, 40)) -> None:
        self.random = random.Random(seed)
        self._outputs = outputs
        self._prefixes = [self._words(self.random.randint(8, 80)) for _ in range(6)]
        self._count = 0

    def _words(self, count: int) -> list[int]:
        return [self.random.randint(3, 900) for _ in range(count)]

    def request(self) -> Request:
        """The next request."""
        chance = self.random
        prefix = chance.choice(self._prefixes)[: chance.randint(1, 80)]
        prompt = prefix + self._words(chance.randint(1, 40))
        self._count += 1
        return Request(
            rid=f"r{self._count}",
            prompt=tokens.encode(prompt),
            sampling=SamplingParams(max_new_tokens=chance.randint(*self._outputs), ignore_eos=chance.random() < 0.2),
            priority=chance.choice([None, 0, 5, 20, 50]),
            routing_key=chance.choice([None, "", "a", "b"]),
            extra_key=chance.choice([None, None, "lora"]),
            cache_salt=chance.choice([None, None, "", "salt"]),
        )


def drive(scheduler: Scheduler, workload: Workload, requests: int) -> int:
    """Let the requests arrive in bursts and run until all have ended. Returns the number of steps."""
    chance = workload.random
    now = 0.0
    left = requests
    steps = 0
    while left or scheduler.busy:
        now += STEP_S * chance.random()
        steps += 1
        assert steps < 200 * requests + 1000, "the scheduler makes no progress"
        if left and (not scheduler.busy or chance.random() < 0.3):
            for _ in range(min(left, chance.randint(1, 8))):
                scheduler.arrive(workload.request(), now)
                left -= 1
        if scheduler.lives and chance.random() < 0.02:
            scheduler.abort(chance.choice(sorted(scheduler.lives)), now)
        if not scheduler.busy:
            if chance.random() < 0.5:
                scheduler.flush(now)
            scheduler.idle(now)
            continue
        step = scheduler.step(now)
        if step.batch is None:
            continue
        sampled: list[int | None] = []
        finishes: dict[str, Finish] = {}
        for member in step.batch.members:
            live = member.live
            if member.unfinished:
                sampled.append(None)
                continue
            sampled.append(chance.randint(3, 900))
            if live.output_len + 1 >= live.request.sampling.max_new_tokens:
                finishes[live.rid] = Finish("length", live.request.sampling.max_new_tokens)
            elif chance.random() < 0.01:
                finishes[live.rid] = Finish("stop", sampled[-1])
        scheduler.commit(step.batch, sampled, finishes, now)
    return steps


def record(
    folder: Path,
    config: SchedulerConfig,
    *,
    seed: int,
    requests: int,
    checkpoint_every: int = 50,
    outputs: tuple[int, int] = (1, 40),
    limits: Limits = LIMITS,
    detail: Detail = EVERYTHING,
) -> Path:
    """Record a driven scheduler as a run of one rank. Returns the run's path."""
    path = create_run(folder, "simulated")
    described = Description(source=Source("simulation", "1"), config=config.to_dict())
    sink = DirectSink(path, 0, described, limits, detail=detail, key=b"secret")
    tracer = RunTracer(sink, checkpoint_every=checkpoint_every)
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    drive(scheduler, Workload(seed, outputs=outputs), requests)
    tracer.close()
    return path
