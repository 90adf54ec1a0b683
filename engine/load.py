"""A load client: sends a trace to a server, at the trace's pace, and measures what a user would feel.

It speaks SGLang's `/generate`, so it measures schedscope's own server and a real SGLang alike. Arrivals never
wait for answers (an open loop): a server that falls behind sees its queue grow, as it would in production.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec
from schedscope.engine import tokens
from schedscope.engine.errors import ServerError, UsageError
from schedscope.engine.exchange import CONNECT_SECONDS, Connection, Exchange, Outcome, named
from schedscope.engine.load_report import LoadReport, make_report
from schedscope.engine.trace import TraceRow, block_tokens, prompt_tokens, scale_row

RID_PREFIX = "trace"
DEFAULT_VOCAB_SIZE = 1000
"""Prompts use token ids below it: few enough for any model, so that the same trace is the same prompts."""
CONNECT_AHEAD = 0.5
"""Seconds before a request is due that its connection is opened: enough to connect, too few to be dropped."""
MAX_BURST = 256
"""Requests of one instant that are prepared, with a connection each, before the first is sent."""
MAX_PORT = 65_535


async def run_load(
    rows: Sequence[TraceRow],
    *,
    url: str,
    speed: float = 1.0,
    requests: int | None = None,
    scale: float = 1.0,
    max_concurrency: int | None = None,
    vocab_size: int | None = None,
    rid_prefix: str = RID_PREFIX,
    headers: Mapping[str, str] | None = None,
    on_outcome: Callable[[Outcome], object] | None = None,
) -> LoadReport:
    """Send the first `requests` rows (None: all) to the server at `url` and wait for every answer.

    `speed` divides the trace's times; 0 or infinity sends all at once. Rows of one instant are written in
    file order, back to back. `max_concurrency` holds arrivals back, which closes the loop: the report's
    lateness shows by how much. `scale` is `scale_row`'s factor. `vocab_size` None takes DEFAULT_VOCAB_SIZE,
    or the server's where that is smaller. rids are `rid_prefix-000123`, by file order.

    A request that fails is counted with its status, never fatal. Raises ServerError where nothing like a
    server answers at `url`, UsageError for options without a meaning, ScenarioError for rows that are scaled
    down too far.
    """
    rows = list(rows if requests is None else rows[: max(0, requests)])
    if not rows:
        raise UsageError("no request to send")
    if math.isnan(speed) or speed < 0:
        raise UsageError(f"speed must be a number from 0, not {speed}")
    if max_concurrency is not None and max_concurrency < 1:
        raise UsageError(f"the concurrency must be at least 1, not {max_concurrency}")
    scaled = [scale_row(row, scale) for row in rows]
    address = _address(url)
    model, known_vocab = await _ask(address, headers)
    vocab_size = min(DEFAULT_VOCAB_SIZE, known_vocab) if vocab_size is None else vocab_size
    for row in scaled:
        block_tokens(max(row.hash_ids), row.block, vocab_size)
    run = _Run(
        address=address,
        headers=headers or {},
        pace=0.0 if math.isinf(speed) else speed,
        vocab_size=vocab_size,
        rid_prefix=rid_prefix,
        slots=None if max_concurrency is None else asyncio.Semaphore(max_concurrency),
        on_outcome=on_outcome,
    )
    outcomes = await run.send_all(scaled)
    return make_report(
        outcomes,
        url=url,
        model=model,
        duration=run.elapsed(),
        speed=run.pace,
        scale=scaled[0].block / rows[0].block,
        max_concurrency=max_concurrency,
    )


@dataclass(slots=True, kw_only=True)
class _Run:
    address: httpx.URL
    headers: Mapping[str, str]
    pace: float
    vocab_size: int
    rid_prefix: str
    slots: asyncio.Semaphore | None
    on_outcome: Callable[[Outcome], object] | None
    started: float = 0.0

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    async def send_all(self, rows: Sequence[TraceRow]) -> list[Outcome]:
        """Outcomes in the order of `rows`.

        A burst is prepared, connections included, before it is due, and then written in one go: requests of
        one instant reach the server together, in order, as far as one thread can.
        """
        tasks: dict[int, asyncio.Task[Outcome]] = {}
        bursts = self._bursts(rows)
        self.started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for due, burst in bursts:
                if self.slots is not None:
                    await self._wait_until(due)
                    await self.slots.acquire()
                rids = [f"{self.rid_prefix}-{index:06d}" for index in burst]
                bodies = [_body(rows[index], rid, self.vocab_size) for index, rid in zip(burst, rids, strict=True)]
                await self._wait_until(due - CONNECT_AHEAD)
                opened = await asyncio.gather(*(Connection.open(self.address) for _ in burst), return_exceptions=True)
                await self._wait_until(due)
                for index, rid, body, connection in zip(burst, rids, bodies, opened, strict=True):
                    exchange = Exchange(rid, due, self.elapsed())
                    if isinstance(connection, Connection):
                        connection.post("/generate", self.headers, body)
                    tasks[index] = group.create_task(self._follow(exchange, connection))
        return [tasks[index].result() for index in range(len(rows))]

    def _bursts(self, rows: Sequence[TraceRow]) -> list[tuple[float, list[int]]]:
        """Due times, ascending, and the rows of each: of one instant, in file order, at most MAX_BURST.

        With bounded concurrency each row is a burst: its connection is opened once its turn has come.
        """
        order = sorted(range(len(rows)), key=lambda index: rows[index].timestamp)
        first = rows[order[0]].timestamp
        largest = MAX_BURST if self.slots is None else 1
        bursts: list[tuple[float, list[int]]] = []
        for index in order:
            due = (rows[index].timestamp - first) / 1000 / self.pace if self.pace else 0.0
            if bursts and bursts[-1][0] == due and len(bursts[-1][1]) < largest:
                bursts[-1][1].append(index)
            else:
                bursts.append((due, [index]))
        return bursts

    async def _wait_until(self, due: float) -> None:
        await asyncio.sleep(max(0.0, due - self.elapsed()))

    async def _follow(self, exchange: Exchange, connection: Connection | BaseException) -> Outcome:
        try:
            outcome = await exchange.follow(connection)
        finally:
            if self.slots is not None:
                self.slots.release()
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        return outcome


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
        host = address.host
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ServerError(f"{url!r} is no server's address: {error}") from None
    if address.scheme not in {"http", "https"} or not host or (address.port or 0) > MAX_PORT:
        raise ServerError(f"{url!r} is no server's address: expected one such as http://127.0.0.1:30000")
    return address


async def _ask(url: httpx.URL, headers: Mapping[str, str] | None) -> tuple[str, int]:
    """The served model and its vocabulary size, DEFAULT_VOCAB_SIZE where the server doesn't tell."""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=CONNECT_SECONDS, trust_env=False) as client:
        try:
            models = await client.get("/v1/models")
            info = await client.get("/model_info")
        except (httpx.HTTPError, OverflowError, UnicodeError) as error:
            raise ServerError(f"no server answers at {url}: {named(error)}") from None
    if models.status_code != 200:
        raise ServerError(f"{url} is no SGLang-like server: GET /v1/models gives {models.status_code}")
    try:
        model = msgspec.convert(models.json()["data"][0]["id"], str)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ServerError(f"{url} is no SGLang-like server: GET /v1/models names no model") from None
    try:
        return model, msgspec.convert(info.json()["vocab_size"], int)
    except (ValueError, LookupError, TypeError, RecursionError):
        return model, DEFAULT_VOCAB_SIZE


def _body(row: TraceRow, rid: str, vocab_size: int) -> bytes:
    return msgspec.json.encode(
        {
            "rid": rid,
            "input_ids": tokens.decode(prompt_tokens(row, vocab_size)),
            "sampling_params": {
                "max_new_tokens": row.output_length,
                "ignore_eos": True,
                "temperature": 0,
            },
            "stream": True,
            **({} if row.priority is None else {"priority": row.priority}),
        }
    )
