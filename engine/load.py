"""A load client: sends a trace to a server, at the trace's pace, and measures what a user would feel.

It speaks SGLang's `/generate`, so it measures schedscope's own server and a real SGLang alike. Arrivals never
wait for answers (an open loop): a server that falls behind sees its queue grow, as it would in production.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import h11
import httpx
import msgspec
from rich.table import Table
from rich.text import Text
from schedscope.engine import tokens
from schedscope.engine.errors import ServerError, UsageError
from schedscope.engine.trace import TraceRow, block_tokens, prompt_tokens, scale_row

SCHEMA = "schedscope.load/1"
RID_PREFIX = "trace"
DEFAULT_VOCAB_SIZE = 1000
"""Prompts use token ids below it: few enough for any model, so that the same trace is the same prompts."""
CONNECT_SECONDS = 10.0
CONNECT_AHEAD = 0.5
"""Seconds before a request is due that its connection is opened: enough to connect, too few to be dropped."""
MAX_BURST = 256
"""Requests of one instant that are prepared, with a connection each, before the first is sent."""
MAX_EXAMPLE_CHARS = 300
MAX_PORT = 65_535
MAX_CHUNK_TOKENS = 100_000
"""More new tokens in one chunk are no answer."""
OK = "ok"

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times are seconds; None where it didn't come that far."""

    rid: str
    due: float
    """When the trace wanted it sent, from the start of the run."""
    sent: float
    """When it was sent."""
    ttft: float | None = None
    """From sending to the first token."""
    e2e: float | None = None
    """From sending to the end of the answer."""
    gaps: tuple[float, ...] = ()
    """Inter-token times; tokens that came together share their gap evenly."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_time: float | None = None
    """The server's own word, where it gives one."""
    status: str = OK
    """`ok`, an HTTP status, `abort` (ended by the server), `connection` or `protocol`."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is distributed, in seconds; all 0 where there was none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles interpolate linearly between ranks, as numpy's do."""
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ranked = sorted(values)
        p50, p90, p99 = (_percentile(ranked, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ranked), math.fsum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class Failures:
    """All requests that ended with the same status."""

    status: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run of the load client."""

    url: str
    model: str
    requests: int
    completed: int
    duration: float
    """Seconds from the first arrival to the last answer."""
    speed: float
    """Trace time over real time; 0: all at once."""
    scale: float
    """Lengths sent over lengths in the trace."""
    max_concurrency: int | None
    ttft: Spread
    e2e: Spread
    inter_token: Spread
    lateness: Spread
    """Sending after the due time: the client's own delay, or a full `max_concurrency`."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """These three: of completed requests, as the server counted."""
    failures: tuple[Failures, ...]
    """Most frequent first."""
    outcomes: tuple[Outcome, ...] = field(repr=False)
    """Every request, in the trace's order."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that came from the prefix cache, as a share; 0 where nothing completed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self, *, requests: bool = False) -> dict[str, object]:
        """A JSON-ready object of schema `schedscope.load/1`; `requests`: with one entry per request."""
        return {
            "schema": SCHEMA,
            "url": self.url,
            "model": self.model,
            "speed": self.speed,
            "scale": self.scale,
            "max_concurrency": self.max_concurrency,
            "requests": self.requests,
            "completed": self.completed,
            "duration_s": self.duration,
            "ttft_s": asdict(self.ttft),
            "e2e_s": asdict(self.e2e),
            "inter_token_s": asdict(self.inter_token),
            "lateness_s": asdict(self.lateness),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "failures": [asdict(failure) for failure in self.failures],
            **({"outcomes": [_outcome_json(outcome) for outcome in self.outcomes]} if requests else {}),
        }

    def render(self) -> Table:
        """The report for a terminal."""
        pace = f"{self.speed:g} x the trace's pace" if self.speed else "all at once"
        lengths = "" if self.scale == 1 else f", lengths x {self.scale:.4g}"
        title = Text(f"{_plain(self.model)} at {self.url}: {pace}{lengths}")
        times = Table(title=title, title_justify="left")
        for name in ("", "p50", "p90", "p99", "max", "mean"):
            times.add_column(name, justify="right" if name else "left")
        rows = {
            "time to first token": self.ttft,
            "end to end": self.e2e,
            "between tokens": self.inter_token,
            **({"sent late by": self.lateness} if self.speed else {}),
        }
        for name, spread in rows.items():
            values = (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)
            times.add_row(name, *(_seconds(value) if spread.count else "-" for value in values))
        facts = Table.grid(padding=(0, 2))
        facts.add_row("completed", f"{self.completed} of {self.requests} in {_seconds(self.duration)}")
        facts.add_row("prefix cache", f"{self.hit_rate:.1%} of {self.prompt_tokens} prompt tokens")
        facts.add_row("output", f"{self.completion_tokens / max(self.duration, 1e-9):.1f} tokens/s")
        for failure in self.failures:
            facts.add_row(
                Text(_plain(f"failed: {failure.status}")),
                Text(_plain(f"{failure.count} x, such as: {failure.example}")),
            )
        report = Table.grid()
        report.add_row(times)
        report.add_row(facts)
        return report


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
    return _report(
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
                opened = await asyncio.gather(*(_Connection.open(self.address) for _ in burst), return_exceptions=True)
                await self._wait_until(due)
                for index, rid, body, connection in zip(burst, rids, bodies, opened, strict=True):
                    exchange = _Exchange(rid, due, self.elapsed())
                    if isinstance(connection, _Connection):
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

    async def _follow(self, exchange: _Exchange, connection: _Connection | BaseException) -> Outcome:
        try:
            outcome = await exchange.follow(connection)
        finally:
            if self.slots is not None:
                self.slots.release()
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        return outcome


class _Connection:
    """A connection for one request: one that the server happens to close must not count as a failure."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: httpx.URL) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: httpx.URL) -> _Connection:
        """Connect. Raises OSError."""
        secure = address.scheme == "https"
        port = address.port or (443 if secure else 80)
        connecting = asyncio.open_connection(address.host, port, ssl=secure or None)
        return cls(*await asyncio.wait_for(connecting, CONNECT_SECONDS), address)

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Hand the whole request to the kernel, or what it takes of it; the rest follows by itself."""
        head = h11.Request(
            method="POST",
            target=self._address.path.rstrip("/") + path,
            headers=[
                (b"host", self._address.netloc),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
            ],
        )
        parts = [self._http.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self._writer.write(b"".join(part for part in parts if part))

    async def answer(self) -> AsyncGenerator[h11.Response | h11.Data, None]:
        """The head of the answer, then its body as it comes. Raises OSError and h11.ProtocolError."""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response | h11.Data):
                yield event
            elif not isinstance(event, h11.InformationalResponse):
                return

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


class _FinishReason(msgspec.Struct):
    type: str = "stop"
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    queue_time: float | None = None
    finish_reason: _FinishReason | None = None


class _Chunk(msgspec.Struct):
    """What is read of a chunk; its texts and ids, which repeat everything so far, are skipped."""

    meta_info: _Meta | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class _Exchange:
    """One request on its way, and what is known of its answer."""

    def __init__(self, rid: str, due: float, sent: float) -> None:
        self._rid = rid
        self._due = due
        self._sent = sent
        self._started = self._latest = time.monotonic()
        self._ttft: float | None = None
        self._gaps: list[float] = []
        self._meta = _Meta()

    async def follow(self, connection: _Connection | BaseException) -> Outcome:
        """Read the answer to its end."""
        if isinstance(connection, OSError):
            return self._outcome("connection", _named(connection))
        if isinstance(connection, BaseException):
            raise connection
        try:
            async with aclosing(connection.answer()) as answer:
                return await self._read(answer)
        except (OSError, h11.ProtocolError) as error:
            return self._outcome("connection", _named(error))
        except (msgspec.DecodeError, RecursionError) as error:
            return self._outcome("protocol", f"a chunk that is no SGLang answer: {error}")
        finally:
            connection.close()

    async def _read(self, answer: AsyncIterator[h11.Response | h11.Data]) -> Outcome:
        head = await anext(answer)
        parts = (bytes(event.data) async for event in answer if isinstance(event, h11.Data))
        if isinstance(head, h11.Response) and head.status_code != 200:
            return self._outcome(str(head.status_code), _reason(b"".join([part async for part in parts])))
        async for data in _events(parts):
            if data == b"[DONE]":
                continue
            chunk = _CHUNKS.decode(data)
            if chunk.error is not None:
                return self._outcome(_error_status(chunk.error), _reason(data))
            if chunk.meta_info is not None:
                self._note(chunk.meta_info)
        finish = self._meta.finish_reason
        if finish is None:
            return self._outcome("protocol", "the answer ended before the request did")
        if finish.type == "abort":
            return self._outcome(str(finish.status_code or "abort"), finish.message or "aborted")
        return self._outcome(OK)

    def _note(self, meta: _Meta) -> None:
        now = time.monotonic()
        new = meta.completion_tokens - self._meta.completion_tokens
        if new > MAX_CHUNK_TOKENS:
            raise msgspec.ValidationError(f"{new} tokens in one chunk")
        if new > 0:
            if self._ttft is None:
                self._ttft = now - self._started
            else:
                self._gaps += [(now - self._latest) / new] * new
            self._latest = now
        self._meta = meta

    def _outcome(self, status: str, error: str | None = None) -> Outcome:
        return Outcome(
            rid=self._rid,
            due=self._due,
            sent=self._sent,
            ttft=self._ttft,
            e2e=time.monotonic() - self._started if status == OK else None,
            gaps=tuple(self._gaps),
            prompt_tokens=self._meta.prompt_tokens,
            cached_tokens=self._meta.cached_tokens or 0,
            completion_tokens=self._meta.completion_tokens,
            queue_time=self._meta.queue_time,
            status=status,
            error=None if error is None else error[:MAX_EXAMPLE_CHARS],
        )


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


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
            raise ServerError(f"no server answers at {url}: {_named(error)}") from None
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
        }
    )


def _report(
    outcomes: Sequence[Outcome],
    *,
    url: str,
    model: str,
    duration: float,
    speed: float,
    scale: float,
    max_concurrency: int | None,
) -> LoadReport:
    done = [outcome for outcome in outcomes if outcome.status == OK]
    return LoadReport(
        url=url,
        model=model,
        requests=len(outcomes),
        completed=len(done),
        duration=duration,
        speed=speed,
        scale=scale,
        max_concurrency=max_concurrency,
        ttft=Spread.of([outcome.ttft for outcome in done if outcome.ttft is not None]),
        e2e=Spread.of([outcome.e2e for outcome in done if outcome.e2e is not None]),
        inter_token=Spread.of([gap for outcome in done for gap in outcome.gaps]),
        lateness=Spread.of([outcome.sent - outcome.due for outcome in outcomes]),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in done),
        cached_tokens=sum(outcome.cached_tokens for outcome in done),
        completion_tokens=sum(outcome.completion_tokens for outcome in done),
        failures=_failures(outcomes),
        outcomes=tuple(outcomes),
    )


def _failures(outcomes: Sequence[Outcome]) -> tuple[Failures, ...]:
    failed: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status != OK:
            failed[outcome.status].append(outcome)
    return tuple(
        Failures(status, len(same), f"{same[0].rid}: {same[0].error}")
        for status, same in sorted(failed.items(), key=lambda item: -len(item[1]))
    )


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    return {
        "rid": outcome.rid,
        "status": outcome.status,
        "error": outcome.error,
        "due_s": outcome.due,
        "sent_s": outcome.sent,
        "ttft_s": outcome.ttft,
        "e2e_s": outcome.e2e,
        "queue_time_s": outcome.queue_time,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
    }


def _reason(body: bytes) -> str:
    """The message of an error body, in whichever of the usual shapes it comes."""
    try:
        value: Any = msgspec.json.decode(body)
        for name in ("error", "message"):
            value = value.get(name, value) if isinstance(value, dict) else value
    except (msgspec.DecodeError, RecursionError):
        value = body.decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error_status(error: Any) -> str:
    """The status that an error inside a stream names."""
    code = error.get("code") if isinstance(error, dict) else None
    return str(code or 500)


def _percentile(ranked: Sequence[float], share: float) -> float:
    place = share * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def _plain(text: str) -> str:
    """A server's text without what could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
