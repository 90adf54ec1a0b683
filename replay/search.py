"""Decisions that a condition holds for: where a debugger's breakpoint would stop."""

from __future__ import annotations

import duckdb
from schedscope.engine.errors import UsageError
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES


def find_decisions(run: Run, condition: str, rank: int, most: int = 100_000) -> list[tuple[int, str]]:
    """Decisions of a rank for which an SQL condition holds: pass and rid, by pass and place.

    The condition sees the columns of `decisions`, of `passes` those whose names are not among them, and `refused`,
    `looked_at` and `moved` (places that it fell behind). Raises UsageError.
    """
    own = set(TABLES["decisions"].names)
    others = ", ".join(f'p."{name}"' for name in TABLES["passes"].names if name not in own)
    connection = run.connect(["decisions", "passes"])
    try:
        rows = connection.execute(
            f"""
            WITH looked AS (
                SELECT d.*, {others}, d.result IS NOT NULL AS looked_at,
                    d.result IS NOT NULL AND NOT d.admitted AS refused, d.place_after - d.place_before AS moved
                FROM decisions d JOIN passes p ON p.rank = d.rank AND p.pass = d.pass WHERE d.rank = $rank
            )
            SELECT pass, rid, place_after FROM looked WHERE ({condition}\n) ORDER BY pass, place_after LIMIT $most
            """,
            {"rank": rank, "most": most},
        ).fetchall()
    except duckdb.Error as error:
        raise UsageError(f"breakpoint {condition!r}: {str(error).partition(chr(10))[0]}") from None
    finally:
        connection.close()
    return [(number, rid) for number, rid, _ in rows]
