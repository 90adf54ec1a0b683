"""Condenses a run, or its end, into the tables in memory that a `Timeline` asks."""

from __future__ import annotations

import duckdb
from schedscope.recorder.hello import Level
from schedscope.replay.evicted import EVICTED_THEN_NEEDED
from schedscope.replay.measures import MEASURED, measure

CONDENSED = (*MEASURED, "decisions")
"""Tables of the log that `condense` reads."""


def condense(
    connection: duckdb.DuckDBPyConnection, level: Level, last_s: float | None = None, *, brief: bool = False
) -> None:
    """Add to a connection to a run (`Run.connect`) the tables of `measure` and these, and let go of the log:

    - `refused`: a row per request that a pass looked at and did not admit: `ns`, `reason`, `tokens` (not cached).
    - `needed`: what was evicted and then needed, see `schedscope.replay.evicted`.

    Args:
        last_s: only of its last seconds; None: of all of it.
        brief: as of `measure`; and nothing is in `needed`.
    """
    if last_s is not None:
        _narrow(connection, int(last_s * 1e9))
    measure(connection, level, brief=brief)
    connection.execute(_REFUSED)
    connection.execute(
        f"CREATE TABLE needed AS SELECT * FROM ({EVICTED_THEN_NEEDED}) WHERE {not brief} ORDER BY rank, admit_ns"
    )
    for view in CONDENSED:
        connection.execute(f"DROP VIEW main.{view} CASCADE")


POLICY = "active_policy || CASE WHEN fallback IS NULL THEN '' ELSE ' (' || fallback || ')' END"
"""Of a turn: the active policy, with the reason of a fallback in brackets."""

_REFUSED = """
CREATE TABLE refused AS
SELECT d.rank, d.pass, t.ns, d.reason, greatest(m.prompt_tokens - d.admit_prefix_len, 0) AS tokens
FROM (SELECT rank, pass, rid, reason, admit_prefix_len FROM decisions WHERE result IS NOT NULL AND NOT admitted) d
JOIN (SELECT rank, pass, ns FROM turns WHERE pass IS NOT NULL) t ON t.rank = d.rank AND t.pass = d.pass
ASOF LEFT JOIN measured m ON m.rank = d.rank AND m.rid = d.rid AND t.ns >= m.arrive_ns
ORDER BY d.rank, t.ns
"""

LASTING = f"""
CREATE TABLE IF NOT EXISTS lasting AS
WITH told AS (
    SELECT 'policy' AS kind, rank, step, ns, end_ns, pass, {POLICY} AS what FROM turns WHERE pass IS NOT NULL
    UNION ALL SELECT 'gate', rank, step, ns, end_ns, pass, gate FROM turns WHERE kind <> 'idle'
), cut AS (
    SELECT *, what IS DISTINCT FROM lag(what) OVER (PARTITION BY kind, rank ORDER BY step) AS begins FROM told
), numbered AS (
    SELECT *, sum(begins::INTEGER) OVER (PARTITION BY kind, rank ORDER BY step) AS place FROM cut
)
SELECT kind, rank, any_value(what) AS what, min(ns) AS begin_ns, max(end_ns) AS end_ns,
    min(pass) AS first_pass, max(pass) AS last_pass, count(*) AS total
FROM numbered WHERE what IS NOT NULL GROUP BY kind, rank, place ORDER BY kind, rank, begin_ns
"""
"""A row per time in which the policy or the gate (`kind`) stayed `what` it was; made when it is asked for."""

EXTENT = """
WITH came AS (SELECT rank, count(*) AS requests FROM measured GROUP BY rank)
SELECT rank, min(ns), max(end_ns), min(pass), max(pass), count(pass), coalesce(any_value(requests), 0)
FROM turns LEFT JOIN came USING (rank) GROUP BY rank ORDER BY rank
"""
"""How far each rank reaches."""


def _narrow(connection: duckdb.DuckDBPyConnection, last_ns: int) -> None:
    """Let the tables of the log begin so long before their end."""
    end = connection.execute("SELECT max(end_ns) FROM steps").fetchall()[0][0]
    if end is None:
        return
    begin = end - last_ns
    firsts = connection.execute(
        f"SELECT rank, min(step), coalesce(min(pass), 0) FROM steps WHERE end_ns >= {begin} GROUP BY rank"
    ).fetchall()
    # The least of all ranks lets row groups be left out unread.
    step = " OR ".join(f"(rank = {rank} AND step >= {first})" for rank, first, _ in firsts)
    number = " OR ".join(f"(rank = {rank} AND pass >= {first})" for rank, _, first in firsts)
    of_step = f"step >= {min(row[1] for row in firsts)} AND ({step})"
    of_pass = f"pass >= {min(row[2] for row in firsts)} AND ({number})"
    within = {
        "steps": of_step,
        "events": of_step,
        "passes": of_pass,
        "decisions": of_pass,
        "requests": f"finish_ns >= {begin}",
    }
    connection.execute("CREATE SCHEMA recent")
    for table, condition in within.items():
        connection.execute(f"CREATE VIEW recent.{table} AS SELECT * FROM main.{table} WHERE {condition}")
    connection.execute("SET search_path = 'recent,main'")
