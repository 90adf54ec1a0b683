"""What is different about some requests: their fields against those of all others, the most telling first."""

from __future__ import annotations

import math
from typing import NamedTuple

import pyarrow as pa
from schedscope.recorder.run import Run
from schedscope.replay.series import Timeline
from schedscope.replay.window import Window

_VALUES = 6
"""Values of a field that are told apart; the others are together."""
OTHER = "(other)"


class Value(NamedTuple):
    """How often a field has a value."""

    name: str
    inside: float
    """Share of the requests in question, 0..1."""
    outside: float
    """Share of the others."""


class Difference(NamedTuple):
    """A field, and how much it tells the requests in question from the others."""

    field: str
    score: float
    """0: as with the others; 1: no value in common."""
    values: tuple[Value, ...]
    """Those whose shares differ most first."""


class Contrast(NamedTuple):
    """Some requests against the others of a window."""

    inside: int
    outside: int
    differences: tuple[Difference, ...]
    """The most telling field first."""


def fates(run: Run) -> pa.Table:
    """What became of requests in passes before they were admitted; empty where decisions are not recorded.

    Columns: `rank`, `rid`; `partner` (for whom it was held back last; null: never), `refused` (why most often; null:
    never), `overlooked` (passes that ended before it was looked at).
    """
    connection = run.connect(["decisions"])
    return connection.sql(_FATES).to_arrow_table()


def contrast(
    timeline: Timeline, window: Window, begin_ns: int, end_ns: int, low_s: float, high_s: float, known: pa.Table
) -> Contrast:
    """Requests whose first token came in a time and took so long, against all others of the window.

    Args:
        known: what `fates` gives.
    """
    rows = timeline.ask(
        _SHARES,
        {
            "begin": window.begin_ns,
            "end": window.end_ns,
            "rank": window.rank,
            "from_ns": begin_ns,
            "to_ns": end_ns,
            "low": low_s * 1e9,
            "high": high_s * 1e9 if math.isfinite(high_s) else 9e18,
        },
        fates=known,
    ).to_pylist()
    totals = {True: 0, False: 0}
    fields: dict[str, dict[str, dict[bool, int]]] = {}
    for row in rows:
        if row["field"] == "rank":
            totals[row["chosen"]] += row["requests"]
        counts = fields.setdefault(row["field"], {}).setdefault(row["value"], {True: 0, False: 0})
        counts[row["chosen"]] += row["requests"]
    if not totals[True] or not totals[False]:
        return Contrast(totals[True], totals[False], ())
    found = [_difference(field, values, totals) for field, values in fields.items()]
    return Contrast(totals[True], totals[False], tuple(sorted(found, key=lambda each: (-each.score, each.field))))


def _difference(field: str, counts: dict[str, dict[bool, int]], totals: dict[bool, int]) -> Difference:
    shares = [Value(name, count[True] / totals[True], count[False] / totals[False]) for name, count in counts.items()]
    shares.sort(key=lambda value: (-abs(value.inside - value.outside), value.name))
    score = sum(abs(value.inside - value.outside) for value in shares) / 2
    rest = shares[_VALUES:]
    if rest:
        others = Value(OTHER, sum(v.inside for v in rest), sum(v.outside for v in rest))
        shares = [*shares[:_VALUES], others]
    return Difference(field, score, tuple(shares))


def _powers(column: str) -> str:
    """A range of numbers from one power of two up to the next."""
    low = f"pow(2, floor(log2({column})))::BIGINT"
    return f"CASE WHEN {column} < 1 THEN '0' ELSE {low} || ' to ' || (2 * {low} - 1) END"


_FATES = """
SELECT rank, rid, arg_max(partner, pass) FILTER (deprioritized) AS partner,
    mode(reason) FILTER (result IS NOT NULL AND NOT admitted) AS refused,
    count(*) FILTER (result IS NULL) AS overlooked
FROM decisions WHERE deprioritized OR NOT admitted GROUP BY rank, rid
"""
_SHARES = f"""
WITH chosen AS (
    SELECT *, first_token_ns >= $from_ns AND first_token_ns < $to_ns AND ttft_ns BETWEEN $low AND $high AS chosen
    FROM measured
    WHERE first_token_ns >= $begin AND first_token_ns < $end AND ($rank IS NULL OR rank = $rank) AND ttft_ns IS NOT NULL
), sorted AS (
    SELECT rank, ns, active_policy || CASE WHEN fallback IS NULL THEN '' ELSE ' (' || fallback || ')' END AS policy,
        queue_len
    FROM turns WHERE pass IS NOT NULL
), facts AS (
    SELECT c.chosen,
        coalesce(s.policy, 'unknown') AS policy,
        CASE WHEN c.cached_tokens <= 0 THEN 'nothing'
            ELSE least(floor(4.0 * c.cached_tokens / greatest(c.prompt_tokens, 1)), 3)::INTEGER * 25 || ' to ' ||
                (least(floor(4.0 * c.cached_tokens / greatest(c.prompt_tokens, 1)), 3)::INTEGER * 25 + 25) || ' %'
            END AS matched,
        coalesce(c.routing_key, 'none') AS "routing key",
        {_powers("c.prompt_tokens")} AS "prompt length",
        coalesce(f.partner, 'not held back') AS partner,
        c.rank::VARCHAR AS rank,
        coalesce(f.refused,
            CASE WHEN coalesce(f.overlooked, 0) > 0 THEN 'waited, never refused' ELSE 'admitted at once' END
        ) AS verdict,
        coalesce(c.priority::VARCHAR, 'none') AS priority,
        {_powers("s.queue_len")} AS "queue at admission",
        CASE WHEN c.retractions + c.preemptions > 0 THEN 'yes' ELSE 'no' END AS "lost its memory"
    FROM chosen c ASOF LEFT JOIN sorted s ON s.rank = c.rank AND s.ns <= c.admit_ns
    LEFT JOIN fates f ON f.rank = c.rank AND f.rid = c.rid
)
SELECT chosen, field, value, count(*) AS requests
FROM (UNPIVOT facts ON policy, matched, "routing key", "prompt length", partner, rank, verdict, priority,
    "queue at admission", "lost its memory" INTO NAME field VALUE value)
GROUP BY ALL
"""
