"""The engine behind the HTTP server: its ranks, their threads, and the way of an output back to its client."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import ConfigError, RequestError, ServerError
from schedscope.engine.loop import Abort, Arrival, Flush, RankLoop, run_lockstep, run_rank
from schedscope.engine.model import Model
from schedscope.engine.protocol import Output
from schedscope.engine.request import Request
from schedscope.engine.tokenizer import Tokenizer
from schedscope.engine.tracer import Tracer

logger = logging.getLogger(__name__)

MIN_REQUEST_TOKENS = 2
"""One of prompt and one of output."""


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
                    "running": len(rank.scheduler.state.running_batch),
                    "available_tokens": rank.scheduler.state.pool.available,
                    "evictable_tokens": rank.scheduler.state.cache.evictable,
                }
                for rank in self.ranks
            ],
        }

    def is_healthy(self) -> bool:
        """False once a scheduler thread has died."""
        return self.failure is None
