"""What a hit rate and a time to first token are, once for every screen: tables that all queries start from.

- **Hit rate** is weighted by tokens and counted at admission: of the prompt tokens that were admitted for the first
  time, the share that was found in the cache. A request that lost its memory finds what it computed itself when it
  is admitted again; that is counted apart, and never as a hit.
- **Time to first token** runs from `arrive_ns` and has three parts that add up to it, to the nanosecond. *Queue*:
  until its first admission. *Prefill*: the forwards that computed its prompt. *Scheduling*: the rest, which is
  deciding, and what lies between its chunks.
"""

from __future__ import annotations

import re

import duckdb
from schedscope.recorder.hello import Level
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES

MEASURES = ("turns", "measured", "again")
"""Tables that `measure` makes."""
MEASURED = ("steps", "passes", "requests", "events")
"""Tables of the log that `measure` reads."""


def connect_for(run: Run, sql: str) -> duckdb.DuckDBPyConnection:
    """A connection to a run with the tables of its log that a query names, and with those of `measure` if it names one.

    Raises RunFormatError.
    """
    words = sql.lower()
    measures = any(re.search(rf"\b{name}\b", words) for name in MEASURES)
    named = [name for name in TABLES if name in words or (measures and name in MEASURED)]
    connection = run.connect(named or TABLES)
    if measures:
        measure(connection, run.manifest.detail.level)
    return connection


def measure(connection: duckdb.DuckDBPyConnection, level: Level, *, brief: bool = False) -> None:
    """Add tables to a connection to a run (`Run.connect`) that was recorded at a level, in memory:

    - `turns`: a row per step, with what its pass said: `ns` (its begin), `end_ns`, `kind`, `gate`, `pass`, `stop`,
      `active_policy`, `fallback`, `delayer_…`, `running`, `queue_len` (before admission), `admitted`, pools, and
      counts: `evicted` tokens (null where the cache's events are not recorded), `retracted`, `preempted`;
      `prefill_ns` (the model's time for its batch, if that computed prompts: from the end of the batch before or from
      when it got it, whichever is later) and `prefill_before_ns` (the sum of those before it);
      `lasts_ns` (until the next step begins) and `waiting` (requests that are left in the queue for so long);
      `until_ns` (when the next pass begins).
    - `measured`: a row per request, with `ttft_ns` and its parts `waited_ns`, `prefill_ns`, `scheduling_ns` (the last
      two null where steps in between are lost), and `admit_pass`. Of a request that has not `ended`, times are those
      of its steps.
    - `again`: a row per admission behind the first one: `ns`, `lost_ns` (when it lost its memory), `lost_as` (`retract`
      or `preempt`), `tokens` (its sequence), `output_tokens` (of those), `cached`.

    Args:
        brief: in a third of the time and half of the memory: `turns` has no more than what happened when and for how
            long, and in `measured`, `prefill_ns`, `scheduling_ns` and `admit_pass` are null.
    """
    evicted = _EVICTED if level == "full" else _NOT_RECORDED
    connection.execute((_BRIEF_TURNS if brief else _TURNS).format(evicted=evicted))
    connection.execute(_ENDED)
    connection.execute(_WATCHED)
    connection.execute(_OPEN)
    connection.execute(_BRIEF_MEASURED if brief else _MEASURED)
    connection.execute(_AGAIN)
    connection.execute("DROP TABLE ended; DROP TABLE watched; DROP TABLE still_open")


_EVICTED = "SELECT rank, step, sum(tokens)::BIGINT AS evicted FROM events WHERE kind = 'evict' GROUP BY rank, step"
_NOT_RECORDED = "SELECT NULL::INTEGER AS rank, NULL::BIGINT AS step, NULL::BIGINT AS evicted WHERE false"

_LASTS = "coalesce(CASE WHEN lead(step) OVER loop = step + count THEN lead(ns) OVER loop END, end_ns) - ns AS lasts_ns"

