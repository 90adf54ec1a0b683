"""The token sequences of requests, put together from `tokens`: prompt and outputs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.recorder.files import Within, picked
from schedscope.recorder.parts import Part
from schedscope.replay.columns import packed_lists, values_of

_COLUMNS = ("seq", "rid", "position", "ids")


class Sequences:
    """Sequences of some requests, as far as they go up to a moment.

    Args:
        wanted: ticks at which the requests arrived.
        until: tick of the moment.
    """

    def __init__(self, wanted: set[int], until: int) -> None:
        self._ticks = wanted
        self._wanted = pa.array(wanted, pa.int64())
        self._within = Within("seq", min(wanted, default=until), until)
        self._found: dict[int, bytearray] = {}
        self._growing: dict[str, int] = {}
        """Arrival of the request that has an rid now."""

    def read(self, part: Part) -> None:
        """Take in the next part of the log, of which no more than a row group is in memory."""
        if not len(self._wanted):
            return
        for rows in part.chunks("tokens", _COLUMNS, self._within):
            self._take_in(rows)

    def _take_in(self, rows: pa.Table) -> None:
        rid = rows.column("rid")
        begins = pc.equal(rows.column("position"), 0)
        arrived = rid.filter(pc.and_(begins, pc.is_in(rows.column("seq"), self._wanted)))
        # An rid may come again: all that begin under one of these are looked at, few of them in vain.
        rids = pa.concat_arrays([pa.array(self._growing, pa.string()), *arrived.chunks])
        rows = picked(rows, pc.is_in(rid, rids))
        columns = (values_of(rows.column(name)) for name in _COLUMNS[:3])
        for tick, rid, position, ids in zip(*columns, packed_lists(rows.column("ids")), strict=True):
            if position == 0:
                self._growing.pop(rid, None)
                if tick in self._ticks:
                    self._growing[rid] = tick
                    self._found[tick] = bytearray(ids)
            elif rid in self._growing:
                self._found[self._growing[rid]] += ids

    def take(self) -> dict[int, bytes]:
        """What was found, by arrival."""
        return {tick: bytes(sequence) for tick, sequence in self._found.items()}
