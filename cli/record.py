"""`schedscope record -- CMD`: start a command and keep every scheduling pass of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from schedscope.cli.options import LogDir
from schedscope.cli.output import errors, gap_words
from schedscope.engine.errors import ServerError, UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run, default_log_dir

NOT_FOUND = 127
OWN_COMMANDS = ("serve",)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def record(*command: str, log: LogDir = None, name: str | None = None) -> int:
    """Run a command and record every scheduling pass of the schedulers it starts.

    Ctrl-C and SIGTERM go to the command; when it has ended, the run is sealed. Prints the run's path as its last
    line and exits with the command's exit code.

    Parameters
    ----------
    command
        What to run, after `--`: `serve` with its options, or any command that records itself when asked to.
    name
        A name for the run; by default that of the command.
    """
    if not command:
        raise UsageError("record: give the command to run, such as: schedscope record -- serve --port 30000")
    run_dir = create_run(log or default_log_dir(), name or Path(command[0]).name, command=list(command))
    try:
        code = run_recorded(command, run_dir)
    except ServerError:
        shutil.rmtree(run_dir)
        raise
    summary = Run.open(run_dir)
    passes = sum(summary.passes(rank).count for rank in summary.ranks)
    if not summary.ranks:
        errors.print("[yellow]Nothing was recorded[/]: no scheduler of this command reported to the recorder.")
    else:
        errors.print(f"Recorded {passes:,} passes. Next: schedscope replay all --run {run_dir}", markup=False)
    for gap in summary.gaps:
        errors.print(f"gap: {gap_words(gap)}", markup=False, soft_wrap=True)
    print(run_dir, flush=True)
    return code


def run_recorded(command: Sequence[str], run_dir: Path) -> int:
    """Run a command with a companion that records it into `run_dir`; returns its exit code.

    Raises ServerError for a command that can't be started.
    """
    words = list(command)
    if words[0] in OWN_COMMANDS:
        words = [sys.executable, "-m", "schedscope.cli.main", *words]
    with Companion.start(run_dir) as companion:
        environment = {**os.environ, **companion.environment()}
        with _passing_signals_on() as children:
            try:
                # A group of its own: a terminal's Ctrl-C then reaches it once, through us.
                child = subprocess.Popen(words, env=environment, process_group=0)
            except OSError as error:
                raise ServerError(f"record: can't run {words[0]!r}: {error.strerror or error}") from None
            children.append(child)
            code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_signals_on() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Signals that ask us to end go to the children instead."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