_TURNS = f"""
CREATE TABLE turns AS
WITH evictions AS ({{evicted}}), computed AS (
    SELECT rank, committed AS step, forward_ns AS model_ns
    FROM steps WHERE committed IS NOT NULL AND forward_ns IS NOT NULL
), known AS (
    SELECT s.rank, s.step, s.start_ns AS ns, s.end_ns, s.now, s.kind, s.gate, s.count, s.pass, p.stop,
        p.active_policy, p.configured_policy, p.fallback, p.delayer_allow, p.delayer_reason, p.delayer_estimation,
        p.chunked_in, p.chunked_out, p.end_rem_total, p.decide_ns, s.forward_ns, s.running, s.queue_len AS waiting,
        coalesce(p.queue_len, s.queue_len) AS queue_len, p.admitted, p.batch_is_full_before, s.batch_is_full,
        s.batch_is_full_pass, s.available, s.evictable, s.protected, s.pool_size, s.batch_tokens,
        s.processed_tokens,
        len(s.retracted)::INTEGER AS retracted, coalesce(len(p.preempted), 0)::INTEGER AS preempted,
        e.evicted, s.committed, CASE WHEN s.kind IN ('prefill', 'mixed') THEN coalesce(c.model_ns, 0) ELSE 0 END
            AS prefill_ns
    FROM steps s LEFT JOIN passes p ON p.rank = s.rank AND p.pass = s.pass
    LEFT JOIN evictions e ON e.rank = s.rank AND e.step = s.step
    LEFT JOIN computed c ON c.rank = s.rank AND c.step = s.step
)
SELECT * REPLACE (coalesce(batch_is_full_pass, CASE WHEN gate = 'batch_is_full'
        AND lag(step + count) OVER loop = step THEN lag(batch_is_full_pass) OVER loop END) AS batch_is_full_pass),
    {_LASTS},
    coalesce(lead(CASE WHEN pass IS NOT NULL THEN ns END IGNORE NULLS) OVER loop,
        max(end_ns) OVER (PARTITION BY rank)) AS until_ns,
    coalesce(sum(prefill_ns) OVER (loop ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::BIGINT
        AS prefill_before_ns,
    (sum(count) OVER (loop ROWS UNBOUNDED PRECEDING) - count)::BIGINT AS place
FROM known WINDOW loop AS (PARTITION BY rank ORDER BY step) ORDER BY rank, step
"""

_BRIEF_TURNS = f"""
CREATE TABLE turns AS
WITH evictions AS ({{evicted}}), known AS (
    SELECT s.rank, s.step, s.start_ns AS ns, s.end_ns, s.kind, s.gate, s.count, s.pass, p.stop, p.active_policy,
        p.fallback, p.delayer_allow, p.delayer_reason, p.delayer_estimation, s.running, s.queue_len AS waiting,
        coalesce(p.queue_len, s.queue_len) AS queue_len, p.admitted, s.available, s.evictable, s.pool_size,
        s.batch_tokens, len(s.retracted)::INTEGER AS retracted,
        coalesce(len(p.preempted), 0)::INTEGER AS preempted, e.evicted
    FROM steps s LEFT JOIN passes p ON p.rank = s.rank AND p.pass = s.pass
    LEFT JOIN evictions e ON e.rank = s.rank AND e.step = s.step
)
SELECT *, {_LASTS} FROM known WINDOW loop AS (PARTITION BY rank ORDER BY step) ORDER BY rank, step
"""

_ENDED = """
CREATE TABLE ended AS SELECT rank, rid, prompt_tokens, output_tokens, cached_tokens, max_new_tokens, priority,
    routing_key, arrive_ns, queue_ns, admit_ns, first_token_ns, finish_ns, retractions, preemptions, end_reason,
    true AS ended
FROM requests
"""

_WATCHED = """
CREATE TABLE watched AS
WITH came AS (
    SELECT rank, rid, count(*) AS times, max(seq) AS seq FROM events WHERE kind = 'arrive' GROUP BY rank, rid
), went AS (SELECT rank, rid, count(*) AS times, sum(retractions + preemptions) AS lost FROM ended GROUP BY rank, rid)
SELECT rank, rid, coalesce(came.times, 0) > coalesce(went.times, 0) AS open, came.seq FROM came FULL JOIN went
USING (rank, rid) WHERE coalesce(went.lost, 0) > 0 OR coalesce(came.times, 0) > coalesce(went.times, 0)
"""
"""Requests whose events are needed: the last one of its rid has no row yet, or was admitted more than once.
`seq`: its arrival."""

