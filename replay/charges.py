"""The ledger's book-keeping, in SQL: every nanosecond of a span in the queue is charged once.

A span of time between two looks at the queue belongs to what the first of them decided: that is why the request still
waited. So a span is cut where steps begin, and each piece gets the cause that the step's gate or pass gives it.
"""

from __future__ import annotations

import duckdb

STEP_COLUMNS = (
    "rank",
    "step",
    "kind",
    "gate",
    "pass",
    "count",
    "start_ns",
    "end_ns",
    "forward_ns",
    "batch_is_full_pass",
    "running",
)
PASS_COLUMNS = ("rank", "pass", "active_policy", "stop", "rem_total", "end_rem_chunk")
DECISION_COLUMNS = (
    "rank",
    "pass",
    "rid",
    "place_before",
    "key",
    "key_names",
    "matched",
    "deprioritized",
    "partner",
    "result",
    "reason",
    "admitted",
    "extend_len",
    "need",
    "have",
)
EVENT_COLUMNS = ("rank", "seq", "step", "pass", "kind", "rid")
REQUEST_COLUMNS = ("rank", "rid", "queue_ns", "admit_ns", "finish_ns", "retractions", "preemptions", "end_reason")

_STEPS = """
CREATE TEMP TABLE step AS
SELECT rank, step, count, pass, gate, start_ns, end_ns, running,
    coalesce(end_ns - forward_ns, end_ns) AS formed_ns,
    -- A step's row has the mark after it; the step in which the mark went still began with that of the step before.
    CASE WHEN gate = 'batch_is_full' THEN coalesce(batch_is_full_pass,
        CASE WHEN lag(step + count) OVER earlier = step THEN lag(batch_is_full_pass) OVER earlier END) END AS mark,
    lag(step + count) OVER earlier AS expected,
    lag(end_ns) OVER earlier AS before_ns,
    lead(step) OVER earlier AS next_step,
    lead(start_ns) OVER earlier AS next_ns
FROM steps WINDOW earlier AS (PARTITION BY rank ORDER BY step);
"""

_SLOTS = """
-- `behind` is the last pass, unless records are missing since; `setter` the step whose gate set the mark, -1: none did.
CREATE TEMP TABLE placed AS
SELECT * EXCLUDE stretch, max(pass) OVER sofar AS behind,
    CASE WHEN mark IS NULL THEN last_value(CASE WHEN gate = 'no_slot' THEN step
        WHEN gate = 'batch_is_full' THEN NULL ELSE -1 END IGNORE NULLS) OVER sofar END AS setter
FROM (
    SELECT *, sum(begins) OVER sofar AS slot, sum((expected IS DISTINCT FROM step)::INT) OVER sofar AS stretch
    FROM (SELECT *, (
        gate IS NULL
        OR expected IS DISTINCT FROM step
        OR (lag(pass) OVER earlier IS NULL
            AND (gate, mark) IS DISTINCT FROM (lag(gate) OVER earlier, lag(mark) OVER earlier))
    )::INT AS begins
    FROM step WINDOW earlier AS (PARTITION BY rank ORDER BY step))
    WINDOW sofar AS (PARTITION BY rank ORDER BY step ROWS UNBOUNDED PRECEDING)
) WINDOW sofar AS (PARTITION BY rank, stretch ORDER BY step ROWS UNBOUNDED PRECEDING);

-- A pass with the gated steps behind it, or gated steps that are alike; up to the next one, but for what is missing.
CREATE TEMP TABLE slot AS
SELECT rank, slot, pass, behind, gate, mark, setter, steps, begin_ns, end_ns,
    CASE WHEN next_ns IS NULL THEN 9223372036854775807 WHEN missing = 0 THEN next_ns ELSE last_ns END AS until_ns,
    coalesce(gated_ns, until_ns) AS gated_ns,
    coalesce(next_ns, 9223372036854775807) AS gap_until_ns
FROM (
    SELECT rank, slot::BIGINT AS slot, any_value(pass) AS pass, any_value(behind) AS behind,
        any_value(gate) AS gate, any_value(mark) AS mark, nullif(max(setter), -1) AS setter,
        coalesce(sum(count) FILTER (pass IS NULL), 0)::BIGINT AS steps,
        min(start_ns) AS begin_ns, min(end_ns) AS end_ns, max(end_ns) AS last_ns,
        min(start_ns) FILTER (gate IS NOT NULL) AS gated_ns,
        arg_max(next_step - step - count, step) AS missing,
        CASE WHEN count(*) = count(next_ns) THEN arg_max(next_ns, step) END AS next_ns
    FROM placed GROUP BY rank, slot
);
"""

