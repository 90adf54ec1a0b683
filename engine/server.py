"""The HTTP server: SGLang's own endpoints, so that its clients and benchmarks run unchanged.

A handler parses, runs and answers; whatever goes wrong becomes one JSON error and never stops the server. A
client that goes away takes its requests with it, also while they wait: the queue that is being recorded holds
only what somebody waits for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata
from typing import Any, TypeVar

import msgspec
import uvicorn
from schedscope.engine import tokens
from schedscope.engine.answers import ChatShape, CompletionShape, Progress, Shape, native_answer
from schedscope.engine.errors import RequestError, ServerError
from schedscope.engine.protocol import (
    AbortBody,
    Call,
    Engine,
    FieldError,
    Finish,
    Output,
    decode_body,
    parse_chat,
    parse_completion,
    parse_generate,
)
from schedscope.engine.request import Request, SamplingParams
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

MAX_BODY_BYTES = 128 * 2**20
MAX_IGNORED_NAMES = 1000
"""Different unknown fields that are counted by name; all others share one count."""
HEALTH_TIMEOUT = 20.0
"""Seconds in which a healthy engine gives a token to somebody."""
HEALTH_RID_PREFIX = "HEALTH_CHECK_"
"""SGLang's; such requests are the server's own."""
SHUTDOWN_GRACE = 5.0
"""Seconds that open answers get to end once the server was told to stop."""

_BACKLOG = 2048
_POLL_SECONDS = 0.05
_OTHER_NAMES = "(other)"
_STOPPING = "the server is stopping"
_ENGINE_GONE = "the engine has stopped"

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[HTTPRequest], Awaitable[Response]]


def build_app(engine: Engine) -> Starlette:
    """The application that serves this engine. The engine's own life is the caller's business."""
    frontend = Frontend(engine)
    both = ["GET", "POST"]
    post = ["POST", "PUT"]
    routes: list[tuple[str, Handler, list[str]]] = [
        ("/generate", frontend.generate, post),
        ("/v1/completions", frontend.completions, ["POST"]),
        ("/v1/chat/completions", frontend.chat, ["POST"]),
        ("/v1/models", frontend.models, ["GET"]),
        ("/v1/models/{name:path}", frontend.model, ["GET"]),
        ("/model_info", frontend.model_info, ["GET"]),
        ("/get_model_info", frontend.model_info, ["GET"]),
        ("/server_info", frontend.server_info, ["GET"]),
        ("/get_server_info", frontend.server_info, ["GET"]),
        ("/health", frontend.health, ["GET"]),
        ("/health_generate", frontend.health_generate, ["GET"]),
        ("/flush_cache", frontend.flush_cache, both),
        ("/abort_request", frontend.abort_request, ["POST"]),
    ]
    return Starlette(
        routes=[Route(path, _guarded(handler), methods=methods) for path, handler, methods in routes],
        exception_handlers={HTTPException: _http_error},
    )


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that accepts connections."""

    url: str
    """With the real port where 0 was asked for."""
    port: int
    stop: Callable[[], None]
    """Ask it to end within the grace period; the second call ends it at once. Safe in a signal handler."""


async def serve_app(
    app: Starlette,
    host: str,
    port: int,
    on_ready: Callable[[Serving], object] | None = None,
    *,
    grace: float = SHUTDOWN_GRACE,
) -> None:
    """Serve until `Serving.stop`, which `on_ready` gets; port 0 takes a free one.

    Signals are left alone: `loop.add_signal_handler(SIGTERM, serving.stop)` in `on_ready` is all a caller
    needs. Answers that are open then get `grace` seconds. Raises ServerError where the address can't be had.
    """
    listener = _listen(host, port)
    try:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(grace)),
        )
        server = _Uvicorn(config, _url(host, listener), on_ready)
        await server.serve(sockets=[listener])
        await _cancelled(*server.server_state.tasks)
    finally:
        listener.close()


