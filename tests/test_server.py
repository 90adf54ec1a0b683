"""The server over real sockets, in front of an engine that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.engine import server, tokens
from schedscope.engine.errors import RequestError, ServerError
from schedscope.engine.protocol import Finish, Output
from schedscope.engine.request import Request
from schedscope.engine.server import Serving, build_app, serve_app

VOCAB = 1000
LIMIT = 300


class EchoEngine:
    """Repeats the prompt's tokens, one per increment; a token is written as a letter.

    Special first tokens: HANG never answers, CRASH fails inside, FULL is turned away with 503, MID_CRASH
    fails after two tokens, GONE finds the engine stopped, SILENT ends without a word.
    """

    HANG, CRASH, FULL, MID_CRASH, GONE, SILENT = 901, 902, 903, 904, 905, 906

    model_name = "echo"
    tokenizer_path = "echo-tokenizer"
    vocab_size = VOCAB
    context_length = 400
    max_request_tokens = LIMIT

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.healthy = True
        self.flushable = True
        self._running: set[str] = set()
        self._waiting: dict[str, asyncio.Event] = {}

    def encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise RequestError("no token for NUL")
        return [ord(letter) % 900 for letter in text]

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        if request.rid in self._running:
            raise RequestError("is running")
        self._running.add(request.rid)
        self.seen.append(request)
        try:
            async for output in self._run(request, tokens.decode(request.prompt)):
                yield output
        finally:
            self._running.discard(request.rid)

    async def _run(self, request: Request, ids: list[int]) -> AsyncIterator[Output]:
        if ids[0] == self.CRASH:
            raise ValueError("a secret of the engine")
        if ids[0] == self.GONE:
            raise ServerError("a secret of the engine")
        if ids[0] == self.SILENT:
            return
        if ids[0] == self.FULL:
            yield self._output(request, (), Finish(kind="abort", message="The queue is full.", status=503))
            return
        if ids[0] == self.HANG:
            self._waiting[request.rid] = asyncio.Event()
            await self._waiting[request.rid].wait()
            yield self._output(request, (), Finish(kind="abort", message="Aborted by the client"))
            return
        for index in range(request.sampling.max_new_tokens):
            await asyncio.sleep(0)
            if ids[0] == self.MID_CRASH and index == 2:
                raise ValueError("a secret of the engine")
            last = index == request.sampling.max_new_tokens - 1
            yield self._output(
                request, (*range(3, index + 4),), Finish(kind="length") if last else None, fresh=index + 3
            )
        if request.sampling.max_new_tokens == 0:
            yield self._output(request, (), Finish(kind="length"))

    def _output(
        self, request: Request, so_far: tuple[int, ...], finish: Finish | None, fresh: int | None = None
    ) -> Output:
        return Output(
            rid=request.rid,
            token_ids=() if fresh is None else (fresh,),
            text="" if fresh is None else chr(97 + fresh % 26),
            finish=finish,
            prompt_tokens=request.prompt_len,
            completion_tokens=len(so_far),
            cached_tokens=request.prompt_len // 2,
            queue_time=0.25,
        )

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        if rid in self._waiting:
            self._waiting.pop(rid).set()

    def info(self) -> dict[str, object]:
        return {"schedule_policy": "fcfs", "strange": {1, 2}.__class__}

    async def flush_cache(self) -> bool:
        return self.flushable

    def is_healthy(self) -> bool:
        return self.healthy


class ChattyEngine(EchoEngine):
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(message["content"]) + 3 for message in messages]


@contextlib.contextmanager
def running(engine: EchoEngine) -> Iterator[Serving]:
    """A server in a thread of its own, stopped as a signal handler would stop it."""
    ready: Future[Serving] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(serve_app(build_app(engine), "127.0.0.1", 0, on_ready=ready.set_result, grace=1))
    )
    thread.start()
    serving = ready.result(10)
    try:
        yield serving
    finally:
        serving.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[EchoEngine, httpx.Client]]:
    engine = EchoEngine()
    with running(engine) as serving, httpx.Client(base_url=serving.url, timeout=20) as client:
        yield engine, client


@pytest.fixture
def engine(shared: tuple[EchoEngine, httpx.Client]) -> EchoEngine:
    shared[0].seen.clear()
    shared[0].aborted.clear()
    return shared[0]


@pytest.fixture
def client(shared: tuple[EchoEngine, httpx.Client]) -> httpx.Client:
    return shared[1]


def events(client: httpx.Client, path: str, body: object) -> list[Any]:
    """The payloads of a stream, which must end as SGLang's do."""
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def until(condition: Any, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def in_flight(client: httpx.Client) -> int:
    count = client.get("/server_info").json()["in_flight"]
    assert isinstance(count, int)
    return count


def test_one_prompt(engine: EchoEngine, client: httpx.Client) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "rid": "r1", "priority": -4}
    answer = client.post("/generate", json=body).json()
    meta = answer["meta_info"]
    assert answer["text"] == "def"
    assert answer["output_ids"] == [3, 4, 5]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "queue_time": 0.25,
    }
    assert engine.seen[0].priority == -4
    assert tokens.decode(engine.seen[0].prompt) == [97, 98, 99]


