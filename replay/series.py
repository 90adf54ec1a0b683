"""A run over time: the one source of what the terminal and the browser draw.

A `Timeline` condenses a run, as it is at one moment, into tables in memory; every question to it is about a `Window`,
a piece of time cut into equal buckets, and is answered in some tens of milliseconds, however long the run. Answers
are Arrow tables with a row per bucket, so that two views of a window can be laid side by side.

    timeline = Timeline.open(run)
    window = timeline.window(buckets=200)
    timeline.load(window), timeline.latency(window), timeline.shares("refused", window)

All times are nanoseconds of the run's monotonic clock. A pass counts when its step begins, a first token and an
admission when they happen.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.errors import RunNotFoundError, UsageError
from schedscope.recorder.manifest import Gap
from schedscope.recorder.run import Run
from schedscope.replay.anomalies import ANOMALIES, Anomaly, anomaly_words
from schedscope.replay.condense import CONDENSED, EXTENT, LASTING, POLICY, condense
from schedscope.replay.told import (
    Extent,
    Forgone,
    Found,
    HeatMap,
    RankExtent,
    Served,
    Stretch,
    Stretches,
    Turn,
)
from schedscope.replay.window import Window, bucket, frame, lasting, parameters, row_keys, within

Share = Literal["refused", "delayer", "prefillable", "gate", "policy", "stop"]
Lasting = Literal["policy", "gate", "gap"]
Answer = TypeVar("Answer")

_MOST = 300
"""Stretches that a view can show."""


class Timeline:
    """A run as it was when this was made. Use from any thread; questions are answered one after the other.

    To see more of a run that is being recorded, make another one.
    """

    def __init__(
        self, extent: Extent, gaps: tuple[Gap, ...], connection: duckdb.DuckDBPyConnection, *, brief: bool
    ) -> None:
        """Use `open`."""
        self.extent = extent
        self._brief = brief
        self.gaps = gaps
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, run: Run, *, last_s: float | None = None, memory_mb: int | None = None, brief: bool = False
    ) -> Timeline:
        """Condense a run. Raises RunFormatError, RunNotFoundError.

        Args:
            last_s: only its last seconds, which takes as long however long the run is: for one that goes on. Requests
                that came before and have not ended are left out. None: all of it; some seconds per million requests.
            memory_mb: what this and all questions may take; the rest goes to temporary files. None: there is no limit.
            brief: in a third of the time; nothing is known of the parts of a time to first token but the queue, nor of
                what was evicted and then needed.
        """
        level = run.manifest.detail.level
        connection = run.connect(list(CONDENSED))
        if memory_mb is not None:
            connection.execute(f"SET memory_limit = '{memory_mb}MB'")
            connection.execute("SET temp_directory = ?", [tempfile.gettempdir()])
            connection.execute("SET threads = 2; SET preserve_insertion_order = false")
            connection.execute("SET allocator_flush_threshold = '4MB'")
        try:
            condense(connection, level, last_s, brief=brief)
        except duckdb.OutOfMemoryException:
            # Some of it can't be done in pieces. Rather take more than show nothing.
            if memory_mb is None:
                raise
            connection.close()
            return cls.open(run, last_s=last_s, brief=brief)
        ranks = tuple(RankExtent(*row) for row in connection.execute(EXTENT).fetchall())
        if not ranks:
            raise RunNotFoundError(f"run {run.where} has no step yet")
        extent = Extent(
            first_ns=min(each.first_ns for each in ranks),
            last_ns=max(each.last_ns for each in ranks),
            passes=sum(each.passes for each in ranks),
            requests=sum(each.requests for each in ranks),
            ranks=ranks,
            level=level,
        )
        return cls(extent, tuple(run.gaps), connection, brief=brief)

    # ---- windows -------------------------------------------------------------------------------------------

    def window(
        self,
        begin_ns: int | None = None,
        end_ns: int | None = None,
        *,
        passes: tuple[int, int] | None = None,
        buckets: int = 200,
        rank: int | None = None,
    ) -> Window:
        """A window on the run, by default on all of it.

        Args:
            passes: from the begin of one pass to the end of the step of another, of `rank` (by default the first).

        Raises UsageError for an empty one, RunNotFoundError for a rank or pass that isn't there.
        """
        if buckets < 1:
            raise UsageError(f"{buckets} buckets: at least one is needed")
        if passes is not None:
            begin_ns, end_ns = self._pass_times(passes, self.extent.ranks[0].rank if rank is None else rank)
        if rank is not None and rank not in {each.rank for each in self.extent.ranks}:
            raise RunNotFoundError(f"no rank {rank} in this run")
        begin = self.extent.first_ns if begin_ns is None else begin_ns
        end = self.extent.last_ns + 1 if end_ns is None else end_ns
        if end <= begin:
            raise UsageError(f"a window from {begin} to {end} ns is empty")
        return Window(begin, end, buckets, rank)

    def pass_at(self, ns: int, rank: int) -> int | None:
        """The last pass of a rank that began at a time or before it; None: there is none."""
        found = self._ask("SELECT max(pass) AS pass FROM turns WHERE rank = ? AND ns <= ?", [rank, ns])
        number: int | None = found["pass"][0].as_py()
        return number

    def _pass_times(self, passes: tuple[int, int], rank: int) -> tuple[int, int]:
        found = self._ask(
            "SELECT min(ns) AS begin, max(end_ns) AS end FROM turns WHERE rank = ? AND pass BETWEEN ? AND ?",
            [rank, *passes],
        ).to_pylist()[0]
        if found["begin"] is None:
            raise RunNotFoundError(f"no pass from {passes[0]} to {passes[1]} of rank {rank} in this run")
        return found["begin"], found["end"] + 1

    # ---- a row per bucket ----------------------------------------------------------------------------------

    def load(self, window: Window, *, by_rank: bool = False) -> pa.Table:
        """What the scheduler had to do and did, a row per bucket (and rank).

        Columns: `bucket`, `begin_ns`; `steps`, `passes`; `queue_max`, `running_max` (requests, the largest at a
        step's begin, or left by one that lasts all of the bucket; null: there is none); `used_max`,
        `cached_max` (share of the KV pool, 0..1, held by requests, and held for reuse only); `admitted` (requests,
        first admissions), `prompt_tokens`, `cached_tokens` (of those), `hit_rate` (0..1; null: none was admitted);
        `again`, `again_tokens`, `again_cached` (admissions after a retraction or preemption; null where events are
        not recorded); `needed`, `needed_tokens` (requests admitted although a prefix of theirs was evicted while they
        waited, and what they compute again because of it; null where decisions are not recorded); `computed_tokens`
        (by the model, decoding included); `evicted_tokens` (null where evictions are not recorded); `retractions`,
        `preemptions`; `busy_s` (time in steps that were not idle).
        """
        keys, joined = row_keys(by_rank)
        known = self.extent.level in {"decisions", "full"}
        found = known and not self._brief
        evictions = "coalesce(sum(evicted), 0)::BIGINT" if self.extent.level == "full" else "NULL::BIGINT"
        return self._ask(
            f"""
            WITH {frame(by_rank)}, done AS (
                SELECT {bucket("ns", by_rank)},
                    sum(count)::BIGINT AS steps, count(pass) AS passes, max(queue_len) AS queue_max, {_LARGEST},
                    sum(batch_tokens)::BIGINT AS computed_tokens,
                    {evictions} AS evicted_tokens, sum(retracted)::BIGINT AS retractions,
                    sum(preempted)::BIGINT AS preemptions,
                    coalesce(sum(end_ns - ns) FILTER (kind <> 'idle'), 0) / 1e9 AS busy_s
                FROM turns WHERE {within("ns")} GROUP BY ALL
            ), under_way AS (
                SELECT {keys}, max(waiting) AS queue_max, {_LARGEST}
                FROM {lasting("turns", "ns", "ns + lasts_ns")} GROUP BY ALL
            ), joined AS (
                SELECT {bucket("admit_ns", by_rank)}, count(*) AS admitted,
                    sum(prompt_tokens)::BIGINT AS prompt_tokens, sum(cached_tokens)::BIGINT AS cached_tokens
                FROM measured WHERE {within("admit_ns")} GROUP BY ALL
            ), returned AS (
                SELECT {bucket("ns", by_rank)}, count(*) AS again, sum(tokens)::BIGINT AS again_tokens,
                    sum(cached)::BIGINT AS again_cached
                FROM again WHERE {within("ns")} GROUP BY ALL
            ), forgone AS (
                SELECT {bucket("admit_ns", by_rank)}, count(*) AS needed, sum(lost)::BIGINT AS needed_tokens
                FROM needed WHERE {within("admit_ns")} GROUP BY ALL
            )
            SELECT {keys}, $begin + bucket * $width::BIGINT AS begin_ns,
                coalesce(steps, 0) AS steps, coalesce(passes, 0) AS passes,
                greatest(done.queue_max, under_way.queue_max) AS queue_max,
                greatest(done.running_max, under_way.running_max) AS running_max,
                greatest(done.used_max, under_way.used_max) AS used_max,
                greatest(done.cached_max, under_way.cached_max) AS cached_max,
                coalesce(admitted, 0) AS admitted, coalesce(prompt_tokens, 0) AS prompt_tokens,
                coalesce(cached_tokens, 0) AS cached_tokens, cached_tokens / prompt_tokens AS hit_rate,
                {_or_null("again", known)}, {_or_null("again_tokens", known)}, {_or_null("again_cached", known)},
                {_or_null("needed", found)}, {_or_null("needed_tokens", found)},
                coalesce(computed_tokens, 0) AS computed_tokens,
                {_or_null("evicted_tokens", self.extent.level == "full")},
                coalesce(retractions, 0) AS retractions, coalesce(preemptions, 0) AS preemptions,
                coalesce(busy_s, 0) AS busy_s
            FROM frame LEFT JOIN done USING ({joined}) LEFT JOIN under_way USING ({joined})
            LEFT JOIN joined USING ({joined}) LEFT JOIN returned USING ({joined})
            LEFT JOIN forgone USING ({joined}) ORDER BY {keys}
            """,
            parameters(window),
        )

    def latency(self, window: Window, *, by_rank: bool = False) -> pa.Table:
        """How long requests waited, a row per bucket (and rank). Exact quantiles, seconds; null: nobody was there.

        Columns: `bucket`, `begin_ns`; `first_tokens` (requests whose first token came in it), `ttft_p50`, `ttft_p90`,
        `ttft_p99`, and the mean of its parts, `waited_mean`, `prefill_mean`, `scheduling_mean`; `admitted` (requests
        that were first admitted in it), `queue_p50`, `queue_p99` (from arrival to admission).
        """
        keys, joined = row_keys(by_rank)
        return self._ask(
            f"""
            WITH {frame(by_rank)}, first AS (
                SELECT {bucket("first_token_ns", by_rank)}, count(*) AS first_tokens,
                    quantile_cont(ttft_ns, [0.5, 0.9, 0.99]) AS ttft, avg(waited_ns) / 1e9 AS waited_mean,
                    avg(prefill_ns) / 1e9 AS prefill_mean, avg(scheduling_ns) / 1e9 AS scheduling_mean
                FROM measured WHERE {within("first_token_ns")} GROUP BY ALL
            ), joined AS (
                SELECT {bucket("admit_ns", by_rank)}, count(*) AS admitted,
                    quantile_cont(waited_ns, [0.5, 0.99]) AS waited
                FROM measured WHERE {within("admit_ns")} GROUP BY ALL
            )
            SELECT {keys}, $begin + bucket * $width::BIGINT AS begin_ns, coalesce(first_tokens, 0) AS first_tokens,
                ttft[1] / 1e9 AS ttft_p50, ttft[2] / 1e9 AS ttft_p90, ttft[3] / 1e9 AS ttft_p99,
                waited_mean, prefill_mean, scheduling_mean, coalesce(admitted, 0) AS admitted,
                waited[1] / 1e9 AS queue_p50, waited[2] / 1e9 AS queue_p99
            FROM frame LEFT JOIN first USING ({joined}) LEFT JOIN joined USING ({joined}) ORDER BY {keys}
            """,
            parameters(window),
        )

    def shares(self, of: Share, window: Window, *, by_rank: bool = False) -> pa.Table:
        """What a bucket's time, passes or refusals were made of: a row per bucket (and rank) and `what` occurs in it.

        - `refused`: why requests that a pass looked at were not admitted; `count` (requests), `tokens` (of their
          prompts, not cached). Needs recorded decisions.
        - `stop`: what ended passes; `delayer`: verdicts of the prefill delayer; `prefillable`: which ranks could
          prefill as it saw it; `policy`: the active policy, with a fallback's reason in brackets; `count` (passes).
        - `gate`: what ended steps before a pass; `count` (steps), `seconds` (from their begin to their end).

        Columns: `bucket`, `what`, `count`, `tokens` or `seconds` as above (else null).
        """
        keys, _ = row_keys(by_rank)
        source, what, tokens, seconds = _SHARES[of]
        return self._ask(
            f"""
            SELECT {bucket("ns", by_rank)}, {what} AS what, count(*) AS count,
                {tokens} AS tokens, {seconds} AS seconds
            FROM {source} WHERE {within("ns")} AND {what} IS NOT NULL GROUP BY ALL ORDER BY {keys}, what
            """,
            parameters(window),
        )

    # ---- others --------------------------------------------------------------------------------------------

    def stretches(self, of: Lasting, window: Window, *, most: int = _MOST) -> Stretches:
        """Times in which the policy (with its fallback) or the gate stayed the same, or in which records are missing.

        Stretches that reach into the window; of more than `most` the longest.
        """
        if of == "gap":
            gaps = self._gaps(window)
            found, total = sorted(gaps, key=lambda each: each.begin_ns - each.end_ns)[:most], len(gaps)
        else:
            found, total = self._islands(of, window, most)
        return Stretches(tuple(sorted(found, key=lambda each: (each.begin_ns, each.rank))), total - len(found))

    def _islands(self, of: Lasting, window: Window, most: int) -> tuple[list[Stretch], int]:
        """The longest ones, and how many there are."""
        self._find_lasting()
        rows = self._ask(
            """
            SELECT * EXCLUDE (kind), count(*) OVER () AS others FROM lasting
            WHERE kind = $of AND end_ns >= $begin AND begin_ns < $end AND ($rank IS NULL OR rank = $rank)
            ORDER BY end_ns - begin_ns DESC, begin_ns, rank LIMIT $most
            """,
            {**parameters(window), "of": of, "most": most},
        )
        stretches = [Stretch(*list(row.values())[:-1]) for row in rows.to_pylist()]
        return stretches, rows["others"][0].as_py() if stretches else 0

    def _gaps(self, window: Window) -> list[Stretch]:
        extents = {each.rank: each for each in self.extent.ranks}
        found = []
        for gap in self.gaps:
            known = extents.get(gap.rank)
            if known is None or window.rank not in (None, gap.rank):
                continue
            begin, end = self._gap_times(gap, known)
            if end >= window.begin_ns and begin < window.end_ns:
                reach = (gap.after_pass, gap.before_pass)
                found.append(Stretch(gap.rank, gap.reason, begin, end, *reach, gap.frames))
        return found

    def _gap_times(self, gap: Gap, known: RankExtent) -> tuple[int, int]:
        """Between the recorded passes around it, or closer, where numbers of steps are missing there."""
        around = self._ask(
            "SELECT max(end_ns) FILTER (pass <= $after) AS begin_ns, min(ns) FILTER (pass >= $before) AS end_ns "
            "FROM turns WHERE rank = $rank",
            {"rank": gap.rank, "after": gap.after_pass, "before": gap.before_pass},
        ).to_pylist()[0]
        begin, end = around["begin_ns"] or known.first_ns, around["end_ns"] or known.last_ns
        hole = self._ask(
            """
            WITH told AS (
                SELECT end_ns AS begin_ns, step + count AS expected, lead(step) OVER loop AS step,
                    lead(ns) OVER loop AS end_ns
                FROM turns WHERE rank = $rank AND end_ns >= $begin AND ns <= $end WINDOW loop AS (ORDER BY step)
            ) SELECT min(begin_ns) AS begin_ns, max(end_ns) AS end_ns FROM told WHERE step <> expected
            """,
            {"rank": gap.rank, "begin": begin, "end": end},
        ).to_pylist()[0]
        return (begin, max(begin, end)) if hole["begin_ns"] is None else (hole["begin_ns"], hole["end_ns"])

    def heat_map(self, window: Window, *, rows: int = 24) -> HeatMap:
        """Times to first token in `rows` rows of equal ratio, from the shortest to the longest in the window."""
        source = f"FROM measured WHERE {within('first_token_ns')} AND ttft_ns IS NOT NULL"
        values = parameters(window)
        span = self._ask(f"SELECT min(ttft_ns) AS low, max(ttft_ns) AS high {source}", values).to_pylist()[0]
        low, high = max(span["low"] or 1, 1), max(span["high"] or 1, 2)
        ratio = max((high / low) ** (1 / rows), 1 + 1e-9)
        edges = tuple(low * ratio**i / 1e9 for i in range(rows + 1))
        cells = self._ask(
            f"""
            SELECT {bucket("first_token_ns", False)},
                least(greatest(floor(ln(greatest(ttft_ns, 1) / $low) / $step), 0), $rows - 1)::INTEGER AS row,
                count(*) AS requests {source} GROUP BY ALL ORDER BY ALL
            """,
            {**parameters(window), "low": float(low), "step": math.log(ratio), "rows": rows},
        )
        return HeatMap(edges, cells)

    def ranks(self, window: Window) -> pa.Table:
        """`load` and `latency` of the whole window, a row per rank: `rank`, and their other columns but the bucket."""
        whole = replace(window, buckets=1)
        load, latency = self.load(whole, by_rank=True), self.latency(whole, by_rank=True)
        other = ["bucket", "begin_ns", "rank", "admitted"]
        joined = load.drop_columns(["bucket", "begin_ns"])
        for name in latency.column_names:
            if name not in other:
                joined = joined.append_column(name, latency[name])
        return joined

    def anomalies(self, *, most: int = 500) -> tuple[Anomaly, ...]:
        """Moments that stand out, by time; of more than `most` those that last longest or concern most.

        Fallbacks of the policy; gates that held for more than a hundredth of the run; gaps; retractions and
        preemptions, and first tokens that took at least three times the median and are among the slowest hundredth:
        of these one per four-hundredth of the run.
        """
        span = max(1, self.extent.last_ns - self.extent.first_ns)
        values = {"begin": self.extent.first_ns, "piece": max(1, span // 400), "long": span // 100, "most": most}
        self._find_lasting()
        found = [
            Anomaly(row["rank"], row["ns"], row["pass"], row["kind"], anomaly_words(row), row["rid"])
            for row in self._ask(ANOMALIES, values).to_pylist()
        ]
        for gap in self._gaps(self.window(buckets=1)):
            what = "records are missing" if gap.total is None else f"{gap.total:,} records are missing"
            found.append(Anomaly(gap.rank, gap.begin_ns, gap.first_pass, "gap", f"{what}: {gap.what}", None))
        return tuple(sorted(found, key=lambda each: (each.ns, each.rank, each.kind)))

    def gates_before(self, rank: int, number: int) -> tuple[tuple[str, int, float], ...]:
        """Gates between a pass and the one before it: what, how many steps it ended, and their seconds."""
        found = self._ask(
            """
            WITH here AS (SELECT min(step) AS step FROM turns WHERE rank = $rank AND pass = $number),
            before AS (
                SELECT coalesce(max(step), -1) AS step FROM turns
                WHERE rank = $rank AND pass IS NOT NULL AND step < (SELECT step FROM here)
            )
            SELECT gate, sum(count)::BIGINT AS steps, sum(end_ns - ns) / 1e9 AS seconds FROM turns
            WHERE rank = $rank AND gate IS NOT NULL AND kind <> 'idle'
                AND step > (SELECT step FROM before) AND step < (SELECT step FROM here)
            GROUP BY gate ORDER BY seconds DESC, gate
            """,
            {"rank": rank, "number": number},
        )
        return tuple((row["gate"], row["steps"], row["seconds"]) for row in found.to_pylist())

    def find(self, prefix: str, *, most: int = 20) -> tuple[Found, ...]:
        """Requests whose rid begins so, the newest first."""
        rows = self._ask(
            "SELECT rank, rid, arrive_ns, ttft_ns / 1e9, end_reason FROM measured WHERE starts_with(rid, ?) "
            "ORDER BY arrive_ns DESC, rid LIMIT ?",
            [prefix, most],
        )
        return tuple(Found(*row.values()) for row in rows.to_pylist())

    def turns_at(self, ns: int, rank: int | None = None) -> tuple[Turn, ...]:
        """What each rank, or one, did at a moment: the last step that had begun."""
        rows = self._ask(
            f"""
            WITH last AS (
                SELECT rank, max(step) AS step, max(pass) AS pass FROM turns
                WHERE ns <= $ns AND ($rank IS NULL OR rank = $rank) GROUP BY rank
            )
            SELECT t.rank, t.step, t.ns, t.end_ns, t.kind, t.gate, l.pass, t.queue_len, t.running,
                CASE WHEN t.pass IS NOT NULL THEN t.admitted END, t.stop, {POLICY}
            FROM last l JOIN turns t ON t.rank = l.rank AND t.step = l.step ORDER BY t.rank
            """,
            {"ns": ns, "rank": rank},
        )
        return tuple(Turn(*row.values()) for row in rows.to_pylist())

    def pass_times(self, rank: int, first: int, last: int) -> dict[int, int]:
        """When passes of a rank began, by number, both ends included."""
        found = self._ask("SELECT pass, ns FROM turns WHERE rank = ? AND pass BETWEEN ? AND ?", [rank, first, last])
        return dict(zip(found["pass"].to_pylist(), found["ns"].to_pylist(), strict=True))

    def request(self, rid: str, rank: int | None = None) -> dict[str, Any] | None:
        """The times of a request, as `schedscope.replay.measures` has them; of several of its name the last one's."""
        rows = self._ask(
            "SELECT * FROM measured WHERE rid = $rid AND ($rank IS NULL OR rank = $rank) "
            "ORDER BY arrive_ns DESC LIMIT 1",
            {"rid": rid, "rank": rank},
        ).to_pylist()
        return rows[0] if rows else None

    def slowest(
        self, window: Window, *, most: int = 12, low_s: float = 0.0, high_s: float = math.inf
    ) -> tuple[Served, ...]:
        """Requests whose first token came in a window, those that waited longest for it first.

        Args:
            low_s: only those that waited at least so long, and not longer than `high_s`.
        """
        rows = self._ask(
            f"""
            SELECT rank, rid, arrive_ns, first_token_ns, ttft_ns / 1e9, waited_ns / 1e9, prefill_ns / 1e9,
                scheduling_ns / 1e9, prompt_tokens, cached_tokens, priority, routing_key
            FROM measured WHERE {within("first_token_ns")} AND ttft_ns BETWEEN $low AND $high
            ORDER BY ttft_ns DESC, rank, rid LIMIT $most
            """,
            {**parameters(window), "most": most, "low": low_s * 1e9, "high": high_s * 1e9},
        )
        return tuple(Served(*row.values()) for row in rows.to_pylist())

    def forgone(self, window: Window, *, most: int = 12) -> tuple[Forgone, ...]:
        """Requests admitted in a window whose prefixes were evicted while they waited, those that lost most first."""
        rows = self._ask(
            f"""
            SELECT rank, rid, best, cached, lost, had_pass, admit_pass, waited_s FROM needed
            WHERE {within("admit_ns")} ORDER BY lost DESC, rank, rid LIMIT $most
            """,
            {**parameters(window), "most": most},
        )
        return tuple(Forgone(*row.values()) for row in rows.to_pylist())

    def request_parts(self) -> pa.Table:
        """The times of all requests, by arrival; see `schedscope.replay.measures`.

        Columns: `rank`, `rid`, `arrive_ns`, `admit_ns`, `first_token_ns`, `finish_ns`, `ttft_ns` and its parts
        `waited_ns`, `prefill_ns` and `scheduling_ns`.
        """
        return self._ask(
            "SELECT rank, rid, arrive_ns, admit_ns, first_token_ns, finish_ns, ttft_ns, waited_ns, prefill_ns, "
            "scheduling_ns FROM measured ORDER BY arrive_ns, rank, rid",
            [],
        )

    def ask(self, sql: str, values: dict[str, Any], **tables: pa.Table) -> pa.Table:
        """Any question about the tables of `schedscope.replay.measures`, with `$name` for values.

        Args:
            tables: more tables that it may name.
        """
        values = {name: value for name, value in values.items() if f"${name}" in sql}
        with self._lock:
            for name, table in tables.items():
                self._connection.register(name, table)
            try:
                return self._connection.sql(sql, params=values).to_arrow_table()
            finally:
                for name in tables:
                    self._connection.unregister(name)

    def _find_lasting(self) -> None:
        """Have the table of what lasted, which takes a third as long as everything else and is not always needed."""
        with self._lock:
            self._within_memory(lambda: self._connection.execute(LASTING))

    def _ask(self, sql: str, values: Sequence[Any] | dict[str, Any]) -> pa.Table:
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if f"${name}" in sql}
        with self._lock:
            return self._within_memory(lambda: self._connection.sql(sql, params=values).to_arrow_table())

    def _within_memory(self, answer: Callable[[], Answer]) -> Answer:
        """Within the limit if that can be, else without one."""
        try:
            return answer()
        except duckdb.OutOfMemoryException:
            self._connection.execute("RESET memory_limit")
            return answer()


