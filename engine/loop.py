"""One rank at work: inbox, scheduler, model runner; and the two ways of turning ranks.

Each rank has a thread of its own; ranks that negotiate (prefill delayer under DP attention) are turned by one thread
in lockstep, as their collective would force them to.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from schedscope.engine import protocol
from schedscope.engine.batch import Batch, Member
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.engine.live import Live
from schedscope.engine.model import Model
from schedscope.engine.protocol import Output
from schedscope.engine.request import Request
from schedscope.engine.runner import BatchRow, ModelRunner
from schedscope.engine.scheduler import OUT_OF_MEMORY, POOL_EXHAUSTED, Ended, Finish, Scheduler
from schedscope.engine.talk import Deliver, Talk
from schedscope.engine.tokenizer import Tokenizer
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.tracer import Tracer

logger = logging.getLogger(__name__)

STALLED_PAUSE_S = 0.005
"""Between steps that can do nothing but wait for a delayer, or for memory that nobody gives back."""
UNAVAILABLE = 503
FAILED = 500

Clock = Callable[[], float]


class Arrival(NamedTuple):
    """Inbox: a new request, and who gets its outputs."""

    request: Request
    deliver: Deliver


class Abort(NamedTuple):
    """Inbox: a client takes a request back."""

    rid: str


class Flush(NamedTuple):
    """Inbox: empty the prefix cache."""

    done: Callable[[bool], None]


class RankLoop:
    """One scheduler rank and its model runner. Only its own thread calls it, but for `inbox`."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: Model,
        tokenizer: Tokenizer,
        *,
        tracer: Tracer | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.scheduler = Scheduler(config, tracer)
        self.runner = ModelRunner(model, num_slots=config.num_pages * config.page_size, seed=config.random_seed)
        self.inbox: queue.SimpleQueue[Arrival | Abort | Flush | None] = queue.SimpleQueue()
        self._eos = model.eos_token_ids
        self._tokenizer = tokenizer
        self.clock = clock
        self._talks: dict[str, Talk] = {}
        self._rested = True

    def take(self, wait_s: float | None = 0.0) -> bool:
        """Empty the inbox, waiting for its first item at most `wait_s` seconds (None: for ever).

        Returns False once the inbox says that no more will come.
        """
        try:
            item = self.inbox.get_nowait() if wait_s == 0.0 else self.inbox.get(timeout=wait_s)
            while True:
                if item is None:
                    return False
                self._take(item)
                item = self.inbox.get_nowait()
        except queue.Empty:
            return True

    def _take(self, item: Arrival | Abort | Flush) -> None:
        now = self.clock()
        match item:
            case Arrival(request, deliver) if request.rid in self.scheduler.lives:
                message = f"rid {request.rid!r} is in use: its last request is still ending"
                deliver(_refusal(request.rid, request.prompt_len, message, 400))
            case Arrival(request, deliver):
                stops = request.sampling.stop
                self._talks[request.rid] = Talk(deliver, self._tokenizer, stops, now)
                self._tell_ended(self.scheduler.arrive(request, now))
            case Abort(rid):
                self._tell_ended(self.scheduler.abort(rid, now))
            case Flush(done):
                done(self.scheduler.flush(now))

    def turn(self, now: float, reports: Sequence[Report] = ()) -> bool:
        """One step. Returns whether anything was computed."""
        self._rested = False
        step = self.scheduler.step(now, tuple(reports))
        self._tell_ended(step.ended)
        if step.batch is None:
            return False
        for member in step.batch.members:
            talk = self._talks.get(member.live.rid)
            if talk is not None and talk.admitted is None:
                talk.admitted = now
        sampled = self.runner.forward([_batch_row(member) for member in step.batch.members])
        self._commit(step.batch, sampled)
        return True

    def rest(self) -> None:
        """Nothing is left to do: after a turn, or because an abort emptied the queue behind one."""
        if not self._rested:
            self.scheduler.idle(self.clock())
            self._rested = True

    def _commit(self, batch: Batch, sampled: list[int | None]) -> None:
        finishes: dict[str, Finish] = {}
        for member, token in zip(batch.members, sampled, strict=True):
            if token is not None:
                finish = self._finish_of(member.live, token)
                if finish is not None:
                    finishes[member.live.rid] = finish
        self.scheduler.commit(batch, sampled, finishes, self.clock())
        for member, token in zip(batch.members, sampled, strict=True):
            if token is not None:
                self._tell_token(member.live, token, finishes.get(member.live.rid))

    def _finish_of(self, live: Live, token: int) -> Finish | None:
        sampling = live.request.sampling
        stop = self._talks[live.rid].hear(token)
        if live.to_finish is not None:
            return Finish("abort", live.to_finish)
        if stop is not None:
            return Finish("stop", stop)
        if not sampling.ignore_eos and (token in self._eos or token in sampling.stop_token_ids):
            return Finish("stop", token)
        if live.output_len + 1 >= sampling.max_new_tokens:
            return Finish("length", sampling.max_new_tokens)
        return None

    def _tell_token(self, live: Live, token: int, finish: Finish | None) -> None:
        talk = self._talks[live.rid]
        if finish is not None:
            talk.end(stopped=isinstance(finish.detail, str) and finish.kind == "stop")
            del self._talks[live.rid]
        # A request for no token gets one from the model all the same; nobody sees it.
        visible = live.output_len <= live.request.sampling.max_new_tokens
        text = talk.say(last=finish is not None) if visible else ""
        _deliver(talk, live, (token,) if visible else (), text, finish)

    def _tell_ended(self, ended: Iterable[Ended]) -> None:
        for live, finish in ended:
            talk = self._talks.pop(live.rid, None)
            if talk is None:
                continue
            talk.end(stopped=False)
            _deliver(talk, live, (), talk.say(last=True), finish)

    def fail_all(self, message: str) -> None:
        """Tell every client, also those whose request is still in the inbox, that this rank is gone."""
        for rid, talk in self._talks.items():
            talk.deliver(_refusal(rid, 0, message, FAILED))
        self._talks.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                match self.inbox.get_nowait():
                    case Arrival(request, deliver):
                        deliver(_refusal(request.rid, request.prompt_len, message, FAILED))
                    case Flush(done):
                        done(False)


