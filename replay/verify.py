"""Is the recording what the scheduler really decides? Re-run it, record the re-run, and compare the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from schedscope.recorder.rows import Row
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.replay.replayer import Replayed, Replayer

TABLES_OF_A_STEP = ("decisions", "passes", "events", "steps")
"""In this order, since what caused a difference comes before what followed from it."""

MEASURED = frozenset({"seq", "time"})
"""Beside nanoseconds: the recorder's own count, and when an event was told."""


class Divergence(NamedTuple):
    """The first field of a rank that a re-run does not reproduce."""

    rank: int
    pass_number: int | None
    step: int
    table: str
    rid: str | None
    field: str
    recorded: Any
    replayed: Any

    def to_json(self) -> dict[str, Any]:
        """All fields, with `pass` for `pass_number`."""
        facts = self._asdict()
        return {"pass": facts.pop("pass_number"), **facts}

    def __str__(self) -> str:
        where = f"pass {self.pass_number}, step {self.step}" if self.pass_number is not None else f"step {self.step}"
        whose = f", request {self.rid}" if self.rid is not None else ""
        return (
            f"rank {self.rank}, {where}{whose}: {self.table}.{self.field}: "
            f"recorded {self.recorded!r}, replayed {self.replayed!r}"
        )


class Verdict(NamedTuple):
    """What a verification found on one rank."""

    rank: int
    passes: int
    """Passes that were compared."""
    decisions: int
    steps: int
    divergence: Divergence | None


def verify(
    run: Run,
    rank: int,
    *,
    start_pass: int = 0,
    stop_pass: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Compare what a rank recorded with a re-run, field by field, up to the first difference.

    Not compared are clocks and the recorder's own numbering.

    Args:
        start_pass: where to begin; the state comes from the checkpoint before it.
        stop_pass: the last pass to compare.
        progress: called with the number of passes compared so far.
    """
    replayer = Replayer(run, rank)
    recorded = {name: _Recorded(run, rank, name) for name in TABLES_OF_A_STEP}
    ended = _Ended(run, rank)
    passes = decisions = steps = 0
    for replayed in replayer.replay(start_pass):
        steps += 1
        number = replayed.recorded["pass"]
        found = next(_differences(rank, replayed, recorded), None)
        if found is None and start_pass == 0:
            found = ended.compare(rank, replayed)
        if number is not None and number >= start_pass:
            passes += 1
            decisions += len(replayed.rows["decisions"])
            if progress is not None:
                progress(passes)
        if found is not None:
            return Verdict(rank, passes, decisions, steps, found)
        if stop_pass is not None and number is not None and number >= stop_pass:
            break
    return Verdict(rank, passes, decisions, steps, None)


def _differences(rank: int, replayed: Replayed, recorded: dict[str, _Recorded]) -> Iterator[Divergence]:
    step, number = replayed.recorded["step"], replayed.recorded["pass"]
    for name in TABLES_OF_A_STEP:
        table = recorded[name]
        old, new = table.of(number if name == "decisions" else step), replayed.rows[name]
        yield from _compare(rank, number, step, table.fields, name, old, new)


def _compare(
    rank: int, number: int | None, step: int, fields: _Fields, table: str, old: list[Row], new: list[Row]
) -> Iterator[Divergence]:
    if [fields.decided(row) for row in old] == [fields.decided(row) for row in new]:
        return
    for was, now in zip(old, new, strict=False):
        for field, before, after in zip(fields.names, fields.decided(was), fields.decided(now), strict=True):
            if before != after:
                rid = was[fields.rid] if fields.rid is not None else None
                yield Divergence(rank, number, step, table, rid, field, before, after)
    if len(old) != len(new):
        yield Divergence(rank, number, step, table, None, "rows", len(old), len(new))


class _Fields:
    """Which columns of a table are decided, and so come out alike in every re-run."""

    def __init__(self, table: str) -> None:
        names = [column.name for column in TABLES[table].columns[1:]]
        self._places = [i for i, name in enumerate(names) if name not in MEASURED and not name.endswith("_ns")]
        self.names = [names[i] for i in self._places]
        self.rid = names.index("rid") if "rid" in names else None

    def decided(self, row: Row) -> list[Any]:
        """Those values of a row."""
        return [row[i] for i in self._places]


class _Recorded:
    """The rows of a table, by pass (decisions) or by step."""

    def __init__(self, run: Run, rank: int, table: str) -> None:
        self.fields = _Fields(table)
        names = [column.name for column in TABLES[table].columns[1:]]
        by = names.index("pass" if table == "decisions" else "step")
        self._rows: defaultdict[int, list[Row]] = defaultdict(list)
        for row in _rows(run, rank, table, names):
            self._rows[row[by]].append(row)

    def of(self, number: int | None) -> list[Row]:
        """Rows of one pass or step."""
        return self._rows.get(number, []) if number is not None else []


class _Ended:
    """The rows of ended requests, in the order in which they ended."""

    def __init__(self, run: Run, rank: int) -> None:
        self._fields = _Fields("requests")
        names = [column.name for column in TABLES["requests"].columns[1:]]
        self._left = _rows(run, rank, "requests", names)

    def compare(self, rank: int, replayed: Replayed) -> Divergence | None:
        """The first difference among the requests that ended in this step."""
        new = replayed.rows["requests"]
        old = [row for _, row in zip(new, self._left, strict=False)]
        where = (replayed.recorded["pass"], replayed.recorded["step"])
        return next(_compare(rank, *where, self._fields, "requests", old, new), None)


def _rows(run: Run, rank: int, table: str, names: list[str]) -> Iterator[Row]:
    columns = [column.to_pylist() for column in run.table(table, rank, columns=names).columns]
    return zip(*columns, strict=True)
