"""The real engine, over real HTTP, recorded and replayed: every policy, page size and kind of trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from schedscope.cli.serve import PRIORITY_POLICIES
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.load import run_load
from schedscope.engine.load_report import LoadReport
from schedscope.engine.model import Model, load_model
from schedscope.engine.ordering import POLICIES
from schedscope.engine.server import Serving, build_app, serve_app
from schedscope.engine.serving import ServingEngine, largest_request
from schedscope.engine.tokenizer import load_tokenizer
from schedscope.engine.trace import read_trace
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.verify import verify

TRACE = Path(__file__).parent.parent / "sample_logs" / "traces" / "mooncake_conversation_300.jsonl"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(seed=0)


def serve_and_record(
    folder: Path, model: Model, config: SchedulerConfig, use: Callable[[str], Any], name: str = "served"
) -> tuple[Run, Any]:
    """Serve with a recorder attached, let `use` talk to the server, and open what was recorded."""
    path = create_run(folder, name)
    tracers = []
    for rank in range(config.dp_size):
        sink = DirectSink(
            path, rank, Description(config=config.to_dict(), model=model.name), detail=Detail(level="full")
        )
        tracers.append(RunTracer(sink, checkpoint_every=40))
    engine = ServingEngine(config, model, load_tokenizer(), tracers=tracers)
    for rank_loop, tracer in zip(engine.ranks, tracers, strict=True):
        tracer.attach(rank_loop.scheduler)

    async def session() -> Any:
        ready: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve_app(build_app(engine), "127.0.0.1", 0, ready.set_result))
        serving = await ready
        try:
            return await use(serving.url)
        finally:
            serving.stop()
            await server

    engine.start()
    try:
        result = asyncio.run(session())
    finally:
        engine.stop()
        for tracer in tracers:
            tracer.close()
    return Run.open(path), result


def conversations(
    requests: int, *, speed: float = 0.0, scale: float = 0.02, outputs: int = 1, priorities: bool = False
) -> Callable[[str], Any]:
    """The bundled trace's first requests, with answers `outputs` times as long, and rising priorities if asked for."""
    rows = [
        replace(row, output_length=row.output_length * outputs, priority=5 * i if priorities else None)
        for i, row in enumerate(read_trace(TRACE))
    ]

    async def use(url: str) -> LoadReport:
        return await run_load(rows, url=url, requests=requests, scale=scale, speed=speed)

    return use


def assert_identical(run: Run) -> None:
    for rank in run.ranks:
        verdict = verify(run, rank)
        assert verdict.divergence is None, str(verdict.divergence)
        assert verdict.passes > 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_replays(tmp_path: Path, model: Model, policy: str, page_size: int) -> None:
    """Under pressure: evictions, chunks and retractions with every policy, preemptions with those that have them."""
    preempts = policy in PRIORITY_POLICIES
    config = SchedulerConfig(
        schedule_policy=policy,
        page_size=page_size,
        chunked_prefill_size=256,
        max_total_tokens=1536 if preempts else 2048,
        max_running_requests=6 if preempts else 24,
        schedule_conservativeness=0.05,
        clip_max_new_tokens=4,
        enable_priority_scheduling=preempts,
        priority_scheduling_preemption_threshold=1,
        enable_mixed_chunk=preempts,
    )
    wanted = {"evict", "retract", "chunk"} | ({"preempt"} if preempts else set())
    happened: set[str] = set()
    # How much meets depends on the machine and on what else it does.
    for speed in (40, 20, 80, 10, 160):
        use = conversations(50, speed=speed, outputs=12, priorities=preempts)
        run, report = serve_and_record(tmp_path / str(speed), model, config, use)
        assert_identical(run)
        assert report.completed + sum(f.count for f in report.failures) == 50
        assert report.completed > 30
        happened |= {row["kind"] for row in run.rows("events", 0)}
        happened |= {"chunk"} if any(row["chunked_out"] for row in run.rows("passes", 0)) else set()
        assert preempts or "preempt" not in happened
        if wanted <= happened:
            break
    assert wanted <= happened


def _requests(count: int, *, ignore_eos: bool = True, pause_s: float = 0.0, **parameters: Any) -> Callable[[str], Any]:
    async def use(url: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def one(i: int) -> dict[str, Any]:
                body = {
                    "rid": f"r{i}",
                    "input_ids": [3 + (i * 7 + k) % 900 for k in range(40 + i % 9)],
                    "sampling_params": {"max_new_tokens": 90, "temperature": 0, "ignore_eos": ignore_eos},
                    **{name: value(i) for name, value in parameters.items()},
                }
                await asyncio.sleep(i * pause_s)
                answer: dict[str, Any] = (await client.post("/generate", json=body)).json()
                return answer

            return await asyncio.gather(*(one(i) for i in range(count)))

    return use


def test_retraction_changes_no_token_and_replays(tmp_path: Path, model: Model) -> None:
    roomy = SchedulerConfig(max_total_tokens=16_384)
    tight = SchedulerConfig(max_total_tokens=700, schedule_conservativeness=0.02, chunked_prefill_size=64)
    _, expected = serve_and_record(tmp_path, model, roomy, _requests(12, ignore_eos=False), "roomy")
    run, answers = serve_and_record(tmp_path, model, tight, _requests(12, ignore_eos=False), "tight")
    assert_identical(run)
    assert sum(row["retractions"] for row in run.rows("requests", 0)) > 0
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]


