"""A rank's loop, turned as its own thread turns it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import pytest
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.loop import Abort, Arrival, RankLoop, run_lockstep, run_rank
from schedscope.engine.model import load_model
from schedscope.engine.protocol import Output
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.state import SchedulerState
from schedscope.engine.tokenizer import load_tokenizer
from schedscope.engine.tracer import StepRecord, Tracer


class _Ratios(Tracer):
    """The new-token ratio of the last busy step, and that of the first idle one."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.idle: float | None = None
        self.stalled, self.idled = Event(), Event()

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        if record.kind == "idle":
            if self.idle is None:
                self.idle = state.new_token_ratio
            self.idled.set()
            return
        self.busy = state.new_token_ratio
        if record.batch is None:
            self.stalled.set()


def _request(rid: str, prompt_len: int) -> Request:
    prompt = tokens.encode([7] * prompt_len)
    return Request(rid=rid, prompt=prompt, sampling=SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0))


@pytest.mark.parametrize("run", [run_rank, lambda rank: run_lockstep([rank])], ids=["alone", "lockstep"])
def test_an_abort_between_turns_that_empties_the_queue_resets_the_ratio(run: Callable[[RankLoop], None]) -> None:
    """The last request waits for memory that it never gets; its client gives up."""
    ratios, outputs = _Ratios(), list[Output]()
    config = SchedulerConfig(max_total_tokens=20, enable_prefill_delayer=run is not run_rank)
    rank = RankLoop(config, load_model(seed=0), load_tokenizer(), tracer=ratios)
    for request in (_request("short", 4), _request("never fits", 30)):
        rank.inbox.put(Arrival(request, outputs.append))
    thread = Thread(target=run, args=(rank,), daemon=True)
    thread.start()
    assert ratios.stalled.wait(30)
    rank.inbox.put(Abort("never fits"))
    assert ratios.idled.wait(30)
    rank.inbox.put(None)
    thread.join(30)
    assert not thread.is_alive()
    assert ratios.idle == rank.scheduler.state.first_new_token_ratio > ratios.busy
    assert [output.finish.kind for output in outputs if output.finish is not None] == ["length", "abort"]
