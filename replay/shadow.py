"""A shadow follows a recording while it is being sealed, and takes the checkpoints that the scheduler needn't.

It re-runs every step behind the recorded scheduler, in another process, so it has the same state and can write it
down. On the way it checks the state after each step against the recorded one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunFormatError
from schedscope.engine.live import Live
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.snapshot import restore_snapshot
from schedscope.engine.state import SchedulerState
from schedscope.engine.tracer import StepRecord, Tracer
from schedscope.recorder.checkpoint import Checkpoint, CheckpointWriter
from schedscope.recorder.rows import Row, state_facts
from schedscope.recorder.schema import TABLES
from schedscope.replay.rebuild import Rebuild
from schedscope.replay.script import Script, script_of_rows

WORK = 24_000
"""Rows of batches and queues between two checkpoints: what rebuilding any pass takes at most."""
REPEAT = 32
"""A part gets a checkpoint that stands alone once this many times as many rows and token ids were recorded as the last
of them carried: so they stay a small share of the log."""
ALONE_S = 300.0
"""Or after this time, seconds of the scheduler's clock: so that a log which keeps its last minutes can be replayed."""

_STEP_WORK = 8
"""A step without any row costs as much as so many rows."""
_TOKENS_PER_WORK = 64
"""So many token ids are read in the time of a row."""

log = logging.getLogger("schedscope.replay")


