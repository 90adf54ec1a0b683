"""Makes cli/demo_trace.jsonl, the workload of `schedscope demo`: python sample_logs/make_demo_trace.py

Four things at once that schedulers get wrong: bursts over cold system prompts, a hot tenant whose long prefix
wins every comparison, one-off requests that it starves, and conversations that come back with a longer prefix.
Lengths are in the units of Mooncake's traces (512 tokens a block); the demo scales them down.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK = 512
SYSTEMS = [list(range(start, start + 12)) for start in (1, 21, 41, 61)]
HOT = list(range(100, 124))


def main() -> None:
    """Write the trace."""
    chance = random.Random(7)
    fresh = iter(range(1_000, 100_000))
    rows = []

    def add(at_ms: float, prefix: list[int], own_blocks: float, output: int) -> list[int]:
        own = round(own_blocks * BLOCK)
        blocks = [*prefix, *(next(fresh) for _ in range(-(-own // BLOCK)))]
        length = len(prefix) * BLOCK + own
        rows.append({"timestamp": round(at_ms), "input_length": length, "output_length": output, "hash_ids": blocks})
        return blocks

    for i in range(40):
        add(0, SYSTEMS[i % 4], chance.uniform(0.3, 1.8), chance.randint(60, 300))
    for i in range(110):
        add(600 + i * 30 + chance.uniform(0, 40), HOT, chance.uniform(0.4, 2.0), chance.randint(60, 350))
    for i in range(30):
        add(700 + i * 100 + chance.uniform(0, 60), [], chance.uniform(4, 14), chance.randint(60, 400))
    for turn in range(4):
        for talk in range(5):
            prefix = [*SYSTEMS[0][:6], *(10_000_000 + talk * 100 + part for part in range(turn * 3))]
            add(900 + turn * 800 + talk * 40, prefix, chance.uniform(0.5, 1.5), chance.randint(100, 300))

    rows.sort(key=lambda row: row["timestamp"])
    path = Path(__file__).parent.parent / "cli" / "demo_trace.jsonl"
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    print(f"{path}: {len(rows)} requests")


if __name__ == "__main__":
    main()
