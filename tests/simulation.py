"""Drives the real scheduler with a made-up workload and made-up tokens: every path of it, thousands of steps a second.

Everything random comes from one seed, so a failing case can be run again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from schedscope.engine import tokens
from schedscope.engine.batch import Batch
from schedscope.engine.chance import seeded
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.eviction import EVICTION_POLICIES
from schedscope.engine.ordering import POLICIES
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tracer import NOTHING_GIVEN, Given
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import LIMITS, Limits
from schedscope.recorder.tracer import RunTracer

STEP_S = 0.01
EVERYTHING = Detail(level="full")
TIGHT = {"max_total_tokens": 600, "max_running_requests": 60, "schedule_conservativeness": 0.02}


def any_config(seed: int) -> SchedulerConfig:
    """A configuration with something of everything."""
    chance = random.Random(seed)
    policy = chance.choice(list(POLICIES))
    page = chance.choice([1, 1, 4, 16])
    chunk = chance.choice([None, 32, 64, 200])
    return SchedulerConfig(
        schedule_policy=policy,
        page_size=page,
        max_total_tokens=chance.choice([300, 400, 800, 3000]),
        chunked_prefill_size=chunk,
        enable_mixed_chunk=chunk is not None and chance.random() < 0.4,
        max_running_requests=chance.choice([3, 8, 20, 60]),
        radix_eviction_policy=chance.choice(list(EVICTION_POLICIES)),
        enable_priority_scheduling=policy in {"fcfs", "lof", "priority"} and chance.random() < 0.7,
        disable_radix_cache=policy != "shortest-prefill-first" and chance.random() < 0.1,
        prefill_max_requests=chance.choice([None, None, 3]),
        max_queued_requests=chance.choice([None, None, 20]),
        req_waiting_timeout=chance.choice([None, None, 2.0]),
        enable_prefill_delayer=chance.random() < 0.2,
        prefill_delayer_max_delay_passes=5,
        schedule_conservativeness=chance.choice([1.0, 0.3, 0.1]),
        min_free_slots_delay=chance.choice([None, None, 3]),
        waiting_queue_prefix_match_max=chance.choice([128, 10]),
        retraction_policy=chance.choice(["length", "priority"]),
        random_seed=seed,
        disable_overlap_schedule=chance.random() < 0.5,
    )


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


class Driver:
    """Turns a scheduler: requests arrive in bursts, the model says something, clients give up.

    Args:
        requests: how many are to arrive.
        now: where the clock stands.
        follows: as if it were another server's scheduler that it follows, with that one's clocks and chance.
    """

    def __init__(
        self, scheduler: Scheduler, workload: Workload, requests: int, *, now: float = 0.0, follows: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.workload = workload
        self.left = requests
        self.now = now
        self._follows = follows

    @property
    def done(self) -> bool:
        """All requests have come and gone."""
        return not self.left and not self.scheduler.busy

    def turn(self) -> None:
        """What arrives in a while, and a step."""
        scheduler, chance = self.scheduler, self.workload.random
        self.now += STEP_S * chance.random()
        if self.left and (not scheduler.busy or chance.random() < 0.3):
            for _ in range(min(self.left, chance.randint(1, 8))):
                scheduler.arrive(self.workload.request(), self.now, self._entry_time())
                self.left -= 1
        if scheduler.lives and chance.random() < 0.02:
            scheduler.abort(chance.choice(sorted(scheduler.lives)), self.now)
        if not scheduler.busy:
            if chance.random() < 0.5:
                scheduler.flush(self.now)
            scheduler.idle(self.now)
            return
        due = scheduler.step(self.now, given=self._given()).due
        if due is not None:
            self._commit(due)

    def _commit(self, due: Batch) -> None:
        chance = self.workload.random
        sampled: list[int | None] = []
        finishes: dict[str, Finish] = {}
        for member in due.members:
            live = member.live
            if member.unfinished:
                sampled.append(None)
                continue
            sampled.append(chance.randint(3, 900))
            if live.output_len + 1 >= live.request.sampling.max_new_tokens:
                finishes[live.rid] = Finish("length", live.request.sampling.max_new_tokens)
            elif chance.random() < 0.01:
                finishes[live.rid] = Finish("stop", sampled[-1])
        self.scheduler.commit(due, sampled, finishes, self.now)

    def _entry_time(self) -> float | None:
        return self.now + self.workload.random.random() if self._follows else None

    def _given(self) -> Given:
        if not self._follows:
            return NOTHING_GIVEN
        chance, scheduler = self.workload.random, self.scheduler
        entry_times = {live.rid: self.now + chance.random() for live in scheduler.state.running}
        shuffles = scheduler.state.random_state is not None and chance.random() < 0.5
        return Given(entry_times, seeded(chance.getrandbits(32)) if shuffles else None)


def drive(scheduler: Scheduler, workload: Workload, requests: int, *, follows: bool = False) -> int:
    """Let the requests arrive in bursts and run until all have ended. Returns the number of steps."""
    driver = Driver(scheduler, workload, requests, follows=follows)
    steps = 0
    while not driver.done:
        driver.turn()
        steps += 1
        assert steps < 200 * requests + 1000, "the scheduler makes no progress"
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
    follows: bool = False,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> Path:
    """Record a driven scheduler as a run of one rank. Returns the run's path."""
    path = create_run(folder, "simulated")
    described = Description(source=Source("simulation", "1"), config=config.to_dict())
    sink = DirectSink(path, 0, described, limits, detail=detail, key=b"secret")
    tracer = RunTracer(sink, checkpoint_every=checkpoint_every, clock_ns=clock_ns)
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    drive(scheduler, Workload(seed, outputs=outputs), requests, follows=follows)
    tracer.close()
    return path
