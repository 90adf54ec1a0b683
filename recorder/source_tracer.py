"""Turns what is seen of another scheduler than ours into the same rows as `RunTracer` makes of ours."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.frame import OUTPUTS, SEEN, WIDE_PROMPTS, encode
from schedscope.recorder.hashing import block_size
from schedscope.recorder.observed import Observed
from schedscope.recorder.rows import Decided, PassFacts
from schedscope.recorder.sink import Sink
from schedscope.recorder.tracer import RunTracer

HELD_NS = 100_000_000
"""Nothing is held back for longer while the server turns: as long as the companion takes to bring it to disk."""
_UNEVENTFUL = frozenset({"steps", OUTPUTS})
"""What a step has to tell that only added tokens to requests."""


class StepRow(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A row of `steps` while it is made: a turn of the loop, or idle ones. See its columns, whose order it has."""

    step: int
    seq: int = 0
    kind: str
    gate: str | None = None
    pass_: int | None = None
    count: int = 1
    """Turns that it stands for."""
    now: float
    start_ns: int
    end_ns: int = 0
    forward_ns: int | None = None
    record_ns: int = 0
    running: int
    queue_len: int
    available: int
    evictable: int
    protected: int
    pool_size: int
    batch_is_full: bool
    batch_is_full_pass: int | None
    new_token_ratio: float
    processed_tokens: int
    batch_tokens: int = 0
    committed: int | None = None
    """The step whose results this one takes in at its end; None: there are none."""
    retracted: list[str] = []
    reports: str | None = None
    given: str | None = None


class SourceTracer(RunTracer):
    """Records one rank of another scheduler.

    Args:
        sink: where frames go; it never raises and never blocks for long.
        config: what the other scheduler does, as ours would be told.
    """

    def __init__(self, sink: Sink, config: SchedulerConfig) -> None:
        super().__init__(sink)
        if self._detail.tokens == "hashed":
            self._block = block_size(config.to_dict())
        self._number = 0
        self._formed: StepRow | None = None
        """The step that has not ended."""
        self._handed_ns = 0
        """When a step handed over what there was."""

    def detach(self, error: BaseException) -> None:
        """Record nothing any more."""
        self._sink.detach(error)

    def tick(self) -> int:
        """The moment at which a pass begins: what comes behind it is no input of the pass."""
        self._seq += 1
        return self._seq

    def put_ids(self, rid: str, ids: Sequence[int]) -> None:
        """Keep a prompt's tokens, once; in no time if they are an `array("q")`."""
        if self._detail.tokens == "hashed":
            self.put_prompt(rid, tokens.encode(ids))
        else:
            wide = ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)
            self._put(WIDE_PROMPTS, (self._seq, self._number, rid, 0, wide.tobytes()))

    def put_pass(self, number: int, seq: int, facts: PassFacts, told: Decided, decided_ns: int, seen: Observed) -> None:
        """Record a pass.

        Args:
            seq: what `tick` gave when it began.
            seen: the rest of what the pass could read.
        """
        self._pass = number
        if not self._keeps_stimuli:
            return
        self._put_pass(number, self._number, seq, decided_ns, facts, told)
        self._put(SEEN, (number, seq, seen))

    def begin_step(self, row: StepRow, launches: bool) -> None:
        """A batch was formed, or none. The step ends with `end_step`, if there are results to take in.

        What was decided and what happened to a request is handed over before the forward it leads to, which may be
        long, or the last one. Steps that added a token to each request and nothing else wait for that, or for
        `HELD_NS`: a frame for each takes a third of what recording it takes.

        Args:
            launches: there is something to compute.
        """
        self._pass = None
        self._number = row.step
        self._formed = row
        if row.committed is None:
            self.end_step()
        rows = self._rows
        held = row.start_ns - self._handed_ns <= HELD_NS and not row.retracted and rows.keys() <= _UNEVENTFUL
        if rows and not held:
            self._rows, self._handed_ns = {}, row.start_ns
            self._sink.write(encode(rows, self._memory))
        if launches:
            self._launched_ns[row.step] = self._clock_ns()

    def end_step(self) -> None:
        """The results that were due were taken in. They are handed over with what the next turn decides."""
        row, self._formed = self._formed, None
        if row is None:
            return
        row.seq = self._seq = self._seq + 1
        row.end_ns = now_ns = self._clock_ns()
        if row.committed is not None:
            row.forward_ns = self._forward_ns(row.committed, now_ns)
        row.record_ns, self.spent_ns = self.spent_ns, 0
        self._put("steps", row)
        self._number = row.step + row.count

    def idle(self, row: StepRow) -> None:
        """So many turns, from this step on, had nothing to do."""
        self._formed = row
        self.end_step()

    def hand_over(self) -> None:
        """Hold nothing back: there may be no step for a long time."""
        self._flush()

    def _step_number(self) -> int:
        return self._number

    def _is_resting(self) -> bool:
        return self._formed is None