class RefusedError(Exception):
    """A call that ends with an HTTP status instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGoneError(Exception):
    """Nobody is left to answer to."""


class Frontend:
    """The handlers, and what they share: which requests are in flight, and what was ignored."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: dict[str, str | None] = {}
        """rid of every request that runs or waits, and that of its call."""
        self._ignored: Counter[str] = Counter()
        self._last_output = float("-inf")
        self._created = int(time.time())

    async def generate(self, http: HTTPRequest) -> Response:
        """POST /generate."""
        call = parse_generate(await _body(http), self._engine, _routing_key(http))
        self._count(call.ignored)
        if call.stream:
            return await self._stream(self._native_chunks(call), http.receive)
        done = await unless_gone(self._whole(call), http.receive)
        answers = [native_answer(progress) for progress in done]
        return JSONAnswer(answers[0] if call.single else answers)

    async def completions(self, http: HTTPRequest) -> Response:
        """POST /v1/completions."""
        body, call = parse_completion(await _body(http), self._engine, _routing_key(http))
        self._count(call.ignored)
        return await self._openai(http, CompletionShape(body, call, self._engine.model_name))

    async def chat(self, http: HTTPRequest) -> Response:
        """POST /v1/chat/completions."""
        body, call = parse_chat(await _body(http), self._engine, _routing_key(http))
        self._count(call.ignored)
        return await self._openai(http, ChatShape(body, call, self._engine.model_name))

    async def models(self, _: HTTPRequest) -> Response:
        """GET /v1/models."""
        return JSONAnswer({"object": "list", "data": [self._card()]})

    async def model(self, http: HTTPRequest) -> Response:
        """GET /v1/models/{name}."""
        name = http.path_params["name"]
        if name != self._engine.model_name:
            raise RefusedError(404, f"no model {name!r}, this server has {self._engine.model_name!r}")
        return JSONAnswer(self._card())

    async def model_info(self, _: HTTPRequest) -> Response:
        """GET /model_info."""
        return JSONAnswer(
            {
                "model_path": self._engine.model_name,
                "served_model_name": self._engine.model_name,
                "tokenizer_path": self._engine.tokenizer_path,
                "is_generation": True,
                "vocab_size": self._engine.vocab_size,
                "context_length": self._engine.context_length,
                "max_request_tokens": self._engine.max_request_tokens,
            }
        )

    async def server_info(self, _: HTTPRequest) -> Response:
        """GET /server_info."""
        return JSONAnswer(
            {
                "version": metadata.version("schedscope"),
                "internal_states": [],
                **self._engine.info(),
                "in_flight": len(self._in_flight),
                "ignored_fields": dict(sorted(self._ignored.items())),
            }
        )

    async def health(self, _: HTTPRequest) -> Response:
        """GET /health."""
        return Response(status_code=200 if self._engine.is_healthy() else 503)

    async def health_generate(self, http: HTTPRequest) -> Response:
        """GET /health_generate: does anybody get a token? A probe is made only where nobody else waits."""
        asked = time.monotonic()
        probe = None if self._in_flight else asyncio.create_task(self._probe())
        try:
            while time.monotonic() < asked + HEALTH_TIMEOUT and self._engine.is_healthy():
                await unless_gone(asyncio.sleep(_POLL_SECONDS), http.receive)
                if self._last_output >= asked:
                    return Response(status_code=200)
                if probe is not None and probe.done():
                    break
            return Response(status_code=503)
        finally:
            if probe is not None:
                await _cancelled(probe)

    async def flush_cache(self, http: HTTPRequest) -> Response:
        """POST /flush_cache?timeout=S: waits up to S seconds (0) for the engine to be idle."""
        text = http.query_params.get("timeout", "0")
        try:
            deadline = time.monotonic() + float(text)
        except ValueError:
            raise FieldError("timeout", f"{text!r} is not a number of seconds") from None
        while not await self._engine.flush_cache():
            if not time.monotonic() < deadline:
                return PlainTextResponse("Not flushed: requests are waiting or running.\n", status_code=400)
            await unless_gone(asyncio.sleep(_POLL_SECONDS), http.receive)
        return PlainTextResponse("Cache flushed.\n")

    async def abort_request(self, http: HTTPRequest) -> Response:
        """POST /abort_request: one rid, all of a call's by its rid, or everything."""
        body, ignored = decode_body(await _body(http), AbortBody)
        self._count(ignored)
        if not body.rid and not body.abort_all:
            raise FieldError("rid", "neither rid nor abort_all is given")
        chosen = [rid for rid, call in self._in_flight.items() if body.abort_all or body.rid == rid or body.rid == call]
        for rid in chosen:
            self._engine.abort(rid)
        return JSONAnswer({"aborted": len(chosen)})

    async def _increments(self, call: Call) -> AsyncGenerator[tuple[int, Progress], None]:
        """(index, progress) after every increment of any request; what is unfinished at the end is aborted.

        Raises FieldError for a rid that is in flight, and RefusedError for a request that the engine turned
        away with a status, as long as the client has got nothing yet.
        """
        if not self._engine.is_healthy():
            raise RefusedError(503, _ENGINE_GONE)
        for request in call.requests:
            if request.rid in self._in_flight:
                raise FieldError("rid", f"{request.rid!r} is in flight")
        started = time.monotonic()
        outputs: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()
        unfinished = {request.rid: call.rid for request in call.requests}
        self._in_flight.update(unfinished)
        pumps = [
            asyncio.create_task(self._pump(index, request, outputs)) for index, request in enumerate(call.requests)
        ]
        progress: dict[int, Progress] = {}
        try:
            while unfinished:
                index, output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                self._last_output = time.monotonic()
                if output.finish is not None:
                    unfinished.pop(output.rid, None)
                    if not call.stream or (call.single and not progress):
                        _raise_if_refused(output.finish)
                progress.setdefault(index, Progress(started, output)).add(output)
                yield index, progress[index]
        finally:
            for rid in unfinished:
                self._engine.abort(rid)
            try:
                await _cancelled(*pumps)
            finally:
                for request in call.requests:
                    del self._in_flight[request.rid]

    async def _pump(self, index: int, request: Request, outputs: asyncio.Queue[tuple[int, Output | Exception]]) -> None:
        ended = False
        try:
            async for output in self._engine.generate(request):
                ended = output.finish is not None
                outputs.put_nowait((index, output))
            if not ended:
                raise RuntimeError(f"request {request.rid} ended without a reason")
        except Exception as error:
            outputs.put_nowait((index, error))

    async def _whole(self, call: Call) -> list[Progress]:
        """Every request of the call at its end, in the call's order."""
        async with aclosing(self._increments(call)) as increments:
            done = {index: progress async for index, progress in increments}
        return [done[index] for index in range(len(call.requests))]

    async def _stream(self, chunks: AsyncGenerator[object, None], receive: Receive) -> Response:
        """The chunks as events. The status waits for the first, so that a refusal is still one."""
        events = _events(chunks)

        async def first() -> bytes:
            return await anext(events)

        try:
            return EventStream(await unless_gone(first(), receive), events)
        except BaseException:
            await events.aclose()
            raise

    async def _native_chunks(self, call: Call) -> AsyncGenerator[object, None]:
        async with aclosing(self._increments(call)) as increments:
            async for index, progress in increments:
                chunk = native_answer(progress)
                yield chunk if call.single else {**chunk, "index": index}

    async def _openai(self, http: HTTPRequest, shape: Shape) -> Response:
        if shape.call.stream:
            return await self._stream(self._openai_chunks(shape), http.receive)
        return JSONAnswer(shape.whole(await unless_gone(self._whole(shape.call), http.receive)))

    async def _openai_chunks(self, shape: Shape) -> AsyncGenerator[object, None]:
        seen: dict[int, Progress] = {}
        async with aclosing(self._increments(shape.call)) as increments:
            async for index, progress in increments:
                yield shape.chunk(index, progress, first=index not in seen)
                seen[index] = progress
        if shape.wants_usage:
            yield shape.usage_chunk([seen[index] for index in sorted(seen)])

    async def _probe(self) -> None:
        request = Request(
            rid=f"{HEALTH_RID_PREFIX}{uuid.uuid4().hex}",
            prompt=tokens.encode([0]),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        try:
            await self._whole(Call(requests=(request,), samples=1, single=True, stream=False, rid=None, ignored=()))
        except Exception:
            log.exception("the health probe got no token")

    def _count(self, names: Sequence[str]) -> None:
        for name in names:
            known = name in self._ignored or len(self._ignored) < MAX_IGNORED_NAMES
            self._ignored[name[:80] if known else _OTHER_NAMES] += 1

    def _card(self) -> dict[str, object]:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "schedscope",
            "root": self._engine.model_name,
            "parent": None,
            "max_model_len": self._engine.context_length,
        }


