"""Detectors of requests that lose the memory they had been given."""

from __future__ import annotations

from collections.abc import Iterator

from schedscope.replay.case import Case
from schedscope.replay.finding import SHOWN, Evidence, Finding, Severity, Trial, plural, span

_SHAPED = "it would have had another past, which deciding single passes can't show"


def retraction_storm(case: Case, *, retractions: int = 10, share: float = 0.1) -> Iterator[Finding]:
    """Decoding runs out of memory again and again, and sends requests back to the queue.

    Args:
        retractions: at least.
        share: of as many admissions, at least.
    """
    for rank in case.ranks:
        row = case.one(
            """
            SELECT (SELECT coalesce(sum(retracted), 0) FROM turns WHERE rank = $rank) AS retractions,
                (SELECT count(*) FROM turns WHERE rank = $rank AND retracted > 0) AS steps,
                (SELECT count(admit_ns) FROM measured WHERE rank = $rank) AS admitted,
                (SELECT coalesce(sum(ns - lost_ns), 0) / 1e9 FROM again WHERE rank = $rank AND lost_as = 'retract')
                    AS cost_s,
                (SELECT coalesce(sum(tokens - cached), 0) FROM again WHERE rank = $rank AND lost_as = 'retract') AS lost
            """,
            rank=rank,
        )
        if row["retractions"] < max(retractions, share * row["admitted"]):
            continue
        worst = case.rows(
            """
            SELECT step, ns, retracted, running, (SELECT max(pass) FROM turns p WHERE p.rank = $rank AND p.ns <= t.ns)
                AS pass FROM turns t WHERE rank = $rank AND retracted > 0 ORDER BY retracted DESC, step LIMIT $shown
            """,
            rank=rank,
            shown=SHOWN,
        )
        config = case.config(rank)
        yield Finding(
            detector="retraction_storm",
            severity=case.severity(row["cost_s"], rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{plural(row['retractions'], 'retraction')} for {plural(row['admitted'], 'admitted request')}: "
            f"decoding ran out of memory in {plural(row['steps'], 'step')}"
            + (f", and {row['lost']:,} tokens were computed again" if case.has_decisions else ""),
            cost_s=row["cost_s"],
            evidence=tuple(
                Evidence(
                    f"step {each['step']}: {each['retracted']} sent back, {each['running']} went on", rank, each["pass"]
                )
                for each in worst
            ),
            advice=f"Raise --schedule-conservativeness (it is {config.schedule_conservativeness:g}), so that "
            "admission reserves more for outputs; or lower --max-running-requests.",
            unchecked=_SHAPED,
        )


def repeated_victims(case: Case, *, times: int = 3) -> Iterator[Finding]:
    """The same requests lose their memory again and again.

    Args:
        times: that one was retracted or preempted, at least.
    """
    for rank in case.ranks:
        rows = case.rows(
            """
            WITH waits AS (
                SELECT rid, sum(ns - lost_ns) / 1e9 AS cost_s, max(pass) AS pass, sum(tokens - cached) AS lost
                FROM again WHERE rank = $rank GROUP BY rid
            )
            SELECT m.rid, m.retractions, m.preemptions, coalesce(w.cost_s, 0) AS cost_s, w.pass, w.lost, m.end_reason
            FROM measured m LEFT JOIN waits w ON w.rid = m.rid
            WHERE m.rank = $rank AND m.retractions + m.preemptions >= $times
            ORDER BY m.retractions + m.preemptions DESC, cost_s DESC, m.rid
            """,
            rank=rank,
            times=times,
        )
        if not rows:
            continue
        worst, cost = rows[0], sum(row["cost_s"] for row in rows)
        config = case.config(rank)
        retracted = worst["retractions"] >= worst["preemptions"]
        yield Finding(
            detector="repeated_victims",
            severity=case.severity(cost, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{worst['rid']} lost its memory {worst['retractions'] + worst['preemptions']} times "
            f"({'to decoding' if retracted else 'to more urgent requests'})"
            + (f", and {plural(len(rows) - 1, 'other')} {times} times or more" if len(rows) > 1 else ""),
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"{row['retractions']} retractions, {row['preemptions']} preemptions; {span(row['cost_s'])} back "
                    "in the queue",
                    rank,
                    row["pass"],
                    row["rid"],
                )
                for row in rows[:SHOWN]
            ),
            advice="Retraction takes those with the least output first, so whoever was retracted is taken again: "
            f"raise --schedule-conservativeness (it is {config.schedule_conservativeness:g})."
            if retracted
            else "Raise --priority-scheduling-preemption-threshold (it is "
            f"{config.priority_scheduling_preemption_threshold}), or --disable-priority-preemption.",
            unchecked=_SHAPED if retracted else None,
        )


