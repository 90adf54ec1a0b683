"""A run, or a part of one, that is ready to be examined: its tables, its settings, its passes to decide again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import duckdb
import pyarrow as pa
from schedscope.engine.config import FIELDS, SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.errors import ConfigError, SchedscopeError
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Detail, Level
from schedscope.recorder.manifest import Gap
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, to_arrow
from schedscope.replay.charges import queued_ns
from schedscope.replay.finding import Severity
from schedscope.replay.measures import measure
from schedscope.replay.moment import Moment
from schedscope.replay.replayer import Replayer
from schedscope.replay.source import is_observed

Row = dict[str, Any]

_KEPT_MOMENTS = 32
_REACH = 3_000
"""Passes that are re-run at most to get to one: some seconds. The companion takes checkpoints more often."""
_WARNING, _CRITICAL = (0.05, 0.05), (1.0, 0.25)
"""Requests that wait because of it at any time, on average; and its share of all waiting."""


class Case:
    """What detectors ask. Its SQL sees the tables of the log, those of `schedscope.replay.measures`, and

    - `looked`: the rows of `decisions` that admission looked at or that were held back. Empty where decisions are
      not recorded.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        detail: Detail,
        configs: Mapping[int, Mapping[str, Any]],
        run: Run | None,
    ) -> None:
        """Use `of_run` or `of_rows`."""
        self.run = run
        """None: there is nothing but some rows."""
        self.detail = detail
        self.ranks = sorted(configs)
        """Ranks that were recorded."""
        self._configs = {rank: _config(recorded) for rank, recorded in configs.items()}
        self._connection = connection
        self._connection.execute("SET preserve_insertion_order = false")
        measure(connection, detail.level)
        self._connection.execute(_LOOKED)
        self._made: dict[Hashable, Any] = {}
        self._replayers: dict[int, Replayer] = {}
        self._moments: OrderedDict[tuple[int, int], Moment] = OrderedDict()

    @classmethod
    def of_run(cls, run: Run) -> Case:
        """A run as it is now. Raises RunFormatError."""
        manifest = run.manifest
        return cls(run.connect(), manifest.detail, {rank: manifest.config_of(rank) for rank in run.ranks}, run)

    @classmethod
    def of_rows(cls, rows: Rows, rank: int, config: Mapping[str, Any], detail: Detail) -> Case:
        """What a rank recorded in a while; passes of it can't be decided again."""
        connection = duckdb.connect()
        connection.execute("SET threads = 1")
        for name, table in TABLES.items():
            connection.register(name, to_arrow(table, rank, rows.get(name, ())))
        return cls(connection, detail, {rank: config}, None)

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """What a query gives, with `$name` for each value."""
        found = self.table(sql, **values)
        for place, field in enumerate(found.schema):
            if pa.types.is_decimal(field.type):
                found = found.set_column(place, field.name, found.column(place).cast(pa.int64()))
        return list(found.to_pylist())

    def one(self, sql: str, **values: Any) -> Row:
        """The only row of a query."""
        (row,) = self.rows(sql, **values)
        return row

    def table(self, sql: str, **values: Any) -> pa.Table:
        """The same as Arrow."""
        return self._connection.sql(sql, params=values).to_arrow_table()

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` made when this key was first asked for: for facts that several detectors need."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # ---- what is known ---------------------------------------------------------------------------------------

    @property
    def level(self) -> Level:
        """How much was recorded."""
        return self.detail.level

    @property
    def gaps(self) -> list[Gap]:
        """What is missing."""
        return [] if self.run is None else self.run.gaps

    @property
    def has_tokens(self) -> bool:
        """Whether the log tells what prompts share."""
        return self.level != "steps" and self.detail.tokens != "none"

    @property
    def has_decisions(self) -> bool:
        """Whether the log tells what passes said about requests."""
        return self.level in {"decisions", "full"}

    @property
    def has_evictions(self) -> bool:
        """Whether the log tells what left the cache."""
        return self.level == "full"

    def config(self, rank: int) -> SchedulerConfig:
        """The settings of a rank's scheduler, as far as they are ours; defaults where they are not recorded."""
        return self._configs[rank]

    @cached_property
    def _totals(self) -> dict[int, Row]:
        rows = self.rows(
            "SELECT rank, sum(lasts_ns / 1e9 * waiting) AS waiting_s, (max(end_ns) - min(ns)) / 1e9 AS lasts_s, "
            "sum(CASE kind WHEN 'prefill' THEN batch_tokens END) AS tokens, "
            "sum(CASE kind WHEN 'prefill' THEN prefill_ns END) / 1e9 AS prefill_s FROM turns GROUP BY rank"
        )
        return {row["rank"]: row for row in rows}

    def waiting_s(self, rank: int | None = None) -> float:
        """What steps left waiting, on a rank or on all of them, for as long as they did, seconds.

        What detectors measure costs by. Less than `queued_s`: who came while a step went on is not in it.
        """
        return float(sum(row["waiting_s"] for each, row in self._totals.items() if rank in (None, each)))

    @cached_property
    def queued_s(self) -> float:
        """What all requests spent in the queue, together, as their ledgers have it, seconds."""
        return queued_ns(self._connection) / 1e9

    def lasts_s(self, rank: int | None = None) -> float:
        """How long it was recorded, seconds; of several ranks the longest."""
        return float(max((row["lasts_s"] for each, row in self._totals.items() if rank in (None, each)), default=0.0))

    def token_s(self, rank: int) -> float:
        """What prefill takes per token, seconds, on average."""
        row = self._totals.get(rank)
        return float(row["prefill_s"] / row["tokens"]) if row and row["tokens"] else 0.0

    def computing_s(self, rank: int, tokens: float) -> float:
        """The waiting that computing so many tokens causes: everyone in the queue waits for it, and who computes it."""
        lasts = self.lasts_s(rank)
        return tokens * self.token_s(rank) * (1 + (self.waiting_s(rank) / lasts if lasts else 0.0))

    def severity(self, cost_s: float, rank: int | None, *, at_least: Severity = Severity.NOTE) -> Severity:
        """How bad something is that costs so much waiting.

        Critical if at any time a request waits because of it, on average, and a quarter of all waiting comes from it;
        a warning from a twentieth of both.
        """
        lasts, waiting = self.lasts_s(rank), self.waiting_s(rank)
        found = Severity.NOTE
        if lasts > 0 and waiting > 0:
            for severity, (requests, share) in ((Severity.WARNING, _WARNING), (Severity.CRITICAL, _CRITICAL)):
                if cost_s / lasts >= requests and cost_s / waiting >= share:
                    found = severity
        return min(found, at_least, key=lambda each: each.rank)

    # ---- passes to decide again ------------------------------------------------------------------------------

    @cached_property
    def fixed(self) -> str | None:
        """Why nothing of it can be decided again; None: it can."""
        if self.run is None:
            return "there is no run to decide passes of again"
        if self.level == "steps":
            return "the run was recorded at level steps"
        if self.detail.tokens == "none":
            return "the run was recorded with --tokens none"
        return None

    def pass_before(self, rank: int, ns: int) -> int | None:
        """The last pass of a rank that had begun at a time."""
        number: int | None = self.one(
            "SELECT max(pass) AS number FROM turns WHERE rank = $rank AND ns <= $ns", rank=rank, ns=ns
        )["number"]
        return number

    def moment(self, rank: int, number: int) -> Moment:
        """A scheduler just before a recorded pass. Raises SchedscopeError where that can't be rebuilt."""
        key = rank, number
        if key not in self._moments:
            self._moments[key] = self._replayer(rank, number).at(number)
            while len(self._moments) > _KEPT_MOMENTS:
                self._moments.popitem(last=False)
        return self._moments[key]

    def opened(self, rank: int, number: int, steps: Collection[int]) -> Iterator[tuple[int, Plan]]:
        """What steps behind a pass, which a gate ended, would have decided without the mark `batch_is_full`.

        Raises SchedscopeError where they can't be rebuilt.
        """
        replayer = self._replayer(rank, number)
        if is_observed(replayer.run.manifest):
            raise SchedscopeError("of a server that was watched, only passes are sure to be as they were")
        for step, moment in replayer.before_steps(number, steps):
            yield step, decide(replace(moment.view, batch_is_full=False), moment.config, moment.random_state)

    def _replayer(self, rank: int, number: int) -> Replayer:
        """Of a rank, if a pass is within its reach."""
        if self.fixed is not None:
            raise SchedscopeError(self.fixed)
        assert self.run is not None
        if rank not in self._replayers:
            self._replayers[rank] = Replayer(self.run, rank)
        far = number - self._replayers[rank].start_before(number).pass_number
        if far > _REACH:
            raise SchedscopeError(f"the checkpoint before pass {number} is {far:,} passes away")
        return self._replayers[rank]

    def known_moment(self, rank: int, number: int) -> Moment | None:
        """The same, None where that can't be rebuilt."""
        try:
            return self.moment(rank, number)
        except SchedscopeError:
            return None


def _config(recorded: Mapping[str, Any]) -> SchedulerConfig:
    known = {name: value for name, value in recorded.items() if name in FIELDS}
    try:
        return SchedulerConfig(**known)
    except ConfigError:
        return SchedulerConfig()


_LOOKED = """
CREATE TABLE looked AS
SELECT rank, pass, rid, place_before, place_after, prefix_len, deprioritized, partner, shared_len, result, reason,
    admitted, admit_prefix_len, extend_len, chunked, need, have, rem_total, preempted, key
FROM decisions WHERE result IS NOT NULL OR deprioritized
"""