_STAYS = """
CREATE TEMP TABLE life AS
SELECT *, row_number() OVER (PARTITION BY rank, rid ORDER BY finish_ns) AS number FROM requests;

-- Requests whose story is longer than their row tells, or that have no row yet.
CREATE TEMP TABLE told AS
WITH arrived AS (SELECT rank, rid, count(*) AS times FROM events WHERE kind = 'arrive' GROUP BY rank, rid),
ended AS (SELECT rank, rid, count(*) AS times, sum(retractions + preemptions) AS lost FROM requests GROUP BY rank, rid)
SELECT rank, rid, coalesce(arrived.times, 0) > coalesce(ended.times, 0) AS lives
FROM arrived FULL JOIN ended USING (rank, rid)
WHERE coalesce(ended.lost, 0) > 0 OR coalesce(arrived.times, 0) > coalesce(ended.times, 0);

CREATE TEMP TABLE station AS
SELECT rank, rid, seq, step, pass, kind, lives,
    lag(kind) OVER story AS kind_before, lead(kind) OVER story AS kind_behind, lead(step) OVER story AS step_behind,
    row_number() OVER (PARTITION BY rank, rid, kind ORDER BY seq DESC) AS from_last,
    max(CASE WHEN kind = 'arrive' THEN seq END) OVER (PARTITION BY rank, rid) AS last_arrival
FROM events JOIN told USING (rank, rid)
WHERE kind IN ('arrive', 'queue', 'admit', 'retract', 'preempt')
    AND NOT (kind = 'queue' AND EXISTS (
        FROM events e WHERE e.rank = events.rank AND e.rid = events.rid AND e.step = events.step
            AND e.kind IN ('retract', 'preempt') AND e.seq < events.seq))
WINDOW story AS (PARTITION BY rank, rid ORDER BY seq);

CREATE TEMP TABLE stay AS
WITH last AS (SELECT rank, max(end_ns) AS last_ns FROM step GROUP BY rank),
-- An admission behind a retraction has no time of its own: it is when the step's batch went to the model.
returned AS (
    SELECT s.rank, s.rid, s.kind AS after, lost.formed_ns AS enter_ns, admitting.formed_ns AS admit_ns,
        s.pass AS lost_pass, s.step AS lost_step
    FROM station s JOIN step lost ON lost.rank = s.rank AND lost.step = s.step
        LEFT JOIN step admitting ON s.kind_behind = 'admit' AND admitting.rank = s.rank
            AND admitting.step = s.step_behind
    WHERE s.kind IN ('retract', 'preempt')
),
back AS (
    SELECT r.rank, r.rid, r.after, r.enter_ns, r.lost_pass,
        coalesce(r.admit_ns, e.finish_ns) AS leave_ns,
        CASE WHEN r.admit_ns IS NOT NULL THEN 'admitted' ELSE e.end_reason END AS left_as
    FROM returned r ASOF LEFT JOIN life e ON e.rank = r.rank AND e.rid = r.rid AND r.enter_ns <= e.finish_ns
),
waits AS (
    SELECT s.rank, s.rid, NULL AS after, first.start_ns AS enter_ns, NULL AS lost_pass, admitting.formed_ns AS leave_ns,
        CASE WHEN admitting.formed_ns IS NOT NULL THEN 'admitted' END AS left_as
    FROM station s ASOF JOIN step first ON first.rank = s.rank AND s.step <= first.step
        LEFT JOIN step admitting ON s.kind_behind = 'admit' AND admitting.rank = s.rank
            AND admitting.step = s.step_behind
    WHERE s.kind = 'queue' AND s.lives AND s.seq > s.last_arrival
),
every AS (
    SELECT rank, rid, NULL AS after, queue_ns AS enter_ns, NULL AS lost_pass, coalesce(admit_ns, finish_ns) AS leave_ns,
        CASE WHEN admit_ns IS NULL THEN end_reason ELSE 'admitted' END AS left_as
    FROM requests WHERE queue_ns IS NOT NULL
    UNION ALL FROM back UNION ALL FROM waits
)
SELECT row_number() OVER (ORDER BY rank, enter_ns, rid) AS id, e.rank, e.rid,
    CASE e.after WHEN 'retract' THEN 'retracted' WHEN 'preempt' THEN 'preempted' END AS after,
    e.enter_ns, coalesce(e.leave_ns, greatest(last.last_ns, e.enter_ns)) AS leave_ns, e.left_as, e.lost_pass
FROM every e JOIN last USING (rank)
WHERE coalesce(e.leave_ns, greatest(last.last_ns, e.enter_ns)) >= e.enter_ns;
"""

