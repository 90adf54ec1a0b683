"""Is the recording what the scheduler really decides? Re-run it, record the re-run, and compare the two.

Recordings are compared as Arrow tables, many passes at once. Only where they differ, rows are looked at one by one.
"""

from __future__ import annotations

import gc
import multiprocessing
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from schedscope.recorder.files import Within
from schedscope.recorder.parts import Part
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, decisions_table, to_arrow
from schedscope.replay.garbage import collecting_less
from schedscope.replay.rebuild import LostError
from schedscope.replay.replayer import Recollection, Replayer, Start
from schedscope.replay.script import Turn
from schedscope.replay.source import UNTOLD, is_observed
from schedscope.replay.verdicts import Divergence, Verdict

INDEX = {"decisions": "pass", "passes": "step", "events": "step", "steps": "step", "requests": "finish_ns"}
"""Compared tables and the column that tells how far into the run a row belongs. In this order, since what caused a
difference comes before what followed from it."""

MEASURED = frozenset({"seq", "time"})
"""Beside nanoseconds: the recorder's own count, and when an event was told."""

UNKNOWN = frozenset({"decision_hash"})
"""What version 1 of the log doesn't tell in a way that could be compared."""

_Named = list[dict[str, Any]]
"""Rows, their values by column."""

_BATCH_ROWS = 16_384
"""Rows of decisions that are compared at once."""
_WINDOW = 1_024
"""Passes, or steps, that are read at once."""
_FOREVER = 2**62
_COLLECT_EVERY = 32
"""Batches between two collections of garbage."""
_RANGES_PER_JOB = 4
_RANGE = 4_000
"""Passes of one, about: how far it is shows whenever one is done."""