_SHARES: dict[Share, tuple[str, str, str, str]] = {
    "refused": ("refused", "reason", "sum(tokens)::BIGINT", "NULL::DOUBLE"),
    "stop": ("turns", "stop", "NULL::BIGINT", "NULL::DOUBLE"),
    "delayer": (
        "turns",
        "CASE WHEN delayer_allow THEN coalesce(nullif(delayer_reason, ''), 'none can prefill') ELSE delayer_reason END",
        "NULL::BIGINT",
        "NULL::DOUBLE",
    ),
    "prefillable": ("turns", "delayer_estimation", "NULL::BIGINT", "NULL::DOUBLE"),
    "policy": ("turns", POLICY, "NULL::BIGINT", "NULL::DOUBLE"),
    "gate": ("turns", "gate", "NULL::BIGINT", "sum(end_ns - ns) / 1e9"),
}
"""Where it is, what it is called, and its sums."""


def total(load: pa.Table) -> dict[str, Any]:
    """What `Timeline.load` gives, of all its buckets together: nothing has to be asked for again."""
    found: dict[str, Any] = {}
    for name in load.column_names:
        if name not in {"bucket", "rank", "begin_ns", "hit_rate"}:
            found[name] = (pc.max if name.endswith("_max") else pc.sum)(load[name]).as_py()
    found["hit_rate"] = found["cached_tokens"] / found["prompt_tokens"] if found["prompt_tokens"] else None
    return found


_LARGEST = """
max(running) AS running_max, max((pool_size - available - evictable) / pool_size) AS used_max,
max(evictable / pool_size) AS cached_max
"""


def _or_null(column: str, known: bool) -> str:
    return f"coalesce({column}, 0) AS {column}" if known else f"NULL::BIGINT AS {column}"
