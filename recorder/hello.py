"""How a scheduler introduces itself when it starts to record, and what the companion answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Level = Literal["steps", "passes", "decisions", "full"]
LEVELS: tuple[Level, ...] = ("steps", "passes", "decisions", "full")
OnFull = Literal["drop", "block"]
Tokens = Literal["full", "hashed", "none"]


class Source(msgspec.Struct, frozen=True):
    """What is recorded."""

    kind: str
    """`engine`: schedscope's own; `simulation`: that without a model; `sglang`: a server with the plugin."""
    version: str

    @property
    def is_own(self) -> bool:
        """It schedules with our core, and tells all about its decisions."""
        return self.kind in {"engine", "simulation"}

    @property
    def is_observed(self) -> bool:
        """It doesn't, and is watched from outside."""
        return self.kind == "sglang"


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A scheduler, as the manifest will describe it."""

    source: Source | None = None
    config: dict[str, Any] = {}
    """The scheduler's configuration; what JSON doesn't know is kept as its repr."""
    model: str | None = None
    source_gaps: list[dict[str, str]] = []
    """What it does and can't be seen: `feature` and `effect`."""


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """How much is recorded."""

    level: Level = "decisions"
    """`steps`: steps and requests; `passes`: and what it takes to re-run every pass; `decisions`: and what each pass
    said about each request; `full`: and what happened in the cache."""
    sample: int = 1
    """Decisions are kept of every n-th pass only; re-running gives the others."""
    tokens: Tokens = "full"
    """`hashed`: keyed hashes of whole pages instead of ids; `none`: nothing, and so nothing can be re-run."""

    def __post_init__(self) -> None:
        if self.sample < 1:
            raise ValueError("sample: at least 1")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame on a connection."""

    version: int
    """`SCHEMA_VERSION` that the frames behind it follow."""
    rank: int
    description: Description = Description()


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to it: where to write, and what."""

    ring: str
    """Path of the ring."""
    on_full: OnFull = "drop"
    detail: Detail = Detail()
    key: bytes = b""
    """Of the hashes. It is kept in memory only."""


class Refusal(msgspec.Struct, frozen=True):
    """The other answer."""

    reason: str
