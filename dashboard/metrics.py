"""Numbers of a run in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from schedscope.dashboard.library import Book
from schedscope.replay.series import Timeline
from schedscope.replay.window import Window

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_S = 60
"""What gauges without a better meaning are about: so many seconds before the last step."""

_TOTALS = {
    "steps": "Steps of the scheduler's loop.",
    "passes": "Scheduling passes.",
    "admitted": "Requests that were admitted for the first time.",
    "prompt_tokens": "Prompt tokens of those.",
    "cached_tokens": "Of these, tokens that were found in the prefix cache.",
    "computed_tokens": "Tokens that the model computed.",
    "evicted_tokens": "Tokens that left the prefix cache.",
    "retractions": "Requests sent back to the queue for lack of memory.",
    "preemptions": "Requests sent back to the queue for a more urgent one.",
}


def exposition(book: Book) -> str:
    """All metrics of a run, by rank. Of a flight recorder's run, totals are of what it still holds."""
    timeline = book.timeline
    extent = timeline.extent
    whole = timeline.window(buckets=1)
    recent = timeline.window(max(extent.last_ns + 1 - RECENT_S * 10**9, extent.first_ns), extent.last_ns + 1, buckets=1)
    loads = timeline.load(whole, by_rank=True).to_pylist()
    lines: list[str] = []
    run = {"run": book.name}
    _add(lines, "live", "gauge", "1 while the run is being recorded.", [(run, float(book.live))])
    for name, told in _TOTALS.items():
        rows = [({**run, "rank": row["rank"]}, row[name]) for row in loads]
        _add(lines, f"{name}_total", "counter", told, rows)
    _add(
        lines,
        "refusals_total",
        "counter",
        "Requests that a pass looked at and did not admit, by reason.",
        _shares(timeline, "refused", whole, run, "reason", "count"),
    )
    _add(
        lines,
        "gate_seconds_total",
        "counter",
        "Time in steps that ended before a pass, by gate.",
        _shares(timeline, "gate", whole, run, "gate", "seconds"),
    )
    turns = timeline.turns_at(extent.last_ns)
    for name, told in (
        ("queue_len", "Requests waiting at the last step."),
        ("running", "Requests running at the last step."),
    ):
        _add(lines, name, "gauge", told, [({**run, "rank": turn.rank}, getattr(turn, name)) for turn in turns])
    near = timeline.ranks(recent).to_pylist()
    _add(
        lines,
        "hit_rate",
        "gauge",
        f"Cached share of the prompt tokens admitted in the last {RECENT_S} s.",
        [({**run, "rank": row["rank"]}, row["hit_rate"]) for row in near],
    )
    _add(
        lines,
        "pool_used_ratio",
        "gauge",
        f"Largest share of the KV pool held by requests in the last {RECENT_S} s.",
        [({**run, "rank": row["rank"]}, row["used_max"]) for row in near],
    )
    for name, told, columns in (
        ("ttft_seconds", "Time to first token", {"0.5": "ttft_p50", "0.9": "ttft_p90", "0.99": "ttft_p99"}),
        ("queue_seconds", "Time from arrival to first admission", {"0.5": "queue_p50", "0.99": "queue_p99"}),
    ):
        rows = [
            ({**run, "rank": row["rank"], "quantile": quantile}, row[column])
            for row in near
            for quantile, column in columns.items()
        ]
        _add(lines, name, "gauge", f"{told} over the last {RECENT_S} s.", rows)
    _add(lines, "gaps", "gauge", "Places where records are missing.", [(run, len(timeline.gaps))])
    return "\n".join(lines) + "\n"


def _shares(
    timeline: Timeline, of: Any, window: Window, run: dict[str, Any], label: str, column: str
) -> list[tuple[dict[str, Any], Any]]:
    rows = timeline.shares(of, window, by_rank=True).to_pylist()
    return [({**run, "rank": row["rank"], label: row["what"]}, row[column]) for row in rows]


def _add(
    lines: list[str], name: str, kind: str, told: str, samples: Iterable[tuple[dict[str, Any], float | int | None]]
) -> None:
    """A metric; samples that are not known are left out, and with all of them the metric."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    lines.append(f"# HELP schedscope_{name} {told}")
    lines.append(f"# TYPE schedscope_{name} {kind}")
    for labels, value in known:
        written = ",".join(f'{label}="{_escaped(str(each))}"' for label, each in labels.items())
        lines.append(f"schedscope_{name}{{{written}}} {value}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
