"""One request to a server and its streamed answer, as the load client sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import h11
import httpx
import msgspec

CONNECT_SECONDS = 10.0
MAX_EXAMPLE_CHARS = 300
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


class Connection:
    """A connection for one request: one that the server happens to close must not count as a failure."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: httpx.URL) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: httpx.URL) -> Connection:
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


class Exchange:
    """One request on its way, and what is known of its answer."""

    def __init__(self, rid: str, due: float, sent: float) -> None:
        self._rid = rid
        self._due = due
        self._sent = sent
        self._started = self._latest = time.monotonic()
        self._ttft: float | None = None
        self._gaps: list[float] = []
        self._meta = _Meta()

    async def follow(self, connection: Connection | BaseException) -> Outcome:
        """Read the answer to its end."""
        if isinstance(connection, OSError):
            return self._outcome("connection", named(connection))
        if isinstance(connection, BaseException):
            raise connection
        try:
            async with aclosing(connection.answer()) as answer:
                return await self._read(answer)
        except (OSError, h11.ProtocolError) as error:
            return self._outcome("connection", named(error))
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


def _reason(body: bytes) -> str:
    """The message of an error body, in whichever of the usual shapes it comes."""
    try:
        value: Any = msgspec.json.decode(body)
        for name in ("error", "message"):
            value = value.get(name, value) if isinstance(value, dict) else value
    except (msgspec.DecodeError, RecursionError):
        value = body.decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error_status(error: Any) -> str:
    """The status that an error inside a stream names."""
    code = error.get("code") if isinstance(error, dict) else None
    return str(code or 500)
