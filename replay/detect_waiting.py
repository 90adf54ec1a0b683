"""Detectors of requests that wait although others don't, or although there is room for them."""

from __future__ import annotations

from collections.abc import Iterator

from schedscope.engine.errors import SchedscopeError
from schedscope.replay.case import Case, Row
from schedscope.replay.finding import SHOWN, Evidence, Finding, Severity, Trial, plural, span

_BADLY = 4.0
"""Times the median wait that are bad whatever they cost."""


def starvation(
    case: Case, *, overtaken: int = 20, seconds: float = 1.0, times_median: float = 2.0, candidates: int = 200
) -> Iterator[Finding]:
    """Requests that many later ones were admitted before, and that waited far longer than others.

    Under priority scheduling only those count as later that were not more urgent.

    Args:
        overtaken: later requests that went first, at least.
        seconds: waited at least.
        times_median: and so many times the median wait of its rank.
        candidates: requests that are looked at, those that waited longest.
    """
    for rank in case.ranks:
        config = case.config(rank)
        urgent = ""
        if config.enable_priority_scheduling:
            known = f"coalesce({{}}.priority, {config.lowest_priority}) * {config.priority_sign}"
            urgent = f"AND {known.format('o')} >= {known.format('l')}"
        rows = case.rows(
            f"""
            WITH horizon AS (SELECT max(end_ns) AS ns FROM turns WHERE rank = $rank), waits AS (
                SELECT m.*, coalesce(m.admit_ns, m.finish_ns, horizon.ns) AS left_ns
                FROM measured m, horizon WHERE rank = $rank
            ), median AS (SELECT median(left_ns - arrive_ns) AS ns FROM waits), late AS (
                SELECT * FROM waits ORDER BY left_ns - arrive_ns DESC LIMIT $candidates
            )
            SELECT l.rid, (l.left_ns - l.arrive_ns) / 1e9 AS waited_s, count(*) AS overtaken,
                quantile_disc(o.admit_ns, 0.5) AS middle_ns, any_value(median.ns) / 1e9 AS median_s
            FROM late l JOIN measured o ON o.rank = l.rank AND o.arrive_ns > l.arrive_ns AND o.admit_ns < l.left_ns
                {urgent}, median
            WHERE l.left_ns - l.arrive_ns >= greatest($seconds * 1e9, $times * median.ns)
            GROUP BY ALL HAVING count(*) >= $overtaken ORDER BY overtaken DESC, l.rid
            """,
            rank=rank,
            overtaken=overtaken,
            seconds=seconds,
            times=times_median,
            candidates=candidates,
        )
        if not rows:
            continue
        evidence = []
        for row in rows[:SHOWN]:
            words = f"overtaken {row['overtaken']:,} times in {span(row['waited_s'])}, half of them by then"
            evidence.append(Evidence(words, rank, case.pass_before(rank, row["middle_ns"]), row["rid"]))
        worst, cost = rows[0], sum(row["waited_s"] - row["median_s"] for row in rows)
        more = " or more" if len(rows) == candidates else ""
        others = f", and {plural(len(rows) - 1, 'other')}{more} fared alike" if len(rows) > 1 else ""
        policy = config.schedule_policy
        badly = Severity.WARNING if worst["waited_s"] >= _BADLY * worst["median_s"] else Severity.NOTE
        yield Finding(
            detector="starvation",
            severity=case.severity(cost, rank, at_least=badly),
            rank=rank,
            title=f"{worst['rid']} was overtaken {worst['overtaken']:,} times in {span(worst['waited_s'])} under "
            f"{policy}{others}; the median wait is {span(worst['median_s'])}",
            cost_s=cost,
            evidence=tuple(evidence),
            advice="Take a policy under which waiting counts: --schedule-policy hrrn, or fcfs.",
            trials=tuple(
                Trial(rank, each.pass_number, {"schedule_policy": other}, "moves_up", each.rid)
                for other in ("hrrn", "fcfs")
                if other != policy
                for each in evidence[:1]
                if each.pass_number is not None
            ),
        )


