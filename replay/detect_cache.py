"""Detectors of prefixes that are computed although they were there, would have been there, or need not have waited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schedscope.engine.ordering import POLICIES
from schedscope.engine.radix import namespace
from schedscope.replay.case import Case
from schedscope.replay.columns import packed_lists, values_of
from schedscope.replay.evicted import EVICTED_THEN_NEEDED
from schedscope.replay.finding import SHOWN, Evidence, Finding, Severity, Trial, plural, span
from schedscope.replay.prefixes import Duplicate, Prompt, duplicates, reuse

_SAMPLE_PROMPTS = 4_000
_SAMPLE_TOKENS = 4_000_000


def queue_too_long(case: Case, *, share: float = 0.05, lost: float = 0.05, times: int = 2) -> Iterator[Finding]:
    """More requests wait than lpm and hrrn sort: they fall back to the order that is there, and the hit rate saws.

    Args:
        share: of passes that fell back, at least.
        lost: how much lower the hit rate was in them, 0..1, at least, unless nearly all passes fell back.
        times: that it fell back, at least.
    """
    rows = case.rows(
        """
        WITH told AS (
            SELECT rank, pass, queue_len, fallback = 'queue_too_long' AS fell,
                coalesce(fallback = 'queue_too_long' AND NOT coalesce(lag(fallback = 'queue_too_long') OVER (
                    PARTITION BY rank ORDER BY pass), false), false) AS begins
            FROM turns WHERE pass IS NOT NULL
        ), hits AS (
            SELECT t.rank, coalesce(t.fell, false) AS fell, sum(m.prompt_tokens) AS prompt,
                sum(m.cached_tokens) AS cached
            FROM measured m JOIN told t ON t.rank = m.rank AND t.pass = m.admit_pass GROUP BY ALL
        ), counts AS (
            SELECT rank, count(*) AS passes, count(*) FILTER (fell) AS fell, sum(begins::INT) AS times,
                max(queue_len) AS longest,
                arg_max(pass, (queue_len, pass)) FILTER (fell) AS worst_pass
            FROM told GROUP BY rank
        )
        SELECT c.*, coalesce(f.prompt, 0) AS prompt, f.cached / f.prompt AS fell_rate, s.cached / s.prompt AS rate
        FROM counts c LEFT JOIN hits f ON f.rank = c.rank AND f.fell LEFT JOIN hits s ON s.rank = c.rank AND NOT s.fell
        WHERE c.fell > 0 ORDER BY c.rank
        """
    )
    for row in rows:
        rank, part = row["rank"], row["fell"] / row["passes"]
        rate, fell_rate = row["rate"] or 0.0, row["fell_rate"] or 0.0
        always = part > 0.9
        if part < share or (not always and (rate - fell_rate < lost or row["times"] < times)):
            continue
        config = case.config(rank)
        cost = case.computing_s(rank, row["prompt"] * max(rate - fell_rate, 0.0))
        rates = f"the hit rate was {fell_rate:.0%} then, and {rate:.0%} otherwise"
        yield Finding(
            detector="queue_too_long",
            severity=case.severity(cost, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{config.schedule_policy} gave up sorting {plural(row['times'], 'time')}, in "
            f"{part:.0%} of passes: more than {config.waiting_queue_prefix_match_max} requests waited, up to "
            f"{row['longest']}; {'nearly always' if always else rates}",
            cost_s=cost,
            evidence=(Evidence(f"{row['fell']} of {row['passes']} passes fell back", rank, row["worst_pass"]),),
            advice=f"Keep the queue of a rank below {config.waiting_queue_prefix_match_max} (--max-queued-requests, "
            "more ranks, a router that holds requests back), or take a policy that never falls back: dfs-weight, "
            "shortest-prefill-first.",
            trials=tuple(
                Trial(rank, row["worst_pass"], {"schedule_policy": other}, "finds_more")
                for other in ("dfs-weight", "shortest-prefill-first")
            ),
        )


def silent_fallback(case: Case) -> Iterator[Finding]:
    """A policy that needs the prefix cache was asked for, and without one another policy runs, unsaid."""
    rows = case.rows(
        "SELECT rank, any_value(active_policy) AS active, count(*) AS passes, min(pass) AS first_pass FROM turns "
        "WHERE fallback = 'radix_cache_disabled' GROUP BY rank ORDER BY rank"
    )
    for row in rows:
        asked = case.config(row["rank"]).schedule_policy
        yield Finding(
            detector="silent_fallback",
            severity=Severity.WARNING,
            rank=row["rank"],
            title=f"{asked} was asked for and {row['active']} ran, in {plural(row['passes'], 'pass')}: the prefix "
            "cache is off, and the server doesn't say so",
            cost_s=0.0,
            evidence=(Evidence("the first such pass", row["rank"], row["first_pass"]),),
            advice="Drop --disable-radix-cache, or ask for fcfs so that what is configured is what runs.",
        )


def held_back(case: Case, *, seconds: float = 1.0, share: float = 0.02, ratio: float = 2.0) -> Iterator[Finding]:
    """Requests that were held back as duplicates waited longer than computing their prefix again would have taken.

    Counted are passes that admitted a later request which the policy would have put behind it.

    Args:
        seconds: that they waited so, at least, all together.
        share: of all waiting, at least.
        ratio: how many times as much as it saved it cost, at least.
    """
    for rank in case.ranks:
        row = case.one(
            """
            WITH told AS (
                SELECT l.pass, l.rid, l.prefix_len, m.prompt_tokens - l.prefix_len AS left_tokens, m.arrive_ns,
                    l.deprioritized, l.admitted, l.shared_len, t.active_policy, (t.until_ns - t.ns) / 1e9 AS lasts_s
                FROM looked l JOIN measured m ON m.rank = l.rank AND m.rid = l.rid
                JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
                WHERE l.rank = $rank AND l.place_before IS NOT NULL
                    AND t.active_policy IN ('lpm', 'hrrn', 'shortest-prefill-first')
            ), held AS (
                SELECT h.rid, h.pass, any_value(h.shared_len) AS shared_len, any_value(h.lasts_s) AS lasts_s
                FROM told h JOIN told w ON w.pass = h.pass AND w.admitted AND NOT w.deprioritized
                    AND w.arrive_ns > h.arrive_ns
                    AND CASE h.active_policy WHEN 'lpm' THEN h.prefix_len >= w.prefix_len
                        ELSE h.left_tokens <= w.left_tokens END
                WHERE h.deprioritized AND NOT h.admitted GROUP BY h.rid, h.pass
            ), each AS (
                SELECT h.rid, sum(h.lasts_s) AS cost_s, count(*) AS passes, max(h.pass) AS last_pass,
                    least(max(h.shared_len), coalesce(any_value(m.cached_tokens), 0)) AS saved
                FROM held h LEFT JOIN measured m ON m.rank = $rank AND m.rid = h.rid GROUP BY h.rid
            )
            SELECT coalesce(sum(cost_s), 0) AS cost_s, coalesce(sum(saved), 0) AS saved, count(*) AS requests,
                max_by({'rid': rid, 'cost_s': cost_s, 'passes': passes, 'pass': last_pass}, cost_s, $shown) AS worst
            FROM each
            """,
            rank=rank,
            shown=SHOWN,
        )
        saved_s = case.computing_s(rank, row["saved"])
        cost = row["cost_s"] - saved_s
        if cost < max(seconds, share * case.waiting_s(rank)) or row["cost_s"] < ratio * saved_s:
            continue
        worst = row["worst"]
        settings = {"in_batch_prefix_caching_check_threshold": "-1"}
        yield Finding(
            detector="held_back",
            severity=case.severity(cost, rank),
            rank=rank,
            title=f"holding back {plural(row['requests'], 'duplicate')} let others go first for "
            f"{span(row['cost_s'])}, and saved {row['saved']:,} tokens, worth {span(saved_s)}",
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"held back in {plural(each['passes'], 'pass')}, {span(each['cost_s'])}",
                    rank,
                    each["pass"],
                    each["rid"],
                )
                for each in worst
            ),
            advice="Hold back less: raise IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD to the length of a prefix "
            "that is worth a wait, or turn it off with IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD=-1.",
            trials=tuple(Trial(rank, each["pass"], settings, "moves_up", each["rid"]) for each in worst[:2]),
        )


def cold_prefix_storm(case: Case, *, requests: int = 8, tokens: int = 256) -> Iterator[Finding]:
    """Many requests over one prefix that is not in the cache arrive at once: one computes it, the others wait for it.

    Seen where in-batch duplicates are held back; elsewhere they compute it side by side (`duplicate_prefill`).

    Args:
        requests: that were held back for one other in a pass, at least.
        tokens: that they share with it, at least.
    """
    for rank in case.ranks:
        rows = case.rows(
            """
            WITH storms AS (
                SELECT l.pass, l.partner, count(*) AS requests, min(l.shared_len) AS tokens,
                    any_value(t.until_ns - t.ns) AS lasts_ns, count(*) FILTER (l.admitted) AS beside
                FROM looked l JOIN turns t ON t.rank = l.rank AND t.pass = l.pass
                WHERE l.rank = $rank AND l.deprioritized AND l.partner IS NOT NULL AND l.shared_len >= $tokens
                GROUP BY l.pass, l.partner HAVING count(*) >= $requests
            )
            SELECT partner, max(requests) AS requests, max(tokens) AS tokens, count(*) AS passes, min(pass) AS pass,
                sum(lasts_ns) / 1e9 AS lasts_s, sum(lasts_ns / 1e9 * (requests - beside)) AS cost_s,
                sum(beside) AS beside
            FROM storms GROUP BY partner ORDER BY cost_s DESC, partner
            """,
            rank=rank,
            requests=requests,
            tokens=tokens,
        )
        if not rows:
            continue
        worst, cost = rows[0], sum(row["cost_s"] for row in rows)
        yield Finding(
            detector="cold_prefix_storm",
            severity=case.severity(cost, rank),
            rank=rank,
            title=f"{worst['requests']} requests over a cold prefix of {worst['tokens']:,} tokens were held back for "
            f"{worst['partner']}, for {span(worst['lasts_s'])}"
            + (f"; {worst['beside']} of them computed it beside it" if worst["beside"] else "")
            + (f"; it happened with {plural(len(rows) - 1, 'other prefix')}" if len(rows) > 1 else ""),
            cost_s=cost,
            evidence=tuple(
                Evidence(
                    f"{row['requests']} requests over {row['tokens']:,} tokens, in {plural(row['passes'], 'pass')}",
                    rank,
                    row["pass"],
                    row["partner"],
                )
                for row in rows[:SHOWN]
            ),
            advice="Warm a prefix before its followers come (one request with max_new_tokens 1), or let the router "
            "send the first one ahead. If that one itself waits long, look at what it waits for: its followers wait "
            "with it.",
        )


def duplicate_prefill(
    case: Case, *, tokens: int = 256, share: float = 0.02, candidates: int = 4, shortest: int = 64
) -> Iterator[Finding]:
    """Requests of one batch compute the same prefix side by side.

    Told from what was held back and admitted all the same; in the busiest passes without such marks from the tokens
    themselves.

    Args:
        tokens: computed twice, at least, all together.
        share: of all that was computed, or of what those busiest passes computed, at least.
        candidates: passes whose tokens are compared, those that computed most.
        shortest: tokens that a request has to compute for it.
    """
    for rank in case.ranks:
        found: dict[int, list[Duplicate]] = {}
        marked = case.rows(
            """
            SELECT l.pass, l.rid, l.partner, least(l.shared_len, l.admit_prefix_len + l.extend_len) - l.admit_prefix_len
                AS tokens FROM looked l
            JOIN looked p ON p.rank = l.rank AND p.pass = l.pass AND p.rid = l.partner AND p.admitted
            WHERE l.rank = $rank AND l.deprioritized AND l.admitted AND l.shared_len > l.admit_prefix_len
            """,
            rank=rank,
        )
        for row in marked:
            found.setdefault(row["pass"], []).append(Duplicate(row["rid"], row["partner"], row["tokens"]))
        busiest = case.rows(
            """
            SELECT pass,
                list({'rid': rid, 'prefix': admit_prefix_len, 'extend': extend_len} ORDER BY place_after) AS batch
            FROM looked WHERE rank = $rank AND admitted AND place_before IS NOT NULL AND extend_len >= $shortest
            GROUP BY pass HAVING count(*) > 1 ORDER BY sum(extend_len) DESC, pass LIMIT $candidates
            """,
            rank=rank,
            shortest=shortest,
            candidates=candidates,
        )
        for row in busiest:
            moment = None if row["pass"] in found else case.known_moment(rank, row["pass"])
            if moment is not None:
                batch = [(each["rid"], each["prefix"], each["extend"]) for each in row["batch"]]
                found[row["pass"]] = duplicates(moment.view, batch)
        found = {number: same for number, same in found.items() if same}
        twice = sum(each.tokens for same in found.values() for each in same)
        if twice < tokens:
            continue
        computed = case.one(
            "SELECT coalesce(sum(extend_len), 0) AS n FROM looked WHERE rank = $rank AND pass IN (SELECT "
            "unnest($passes))",
            rank=rank,
            passes=list(found),
        )["n"]
        if marked:
            computed = case.one(
                "SELECT coalesce(sum(extend_len), 0) AS n FROM looked WHERE rank = $rank AND admitted", rank=rank
            )["n"]
        if twice < share * computed:
            continue
        ordered = sorted(found.items(), key=lambda item: -sum(each.tokens for each in item[1]))
        number, worst = ordered[0]
        yield Finding(
            detector="duplicate_prefill",
            severity=case.severity(case.computing_s(rank, twice), rank),
            rank=rank,
            title=f"{plural(len(found), 'batch')} computed {twice:,} tokens more than once, as in pass {number}: "
            f"{worst[0].rid} and {worst[0].other} share {worst[0].tokens:,} tokens that were not cached",
            cost_s=case.computing_s(rank, twice),
            evidence=tuple(
                Evidence(
                    f"{plural(len(same), 'request')} computed {sum(each.tokens for each in same):,} tokens that "
                    "another one of the batch computed",
                    rank,
                    at,
                    same[0].rid,
                )
                for at, same in ordered[:SHOWN]
            ),
            advice="Send one request of a new prefix ahead of its followers. Where duplicates are held back, they "
            "are still admitted into room that is left: fewer requests a pass (--prefill-max-requests) leaves them "
            "for the next one.",
        )


def evicted_before_use(case: Case, *, share: float = 0.02, least: int = 256) -> Iterator[Finding]:
    """A waiting request's prefix was in the cache, and was evicted before its turn came.

    Seen under policies that look prefixes up when they sort.

    Args:
        share: of all prompt tokens, at least, all requests together.
        least: tokens, all requests together.
    """
    for rank in case.ranks:
        rows = case.rows(f"FROM ({EVICTED_THEN_NEEDED}) WHERE rank = $rank ORDER BY lost DESC, rid", rank=rank)
        lost = sum(row["lost"] for row in rows)
        total = case.one(
            "SELECT coalesce(sum(prompt_tokens), 0) AS n FROM measured WHERE rank = $rank AND admit_ns IS NOT NULL",
            rank=rank,
        )["n"]
        if lost < max(least, share * total):
            continue
        worst = rows[0]
        yield Finding(
            detector="evicted_before_use",
            severity=case.severity(case.computing_s(rank, lost), rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{plural(len(rows), 'waiting request')} lost {lost:,} cached tokens before their turn came: "
            f"{worst['rid']} had {worst['best']:,}, and {worst['cached']:,} when it was admitted after "
            f"{span(worst['waited_s'])}",
            cost_s=case.computing_s(rank, lost),
            evidence=tuple(
                Evidence(
                    f"{row['best']:,} tokens cached while it waited, {row['cached']:,} at its admission in pass "
                    f"{row['admit_pass']}",
                    rank,
                    row["had_pass"],
                    row["rid"],
                )
                for row in rows[:SHOWN]
            ),
            advice="Admit what is cached before it goes (--schedule-policy lpm), leave more of the pool to the cache "
            "(lower --max-running-requests, more memory), or evict by another rule (--radix-eviction-policy slru or "
            "lfu).",
        )


class Repeats(NamedTuple):
    """How much of some prompts in a row repeats, and how much of it was found."""

    prompts: int
    first: str
    """The rid of the first of them."""
    rate: float
    """Share of their tokens that came before, 0..1, in the same namespace."""
    anyway: float
    """The same whatever the namespace."""
    found: float
    """Share that was found in the cache."""
    turnovers: float
    """How many times over the whole pool was evicted in the run."""
    stays_s: float
    """How long what is cached stays, on average; 0: nothing was evicted."""
    cost_s: float
    """Waiting that comes from computing again what was not found."""
    worst_pass: int | None
    """The one with the longest queue."""


def thrashing_pool(case: Case, *, lost: float = 0.2, turnovers: float = 2.0) -> Iterator[Finding]:
    """Prefixes repeat, and by then the pool has been turned over.

    What repeats is told from a sample of prompts in a row.

    Args:
        lost: share of the sampled prompt tokens that repeat and were computed again, 0..1, at least.
        turnovers: times that the whole pool was evicted, at least.
    """
    for rank in case.ranks:
        found = _repeats(case, rank)
        if found is None or found.rate - found.found < lost or found.turnovers < turnovers:
            continue
        yield Finding(
            detector="thrashing_pool",
            severity=case.severity(found.cost_s, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{found.rate:.0%} of prompt tokens repeat, and {found.found:.0%} were found: the pool was evicted "
            f"{found.turnovers:.1f} times over, so what is cached stays for {span(found.stays_s)}",
            cost_s=found.cost_s,
            evidence=(_sampled(found, rank),),
            advice="More memory for the pool (--mem-fraction-static, or more ranks behind a router that sends a "
            "prefix to the same one), fewer --max-running-requests, or --schedule-policy lpm, which uses prefixes "
            "while they are there.",
            trials=_sort_by_cache(case, found, rank),
        )


def low_hit_rate(case: Case, *, lost: float = 0.2, turnovers: float = 2.0) -> Iterator[Finding]:
    """Prefixes repeat and are not found, although the pool is not turned over.

    Args:
        lost: share of the sampled prompt tokens that repeat and were computed again, 0..1, at least.
        turnovers: times that the whole pool was evicted from which on it is the pool (`thrashing_pool`).
    """
    for rank in case.ranks:
        found = _repeats(case, rank)
        if found is None or found.rate - found.found < lost or found.turnovers >= turnovers:
            continue
        config = case.config(rank)
        if config.disable_radix_cache or config.radix_force_miss:
            why, advice = ", since the prefix cache is off", "Drop --disable-radix-cache."
        else:
            why = f" (page size {config.page_size})" if config.page_size > 1 else ""
            advice = (
                "Requests of a prefix may run side by side before it is cached (see duplicate_prefill), pages may be "
                f"too long for what they share (--page-size {config.page_size}), or the cache is flushed."
            )
        yield Finding(
            detector="low_hit_rate",
            severity=case.severity(found.cost_s, rank, at_least=Severity.WARNING),
            rank=rank,
            title=f"{found.rate:.0%} of prompt tokens repeat, and {found.found:.0%} were found{why}",
            cost_s=found.cost_s,
            evidence=(_sampled(found, rank),),
            advice=advice,
            trials=() if config.disable_radix_cache else _sort_by_cache(case, found, rank),
        )


def apart_by_namespace(case: Case, *, lost: float = 0.3) -> Iterator[Finding]:
    """Prompts begin alike, and their namespaces (extra_key, cache_salt) keep them from sharing that.

    Args:
        lost: share of the sampled prompt tokens that would repeat in one namespace and don't, 0..1, at least.
    """
    for rank in case.ranks:
        found = _repeats(case, rank)
        if found is None or found.anyway - found.rate < lost:
            continue
        yield Finding(
            detector="apart_by_namespace",
            severity=Severity.NOTE,
            rank=rank,
            title=f"{found.anyway:.0%} of prompt tokens repeat, but only {found.rate:.0%} in the same namespace: "
            "extra_key or cache_salt keeps the others apart",
            cost_s=0.0,
            evidence=(_sampled(found, rank),),
            advice="If that is not for privacy, send the same cache_salt and extra_key for what may be shared.",
        )


def _sampled(found: Repeats, rank: int) -> Evidence:
    return Evidence(f"told from {found.prompts:,} prompts in a row, from {found.first} on", rank, None, found.first)


def _sort_by_cache(case: Case, found: Repeats, rank: int) -> tuple[Trial, ...]:
    if POLICIES[case.config(rank).schedule_policy].cache_aware or found.worst_pass is None:
        return ()
    return (Trial(rank, found.worst_pass, {"schedule_policy": "lpm"}, "finds_more"),)


def _repeats(case: Case, rank: int) -> Repeats | None:
    found: Repeats | None = case.once(("repeats", rank), lambda: repeats(case, rank))
    return found


def repeats(case: Case, rank: int) -> Repeats | None:
    """What repeats in a rank's prompts; None where tokens are not recorded."""
    prompts = sample_prompts(case, rank)
    if not prompts:
        return None
    there, anyway = reuse(prompts).rate, reuse(prompts, apart=False).rate
    sampled = case.one(
        "SELECT sum(cached_tokens) / sum(prompt_tokens) AS rate FROM measured WHERE rank = $rank AND admit_ns IS NOT "
        "NULL AND rid IN (SELECT unnest($rids))",
        rank=rank,
        rids=[each.rid for each in prompts],
    )["rate"]
    if sampled is None:
        return None
    memory = case.one(
        """
        SELECT coalesce(sum(evicted) / max(pool_size), 0) AS turnovers, coalesce(sum(evicted), 0) AS evicted,
            avg(evictable) AS kept, arg_max(pass, queue_len) AS worst_pass
        FROM turns WHERE rank = $rank
        """,
        rank=rank,
    )
    total = case.one("SELECT sum(prompt_tokens) AS n FROM measured WHERE rank = $rank", rank=rank)["n"]
    return Repeats(
        prompts=len(prompts),
        first=prompts[0].rid,
        rate=there,
        anyway=anyway,
        found=sampled,
        turnovers=memory["turnovers"],
        stays_s=memory["kept"] * case.lasts_s(rank) / memory["evicted"] if memory["evicted"] else 0.0,
        cost_s=case.computing_s(rank, total * max(there - sampled, 0.0)),
        worst_pass=memory["worst_pass"],
    )


