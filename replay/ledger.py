"""What a request waited for: its time in the queue, charged to causes and to other requests.

Every nanosecond between joining the queue and leaving it is charged once, as whole numbers: the parts of a request sum
to its queue time exactly, and a run's ledger is the sum of its requests'. Time goes to the decision that was in force:
what a step decided about a request is why it still waited until the next step began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.replay.charges import (
    DECISION_COLUMNS,
    EVENT_COLUMNS,
    PASS_COLUMNS,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    charge,
)

CAUSES = {
    "longer_match": "overtaken by requests with a longer match",
    "priority": "overtaken by requests of higher priority",
    "order": "overtaken, as the policy orders",
    "held_back": "held back as a duplicate",
    "memory": "did not fit into memory itself",
    "blocked_head": "behind a request that did not fit into memory",
    "memory_spent": "memory was spent by others",
    "input_budget": "the prefill budget was spent by others",
    "chunk_budget": "the chunk was spent by others",
    "prefill_max_requests": "the prefill batch had all the requests it may",
    "no_slot": "no running slot",
    "batch_full": "the batch was marked full earlier",
    "min_free_slots_delay": "fewer free slots than min_free_slots_delay asks for",
    "delayer": "the prefill delayer said wait",
    "step_in_progress": "a step was under way",
    "deciding": "being admitted",
    "gap": "records are missing",
    "unrecorded": "what was decided about it was not recorded",
}
"""Everything that a part can be charged to, with words for people."""


class Part(NamedTuple):
    """Some of a request's time in the queue."""

    cause: str
    """A key of CAUSES."""
    after: str | None
    """`retracted` or `preempted`: back in the queue after that; None: before it was first admitted."""
    rid: str | None
    """Whom it is charged to: who overtook it, whom it was held back for, who blocked the queue or spent the budget;
    None if to no request."""
    reason: str | None
    """Finer: the verdict's reason behind a refusal, the stop that set the batch-full mark; None if a gate set it."""
    ns: int
    gated_ns: int
    """Of it in steps that a gate ended before a pass, with the pass before still in force."""
    times: int
    """Passes that decided so, or steps, of causes that need no pass."""
    first_pass: int | None
    last_pass: int | None
    worst_pass: int | None
    """The pass that cost most of it."""
    short: int | None
    """Tokens that were missing, at most; None where no tokens were counted."""
    first_step: int | None
    """The first step whose gate found no running slot, and so marked the batch full; None: passes decided so."""
    last_step: int | None
    running: int | None
    """Requests that ran when they did."""
    slots: int | None
    """Of so many that may run; None also where it is not known."""


class Span(NamedTuple):
    """A stay in the queue."""

    after: str | None
    """`retracted`, `preempted`, or None: the first one."""
    by: str | None
    """The request that it was preempted for."""
    lost_pass: int | None
    """The pass that preempted it."""
    enter_ns: int
    leave_ns: int
    left_as: str | None
    """`admitted`, or the request's `end_reason` if it ended in the queue; None: it still waits."""
    first_pass: int | None
    """The first pass that looked at the queue with it; None: none did."""
    last_pass: int | None
    """The pass that admitted it, or the last one without."""

    @property
    def ns(self) -> int:
        """Its length."""
        return self.leave_ns - self.enter_ns