def never_fits(case: Case, *, passes: int = 3) -> Iterator[Finding]:
    """A request that is refused for memory although nothing runs: no memory will ever come free for it.

    Args:
        passes: in which it was refused so, at least.
    """
    rows = case.rows(
        """
        SELECT l.rank, l.rid, count(*) AS passes, min(l.pass) AS first_pass, max(l.pass) AS last_pass,
            max(l.need) AS need, arg_max(l.have, l.need) AS have, sum(t.lasts_ns / 1e9 * t.waiting) AS cost_s,
            max(t.waiting) AS waiting
        FROM looked l JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
        LEFT JOIN measured m ON m.rank = l.rank AND m.rid = l.rid
        LEFT JOIN turns a ON a.rank = m.rank AND m.admit_ns BETWEEN a.ns AND a.end_ns
        WHERE l.reason LIKE 'memory%' AND NOT l.admitted AND t.running = 0 AND t.admitted = 0
        GROUP BY l.rank, l.rid HAVING count(*) >= $passes AND coalesce(max(a.pass), -1) < max(l.pass)
        ORDER BY cost_s DESC
        """,
        passes=passes,
    )
    for row in rows:
        rank, rid, config = row["rank"], row["rid"], case.config(row["rank"])
        behind = row["waiting"] - 1
        missing = int(row["need"] - row["have"]) + 1
        trials = [Trial(rank, row["last_pass"], {"schedule_policy": "shortest-prefill-first"}, "admits_more", None)]
        asked = case.one(
            "SELECT any_value(max_new_tokens) AS n FROM measured WHERE rank = $rank AND rid = $rid", rank=rank, rid=rid
        )["n"]
        reserved = min(asked or 0, config.clip_max_new_tokens) - missing
        if reserved > 0:
            trials.insert(0, Trial(rank, row["last_pass"], {"clip_max_new_tokens": str(reserved)}, "admits", rid))
        yield Finding(
            detector="never_fits",
            severity=Severity.CRITICAL,
            rank=rank,
            title=f"{rid} can never fit: it needs {row['need']:,.0f} tokens, and with nothing running there are "
            f"{row['have']:,.0f} (it must need less)"
            + (f"; up to {plural(behind, 'other request')} waited behind it" if behind else ""),
            cost_s=row["cost_s"],
            evidence=(
                Evidence(
                    f"refused in {row['passes']} passes with nothing running, {row['first_pass']} to "
                    f"{row['last_pass']}",
                    rank,
                    row["last_pass"],
                    rid,
                ),
            ),
            advice="Turn such requests away where they come in (prompt, max_new_tokens and a page of "
            f"{config.page_size} must be less than the pool), lower their max_new_tokens or the longest output that "
            "is reserved (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION), or give the pool more memory "
            "(--mem-fraction-static).",
            trials=tuple(trials),
        )


