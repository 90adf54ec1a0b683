"""`schedscope demo`: the whole of it in half a minute, on any machine."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.progress import Progress
from schedscope.cli.options import LogDir
from schedscope.cli.output import console, errors
from schedscope.cli.record import finish_upload
from schedscope.cli.replay import exit_code, print_verdicts, verify_run
from schedscope.engine.errors import ServerError
from schedscope.recorder.companion import Companion
from schedscope.recorder.hello import Detail
from schedscope.recorder.options import Options
from schedscope.recorder.run import Run
from schedscope.recorder.runs import default_log_dir
from schedscope.recorder.upload import begin_run
from schedscope.replay.follow import follow
from schedscope.replay.summary import Summary, summarize

TRACE = Path(__file__).with_name("demo_trace.jsonl")
SCALE = 1 / 16
OPTIONS = [
    "--schedule-policy=lpm",
    "--page-size=4",
    "--max-total-tokens=3072",
    "--max-running-requests=6",
    "--chunked-prefill-size=128",
    "--schedule-conservativeness=0.3",
]
READY_S = 120.0


def demo(*, log: LogDir = None, speed: float = 2.0) -> int:
    """Serve a small model, record a bundled workload, replay every pass, and show what to type next.

    Parameters
    ----------
    speed
        How many times faster than in the trace requests arrive.
    """
    from schedscope.engine.load import run_load
    from schedscope.engine.trace import read_trace

    rows = read_trace(TRACE)
    words = ["serve", f"--port={_free_port()}", *OPTIONS]
    url = f"http://127.0.0.1:{words[1].partition('=')[2]}"
    run_dir, uploader = begin_run(log or default_log_dir(), "demo", words)
    console.print(f"[bold]1. Serving[/] a small model on this CPU: [dim]schedscope record -- {' '.join(words)}[/]")
    options = Options(detail=Detail(level="full"))
    with Companion.start(run_dir, options, follow()) as companion, (run_dir / "server.log").open("wb") as server_log:
        server = subprocess.Popen(
            [sys.executable, "-m", "schedscope.cli.main", *words],
            env={**os.environ, **companion.environment()},
            stderr=server_log,
            process_group=0,
        )
        try:
            _wait_until_ready(server, url, run_dir / "server.log")
            console.print(f"[bold]2. Sending[/] {len(rows)} requests: cold system prompts, a hot tenant, strangers.")
            with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
                task = progress.add_task("requests", total=len(rows))
                load = run_load(rows, url=url, speed=speed, scale=SCALE, on_outcome=lambda _: progress.advance(task))
                report = asyncio.run(load)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
    run = Run.open(finish_upload(uploader, run_dir))
    console.print(f"   {report.completed} of {report.requests} answered. Recorded in {run.where}", soft_wrap=True)
    console.print("[bold]3. Replaying[/] every pass from the log, in this process.")
    verdicts = verify_run(run, jobs=1)
    found = summarize(run)
    _print_found(found)
    _print_next(run, found)
    print_verdicts(run, verdicts)
    return exit_code(verdicts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, server_log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerError(f"the demo's server ended with code {server.returncode}; see {server_log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerError(f"the demo's server was not ready after {READY_S:.0f} s; see {server_log}")


def _print_found(found: Summary) -> None:
    console.print()
    console.print("[bold]What the log says[/]")
    console.print(
        f"  {found.passes:,} passes decided {found.decisions:,} times about {found.requests} requests; "
        f"{found.hit_rate:.0%} of {found.prompt_tokens:,} prompt tokens came from the cache"
    )
    console.print(f"  time to first token: p50 {found.ttft_p50_s:.2f} s, p99 {found.ttft_p99_s:.2f} s")
    console.print(
        f"  {found.held_back:,} times a request was held back as a duplicate; {found.evicted_tokens:,} tokens "
        f"evicted; {found.retractions} retractions"
    )
    ended = ", ".join(f"{stop} {count}" for stop, count in found.stops.items())
    console.print(f"  passes ended by: {ended}")
    for wait in found.overtaken:
        console.print(
            f"  {wait.rid} waited {wait.seconds:.2f} s while {wait.overtaken} requests that came later went first, "
            f"as in pass {wait.pass_number}"
        )


def _print_next(run: Run, found: Summary) -> None:
    number = found.overtaken[0].pass_number if found.overtaken else 0
    where = shlex.quote(run.where)
    console.print()
    console.print("[bold]Type next[/]")
    if found.overtaken:
        console.print(f"  schedscope explain {found.overtaken[0].rid} --run {where}", soft_wrap=True)
    console.print(f"  schedscope replay pass {number} --run {where}", soft_wrap=True)
    console.print(f"  schedscope replay pass {number} --run {where} --policy hrrn", soft_wrap=True)
    console.print(f"  schedscope doctor --run {where}", soft_wrap=True)
    console.print(f"  schedscope replay all --run {where}", soft_wrap=True)
    console.print("  schedscope serve --help")
    console.print()
