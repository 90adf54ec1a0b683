"""An open run: what screens ask it. Every method may take time, so none is called on the screen's own thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.errors import RunNotFoundError, SchedscopeError, UsageError
from schedscope.recorder.open_files import OpenFiles
from schedscope.recorder.parts import PassRange
from schedscope.recorder.run import Run
from schedscope.replay.doctor import examine
from schedscope.replay.explain_pass import explain_moment
from schedscope.replay.explanation import PassExplanation
from schedscope.replay.finding import Finding
from schedscope.replay.ledger import RequestLedger, request_ledger
from schedscope.replay.measures import connect_for
from schedscope.replay.moment import decide_again
from schedscope.replay.page import Page, page_of_plan, page_of_rows
from schedscope.replay.redecide import redecide
from schedscope.replay.search import find_decisions
from schedscope.replay.series import Timeline
from schedscope.replay.walker import Visited, Walker
from schedscope.tui.cursor import Cursor

PAGES = 32
LIVES = 8
_DECODED_BYTES = 4 * 2**20
"""Row groups of a table that stay in memory, of all readers together."""
_TIMELINE_MB = 64
_SQL_ROWS = 10_000
"""Of an answer that are shown."""


Wanted = Callable[[], bool]
"""Whether an answer is still wanted."""


def _always() -> bool:
    return True


class Scene(NamedTuple):
    """A pass that was re-run: all that its decision could read, and what it decided."""

    visited: Visited
    page: Page
    identical: bool | None
    """Whether the recorded decisions are the same; None: they were not recorded."""


class Life(NamedTuple):
    """A request, from its arrival to its end, as far as it was recorded."""

    rank: int
    rid: str
    decisions: tuple[dict[str, Any], ...]
    """Rows of the log, by pass."""
    events: tuple[dict[str, Any], ...]
    request: dict[str, Any] | None
    """Its row of `requests`; None: it has not ended."""
    ledger: RequestLedger | None
    problem: str | None
    """Why there is no ledger."""

    @property
    def passes(self) -> tuple[int, ...]:
        """Passes that said something about it; where decisions were not recorded, those in which it did something."""
        return _passes(self.decisions, self.events)

    def nearest(self, number: int) -> int | None:
        """Of its passes the nearest one to a pass, itself if it is one of them."""
        return min(self.passes, key=lambda each: (abs(each - number), each), default=None)

    def change(self, number: int, step: int) -> int | None:
        """The next pass (the one before, if `step` is negative) in which something is other than in its pass before."""
        told = [_told(row) for row in self.decisions]
        changed = [row["pass"] for i, row in enumerate(self.decisions) if i == 0 or told[i] != told[i - 1]]
        changed = changed or list(self.passes)
        later = [each for each in changed if each > number] if step > 0 else [each for each in changed if each < number]
        return (min(later) if step > 0 else max(later)) if later else None


class Answer(NamedTuple):
    """What SQL gave."""

    table: pa.Table
    more: bool
    """There are rows that are not shown."""


class Session:
    """Use from any thread: questions about one thing are answered one after the other."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._files = OpenFiles(size=_DECODED_BYTES)
        self._pages: OrderedDict[tuple[int, int], Page] = OrderedDict()
        self._lives: OrderedDict[tuple[int, str], Life] = OrderedDict()
        self._times: dict[int, pa.Table] = {}
        self._walkers: dict[int, Walker] = {}
        self._reach_run, self._page_run, self._life_run, self._walk_run = (self._again() for _ in range(4))
        self._page_lock = threading.Lock()
        self._life_lock = threading.Lock()
        self._walk_lock = threading.Lock()
        self._timeline: Timeline | None = None

    def _again(self) -> Run:
        """The run, for one more thread."""
        return self.run.again(self._files)

    @property
    def name(self) -> str:
        """The run's, as its directory is called."""
        return self.run.path.name

    # ---- passes --------------------------------------------------------------------------------------------

    def reach(self) -> dict[int, PassRange]:
        """The passes of each rank, as they are now."""
        run = self._reach_run
        return {rank: run.passes(rank) for rank in run.ranks}

    def is_recorded(self) -> bool:
        """Whether it still grows."""
        return self._reach_run.status == "recording"

    def longest_queue(self, rank: int | None) -> Cursor | None:
        """The first pass with the longest queue, of a rank or of all; None: there is no pass."""
        table = self._reach_run.table("passes", rank, ["rank", "pass", "queue_len"])
        if not table.num_rows:
            return None
        place = pc.index(table["queue_len"], pc.max(table["queue_len"])).as_py()
        return Cursor(table["rank"][place].as_py(), table["pass"][place].as_py())

    def page(self, rank: int, number: int) -> Page:
        """A pass. Raises RunNotFoundError, RunFormatError."""
        with self._page_lock:
            known = self._pages.get((rank, number))
            if known is not None:
                self._pages.move_to_end((rank, number))
                return known
            rows = self._page_run.pass_rows(rank, number)
            page = page_of_rows(rows)
        begin_ns = next((step["start_ns"] for step in rows["steps"] if step["pass"] == number), None)
        if page is None:
            moment = self.visit(rank, number).moment
            page = page_of_plan(moment, decide_again(moment), rank, begin_ns)
            if page is None:
                raise RunNotFoundError(f"pass {number} of rank {rank}: the replay comes to no pass here")
        if begin_ns is not None:  # else its step has not ended, and there is more to come
            with self._page_lock:
                self._pages[rank, number] = page
                while len(self._pages) > PAGES:
                    self._pages.popitem(last=False)
        return page

    def visit(self, rank: int, number: int, wanted: Wanted = _always) -> Visited:
        """The scheduler before a pass. Raises RunNotFoundError, RunFormatError, OvertakenError."""
        with self._walk_lock:
            walker = self._walkers.get(rank)
            if walker is None:
                walker = self._walkers[rank] = Walker(self._walk_run, rank)
            return walker.at(number, wanted)

    def scene(self, rank: int, number: int, recorded: Page, wanted: Wanted = _always) -> Scene:
        """A pass, re-run, as long as that is wanted. Raises RunNotFoundError, RunFormatError, OvertakenError."""
        visited = self.visit(rank, number, wanted)
        moment = visited.moment
        plan = decide_again(moment)
        page = page_of_plan(moment, plan, rank, recorded.facts.begin_ns)
        if page is None:
            raise RunNotFoundError(f"pass {number} of rank {rank}: the replay comes to no pass here")
        return Scene(visited, page, page.same_outcome(recorded))

    def other(self, scene: Scene, policy: str) -> Page:
        """The same pass under another policy. Raises UsageError, ConfigError."""
        decided = redecide(scene.visited.moment, policy, {})
        page = page_of_plan(scene.visited.moment, decided.other, scene.page.facts.rank, scene.page.facts.begin_ns)
        if page is None:
            raise UsageError(f"under {policy} a gate would have ended this step before the pass")
        return page

    def explain(self, scene: Scene, rid: str) -> PassExplanation:
        """Why a request stands where it stands, with what would have changed that.

        Raises RunFormatError, and DivergenceError if the pass does not come out as recorded.
        """
        moment, heard, replayer = scene.visited
        with self._walk_lock:
            return explain_moment(replayer, moment, heard, rid, alone=True)

    # ---- requests ------------------------------------------------------------------------------------------

    def life(self, rank: int, rid: str) -> Life:
        """All about a request. Raises RunNotFoundError if nothing mentions it."""
        with self._life_lock:
            known = self._lives.get((rank, rid))
            if known is not None:
                return known
            rows = self._life_run.request_rows(rid, rank)
            ledger, problem = None, None
            try:
                ledger = request_ledger(self._life_run, rid, rank)
            except SchedscopeError as error:
                problem = str(error)
            decisions = tuple(sorted(rows["decisions"], key=lambda row: row["pass"]))
            events = tuple(sorted(rows["events"], key=lambda row: row["seq"]))
            life = Life(rank, rid, decisions, events, next(reversed(rows["requests"]), None), ledger, problem)
            if life.request is not None:  # else there is more to come
                self._lives[rank, rid] = life
                while len(self._lives) > LIVES:
                    self._lives.popitem(last=False)
            return life

    def passes_of(self, rank: int, rid: str) -> tuple[int, ...]:
        """`Life.passes` of a request; none if nothing mentions it."""
        with self._life_lock:
            known = self._lives.get((rank, rid))
            if known is not None:
                return known.passes
            try:
                rows = self._life_run.request_rows(rid, rank)
            except RunNotFoundError:
                return ()
            return _passes(rows["decisions"], rows["events"])

    # ---- time ----------------------------------------------------------------------------------------------

    def since_start(self, rank: int, ns: int) -> int | None:
        """Nanoseconds between the first pass of a rank and a moment; None: no pass of it has ended."""
        times = self._pass_times(rank)
        return ns - times["start_ns"][0].as_py() if times.num_rows else None

    def pass_since(self, rank: int, since_ns: int) -> int | None:
        """The pass that a rank was at so long after its first one began; None: no pass of it has ended."""
        times = self._pass_times(rank)
        if not times.num_rows:
            return None
        begun = pc.sum(pc.less_equal(times["start_ns"], times["start_ns"][0].as_py() + since_ns)).as_py()
        return int(times["pass"][max(begun, 1) - 1].as_py())

    def _pass_times(self, rank: int) -> pa.Table:
        """When the passes of a rank began: of a run that grows, as it is now."""
        with self._page_lock:
            times = self._times.get(rank)
            if times is None:
                steps = self._page_run.table("steps", rank, ["pass", "start_ns"])
                times = steps.filter(pc.is_valid(steps["pass"]))
                if self.run.manifest.status == "sealed":
                    self._times[rank] = times
            return times

    # ---- the whole run -------------------------------------------------------------------------------------

    def timeline(self, *, again: bool = False) -> Timeline:
        """The run over time; `again`: as it is now. Raises RunNotFoundError for one without a step."""
        if self._timeline is None or again:
            self._timeline = Timeline.open(self._again(), memory_mb=_TIMELINE_MB, brief=True)
        return self._timeline

    def findings(self) -> tuple[Finding, ...]:
        """What the doctor says. Raises RunFormatError, UsageError."""
        return examine(self._again()).findings

    def sql(self, query: str) -> Answer:
        """Ask the log. Raises UsageError for what DuckDB refuses."""
        connection = connect_for(self._again(), query)
        try:
            relation = connection.sql(query)
            if relation is None:
                raise UsageError("this statement gives no rows")
            answer = relation.limit(_SQL_ROWS + 1).to_arrow_table()
        except duckdb.Error as error:
            raise UsageError(str(error)) from None
        finally:
            connection.close()
        return Answer(answer.slice(0, _SQL_ROWS), answer.num_rows > _SQL_ROWS)

    def hits(self, condition: str, rank: int) -> tuple[Cursor, ...]:
        """Decisions of a rank on which a breakpoint's condition holds, in order. Raises UsageError."""
        return tuple(Cursor(rank, *hit) for hit in find_decisions(self._again(), condition, rank))


def _passes(decisions: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    told = sorted(row["pass"] for row in decisions)
    return tuple(told or sorted({row["pass"] for row in events if row["pass"] is not None}))


def _told(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a decision about a request another one."""
    return row["place_after"], row["deprioritized"], row["partner"], row["matched"], row["result"], row["reason"]
