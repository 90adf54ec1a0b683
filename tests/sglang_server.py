"""The real SGLang server, unmodified, on a CPU with a tiny model: installed once, started, loaded with requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import until

VERSION = "0.5.23"
HERE = Path(__file__).parent / "sglang_cpu"
STUBS = HERE / "stubs"
ROOT = Path(__file__).parent.parent
PYTHON_VARIABLE = "SCHEDSCOPE_SGLANG_PYTHON"
_START_S = 240.0
_ARGUMENTS = """
    -m sglang.launch_server --load-format dummy --skip-tokenizer-init --device cpu --dtype float32
    --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --mem-fraction-static 0.3
    --max-total-tokens 3000 --max-running-requests 8 --chunked-prefill-size 256
""".split()  # noqa: SIM905 - as one would type it


@cache
def sglang_python() -> Path:
    """The python of an environment that has SGLang and this schedscope; skips the test if it can't be made.

    It is made below the repository, once: torch and whatever else is there comes from the environment of the tests.
    """
    given = os.environ.get(PYTHON_VARIABLE)
    if given is not None:
        return Path(given)
    requirements = HERE / "requirements.txt"
    name = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = ROOT / ".sglang-env" / name
    python = home / "bin" / "python"
    done = home / "done"
    if not done.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, capture_output=True)
            site = next(home.glob("lib/python*/site-packages"))
            (site / "tests.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
            install = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*install, "-r", requirements], check=True, capture_output=True, text=True)
            subprocess.run([*install, "-e", ROOT], check=True, capture_output=True, text=True)
            subprocess.run(
                [python, "-c", "import sglang"], check=True, capture_output=True, text=True, env=environment()
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED WITH SGLANG {VERSION}: it can't be installed here: {str(error.stderr)[-300:]}")
        done.touch()
    return python


def environment() -> dict[str, str]:
    """In which SGLang can be imported without a GPU."""
    path = os.pathsep.join(filter(None, (str(STUBS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "GOMP_SPINCOUNT": "0"}


class Server:
    """A server that runs, below `schedscope record` or by itself."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, output: Path) -> None:
        self.process = process
        self.url = url
        self.output = output
        self._orphans: set[int] = set()

    def schedulers(self) -> list[int]:
        """The process ids of its schedulers."""
        listed = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
        family = self._family()
        lines = (line.strip().partition(" ") for line in listed.splitlines())
        return [int(pid) for pid, _, args in lines if "sglang::scheduler" in args and int(pid) in family]

    def kill(self) -> None:
        """SIGKILL to every process of it, the recorder too."""
        for pid in self._family() | self._orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_recorder(self) -> None:
        """SIGKILL to `schedscope record` alone. What it started goes on, and is ours to end."""
        self._orphans = self._family() - {self.process.pid}
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ctrl-C, as in a terminal. Returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def _family(self) -> set[int]:
        listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
        family = {self.process.pid}
        while more := {pid for pid, parent in pairs if parent in family} - family:
            family |= more
        return family


@contextlib.contextmanager
def serving(
    folder: Path,
    *arguments: str,
    record: Sequence[str] | None = (),
    environ: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Server]:
    """Start a server and wait until it serves.

    Args:
        arguments: more of the server's, in SGLang's words.
        record: options of `schedscope record`, which starts it; None: it is started by itself.
        environ: more of its environment.
        cwd: where to start it, with a model and a python that are called as they are there and on the PATH.
    """
    python = sglang_python()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    program, model = (python, HERE / "tiny-llama") if cwd is None else ("python", "tiny-llama")
    command: list[Any] = [program, *_ARGUMENTS, "--model-path", model, "--port", port, *arguments]
    if record is not None:
        command = [python, "-m", "schedscope.cli.main", "record", "--log", folder, *record, "--", *command]
    output = folder.parent / f"{folder.name}.txt"
    with output.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment(), **(environ or {})},
            cwd=cwd,
        )
    server = Server(process, f"http://127.0.0.1:{port}", output)

    def is_up() -> bool:
        assert process.poll() is None, output.read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        return False

    try:
        until(is_up, _START_S)
        yield server
    finally:
        server.kill()


def send(
    url: str,
    count: int,
    *,
    seed: int = 1,
    priorities: Sequence[int] = (),
    routing_keys: Sequence[str] = (),
    impatient: float = 0.0,
    rate: float = 60.0,
) -> list[int | str]:
    """Send requests, most of which share prefixes, and wait for their answers. Returns status codes.

    Args:
        priorities: to choose from; none: no request has one.
        routing_keys: as well.
        impatient: share of clients that go away before they have their answer.
        rate: arrivals per second.
    """
    chance = random.Random(seed)

    def words(length: int) -> list[int]:
        return [chance.randint(3, 999) for _ in range(length)]

    shared = [words(length) for length in (40, 120, 120, 300, 500)]
    bodies = []
    for number in range(count):
        begin = chance.choice(shared)[: chance.randint(20, 500)] if chance.random() < 0.75 else []
        body: dict[str, Any] = {
            "rid": f"r{number:04d}",
            "input_ids": begin + words(chance.randint(3, 200)),
            "sampling_params": {
                "max_new_tokens": chance.choice([1, 4, 16, 60, 150]),
                "temperature": 0.8,
                "ignore_eos": chance.random() < 0.7,
            },
        }
        if priorities:
            body["priority"] = chance.choice(priorities)
        headers = {"x-smg-routing-key": chance.choice(routing_keys)} if routing_keys else {}
        gone_after = chance.choice([0.05, 0.4, 1.5]) if chance.random() < impatient else None
        bodies.append((body, headers, gone_after, chance.expovariate(rate) if chance.random() < 0.7 else 0.0))

    async def one(client: httpx.AsyncClient, delay: float, body: Any, headers: Any, gone_after: Any) -> int | str:
        await asyncio.sleep(delay)
        try:
            answer = await client.post(f"{url}/generate", json=body, headers=headers, timeout=gone_after or 300.0)
        except httpx.TimeoutException:
            return "gone"
        except httpx.HTTPError:
            return "failed"
        return answer.status_code

    async def everyone() -> list[int | str]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=count + 1)) as client:
            delay, jobs = 0.0, []
            for body, headers, gone_after, pause in bodies:
                jobs.append(one(client, delay, body, headers, gone_after))
                delay += pause
            return list(await asyncio.gather(*jobs))

    return asyncio.run(everyone())


def settle(url: str) -> None:
    """Give the schedulers time to note that they are idle."""
    httpx.get(f"{url}/health", timeout=30)
    time.sleep(1.5)
