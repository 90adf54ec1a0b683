"""Record the two sample runs of a real SGLang server. Needs what the tests of SGLang need.

    PYTHONPATH=tests python sample_logs/make_runs.py FOLDER

`cold-burst`: while all slots are taken, 40 requests over one long system prompt that is not cached arrive, under lpm.
`hot-tenant`: one tenant, whose system prompt is cached, sends without a pause, while a few cold requests wait.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from schedscope.recorder.runs import find_runs
from sglang_server import HERE, serving, settle, sglang_python

Send = tuple[float, str, list[int], int]
"""When (seconds), rid, prompt, tokens to generate."""


def cold_burst(words: random.Random) -> list[Send]:
    """Everybody needs the same 900 tokens, and nobody has them when the first slot becomes free."""
    system = ids(words, 900)
    busy = [(0.0, f"busy-{number}", ids(words, 30), 240 + 20 * number) for number in range(8)]
    burst = [(0.2, f"burst-{number:02d}", system + ids(words, 20), 8) for number in range(40)]
    alone = [(0.2, f"alone-{number}", ids(words, 100), 8) for number in range(3)]
    return busy + burst + alone


def hot_tenant(words: random.Random) -> list[Send]:
    """Long matches go first, as long as they keep coming."""
    system = ids(words, 600)
    hot = [(0.02 * number, f"hot-{number:03d}", system + ids(words, 15), 24) for number in range(160)]
    cold = [(0.5 + 0.1 * number, f"cold-{number}", ids(words, 300), 8) for number in range(5)]
    return sorted(hot + cold)


def ids(words: random.Random, count: int) -> list[int]:
    """Token ids that the tiny model knows."""
    return [words.randint(3, 999) for _ in range(count)]


def record(folder: Path, name: str, arguments: str, requests: Sequence[Send]) -> None:
    """Serve, send, and keep the run under a short name. Nothing of this machine is in its manifest."""
    os.environ["PATH"] = f"{sglang_python().parent}:{os.environ['PATH']}"
    with serving(folder, *arguments.split(), record=("--name", name, "--level", "full"), cwd=HERE) as server:
        asyncio.run(_send(server.url, requests))
        settle(server.url)
        server.stop()
    info = next(info for info in find_runs(folder) if info.name.endswith(name))
    target = Path(__file__).parent / f"sglang-{name}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(info.path, target)


async def _send(url: str, requests: Sequence[Send]) -> None:
    began = time.monotonic()

    async def one(client: httpx.AsyncClient, at: float, rid: str, prompt: list[int], output: int) -> None:
        await asyncio.sleep(max(began + at - time.monotonic(), 0.0))
        sampling: dict[str, Any] = {"max_new_tokens": output, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        (await client.post(f"{url}/generate", json=body, timeout=300.0)).raise_for_status()

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=len(requests))) as client:
        await asyncio.gather(*(one(client, *request) for request in requests))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    record(place, "cold-burst", "--schedule-policy lpm --max-total-tokens 6000", cold_burst(random.Random(1)))
    record(
        place,
        "hot-tenant",
        "--schedule-policy lpm --max-total-tokens 4000 --max-running-requests 2",
        hot_tenant(random.Random(2)),
    )
