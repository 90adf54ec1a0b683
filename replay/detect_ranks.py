"""Detectors of ranks that wait for each other, and of one that lags behind."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from schedscope.replay.case import Case
from schedscope.replay.finding import Evidence, Finding, Severity, Trial, plural, span


def delayer_veto(case: Case, *, share: float = 0.2, seconds: float = 1.0) -> Iterator[Finding]:
    """The prefill delayer keeps requests waiting.

    Args:
        share: of all waiting that is in passes it held back, at least.
        seconds: of waiting, at least.
    """
    for rank in case.ranks:
        row = case.one(
            """
            SELECT count(*) FILTER (delayer_allow IS NOT NULL) AS passes, count(*) FILTER (NOT delayer_allow) AS vetoes,
                count(*) FILTER (delayer_reason = 'wait_timeout') AS timeouts,
                count(*) FILTER (delayer_reason IN ('wait_timeout', 'wait_success', 'token_watermark')) AS ends,
                coalesce(sum(lasts_ns / 1e9 * waiting) FILTER (NOT delayer_allow), 0) AS cost_s,
                arg_max(pass, waiting) FILTER (NOT delayer_allow) AS worst_pass,
                max(waiting) FILTER (NOT delayer_allow) AS waiting
            FROM turns WHERE rank = $rank
            """,
            rank=rank,
        )
        if not row["vetoes"] or row["cost_s"] < max(seconds, share * case.waiting_s(rank)):
            continue
        config = case.config(rank)
        loops = row["timeouts"] and 2 * row["timeouts"] >= row["ends"]
        yield Finding(
            detector="delayer_veto",
            severity=case.severity(row["cost_s"], rank),
            rank=rank,
            title=f"the prefill delayer held {row['vetoes']:,} of {plural(row['passes'], 'pass')} back"
            + (
                f", and {plural(row['timeouts'], 'wait')} brought no fuller batch but ended after "
                f"{config.prefill_delayer_max_delay_passes} passes"
                if loops
                else ""
            ),
            cost_s=row["cost_s"],
            evidence=(Evidence(f"{plural(row['waiting'], 'request')} waited for it", rank, row["worst_pass"]),),
            advice=f"Fewer --prefill-delayer-max-delay-passes (it is {config.prefill_delayer_max_delay_passes}), a "
            "--prefill-delayer-token-usage-low-watermark below which nobody waits, or no --enable-prefill-delayer.",
            trials=(Trial(rank, row["worst_pass"], {"enable_prefill_delayer": "false"}, "admits_more"),),
        )


def delayer_mixed(case: Case, *, share: float = 0.1, seconds: float = 1.0, passes: int = 10) -> Iterator[Finding]:
    """Ranks with requests are held back because other ranks have none.

    Args:
        share: of all waiting that is in such passes, at least.
        seconds: of waiting, at least.
        passes: at least.
    """
    row = case.one(
        """
        WITH mixed AS (FROM turns WHERE NOT delayer_allow AND delayer_estimation = 'mixed')
        SELECT count(*) AS passes, coalesce(sum(lasts_ns / 1e9 * waiting), 0) AS cost_s,
            max_by({'rank': rank, 'pass': pass, 'waiting': waiting}, waiting) AS worst,
            list(DISTINCT rank ORDER BY rank) AS ranks
        FROM mixed
        """
    )
    if row["passes"] < passes or row["cost_s"] < max(seconds, share * case.waiting_s()):
        return
    worst = row["worst"]
    yield Finding(
        detector="delayer_mixed",
        severity=case.severity(row["cost_s"], None),
        rank=None,
        title=f"ranks {', '.join(map(str, row['ranks']))} were held back in {plural(row['passes'], 'pass')} because "
        "other ranks had nothing to prefill",
        cost_s=row["cost_s"],
        evidence=(Evidence(f"{plural(worst['waiting'], 'request')} waited", worst["rank"], worst["pass"]),),
        advice="Spread requests over the ranks more evenly (--load-balance-method), or set "
        "--prefill-delayer-token-usage-low-watermark, below which a rank goes ahead.",
        trials=(Trial(worst["rank"], worst["pass"], {"enable_prefill_delayer": "false"}, "admits_more"),),
    )


def rank_behind(case: Case, *, times: float = 3.0, seconds: float = 1.0) -> Iterator[Finding]:
    """One rank's requests wait much longer than those of the others.

    Args:
        times: the median waiting of the other ranks, at least.
        seconds: of waiting more than that, at least.
    """
    if len(case.ranks) < 2:
        return
    rows = case.rows(
        """
        SELECT rank, count(*) AS requests, coalesce(median(ttft_ns) / 1e9, 0) AS ttft_s,
            coalesce(sum(cached_tokens) / sum(prompt_tokens), 0) AS rate FROM measured GROUP BY rank ORDER BY rank
        """
    )
    waits = {row["rank"]: case.waiting_s(row["rank"]) for row in rows}
    if len(waits) < 2:
        return
    worst = max(waits, key=lambda rank: waits[rank])
    usual = median(wait for rank, wait in waits.items() if rank != worst)
    cost = waits[worst] - usual
    if waits[worst] < times * usual or cost < seconds:
        return
    number = case.one(
        "SELECT arg_max(pass, waiting) AS pass FROM turns WHERE rank = $rank AND pass IS NOT NULL", rank=worst
    )["pass"]
    yield Finding(
        detector="rank_behind",
        severity=case.severity(cost, None, at_least=Severity.WARNING),
        rank=worst,
        title=f"the requests of rank {worst} waited {span(waits[worst])} together, those of the other ranks "
        f"{span(usual)} (median)",
        cost_s=cost,
        evidence=tuple(
            Evidence(
                f"{plural(row['requests'], 'request')}, TTFT p50 {span(row['ttft_s'])}, hit rate {row['rate']:.0%}, "
                f"{span(waits[row['rank']])} of waiting",
                row["rank"],
                number if row["rank"] == worst else None,
            )
            for row in sorted(rows, key=lambda row: -waits[row["rank"]])
        ),
        advice="Balance by load (--load-balance-method shortest_queue, or a router that knows prefixes and load). If "
        "it got no more requests than others, look at what its machine does.",
    )