def test_a_stream_repeats_everything_so_far(engine: EchoEngine, client: httpx.Client) -> None:
    chunks = events(
        client,
        "/generate",
        {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 3}, "stream": True, "rid": "s"},
    )
    assert [chunk["text"] for chunk in chunks] == ["d", "de", "def"]
    assert [chunk["output_ids"] for chunk in chunks] == [[3], [3, 4], [3, 4, 5]]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, False]
    assert "index" not in chunks[0]
    assert engine.aborted == []


def test_every_field_reaches_the_engine(engine: EchoEngine, client: httpx.Client) -> None:
    sampling = {
        "max_new_tokens": 1,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "stop": "end",
        "stop_token_ids": [2],
        "ignore_eos": True,
        "sampling_seed": 11,
    }
    body = {"input_ids": [5], "sampling_params": sampling, "extra_key": "tenant", "cache_salt": ""}
    assert client.post("/generate", json=body, headers={"X-SMG-Routing-Key": "k"}).status_code == 200
    request = engine.seen[0]
    assert (request.routing_key, request.extra_key, request.cache_salt) == ("k", "tenant", None)
    assert len(request.rid) == 32
    got = request.sampling
    assert (got.max_new_tokens, got.temperature, got.top_p, got.top_k, got.min_p) == (1, 0, 0.5, 7, 0.1)
    assert (got.stop, got.stop_token_ids, got.ignore_eos, got.seed) == (("end",), (2,), True, 11)


def test_the_body_s_routing_key_comes_before_the_header_s(engine: EchoEngine, client: httpx.Client) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "routing_key": "body"}
    client.post("/generate", json=body, headers={"x-smg-routing-key": "header"})
    assert engine.seen[0].routing_key == "body"


@pytest.mark.parametrize(
    ("limit", "given"), [({}, 128), ({"max_new_tokens": None}, LIMIT - 10), ({"max_new_tokens": 0}, 0)]
)
def test_how_much_is_generated_by_default(
    engine: EchoEngine, client: httpx.Client, limit: dict[str, object], given: int
) -> None:
    answer = client.post("/generate", json={"input_ids": [5] * 10, "sampling_params": limit})
    assert len(answer.json()["output_ids"]) == given
    assert engine.seen[0].sampling.max_new_tokens == given


