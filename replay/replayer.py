"""Re-run a recording: feed a scheduler what the recorded one was fed, and look at every decision.

This rebuilds every state of a run, from its start or from the checkpoint before the pass that is asked for. It goes
part by part: neither a long run nor a far pass takes more memory than a part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunFormatError, RunNotFoundError
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.snapshot import restore_snapshot
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import Tracer
from schedscope.recorder.checkpoint import Checkpoint
from schedscope.recorder.decision_columns import DecisionColumns
from schedscope.recorder.files import PASS, Within
from schedscope.recorder.frame import DECIDED, Body, Rows, pack_decided, unpack
from schedscope.recorder.hello import Detail
from schedscope.recorder.parts import Part
from schedscope.recorder.rows import Decided, PassFacts, Row, decision_hash
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import Lived, RunTracer
from schedscope.replay.columns import packed_lists, rows_of, values_of
from schedscope.replay.from_view import Seen, see
from schedscope.replay.moment import Moment, decide_again
from schedscope.replay.rebuild import LostError, Rebuild, given_of, reports_of
from schedscope.replay.script import Script, Turn, read_scripts
from schedscope.replay.sequences import Sequences
from schedscope.replay.source import is_observed
from schedscope.replay.verify_view import difference


class Listener(Tracer):
    """Hears what happens while a scheduler is rebuilt."""

    def attach(self, scheduler: Scheduler) -> None:
        """From now on it is this scheduler, whose past is unknown."""

    def detach(self, number: int) -> None:
        """The moment before this pass is not that scheduler's: nothing is known of how it came about."""


class Start(NamedTuple):
    """Where a re-run can begin: a checkpoint, or the beginning of the run."""

    part: int
    """Index of the part that it is in."""
    tick: int
    step: int
    """The first step to re-run."""
    pass_number: int
    """The first pass to re-run."""
    since: int
    """Tick from which on the log holds the tokens of its state."""

    @property
    def is_checkpoint(self) -> bool:
        """It is not the beginning of the run."""
        return self.tick > 0


BEGINNING = Start(0, 0, 0, 0, 0)


class Recollection(RunTracer):
    """Records a re-run into memory: what comes of it can then be held against the log, table by table. Clocks are 0."""

    def __init__(self, detail: Detail) -> None:
        super().__init__(_Nowhere(detail), checkpoint_every=sys.maxsize, clock_ns=lambda: 0)
        self._ended_in: list[int] = []
        """The step of each row of `requests`."""
        self._whole: dict[str, int] = {}
        """Rows of steps that have ended."""
        self.decisions = DecisionColumns()
        """Of all passes since the last `take`."""

    def _flush(self) -> None:
        """It stays here."""

    def _put_pass(self, number: int, step: int, seq: int, decide_ns: int, facts: PassFacts, told: Decided) -> None:
        if self._keeps(number):
            self.decisions.add(number, told)
        self._put(DECIDED, (number, step, seq, decide_ns, facts, decision_hash(pack_decided(told)), told.count, None))

    def put_request(self, live: Lived, asked: Row, kind: str, detail: Any) -> None:
        """As the recorder does."""
        super().put_request(live, asked, kind, detail)
        self._ended_in.append(self._step_number())

    # Tokens are what the re-run was given; they are not compared.
    on_prompt = Tracer.on_prompt
    on_outputs = Tracer.on_outputs

    def on_committed(self, state: SchedulerState) -> None:
        """A step has ended."""
        super().on_committed(state)
        self._whole = {table: len(rows) for table, rows in self._rows.items()}

    def take(self) -> tuple[Rows, DecisionColumns, list[int]]:
        """What the recorder would have written of all steps that ended since the last call, and of the arrivals before
        them: tables, decisions, and the step of each row of `requests`.
        """
        whole, rows = self._whole, self._rows
        ended = whole.get("requests", 0)
        steps, self._ended_in = self._ended_in[:ended], self._ended_in[ended:]
        self._rows = {table: rest for table in rows if (rest := rows[table][whole.get(table, 0) :])}
        self._whole = {}
        decisions, self.decisions = self.decisions, DecisionColumns()
        return unpack({table: rows[table][:count] for table, count in whole.items()}), decisions, steps