def verify(
    run: Run,
    rank: int,
    *,
    start_pass: int = 0,
    stop_pass: int | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Compare what a rank recorded with a re-run, field by field, up to the first difference.

    Not compared are clocks and the recorder's own numbering. Raises RunNotFoundError, RunFormatError.

    Args:
        start_pass: where to begin; the state comes from the checkpoint before it.
        stop_pass: the last pass to compare.
        jobs: processes that share the work, which is split at checkpoints.
        progress: called with the number of passes compared so far.
    """
    replayer = Replayer(run, rank)
    start = replayer.start_before(start_pass)
    if jobs > 1 and stop_pass is None:
        found = _verify_ranges(run, replayer, start, start_pass, jobs, progress)
    else:
        found = _verify_from(replayer, start, start_pass, stop_pass=stop_pass, progress=progress)
    return found if found.lost or found.divergence else found._replace(open_pass=replayer.open_pass())


def _verify_from(
    replayer: Replayer,
    start: Start,
    start_pass: int,
    *,
    stop_pass: int | None = None,
    stop_step: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Compare on, over places where records are missing."""
    verdicts: list[Verdict] = []
    lost: list[tuple[int, int | None]] = []
    next_start: Start | None = start
    while next_start is not None:
        comparison = _Comparison(replayer, next_start, start_pass, sum(verdict.passes for verdict in verdicts))
        try:
            verdicts.append(comparison.run(stop_pass, stop_step, progress))
            break
        except LostError as error:
            verdicts.append(comparison.finish())
            if verdicts[-1].divergence is not None:
                break
            next_start = replayer.start_behind(error.tick)
            lost.append((comparison.last_pass, None if next_start is None else next_start.pass_number))
            if next_start is not None and stop_step is not None and next_start.step >= stop_step:
                break  # someone else begins there
    return _sum(verdicts, tuple(lost))


def _sum(verdicts: Sequence[Verdict], lost: tuple[tuple[int, int | None], ...]) -> Verdict:
    """What was found in consecutive stretches."""
    return Verdict(
        verdicts[0].rank,
        sum(verdict.passes for verdict in verdicts),
        sum(verdict.decisions for verdict in verdicts),
        sum(verdict.steps for verdict in verdicts),
        verdicts[-1].divergence,
        verdicts[0].first_pass,
        lost=lost,
    )


# ---- many processes ------------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """A stretch of a run between two checkpoints."""

    run: Path
    rank: int
    start: Start
    start_pass: int
    stop_step: int | None
    """The step behind it; None: to the end."""


def _verify_ranges(
    run: Run,
    replayer: Replayer,
    start: Start,
    start_pass: int,
    jobs: int,
    progress: Callable[[int], None] | None,
) -> Verdict:
    count = max(jobs * _RANGES_PER_JOB, run.passes(replayer.rank).count // _RANGE)
    ranges = _split(run.path, replayer, start, start_pass, count)
    if len(ranges) == 1:
        return _verify_from(replayer, start, start_pass, progress=progress)
    verdicts: list[Verdict] = []
    done = 0
    with ProcessPoolExecutor(min(jobs, len(ranges)), multiprocessing.get_context("spawn")) as pool:
        for verdict in pool.map(_verify_range, ranges):
            verdicts.append(verdict)
            done += verdict.passes
            if progress is not None:
                progress(done)
            if verdict.divergence is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return _sum(verdicts, tuple(gap for verdict in verdicts for gap in verdict.lost))


def _split(path: Path, replayer: Replayer, start: Start, start_pass: int, count: int) -> list[_Range]:
    """Ranges of about as many passes each."""
    first = max(start.pass_number, start_pass)
    last = max((part.last_pass for part in replayer.parts if part.last_pass is not None), default=first)
    marks = {replayer.start_before(first + (last + 1 - first) * i // count) for i in range(1, count)}
    later = sorted((mark for mark in marks if mark.tick > start.tick), key=lambda mark: mark.tick)
    starts = [start, *later]
    stops = [*(mark.step for mark in later), None]
    pairs = zip(starts, stops, strict=True)
    return [_Range(path, replayer.rank, begin, start_pass, stop) for begin, stop in pairs]


def _verify_range(part: _Range) -> Verdict:
    """Runs in a process of its own."""
    replayer = Replayer(Run.open(part.run), part.rank)
    return _verify_from(replayer, replayer.same(part.start), part.start_pass, stop_step=part.stop_step)


# ---- one process ---------------------------------------------------------------------------------------------


class _Comparison:
    """A re-run side by side with the recording.

    Args:
        before: passes that were compared already, for those who watch.
    """

    def __init__(self, replayer: Replayer, start: Start, start_pass: int, before: int) -> None:
        self._before = before
        self.last_pass = start.pass_number - 1
        """That was compared."""
        self._recollection = Recollection(replayer.run.manifest.detail)
        self._batch: list[Turn] = []
        """Steps that were re-run and not compared yet."""
        self._replayer = replayer
        self._start = start
        self._first_pass = max(start_pass, start.pass_number)
        parts = replayer.parts[start.part :]
        manifest = replayer.run.manifest
        unknown = UNKNOWN if manifest.version < 2 else frozenset()
        untold = UNTOLD if is_observed(manifest) else {}
        self._index = {name: INDEX[name] for name in INDEX if name != "events" or not is_observed(manifest)}
        ended_ns = _end_of(parts[:1], start.step - 1)
        behind = {"decisions": start.pass_number - 1, "requests": ended_ns}
        self._recorded = {
            name: _Recorded(
                parts, name, unknown | untold.get(name, frozenset()), behind.get(name, start.step - 1), start.tick
            )
            for name in self._index
        }
        self._ends = _Recorded(parts, "steps", unknown, start.step - 1, start.tick, ("step", "end_ns"))
        self._passes = self._decisions = self._steps = 0

    def run(self, stop_pass: int | None, stop_step: int | None, progress: Callable[[int], None] | None) -> Verdict:
        """Compare up to a pass, to before a step, or to the end. Raises LostError; see `finish` then."""
        with collecting_less():
            return self._run(stop_pass, stop_step, progress)

    def _run(self, stop_pass: int | None, stop_step: int | None, progress: Callable[[int], None] | None) -> Verdict:
        batches = 0
        for turn in self._replayer.replay(self._recollection, self._start, stop_step):
            self._batch.append(turn)
            number = turn.pass_number
            last = stop_pass is not None and number is not None and number >= stop_pass
            if len(self._batch) + self._recollection.decisions.rows >= _BATCH_ROWS or last:
                verdict = self.finish()
                if progress is not None:
                    progress(self._before + self._passes)
                if verdict.divergence is not None or last:
                    return verdict
                batches += 1
                if batches % _COLLECT_EVERY == 0:
                    gc.collect()
        return self.finish()

    def finish(self) -> Verdict:
        """What was found in all that was re-run."""
        found = self._compare(self._batch) if self._batch else None
        self._batch = []
        counts = (self._passes, self._decisions, self._steps)
        return Verdict(self._replayer.rank, *counts, found, self._first_pass)

    def _compare(self, batch: Sequence[Turn]) -> Divergence | None:
        rows, decisions, ended_in = self._recollection.take()
        new = {name: to_arrow(TABLES[name], 0, rows.get(name, ())) for name in self._index if name != "decisions"}
        new["decisions"] = decisions_table(decisions, 0)
        step = batch[-1].step
        number = max((turn.pass_number for turn in batch if turn.pass_number is not None), default=None)
        end_ns = self._ends.until(step).column("end_ns")
        bounds = {"decisions": number, "requests": end_ns[-1].as_py()}
        old = {name: table.until(bounds.get(name, step)) for name, table in self._recorded.items()}
        same = all(_equal(old[name], new[name], self._recorded[name].fields) for name in self._index)
        found = None if same else next(self._differences(batch, old, new, ended_in), None)
        self._count(batch, decisions.counts, None if found is None else found.step)
        return found

    def _count(self, batch: Sequence[Turn], counts: Mapping[int, int], last: int | None) -> None:
        for turn in batch:
            self._steps += 1
            number = turn.pass_number
            if number is not None:
                self.last_pass = number
                if number >= self._first_pass:
                    self._passes += 1
                    self._decisions += counts.get(number, 0)
            if turn.step == last:
                break

    def _differences(
        self,
        batch: Sequence[Turn],
        recorded: Mapping[str, pa.Table],
        replayed: Mapping[str, pa.Table],
        ended_in: Sequence[int],
    ) -> Iterator[Divergence]:
        old, new = (
            {name: _by_index(tables[name].to_pylist(), column) for name, column in self._index.items()}
            for tables in (recorded, replayed)
        )
        # When a request has ended is a clock's time in the log, so requests go by their order.
        ended = recorded["requests"].to_pylist()
        places = [*ended_in, *[None] * (len(ended) - len(ended_in))]
        old["requests"] = _grouped(places, ended)
        new["requests"] = _grouped(ended_in, replayed["requests"].to_pylist())
        for turn in batch:
            for name in self._index:
                index = turn.pass_number if name == "decisions" else turn.step
                was, now = old[name].pop(index, []), new[name].pop(index, [])
                yield from self._rows_differ(turn, name, was, now)
        for name in self._index:
            was, now = (list(chain.from_iterable(rows[name].values())) for rows in (old, new))
            yield from self._rows_differ(batch[-1], name, was, now)

    def _rows_differ(self, turn: Turn, table: str, old: _Named, new: _Named) -> Iterator[Divergence]:
        where = (self._replayer.rank, turn.pass_number, turn.step, table)
        for was, now in zip(old, new, strict=False):
            for field in self._recorded[table].fields:
                if was[field] != now[field]:
                    yield Divergence(*where, was.get("rid"), field, was[field], now[field])
        if len(old) != len(new):
            yield Divergence(*where, None, "rows", len(old), len(new))


def _equal(old: pa.Table, new: pa.Table, fields: Sequence[str]) -> bool:
    """Whether recorded rows and those of a re-run agree in all that is decided."""
    return len(old) == len(new) and bool(old.select(fields).equals(new.select(fields)))


def _by_index(rows: _Named, index: str) -> dict[int | None, _Named]:
    return _grouped([row[index] for row in rows], rows)


def _grouped(places: Sequence[int | None], rows: _Named) -> dict[int | None, _Named]:
    found: defaultdict[int | None, _Named] = defaultdict(list)
    for place, row in zip(places, rows, strict=False):
        found[place].append(row)
    return found


class _Recorded:
    """A table as recorded, from where a re-run begins, in pieces of any length. Holds a part of it at a time.

    Args:
        unknown: columns that it is too old to have.
        behind: begin with the rows whose index is greater.
        tick: of events, begin with those that came later.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        table: str,
        unknown: frozenset[str],
        behind: int | None,
        tick: int,
        columns: Sequence[str] | None = None,
    ) -> None:
        names = [column.name for column in TABLES[table].row]
        self._table = table
        self._index = INDEX[table]
        self.fields = [name for name in names if name not in MEASURED | unknown and not name.endswith("_ns")]
        """Columns that are decided, and so come out alike in every re-run."""
        self._columns = columns or list(dict.fromkeys((self._index, *self.fields)))
        self._pieces = self._read(parts, behind, tick)
        self._rest: pa.Table | None = next(self._pieces, None)

    def until(self, last: int | None) -> pa.Table:
        """The next rows, up to an index; None: no row."""
        taken: list[pa.Table] = []
        while last is not None and self._rest is not None:
            count = _count_until(self._rest.column(self._index), last)
            taken.append(self._rest.slice(0, count))
            if count < len(self._rest):
                self._rest = self._rest.slice(count)
                break
            self._rest = next(self._pieces, None)
        return pa.concat_tables(taken) if taken else TABLES[self._table].arrow.empty_table().select(self._columns)

    def _read(self, parts: Sequence[Part], behind: int | None, tick: int) -> Iterator[pa.Table]:
        for i, part in enumerate(parts):
            begin = behind if i == 0 else None
            for within in _windows(part, self._index):
                if begin is not None and within.last <= begin:
                    continue
                if i == 0 and self._table == "events":
                    piece = part.table(self._table, [*self._columns, "seq"], within)
                    piece = piece.slice(_count_until(piece.column("seq"), tick)).select(self._columns)
                else:
                    piece = part.table(self._table, self._columns, within)
                    if begin is not None:
                        piece = piece.slice(_count_until(piece.column(self._index), begin))
                if len(piece):
                    yield piece.combine_chunks()


def _windows(part: Part, index: str) -> list[Within]:
    """A part in pieces that fit into memory, however many parts were merged into it."""
    if index == "finish_ns":
        return [Within(index, -_FOREVER, _FOREVER)]
    if index == "pass":
        ends = [] if part.first_pass is None or part.last_pass is None else range(part.first_pass, part.last_pass)
    else:
        ends = part.table("steps", ("step",)).column("step").to_pylist()
    bounds = [-1, *ends[_WINDOW - 1 : -1 : _WINDOW], _FOREVER]
    return [Within(index, first + 1, last) for first, last in pairwise(bounds)]


def _count_until(index: pa.ChunkedArray, last: int) -> int:
    """Rows up to an index, of a column that ascends."""
    return bisect_right(range(len(index)), last, key=lambda i: index[i].as_py())


def _end_of(parts: Sequence[Part], step: int) -> int | None:
    """When a step ended, monotonic ns; None if it is in none of these parts."""
    for part in parts:
        table = part.table("steps", ("step", "end_ns"))
        place = _count_until(table.column("step"), step) - 1
        if place >= 0 and table.column("step")[place].as_py() == step:
            return int(table.column("end_ns")[place].as_py())
    return None
