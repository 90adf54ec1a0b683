"""Reading a run: rows, passes, SQL. Also while it is recorded, and after its recorder was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
from schedscope.engine.errors import RunFormatError, RunNotFoundError, UsageError
from schedscope.recorder.files import PASS, Within
from schedscope.recorder.frame import written
from schedscope.recorder.journal import BY_PASS, SORTED, Journal
from schedscope.recorder.manifest import Gap, Manifest, read_manifest
from schedscope.recorder.mirror import mirror_of, mirror_run
from schedscope.recorder.open_files import OpenFiles
from schedscope.recorder.parts import Part, Parts, PassRange
from schedscope.recorder.rank_files import RankFiles, is_recorded, list_ranks
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.rids import NAME as RIDS
from schedscope.recorder.rids import RID_TABLES
from schedscope.recorder.schema import TABLES, Table
from schedscope.recorder.segment import Segment
from schedscope.recorder.store import PARALLEL, is_url, shown_url

_BATCH = 4_096
_TRIES = 100

_Found = TypeVar("_Found")


class Run:
    """A run. Every call looks at the files as they are then; while recording, later calls see more.

    Raises RunFormatError, naming the file, from any method that reads one it can't; of a run in an object store also
    StoreError.
    """

    def __init__(self, path: Path, manifest: Manifest, files: OpenFiles | None = None) -> None:
        """Use `open`."""
        self.path = path
        self._manifest = manifest
        self._mirror = mirror_of(path)
        self._files = OpenFiles() if files is None else files
        self._ranks: dict[int, RankFiles] = {}

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run's directory, or its URL in an object store. Raises RunNotFoundError, RunFormatError."""
        path = mirror_run(path).path if is_url(path) else Path(path)
        if (mirror := mirror_of(path)) is not None:
            mirror.refresh()
        return cls(path, read_manifest(path))

    def again(self, files: OpenFiles | None = None) -> Run:
        """The same run for another thread: an opened one is for one thread at a time.

        Args:
            files: what those that share it have open and decoded.
        """
        return Run(self.path, self._manifest, files)

    @property
    def manifest(self) -> Manifest:
        """The manifest, as it is now."""
        if self._manifest.status != "sealed":
            if self._mirror is not None:
                self._mirror.refresh()
            self._manifest = read_manifest(self.path)
        return self._manifest

    @property
    def where(self) -> str:
        """Its path, or its URL, for people and for the next command."""
        return str(self.path) if self._mirror is None else shown_url(self._mirror.url)

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

    def check_recorded(self) -> None:
        """Raises RunNotFoundError if no rank has a log."""
        if not self.ranks:
            raise RunNotFoundError(f"{self.where}: nothing was recorded in this run")

    @property
    def gaps(self) -> list[Gap]:
        """What was recorded and is lost. Of an interrupted run, the open end of each rank is one."""
        manifest = self.manifest
        if manifest.status == "sealed":
            return manifest.gaps
        interrupted = self.status == "interrupted"
        gaps = list(manifest.gaps)
        for rank in self.ranks:

            def look(parts: Parts) -> list[Gap]:
                open_end = [parts.open_end("interrupted")] if interrupted and not parts.ended else []
                return [*map(manifest.explain, parts.gaps()), *open_end]

            gaps += self._look(rank, look)
        return gaps

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Passes and ended requests by rank; of a sealed run rows of all tables."""
        manifest = self.manifest
        if manifest.status == "sealed":
            return manifest.totals
        return {str(rank): self._look(rank, _totals) for rank in self.ranks}

    def passes(self, rank: int = 0) -> PassRange:
        """Count, first and last of a rank's recorded passes. Raises RunNotFoundError if there is no such rank."""
        self._check_rank(rank)
        return self._look(rank, lambda parts: parts.passes())

    def parts(self, rank: int = 0) -> list[Part]:
        """The pieces of a rank's log in recorded order, as they are now; each can be read at any later time.

        Raises RunNotFoundError if there is no such rank.
        """
        self._check_rank(rank)
        return list(self._parts(rank))

    def table(
        self,
        name: str,
        rank: int | None = None,
        columns: Sequence[str] | None = None,
        passes: tuple[int, int] | None = None,
        steps: tuple[int, int] | None = None,
    ) -> pa.Table:
        """A table, of one rank or of all in their order; rows as recorded.

        Args:
            passes: of `passes` and `decisions` only the rows of these, both included; of other tables, the rows of
                all parts that hold anything of these passes.
            steps: only the rows of these, both included, of a table that tells the step.

        Raises UsageError for an unknown table or column, RunNotFoundError for an unknown rank.
        """
        table = _table(name)
        _check_columns(table, columns)
        schema = table.arrow if columns is None else pa.schema([table.arrow.field(c) for c in columns])
        within = None if passes is None or name not in SORTED else Within(PASS, *passes)
        if steps is not None:
            within = Within("step", *steps)
        chosen = [
            part for parts in self._chosen(rank) for part in (parts if passes is None else parts.of_passes(*passes))
        ]
        if self._mirror is not None:
            with suppress(FileNotFoundError):  # merged meanwhile: `Part.table` knows
                self._mirror.fetch(file for part in chosen if (file := part.file(table)) is not None)
        pieces = [piece for part in chosen if (piece := part.table(name, columns, within)).num_rows]
        return pa.concat_tables(pieces) if pieces else schema.empty_table()

    def rows(self, name: str, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows of a table one by one, as dictionaries; holds few of them in memory. Errors as `table`."""
        table = _table(name)
        chosen = self._chosen(rank)
        return (
            row
            for parts in chosen
            for part in parts
            for chunk in part.chunks(table.name)
            for batch in chunk.to_batches(_BATCH)
            for row in batch.to_pylist()
        )

    def pass_rows(self, rank: int, number: int) -> dict[str, list[dict[str, Any]]]:
        """Everything about one pass: its rows of `passes`, `decisions`, `steps` and `events`, by table.

        Opens the segment that holds it, and its neighbour if the pass reaches into that. Raises RunNotFoundError
        if the pass isn't recorded.
        """
        self._check_rank(rank)
        found = self._again(rank, lambda files: _pass_rows(files, number))
        if not found["passes"]:
            raise RunNotFoundError(self._no_pass(rank, number))
        return found

    def request_rows(self, rid: str, rank: int | None = None) -> dict[str, list[dict[str, Any]]]:
        """Everything about one request, over all its passes: its rows of `decisions`, `events` and `requests`.

        Reads of each segment a few hundred bytes, or of many small ones a file about all, and of those that know the
        request the row groups that it is in.
        Raises RunNotFoundError if no row mentions it, or for an unknown rank.
        """
        if rank is not None:
            self._check_rank(rank)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in RID_TABLES}
        with suppress(FileNotFoundError):  # merged meanwhile: `_look` knows
            self.bring(self._chosen(rank) if self._mirror is not None else (), (), rids=True)
        for each in self.ranks if rank is None else [rank]:
            rows = self._again(each, partial(_request_rows, rid=written(rid)))
            for name in RID_TABLES:
                found[name] += rows[name]
        if not any(found.values()):
            where = "" if rank is None else f"rank {rank} of "
            raise RunNotFoundError(f"no request {rid!r} in {where}run {self.where}")
        return found

    def connect(self, tables: Iterable[str] = TABLES) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with a view per table, all of the same moment: they don't grow with the run.

        While a run is recorded its segments are merged, and the files behind the views go away a minute later. So
        don't keep a connection to a live run, make a new one.

        Args:
            tables: those that will be asked for; of a run in an object store, they are fetched.
        """
        wanted = [_table(name) for name in tables]
        for _ in range(_TRIES):
            chosen: list[Parts] = []
            try:
                chosen = self._chosen(None)
                self.bring(chosen, tables)
                return _connected(chosen, wanted)
            except (duckdb.Error, FileNotFoundError) as error:
                # Merged or expired between the listing and the look into it?
                gone = isinstance(error, FileNotFoundError) or any(
                    not segment.path.is_dir() for parts in chosen for segment in parts.segments
                )
                if not gone:
                    raise RunFormatError(f"{self.path}: its tables can't be read: {error}") from None
                for files in self._ranks.values():
                    files.forget()
        raise RunFormatError(f"{self.path}: segments come and go too fast to be read")

    def bring(self, parts: Iterable[Parts], tables: Iterable[str] = TABLES, *, rids: bool = False) -> None:
        """Of a run in an object store, have these files here: many at a time, which one by one would take long.

        Raises FileNotFoundError if a segment is gone.
        """
        if self._mirror is None:
            return
        wanted = [_table(name) for name in tables]
        segments = [segment for each in parts for segment in each.segments]
        files = [path for segment in segments for table in wanted if (path := segment.file(table)) is not None]
        self._mirror.fetch([*files, *(s.path / RIDS for s in segments if rids and s.is_current)])

    def _rank(self, rank: int) -> RankFiles:
        files = self._ranks.get(rank)
        if files is None:
            files = self._ranks[rank] = RankFiles(rank_dir(self.path, rank), rank, self._files)
        return files

    def _parts(self, rank: int) -> Parts:
        return self._rank(rank).look()

    def _look(self, rank: int, read: Callable[[Parts], _Found]) -> _Found:
        return self._again(rank, lambda files: read(files.look()))

    def _again(self, rank: int, read: Callable[[RankFiles], _Found]) -> _Found:
        """What `read` makes of a rank's files; once more if one of them was merged away under it."""
        files = self._rank(rank)
        for _ in range(_TRIES):
            try:
                return read(files)
            except FileNotFoundError:
                files.forget()
        raise RunFormatError(f"{self.path}: segments of rank {rank} come and go too fast to be read")

    def _chosen(self, rank: int | None) -> list[Parts]:
        if rank is not None:
            self._check_rank(rank)
            return [self._parts(rank)]
        if self._mirror is None:
            return [self._parts(each) for each in self.ranks]
        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(self._parts, self.ranks))

    def _check_rank(self, rank: int) -> None:
        if rank >= 0 and rank_dir(self.path, rank).is_dir():
            return
        ranks = self.ranks
        if rank not in ranks:
            known = ", ".join(map(str, ranks)) or "none yet"
            raise RunNotFoundError(f"no rank {rank} in run {self.where}; it has: {known}")

    def _no_pass(self, rank: int, number: int) -> str:
        passes = self.passes(rank)
        has = f"it has passes {passes.first} to {passes.last}" if passes.count else "it has no pass yet"
        lost = [gap for gap in self.gaps if gap.rank == rank and gap.may_hold(number)]
        perhaps = f"; the pass may have been lost ({lost[0].reason})" if lost and number >= 0 else ""
        return f"no pass {number} of rank {rank} in run {self.where}: {has}{perhaps}"