class RequestLedger(NamedTuple):
    """A request's time in the queue."""

    rank: int
    rid: str
    spans: tuple[Span, ...]
    parts: tuple[Part, ...]
    """Largest first. They sum to `queued_ns`."""
    lives: int
    """Requests of this name on this rank; this is the last of them."""
    worst_pass: int | None
    """The pass it waited in that cost it most, whatever that was charged to."""
    unmeasured: int
    """Stays after a retraction or preemption that were not recorded, at levels below `decisions`."""

    @property
    def queued_ns(self) -> int:
        """All its time in the queue."""
        return sum(span.ns for span in self.spans)

    @property
    def waits(self) -> bool:
        """It is in the queue at the end of what was recorded."""
        return bool(self.spans) and self.spans[-1].left_as is None

    def by_cause(self) -> dict[tuple[str, str | None], int]:
        """Nanoseconds by cause and by what the stay came after, largest first."""
        sums: dict[tuple[str, str | None], int] = {}
        for part in self.parts:
            sums[part.cause, part.after] = sums.get((part.cause, part.after), 0) + part.ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class CostliestMark(NamedTuple):
    """The mark that cost most, of all that were set for the same reason."""

    reason: str | None
    """As in Part."""
    rank: int
    pass_number: int | None
    """The pass that set it."""
    step: int | None
    """The step whose gate set it."""
    running: int | None
    slots: int | None
    """As in Part, with `running`."""


class CauseTotal(NamedTuple):
    """What a cause cost all requests of a run."""

    cause: str
    after: str | None
    ns: int
    requests: int
    """That it was charged to."""
    times: int
    worst_rank: int
    worst_rid: str
    """The request that it cost most."""
    worst_ns: int
    mark: CostliestMark | None
    """Of `batch_full`, which has a total for each reason that the mark was set for; None: it is not known."""


class Blame(NamedTuple):
    """What one request cost others by one cause."""

    cause: str
    rank: int
    rid: str
    ns: int
    requests: int
    times: int
    worst_pass: int | None


class RunLedger(NamedTuple):
    """The time in the queue of all requests of a run."""

    queued_ns: int
    requests: int
    causes: tuple[CauseTotal, ...]
    """Largest first. They sum to `queued_ns`."""
    blamed: tuple[Blame, ...]
    """The requests that cost others most, largest first."""
    waited: tuple[tuple[int, str, int], ...]
    """Who waited longest: rank, rid, ns."""
    open: int
    """Requests that still wait."""
    unmeasured: int
    """Stays after a retraction or preemption that were not recorded, at levels below `decisions`."""


_NEAR = 256
"""Steps before a request that are read with it at first: further back are only idle turns and long-lived marks."""

Rows = Mapping[str, list[dict[str, Any]]]
"""What `Run.request_rows` gives."""


def request_ledger(run: Run, rid: str, rank: int | None = None) -> RequestLedger:
    """What a request waited for; of several of this name the last one.

    Reads what happened while it waited, not the whole run. Raises RunNotFoundError for an unknown request or rank.
    """
    return ledger_of(run, rid, rank)[0]


def ledger_of(run: Run, rid: str, rank: int | None = None) -> tuple[RequestLedger, Rows]:
    """The same with the request's own rows: of `decisions` in ascending order of passes, `events` and `requests`."""
    with ThreadPoolExecutor(1) as beside:
        # The database takes as long to start as the rows to be read, and there is too little to share between threads.
        starting = beside.submit(duckdb.connect, config={"threads": 1})
        rows = run.request_rows(rid, rank)
        rank = _rank_of(rows) if rank is None else rank
        life = _last_life(run, rank, rows)
        tables = _tables_around(run, rank, life)
        connection = starting.result()
    for name, table in tables.items():
        connection.register(name, table)
    charge(connection)
    measured = run.manifest.detail.level in {"decisions", "full"}
    lost = sum(row["retractions"] + row["preemptions"] for row in life["requests"])
    spans = tuple(_span(run, rank, rid, *row) for row in connection.execute(_SPANS).fetchall())
    slots = _slots(run, rank)
    parts = tuple(
        Part._make((*row, None if row[-1] is None else slots)) for row in connection.execute(_PARTS).fetchall()
    )
    worst = connection.execute(_WORST_PASS).fetchall()
    worst_pass = worst[0][0] if worst else None
    return RequestLedger(rank, rid, spans, parts, _lives(rows), worst_pass, 0 if measured else lost), life


