"""Fills in, where a recording of another scheduler is sealed, what that one doesn't tell: keys, partners, reasons.

Every pass is decided again from what it could read. Where the outcome is what was seen, the rows of the pass become
those of the core, which say the same and more. Where it is not, they stay as they were seen, and the pass tells the
first difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import decide
from schedscope.recorder.decisions import Decisions
from schedscope.recorder.files import Within
from schedscope.recorder.frame import Rows
from schedscope.recorder.rows import pack_decision
from schedscope.recorder.schema import TABLES, to_arrow
from schedscope.replay.from_view import Observations
from schedscope.replay.verify_view import difference

_DIVERGENCE = TABLES["passes"].names[1:].index("divergence")

log = logging.getLogger("schedscope.replay")


class Deriver:
    """Follows one rank.

    Args:
        config: the recorded scheduler's.
    """

    def __init__(self, config: SchedulerConfig, rank: int) -> None:
        self.stopped: str | None = None
        """Why nothing is derived any more."""
        self._rank = rank
        self._observations = Observations(config)
        self._warned = False

    def advance(self, rows: Rows) -> Rows:
        """Rows of `passes` and `decisions` to be sealed instead of those of a part of the log. Never raises.

        Args:
            rows: all rows of the part. Parts come in their order, none is left out.
        """
        if self.stopped is not None or not rows.get("views"):
            return {}
        try:
            return self._derive(rows)
        except Exception as error:
            self.stopped = str(error) or repr(error)
            log.warning("keys and reasons are not worked out any more: %s", self.stopped)
            return {}

    def _derive(self, rows: Rows) -> Rows:
        part = InMemory(rows, self._rank)
        decisions: Decisions = rows.get("decisions", Decisions())
        passes: dict[int, tuple[Any, ...]] = {row[0]: row for row in rows["passes"]}
        observed_of = decisions.by_pass()
        derived = Decisions()
        for seen in self._observations.read([part]):
            number = seen.moment.number
            observed = observed_of.get(number)
            if observed is None:
                continue  # not kept: the level, or a sample
            plan = decide(seen.moment.view, seen.moment.config, seen.moment.random_state)
            found = difference(seen, plan, self._rank, to_arrow(TABLES["decisions"], self._rank, observed))
            if found is None:
                derived.add(number, *pack_decision(plan))
                continue
            derived.extend(observed)
            row = passes[number]
            passes[number] = (*row[:_DIVERGENCE], str(found), *row[_DIVERGENCE + 1 :])
            if not self._warned:
                log.warning("the server decided otherwise than schedscope would: %s", found)
                self._warned = True
        return {"passes": list(passes.values()), "decisions": derived}


class InMemory:
    """Rows as a part of a log."""

    def __init__(self, rows: Rows, rank: int) -> None:
        self._rows = rows
        self._rank = rank
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str, columns: Sequence[str] | None = None, within: Within | None = None) -> pa.Table:
        """Its rows of a table."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = to_arrow(TABLES[name], self._rank, self._rows.get(name, ()))
        if within is not None:
            table = within.rows(table)
        return table if columns is None else table.select(columns)
