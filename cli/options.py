"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from schedscope.engine.errors import ConfigError

LAST_PORT = 65_535

Switch = Annotated[bool, Parameter(negative="")]
"""Given or not; there is no `--no-...`."""
Settings = Annotated[list[str] | None, Parameter(name="--set", negative="")]
RunName = Annotated[str | None, Parameter(help="Path, URL or name of a run; by default the newest.")]
LogDir = Annotated[
    str | None,
    Parameter(
        help="Folder of runs, or s3://BUCKET/PREFIX and the like; by default $SCHEDSCOPE_LOG_DIR or ./schedscope-logs."
    ),
]
Spool = Annotated[
    Path | None,
    Parameter(help="Folder where runs wait that are on their way to an object store; by default in the cache."),
]


def parse_settings(words: list[str]) -> dict[str, str]:
    """`name=value` words as a dictionary; dashes in names are underscores."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: expected name=value")
        settings[name.strip().replace("-", "_")] = value.strip()
    return settings