class Shadow:
    """Follows one rank.

    Args:
        config: the recorded scheduler's.
        work: see `WORK`.
        repeat: see `REPEAT`; 0: every part gets one.
        alone_s: see `ALONE_S`; a flight recorder wants a small part of what it keeps.
    """

    def __init__(
        self, config: SchedulerConfig, *, work: int = WORK, repeat: int = REPEAT, alone_s: float = ALONE_S
    ) -> None:
        self.stopped: str | None = None
        """Why the recording can't be followed at present; None: it is being followed."""
        self._config = config
        self._limit = work
        self._repeat = repeat
        self._alone_s = alone_s
        self._watch = _Watch(CheckpointWriter(since=0))
        self._rebuild = self._watch.rebuild = Rebuild(Scheduler(config, self._watch))
        self._work = 0
        """Since the last checkpoint."""
        self._recorded = 0
        """Rows and token ids since the last checkpoint that stands alone."""
        self._carried = 0
        self._alone_at: float | None = None
        """When that one was taken."""

    def advance(self, rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
        """Follow a part of the log. Returns the rows to be sealed with it; holds none of what it got.

        Args:
            rows: all rows of the part, by table, in recorded order, as `schedscope.recorder.schema` has them but
                without the rank. Parts come in their order, none is left out.

        Never raises: `stopped` tells what went wrong. It then waits for a checkpoint that the recorder took itself.
        """
        made: list[Row] = []
        taken = sorted(rows.get("checkpoints", ()), key=_tick)
        try:
            script = script_of_rows(rows)
        except Exception as error:
            self._stop(error)
            return {}
        while True:
            if self.stopped is None:
                try:
                    self._follow(script, rows, made)
                    break
                except Exception as error:  # whatever it is, recording goes on
                    self._stop(error)
            taken = [row for row in taken if row[0] > self._rebuild.tick]
            if not taken or not self._resume(taken.pop(0)):
                break
        return {"checkpoints": made} if made else {}

    # ---- inner ---------------------------------------------------------------------------------------------

    def _follow(self, script: Script, rows: Mapping[str, Sequence[Row]], made: list[Row]) -> None:
        recorded = {row[_STEP]: row for row in rows.get("steps", ())}
        rebuild = self._rebuild
        idle = all(turn.kind == "idle" for turn in script.turns)
        alone = self._must_stand_alone(script) and not idle
        for turn in rebuild.turns(script):
            if turn.step != rebuild.scheduler.steps:
                raise RunFormatError(f"step {rebuild.scheduler.steps} is missing")
            rebuild.take(turn, script)
            self._watch.compare(recorded[turn.step])
            waiting = self._watch.waiting if turn.pass_number is not None else 0
            self._work += _STEP_WORK + waiting + self._watch.rows
            self._recorded += waiting
            if alone or self._work >= self._limit:
                # Not before the first step: a part may begin in the midst of it.
                made.append(self._checkpoint(alone=alone))
                alone = False
        ids = sum(len(prompt) for prompt in script.prompts.values()) // tokens.TOKEN_BYTES
        ids += sum(len(outputs.ids) for outputs in script.outputs.values())
        self._work += ids // _TOKENS_PER_WORK
        self._recorded += ids

    def _must_stand_alone(self, script: Script) -> bool:
        if not self._rebuild.tick:
            self._alone_at = script.turns[0].now if script.turns else None
            return False
        if self._alone_at is None or self._recorded >= self._repeat * self._carried:
            return True
        return bool(script.turns) and script.turns[-1].now >= self._alone_at + self._alone_s

    def _checkpoint(self, *, alone: bool) -> Row:
        row = self._watch.writer.write(self._rebuild.scheduler, self._rebuild.tick, alone=alone)
        self._work = 0
        tick, *_, since, _, carried = row
        if since == tick:
            self._recorded, self._carried = 0, len(carried)
            self._alone_at = self._watch.now
        return row

    def _stop(self, error: Exception) -> None:
        self.stopped = str(error) or repr(error)
        step = self._rebuild.scheduler.steps
        log.warning("no more checkpoints: the recording can't be followed at step %d: %s", step, self.stopped)

    def _resume(self, row: Row) -> bool:
        """Go on from a checkpoint of the recorder."""
        tick, *_, state, carried = row
        self._watch = _Watch(CheckpointWriter())
        try:
            snapshot = Checkpoint(state).unpack({tick: tokens.encode(carried)})
            self._rebuild = Rebuild(restore_snapshot(snapshot, self._config, self._watch), tick)
        except Exception as error:
            self._stop(error)
            return False
        self._watch.rebuild = self._rebuild
        self._alone_at = None
        self._work = 0
        self.stopped = None
        return True


class _Watch(Tracer):
    """Sees what the re-run does."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.rebuild: Rebuild | None = None
        self.now = 0.0
        self.rows = 0
        """Of the last step's batch."""
        self.waiting = 0
        self._facts: tuple[Any, ...] = ()

    def on_prompt(self, live: Live) -> None:
        """A request came: its prompt is in the log."""
        assert self.rebuild is not None
        self.writer.arrived(live, self.rebuild.tick)

    def on_step(self, record: StepRecord, state: SchedulerState) -> None:
        """Keep what the recorder would write of a step."""
        batch = record.batch
        self.now = record.now
        self.rows = 0 if batch is None else len(batch)
        self.waiting = len(state.queue)
        computed = 0 if batch is None else batch.computed
        committed = None if record.due is None else record.due.step
        head = (record.kind, record.gate, record.pass_number, computed, committed)
        self._facts = (*head, *state_facts(state))

    def compare(self, row: Row) -> None:
        """Hold the last step against a row of `steps`. Raises RunFormatError for another state."""
        recorded = tuple([row[place] for place in _PLACES])
        if recorded != self._facts:
            name, was, now = next(
                (name, was, now) for name, was, now in zip(_NAMES, recorded, self._facts, strict=True) if was != now
            )
            raise RunFormatError(f"{name} was {was!r}, and comes out as {now!r}")


_COLUMNS = TABLES["steps"].names[1:]
_STEP = _COLUMNS.index("step")
_NAMES = (
    "kind",
    "gate",
    "pass",
    "batch_tokens",
    "committed",
    *_COLUMNS[_COLUMNS.index("running") : _COLUMNS.index("batch_tokens")],
)
"""Columns of `steps` that tell the state; from `running` on those of `state_facts`."""
_PLACES = [_COLUMNS.index(name) for name in _NAMES]


def _tick(row: Row) -> int:
    return int(row[0])