def blocked_head(case: Case, *, seconds: float = 0.5, share: float = 0.05, candidates: int = 20) -> Iterator[Finding]:
    """A request that is too big for the memory that is free keeps smaller ones behind it waiting.

    Args:
        seconds: for which it did so, at least.
        share: of all waiting that came from it, at least, all such requests together.
        candidates: blocking requests that are looked at, those behind which most waited.
    """
    for rank in case.ranks:
        config = case.config(rank)
        rows = case.rows(
            """
            WITH blocked AS (
                SELECT l.rid, l.pass, t.end_rem_total AS have, t.ns, t.until_ns, t.waiting
                FROM looked l JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
                WHERE l.rank = $rank AND l.reason LIKE 'memory%' AND NOT l.admitted AND t.waiting > 1
                    AND t.running > 0
            ), blockers AS (
                SELECT rid FROM blocked GROUP BY rid HAVING sum(until_ns - ns) >= $seconds * 1e9
                ORDER BY sum((until_ns - ns) * (waiting - 1)) DESC LIMIT $candidates
            ), needs AS (
                SELECT b.rid, b.pass, b.have, (b.until_ns - b.ns) / 1e9 AS lasts_s,
                    sum(greatest(m.prompt_tokens - d.prefix_len, 1) + least(m.max_new_tokens, $clip) + $page)
                        OVER (PARTITION BY b.pass ORDER BY d.place_after) AS need
                FROM blocked b JOIN blockers USING (rid)
                JOIN decisions d ON d.rank = $rank AND d.pass = b.pass AND d.result IS NULL
                JOIN measured m ON m.rank = $rank AND m.rid = d.rid
            ), fits AS (
                SELECT rid, pass, any_value(lasts_s) AS lasts_s, count(*) FILTER (need < have) AS fitting
                FROM needs GROUP BY rid, pass HAVING count(*) FILTER (need < have) > 0
            )
            SELECT rid, count(*) AS passes, sum(lasts_s * fitting) AS cost_s, max(fitting) AS fitting,
                arg_max(pass, lasts_s * fitting) AS worst_pass, sum(lasts_s) AS lasts_s
            FROM fits GROUP BY rid HAVING sum(lasts_s) >= $seconds ORDER BY cost_s DESC, rid
            """,
            rank=rank,
            seconds=seconds,
            candidates=candidates,
            clip=config.clip_max_new_tokens,
            page=config.page_size,
        )
        cost = sum(row["cost_s"] for row in rows)
        if not rows or cost < share * case.waiting_s(rank):
            continue
        worst = rows[0]
        yield Finding(
            detector="blocked_head",
            severity=case.severity(cost, rank),
            rank=rank,
            title=f"{worst['rid']} didn't fit for {span(worst['lasts_s'])}, while up to "
            f"{plural(worst['fitting'], 'smaller request')} behind it would have"
            + (f"; {plural(len(rows) - 1, 'other request')} blocked the queue alike" if len(rows) > 1 else ""),
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"refused in {plural(row['passes'], 'pass')} in which up to {row['fitting']} behind it would "
                    "have fitted",
                    rank,
                    row["worst_pass"],
                    row["rid"],
                )
                for row in rows[:SHOWN]
            ),
            advice="Let small requests go first (--schedule-policy shortest-prefill-first or hrrn), or reserve less "
            "for outputs that hardly anyone uses up: send smaller max_new_tokens, or lower "
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.",
            trials=tuple(
                Trial(rank, worst["worst_pass"], {"schedule_policy": other}, "admits_more")
                for other in ("shortest-prefill-first", "hrrn")
                if other != config.schedule_policy
            ),
        )


def latched_full(
    case: Case, *, seconds: float = 0.5, steps: int = 10, share: float = 0.02, candidates: int = 4, looks: int = 12
) -> Iterator[Finding]:
    """The mark `batch_is_full` outlives its cause: steps don't look at the queue although someone in it would fit.

    Proven by deciding such steps without the mark; where a run can't be re-run, told from the request whose refusal
    set it and that has left.

    Args:
        seconds: that it was kept with requests waiting, at least.
        steps: and so many steps.
        share: of all waiting, at least, from the moment on in which someone would have been admitted.
        candidates: times that the mark was set that are looked at, those in which most waited.
        looks: steps of each that are decided again.
    """
    for rank in case.ranks:
        rows = case.rows(
            """
            SELECT t.batch_is_full_pass AS pass, min(t.step) AS first_step, max(t.step) AS last_step,
                min(t.ns) AS begin_ns, max(t.ns + t.lasts_ns) AS until_ns, count(*) AS steps,
                any_value(l.rid) AS cause, any_value(m.finish_ns) AS cause_ended_ns
            FROM turns t
            LEFT JOIN looked l ON l.rank = t.rank AND l.pass = t.batch_is_full_pass AND NOT l.admitted
                AND l.result IS NOT NULL
            LEFT JOIN measured m ON m.rank = l.rank AND m.rid = l.rid AND m.admit_ns IS NULL
            WHERE t.rank = $rank AND t.gate = 'batch_is_full' AND t.waiting > 0 AND t.batch_is_full_pass IS NOT NULL
            GROUP BY t.batch_is_full_pass HAVING count(*) >= $steps AND sum(t.lasts_ns) >= $seconds * 1e9
            ORDER BY sum(t.lasts_ns / 1e9 * t.waiting) DESC LIMIT $candidates
            """,
            rank=rank,
            steps=steps,
            seconds=seconds,
            candidates=candidates,
        )
        latched = [(row, *found) for row in rows if (found := _latched_from(case, rank, row, looks)) is not None]
        costs = [
            case.one(
                "SELECT coalesce(sum(lasts_ns / 1e9 * waiting), 0) AS cost_s FROM turns WHERE rank = $rank AND step "
                "BETWEEN $first AND $last",
                rank=rank,
                first=step,
                last=row["last_step"],
            )["cost_s"]
            for row, step, _ in latched
        ]
        if not latched or sum(costs) < share * case.waiting_s(rank):
            continue
        row, step, who = latched[costs.index(max(costs))]
        cause = f"{row['cause']} was refused" if row["cause"] else "no slot was free"
        yield Finding(
            detector="latched_full",
            severity=case.severity(sum(costs), rank),
            rank=rank,
            title=f"batch_is_full stayed set for {span((row['until_ns'] - row['begin_ns']) / 1e9)} after pass "
            f"{row['pass']}, in which {cause}; from step {step} on {who} would have been admitted",
            cost_s=sum(costs),
            evidence=tuple(
                Evidence(
                    f"{each['steps']} steps were not allowed to look at the queue; {who}'s turn was in step {at}",
                    rank,
                    each["pass"],
                    who,
                )
                for each, at, who in latched[:SHOWN]
            ),
            advice="Upstream clears the mark only when a running request leaves: keep outputs short next to long "
            "waits (max_new_tokens), or, where priorities are in use, --enable-priority-scheduling, which clears it "
            "in every step.",
        )