_SPANS = """
-- `entry` orders requests by when they joined the queue: the pass that first saw them, and the place it found them in.
CREATE TEMP TABLE known AS
SELECT rank, rid, min(pass << 24 | place_before) AS entry,
    count(*) FILTER (admitted AND place_before IS NOT NULL) AS times
FROM decisions GROUP BY rank, rid;

CREATE TEMP TABLE name AS
SELECT rid, row_number() OVER (ORDER BY rid) AS name FROM (SELECT DISTINCT rid FROM known UNION SELECT rid FROM stay);

CREATE TEMP TABLE span AS SELECT s.*, n.name FROM stay s JOIN name n USING (rid);
"""

_PIECES = """
CREATE TEMP TABLE bounded AS
SELECT s.*, least(coalesce(first.start_ns, s.leave_ns), s.leave_ns) AS look_ns,
    CASE WHEN first.expected IS NULL AND first.step > 0 THEN -9223372036854775807
         WHEN first.expected <> first.step THEN first.before_ns END AS gap_ns,
    first.slot::BIGINT AS first_slot, final.slot::BIGINT AS last_slot
FROM span s
    ASOF LEFT JOIN placed first ON first.rank = s.rank AND s.enter_ns <= first.start_ns
    ASOF LEFT JOIN placed final ON final.rank = s.rank AND s.leave_ns >= final.start_ns;

-- Until the first step that could look at it.
CREATE TEMP TABLE early AS
SELECT id, look_ns - enter_ns - gap AS ns, gap
FROM (SELECT *, CASE WHEN gap_ns IS NULL THEN 0 ELSE greatest(look_ns - greatest(enter_ns, gap_ns), 0) END AS gap
      FROM bounded);

-- `ns` before the gated steps begin, `gated` in them. Who came in the midst of them was not in the pass before.
CREATE TEMP TABLE piece AS
SELECT b.id, b.name, b.rank, t.slot, CASE WHEN b.look_ns <= t.begin_ns THEN t.pass END AS pass,
    t.behind, t.gate, t.mark, t.setter, t.steps,
    greatest(least(t.gated_ns, b.leave_ns) - greatest(t.begin_ns, b.look_ns), 0) AS ns,
    greatest(least(t.until_ns, b.leave_ns) - greatest(t.gated_ns, b.look_ns), 0) AS gated,
    greatest(least(t.gap_until_ns, b.leave_ns) - t.until_ns, 0) AS gap,
    coalesce(b.left_as = 'admitted', false) AND t.slot = b.last_slot AND b.leave_ns <= t.end_ns AS deciding
FROM (SELECT *, unnest(range(first_slot, last_slot + 1)) AS slot FROM bounded WHERE look_ns < leave_ns) b
    JOIN slot t ON t.rank = b.rank AND t.slot = b.slot;
"""