def _deliver(talk: Talk, live: Live, token_ids: tuple[int, ...], text: str, finish: Finish | None) -> None:
    talk.deliver(
        Output(
            rid=live.rid,
            token_ids=token_ids,
            text=text,
            finish=_told(finish),
            prompt_tokens=live.prompt_len,
            completion_tokens=min(live.output_len, live.request.sampling.max_new_tokens),
            cached_tokens=live.cached_tokens,
            queue_time=None if talk.admitted is None else talk.admitted - talk.arrived,
        )
    )


def _refusal(rid: str, prompt_tokens: int, message: str, status: int) -> Output:
    return Output(
        rid=rid,
        token_ids=(),
        text="",
        finish=protocol.Finish(kind="abort", message=message, status=status),
        prompt_tokens=prompt_tokens,
        completion_tokens=0,
        cached_tokens=0,
        queue_time=None,
    )


def _batch_row(member: Member) -> BatchRow:
    live = member.live
    return BatchRow(
        rid=live.rid,
        tokens=live.tokens[member.start * TOKEN_BYTES : member.end * TOKEN_BYTES],
        start=member.start,
        end=member.end,
        slots=live.row[: member.end],
        sample=not member.unfinished,
        sampling=live.request.sampling,
    )


def _told(finish: Finish | None) -> protocol.Finish | None:
    match finish:
        case None:
            return None
        case Finish("stop", matched):
            return protocol.Finish(kind="stop", matched=matched)
        case Finish("length", _):
            return protocol.Finish(kind="length")
        case Finish(_, message):
            status = {"Aborted": None, OUT_OF_MEMORY: FAILED, POOL_EXHAUSTED: FAILED}.get(str(message), UNAVAILABLE)
            return protocol.Finish(kind="abort", message=str(message), status=status)


def run_rank(rank: RankLoop) -> None:
    """Turn one rank until its inbox closes. An idle rank sleeps; a stalled one turns slowly."""
    scheduler = rank.scheduler
    wait: float | None = None
    while rank.take(wait):
        if scheduler.busy:
            wait = 0.0 if rank.turn(rank.clock()) else STALLED_PAUSE_S
        if not scheduler.busy:
            rank.rest()
            wait = None


def run_lockstep(ranks: Sequence[RankLoop]) -> None:
    """Turn ranks together: each step all report, then all decide, as a gather over ranks makes them."""
    running = True
    while running:
        computed = False
        if any(rank.scheduler.busy for rank in ranks):
            now = ranks[0].clock()
            reports = [rank.scheduler.report(now) for rank in ranks]
            for i, rank in enumerate(ranks):
                computed |= rank.turn(now, (*reports[:i], *reports[i + 1 :]))
        if not any(rank.scheduler.busy for rank in ranks):
            for rank in ranks:
                rank.rest()
        pause = 0.0 if computed else STALLED_PAUSE_S
        for rank in ranks:
            running &= rank.take(pause)
            pause = 0.0