def _totals(parts: Parts) -> dict[str, int]:
    return {name: parts.count(name) for name in ("passes", "requests")}


def _table(name: str) -> Table:
    if name not in TABLES:
        raise UsageError(f"no table {name!r}; there are: {', '.join(TABLES)}")
    return TABLES[name]


def _check_columns(table: Table, columns: Sequence[str] | None) -> None:
    for name in columns or ():
        if name not in table.names:
            raise UsageError(f"no column {name!r} in {table.name}; there are: {', '.join(table.names)}")


def _pass_rows(files: RankFiles, number: int) -> dict[str, list[dict[str, Any]]]:
    sources = files.with_pass(number)
    return {
        name: [row for source in sources for row in _rows_of_pass(files, TABLES[name], source, number)]
        for name in BY_PASS
    }


def _rows_of_pass(files: RankFiles, table: Table, source: Segment | Journal, number: int) -> list[dict[str, Any]]:
    if isinstance(source, Segment):
        return source.read_pass(table, number)
    return [dict(zip(table.names, (files.rank, *row), strict=True)) for row in source.of_pass(table.name, number)]


def _request_rows(files: RankFiles, rid: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in RID_TABLES}
    for source in files.look(rid).sources:
        if isinstance(source, Segment):
            for name, rows in source.read_request(rid).items():
                found[name] += rows
            continue
        for name in RID_TABLES:
            names, position = TABLES[name].names, TABLES[name].names.index("rid") - 1
            hits = [row for row in source.rows.get(name, ()) if row[position] == rid]
            found[name] += [dict(zip(names, (files.rank, *row), strict=True)) for row in hits]
    return found


def _connected(chosen: Sequence[Parts], tables: Iterable[Table]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for table in tables:
        files: list[str] = []
        older: list[pa.Table] = []
        tails: list[pa.Table] = []
        for parts in chosen:
            for source in parts.sources:
                if isinstance(source, Journal):
                    tails.append(source.table(table.name))
                elif source.is_current and (path := source.file(table)) is not None:
                    source.check(table)
                    files.append(str(path))
                elif not source.is_current:
                    older.append(source.read(table))
        pieces = []
        for name, rows in (("older", older), ("tail", tails)):
            connection.register(f"_{table.name}_{name}", pa.concat_tables([table.arrow.empty_table(), *rows]))
            pieces.append(f"_{table.name}_{name}")
        if files:
            listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
            pieces.insert(1, f"read_parquet([{listed}], hive_partitioning=false)")
        columns = ", ".join(f'"{name}"' for name in table.names)
        query = " UNION ALL ".join(f"SELECT {columns} FROM {piece}" for piece in pieces)
        connection.execute(f"CREATE VIEW {table.name} AS {query}")
    return connection
