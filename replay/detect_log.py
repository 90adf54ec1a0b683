"""Detectors of what is wrong with the recording itself, or with the numbers that a server gave it."""

from __future__ import annotations

from collections.abc import Iterator

from schedscope.replay.case import Case
from schedscope.replay.finding import SHOWN, Evidence, Finding, Severity, plural


def lost_records(case: Case) -> Iterator[Finding]:
    """Records are missing, so findings may be incomplete."""
    gaps = case.gaps
    if not gaps:
        return
    yield Finding(
        detector="lost_records",
        severity=Severity.NOTE,
        rank=None,
        title=f"records are missing in {plural(len(gaps), 'place')}, so what is found here may be less than what "
        "happened",
        cost_s=0.0,
        evidence=tuple(
            Evidence(
                f"{gap.reason}: " + ("records" if gap.frames is None else f"{gap.frames:,} records"),
                gap.rank,
                gap.after_pass,
            )
            for gap in gaps[:SHOWN]
        ),
        advice="schedscope inspect names them all; a larger --buffer or --on-full block loses less.",
    )


_DEAD = {
    "clock": "its clock stands still, so no time can be measured",
    "backwards": "its clock goes backwards",
    "forward": "forwards take no time",
    "processed": "processed_tokens doesn't grow while prompts are computed, so hrrn sees no one wait",
    "pool": "the size of the KV pool is not known",
    "free": "the free part of the KV pool never changes",
    "over": "free, cached and locked tokens are more than the KV pool",
}


def dead_metrics(case: Case, *, steps: int = 50) -> Iterator[Finding]:
    """Numbers that never change, or contradict each other: what is drawn or decided from them is wrong.

    Args:
        steps: that a rank has to have made before anything is said about what never changes.
    """
    for rank in case.ranks:
        row = case.one(
            """
            WITH told AS (SELECT *, lead(ns) OVER (ORDER BY step) AS next_ns FROM turns
                WHERE rank = $rank AND kind <> 'idle')
            SELECT count(*) AS steps, count(*) FILTER (batch_tokens > 0) AS batches,
                max(end_ns) = min(ns) AS clock,
                count(*) FILTER (end_ns < ns OR next_ns < end_ns) AS backwards,
                coalesce(max(forward_ns), 0) = 0 AS forward,
                max(processed_tokens) = min(processed_tokens) AND count(*) FILTER (kind = 'prefill') > 1 AS processed,
                max(pool_size) = 0 AS pool, count(DISTINCT available) = 1 AS free,
                count(*) FILTER (pool_size > 0 AND available + evictable + protected > pool_size) AS over,
                min(pass) AS first_pass,
                min(pass) FILTER (end_ns < ns OR next_ns < end_ns) AS backwards_pass
            FROM told
            """,
            rank=rank,
        )
        faults = [_DEAD[name] for name in ("backwards", "over") if row[name]]
        if row["batches"] >= steps:
            faults += [_DEAD[name] for name in ("clock", "forward", "processed", "pool", "free") if row[name]]
        faults += _contradictions(case, rank)
        if not faults:
            continue
        yield Finding(
            detector="dead_metrics",
            severity=Severity.WARNING,
            rank=rank,
            title=f"numbers of rank {rank} can't be right: {faults[0]}"
            + (f" (and {plural(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""),
            cost_s=0.0,
            evidence=tuple(
                Evidence(fault, rank, row["backwards_pass"] if fault == _DEAD["backwards"] else row["first_pass"])
                for fault in faults
            ),
            advice="Don't trust times, rates and findings that rest on them. Look at the version of the server and "
            "of the recorder (schedscope inspect).",
        )


def _contradictions(case: Case, rank: int) -> list[str]:
    row = case.one(
        """
        SELECT count(*) FILTER (queue_ns < arrive_ns OR admit_ns < queue_ns OR first_token_ns < admit_ns
                OR finish_ns < first_token_ns) AS disordered,
            count(*) FILTER (cached_tokens > prompt_tokens OR cached_tokens < 0) AS overfull,
            count(*) FILTER (output_tokens > 0 AND first_token_ns IS NULL AND ended) AS untold
        FROM measured WHERE rank = $rank
        """,
        rank=rank,
    )
    found = []
    if row["disordered"]:
        found.append(f"{plural(row['disordered'], 'request')} reached a station before the one that comes first")
    if row["overfull"]:
        found.append(f"{plural(row['overfull'], 'request')} found more tokens cached than their prompts have")
    if row["untold"]:
        found.append(f"{plural(row['untold'], 'request')} got tokens and no first token")
    counted = case.one(
        """
        WITH said AS (
            SELECT pass, count(*) FILTER (admitted) AS admitted FROM looked
            WHERE rank = $rank AND result IS NOT NULL GROUP BY pass
        )
        SELECT count(*) AS n FROM turns t JOIN said s ON s.pass = t.pass
        WHERE t.rank = $rank AND t.admitted <> s.admitted
        """,
        rank=rank,
    )["n"]
    if counted:
        found.append(f"{plural(counted, 'pass')} admitted another number of requests than it said about each")
    return found
