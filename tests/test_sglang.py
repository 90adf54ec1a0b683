"""The real SGLang server, recorded through its plugin, and what came of it replayed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from patience import until
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from schedscope.replay.verify import verify
from schedscope.replay.verify_view import verify_views
from sglang_server import STUBS, environment, send, serving, settle, sglang_python


class Traffic(NamedTuple):
    """A server and what it is sent."""

    arguments: str
    priorities: Sequence[int] = ()
    routing_keys: Sequence[str] = ()
    impatient: float = 0.0


MATRIX = {
    "lpm": Traffic("--schedule-policy lpm"),
    "dfs-weight": Traffic("--schedule-policy dfs-weight"),
    "hrrn": Traffic("--schedule-policy hrrn"),
    "shortest-prefill-first": Traffic("--schedule-policy shortest-prefill-first"),
    "fcfs": Traffic("--schedule-policy fcfs"),
    "priority": Traffic(
        "--schedule-policy fcfs --enable-priority-scheduling --enable-mixed-chunk", priorities=(0, 5, 20, 50)
    ),
    "lof": Traffic("--schedule-policy lof"),
    "random": Traffic("--schedule-policy random"),
    "routing-key": Traffic("--schedule-policy routing-key", routing_keys=("a", "b", "c")),
    "delayer": Traffic("--schedule-policy lpm --enable-prefill-delayer"),
    "retraction": Traffic(
        "--schedule-policy lpm --schedule-conservativeness 0.1 --max-running-requests 16", impatient=0.12
    ),
    "no-overlap": Traffic("--schedule-policy lpm --disable-overlap-schedule"),
}
EVERY = os.environ.get("SCHEDSCOPE_SGLANG_EVERY") is not None
"""Whether to start a server for each of them, which takes a quarter of an hour, or for some."""
SOME = [("retraction", 1), ("priority", 16)]
CASES = [(name, page) for page in (1, 16) for name in MATRIX] if EVERY else SOME


def the_run(folder: Path) -> Run:
    (info,) = find_runs(folder)
    return Run.open(info.path)


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_every_pass_of_a_real_server_is_replayed(tmp_path: Path, name: str, page_size: int) -> None:
    traffic = MATRIX[name]
    folder = tmp_path / "logs"
    with serving(folder, *traffic.arguments.split(), "--page-size", str(page_size)) as server:
        answers = send(
            server.url,
            200,
            seed=7,
            priorities=traffic.priorities,
            routing_keys=traffic.routing_keys,
            impatient=traffic.impatient,
        )
        settle(server.url)
        server.stop()
    assert answers.count(200) >= 150
    run = the_run(folder)
    assert run.manifest.source is not None
    assert (run.manifest.source.kind, run.manifest.source_gaps, run.gaps) == ("sglang", [], [])
    verdict = verify_views(run, 0)
    assert verdict.divergence is None
    assert verdict.passes == run.passes(0).count > 50
    rebuilt = verify(run, 0)
    assert rebuilt.divergence is None
    assert rebuilt.passes == verdict.passes
    rows = run.table("decisions", 0, ("key", "reason")).to_pylist()
    told = [row for row in rows if row["reason"] not in {None, "chunk_continued"}]
    assert told
    assert all(row["reason"] != "unknown" and row["key"] is not None for row in told)
    assert set(run.table("passes", 0, ("divergence",)).column("divergence").to_pylist()) == {None}


def test_killed_in_the_midst_of_its_work_nothing_recorded_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with serving(folder, "--schedule-policy", "lpm") as server:

        def passes() -> int:
            run = the_run(folder)
            return run.passes(0).count if run.ranks else 0

        client = subprocess.Popen(
            [sys.executable, "-c", "import sglang_server as s, sys; s.send(sys.argv[1], 300)", server.url],
            cwd=Path(__file__).parent,
        )
        until(lambda: passes() > 40, 60)
        server.kill()
        client.kill()
        client.wait()
    run = the_run(folder)
    assert run.status == "interrupted"
    verdict = verify_views(run, 0)
    assert verdict.divergence is None
    assert verdict.passes == run.passes(0).count > 40


def test_what_led_to_a_pause_is_handed_over_when_it_begins(tmp_path: Path) -> None:
    folder = tmp_path / "logs"

    def ended() -> list[int]:
        run = the_run(folder)
        found: list[int] = run.table("steps", 0, ["end_ns"])["end_ns"].to_pylist() if run.ranks else []
        return found

    with serving(folder, "--schedule-policy", "lpm") as server:
        body = {"input_ids": [7] * 50, "sampling_params": {"max_new_tokens": 2_000, "ignore_eos": True}}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=300)
            until(lambda: len(ended()) > 20, 60)
            httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
            seen: list[int] = []
            while seen != (seen := ended()):  # the recorder may be late on a busy machine
                time.sleep(1.0)
            continued_ns = time.monotonic_ns()
            httpx.post(f"{server.url}/continue_generation", json={}, timeout=60).raise_for_status()
            assert answer.result().status_code == 200
        settle(server.url)
        server.stop()
    assert seen == [ns for ns in ended() if ns < continued_ns]


@pytest.mark.parametrize("method", ["looked", "computed"] if EVERY else ["looked"])
def test_an_observer_that_fails_ends_the_recording_and_not_the_server(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "logs"
    faulty = str(Path(__file__).parent / "sglang_cpu" / "faulty")
    environ = {"SCHEDSCOPE_FAULT": f"{method}:30", "PYTHONPATH": os.pathsep.join((str(STUBS), faulty))}
    with serving(folder, environ=environ) as server:
        assert set(send(server.url, 60)) == {200}
        assert set(send(server.url, 20, seed=2)) == {200}
        said = server.output.read_text()
        server.stop()
    lines = [line for line in said.splitlines() if "recording of rank 0 ended" in line]
    assert len(lines) == 1
    assert f"injected into {method}" in lines[0]
    assert "Traceback" not in said
    run = the_run(folder)
    assert [gap.reason for gap in run.gaps] == ["cut"]
    verdict = verify_views(run, 0)
    assert verdict.divergence is None
    assert verdict.passes > 0
    ((looked,),) = run.connect().execute("select count(*) from decisions where result <> 'CHUNK'").fetchall()
    assert 0 < (looked if method == "looked" else verdict.passes) <= 31


def test_a_server_outlives_its_recorder(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with serving(folder, "--schedule-policy", "lpm") as server:
        assert set(send(server.url, 20)) == {200}
        before = the_run(folder).passes(0).count
        server.kill_recorder()
        assert set(send(server.url, 20, seed=2)) == {200}
    run = the_run(folder)
    assert run.passes(0).count >= before > 0
    assert verify_views(run, 0).divergence is None


def test_a_server_that_nobody_asked_to_record_is_left_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "logs", record=None) as server:
        assert set(send(server.url, 10)) == {200}
        (scheduler,) = server.schedulers()
        loaded = Path(f"/proc/{scheduler}/maps").read_text()
    assert "pyarrow" not in loaded
    assert "schedscope" not in server.output.read_text().replace("schedscope -> ", "").replace("plugin schedscope", "")
    assert not (tmp_path / "logs").exists()


def test_two_replicas_record_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with serving(folder, "--dp-size", "2", environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        assert set(send(server.url, 40)) == {200}
        settle(server.url)
        server.stop()
    run = the_run(folder)
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        verdict = verify_views(run, rank)
        assert verdict.divergence is None
        assert verdict.passes == run.passes(rank).count > 5
        assert verify(run, rank).divergence is None


def test_a_server_records_itself_if_its_environment_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with serving(folder, record=None, environ={"SCHEDSCOPE_RECORD": str(folder)}) as server:
        assert set(send(server.url, 20)) == {200}
        settle(server.url)
        server.stop()
    until(lambda: the_run(folder).status != "recording")
    run = the_run(folder)
    assert run.manifest.name == "sglang"
    assert verify(run, 0).divergence is None
    assert run.passes(0).count > 5


OTHER_VERSION = """
import importlib.metadata, logging, os, sys
logging.basicConfig(format="%(message)s")
from sglang.srt.managers import schedule_policy
del schedule_policy.PrefillAdder.preempt_to_schedule
def add_chunked_req(self, request): ...
schedule_policy.PrefillAdder.add_chunked_req = add_chunked_req
known = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9.9" if name == "sglang" else known(name)
os.environ["SCHEDSCOPE_RECORD_SOCKET"] = "/nowhere"
from schedscope.recorder.sglang_plugin import load
load()
from sglang.srt.plugins.hook_registry import HookRegistry
print(len(HookRegistry._hooks))
"""


def test_on_another_version_it_says_what_it_can_not_record(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(OTHER_VERSION)
    warned = subprocess.run([sglang_python(), script], capture_output=True, text=True, env=environment())
    assert warned.returncode == 0, warned.stderr
    assert int(warned.stdout) > 15
    assert "SGLang 9.9.9 was not verified (0.5.23 was)" in warned.stderr
    assert "not recorded: preemptions: managers.schedule_policy.PrefillAdder.preempt_to_schedule" in warned.stderr
    assert "not recorded: continuing chunks" in warned.stderr
    strict = subprocess.run(
        [sglang_python(), script], capture_output=True, text=True, env={**environment(), "SCHEDSCOPE_STRICT": "1"}
    )
    assert strict.returncode == 1
    assert "can't be recorded as a whole: managers.schedule_policy.PrefillAdder.add_chunked_req" in strict.stderr
