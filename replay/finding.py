"""What a detector reports: a finding, with evidence to look at and a change to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

SHOWN = 5
"""Pieces of evidence of a finding."""


class Severity(StrEnum):
    """How bad it is."""

    CRITICAL = "critical"
    """Someone waits for good, or most of the waiting comes from it."""
    WARNING = "warning"
    """It costs a good part of the waiting, or treats someone badly."""
    NOTE = "note"
    """Worth knowing."""

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return list(Severity).index(self)


class Evidence(NamedTuple):
    """Where to look."""

    words: str
    rank: int
    pass_number: int | None = None
    rid: str | None = None


Hope = Literal["admits", "admits_more", "moves_up", "finds_more", "preempts_less"]
"""What a change is to do in a pass: admit `rid`, admit more requests, let `rid` stand further in front, let what is
admitted find more tokens cached, preempt fewer requests."""


class Trial(NamedTuple):
    """A change whose effect can be seen by deciding a recorded pass again."""

    rank: int
    pass_number: int
    settings: Mapping[str, str]
    """As after `--set`; `schedule_policy` among them."""
    hope: Hope
    rid: str | None = None


class Checked(NamedTuple):
    """What came of a trial."""

    trial: Trial
    helps: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that goes wrong in a run."""

    detector: str
    severity: Severity
    rank: int | None
    """None: it concerns all ranks."""
    title: str
    """What happened, in a sentence with numbers."""
    cost_s: float
    """Waiting that comes from it, in seconds of all requests together; 0: none, or it can't be counted."""
    evidence: tuple[Evidence, ...]
    """The worst first."""
    advice: str
    """What to change."""
    trials: tuple[Trial, ...] = ()
    """Changes that can be tried on recorded passes, the best first."""
    checked: tuple[Checked, ...] = ()
    """What came of them."""
    unchecked: str | None = None
    """Why they could not be tried."""


def span(seconds: float) -> str:
    """A time as people say it."""
    if abs(seconds) >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('ss', 'ch', 'x')) else 's'}"