def pointless_preemption(case: Case, *, times: int = 1) -> Iterator[Finding]:
    """Running requests are pushed out for one that is then not admitted.

    Args:
        times: that it happened, at least.
    """
    for rank in case.ranks:
        rows = case.rows(
            """
            SELECT l.pass, l.rid, len(l.preempted) AS victims, l.preempted[1] AS victim, l.reason, l.need, l.have,
                coalesce((SELECT sum(a.ns - a.lost_ns) FROM again a WHERE a.rank = l.rank AND a.lost_ns = t.ns
                    AND list_contains(l.preempted, a.rid)), 0) / 1e9 AS cost_s
            FROM looked l JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
            WHERE l.rank = $rank AND len(l.preempted) > 0 AND NOT l.admitted ORDER BY victims DESC, l.pass
            """,
            rank=rank,
        )
        if len(rows) < times:
            continue
        worst, cost = rows[0], sum(row["cost_s"] for row in rows)
        higher = 2 * max(case.config(rank).priority_scheduling_preemption_threshold, 1)
        yield Finding(
            detector="pointless_preemption",
            severity=case.severity(cost, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{plural(sum(row['victims'] for row in rows), 'running request')} pushed out for requests that "
            f"were not admitted then: {worst['rid']} was refused ({worst['reason']}) although {worst['victim']} had "
            "made room",
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"{plural(row['victims'], 'victim')}, then refused: needs {row['need'] or 0:,.0f} tokens, has "
                    f"{row['have'] or 0:,.0f}",
                    rank,
                    row["pass"],
                    row["rid"],
                )
                for row in rows[:SHOWN]
            ),
            advice="Upstream counts a request that was never looked at as if it had no prompt, so it frees too "
            "little: raise --priority-scheduling-preemption-threshold, or --disable-priority-preemption.",
            trials=(
                Trial(rank, worst["pass"], {"priority_scheduling_preemption_threshold": str(higher)}, "preempts_less"),
                Trial(rank, worst["pass"], {"disable_priority_preemption": "true"}, "preempts_less"),
            ),
        )


def excessive_preemption(case: Case, *, preemptions: int = 10, share: float = 0.2) -> Iterator[Finding]:
    """Much of what runs is pushed out for more urgent requests, and computed again.

    Args:
        preemptions: at least.
        share: of as many admissions, at least.
    """
    for rank in case.ranks:
        row = case.one(
            """
            SELECT (SELECT coalesce(sum(preempted), 0) FROM turns WHERE rank = $rank) AS preemptions,
                (SELECT arg_max(pass, preempted) FROM turns WHERE rank = $rank) AS worst_pass,
                (SELECT max(preempted) FROM turns WHERE rank = $rank) AS worst,
                (SELECT count(admit_ns) FROM measured WHERE rank = $rank) AS admitted,
                (SELECT coalesce(sum(ns - lost_ns), 0) / 1e9 FROM again WHERE rank = $rank AND lost_as = 'preempt')
                    AS cost_s,
                (SELECT coalesce(sum(tokens - cached), 0) FROM again WHERE rank = $rank AND lost_as = 'preempt') AS lost
            """,
            rank=rank,
        )
        if row["preemptions"] < max(preemptions, share * row["admitted"]):
            continue
        threshold = case.config(rank).priority_scheduling_preemption_threshold
        higher = {"priority_scheduling_preemption_threshold": str(2 * max(threshold, 1))}
        yield Finding(
            detector="excessive_preemption",
            severity=case.severity(row["cost_s"], rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{plural(row['preemptions'], 'preemption')} for {plural(row['admitted'], 'admitted request')}"
            + (f"; {row['lost']:,} tokens were computed again" if case.has_decisions else ""),
            cost_s=row["cost_s"],
            evidence=(Evidence(f"{plural(row['worst'], 'victim')} at once", rank, row["worst_pass"]),),
            advice=f"Raise --priority-scheduling-preemption-threshold (it is {threshold}) above the steps between "
            "your priorities, or --disable-priority-preemption.",
            trials=(
                Trial(rank, row["worst_pass"], higher, "preempts_less"),
                Trial(rank, row["worst_pass"], {"disable_priority_preemption": "true"}, "preempts_less"),
            ),
        )