def test_a_batch(engine: EchoEngine, client: httpx.Client) -> None:
    body = {
        "text": ["a", "bc"],
        "rid": "batch",
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "extra_key": ["x", ""],
        "routing_key": "both",
    }
    answers = client.post("/generate", json=body).json()
    assert [answer["text"] for answer in answers] == ["d", "de"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1"]
    assert [request.extra_key for request in engine.seen] == ["x", None]
    assert {request.routing_key for request in engine.seen} == {"both"}


def test_a_batch_as_a_stream(client: httpx.Client) -> None:
    body = {
        "input_ids": [[3], [4, 5]],
        "rid": ["one", "two"],
        "sampling_params": {"max_new_tokens": 2},
        "stream": True,
    }
    chunks = events(client, "/generate", body)
    assert sorted((chunk["index"], chunk["text"]) for chunk in chunks) == [
        (0, "d"),
        (0, "de"),
        (1, "d"),
        (1, "de"),
    ]
    assert {(chunk["index"], chunk["meta_info"]["id"]) for chunk in chunks} == {(0, "one"), (1, "two")}


def test_samples_of_one_prompt(engine: EchoEngine, client: httpx.Client) -> None:
    body = {"text": "a", "rid": "n", "sampling_params": {"max_new_tokens": 1, "n": 3}}
    assert len(client.post("/generate", json=body).json()) == 3
    assert [request.rid for request in engine.seen] == ["n_0", "n_1", "n_2"]


ONE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


def sampled(**fields: object) -> dict[str, object]:
    return {"input_ids": [5], "sampling_params": {"max_new_tokens": 1} | fields}


BAD = [
    ({}, "text"),
    ({"text": None}, "text"),
    (ONE | {"text": "a"}, "input_ids"),
    ({"text": 5}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"text": "\0"}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[3], []]}, "input_ids[1]"),
    ({"input_ids": [3, [3]]}, "input_ids"),
    ({"input_ids": [3, "4"]}, "input_ids[1]"),
    ({"input_ids": [3, True]}, "input_ids[1]"),
    ({"input_ids": [3, -1]}, "input_ids[1]"),
    ({"input_ids": [3, VOCAB]}, "input_ids[1]"),
    ({"input_ids": [[3], [3, 2**31]]}, "input_ids[1][1]"),
    ({"input_ids": [10**30]}, "input_ids[0]"),
    ({"input_ids": [3] * LIMIT}, "input_ids"),
    ({"input_ids": [3] * 10 * LIMIT}, "input_ids"),
    ({"text": "a" * LIMIT}, "text"),
    ({"input_ids": [5], "sampling_params": 5}, "sampling_params"),
    ({"input_ids": [5], "sampling_params": [{}, {}]}, "sampling_params"),
    ({"input_ids": [[5], [5]], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
    ({"input_ids": [[5], [5]], "sampling_params": [{}, {"n": 2}]}, "sampling_params"),
    (sampled(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (sampled(max_new_tokens=LIMIT), "sampling_params.max_new_tokens"),
    (sampled(max_new_tokens=10**30), "sampling_params.max_new_tokens"),
    (sampled(max_new_tokens="1"), "sampling_params.max_new_tokens"),
    (sampled(max_new_tokens=True), "sampling_params.max_new_tokens"),
    (sampled(temperature=-0.1), "sampling_params.temperature"),
    (sampled(top_p=0), "sampling_params.top_p"),
    (sampled(top_p=1.1), "sampling_params.top_p"),
    (sampled(top_k=0), "sampling_params.top_k"),
    (sampled(min_p=-1), "sampling_params.min_p"),
    (sampled(stop=["a", ""]), "sampling_params.stop"),
    (sampled(stop=["a"] * 33), "sampling_params.stop"),
    (sampled(stop_token_ids=[-1]), "sampling_params.stop_token_ids"),
    (sampled(sampling_seed=2**63), "sampling_params.sampling_seed"),
    (sampled(n=0), "sampling_params.n"),
    (sampled(n=10**9), "sampling_params.n"),
    (ONE | {"rid": ""}, "rid"),
    (ONE | {"rid": 5}, "rid"),
    (ONE | {"rid": ["a", "b"]}, "rid"),
    (ONE | {"rid": "x" * 5000}, "rid"),
    ({"input_ids": [[5], [5]], "rid": ["a", "a"]}, "rid"),
    ({"input_ids": [[5], [5]], "cache_salt": ["a"]}, "cache_salt"),
    (ONE | {"priority": "high"}, "priority"),
    (ONE | {"priority": 2**63}, "priority"),
    (ONE | {"routing_key": 1}, "routing_key"),
    (ONE | {"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "name"), BAD, ids=range(len(BAD)))
def test_a_bad_field_is_named(
    engine: EchoEngine, client: httpx.Client, body: dict[str, object], name: str, stream: bool
) -> None:
    answer = client.post("/generate", json={"stream": stream} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["field"] == name
    assert error["message"].startswith(f"{name}: ")
    assert engine.seen == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff", b'{"text": "\\ud800"}', b'{"a":' * 5000, b"9" * 9999]
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"])
def test_what_is_no_json_object(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "body"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
field_names = st.sampled_from(
    [
        *("text", "input_ids", "sampling_params", "rid", "priority", "routing_key", "extra_key", "cache_salt"),
        *("stream", "prompt", "messages", "max_tokens", "n", "echo", "stop", "stream_options", "unknown"),
    ]
)
sampling_bodies = st.dictionaries(
    st.sampled_from(
        ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "sampling_seed"]
    ),
    json_values,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"]),
    st.dictionaries(field_names, json_values | sampling_bodies, max_size=4),
)
def test_no_body_is_an_internal_error(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["field"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64))
def test_no_bytes_are_an_internal_error(client: httpx.Client, body: bytes) -> None:
    assert client.post("/generate", content=body).status_code == 400


def test_unknown_fields_are_ignored_and_counted(client: httpx.Client) -> None:
    before = client.get("/server_info").json()["ignored_fields"]
    body = ONE | {"lora_path": None, "sampling_params": {"max_new_tokens": 1, "frequency_penalty": 0.5}}
    assert client.post("/generate", json=body).status_code == 200
    assert client.post("/generate", json=body).status_code == 200
    after = client.get("/server_info").json()["ignored_fields"]
    assert after["lora_path"] == before.get("lora_path", 0) + 2
    assert after["sampling_params.frequency_penalty"] == 2


def test_ignored_names_cant_fill_the_memory(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_IGNORED_NAMES", 5)
    client.post("/generate", json=ONE | {f"field-{index}-" + "x" * 500: 1 for index in range(50)})
    counts = client.get("/server_info").json()["ignored_fields"]
    assert counts["(other)"] >= 45
    assert all(len(name) <= 80 for name in counts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503(client: httpx.Client, stream: bool) -> None:
    answer = client.post("/generate", json={"input_ids": [EchoEngine.FULL], "stream": stream})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The queue is full."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("token", "status"), [(EchoEngine.CRASH, 500), (EchoEngine.SILENT, 500), (EchoEngine.GONE, 503)]
)
def test_a_bug_of_the_engine_stays_inside(client: httpx.Client, token: int, status: int, stream: bool) -> None:
    answer = client.post("/generate", json={"input_ids": [token], "stream": stream})
    assert answer.status_code == status
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert client.post("/generate", json=ONE).status_code == 200
    assert in_flight(client) == 0


def test_a_bug_in_the_middle_of_a_stream(client: httpx.Client) -> None:
    body = {"input_ids": [EchoEngine.MID_CRASH], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    chunks = events(client, "/generate", body)
    assert [chunk.get("text") for chunk in chunks] == ["d", "de", None]
    assert chunks[-1]["error"]["code"] == 500
    assert "secret" not in json.dumps(chunks)


@contextlib.contextmanager
def hanging(client: httpx.Client, **fields: object) -> Iterator[socket.socket]:
    """A request that waits in the engine, on a connection that the test can cut."""
    before = in_flight(client)
    body = json.dumps({"input_ids": [EchoEngine.HANG]} | fields).encode()
    host, port = client.base_url.host, client.base_url.port
    assert port is not None
    with socket.create_connection((host, port)) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        until(lambda: in_flight(client) > before)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_requests_along(engine: EchoEngine, client: httpx.Client, stream: bool) -> None:
    with hanging(client, rid=f"gone-{stream}", stream=stream) as connection:
        connection.close()
        until(lambda: in_flight(client) == 0)
    assert engine.aborted == [f"gone-{stream}"]


def test_a_client_that_goes_while_it_is_answered(engine: EchoEngine, client: httpx.Client) -> None:
    body = {"input_ids": [[3], [EchoEngine.HANG]], "rid": ["talks", "hangs"], "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    until(lambda: in_flight(client) == 0)
    assert "hangs" in engine.aborted


def test_a_rid_in_flight_is_refused(client: httpx.Client, engine: EchoEngine) -> None:
    with hanging(client, rid="twice"):
        answer = client.post("/generate", json=ONE | {"rid": "twice"})
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == "rid"
        assert engine.aborted == []
        client.post("/abort_request", json={"rid": "twice"})
    until(lambda: in_flight(client) == 0)
    assert client.post("/generate", json=ONE | {"rid": "twice"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_rid_is_free_as_soon_as_its_request_is_answered(client: httpx.Client, stream: bool) -> None:
    for _ in range(20):
        assert client.post("/generate", json=ONE | {"rid": "again", "stream": stream}).status_code == 200


def test_abort_by_rid_answers_the_request(client: httpx.Client) -> None:
    with hanging(client, rid="one") as connection:
        assert client.post("/abort_request", json={"rid": "another"}).json() == {"aborted": 0}
        assert client.post("/abort_request", json={"rid": "one"}).json() == {"aborted": 1}
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.startswith(b"HTTP/1.1 200")
    reason = json.loads(raw.partition(b"\r\n\r\n")[2])["meta_info"]["finish_reason"]
    assert reason == {
        "type": "abort",
        "message": "Aborted by the client",
        "status_code": None,
        "err_type": None,
    }


@pytest.mark.parametrize(("body", "aborted"), [({"rid": "b"}, ["b_0", "b_1"]), ({"rid": "b_1"}, ["b_1"])])
def test_abort_of_a_batch(
    client: httpx.Client, engine: EchoEngine, body: dict[str, object], aborted: list[str]
) -> None:
    with hanging(client, rid="b", input_ids=[[EchoEngine.HANG]] * 2):
        client.post("/abort_request", json=body)
        assert engine.aborted == aborted
    until(lambda: in_flight(client) == 0)


def test_abort_all(client: httpx.Client, engine: EchoEngine) -> None:
    with hanging(client, rid="x"), hanging(client, rid="y"):
        assert client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 2}
    assert engine.aborted == ["x", "y"]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"abort_all": False}])
def test_abort_of_nothing(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/abort_request", json=body).json()["error"]["field"] == "rid"


def test_models(client: httpx.Client) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("echo", "model", 400)
    assert client.get("/v1/models/echo").json() == card
    assert client.get("/v1/models/gpt").status_code == 404


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(client: httpx.Client, path: str) -> None:
    info = client.get(path).json()
    assert (info["model_path"], info["tokenizer_path"]) == ("echo", "echo-tokenizer")
    assert (info["is_generation"], info["vocab_size"]) == (True, VOCAB)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(client: httpx.Client, path: str) -> None:
    info = client.get(path).json()
    assert info["schedule_policy"] == "fcfs"
    assert info["internal_states"] == []


def test_flush_cache(client: httpx.Client, engine: EchoEngine) -> None:
    assert client.post("/flush_cache").status_code == 200
    engine.flushable = False
    try:
        assert client.post("/flush_cache", params={"timeout": 0.1}).status_code == 400
        assert client.post("/flush_cache", params={"timeout": "soon"}).json()["error"]["field"] == "timeout"
        threading.Timer(0.2, lambda: setattr(engine, "flushable", True)).start()
        assert client.post("/flush_cache", params={"timeout": 10}).status_code == 200
    finally:
        engine.flushable = True


def test_health(client: httpx.Client, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    assert engine.seen[0].rid.startswith("HEALTH_CHECK_")
    engine.healthy = False
    try:
        assert client.get("/health").status_code == 503
        assert client.get("/health_generate").status_code == 503
        assert client.post("/generate", json=ONE).status_code == 503
    finally:
        engine.healthy = True
    monkeypatch.setattr(server, "HEALTH_TIMEOUT", 0.3)
    with hanging(client, rid="stuck"):
        assert client.get("/health_generate").status_code == 503
        client.post("/generate", json=ONE)
    until(lambda: in_flight(client) == 0)


def test_paths_that_dont_exist(client: httpx.Client) -> None:
    assert client.get("/nowhere").json()["error"]["code"] == 404
    assert client.get("/generate").json()["error"]["code"] == 405


def test_a_body_that_is_too_long(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    assert client.post("/generate", json={"text": "a" * 2000}).status_code == 413
    assert client.post("/generate", json=ONE).status_code == 200


@pytest.mark.parametrize("prompt", ["ab", [5, 6]])
def test_completions(client: httpx.Client, engine: EchoEngine, prompt: object) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "seed": 3, "best_of": 1}
    answer = client.post("/v1/completions", json=body).json()
    assert (answer["object"], answer["model"]) == ("text_completion", "m")
    assert answer["choices"] == [
        {"index": 0, "text": "de", "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert engine.seen[0].sampling.seed == 3


def test_completions_of_several_prompts(client: httpx.Client, engine: EchoEngine) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 1, "echo": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abd", "abd", "cd", "cd"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 4)
    engine.seen.clear()
    client.post("/v1/completions", json={"prompt": [[5], [6]]})
    assert [request.sampling.max_new_tokens for request in engine.seen] == [16, 16]


def test_completions_as_a_stream(client: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "return_cached_tokens_details": True}
    chunks = events(client, "/v1/completions", body)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["d", "e", "f"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert ["usage" in chunk for chunk in chunks] == [False] * 3
    assert chunks[-1]["sglext"]["cached_tokens_details"]["device"] == 1


def test_usage_in_a_stream(client: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "stream": True}
    chunks = events(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 4
    chunks = events(client, "/v1/completions", body | {"stream_options": {"continuous_usage_stats": True}})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]


MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
]


def test_chat(client: httpx.Client, engine: EchoEngine) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 2, "max_tokens": 9, "tools": []}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-smg-routing-key": "k"}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "de"}
    assert answer["choices"][0]["finish_reason"] == "length"
    prompt = "".join(map(chr, tokens.decode(engine.seen[0].prompt)))
    assert prompt == "system: be\nuser: cd\nassistant:"
    assert engine.seen[0].routing_key == "k"


def test_chat_as_a_stream(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client, "/v1/chat/completions", body)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "d"},
        {"content": "e"},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_a_chat_template_of_the_engine_s_own() -> None:
    engine = ChattyEngine()
    with running(engine) as serving:
        url = f"{serving.url}/v1/chat/completions"
        assert httpx.post(url, json={"messages": MESSAGES, "max_tokens": 1}).status_code == 200
        assert tokens.decode(engine.seen[0].prompt) == [5, 5]


OPENAI_BAD = [
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt"),
    ("/v1/completions", {"prompt": [5, VOCAB]}, "prompt[1]"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": LIMIT}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "seed": 2**63}, "seed"),
    ("/v1/completions", {"prompt": "a", "top_p": 5}, "top_p"),
    ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0]"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * LIMIT}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "name"), OPENAI_BAD, ids=range(len(OPENAI_BAD)))
def test_a_bad_openai_field_is_named(client: httpx.Client, path: str, body: dict[str, object], name: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, name)


def test_a_port_in_use() -> None:
    with running(EchoEngine()) as serving, pytest.raises(ServerError, match=f"port {serving.port} .* is in use"):
        asyncio.run(serve_app(build_app(EchoEngine()), "127.0.0.1", serving.port))


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("no.such.host.invalid", 0), ("1.2.3.4", 0)])
def test_an_address_that_cant_be_had(host: str, port: int) -> None:
    with pytest.raises(ServerError):
        asyncio.run(serve_app(build_app(EchoEngine()), host, port))


@pytest.mark.parametrize("stops", [1, 2])
def test_stopping_ends_an_open_answer(stops: int) -> None:
    engine = EchoEngine()
    with running(engine) as serving, httpx.Client(base_url=serving.url) as client:
        with hanging(client, rid="open") as connection:
            for _ in range(stops):
                serving.stop()
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"the server is stopping" in answer
        until(lambda: engine.aborted == ["open"])


def test_stopping_ends_an_open_stream() -> None:
    engine = EchoEngine()
    with running(engine) as serving:
        body = {"input_ids": [[3], [EchoEngine.HANG]], "rid": ["talks", "hangs"], "stream": True}
        body["sampling_params"] = {"max_new_tokens": 1}
        with httpx.stream("POST", f"{serving.url}/generate", json=body, timeout=10) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "text" in next(lines)
            serving.stop()
            rest = list(lines)
        assert json.loads(rest[0][6:])["error"]["message"] == "the server is stopping"
        assert rest[1:] == ["data: [DONE]"]
    assert engine.aborted == ["hangs"]
