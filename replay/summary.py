"""What stands out in a run, from its tables: plain queries over one snapshot.

What a hit rate and a time to first token are, `schedscope.replay.measures` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from schedscope.recorder.run import Run
from schedscope.replay.measures import measure


class Wait(NamedTuple):
    """A request and how long it waited."""

    rank: int
    rid: str
    seconds: float
    passes: int
    """Passes in which it was overtaken."""
    overtaken: int
    """Requests that came later and were admitted before it."""
    pass_number: int
    """The pass in which most requests passed it."""


class Summary(NamedTuple):
    """A run in numbers."""

    passes: int
    decisions: int
    requests: int
    prompt_tokens: int
    """Of the requests that were admitted."""
    cached_tokens: int
    """Of them, found in the cache at their first admission."""
    held_back: int
    """Decisions that held a request back as a duplicate."""
    retractions: int
    preemptions: int
    evicted_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    stops: dict[str, int]
    """Why passes ended: how often."""
    overtaken: tuple[Wait, ...]
    """Requests that others passed most often."""

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0..1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarize(run: Run, *, most: int = 3) -> Summary:
    """Read a run's summary.

    Args:
        most: how many overtaken requests to name.
    """
    connection = run.connect()
    measure(connection, run.manifest.detail.level)

    def one(query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = connection.execute(query).fetchall()[0]
        return row

    (passes,) = one("SELECT count(*) FROM passes")
    decisions, held_back = one("SELECT count(*), count(*) FILTER (deprioritized) FROM decisions")
    requests, prompt, cached, retractions, preemptions = one(
        "SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(cached_tokens), 0), "
        "coalesce(sum(retractions), 0), coalesce(sum(preemptions), 0) FROM measured WHERE admit_ns IS NOT NULL"
    )
    (evicted,) = one("SELECT coalesce(sum(evicted), 0) FROM turns")
    ttft = "SELECT coalesce(quantile_cont(ttft_ns, {}), 0) / 1e9 FROM measured"
    stops = connection.execute("SELECT stop, count(*) FROM passes GROUP BY stop ORDER BY 2 DESC, 1").fetchall()
    overtaken = connection.execute(_OVERTAKEN, [most]).fetchall()
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
        overtaken=tuple(Wait(*row) for row in overtaken),
    )


_OVERTAKEN = """
WITH waiting AS (
    SELECT d.rank, d.rid, d.pass, d.admitted, r.arrive_ns, r.waited_ns
    FROM decisions d JOIN measured r USING (rank, rid)
    WHERE d.place_before IS NOT NULL AND d.pass <= r.admit_pass
), passed AS (
    SELECT w.rank, w.rid, w.pass, any_value(w.waited_ns) AS waited, count(*) AS times
    FROM waiting w JOIN waiting a ON a.rank = w.rank AND a.pass = w.pass AND a.admitted AND a.arrive_ns > w.arrive_ns
    WHERE NOT w.admitted
    GROUP BY w.rank, w.rid, w.pass
)
SELECT p.rank, p.rid, any_value(waited) / 1e9, count(*), sum(times)::BIGINT, arg_max(pass, times)
FROM passed p GROUP BY p.rank, p.rid ORDER BY sum(times) DESC, p.rank, p.rid LIMIT ?
"""