class JSONAnswer(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the content."""
        return _json(content)


class EventStream(Response):
    """Server-sent events; the generator is closed however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send until the events end, the client goes away or the server stops."""
        async with aclosing(self._events):
            try:
                await unless_gone(self._send_all(send), receive)
            except (ClientGoneError, OSError):
                return
            except asyncio.CancelledError:
                await self._send_one(_json(_error_body(503, _STOPPING)), send)
                await self._send_end(send)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send_one(self._first, send)
        async for event in self._events:
            await self._send_one(event, send)
        await self._send_end(send)

    async def _send_one(self, event: bytes, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})

    async def _send_end(self, send: Send) -> None:
        await self._send_one(b"[DONE]", send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects (ClientGoneError)."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancelled(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*running: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until their clean-up is done."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _events(chunks: AsyncGenerator[object, None]) -> AsyncGenerator[bytes, None]:
    """Chunks as payloads of events. A failure before the first is raised, a later one is an event."""
    started = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _json(chunk)
                started = True
        except Exception as error:
            if not started:
                raise
            yield _json(_error_body(*_explained(error)))


def _guarded(handler: Handler) -> Handler:
    """The handler with every failure as an answer. Only a server that stops cancels one."""

    async def answer(http: HTTPRequest) -> Response:
        try:
            return await handler(http)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=400)
        except asyncio.CancelledError:
            return JSONAnswer(_error_body(503, _STOPPING), status_code=503)
        except Exception as error:
            status, message, name = _explained(error)
            return JSONAnswer(_error_body(status, message, name), status_code=status)

    return answer


def _explained(error: Exception) -> tuple[int, str, str | None]:
    """Status, message and field for a client; what is a bug goes to the log and to nobody else."""
    if isinstance(error, FieldError):
        return 400, str(error), error.field
    if isinstance(error, RequestError):
        return 400, str(error), None
    if isinstance(error, RefusedError):
        return error.status, str(error), None
    if isinstance(error, ServerError):
        log.error("request failed: %s", error)
        return 503, _ENGINE_GONE, None
    log.error("request failed", exc_info=error)
    return 500, "internal error; the server's log has the details", None


def _error_body(status: int, message: str, name: str | None = None) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "overloaded_error" if status == 503 else "server_error"
    return {"error": {"message": message, "type": kind, "field": name, "param": name, "code": status}}


async def _http_error(_: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = _error_body(error.status_code, error.detail)
    return JSONAnswer(body, status_code=error.status_code, headers=error.headers)


def _raise_if_refused(finish: Finish) -> None:
    if finish.kind == "abort" and finish.status is not None and finish.status >= 400:
        raise RefusedError(finish.status, finish.message or HTTPStatus(finish.status).phrase)


async def _body(http: HTTPRequest) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _routing_key(http: HTTPRequest) -> str | None:
    """The key that gateways send along; a key in the body comes before it."""
    return http.headers.get("x-smg-routing-key")


def _json(content: object) -> bytes:
    return msgspec.json.encode(content, enc_hook=str)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, and with word of when it is ready."""

    def __init__(self, config: uvicorn.Config, url: str, on_ready: Callable[[Serving], object] | None) -> None:
        super().__init__(config)
        self._url = url
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(Serving(self._url, int(self._url.rpartition(":")[2]), self._stop))

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Its protocol is explicit, or asyncio would leave Nagle's algorithm on: 40 ms a token."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ServerError(f"port {port} of {host} is in use: stop what listens there or use another") from None
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ServerError(f"can't listen on {host} port {port}: {reason}") from None
    return listener


def _url(host: str, listener: socket.socket) -> str:
    """Where a client on this machine finds the listener."""
    local = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{local}]' if ':' in local else local}:{listener.getsockname()[1]}"
