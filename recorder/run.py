"""Reading a run: rows, passes, SQL. Also while it is recorded, and after its recorder was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.errors import RunFormatError, RunNotFoundError, SchedscopeError, UsageError
from schedscope.recorder.journal import BY_PASS, Journal
from schedscope.recorder.manifest import MANIFEST, Gap, Manifest, read_manifest
from schedscope.recorder.parts import Parts, PassRange, is_recorded, list_ranks, list_segments, read_parts
from schedscope.recorder.schema import TABLES, Table
from schedscope.recorder.segment import Segment, Within, to_arrow

LOG_DIR_VARIABLE = "SCHEDSCOPE_LOG_DIR"

_BATCH = 4_096
_SHOWN = 5


class Run:
    """A run. Every call looks at the files as they are then; while recording, later calls see more.

    Raises RunFormatError, naming the file, from any method that reads one it can't.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use `open`."""
        self.path = path
        self._manifest = manifest
        self._segments: dict[Path, Segment] = {}
        self._sealed: dict[int, Parts] = {}

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run's directory. Raises RunNotFoundError, RunFormatError."""
        path = Path(path)
        return cls(path, read_manifest(path))

    @property
    def manifest(self) -> Manifest:
        """The manifest, as it is now."""
        if self._manifest.status != "sealed":
            self._manifest = read_manifest(self.path)
        return self._manifest

    @property
    def status(self) -> str:
        """`recording`; `sealed`: complete; `interrupted`: the recorder was killed, what it received is there."""
        manifest = self.manifest
        if manifest.status == "sealed" or is_recorded(self.path):
            return manifest.status
        # It may have been sealed between the two looks.
        return "sealed" if self.manifest.status == "sealed" else "interrupted"

    @property
    def ranks(self) -> list[int]:
        """Ranks that have a log, ascending."""
        return list_ranks(self.path)

    @property
    def gaps(self) -> list[Gap]:
        """What was recorded and is lost. Of an interrupted run, the open end of each rank is one."""
        manifest = self.manifest
        if manifest.status == "sealed":
            return manifest.gaps
        interrupted = self.status == "interrupted"
        gaps = list(manifest.gaps)
        for rank in self.ranks:
            parts = self._parts(rank)
            gaps += map(manifest.explain, parts.gaps())
            if interrupted and not parts.ended:
                gaps.append(parts.open_end("interrupted"))
        return gaps

    def passes(self, rank: int = 0) -> PassRange:
        """Count, first and last of a rank's recorded passes. Raises RunNotFoundError if there is no such rank."""
        self._check_rank(rank)
        return self._parts(rank).passes()

    def table(self, name: str, rank: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """A table, of one rank or of all in their order; rows as recorded.

        Raises UsageError for an unknown table or column, RunNotFoundError for an unknown rank.
        """
        table = _table(name)
        _check_columns(table, columns)
        schema = table.arrow if columns is None else pa.schema([table.arrow.field(c) for c in columns])
        pieces = [piece for parts in self._chosen(rank) for piece in _pieces(parts, table, columns)]
        return pa.concat_tables(pieces) if pieces else schema.empty_table()

    def rows(self, name: str, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows of a table one by one, as dictionaries; holds a segment of them in memory. Errors as `table`."""
        table = _table(name)
        chosen = self._chosen(rank)
        return (
            row
            for parts in chosen
            for piece in _pieces(parts, table, None)
            for batch in piece.to_batches(_BATCH)
            for row in batch.to_pylist()
        )

    def parts(self, rank: int) -> list[Part]:
        """A rank's log in pieces, in recorded order. Raises RunNotFoundError if there is no such rank."""
        self._check_rank(rank)
        parts = self._parts(rank)
        return [*(Part(rank, each) for each in parts.segments), *(Part(rank, each) for each in parts.journals)]

    def pass_rows(self, rank: int, number: int) -> dict[str, list[dict[str, Any]]]:
        """Everything about one pass: its rows of `passes`, `decisions`, `steps` and `events`, by table.

        Opens the segment that holds it, and its neighbour if the pass reaches into that. Raises RunNotFoundError
        if the pass isn't recorded.
        """
        self._check_rank(rank)
        segments = list_segments(self.path, rank)
        journals: Sequence[Any] = ()
        last = max((s.last_pass for s in segments if s.last_pass is not None), default=-1)
        if number >= last:
            parts = self._parts(rank)
            segments, journals = list(parts.segments), parts.journals
        found: dict[str, list[dict[str, Any]]] = {}
        for name in BY_PASS:
            table = TABLES[name]
            rows: list[dict[str, Any]] = []
            for segment in segments:
                if segment.has_pass(number):
                    piece = segment.read_pass(table, number)
                    rows += piece.to_pylist() if piece is not None else []
            position = table.names.index("pass") - 1
            for journal in journals:
                hits = [row for row in journal.rows.get(name, ()) if row[position] == number]
                rows += [dict(zip(table.names, (rank, *row), strict=True)) for row in hits]
            found[name] = rows
        if not found["passes"]:
            raise RunNotFoundError(self._no_pass(rank, number))
        return found

    def connect(self) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with a view per table, all of the same moment: they don't grow with the run."""
        connection = duckdb.connect()
        chosen = self._chosen(None)
        for table in TABLES.values():
            files = [str(path) for parts in chosen for s in parts.segments if (path := s.file(table)) is not None]
            tails = [piece for parts in chosen for piece in _tails(parts, table)]
            tail = f"_{table.name}_tail"
            connection.register(tail, pa.concat_tables(tails) if tails else table.arrow.empty_table())
            columns = ", ".join(f'"{name}"' for name in table.names)
            query = f"SELECT {columns} FROM {tail}"
            if files:
                listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
                query = f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning=false) UNION ALL {query}"
            try:
                connection.execute(f"CREATE VIEW {table.name} AS {query}")
            except duckdb.Error as error:
                raise RunFormatError(f"{self.path}: can't read its {table.name}: {error}") from None
        return connection

    def _parts(self, rank: int) -> Parts:
        if rank in self._sealed:
            return self._sealed[rank]
        complete = self._manifest.status == "sealed"
        parts = read_parts(self.path, rank, self._segments)
        if complete:
            self._sealed[rank] = parts
        return parts

    def _chosen(self, rank: int | None) -> list[Parts]:
        if rank is not None:
            self._check_rank(rank)
        return [self._parts(each) for each in (self.ranks if rank is None else [rank])]

    def _check_rank(self, rank: int) -> None:
        ranks = self.ranks
        if rank not in ranks:
            known = ", ".join(map(str, ranks)) or "none yet"
            raise RunNotFoundError(f"no rank {rank} in run {self.path}; it has: {known}")

    def _no_pass(self, rank: int, number: int) -> str:
        passes = self.passes(rank)
        has = f"it has passes {passes.first} to {passes.last}" if passes.count else "it has no pass yet"
        lost = [gap for gap in self.gaps if gap.rank == rank and gap.may_hold(number)]
        perhaps = f"; the pass may have been lost ({lost[0].reason})" if lost and number >= 0 else ""
        return f"no pass {number} of rank {rank} in run {self.path}: {has}{perhaps}"


class Part:
    """A stretch of a rank's log: a sealed segment, or a journal that isn't sealed yet.

    `first_pass` and `last_pass` are those that any of its rows belong to, None without any.
    """

    def __init__(self, rank: int, source: Segment | Journal) -> None:
        self._rank = rank
        self._source = source
        if isinstance(source, Segment):
            self.first_pass, self.last_pass = source.first_pass, source.last_pass
        else:
            self.first_pass, self.last_pass = source.pass_range or (None, None)

    def table(self, name: str, columns: Sequence[str] | None = None, within: Within | None = None) -> pa.Table:
        """Its rows of a table, as recorded; only row groups with rows `within` are read. Errors as `Run.table`."""
        table = _table(name)
        _check_columns(table, columns)
        piece = None
        if isinstance(self._source, Segment):
            piece = self._source.read(table, columns, within)
        elif rows := self._source.rows.get(name):
            piece = to_arrow(table, self._rank, rows)
            if within is not None:
                index = piece.column(within.column)
                piece = piece.filter(pc.and_(pc.greater_equal(index, within.first), pc.less_equal(index, within.last)))
        if piece is None:
            piece = table.arrow.empty_table()
        return piece if columns is None else piece.select(list(columns))


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run in a list."""

    path: Path
    name: str
    created: str
    """UTC, ISO 8601; empty if unreadable."""
    status: str
    """`recording`, `sealed`, `interrupted`, or `unreadable`."""
    ranks: int
    passes: int
    """Of all ranks."""
    requests: int
    """Ended ones, of all ranks."""
    bytes: int
    """On disk."""
    problem: str | None = None
    """Why it can't be read."""


def default_log_dir() -> Path:
    """Where runs are: `$SCHEDSCOPE_LOG_DIR`, else `./schedscope-logs`."""
    return Path(os.environ.get(LOG_DIR_VARIABLE) or "schedscope-logs")


def find_runs(log_dir: str | Path | None = None) -> list[RunInfo]:
    """The runs of a directory, newest first. One that can't be read is listed as such; no directory, no runs."""
    return [_info(path) for path in _run_paths(_log_dir(log_dir))]


def resolve_run(text: str | Path | None = None, log_dir: str | Path | None = None) -> Path:
    """The directory of a run: by path, by name (the newest of that name), or None for the newest
    in which anything was recorded.

    A name is the directory's, with or without its date. Raises RunNotFoundError.
    """
    directory = _log_dir(log_dir)
    if text is not None and (Path(text) / MANIFEST).is_file():
        return Path(text)
    paths = _run_paths(directory)
    if text is None:
        recorded = [path for path in paths if list_ranks(path)]
        if paths:
            return (recorded or paths)[0]
        raise RunNotFoundError(f"no run in {directory}; record one with: schedscope record -- COMMAND")
    for path in paths:
        if path.name == str(text):
            return path
    for path in paths:
        if _name(path) == str(text):
            return path
    shown = ", ".join(path.name for path in paths[:_SHOWN]) or "no run"
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    raise RunNotFoundError(
        f"no run {str(text)!r}: neither a run's directory nor a run in {directory}, which has {shown}{more}"
    )


def _log_dir(log_dir: str | Path | None) -> Path:
    return default_log_dir() if log_dir is None else Path(log_dir)


def _run_paths(log_dir: Path) -> list[Path]:
    """Run directories, newest first."""
    return sorted((path.parent for path in log_dir.glob(f"*/{MANIFEST}")), key=_age, reverse=True)


def _age(path: Path) -> tuple[str, str]:
    try:
        return read_manifest(path).created, path.name
    except SchedscopeError:
        return "", path.name


def _name(path: Path) -> str | None:
    try:
        return read_manifest(path).name
    except SchedscopeError:
        return None


def _info(path: Path) -> RunInfo:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        run = Run.open(path)
        totals = run.manifest.totals
        if run.manifest.status != "sealed":
            parts = [run._parts(rank) for rank in run.ranks]
            totals = {str(p.rank): {name: p.count(name) for name in ("passes", "requests")} for p in parts}
        return RunInfo(
            path=path,
            name=run.manifest.name,
            created=run.manifest.created,
            status=run.status,
            ranks=len(totals),
            passes=sum(rows.get("passes", 0) for rows in totals.values()),
            requests=sum(rows.get("requests", 0) for rows in totals.values()),
            bytes=size,
        )
    except SchedscopeError as error:
        return RunInfo(path, path.name, "", "unreadable", 0, 0, 0, size, str(error))


def _table(name: str) -> Table:
    if name not in TABLES:
        raise UsageError(f"no table {name!r}; there are: {', '.join(TABLES)}")
    return TABLES[name]


def _check_columns(table: Table, columns: Sequence[str] | None) -> None:
    for name in columns or ():
        if name not in table.names:
            raise UsageError(f"no column {name!r} in {table.name}; there are: {', '.join(table.names)}")


def _pieces(parts: Parts, table: Table, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """The rows of a table, part by part, in recorded order."""
    for segment in parts.segments:
        piece = segment.read(table, columns)
        if piece is not None:
            yield piece
    for piece in _tails(parts, table):
        yield piece if columns is None else piece.select(list(columns))


def _tails(parts: Parts, table: Table) -> Iterator[pa.Table]:
    for journal in parts.journals:
        if rows := journal.rows.get(table.name):
            yield to_arrow(table, parts.rank, rows)
