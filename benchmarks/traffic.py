"""A long run of a busy server, made by the real scheduler: prompts over shared prefixes, a queue that never empties.

No model runs: sampled tokens come from a seeded generator, so a hundred thousand passes take minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from schedscope.engine.batch import Member
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.sink import Sink
from schedscope.recorder.tracer import RunTracer

STEP_S = 0.012
TENANTS = 40
"""System prompts; their popularity falls as 1/n."""
POOL = 300_000
"""Tokens: room for some of the prefixes, so that hits come and go."""
RUNNING = 32
QUEUE = (40, 126)
"""Waiting requests, between which the load wanders."""
VOCABULARY = 32_000


def config(policy: str) -> SchedulerConfig:
    """A server that is always a little too small."""
    return SchedulerConfig(
        schedule_policy=policy, max_total_tokens=POOL, max_running_requests=RUNNING, chunked_prefill_size=8_192
    )


class Traffic:
    """Requests of many tenants, each with its own system prompt, and the load over time."""

    def __init__(self, seed: int, queue: tuple[int, int] = QUEUE) -> None:
        self.random = random.Random(seed)
        self._prefixes = [self._ids(self.random.randint(200, 4_000)) for _ in range(TENANTS)]
        self._weights = [1 / (n + 1) for n in range(TENANTS)]
        self._count = 0
        self._queue = queue
        self._level = float(sum(queue) // 2)

    def _ids(self, count: int) -> bytes:
        # 15 of 32 bits of each id, without a Python step per token.
        drawn = self.random.randbytes(count * TOKEN_BYTES)
        mask = int.from_bytes(b"\xff\x7f\x00\x00" * count, "little")
        return (int.from_bytes(drawn, "little") & mask).to_bytes(count * TOKEN_BYTES, "little")

    def request(self) -> Request:
        """The next request."""
        chance = self.random
        prompt = chance.choices(self._prefixes, self._weights)[0] + self._ids(int(chance.lognormvariate(5, 1)) + 1)
        self._count += 1
        return Request(
            rid=f"{chance.getrandbits(128):032x}",
            prompt=prompt,
            sampling=SamplingParams(max_new_tokens=chance.randint(8, 48)),
        )

    def wanted(self) -> int:
        """How many requests wait now: a slow random walk."""
        self._level = min(max(self._level + self.random.gauss(0, 2), self._queue[0]), self._queue[1])
        return int(self._level)


def drive(scheduler: Scheduler, passes: int, seed: int = 1, queue: tuple[int, int] = QUEUE) -> Iterator[int]:
    """Let a scheduler make that many passes; yields their number after each step."""
    traffic = Traffic(seed, queue)
    now = 0.0
    while scheduler.passes < passes:
        now += STEP_S * (0.5 + traffic.random.random())
        for _ in range(traffic.wanted() - len(scheduler.state.queue)):
            scheduler.arrive(traffic.request(), now)
        step = scheduler.step(now)
        if step.batch is not None:
            sampled, finishes = _model(traffic.random, step.batch.members)
            scheduler.commit(step.batch, sampled, finishes, now)
        yield scheduler.passes


def recorded_scheduler(policy: str, sink: Sink) -> tuple[Scheduler, RunTracer]:
    """A scheduler under a policy that records itself."""
    tracer = RunTracer(sink)
    scheduler = Scheduler(config(policy), tracer)
    tracer.attach(scheduler)
    return scheduler, tracer


def describe(policy: str) -> Description:
    """What its manifest says."""
    return Description(source=Source("simulation", "1"), config=config(policy).to_dict())


def record(
    folder: Path,
    policy: str,
    passes: int,
    limits: Limits | None = None,
    seed: int = 1,
    queue: tuple[int, int] = QUEUE,
) -> Path:
    """Record that many passes under a policy; returns the run's path, sealed."""
    path = create_run(folder, policy)
    scheduler, tracer = recorded_scheduler(policy, DirectSink(path, 0, describe(policy), limits or Limits()))
    for _ in drive(scheduler, passes, seed, queue):
        pass
    tracer.close()
    return path


def _model(chance: random.Random, members: Sequence[Member]) -> tuple[list[int | None], dict[str, Finish]]:
    """What a model would have answered: random tokens, and as many of them as asked for."""
    sampled: list[int | None] = []
    finishes: dict[str, Finish] = {}
    for member in members:
        if member.unfinished:
            sampled.append(None)
            continue
        live = member.live
        sampled.append(chance.randrange(VOCABULARY))
        if live.output_len + 1 >= live.request.sampling.max_new_tokens:
            finishes[live.rid] = Finish("length", live.request.sampling.max_new_tokens)
    return sampled, finishes
