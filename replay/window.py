"""A piece of a run's time, cut into buckets, and how SQL sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a run's time, in equal buckets."""

    begin_ns: int
    end_ns: int
    """Exclusive."""
    buckets: int
    rank: int | None = None
    """Only this rank; None: all of them together."""

    @property
    def width_ns(self) -> int:
        """Length of a bucket."""
        return max(1, -(-(self.end_ns - self.begin_ns) // self.buckets))

    def bucket_of(self, ns: int) -> int:
        """The bucket of a moment in the window."""
        return (ns - self.begin_ns) // self.width_ns


def parameters(window: Window) -> dict[str, Any]:
    """What the SQL of the functions below names."""
    return {
        "begin": window.begin_ns,
        "end": window.end_ns,
        "width": window.width_ns,
        "buckets": window.buckets,
        "rank": window.rank,
    }


def within(column: str) -> str:
    """That a time of a row lies in the window, and its rank is looked at."""
    return f"{column} >= $begin AND {column} < $end AND ($rank IS NULL OR rank = $rank)"


def bucket(column: str, by_rank: bool) -> str:
    """The bucket of a time, and the rank."""
    return f"{'rank, ' if by_rank else ''}(({column} - $begin) // $width)::INTEGER AS bucket"


def lasting(table: str, begin: str, end: str) -> str:
    """Rows that last all of a bucket, or from before it to the window's end: each with every such `bucket`."""
    first = f"CASE WHEN {begin} < $begin THEN 0 ELSE ({begin} - $begin) // $width + 1 END"
    last = f"CASE WHEN {end} >= $end - 1 THEN $buckets - 1 ELSE ({end} - $begin) // $width - 1 END"
    return (
        f"(SELECT *, unnest(range({first}, {last} + 1))::INTEGER AS bucket FROM {table} WHERE {begin} < $end"
        f" AND {end} > $begin AND {first} <= {last} AND ($rank IS NULL OR rank = $rank))"
    )


def frame(by_rank: bool) -> str:
    """A row for every bucket of the window, and every rank."""
    ranks = ", (SELECT DISTINCT rank FROM turns WHERE $rank IS NULL OR rank = $rank)" if by_rank else ""
    columns = "rank, bucket" if by_rank else "bucket"
    return f"frame AS (SELECT {columns} FROM (SELECT n::INTEGER AS bucket FROM range($buckets) AS b(n)){ranks})"


def row_keys(by_rank: bool) -> tuple[str, str]:
    """The columns that a row is found by, to select and to join on."""
    return ("rank, bucket", "rank, bucket") if by_rank else ("bucket", "bucket")
