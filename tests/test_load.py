"""The load client against a server, over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from schedscope.engine import tokens
from schedscope.engine.errors import ScenarioError, ServerError, UsageError
from schedscope.engine.exchange import Outcome
from schedscope.engine.load import run_load
from schedscope.engine.load_report import LoadReport, Spread
from schedscope.engine.protocol import Finish, Output
from schedscope.engine.request import Request
from schedscope.engine.server import Serving, build_app, serve_app
from schedscope.engine.trace import TraceRow, prompt_tokens
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

STEP = 0.005
"""Seconds that the engine below takes for a token."""


class SteadyEngine:
    """One token a step, at most two of them in the first increment; remembers whole blocks as a cache would."""

    model_name = "steady"
    tokenizer_path = "steady"
    context_length = max_request_tokens = 4000

    def __init__(self, vocab_size: int = 5000, queue_limit: int = 10**6) -> None:
        self.vocab_size = vocab_size
        self.queue_limit = queue_limit
        self.seen: list[Request] = []
        self.running = 0
        self.most_running = 0
        self._cache: list[bytes] = []

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        self.seen.append(request)
        cached = max((tokens.common_prefix(request.prompt, old) for old in self._cache), default=0)
        self._cache.append(request.prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            count = 0
            if self.running > self.queue_limit:
                refused = Finish(kind="abort", message="The queue is full.", status=503)
                yield self._output(request, 0, 0, cached, refused)
                return
            while count < request.sampling.max_new_tokens:
                await asyncio.sleep(STEP)
                fresh = min(1 if count else 2, request.sampling.max_new_tokens - count)
                count += fresh
                finish = Finish(kind="length") if count == request.sampling.max_new_tokens else None
                yield self._output(request, fresh, count, cached, finish)
        finally:
            self.running -= 1

    def _output(self, request: Request, fresh: int, count: int, cached: int, finish: Finish | None) -> Output:
        return Output(
            rid=request.rid,
            token_ids=(7,) * fresh,
            text="",
            finish=finish,
            prompt_tokens=request.prompt_len,
            completion_tokens=count,
            cached_tokens=cached,
            queue_time=0.001,
        )

    def abort(self, rid: str) -> None:
        del rid

    def info(self) -> dict[str, object]:
        return {}

    async def flush_cache(self) -> bool:
        return True

    def is_healthy(self) -> bool:
        return True


def row(timestamp: float, *hash_ids: int, output: int = 4, length: int | None = None) -> TraceRow:
    return TraceRow(
        timestamp=timestamp,
        input_length=len(hash_ids) * 16 if length is None else length,
        output_length=output,
        hash_ids=hash_ids,
        block=16,
    )


def served(app: Starlette, use: Callable[[str], Awaitable[Any]]) -> Any:
    """What `use` gives for the URL of a server that lives as long as it takes."""

    async def main() -> Any:
        ready: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve_app(app, "127.0.0.1", 0, ready.set_result, grace=1))
        serving = await ready
        try:
            return await use(serving.url)
        finally:
            serving.stop()
            await server

    return asyncio.run(main())


def load(engine: SteadyEngine, rows: list[TraceRow], **options: Any) -> LoadReport:
    report = served(build_app(engine), lambda url: run_load(rows, url=url, **options))
    assert isinstance(report, LoadReport)
    return report


def test_a_trace_is_sent_and_measured() -> None:
    engine = SteadyEngine()
    rows = [row(1000, 1, 2), row(1000, 1, 3), row(1100, 1, 2, 4), row(1200, 9, output=1)]
    report = load(engine, rows)
    assert (report.requests, report.completed, report.failures) == (4, 4, ())
    assert report.model == "steady"
    assert [request.rid for request in engine.seen] == [f"trace-00000{index}" for index in range(4)]
    assert [request.prompt for request in engine.seen] == [prompt_tokens(row, 1000) for row in rows]
    sampling = engine.seen[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.ignore_eos) == (4, 0, True)
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (128, 48, 13)
    assert report.hit_rate == 48 / 128
    assert report.ttft.count == 4
    assert STEP <= report.ttft.p50 <= report.e2e.p50
    # The first increment has two tokens, so two gaps are left of four.
    assert report.inter_token.count == 6
    assert report.inter_token.p50 >= STEP * 0.9
    assert [outcome.due for outcome in report.outcomes] == pytest.approx([0, 0, 0.1, 0.2])
    assert all(outcome.sent >= outcome.due for outcome in report.outcomes)
    assert report.outcomes[0].queue_time == 0.001
    assert report.duration >= 0.2


def test_priorities_are_sent_where_the_trace_has_them() -> None:
    engine = SteadyEngine()
    load(engine, [replace(row(0, 1), priority=7), row(0, 2), replace(row(0, 3), priority=0)])
    assert [request.priority for request in engine.seen] == [7, None, 0]


def test_rows_of_one_instant_keep_file_order() -> None:
    engine = SteadyEngine()
    lengths = [3000, 1, 700, 5, 2000, 40, 1, 1] * 4
    rows = [row(5, *range(1, -(-length // 16) + 1), length=length) for length in lengths]
    load(engine, rows)
    assert [request.prompt_len for request in engine.seen] == lengths


def test_an_unsorted_trace_is_sent_by_time_and_reported_by_row() -> None:
    engine = SteadyEngine()
    report = load(engine, [row(60, 1), row(0, 2), row(30, 3)])
    assert [request.rid for request in engine.seen] == ["trace-000001", "trace-000002", "trace-000000"]
    assert [outcome.rid for outcome in report.outcomes] == ["trace-000000", "trace-000001", "trace-000002"]


@pytest.mark.parametrize("speed", [0, math.inf])
def test_all_at_once(speed: float) -> None:
    engine = SteadyEngine()
    report = load(engine, [row(index * 60_000, index, output=20) for index in range(20)], speed=speed)
    assert (report.completed, report.speed) == (20, 0)
    assert engine.most_running > 5
    assert report.duration < 30


def test_speed_divides_the_times() -> None:
    report = load(SteadyEngine(), [row(0, 1, output=1), row(2000, 2, output=1)], speed=10)
    assert 0.2 <= report.duration < 2


def test_concurrency_is_bounded() -> None:
    engine = SteadyEngine()
    report = load(engine, [row(0, index) for index in range(12)], speed=0, max_concurrency=3)
    assert engine.most_running <= 3
    assert report.completed == 12
    assert report.lateness.max > STEP


def test_scaling_and_taking_the_first_rows() -> None:
    engine = SteadyEngine()
    rows = [row(0, 1, 2, length=20, output=8), row(0, 1), row(0, 2)]
    report = load(engine, rows, requests=2, scale=0.5, rid_prefix="half")
    assert [request.prompt_len for request in engine.seen] == [10, 8]
    assert [request.rid for request in engine.seen] == ["half-000000", "half-000001"]
    assert engine.seen[0].sampling.max_new_tokens == 4
    assert (report.requests, report.scale, report.cached_tokens) == (2, 0.5, 8)


def test_rows_that_are_scaled_down_too_far() -> None:
    engine = SteadyEngine()
    with pytest.raises(ScenarioError, match="scale the trace down less"):
        load(engine, [row(0, 1), row(0, 1000)], scale=1 / 16)
    assert engine.seen == []


def test_headers_are_sent_along() -> None:
    seen = []

    def answer(http: HTTPRequest) -> Response:
        seen.append(http.headers["authorization"])
        return PlainTextResponse("no", status_code=401)

    served(_app(answer), lambda url: run_load([row(0, 1)], url=url, headers={"Authorization": "Bearer x"}))
    assert seen == ["Bearer x"]


def test_requests_of_one_instant_arrive_together() -> None:
    """They are to be seen by one scheduling pass, as they were where the trace was taken."""
    report = load(SteadyEngine(), [row(0, 0), *(row(300, index) for index in range(30))])
    sent = [outcome.sent for outcome in report.outcomes[1:]]
    assert max(sent) - min(sent) < 0.25


def test_the_vocabulary_of_a_small_model_is_respected() -> None:
    engine = SteadyEngine(vocab_size=40)
    assert load(engine, [row(0, 5, 2**63)]).completed == 1
    assert max(tokens.decode(engine.seen[0].prompt)) < 40


def test_refusals_are_counted_by_status_with_an_example() -> None:
    engine = SteadyEngine(queue_limit=2)
    long = row(0, *range(300))
    rows = [long, *(row(0, index, output=30) for index in range(4)), long, long]
    seen: list[Outcome] = []
    report = load(engine, rows, speed=0, on_outcome=seen.append)
    assert report.completed == 2
    assert [(failure.status, failure.count) for failure in report.failures] == [("400", 3), ("503", 2)]
    assert report.failures[0].example.startswith("trace-000000: input_ids: 4800 tokens leave no room")
    assert report.failures[1].example.endswith("The queue is full.")
    assert report.ttft.count == 2
    assert len(seen) == 7


def test_the_report_as_json_and_as_text() -> None:
    report = load(SteadyEngine(queue_limit=1), [row(0, 1), row(0, 1)], speed=0)
    value = report.to_json()
    assert json.loads(json.dumps(value)) == value
    assert value["schema"] == "schedscope.load/1"
    assert {"requests", "completed", "ttft_s", "e2e_s", "inter_token_s", "hit_rate"} <= value.keys()
    assert value["failures"] == [{"status": "503", "count": 1, "example": "trace-000001: The queue is full."}]
    assert "outcomes" not in value
    outcomes = report.to_json(requests=True)["outcomes"]
    assert isinstance(outcomes, list)
    assert [outcome["status"] for outcome in outcomes] == ["ok", "503"]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.render())
    text = capture.get()
    assert "time to first token" in text
    assert "1 of 2" in text
    assert "failed: 503" in text


def _app(answer: Callable[[HTTPRequest], Response]) -> Starlette:
    """A server that lists a model and answers every request in one way."""

    async def models(_: HTTPRequest) -> Response:
        return PlainTextResponse('{"data": [{"id": "other"}]}')

    async def generate(http: HTTPRequest) -> Response:
        await http.body()
        return answer(http)

    return Starlette(routes=[Route("/v1/models", models), Route("/generate", generate, methods=["POST"])])


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("data: [DONE]\n\n", "protocol", "ended before"),
        ("data: {\n\n", "protocol", "no SGLang answer"),
        ("data: 5\n\n", "protocol", "no SGLang answer"),
        ('data: {"error": {"message": "lost", "code": 500}}\n\ndata: [DONE]\n\n', "500", "lost"),
        ('data: {"error": "lost"}\n\n', "500", "lost"),
        (
            'data: {"meta_info": {"finish_reason": {"type": "abort", "message": "stopped"}}}\n\n',
            "abort",
            "stopped",
        ),
        (
            'data: {"meta_info": {"finish_reason": {"type": "abort", "message": "full", "status_code": 503}}}\n\n',
            "503",
            "full",
        ),
    ],
)
def test_answers_that_are_no_answers(body: str, status: str, error: str) -> None:
    app = _app(lambda _: PlainTextResponse(body, media_type="text/event-stream"))
    report = served(app, lambda url: run_load([row(0, 1)], url=url))
    assert [failure.status for failure in report.failures] == [status]
    assert error in report.failures[0].example


@pytest.mark.parametrize(
    ("body", "example"),
    [
        ('{"error": {"message": "why"}}', "why"),
        ('{"object": "error", "message": "why"}', "why"),
        ('{"error": "why"}', "why"),
        ("why", "why"),
        ("", ""),
    ],
)
def test_error_bodies_of_other_servers(body: str, example: str) -> None:
    app = _app(lambda _: PlainTextResponse(body, status_code=429))
    report = served(app, lambda url: run_load([row(0, 1)], url=url))
    assert report.failures[0].status == "429"
    assert report.failures[0].example == f"trace-000000: {example}"


def test_a_server_that_isnt_there() -> None:
    with pytest.raises(ServerError, match=r"no server answers at http://127\.0\.0\.1:9"):
        asyncio.run(run_load([row(0, 1)], url="http://127.0.0.1:9"))


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://", "ftp://x", "http://\x00"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ServerError):
        asyncio.run(run_load([row(0, 1)], url=url))


def test_a_server_of_another_kind() -> None:
    with pytest.raises(ServerError, match="no SGLang-like server"):
        served(Starlette(), lambda url: run_load([row(0, 1)], url=url))


def test_a_server_that_dies_is_counted() -> None:
    async def main() -> LoadReport:
        ready: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        app = build_app(SteadyEngine())
        server = asyncio.create_task(serve_app(app, "127.0.0.1", 0, ready.set_result, grace=1))
        serving = await ready

        def stop(_: Outcome) -> None:
            serving.stop()

        rows = [row(0, 1, output=1), row(1500, 2, output=1)]
        report = await run_load(rows, url=serving.url, on_outcome=stop)
        await server
        return report

    report = asyncio.run(main())
    assert report.completed == 1
    assert report.failures[0].status == "connection"


@pytest.mark.parametrize(
    "options", [{"speed": -1}, {"speed": math.nan}, {"requests": 0}, {"max_concurrency": 0}, {"scale": 0}]
)
def test_options_without_a_meaning(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        asyncio.run(run_load([row(0, 1)], url="http://127.0.0.1:9", **options))


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.count == len(values)
    assert min(values) <= spread.p50 <= spread.p90 <= spread.p99 <= spread.max == max(values)


def test_percentiles_interpolate() -> None:
    spread = Spread.of([4, 1, 2, 3])
    assert (spread.count, spread.mean, spread.p50, spread.max) == (4, 2.5, 2.5, 4)
    assert (spread.p90, spread.p99) == (pytest.approx(3.7), pytest.approx(3.97))
    assert Spread.of([]) == Spread(0, 0, 0, 0, 0, 0)
