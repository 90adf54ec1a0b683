"""What a load run measured, for people and for scripts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table
from rich.text import Text
from schedscope.engine.exchange import OK, Outcome

SCHEMA = "schedscope.load/1"


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
        p50, p90, p99 = (_percentile(ranked, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ranked), math.fsum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


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
        """The report for a terminal."""
        pace = f"{self.speed:g} x the trace's pace" if self.speed else "all at once"
        lengths = "" if self.scale == 1 else f", lengths x {self.scale:.4g}"
        title = Text(f"{_plain(self.model)} at {self.url}: {pace}{lengths}")
        times = Table(title=title, title_justify="left")
        for name in ("", "p50", "p90", "p99", "max", "mean"):
            times.add_column(name, justify="right" if name else "left")
        rows = {
            "time to first token": self.ttft,
            "end to end": self.e2e,
            "between tokens": self.inter_token,
            **({"sent late by": self.lateness} if self.speed else {}),
        }
        for name, spread in rows.items():
            values = (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)
            times.add_row(name, *(_seconds(value) if spread.count else "-" for value in values))
        facts = Table.grid(padding=(0, 2))
        facts.add_row("completed", f"{self.completed} of {self.requests} in {_seconds(self.duration)}")
        facts.add_row("prefix cache", f"{self.hit_rate:.1%} of {self.prompt_tokens} prompt tokens")
        facts.add_row("output", f"{self.completion_tokens / max(self.duration, 1e-9):.1f} tokens/s")
        for failure in self.failures:
            facts.add_row(
                Text(_plain(f"failed: {failure.status}")),
                Text(_plain(f"{failure.count} x, such as: {failure.example}")),
            )
        report = Table.grid()
        report.add_row(times)
        report.add_row(facts)
        return report


def make_report(
    outcomes: Sequence[Outcome],
    *,
    url: str,
    model: str,
    duration: float,
    speed: float,
    scale: float,
    max_concurrency: int | None,
) -> LoadReport:
    done = [outcome for outcome in outcomes if outcome.status == OK]
    return LoadReport(
        url=url,
        model=model,
        requests=len(outcomes),
        completed=len(done),
        duration=duration,
        speed=speed,
        scale=scale,
        max_concurrency=max_concurrency,
        ttft=Spread.of([outcome.ttft for outcome in done if outcome.ttft is not None]),
        e2e=Spread.of([outcome.e2e for outcome in done if outcome.e2e is not None]),
        inter_token=Spread.of([gap for outcome in done for gap in outcome.gaps]),
        lateness=Spread.of([outcome.sent - outcome.due for outcome in outcomes]),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in done),
        cached_tokens=sum(outcome.cached_tokens for outcome in done),
        completion_tokens=sum(outcome.completion_tokens for outcome in done),
        failures=_failures(outcomes),
        outcomes=tuple(outcomes),
    )


def _failures(outcomes: Sequence[Outcome]) -> tuple[Failures, ...]:
    failed: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status != OK:
            failed[outcome.status].append(outcome)
    return tuple(
        Failures(status, len(same), f"{same[0].rid}: {same[0].error}")
        for status, same in sorted(failed.items(), key=lambda item: -len(item[1]))
    )


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    return {
        "rid": outcome.rid,
        "status": outcome.status,
        "error": outcome.error,
        "due_s": outcome.due,
        "sent_s": outcome.sent,
        "ttft_s": outcome.ttft,
        "e2e_s": outcome.e2e,
        "queue_time_s": outcome.queue_time,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
    }


def _percentile(ranked: Sequence[float], share: float) -> float:
    place = share * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def _plain(text: str) -> str:
    """A server's text without what could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