class _Nowhere:
    """A sink for a recorder that hands nothing over."""

    attached = True
    dropped = 0
    key = b""

    def __init__(self, detail: Detail) -> None:
        self.detail = detail

    def write(self, body: Body) -> None:
        """Nothing."""

    def detach(self, error: BaseException) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Replayer:
    """One rank of a run, ready to be re-run. Sees the log as it is when this is made.

    Args:
        run: the recording.
        rank: which of its schedulers. Raises RunNotFoundError if there is none of that number.
    """

    def __init__(self, run: Run, rank: int = 0) -> None:
        if rank not in run.ranks:
            known = ", ".join(str(r) for r in run.ranks) or "none"
            raise RunNotFoundError(f"{run.path}: no rank {rank} in this run; ranks: {known}")
        self.run = run
        self.rank = rank
        manifest = run.manifest
        if manifest.detail.level == "steps":
            raise self._unreadable("it was recorded at level steps, so nothing of it can be re-run")
        if manifest.detail.tokens == "none":
            raise self._unreadable("it was recorded with --tokens none, so nothing of it can be re-run")
        self.config = SchedulerConfig.from_dict(manifest.config_of(rank))
        self.parts: Sequence[Part] = run.parts(rank)
        self._known: dict[int, list[Start]] = {}
        """Checkpoints of the parts that were looked at."""

    # ---- where to begin ------------------------------------------------------------------------------------

    def start_before(self, number: int) -> Start:
        """The last place from which pass `number` can be rebuilt; if there is none, the first one behind it.

        Raises RunFormatError if there is none at all. Looks only at the parts between it and the pass.
        """
        first = self._part_of(number) if self.parts else -1
        for i in range(first, -1, -1):
            for start in reversed(self._checkpoints(i)):
                if start.pass_number <= number and self._stands(start):
                    return start
        if self._begins():
            return BEGINNING
        starts = (start for i in range(len(self.parts)) for start in self._checkpoints(i) if self._stands(start))
        found_later = next(starts, None)
        if found_later is None:
            raise self._unreadable("its beginning is gone, and there is no checkpoint to go on from")
        return found_later

    def start_behind(self, tick: int) -> Start | None:
        """The first place to begin that needs nothing up to a tick, None if there is none."""
        later = (start for i in range(len(self.parts)) for start in self._checkpoints(i) if start.since > tick)
        return next((start for start in later if self._stands(start)), None)

    def same(self, start: Start) -> Start:
        """A place to begin that another look at this log has found. Raises RunFormatError if it is gone."""
        if not start.is_checkpoint:
            return start
        hints = sorted(range(len(self.parts)), key=lambda i: abs(i - start.part))
        found = (each for i in hints for each in self._checkpoints(i) if each.tick == start.tick)
        again = next(found, None)
        if again is None:
            raise self._unreadable(f"its checkpoint before pass {start.pass_number} is gone")
        return again

    def _part_of(self, number: int) -> int:
        """The last part that begins at or before a pass."""
        passes = [i for i, part in enumerate(self.parts) if part.first_pass is not None and part.first_pass <= number]
        return passes[-1] if passes else 0

    def _begins(self) -> bool:
        """Whether the log still has its first step, or no step at all."""
        for part in self.parts:
            steps = part.table("steps", ("step",)).column("step")
            if len(steps):
                return bool(steps[0].as_py() == 0)
        return True

    def _checkpoints(self, part: int) -> list[Start]:
        if part not in self._known:
            rows = rows_of(self.parts[part], "checkpoints", ("seq", "step", "pass", "since"))
            self._known[part] = sorted(Start(part, *row) for row in rows)
        return self._known[part]

    def _stands(self, start: Start) -> bool:
        """Whether the checkpoint is still there on which this one stands."""
        if start.since == start.tick:
            return True
        if start.since == 0:
            return self._begins()
        return any(each.tick == start.since for i in range(start.part, -1, -1) for each in self._checkpoints(i))

    # ---- rebuilding ----------------------------------------------------------------------------------------

    def rebuild(self, start: Start, tracer: Tracer | None = None) -> Rebuild:
        """The scheduler at a place to begin. Raises RunFormatError."""
        if not start.is_checkpoint:
            return Rebuild(Scheduler(self.config, tracer))
        found = self.parts[start.part].table("checkpoints", ("state",), Within("seq", start.tick, start.tick))
        try:
            checkpoint = Checkpoint(found.column("state")[0].as_py())
            snapshot = checkpoint.unpack(self._texts(start, set(checkpoint.sources)))
            return Rebuild(restore_snapshot(snapshot, self.config, tracer), start.tick)
        except (LookupError, ValueError, TypeError) as error:
            raise self._unreadable(f"its checkpoint before pass {start.pass_number} is broken: {error!r}") from None

    def _texts(self, start: Start, wanted: set[int]) -> dict[int, bytes]:
        """What is written under these ticks: sequences of requests, and what checkpoints carried."""
        if not wanted:
            return {}
        first = start.part
        texts = self._carried(first, wanted)
        while first and not any(tick <= min(wanted) for tick in self._ticks(first)):
            first -= 1
            texts |= self._carried(first, wanted)
        sequences = Sequences(wanted - texts.keys(), start.tick)
        for part in self.parts[first : start.part + 1]:
            sequences.read(part)
        return texts | sequences.take()

    def _carried(self, part: int, wanted: set[int]) -> dict[int, bytes]:
        """What the checkpoints of a part carried that were taken at these ticks; all others stay unread."""
        ticks = wanted & self._ticks(part)
        if not ticks:
            return {}
        found = self.parts[part].table("checkpoints", ("seq", "carried"), Within("seq", min(ticks), max(ticks)))
        found = found.filter(pc.is_in(found.column("seq"), pa.array(ticks, pa.int64())))
        return dict(zip(values_of(found.column("seq")), packed_lists(found.column("carried")), strict=True))

    def _ticks(self, part: int) -> set[int]:
        return {each.tick for each in self._checkpoints(part)}

    # ---- the iterator --------------------------------------------------------------------------------------

    def replay(
        self, recollection: Recollection, start: Start = BEGINNING, stop_step: int | None = None
    ) -> Iterator[Turn]:
        """Re-run from a place to begin, recording it; yields every step when it has ended.

        Raises LostError, RunFormatError.

        Args:
            stop_step: end before this step.
        """
        rebuild = self.rebuild(start, recollection)
        recollection.attach(rebuild.scheduler)
        try:
            for script in self._scripts(start, rebuild.tick):
                for turn in rebuild.turns(script):
                    if stop_step is not None and turn.step >= stop_step:
                        return
                    rebuild.take(turn, script)
                    yield turn
        except LostError:
            raise
        except RunFormatError as error:
            raise self._unreadable(str(error)) from None

    def at(self, number: int) -> Moment:
        """The scheduler just before pass `number`.

        Of a scheduler that was only watched, this is the rebuilt state, with all of the cache, if it leads to the
        recorded decision; else what the pass was seen to read. Raises RunNotFoundError if it was not recorded,
        RunFormatError if what comes before it is gone.
        """
        return next(self.visit([number]))

    def visit(self, numbers: Iterable[int], listener: Listener | None = None) -> Iterator[Moment]:
        """What `at` gives for each of these passes, in ascending order, going on from one to the next.

        A moment holds until the next one is asked for. Errors as `at`.

        Args:
            listener: hears what happens on the way; whenever a later checkpoint is nearer, it is attached anew.
        """
        wanted = sorted(set(numbers))
        rebuild, begun = None, BEGINNING
        going: Iterator[Moment] = iter(())
        reach: int | None = None
        """The last pass that this goes on to."""
        observed = is_observed(self.run.manifest)
        for number in wanted:
            seen = see(self.parts, self.config, number) if observed else None
            if observed and seen is None:
                raise self._no_pass(number)
            try:
                if reach is None or number > reach:
                    start = self._start_for(number)
                    if rebuild is None or start.pass_number > rebuild.scheduler.passes:
                        rebuild, begun = self.rebuild(start, listener), start
                        if listener is not None:
                            listener.attach(rebuild.scheduler)
                    reach = self._last_in_a_row(wanted, number, start)
                    going = self._go_on(rebuild, begun, number, reach)
                moment = next(going)
                right = seen is None or self._is_right(seen, moment)
            except RunFormatError:
                if seen is None:
                    raise
                right = False
            if seen is not None and not right:
                rebuild = reach = None
                moment = seen.moment
                if listener is not None:
                    listener.detach(number)
            yield moment

    def _is_right(self, seen: Seen, moment: Moment) -> bool:
        """Whether a rebuilt moment of a scheduler that was watched leads to what it was seen to decide."""
        number = moment.number
        rows = self.run.table("decisions", self.rank, passes=(number, number)).combine_chunks()
        return difference(seen, decide_again(moment), self.rank, rows) is None

    def _start_for(self, number: int) -> Start:
        """Where to begin for the moment before a pass. Raises RunNotFoundError, RunFormatError."""
        first = next((part.first_pass for part in self.parts if part.first_pass is not None), None)
        if first is None or number < first:
            raise self._no_pass(number)
        start = self.start_before(number)
        if start.pass_number > number:
            raise self._unreadable(f"pass {number} can't be rebuilt: the log reaches back to pass {start.pass_number}")
        return start

    def _go_on(self, rebuild: Rebuild, start: Start, number: int, last: int) -> Iterator[Moment]:
        """Re-run what began at a place, up to a pass, and on from each to the next one up to the last."""
        try:
            for script in self._scripts(start, rebuild.tick, last):
                for turn in rebuild.turns(script):
                    if turn.pass_number is not None and turn.pass_number >= number:
                        yield self._look(rebuild, turn, number)
                        number += 1
                    if number > last:
                        return
                    rebuild.take(turn, script)
        except RunFormatError as error:
            raise self._unreadable(str(error)) from None
        yield self._look_at_open_pass(rebuild, number)
        if number < last:
            raise self._no_pass(number + 1)

    def _last_in_a_row(self, wanted: Sequence[int], number: int, start: Start) -> int:
        """The last pass up to which, from this one on, every one is wanted and none has a nearer place to begin."""
        others = set(wanted)
        while number + 1 in others and self.start_before(number + 1) == start:
            number += 1
        return number

    def walk(
        self, number: int, listener: Listener | None = None, after_step: Callable[[], None] | None = None
    ) -> Iterator[Moment]:
        """The scheduler just before pass `number`, and before each pass behind it whose step has ended, as rebuilt.

        A moment holds until the next one is asked for. Errors as `at`.

        Args:
            listener: hears what happens on the way.
            after_step: called after each step that was re-run. It may raise, which ends the walk.
        """
        start = self._start_for(number)
        rebuild = self.rebuild(start, listener)
        if listener is not None:
            listener.attach(rebuild.scheduler)
        try:
            for script in self._scripts(start, rebuild.tick):
                for turn in rebuild.turns(script):
                    if turn.pass_number is not None and turn.pass_number >= number:
                        yield self._look(rebuild, turn, number)
                        number += 1
                    rebuild.take(turn, script)
                    if after_step is not None:
                        after_step()
        except RunFormatError as error:
            raise self._unreadable(str(error)) from None

    def before_steps(self, number: int, steps: Collection[int]) -> Iterator[tuple[int, Moment]]:
        """The scheduler just before some steps behind pass `number`, also those that a gate ended before a pass.

        The number of such a moment is that of the pass that comes next. Errors as `at`.
        """
        start = self._start_for(number)
        rebuild = self.rebuild(start)
        last = max(steps)
        try:
            for script in self._scripts(start, rebuild.tick):
                for turn in rebuild.turns(script):
                    if turn.step > last:
                        return
                    if turn.step in steps and turn.kind != "idle":
                        scheduler = rebuild.scheduler
                        view = scheduler.look(turn.now, reports_of(turn))
                        yield turn.step, Moment(scheduler.passes, view, scheduler.state.random_state, self.config)
                    rebuild.take(turn, script)
        except RunFormatError as error:
            raise self._unreadable(str(error)) from None

    def _scripts(self, start: Start, after: int, number: int | None = None) -> Iterator[Script]:
        """What was fed from a place to begin on, behind a tick, and up to the step of a pass if a number is given."""
        for part in self.parts[start.part :]:
            until = None
            if number is not None:
                within = Within(PASS, number, number)
                until = next((tick for (tick,) in rows_of(part, "steps", ("seq",), within)), None)
            yield from read_scripts(part, after, until)
            if until is not None:
                return

    def _look(self, rebuild: Rebuild, turn: Turn, number: int) -> Moment:
        scheduler = rebuild.scheduler
        if turn.pass_number != number:
            raise self._no_pass(number)
        if scheduler.passes != number:
            raise self._unreadable(f"pass {number} can't be rebuilt: the replay took another way")
        view = scheduler.look(turn.now, reports_of(turn))
        random_state = given_of(turn).random_state or scheduler.state.random_state
        return Moment(number, view, random_state, self.config)

    def open_pass(self) -> int | None:
        """The last pass, if its step has not ended: its forward is under way, or it was cut off by a kill."""
        for part in reversed(self.parts):
            made, ended = part.table("passes", ("pass",)), part.table("steps", ("pass",))
            if len(made):
                last: int = made.column("pass")[-1].as_py()
                return None if last in ended.column("pass").to_pylist() else last
            if len(ended):
                return None
        return None

    def _look_at_open_pass(self, rebuild: Rebuild, number: int) -> Moment:
        """Before a pass whose step has no row yet. What other ranks told its prefill delayer would be in that row."""
        scheduler = rebuild.scheduler
        found = [
            now for part in self.parts[-2:] for made, now in rows_of(part, "passes", ("pass", "now")) if made == number
        ]
        if not found or scheduler.passes != number:
            raise self._no_pass(number)
        if self.config.enable_prefill_delayer and len(self.run.ranks) > 1:
            raise self._unreadable(
                f"pass {number} can't be rebuilt before its step has ended: it waits for other ranks"
            )
        return Moment(number, scheduler.look(found[0]), scheduler.state.random_state, self.config)

    # ---- errors --------------------------------------------------------------------------------------------

    def _unreadable(self, what: str) -> RunFormatError:
        return RunFormatError(f"{self.run.path}: rank {self.rank}: {what}")

    def _no_pass(self, number: int) -> RunNotFoundError:
        passes = self.run.passes(self.rank)
        known = f"passes {passes.first} to {passes.last}" if passes.count else "no pass"
        return RunNotFoundError(f"{self.run.path}: no pass {number} on rank {self.rank}; it has {known}")
