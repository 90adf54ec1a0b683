"""The engine at work: threads that turn scheduler ranks, compute their batches, and hand out tokens.

`RankLoop` is one rank: inbox, scheduler, model runner. Each rank has a thread of its own; ranks that negotiate
(prefill delayer under DP attention) are turned by one thread in lockstep, as their collective would force them to.
`ServingEngine` is what the HTTP server talks to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from schedscope.engine import protocol
from schedscope.engine.batch import Batch, Member
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.engine.errors import ConfigError, RequestError, ServerError
from schedscope.engine.live import Live
from schedscope.engine.model import Model
from schedscope.engine.protocol import Output
from schedscope.engine.request import Request
from schedscope.engine.runner import BatchRow, ModelRunner
from schedscope.engine.scheduler import Ended, Finish, Scheduler
from schedscope.engine.tokenizer import IncrementalDecoder, Tokenizer
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.tracer import Tracer

logger = logging.getLogger(__name__)

STALLED_PAUSE_S = 0.005
"""Between steps that can do nothing but wait for a delayer, or for memory that nobody gives back."""
UNAVAILABLE = 503
FAILED = 500
MIN_REQUEST_TOKENS = 2
"""One of prompt and one of output."""

Deliver = Callable[[Output], None]
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


class Talk:
    """What a client has been told of one request."""

    def __init__(self, deliver: Deliver, tokenizer: Tokenizer, stops: tuple[str, ...], arrived: float) -> None:
        self.deliver = deliver
        self.arrived = arrived
        self.admitted: float | None = None
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        # A stop text may come in pieces: so much is never sent before more follows.
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._pending = ""

    def hear(self, token: int) -> str | None:
        """Take a token in. Returns the stop text that is complete with it."""
        self._pending += self._decoder.push([token])
        found = [(self._pending.find(stop), stop) for stop in self._stops if stop in self._pending]
        if not found:
            return None
        at, stop = min(found)
        self._pending = self._pending[:at]
        return stop

    def say(self, *, last: bool) -> str:
        """The text to send now."""
        if last:
            text, self._pending = self._pending, ""
            return text
        cut = len(self._pending) - self._hold
        if cut <= 0:
            return ""
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def end(self, *, stopped: bool) -> None:
        """No more tokens will come."""
        if not stopped:
            self._pending += self._decoder.flush()


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
        visible = live.output_len <= live.request.sampling.max_new_tokens
        talk.deliver(
            Output(
                rid=live.rid,
                token_ids=(token,) if visible else (),
                text=talk.say(last=finish is not None) if visible else "",
                finish=_told(finish),
                prompt_tokens=live.prompt_len,
                completion_tokens=min(live.output_len, live.request.sampling.max_new_tokens),
                cached_tokens=live.cached_tokens,
                queue_time=None if talk.admitted is None else talk.admitted - talk.arrived,
            )
        )

    def _tell_ended(self, ended: Iterable[Ended]) -> None:
        for live, finish in ended:
            talk = self._talks.pop(live.rid, None)
            if talk is None:
                continue
            talk.end(stopped=False)
            talk.deliver(
                Output(
                    rid=live.rid,
                    token_ids=(),
                    text=talk.say(last=True),
                    finish=_told(finish),
                    prompt_tokens=live.prompt_len,
                    completion_tokens=live.output_len,
                    cached_tokens=live.cached_tokens,
                    queue_time=None,
                )
            )

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
            client_left = message == "Aborted"
            return protocol.Finish(kind="abort", message=str(message), status=None if client_left else UNAVAILABLE)


def run_rank(rank: RankLoop) -> None:
    """Turn one rank until its inbox closes. An idle rank sleeps; a stalled one turns slowly."""
    scheduler = rank.scheduler
    wait: float | None = None
    while rank.take(wait):
        if not scheduler.busy:
            wait = None
            continue
        computed = rank.turn(rank.clock())
        wait = 0.0 if computed else STALLED_PAUSE_S
        if not scheduler.busy:
            scheduler.idle(rank.clock())
            wait = None


def run_lockstep(ranks: Sequence[RankLoop]) -> None:
    """Turn ranks together: each step all report, then all decide, as a gather over ranks makes them."""
    running = True
    while running:
        busy = any(rank.scheduler.busy for rank in ranks)
        computed = False
        if busy:
            now = ranks[0].clock()
            reports = [rank.scheduler.report(now) for rank in ranks]
            for i, rank in enumerate(ranks):
                computed |= rank.turn(now, (*reports[:i], *reports[i + 1 :]))
        pause = 0.0 if computed else STALLED_PAUSE_S
        for rank in ranks:
            running &= rank.take(pause)
            pause = 0.0


def largest_request(config: SchedulerConfig) -> int:
    """Prompt and output together of the largest request that admission lets into an empty pool, tokens."""
    size = config.num_pages * config.page_size
    if config.disable_radix_cache:
        # Admission then counts the prompt in whole pages, and keeps a reserve (ignore_eos).
        return size - 2 * config.page_size - config.ignore_eos_reserve_tokens
    return size - config.page_size - 1


class ServingEngine:
    """The engine behind the HTTP server: spreads requests over ranks and brings their outputs back.

    Args:
        tracers: one per rank.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model: Model,
        tokenizer: Tokenizer,
        *,
        tracers: Sequence[Tracer | None] = (),
    ) -> None:
        self.config = config
        self.model_name = model.name
        self.tokenizer_path = model.path or ""
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.max_request_tokens = min(largest_request(config), model.context_length)
        if self.max_request_tokens < MIN_REQUEST_TOKENS:
            raise ConfigError(
                f"max_total_tokens={config.max_total_tokens}: with page_size={config.page_size} "
                "the pool holds no request at all"
            )
        self._tokenizer = tokenizer
        padded = [*tracers, *[None] * (config.dp_size - len(tracers))]
        self.ranks = [RankLoop(config, model, tokenizer, tracer=tracer) for tracer in padded]
        self._homes: dict[str, RankLoop] = {}
        self._turn = 0
        self._threads: list[threading.Thread] = []
        self.failure: str | None = None
        """Why the scheduler is gone; None while it is there."""

    # ---- threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler threads."""
        if self.config.enable_prefill_delayer and self.config.enable_dp_attention:
            jobs: list[tuple[Callable[..., None], Any]] = [(run_lockstep, self.ranks)]
        else:
            jobs = [(run_rank, rank) for rank in self.ranks]
        for number, (job, what) in enumerate(jobs):
            thread = threading.Thread(target=self._guard, args=(job, what), name=f"scheduler-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the threads after the step they are in."""
        for rank in self.ranks:
            rank.inbox.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        for rank in self.ranks:
            rank.fail_all("The server is shutting down.")

    def _guard(self, job: Callable[[Any], None], what: Any) -> None:
        try:
            job(what)
        except Exception as error:
            logger.exception("the scheduler thread died")
            self.failure = f"{type(error).__name__}: {error}"
            for rank in self.ranks:
                rank.fail_all("The scheduler failed; see the server's log.")

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise ServerError(f"the scheduler failed: {self.failure}")

    # ---- what the server asks ------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation."""
        return self._tokenizer.encode_chat(messages)

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """Run one request. Raises RequestError for a rid in use, ServerError when the scheduler is gone."""
        self._check_alive()
        if request.rid in self._homes:
            raise RequestError(f"rid {request.rid!r} is in use")
        event_loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output] = asyncio.Queue()

        def deliver(output: Output) -> None:
            try:
                event_loop.call_soon_threadsafe(outputs.put_nowait, output)
            except RuntimeError:
                logger.debug("the event loop closed before output of %s", output.rid)

        rank = self.ranks[self._turn % len(self.ranks)]
        self._turn += 1
        self._homes[request.rid] = rank
        finished = False
        try:
            rank.inbox.put(Arrival(request, deliver))
            while not finished:
                output = await outputs.get()
                finished = output.finish is not None
                yield output
        finally:
            if not finished:
                rank.inbox.put(Abort(request.rid))
            del self._homes[request.rid]

    def abort(self, rid: str) -> None:
        """End a request, whatever its state."""
        rank = self._homes.get(rid)
        if rank is not None:
            rank.inbox.put(Abort(rid))

    async def flush_cache(self) -> bool:
        """Empty the prefix cache of every rank that is idle. Raises ServerError when the scheduler is gone."""
        self._check_alive()
        event_loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[bool]] = []
        for rank in self.ranks:
            answer: asyncio.Future[bool] = event_loop.create_future()

            def done(flushed: bool, answer: asyncio.Future[bool] = answer) -> None:
                event_loop.call_soon_threadsafe(answer.set_result, flushed)

            rank.inbox.put(Flush(done))
            answers.append(answer)
        return all(await asyncio.gather(*answers))

    def info(self) -> dict[str, object]:
        """Configuration and state, for /server_info."""
        return {
            **self.config.to_dict(),
            "model_path": self.model_name,
            "internal_states": [
                {
                    "steps": rank.scheduler.steps,
                    "passes": rank.scheduler.passes,
                    "waiting": len(rank.scheduler.state.queue),
                    "running": len(rank.scheduler.state.running),
                    "available_tokens": rank.scheduler.state.pool.available,
                    "evictable_tokens": rank.scheduler.state.cache.evictable,
                }
                for rank in self.ranks
            ],
        }

    def is_healthy(self) -> bool:
        """False once a scheduler thread has died."""
        return self.failure is None
