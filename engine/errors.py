"""The errors that schedscope shows to a person, each with a stable exit code.

Whatever goes wrong because of *input* (an option, a file, a request) is a `SchedscopeError`: its text says
what is wrong, where, and what to do. `schedscope.cli.main` catches it once and exits with its code. Any other
exception is a bug and keeps its traceback.
"""

from __future__ import annotations


class SchedscopeError(Exception):
    """Base of all errors caused by input or environment. Exit code 1."""

    exit_code = 1


class UsageError(SchedscopeError):
    """A wrong option, name or number on the command line. Exit code 2."""

    exit_code = 2


class DivergenceError(SchedscopeError):
    """A replayed decision is not the recorded one. Exit code 3."""

    exit_code = 3


class ConfigError(SchedscopeError):
    """A scheduler configuration that can't run. Exit code 4."""

    exit_code = 4


class RunNotFoundError(SchedscopeError):
    """No such run, rank or pass. Exit code 5."""

    exit_code = 5


class RunFormatError(SchedscopeError):
    """A run that can't be read: newer schema, truncated or foreign file. Exit code 6."""

    exit_code = 6


class ScenarioError(SchedscopeError):
    """A scenario or trace file that doesn't follow its format. Exit code 7."""

    exit_code = 7


class RequestError(SchedscopeError):
    """A request that the server refuses (HTTP 400). Exit code 8."""

    exit_code = 8


class ServerError(SchedscopeError):
    """A server that can't be started or reached. Exit code 9."""

    exit_code = 9


class StoreError(SchedscopeError):
    """An object store that can't be reached, has no such bucket, or refuses access. Exit code 10.

    Args:
        final: it answered, and would answer the same again: trying again is of no use.
    """

    exit_code = 10

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