def _latched_from(case: Case, rank: int, row: Row, looks: int) -> tuple[int, str] | None:
    """The step from which on someone would have been admitted, as far as it was looked, and who; None: nobody."""
    span = row["last_step"] - row["first_step"]
    wanted = sorted({row["first_step"] + span * i // max(looks - 1, 1) for i in range(looks)})
    try:
        for step, plan in case.opened(rank, row["pass"], wanted):
            admitted = () if plan.admission is None else plan.admission.admitted
            if admitted:
                return step, admitted[0].rid
    except SchedscopeError:
        ended = row["cause_ended_ns"]
        if ended is None or ended > row["until_ns"]:
            return None
        at = case.one("SELECT min(step) AS step FROM turns WHERE rank = $rank AND ns >= $ns", rank=rank, ns=ended)[
            "step"
        ]
        return None if at is None else (at, "perhaps the next one")
    return None


def chunk_monopoly(case: Case, *, passes: int = 4, share: float = 0.05) -> Iterator[Finding]:
    """A long prompt takes whole chunks, pass after pass, and nobody else is admitted.

    Args:
        passes: in a row, at least.
        share: of all waiting in such passes, at least.
    """
    for rank in case.ranks:
        config = case.config(rank)
        rows = case.rows(
            """
            SELECT chunked_in AS rid, count(*) AS passes, sum(lasts_ns / 1e9 * waiting) AS cost_s,
                sum(lasts_ns) / 1e9 AS lasts_s, max(waiting) AS waiting, arg_max(pass, waiting) AS worst_pass
            FROM turns WHERE rank = $rank AND chunked_in IS NOT NULL AND admitted = 1 AND waiting > 0
            GROUP BY chunked_in HAVING count(*) >= $passes ORDER BY cost_s DESC, rid
            """,
            rank=rank,
            passes=passes,
        )
        cost = sum(row["cost_s"] for row in rows)
        if not rows or cost < share * case.waiting_s(rank):
            continue
        worst, chunk = rows[0], config.chunked_prefill_size or 0
        yield Finding(
            detector="chunk_monopoly",
            severity=case.severity(cost, rank),
            rank=rank,
            title=f"{worst['rid']} took all of {worst['passes']} chunks for {span(worst['lasts_s'])} while up to "
            f"{worst['waiting']} requests waited"
            + (f"; {len(rows) - 1} other prompts did the same" if len(rows) > 1 else ""),
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"alone in {row['passes']} passes, {span(row['lasts_s'])}", rank, row["worst_pass"], row["rid"]
                )
                for row in rows[:SHOWN]
            ),
            advice="Leave room beside a continuing chunk: --schedule-policy shortest-prefill-first reserves some for "
            "shorter prompts; or a larger --chunked-prefill-size, with --enable-mixed-chunk so that decoding goes on.",
            trials=(
                Trial(rank, worst["worst_pass"], {"schedule_policy": "shortest-prefill-first"}, "admits_more"),
                Trial(rank, worst["worst_pass"], {"chunked_prefill_size": str(2 * chunk)}, "admits_more"),
            ),
        )