_SAID = """
-- Of those that waited, were admitted, or ended a pass. Stays of one request are told apart by its admissions.
CREATE TEMP TABLE said AS
WITH often AS (
    SELECT rank, pass, rid, min(pass << 24 | place_before) OVER (PARTITION BY rank, rid, stay) AS entry
    FROM (
        SELECT rank, pass, rid, place_before, coalesce(sum(admitted::INT) OVER (
            PARTITION BY rank, rid ORDER BY pass ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS stay
        FROM decisions SEMI JOIN (FROM known WHERE times > 1) USING (rank, rid) WHERE place_before IS NOT NULL
    )
)
SELECT d.rank, d.pass, n.name, d.admitted, d.place_before, d.extend_len, d.matched, d.deprioritized, d.partner,
    d.result, d.reason, d.need,
    CASE WHEN d.key_names LIKE 'signed_priority%' THEN split_part(d.key, ',', 1) END AS urgency,
    CASE WHEN d.reason IN ('memory', 'memory_future', 'input_budget') THEN floor(d.need - d.have)::BIGINT + 1
         WHEN d.reason = 'memory_ignore_eos' THEN ceil(d.need - d.have)::BIGINT END AS short,
    CASE WHEN d.place_before IS NOT NULL THEN coalesce(often.entry, n.entry) END AS entry
FROM decisions d
    JOIN (
        SELECT k.rank, k.rid, name.name, k.entry, EXISTS (FROM stay s WHERE s.rank = k.rank AND s.rid = k.rid) AS waits
        FROM known k JOIN name USING (rid)
    ) n ON n.rank = d.rank AND n.rid = d.rid AND (n.waits OR d.admitted OR d.result IS NOT NULL)
    LEFT JOIN often ON often.rank = d.rank AND often.pass = d.pass AND often.rid = d.rid;

-- `upto` sums what was computed for it and for those that joined the queue after it.
CREATE TEMP TABLE joined AS
SELECT rank, pass, name, entry, matched, urgency, deprioritized,
    sum(extend_len) OVER (PARTITION BY rank, pass ORDER BY entry DESC)::BIGINT AS upto, extend_len
FROM said WHERE admitted AND place_before IS NOT NULL;

CREATE TEMP TABLE newest AS
SELECT rank, pass, max(entry) AS entry, max(entry) FILTER (NOT deprioritized) AS plain_entry,
    CASE WHEN count(*) = 1 THEN any_value(extend_len) END AS only_one
FROM joined GROUP BY rank, pass;

CREATE TEMP TABLE spender AS
SELECT rank, pass, name, extend_len,
    sum(extend_len) OVER (PARTITION BY rank, pass ORDER BY place_before)::BIGINT AS upto,
    sum(extend_len) OVER (PARTITION BY rank, pass)::BIGINT AS total
FROM said WHERE admitted;

CREATE TEMP TABLE ending AS
SELECT p.*, newest.entry AS newest, newest.plain_entry AS newest_plain, newest.only_one,
    head.name AS head, head.reason AS head_reason, head.short AS head_short, spent.reason AS spent_reason
FROM passes p
    LEFT JOIN newest USING (rank, pass)
    LEFT JOIN (FROM said WHERE result IS NOT NULL AND NOT admitted) head USING (rank, pass)
    LEFT JOIN (FROM said WHERE admitted AND reason LIKE '%_spent') spent USING (rank, pass);
"""