def test_preemption_in_mixed_chunks_changes_no_token_and_replays(tmp_path: Path, model: Model) -> None:
    config = SchedulerConfig(
        schedule_policy="fcfs",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        enable_mixed_chunk=True,
        chunked_prefill_size=64,
        max_running_requests=4,
        max_total_tokens=1200,
        schedule_conservativeness=0.05,
    )
    run, answers = serve_and_record(tmp_path, model, config, _requests(24, pause_s=0.03, priority=lambda i: 5 * i))
    assert_identical(run)
    _, expected = serve_and_record(tmp_path, model, SchedulerConfig(max_total_tokens=16_384), _requests(24), "roomy")
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]
    assert sum(row["preemptions"] for row in run.rows("requests", 0)) > 0
    assert any(row["kind"] == "mixed" for row in run.rows("steps", 0))


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("disable_radix_cache", [True, False])
def test_the_largest_request_that_is_accepted_is_served(
    tmp_path: Path, model: Model, disable_radix_cache: bool, page_size: int, ignore_eos: bool
) -> None:
    config = SchedulerConfig(max_total_tokens=208, page_size=page_size, disable_radix_cache=disable_radix_cache)
    largest = largest_request(config)

    async def use(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:

            async def ask(prompt: int, output: int) -> int:
                sampling = {"max_new_tokens": output, "ignore_eos": ignore_eos, "temperature": 0}
                body = {"input_ids": [7] * prompt, "sampling_params": sampling}
                return (await client.post("/generate", json=body)).status_code

            return [await ask(prompt, largest - prompt + more) for prompt in (1, 17, 50, 100) for more in (0, 1)]

    _, codes = serve_and_record(tmp_path, model, config, use)
    assert codes == [200, 400] * 4


def test_a_dead_scheduler_answers_at_once(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    async def use(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            body = {"input_ids": [7] * 5, "sampling_params": {"max_new_tokens": 3}}
            monkeypatch.setattr("schedscope.engine.runner.ModelRunner.forward", broken)
            first = await client.post("/generate", json=body)
            second = await client.post("/generate", json=body)
            return [
                r.status_code for r in (first, second, await client.get("/health"), await client.post("/flush_cache"))
            ]

    _, codes = serve_and_record(tmp_path, model, SchedulerConfig(), use)
    assert codes == [500, 503, 503, 503]
    assert "planted" in caplog.text


def test_ranks_in_lockstep_agree_and_replay(tmp_path: Path, model: Model) -> None:
    config = SchedulerConfig(
        dp_size=2,
        enable_dp_attention=True,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=4,
        max_running_requests=6,
        max_total_tokens=2048,
        chunked_prefill_size=256,
    )
    run, report = serve_and_record(tmp_path, model, config, conversations(40))
    assert run.ranks == [0, 1]
    assert report.completed > 20
    assert_identical(run)
    verdicts = [
        {row["step"]: (row["delayer_allow"], row["delayer_reason"]) for row in run.rows("passes", rank)}
        for rank in run.ranks
    ]
    common = verdicts[0].keys() & verdicts[1].keys()
    assert common
    assert all(verdicts[0][step] == verdicts[1][step] for step in common)
    assert any(verdicts[0][step][1] == "delay" for step in common)


def test_independent_ranks_share_the_load(tmp_path: Path, model: Model) -> None:
    config = SchedulerConfig(dp_size=2, max_total_tokens=4096)
    run, _ = serve_and_record(tmp_path, model, config, conversations(20))
    assert run.ranks == [0, 1]
    assert_identical(run)


def test_stop_strings_and_tokens_end_an_answer(tmp_path: Path, model: Model) -> None:
    async def use(url: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def ask(**sampling: Any) -> dict[str, Any]:
                body = {"text": "stop?", "sampling_params": {"max_new_tokens": 24, "temperature": 0, **sampling}}
                answer: dict[str, Any] = (await client.post("/generate", json=body)).json()
                return answer

            free = await ask(ignore_eos=True)
            stop = free["text"][3:6]
            token = free["output_ids"][5]
            return [free, await ask(ignore_eos=True, stop=stop), await ask(stop_token_ids=[token])]

    run, (free, by_text, by_token) = serve_and_record(tmp_path, model, SchedulerConfig(), use)
    assert by_text["text"] == free["text"][: free["text"].index(free["text"][3:6])]
    assert by_text["meta_info"]["finish_reason"]["type"] == "stop"
    assert by_token["meta_info"]["finish_reason"]["matched"] == free["output_ids"][5]
    assert_identical(run)


def test_a_client_that_leaves_is_aborted(tmp_path: Path, model: Model) -> None:
    async def use(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {
                "input_ids": [5] * 20,
                "stream": True,
                "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
            }
            async with client.stream("POST", "/generate", json=body) as response:
                async for _ in response.aiter_lines():
                    break
            for _ in range(100):
                info = (await client.get("/server_info")).json()
                if not info["internal_states"][0]["running"]:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the request still runs")

    run, _ = serve_and_record(tmp_path, model, SchedulerConfig(max_total_tokens=4096), use)
    assert [row["end_reason"] for row in run.rows("requests", 0)] == ["abort"]
    assert_identical(run)