def decode_starvation(case: Case, *, steps: int = 8, seconds: float = 1.0) -> Iterator[Finding]:
    """Running requests get no token for long, because one prefill follows the other.

    Args:
        steps: prefill steps in a row, at least.
        seconds: that they took, at least.
    """
    for rank in case.ranks:
        rows = case.rows(
            """
            WITH told AS (
                SELECT *, kind = 'prefill' AND running > 0 AS stalls FROM turns WHERE rank = $rank AND kind <> 'idle'
            ), numbered AS (
                SELECT *, sum(CASE WHEN stalls THEN 0 ELSE 1 END) OVER (ORDER BY step) AS island FROM told
            )
            SELECT count(*) AS steps, sum(lasts_ns) / 1e9 AS lasts_s, max(running) AS running,
                sum(lasts_ns / 1e9 * running) AS cost_s, min(pass) AS first_pass, max(pass) AS last_pass
            FROM numbered WHERE stalls GROUP BY island HAVING count(*) >= $steps AND sum(lasts_ns) >= $seconds * 1e9
            ORDER BY cost_s DESC, first_pass
            """,
            rank=rank,
            steps=steps,
            seconds=seconds,
        )
        if not rows:
            continue
        worst, config = rows[0], case.config(rank)
        mixed = "" if config.enable_mixed_chunk else "--enable-mixed-chunk, so that they decode in the same forward; "
        yield Finding(
            detector="decode_starvation",
            severity=case.severity(sum(row["cost_s"] for row in rows), rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{worst['running']} running requests got no token for {span(worst['lasts_s'])}: {worst['steps']} "
            f"prefills in a row, from pass {worst['first_pass']} on"
            + (f"; it happened {len(rows)} times" if len(rows) > 1 else ""),
            cost_s=sum(row["cost_s"] for row in rows),
            evidence=tuple(
                Evidence(
                    f"{row['steps']} prefills in a row, passes {row['first_pass']} to {row['last_pass']}, "
                    f"{span(row['lasts_s'])}",
                    rank,
                    row["first_pass"],
                )
                for row in rows[:SHOWN]
            ),
            advice=f"{mixed}smaller --chunked-prefill-size or --max-prefill-tokens, or --min-free-slots-delay, which "
            "collects arrivals into fewer prefills.",
        )


_LIMITS = {
    "max_prefill_tokens": "--max-prefill-tokens",
    "chunked_prefill_size": "--chunked-prefill-size",
    "prefill_max_requests": "--prefill-max-requests",
    "max_running_requests": "--max-running-requests",
    "min_free_slots_delay": "--min-free-slots-delay",
}


def budget_limit(case: Case, *, share: float = 0.25, free: float = 0.3, seconds: float = 1.0) -> Iterator[Finding]:
    """A limit of the configuration ends passes, or keeps the queue shut, although memory is free.

    Args:
        share: of all waiting that comes from one limit, at least.
        free: part of the KV pool that is still free then, on average, 0..1, at least.
        seconds: of waiting, at least.
    """
    rows = case.rows(
        """
        WITH ends AS (
            SELECT rank, pass, arg_max(reason, coalesce(place_after, -1)) AS reason
            FROM looked WHERE result IS NOT NULL GROUP BY rank, pass
        ), limits AS (
            SELECT t.rank, t.pass, t.lasts_ns, t.waiting, t.end_rem_total / t.pool_size AS free, CASE
                WHEN t.stop = 'no_slot' THEN 'max_running_requests'
                WHEN e.reason IN ('input_budget', 'input_spent') THEN 'max_prefill_tokens'
                WHEN e.reason IN ('chunk_spent', 'chunk_taken', 'chunk_too_small', 'chunk_budget')
                    OR (t.stop = 'budget' AND e.reason = 'chunk_continued') THEN 'chunked_prefill_size'
                WHEN e.reason = 'prefill_max_requests' THEN 'prefill_max_requests'
            END AS what
            FROM turns t LEFT JOIN ends e ON e.rank = t.rank AND e.pass = t.pass WHERE t.pass IS NOT NULL
        ), shut AS (
            SELECT t.rank, NULL AS pass, t.lasts_ns, t.waiting, (t.available + t.evictable) / t.pool_size AS free,
                CASE WHEN t.gate = 'no_slot' OR (t.gate = 'batch_is_full' AND t.batch_is_full_pass IS NULL)
                        THEN 'max_running_requests'
                    WHEN t.gate = 'batch_is_full' THEN l.what
                    WHEN t.gate = 'min_free_slots_delay' THEN t.gate END AS what
            FROM turns t LEFT JOIN limits l ON l.rank = t.rank AND l.pass = t.batch_is_full_pass
            WHERE t.gate IS NOT NULL
        ), every AS (FROM limits UNION ALL FROM shut)
        SELECT rank, what, sum(lasts_ns / 1e9 * waiting) AS cost_s, count(pass) AS passes, count(*) AS steps,
            avg(free) AS free, arg_max(pass, waiting) AS worst_pass,
            coalesce(max(waiting) FILTER (pass IS NOT NULL), max(waiting)) AS waiting
        FROM every WHERE what IS NOT NULL AND waiting > 0 GROUP BY rank, what ORDER BY cost_s DESC, rank
        """
    )
    for row in rows:
        rank = row["rank"]
        if row["cost_s"] < max(share * case.waiting_s(rank), seconds) or (row["free"] or 0.0) < free:
            continue
        name, value = row["what"], getattr(case.config(rank), row["what"])
        trials: tuple[Trial, ...] = ()
        if row["worst_pass"] is not None and value:
            trials = (Trial(rank, row["worst_pass"], {name: str(2 * value)}, "admits_more"),)
        change = "Lower" if name == "min_free_slots_delay" else "Raise"
        yield Finding(
            detector="budget_limit",
            severity=case.severity(row["cost_s"], rank),
            rank=rank,
            title=f"{_LIMITS[name]} {value} kept requests waiting in {row['steps']:,} steps, with {row['free']:.0%} "
            "of the KV pool free or evictable",
            cost_s=row["cost_s"],
            evidence=(Evidence(f"{row['waiting']} requests were left waiting", rank, row["worst_pass"]),),
            advice=f"{change} {_LIMITS[name]}, as far as the latency of a step allows.",
            trials=trials,
        )


def priority_inversion(
    case: Case, *, overtaken: int = 5, seconds: float = 0.5, candidates: int = 200
) -> Iterator[Finding]:
    """Urgent requests wait while less urgent ones that came later are admitted.

    Args:
        overtaken: less urgent later ones that went first, at least.
        seconds: waited at least.
        candidates: requests with a priority that are looked at, those that waited longest.
    """
    for rank in case.ranks:
        config = case.config(rank)
        rows = case.rows(
            """
            WITH horizon AS (SELECT max(end_ns) AS ns FROM turns WHERE rank = $rank), waits AS (
                SELECT m.rid, m.arrive_ns, m.admit_ns, coalesce(m.priority, $lowest) * $sign::HUGEINT AS place,
                    coalesce(m.admit_ns, m.finish_ns, horizon.ns) AS left_ns, m.priority
                FROM measured m, horizon WHERE rank = $rank
            ), late AS (
                SELECT * FROM waits WHERE priority IS NOT NULL ORDER BY left_ns - arrive_ns DESC LIMIT $candidates
            )
            SELECT l.rid, l.priority, (l.left_ns - l.arrive_ns) / 1e9 AS waited_s, count(*) AS overtaken,
                max(o.admit_ns) AS last_ns
            FROM late l JOIN waits o ON o.arrive_ns > l.arrive_ns AND o.admit_ns < l.left_ns AND o.place > l.place
            WHERE l.left_ns - l.arrive_ns >= $seconds * 1e9
            GROUP BY ALL HAVING count(*) >= $overtaken ORDER BY overtaken DESC, l.rid
            """,
            rank=rank,
            lowest=2**63 - 1 if config.schedule_low_priority_values_first else -(2**63) + 1,
            sign=config.priority_sign,
            seconds=seconds,
            overtaken=overtaken,
            candidates=candidates,
        )
        if not rows:
            continue
        evidence = []
        for row in rows[:SHOWN]:
            number = case.pass_before(rank, row["last_ns"])
            words = (
                f"priority {row['priority']}: {row['overtaken']} less urgent ones went first in {span(row['waited_s'])}"
            )
            evidence.append(Evidence(words, rank, number, row["rid"]))
        cost, worst = sum(row["waited_s"] for row in rows), rows[0]
        off = not config.enable_priority_scheduling
        why = "priority scheduling is off, so priorities are ignored" if off else "priority scheduling is on"
        policy = config.schedule_policy if config.schedule_policy in {"fcfs", "lof"} else "fcfs"
        settings = {"enable_priority_scheduling": "true", "schedule_policy": policy}
        trials = tuple(
            Trial(rank, each.pass_number, settings, "moves_up", each.rid)
            for each in evidence[:1]
            if off and each.pass_number is not None
        )
        yield Finding(
            detector="priority_inversion",
            severity=case.severity(cost, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{worst['rid']} of priority {worst['priority']} waited {span(worst['waited_s'])} while "
            f"{worst['overtaken']} less urgent requests that came later went first ({why})",
            cost_s=cost,
            evidence=tuple(evidence),
            advice=f"--enable-priority-scheduling with --schedule-policy {policy}."
            if off
            else "Look at the passes: a request that was retracted or preempted keeps its place in line, and a queue "
            "limit or a gate may hold urgent ones back (--min-free-slots-delay).",
            trials=trials,
        )


def rid_ties(case: Case, *, times: int = 20, seconds: float = 1.0, share: float = 0.02) -> Iterator[Finding]:
    """Under hrrn, requests with equal ratios go by the alphabet of their rids, whoever came first.

    Args:
        times: that someone was overtaken so, at least.
        seconds: of waiting, at least.
        share: of all waiting, at least.
    """
    for rank in case.ranks:
        if case.config(rank).schedule_policy != "hrrn" or not case.has_decisions:
            continue
        rows = case.rows(
            """
            WITH went AS (
                SELECT l.pass, l.key, max(m.arrive_ns) AS arrive_ns, arg_max(l.rid, m.arrive_ns) AS rid
                FROM looked l JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
                JOIN measured m ON m.rank = l.rank AND m.rid = l.rid
                WHERE l.rank = $rank AND l.admitted AND l.place_before IS NOT NULL AND t.active_policy = 'hrrn'
                GROUP BY l.pass, l.key
            ), passed AS (
                SELECT d.rid, d.pass, any_value(w.rid) AS other, any_value(t.until_ns - t.ns) / 1e9 AS lasts_s
                FROM decisions d JOIN went w ON w.pass = d.pass AND w.key = d.key AND d.rid > w.rid
                JOIN measured m ON m.rank = $rank AND m.rid = d.rid AND m.arrive_ns < w.arrive_ns
                JOIN turns t ON t.rank = $rank AND t.pass = d.pass
                WHERE d.rank = $rank AND NOT d.admitted GROUP BY d.rid, d.pass
            )
            SELECT rid, count(*) AS times, sum(lasts_s) AS cost_s, max(pass) AS pass, arg_max(other, pass) AS other
            FROM passed GROUP BY rid ORDER BY cost_s DESC, rid
            """,
            rank=rank,
        )
        cost, total = sum(row["cost_s"] for row in rows), sum(row["times"] for row in rows)
        if total < times or cost < max(seconds, share * case.waiting_s(rank)):
            continue
        worst = rows[0]
        yield Finding(
            detector="rid_ties",
            severity=case.severity(cost, rank),
            rank=rank,
            title=f"{len(rows)} requests were overtaken {total} times by later ones with the same hrrn ratio, only "
            f"because of the alphabet: {worst['rid']} {worst['times']} times, the last time by {worst['other']}",
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"overtaken {row['times']} times, the last time by {row['other']}", rank, row["pass"], row["rid"]
                )
                for row in rows[:SHOWN]
            ),
            advice="Send rids that grow with time (such as UUIDv7 or zero-padded numbers), so that a tie goes to "
            "whoever came first.",
        )
