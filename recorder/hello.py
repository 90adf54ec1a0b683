"""How a scheduler introduces itself when it starts to record."""

from __future__ import annotations

from typing import Any

import msgspec


class Source(msgspec.Struct, frozen=True):
    """What is recorded."""

    kind: str
    """`engine`: schedscope's own; `sglang`: a server with the plugin; ..."""
    version: str


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A scheduler, as the manifest will describe it."""

    source: Source | None = None
    config: dict[str, Any] = {}
    """The scheduler's configuration; what JSON doesn't know is kept as its repr."""
    model: str | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame on a connection."""

    version: int
    """`SCHEMA_VERSION` that the frames behind it follow."""
    rank: int
    description: Description = Description()