_JUDGED = """
-- Whoever was overtaken in a pass waited for that, unless it would not have fitted anyway; else for what ended it.
CREATE TEMP TABLE judged AS
SELECT p.id, p.rank, p.pass, p.ns, p.gated, 1 AS times, p.gate, p.mark, p.setter, p.steps,
    d.entry, d.matched, d.urgency, d.deprioritized, d.partner, d.reason, d.short,
    CASE
        WHEN d.name IS NULL THEN 'unrecorded'
        WHEN d.reason = 'delayed' THEN 'delayer'
        WHEN e.newest > d.entry AND NOT coalesce(d.reason LIKE 'memory%' AND d.need >= e.rem_total, false)
            THEN CASE WHEN d.deprioritized AND e.newest_plain > d.entry THEN 'held_back' ELSE 'overtaken' END
        WHEN d.reason LIKE 'memory%' THEN 'memory'
        WHEN e.stop IN ('no_slot', 'preempt_failed') THEN 'no_slot'
        WHEN e.head_reason = 'delayed' THEN 'delayer'
        WHEN e.head_reason LIKE 'memory%' THEN 'blocked_head'
        WHEN e.head_reason = 'prefill_max_requests' THEN 'prefill_max_requests'
        WHEN e.head_reason = 'input_budget' OR e.spent_reason = 'input_spent' THEN 'input_budget'
        WHEN e.head_reason LIKE 'chunk%' OR e.spent_reason = 'chunk_spent' THEN 'chunk_budget'
        WHEN e.spent_reason IS NOT NULL THEN 'memory_spent'
        WHEN e.stop = 'budget' AND e.end_rem_chunk <= 0 THEN 'chunk_budget'
        WHEN e.stop = 'budget' THEN 'input_budget'
        ELSE 'unrecorded'
    END AS cause
FROM piece p
    LEFT JOIN said d ON d.rank = p.rank AND d.pass = p.pass AND d.name = p.name
    LEFT JOIN ending e ON e.rank = p.rank AND e.pass = p.pass
WHERE p.pass IS NOT NULL AND NOT p.deciding;

-- While the gates stay shut, what others took from the overtaken is still theirs: these would be running.
CREATE TEMP TABLE tail AS
SELECT p.id, p.slot, p.behind, p.gated FROM piece p
WHERE p.pass IS NULL AND p.gated > 0 AND EXISTS (
    FROM judged j WHERE j.id = p.id AND j.pass = p.behind AND j.cause IN ('overtaken', 'held_back'));

INSERT INTO judged
SELECT j.* REPLACE (0 AS ns, t.gated AS gated, 0 AS times)
FROM tail t JOIN judged j ON j.id = t.id AND j.pass = t.behind;
"""

