"""A load client: sends a trace to a server, at the trace's pace, and measures what a user would feel.

It speaks SGLang's `/generate`, so it measures schedscope's own server and a real SGLang alike. Arrivals never
wait for answers (an open loop): a server that falls behind sees its queue grow, as it would in production.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import msgspec
from rich.table import Table

from schedscope.engine import tokens
from schedscope.engine.errors import ServerError, UsageError
from schedscope.engine.trace import TraceRow, prompt_tokens, scale_row

SCHEMA = "schedscope.load/1"
RID_PREFIX = "trace"
DEFAULT_VOCAB_SIZE = 1000
"""Prompts use token ids below it: few enough for any model, so that the same trace is the same prompts."""
CONNECT_SECONDS = 10.0
SEND_SECONDS = 2.0
"""Longest that a request which can't be written delays the arrivals behind it."""
OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times are seconds; None where it didn't come that far."""

    rid: str
    due: float
    """When the trace wanted it sent, from the start of the run."""
    sent: float
    """When it was sent."""
    ttft: float | None = None
    """From sending to the first token."""
    e2e: float | None = None
    """From sending to the end of the answer."""
    gaps: tuple[float, ...] = ()
    """Inter-token times; tokens that came together share their gap evenly."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_time: float | None = None
    """The server's own word, where it gives one."""
    status: str = OK
    """`ok`, an HTTP status, `abort` (ended by the server), `connection` or `protocol`."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is distributed, in seconds; all 0 where there was none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles interpolate linearly between ranks, as numpy's do."""
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ranked = sorted(values)
        return cls(
            len(ranked),
            math.fsum(ranked) / len(ranked),
            *(_percentile(ranked, share) for share in (0.5, 0.9, 0.99)),
            ranked[-1],
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """All requests that ended with the same status."""

    status: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run of the load client."""

    url: str
    model: str
    requests: int
    completed: int
    duration: float
    """Seconds from the first arrival to the last answer."""
    speed: float
    """Trace time over real time; 0: all at once."""
    scale: float
    """Lengths sent over lengths in the trace."""
    max_concurrency: int | None
    ttft: Spread
    e2e: Spread
    inter_token: Spread
    lateness: Spread
    """Sending after the due time: the client's own delay, or a full `max_concurrency`."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """These three: of completed requests, as the server counted."""
    failures: tuple[Failures, ...]
    """Most frequent first."""
    outcomes: tuple[Outcome, ...] = field(repr=False)
    """Every request, in the trace's order."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that came from the prefix cache, as a share; 0 where nothing completed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self, *, requests: bool = False) -> dict[str, object]:
        """A JSON-ready object of schema `schedscope.load/1`; `requests`: with one entry per request."""
        return {
            "schema": SCHEMA,
            "url": self.url,
            "model": self.model,
            "speed": self.speed,
            "scale": self.scale,
            "max_concurrency": self.max_concurrency,
            "requests": self.requests,
            "completed": self.completed,
            "duration_s": self.duration,
            "ttft_s": asdict(self.ttft),
            "e2e_s": asdict(self.e2e),
            "inter_token_s": asdict(self.inter_token),
            "lateness_s": asdict(self.lateness),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "failures": [asdict(failure) for failure in self.failures],
            **({"outcomes": [_outcome_json(outcome) for outcome in self.outcomes]} if requests else {}),
        }

    def render(self) -> Table:
        """The report as a table."""
        pace = f"{self.speed:g}x" if self.speed else "all at once"
        lengths = "" if self.scale == 1 else f", lengths scaled by {self.scale:.4g}"
        table = Table(title=f"{self.url}: {self.requests} requests, {pace}{lengths}", title_justify="left")
        table.add_column("")
        for name in ("p50", "p90", "p99", "max", "mean"):
            table.add_column(name, justify="right")
        for name, spread in (
            ("time to first token", self.ttft),
            ("end to end", self.e2e),
            ("between tokens", self.inter_token),
            ("sent late", self.lateness),
        ):
            values = (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)
            table.add_row(name, *(_seconds(value) if spread.count else "-" for value in values))
        table.add_section()
        table.add_row("completed", f"{self.completed} of {self.requests} in {_seconds(self.duration)}")
        table.add_row("prefix cache hits", f"{self.hit_rate:.1%} of {self.prompt_tokens} prompt tokens")
        table.add_row("output", f"{self.completion_tokens / max(self.duration, 1e-9):.1f} tokens/s")
        for failure in self.failures:
            table.add_row(f"[red]{failure.status}[/red]", f"{failure.count} x", escape(failure.example))
        return table
