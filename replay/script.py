"""What a scheduler was fed, as a part of a log tells it: the script that a re-run follows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine import tokens
from schedscope.engine.errors import RunFormatError
from schedscope.engine.scheduler import Finish
from schedscope.recorder.files import Within
from schedscope.recorder.parts import Part
from schedscope.recorder.rows import Row
from schedscope.recorder.schema import TABLES
from schedscope.replay.columns import first_items, packed_lists, rows_of, values_of

STIMULI = frozenset({"arrive", "abort", "flush"})


class Stimulus(NamedTuple):
    """Something that reached the scheduler from outside between two steps."""

    seq: int
    step: int
    time: float
    kind: str
    rid: str | None
    detail: str | None


class Turn(NamedTuple):
    """A step as it was recorded: all that a re-run needs, and no outcome but its pass."""

    step: int
    seq: int
    kind: str
    pass_number: int | None
    repeats: int
    """Idle steps that it stands for."""
    now: float
    reports: str | None
    given: str | None


class Outputs(NamedTuple):
    """The sampled tokens that a step took in."""

    rids: list[str]
    ids: list[int]


class Script(NamedTuple):
    """The stimuli of a part, in recorded order."""

    turns: Sequence[Turn]
    stimuli: Sequence[Stimulus]
    prompts: Mapping[int, bytes]
    """Packed tokens by tick of the arrival."""
    outputs: Mapping[int, Outputs]
    """By the step that took them in."""
    finishes: Mapping[int, Mapping[str, Finish]]
    """Why requests ended, by rid and the step that took in their last token."""
    ticks: Sequence[int]
    """Of everything in the part, ascending. The recorder left out none."""


_STEPS = 2_048
"""Steps of a piece."""
_FOREVER = 2**62

_TURN = ("step", "seq", "kind", "pass", "count", "now", "reports", "given")
_EVENT = ("seq", "step", "time", "kind", "rid", "detail")
_OTHERS = ("passes", "checkpoints")
"""Tables that have ticks of their own, but nothing that a re-run follows."""
_TOKENS = ("seq", "step", "rid", "position", "ids")


def read_scripts(part: Part, after: int = 0, until: int | None = None) -> Iterator[Script]:
    """The script of a part on disk, in pieces that fit into memory whatever the part's size.

    Args:
        after: tick behind which to begin.
        until: tick of the last step that is of interest.

    Raises RunFormatError.
    """
    end = _FOREVER if until is None else until
    ticks = values_of(part.table("steps", ("seq",), Within("seq", after + 1, end)).column("seq"))
    for first, last in pairwise([after, *ticks[_STEPS - 1 :: _STEPS], end]):
        if first < last:
            yield _read_script(part, Within("seq", first + 1, last))


def _read_script(part: Part, within: Within) -> Script:
    # An output has the tick of what was told before it, which may be the step before.
    texts: dict[int, bytes] = {}
    steps, rids, ids = list[pa.ChunkedArray](), list[str](), list[int]()
    for found in part.chunks("tokens", _TOKENS, within._replace(first=within.first - 1)):
        begins = pc.equal(found.column("position"), 0)
        prompts, said = found.filter(begins), found.filter(pc.invert(begins))
        texts |= dict(zip(values_of(prompts.column("seq")), packed_lists(prompts.column("ids")), strict=True))
        steps.append(said.column("step"))
        rids += values_of(said.column("rid"))
        ids += first_items(said.column("ids"))
    others = [tick for table in _OTHERS for (tick,) in rows_of(part, table, ("seq",), within)]
    turns, events = rows_of(part, "steps", _TURN, within), rows_of(part, "events", _EVENT, within)
    return _script(turns, events, others, texts, _outputs(steps, rids, ids))


def _outputs(steps: Sequence[pa.ChunkedArray], rids: list[str], ids: list[int]) -> dict[int, Outputs]:
    if not ids:
        return {}
    runs = pc.run_end_encode(pa.chunked_array([chunk for each in steps for chunk in each.chunks]).combine_chunks())
    ends = runs.run_ends.to_pylist()
    spans = zip(runs.values.to_pylist(), [0, *ends], ends, strict=False)
    return {step: Outputs(rids[start:end], ids[start:end]) for step, start, end in spans}


def script_of_rows(rows: Mapping[str, Sequence[Row]]) -> Script:
    """The script of a journal's rows. Raises RunFormatError."""
    prompts = {}
    outputs: defaultdict[int, Outputs] = defaultdict(lambda: Outputs([], []))
    for tick, step, rid, position, ids in rows.get("tokens", ()):
        if position == 0:
            prompts[tick] = tokens.encode(ids)
        else:
            outputs[step].rids.append(rid)
            outputs[step].ids.append(ids[-1])
    others = [tick for table in _OTHERS for (tick,) in _picked(rows, table, ("seq",))]
    return _script(_picked(rows, "steps", _TURN), _picked(rows, "events", _EVENT), others, prompts, outputs)


def _picked(rows: Mapping[str, Sequence[Row]], table: str, names: Sequence[str]) -> Iterable[Row]:
    all_names = TABLES[table].names[1:]
    places = [all_names.index(name) for name in names]
    return (tuple([row[i] for i in places]) for row in rows.get(table, ()))


def _script(
    steps: Iterable[Row],
    events: Iterable[Row],
    others: Iterable[int],
    prompts: Mapping[int, bytes],
    outputs: Mapping[int, Outputs],
) -> Script:
    ticks = list(others)
    stimuli = []
    finishes: defaultdict[int, dict[str, Finish]] = defaultdict(dict)
    for seq, step, time, kind, rid, detail in events:
        ticks.append(seq)
        if kind in STIMULI:
            stimuli.append(Stimulus(seq, step, time, kind, rid, detail))
        elif kind == "finish":
            finishes[step][rid] = _finish(detail)
    turns = [Turn(*row) for row in steps]
    ticks += [turn.seq for turn in turns]
    return Script(turns, stimuli, prompts, outputs, finishes, sorted(set(ticks)))


@lru_cache(maxsize=4096)
def _finish(text: str | None) -> Finish:
    """Most requests end in one of a few ways."""
    detail = parse_json(text)
    return Finish(detail["kind"], detail["detail"])


def parse_json(text: str | None) -> Any:
    """A column that holds JSON. Raises RunFormatError."""
    try:
        return json.loads(text or "")
    except (TypeError, ValueError):
        raise RunFormatError(f"not JSON where it should be: {text!r}") from None