_CHARGED = """
-- Nothing below asks what passes said; of a long run that is much memory.
DROP TABLE said;

CREATE TEMP TABLE charge AS
WITH gated AS (
    SELECT id, rank, gate, mark, setter, steps, gated FROM judged
    WHERE gated > 0 AND cause NOT IN ('overtaken', 'held_back')
    UNION ALL
    SELECT id, rank, gate, mark, setter, steps, gated FROM piece ANTI JOIN tail USING (id, slot)
    WHERE pass IS NULL AND gated > 0
),
single AS (
    SELECT id, 'step_in_progress' AS cause, NULL AS name, NULL AS reason, ns, 0 AS gated, 1 AS times, NULL AS pass,
        NULL AS step, NULL AS running, NULL AS short
    FROM early WHERE ns > 0
    UNION ALL SELECT id, 'gap', NULL, NULL, gap, 0, 1, NULL, NULL, NULL, NULL FROM early WHERE gap > 0
    UNION ALL SELECT id, 'gap', NULL, NULL, gap, 0, 1, NULL, NULL, NULL, NULL FROM piece WHERE gap > 0
    UNION ALL SELECT id, 'deciding', NULL, NULL, ns, 0, 1, pass, NULL, NULL, NULL FROM piece WHERE deciding
    UNION ALL
    SELECT id, 'step_in_progress', NULL, NULL, ns, 0, 1, NULL, NULL, NULL, NULL FROM piece WHERE pass IS NULL AND ns > 0
    UNION ALL
    SELECT g.id, CASE g.gate WHEN 'batch_is_full' THEN 'batch_full' WHEN 'no_slot' THEN 'no_slot'
            WHEN 'min_free_slots_delay' THEN 'min_free_slots_delay' ELSE 'step_in_progress' END,
        e.head, coalesce(e.head_reason, e.spent_reason, e.stop), g.gated, g.gated, g.steps, g.mark, g.setter,
        t.running, e.head_short
    FROM gated g
        LEFT JOIN ending e ON e.rank = g.rank AND e.pass = g.mark
        LEFT JOIN step t ON t.rank = g.rank AND t.step = g.setter
    UNION ALL
    SELECT id, cause,
        CASE cause WHEN 'held_back' THEN n.name WHEN 'blocked_head' THEN head END,
        CASE cause WHEN 'memory' THEN reason WHEN 'blocked_head' THEN head_reason WHEN 'no_slot' THEN stop END,
        CASE cause WHEN 'held_back' THEN ns + gated ELSE ns END, CASE cause WHEN 'held_back' THEN gated ELSE 0 END,
        times, pass, NULL, NULL,
        CASE cause WHEN 'memory' THEN short WHEN 'blocked_head' THEN head_short END
    FROM judged LEFT JOIN name n ON n.rid = judged.partner LEFT JOIN ending USING (rank, pass)
    WHERE cause NOT IN ('overtaken', 'memory_spent', 'input_budget', 'chunk_budget', 'prefill_max_requests')
),
overtaken AS (
    SELECT j.*, e.active_policy, e.only_one FROM judged j JOIN ending e ON e.rank = j.rank AND e.pass = j.pass
    WHERE j.cause = 'overtaken'
),
-- `total` is what was computed for all that overtook it.
summed AS (
    SELECT *, only_one AS total FROM overtaken WHERE only_one IS NOT NULL
    UNION ALL
    SELECT o.*, late.upto FROM (FROM overtaken WHERE only_one IS NULL) o ASOF JOIN joined late
        ON late.rank = o.rank AND late.pass = o.pass AND o.entry < late.entry
),
-- A piece is shared by what was computed for each; differences of running sums keep the shares whole.
shared AS (
    SELECT o.id, CASE
            WHEN o.urgency <> l.urgency THEN 'priority'
            WHEN o.active_policy IN ('lpm', 'priority') AND NOT o.deprioritized AND l.matched > o.matched
                THEN 'longer_match'
            ELSE 'order' END AS cause,
        l.name, NULL AS reason, o.ns + o.gated AS ns, o.gated, l.upto, l.extend_len AS own, o.total, o.times, o.pass,
        NULL AS short
    FROM summed o JOIN joined l ON l.rank = o.rank AND l.pass = o.pass AND l.entry > o.entry
    UNION ALL
    SELECT j.id, j.cause, s.name, coalesce(j.reason, e.head_reason, e.spent_reason, e.stop), j.ns, 0,
        coalesce(s.upto, 1), coalesce(s.extend_len, 1), coalesce(s.total, 1), 1, j.pass, coalesce(j.short, e.head_short)
    FROM judged j JOIN ending e ON e.rank = j.rank AND e.pass = j.pass
        LEFT JOIN spender s ON s.rank = j.rank AND s.pass = j.pass
    WHERE j.cause IN ('memory_spent', 'input_budget', 'chunk_budget', 'prefill_max_requests')
)
FROM single
UNION ALL
SELECT id, cause, name, reason,
    ns // total * own + ns % total * upto // total - ns % total * (upto - own) // total,
    gated // total * own + gated % total * upto // total - gated % total * (upto - own) // total,
    times, pass, NULL, NULL, short
FROM shared;
"""


def charge(connection: duckdb.DuckDBPyConnection) -> None:
    """Make the tables `span` and `charge` out of the log's.

    Args:
        connection: with the columns above of `events` and `requests` of those whose time is charged, and as far as
            their spans reach of `steps`, `passes` and `decisions`; of the latter two also one recorded pass before, and
            passes that set a batch-full mark that they met.
    """
    connection.execute(_STEPS + _SLOTS + _STAYS + _SPANS + _PIECES + _SAID + _JUDGED + _CHARGED)


def queued_ns(connection: duckdb.DuckDBPyConnection) -> int:
    """What all requests spent in the queue, together, without what for.

    Args:
        connection: with the log's tables `steps`, `events` and `requests`.
    """
    connection.begin()
    try:
        connection.execute(_STEPS + _STAYS)
        total: int
        ((total,),) = connection.execute("SELECT coalesce(sum(leave_ns - enter_ns), 0)::BIGINT FROM stay").fetchall()
        return total
    finally:
        connection.rollback()  # the tables go
