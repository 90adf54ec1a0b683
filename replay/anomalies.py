"""Moments of a run that stand out."""

from __future__ import annotations

from typing import Any, NamedTuple


class Anomaly(NamedTuple):
    """A moment that stands out."""

    rank: int
    ns: int
    pass_number: int | None
    """The pass then, or the last one before; None: there was none yet."""
    kind: str
    """`fallback`, `gate`, `gap`, `retraction`, `preemption` or `slow`."""
    words: str
    rid: str | None
    """The request that it is about; None: not about one."""


ANOMALIES = """
WITH told AS (
    SELECT 'fallback' AS kind, rank, begin_ns AS ns, first_pass AS pass, what, total AS size, NULL::VARCHAR AS rid,
        (end_ns - begin_ns) / 1e9 AS seconds, NULL::DOUBLE AS median
    FROM lasting WHERE kind = 'policy' AND what LIKE '% (%'
    UNION ALL
    SELECT 'gate', rank, begin_ns, NULL, what, total, NULL, (end_ns - begin_ns) / 1e9, NULL
    FROM lasting WHERE kind = 'gate' AND what <> 'queue_empty' AND end_ns - begin_ns > $long
    UNION ALL
    SELECT 'retraction', rank, min(ns), arg_min(pass, ns), NULL, sum(retracted)::BIGINT, NULL, NULL, NULL
    FROM turns WHERE retracted > 0 GROUP BY rank, (ns - $begin) // $piece
    UNION ALL
    SELECT 'preemption', rank, min(ns), arg_min(pass, ns), NULL, sum(preempted)::BIGINT, NULL, NULL, NULL
    FROM turns WHERE preempted > 0 GROUP BY rank, (ns - $begin) // $piece
    UNION ALL
    SELECT 'slow', rank, arg_max(first_token_ns, ttft_ns), NULL, NULL, count(*), arg_max(rid, ttft_ns),
        max(ttft_ns) / 1e9, any_value(median) / 1e9
    FROM measured, (
        SELECT quantile_cont(ttft_ns, 0.99) AS high, quantile_cont(ttft_ns, 0.5) AS median FROM measured
    ) WHERE ttft_ns >= high AND ttft_ns >= 3 * median GROUP BY rank, (first_token_ns - $begin) // $piece
), largest AS (
    SELECT *, row_number() OVER (PARTITION BY kind ORDER BY coalesce(seconds, size) DESC, ns, rank) AS place FROM told
)
SELECT l.kind, l.rank, l.ns, coalesce(l.pass, t.pass) AS pass, l.what, l.size, l.rid, l.seconds, l.median
FROM largest l
ASOF LEFT JOIN (SELECT rank, ns, pass FROM turns WHERE pass IS NOT NULL) t ON l.rank = t.rank AND l.ns >= t.ns
WHERE l.place <= $most
"""
"""`size`: passes (fallback), steps (gate) or requests (others)."""


def anomaly_words(row: dict[str, Any]) -> str:
    """An anomaly in a line."""
    size = f"{row['size']:,}"
    match row["kind"]:
        case "fallback":
            return f"fell back to {row['what']} for {size} passes, {row['seconds']:.3g} s"
        case "gate":
            return f"gate {row['what']} for {row['seconds']:.3g} s, {size} steps"
        case "slow":
            return f"first token after {row['seconds']:.3g} s, median {row['median']:.3g} s; {size} as slow around then"
        case kind:
            return f"{size} {kind}{'s' if row['size'] != 1 else ''} around then"
