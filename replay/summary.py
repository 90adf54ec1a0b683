"""What stands out in a run, from its tables: plain queries over one snapshot."""

from __future__ import annotations

from typing import Any, NamedTuple

from schedscope.recorder.run import Run


class Wait(NamedTuple):
    """A request and how long it waited."""

    rank: int
    rid: str
    seconds: float
    passes: int
    """Passes in which it stood in the queue."""
    overtaken: int
    """Times that somebody from behind it was admitted before it."""
    pass_number: int
    """A pass in which it was overtaken or waited."""


class Summary(NamedTuple):
    """A run in numbers."""

    passes: int
    decisions: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompts, at first admission."""
    held_back: int
    """Decisions that held a request back as a duplicate."""
    retractions: int
    preemptions: int
    evicted_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    stops: dict[str, int]
    """Why passes ended: how often."""
    longest_waits: tuple[Wait, ...]

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0..1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarize(run: Run, *, waits: int = 3) -> Summary:
    """Read a run's summary.

    Args:
        waits: how many of the longest waits to name.
    """
    connection = run.connect()

    def one(query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = connection.execute(query).fetchall()[0]
        return row

    (passes,) = one("SELECT count(*) FROM passes")
    decisions, held_back = one("SELECT count(*), count(*) FILTER (deprioritized) FROM decisions")
    requests, prompt, cached, retractions, preemptions = one(
        "SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(cached_tokens), 0), "
        "coalesce(sum(retractions), 0), coalesce(sum(preemptions), 0) FROM requests WHERE admit_ns IS NOT NULL"
    )
    (evicted,) = one("SELECT coalesce(sum(tokens), 0) FROM events WHERE kind = 'evict'")
    ttft = (
        "SELECT coalesce(quantile_cont((first_token_ns - arrive_ns) / 1e9, {}), 0) FROM requests "
        "WHERE first_token_ns IS NOT NULL"
    )
    stops = connection.execute("SELECT stop, count(*) FROM passes GROUP BY stop ORDER BY 2 DESC, 1").fetchall()
    longest = connection.execute(_LONGEST_WAITS, [waits]).fetchall()
    return Summary(
        passes=passes,
        decisions=decisions,
        requests=requests,
        prompt_tokens=int(prompt),
        cached_tokens=int(cached),
        held_back=held_back,
        retractions=int(retractions),
        preemptions=int(preemptions),
        evicted_tokens=int(evicted),
        ttft_p50_s=one(ttft.format(0.5))[0],
        ttft_p99_s=one(ttft.format(0.99))[0],
        stops=dict(stops),
        longest_waits=tuple(Wait(*row) for row in longest),
    )


_LONGEST_WAITS = """
WITH waiting AS (
    SELECT rank, rid, (admit_ns - queue_ns) / 1e9 AS seconds FROM requests
    WHERE admit_ns IS NOT NULL AND queue_ns IS NOT NULL ORDER BY seconds DESC, rank, rid LIMIT ?
), stood AS (
    SELECT w.rank, w.rid, w.seconds, d.pass,
        (SELECT count(*) FROM decisions o WHERE o.rank = d.rank AND o.pass = d.pass AND o.admitted
            AND o.place_before > d.place_before AND NOT d.admitted) AS overtaken
    FROM waiting w JOIN decisions d ON d.rank = w.rank AND d.rid = w.rid AND d.place_before IS NOT NULL
)
SELECT rank, rid, any_value(seconds) AS seconds, count(*), sum(overtaken)::BIGINT,
    coalesce(max(pass) FILTER (overtaken > 0), min(pass))
FROM stood GROUP BY rank, rid ORDER BY seconds DESC, rank, rid
"""