def run_ledger(run: Run, most: int = 10) -> RunLedger:
    """What all requests of a run waited for. Raises RunNotFoundError for one in which nothing was recorded.

    Args:
        most: how many requests to name.
    """
    run.check_recorded()
    connection = run.connect(["steps", "passes", "decisions", "events", "requests"])
    connection.execute("SET preserve_insertion_order = false")
    charge(connection)

    def all_of(query: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = connection.execute(query, [most] if "?" in query else []).fetchall()
        return rows

    ((queued_ns, requests, still),) = all_of(_TOTAL)
    ((lost,),) = all_of("SELECT coalesce(sum(retractions + preemptions), 0)::BIGINT FROM requests")
    return RunLedger(
        queued_ns=queued_ns,
        requests=requests,
        causes=tuple(CauseTotal._make((*row[:8], _mark(run, *row[8:]))) for row in all_of(_CAUSES)),
        blamed=tuple(Blame(*row) for row in all_of(_BLAMED)),
        waited=tuple((rank, rid, ns) for rank, rid, ns in all_of(_WAITED)),
        open=still,
        unmeasured=0 if run.manifest.detail.level in {"decisions", "full"} else lost,
    )


_SPANS = """
SELECT s.after, s.lost_pass, s.enter_ns, s.leave_ns, s.left_as, min(p.pass), max(p.pass)
FROM span s LEFT JOIN piece p ON p.id = s.id
GROUP BY ALL ORDER BY s.enter_ns
"""
_PARTS = """
SELECT c.cause, s.after, n.rid, c.reason, sum(c.ns)::BIGINT AS ns, sum(c.gated)::BIGINT, sum(c.times)::BIGINT,
    min(c.pass), max(c.pass), arg_max(c.pass, (c.ns, -c.pass)), max(c.short)::BIGINT,
    min(c.step), max(c.step), c.running
FROM charge c JOIN span s ON s.id = c.id LEFT JOIN name n ON n.name = c.name
GROUP BY c.cause, s.after, n.rid, c.reason, c.running ORDER BY ns DESC, c.cause, n.rid, c.reason, c.running
"""
_WORST_PASS = """
SELECT pass FROM charge SEMI JOIN piece USING (pass) WHERE cause <> 'deciding'
GROUP BY pass ORDER BY sum(ns) DESC, pass LIMIT 1
"""
_TOTAL = """
SELECT coalesce(sum(leave_ns - enter_ns), 0)::BIGINT, count(DISTINCT (rank, rid)), count(*) FILTER (left_as IS NULL)
FROM span
"""
_CAUSES = """
WITH each AS (
    SELECT cause, id, CASE cause WHEN 'batch_full' THEN reason END AS reason,
        CASE cause WHEN 'batch_full' THEN running END AS running, sum(ns)::BIGINT AS ns, sum(times)::BIGINT AS times
    FROM charge GROUP BY ALL
), mine AS (
    SELECT e.cause, s.after, e.reason, e.running, s.name, s.rank, sum(e.ns)::BIGINT AS ns,
        sum(e.times)::BIGINT AS times
    FROM each e JOIN span s ON s.id = e.id GROUP BY ALL
), worst AS (
    SELECT cause, after, reason, running, sum(ns)::BIGINT AS ns, count(*) AS requests, sum(times)::BIGINT AS times,
        arg_max(rank, (ns, -rank, -name)) AS rank, arg_max(name, (ns, -rank, -name)) AS name, max(ns) AS worst_ns
    FROM mine GROUP BY cause, after, reason, running
), mark AS (
    SELECT s.after, c.reason, c.running, s.rank, c.pass, c.step, sum(c.ns)::BIGINT AS ns
    FROM charge c JOIN span s ON s.id = c.id WHERE c.cause = 'batch_full' AND coalesce(c.pass, c.step) IS NOT NULL
    GROUP BY ALL
), costliest AS (
    FROM mark QUALIFY row_number() OVER (
        PARTITION BY after, reason, running ORDER BY ns DESC, rank, coalesce(pass, step)) = 1
)
SELECT w.cause, w.after, w.ns, w.requests, w.times, w.rank, n.rid, w.worst_ns, m.rank, w.reason, m.pass, m.step,
    w.running
FROM worst w JOIN name n USING (name) LEFT JOIN costliest m ON w.cause = 'batch_full'
    AND m.after IS NOT DISTINCT FROM w.after AND m.reason IS NOT DISTINCT FROM w.reason
    AND m.running IS NOT DISTINCT FROM w.running
ORDER BY w.ns DESC, w.cause, w.after, w.reason, w.running
"""
_BLAMED = """
WITH other AS (
    SELECT c.cause, s.rank, c.name, c.ns, c.times, c.pass, s.name AS whose
    FROM charge c JOIN span s ON s.id = c.id WHERE c.name IS NOT NULL AND c.name <> s.name
), most AS (
    SELECT cause, rank, name, sum(ns)::BIGINT AS ns FROM other GROUP BY ALL ORDER BY ns DESC, name, cause, rank LIMIT ?
)
SELECT m.cause, m.rank, n.rid, m.ns, count(DISTINCT o.whose), sum(o.times)::BIGINT,
    arg_max(o.pass, (o.ns, -o.pass))
FROM most m JOIN name n USING (name) JOIN other o ON (o.cause, o.rank, o.name) = (m.cause, m.rank, m.name)
GROUP BY ALL ORDER BY m.ns DESC, n.rid, m.cause, m.rank
"""
_WAITED = """
SELECT rank, rid, sum(leave_ns - enter_ns)::BIGINT AS ns FROM span GROUP BY rank, rid
ORDER BY ns DESC, rid, rank LIMIT ?
"""


def _mark(
    run: Run, rank: int | None, reason: str | None, number: int | None, step: int | None, running: int | None
) -> CostliestMark | None:
    if rank is None:
        return None
    slots = None if running is None else _slots(run, rank)
    return CostliestMark(reason, rank, number, step, running, slots)


def _slots(run: Run, rank: int) -> int | None:
    slots: int | None = run.manifest.config_of(rank).get("max_running_requests")
    return slots


def _span(
    run: Run,
    rank: int,
    rid: str,
    after: str | None,
    lost_pass: int | None,
    enter_ns: int,
    leave_ns: int,
    left_as: str | None,
    first_pass: int | None,
    last_pass: int | None,
) -> Span:
    by = None
    if after == "preempted" and lost_pass is not None:
        decisions = run.pass_rows(rank, lost_pass)["decisions"]
        by = next((row["rid"] for row in decisions if rid in row["preempted"]), None)
    return Span(after, by, lost_pass, enter_ns, leave_ns, left_as, first_pass, last_pass)


# ---- what of the log a request's ledger needs ----------------------------------------------------------------


def _rank_of(rows: Rows) -> int:
    """The rank that knows the request; the last one to hear of it if several do."""
    ranks: list[int] = sorted({row["rank"] for name in ("requests", "events", "decisions") for row in rows[name]})
    ended = {row["rank"]: row["finish_ns"] for row in rows["requests"]}
    return max(ranks, key=lambda rank: (rank not in ended, ended.get(rank, 0)))


def _lives(rows: Rows) -> int:
    arrived: int = sum(row["kind"] == "arrive" for row in rows["events"])
    return max(arrived, len(rows["requests"]))


def _last_life(run: Run, rank: int, rows: Rows) -> Rows:
    """The rows of the last request of this name."""
    mine = {name: [row for row in rows[name] if row["rank"] == rank] for name in rows}
    if _lives(mine) < 2:
        return mine
    events = sorted(mine["events"], key=lambda row: row["seq"])
    arrivals = [row for row in events if row["kind"] == "arrive"]
    if not arrivals:
        return {**mine, "requests": mine["requests"][-1:]}
    last = arrivals[-1]
    passes = run.table("passes", rank, ["pass", "seq"])
    later = passes.filter(pc.greater(passes["seq"], last["seq"]))["pass"]
    first = later[0].as_py() if len(later) else None
    return {
        "events": [row for row in events if row["seq"] >= last["seq"]],
        "requests": mine["requests"][len(arrivals) - 1 :][-1:],
        "decisions": [row for row in mine["decisions"] if first is not None and row["pass"] >= first],
    }


def _tables_around(run: Run, rank: int, life: Rows) -> dict[str, pa.Table]:
    """The log's tables as far as a request's time in the queue needs them."""
    seen = [row["pass"] for row in life["decisions"]]
    around = (min(seen) - run.manifest.detail.sample, max(seen)) if seen else None
    steps = _steps_around(run, rank, life, around)
    passes = [run.table("passes", rank, PASS_COLUMNS, around)] if around else []
    decisions = [run.table("decisions", rank, DECISION_COLUMNS, around)] if around else []
    for mark in pc.unique(steps["batch_is_full_pass"].drop_null()).to_pylist():
        if around is None or not around[0] <= mark <= around[1]:
            passes.append(run.table("passes", rank, PASS_COLUMNS, (mark, mark)))
            decisions.append(run.table("decisions", rank, DECISION_COLUMNS, (mark, mark)))
    return {
        "steps": steps,
        "passes": _concat("passes", PASS_COLUMNS, passes),
        "decisions": _concat("decisions", DECISION_COLUMNS, decisions),
        "events": _rows("events", EVENT_COLUMNS, life["events"]),
        "requests": _rows("requests", REQUEST_COLUMNS, life["requests"]),
    }


def _steps_around(run: Run, rank: int, life: Rows, around: tuple[int, int] | None) -> pa.Table:
    """The steps while it may have waited, and one before and behind; before, also what set the mark that it met."""
    told = [row["step"] for row in life["events"]]
    if around is None:
        return _steps_of(run.table("steps", rank, STEP_COLUMNS), life)[1]
    ended = bool(told and life["requests"])
    steps = run.table("steps", rank, STEP_COLUMNS, around, (min(told) - _NEAR, max(told) + 1) if ended else None)
    known = range(steps["step"][0].as_py(), steps["step"][-1].as_py() + 1) if len(steps) else range(0)
    if all(step in known for step in told):
        start, near = _steps_of(steps, life)
        if told and (start or known[0] == 0):
            return near
    return _steps_of(run.table("steps", rank, STEP_COLUMNS), life)[1]


def _steps_of(steps: pa.Table, life: Rows) -> tuple[int, pa.Table]:
    """Those of some steps, and the place of the first."""
    ended = life["requests"][-1:]
    if ended:
        (row,) = ended
        first_ns, last_ns = row["arrive_ns"], row["finish_ns"]
        if row["admit_ns"] is not None and not row["retractions"] + row["preemptions"]:
            last_ns = row["admit_ns"]
        before = pc.sum(pc.less_equal(steps["start_ns"], first_ns)).as_py() or 0
        until = pc.sum(pc.less_equal(steps["start_ns"], last_ns)).as_py() or 0
    else:
        first = min((row["step"] for row in life["events"]), default=0)
        before, until = pc.sum(pc.less(steps["step"], first)).as_py() or 0, len(steps)
    start = max(before - 1, 0)
    if len(steps):
        unmarked = pc.fill_null(pc.not_equal(steps["gate"].slice(0, start + 1), "batch_is_full"), True)
        start = pc.max(pc.indices_nonzero(unmarked)).as_py() or 0
    return start, steps.slice(start, until + 1 - start)


def _concat(name: str, columns: Iterable[str], pieces: list[pa.Table]) -> pa.Table:
    empty = TABLES[name].arrow.empty_table().select(list(columns))
    return pa.concat_tables([empty, *pieces])


def _rows(name: str, columns: Iterable[str], rows: list[dict[str, Any]]) -> pa.Table:
    schema = pa.schema([TABLES[name].arrow.field(column) for column in columns])
    return pa.Table.from_pylist([{column: row[column] for column in columns} for row in rows], schema=schema)