def sample_prompts(case: Case, rank: int) -> list[Prompt]:
    """Some prompts that arrived in a row, from the middle of a run or all of a short one; none if not recorded."""
    if not case.has_tokens:
        return []
    bounds = case.one(
        f"""
        WITH told AS (
            SELECT arrive_ns, row_number() OVER (ORDER BY arrive_ns) AS place, count(*) OVER () AS requests,
                sum(prompt_tokens) OVER (ORDER BY arrive_ns) AS sum_tokens FROM measured WHERE rank = $rank
        ), later AS (
            SELECT *, sum_tokens - min(sum_tokens) OVER () AS behind FROM told
            WHERE place > greatest((requests - {_SAMPLE_PROMPTS}) // 2, 0)
            QUALIFY behind <= {_SAMPLE_TOKENS} ORDER BY place LIMIT {_SAMPLE_PROMPTS}
        )
        SELECT min(t.step) AS first, max(t.step) + 1 AS last FROM turns t,
            (SELECT min(arrive_ns) AS begin_ns, max(arrive_ns) AS last_ns FROM later) l
        WHERE t.rank = $rank AND t.end_ns >= l.begin_ns AND t.ns <= l.last_ns
        """,
        rank=rank,
    )
    if bounds["first"] is None:
        return []
    rows = case.table(
        """
        SELECT t.rid, t.ids, e.detail->>'extra_key' AS extra_key, e.detail->>'cache_salt' AS cache_salt
        FROM tokens t JOIN events e ON e.rank = t.rank AND e.seq = t.seq AND e.kind = 'arrive'
        WHERE t.rank = $rank AND t.position = 0 AND t.step BETWEEN $first AND $last
            AND e.step BETWEEN $first AND $last ORDER BY t.seq
        """,
        rank=rank,
        first=bounds["first"],
        last=bounds["last"],
    )
    columns = [values_of(rows.column(name)) for name in ("rid", "extra_key", "cache_salt")]
    texts = packed_lists(rows.column("ids"))
    return [
        Prompt(rid, namespace(extra, salt), text)
        for (rid, extra, salt), text in zip(zip(*columns, strict=True), texts, strict=True)
    ][:_SAMPLE_PROMPTS]
