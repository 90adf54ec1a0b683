"""What was evicted and then needed: prefixes that were cached while their requests waited, and gone at their turn.

Such tokens are computed again, for want of a place or of an earlier turn. Seen under policies that look prefixes up
when they sort; what was evicted before its request arrived is not among it, nor are requests whose id came again,
because nothing tells which of them a row of `decisions` is about.
"""

from __future__ import annotations

SMALLEST = 32
"""Tokens that a request lost, at least."""

EVICTED_THEN_NEEDED = f"""
WITH seen AS (
    SELECT rank, rid, max(prefix_len) AS best, max(pass) FILTER (prefix_len > 0) AS had_pass FROM decisions
    WHERE place_before IS NOT NULL AND prefix_len > 0 GROUP BY rank, rid
), repeated AS (
    SELECT rank, rid FROM measured GROUP BY rank, rid HAVING count(*) > 1
)
SELECT m.rank, m.rid, s.best, m.cached_tokens AS cached, s.best - m.cached_tokens AS lost, s.had_pass, m.admit_pass,
    m.admit_ns, m.waited_ns / 1e9 AS waited_s
FROM seen s JOIN measured m ON m.rank = s.rank AND m.rid = s.rid
WHERE m.retractions + m.preemptions = 0 AND m.admit_ns IS NOT NULL AND s.best < m.prompt_tokens
    AND s.best - m.cached_tokens >= {SMALLEST} AND (m.rank, m.rid) NOT IN (FROM repeated)
"""
"""Of `decisions` and the tables of `schedscope.replay.measures`, a row per request: the most that was cached of it,
what of that it found at its first admission and what it lost, the last pass that saw any, and its admission."""