_OPEN = """
CREATE TABLE still_open AS
WITH happened AS (
    SELECT e.rank, e.rid, e.kind, e.seq, e.tokens, e.detail, coalesce(t.ns, z.ns) AS ns,
        coalesce(t.end_ns, z.ns) AS end_ns
    FROM events e JOIN watched w ON w.rank = e.rank AND w.rid = e.rid AND w.open AND e.seq >= w.seq
    LEFT JOIN turns t ON t.rank = e.rank AND t.step = e.step
    JOIN (SELECT rank, max(end_ns) AS ns FROM turns GROUP BY rank) z ON z.rank = e.rank
)
SELECT rank, rid, max(tokens) FILTER (kind = 'arrive') AS prompt_tokens, NULL::BIGINT AS output_tokens,
    coalesce(arg_min(tokens, seq) FILTER (kind = 'admit'), 0) AS cached_tokens,
    max((detail->>'max_new_tokens')::BIGINT) FILTER (kind = 'arrive') AS max_new_tokens,
    max((detail->>'priority')::BIGINT) FILTER (kind = 'arrive') AS priority,
    max(detail->>'routing_key') FILTER (kind = 'arrive') AS routing_key,
    min(ns) FILTER (kind = 'arrive') AS arrive_ns, min(ns) FILTER (kind = 'queue') AS queue_ns,
    min(ns) FILTER (kind = 'admit') AS admit_ns, min(end_ns) FILTER (kind = 'first_token') AS first_token_ns,
    NULL::BIGINT AS finish_ns, count(*) FILTER (kind = 'retract')::INTEGER AS retractions,
    count(*) FILTER (kind = 'preempt')::INTEGER AS preemptions, NULL::VARCHAR AS end_reason, false AS ended
FROM happened GROUP BY rank, rid
"""

_MEASURED = """
CREATE TABLE measured AS
WITH every AS (SELECT * FROM ended UNION ALL SELECT * FROM still_open), work AS (
    SELECT t.rank, t.step, t.pass, t.ns, t.end_ns, t.prefill_before_ns, t.place,
        c.prefill_ns AS last_ns, c.prefill_before_ns + c.prefill_ns AS done_ns
    FROM turns t LEFT JOIN turns c ON c.rank = t.rank AND c.step = t.committed WHERE t.kind <> 'idle'
), timed AS (
    SELECT r.*, r.first_token_ns - r.arrive_ns AS ttft_ns, r.admit_ns - r.arrive_ns AS waited_ns,
        CASE WHEN r.admit_ns <= a.end_ns THEN a.pass END AS admit_pass,
        CASE WHEN r.admit_ns <= a.end_ns AND r.first_token_ns <= f.end_ns AND f.place - a.place = f.step - a.step
            THEN greatest(f.done_ns - least(f.end_ns - r.first_token_ns, f.last_ns) - a.prefill_before_ns, 0) END
            AS prefill_ns
    FROM every r
    ASOF LEFT JOIN work a ON r.rank = a.rank AND r.admit_ns >= a.ns
    ASOF LEFT JOIN work f ON r.rank = f.rank AND r.first_token_ns >= f.ns
)
SELECT *, first_token_ns - admit_ns - prefill_ns AS scheduling_ns FROM timed ORDER BY rank, arrive_ns
"""

_BRIEF_MEASURED = """
CREATE TABLE measured AS
SELECT *, first_token_ns - arrive_ns AS ttft_ns, admit_ns - arrive_ns AS waited_ns, NULL::BIGINT AS prefill_ns,
    NULL::BIGINT AS scheduling_ns, NULL::BIGINT AS admit_pass
FROM (SELECT * FROM ended UNION ALL SELECT * FROM still_open) ORDER BY rank, arrive_ns
"""

_AGAIN = """
CREATE TABLE again AS
WITH happened AS (
    SELECT e.rank, e.rid, e.seq, e.step, e.pass, e.kind, e.tokens, e.detail,
        last_value(CASE WHEN e.kind = 'arrive' THEN e.tokens END IGNORE NULLS) OVER life AS prompt_tokens,
        last_value(CASE WHEN e.kind IN ('retract', 'preempt') THEN e.tokens END IGNORE NULLS) OVER life
            AS output_tokens,
        lag(e.kind) OVER life AS before, lag(e.step) OVER life AS lost_step
    FROM events e JOIN watched w ON w.rank = e.rank AND w.rid = e.rid
    WHERE e.kind IN ('arrive', 'admit', 'retract', 'preempt')
    WINDOW life AS (PARTITION BY e.rank, e.rid ORDER BY e.seq)
)
SELECT h.rank, h.rid, h.pass, t.ns, l.ns AS lost_ns, h.before AS lost_as, h.prompt_tokens + h.output_tokens AS tokens,
    h.output_tokens, h.tokens AS cached
FROM happened h JOIN turns t ON t.rank = h.rank AND t.step = h.step
JOIN turns l ON l.rank = h.rank AND l.step = h.lost_step
WHERE h.kind = 'admit' AND h.before IN ('retract', 'preempt') ORDER BY h.rank, t.ns
"""
