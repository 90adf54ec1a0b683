"""A detector as a trigger of the flight recorder: it looks at what was just recorded, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedscope.engine.errors import UsageError
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Detail
from schedscope.replay.case import Case
from schedscope.replay.doctor import known_detectors, why_not
from schedscope.replay.finding import Severity

PREFIX = "doctor"


class DetectorWatch:
    """Goes off when a detector finds something that is a warning, or worse, in a sealed journal: some thousand passes.

    Args:
        text: `doctor: NAME`.
        detail: how much is recorded.

    Raises UsageError for an unknown detector, or one that has nothing to read at this level.
    """

    def __init__(self, text: str, detail: Detail) -> None:
        self.text = text
        self._detail = detail
        name = text.partition(":")[2].strip()
        known = known_detectors()
        if name not in known:
            raise UsageError(f"--keep-when {text!r}: no such detector; there are: {', '.join(known)}")
        self._detector = known[name]
        reason = why_not(Case.of_rows({}, 0, {}, detail), self._detector)
        if reason is not None:
            raise UsageError(f"--keep-when {text!r}: it could never go off: {reason}")

    def check(self, rows: Rows, rank: int, config: Mapping[str, Any]) -> str | None:
        """See `schedscope.recorder.trigger.Watch.check`."""
        case = Case.of_rows(rows, rank, config, self._detail)
        for finding in self._detector.look(case):
            if finding.severity is not Severity.NOTE:
                return f"{self.text}: {finding.title}"
        return None


def is_for_detector(text: str) -> bool:
    """Whether a condition names a detector."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name.strip() == PREFIX
