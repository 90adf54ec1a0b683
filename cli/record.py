"""`schedscope record -- CMD`: start a command and keep every scheduling pass of it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import Parameter
from schedscope.cli.options import LogDir, Spool
from schedscope.cli.output import errors, gap_words
from schedscope.engine.errors import SchedscopeError, ServerError, UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.control import Control
from schedscope.recorder.hashing import KEY_BYTES
from schedscope.recorder.hello import Detail, Level, OnFull, Tokens
from schedscope.recorder.keep import parse_keep, parse_size
from schedscope.recorder.options import Durability, Options
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.runs import default_log_dir
from schedscope.recorder.salvage import salvage
from schedscope.recorder.sglang_plugin import STRICT_VARIABLE
from schedscope.recorder.trigger import Trigger, Watch
from schedscope.recorder.upload import PATIENCE_S, Uploader, begin_run
from schedscope.replay.follow import follow
from schedscope.replay.shadow import ALONE_S
from schedscope.replay.watch import DetectorWatch, is_for_detector

NOT_FOUND = 127
OWN_COMMANDS = ("serve",)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@Parameter(name="*")
@dataclass(frozen=True)
class How:
    """How to record."""

    level: Level = "decisions"
    """How much: `steps` and requests; `passes`, and what it takes to re-run them; `decisions`: what each pass said
    about each request; `full`: what happened in the cache, too."""
    sample: int = 1
    """Keep the decisions of every N-th pass only. All passes can still be re-run."""
    tokens: Tokens = "full"
    """`full`: token ids; `hashed`: keyed hashes of whole pages; `none`: nothing, and nothing can be re-run."""
    tokens_key: Path | None = None
    """File with the key of the hashes, 16 to 64 bytes; by default a random one that is forgotten."""
    on_full: OnFull = "drop"
    """When the disk can't keep up and the buffer is full: `drop` records, which shows as a gap, or `block` the
    server."""
    buffer: str = "32MB"
    """Memory per scheduler for what is not written yet."""
    durability: Durability = "process"
    """What survives: that all processes are killed, or with `power` also a loss of power, but for the last 0.1 s."""
    keep: str | None = None
    """Be a flight recorder: keep the last 10m, 2h or 2GB only."""
    keep_when: Annotated[list[str] | None, Parameter(negative="")] = None
    """SQL condition on requests as they end, such as 'ttft_ms > 2000', or on 'passes: queue_len > 100', or a detector
    of the doctor, 'doctor: starvation': what lies around it is made a run of its own. So it is on SIGUSR1. Can be
    repeated."""
    keep_before: float = 60.0
    """Seconds kept before such an event."""
    keep_after: float = 10.0
    """Seconds kept behind it."""
    keep_at_most: int = 20
    """Such runs at most."""
    control: str | None = None
    """[HOST:]PORT on which to take `POST /keep` and `GET /status` over HTTP."""
    strict: Annotated[bool, Parameter(negative="")] = False
    """SGLang only: don't start a server of which anything can't be recorded, instead of warning."""

    def options(self) -> Options:
        """The same for the companion. Raises UsageError."""
        if not 1 <= self.sample < 2**31:
            raise UsageError("--sample: at least 1")
        buffer = parse_size("--buffer", self.buffer)
        if not 2**16 <= buffer <= 2**36:
            raise UsageError(f"--buffer {self.buffer}: from 64KiB to 64GiB")
        if not all(0 <= seconds < _FOREVER_S for seconds in (self.keep_before, self.keep_after)):
            raise UsageError("--keep-before and --keep-after: seconds, at least 0")
        if self.keep_at_most < 1:
            raise UsageError("--keep-at-most: at least 1")
        keep = None if self.keep is None else parse_keep(self.keep)
        detail = Detail(level=self.level, sample=self.sample, tokens=self.tokens)
        options = Options(
            detail=detail,
            key=self._key(),
            on_full=self.on_full,
            buffer=buffer,
            durability=self.durability,
            keep=keep,
            triggers=tuple(_watch(text, detail) for text in self.keep_when or ()),
            before_s=self.keep_before,
            after_s=self.keep_after,
            most_kept=self.keep_at_most,
        )
        return options._replace(limits=_SHORT) if options.is_flight_recorder else options

    def _key(self) -> bytes:
        if self.tokens != "hashed":
            if self.tokens_key is not None:
                raise UsageError("--tokens-key: only with --tokens hashed")
            return b""
        if self.tokens_key is None:
            return secrets.token_bytes(KEY_BYTES)
        try:
            key = self.tokens_key.read_bytes()
        except OSError as error:
            raise UsageError(f"--tokens-key: can't read {self.tokens_key}: {error.strerror}") from None
        if not 16 <= len(key) <= 64:
            raise UsageError(f"--tokens-key: {self.tokens_key} has {len(key)} bytes; 16 to 64 are needed")
        return key


_FOREVER_S = 1e9
_SHORT = Limits(seconds=5.0)
"""Segments for a flight recorder: how exactly it keeps and drops."""


def record(*command: str, log: LogDir = None, name: str | None = None, spool: Spool = None, how: How = How()) -> int:
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
    options = how.options()
    salvage()
    run_dir, uploader = begin_run(log or default_log_dir(), name or run_name(command), command, spool)
    try:
        code = run_recorded(command, run_dir, options, how.control, strict=how.strict)
    except (ServerError, UsageError):
        if uploader is None:
            shutil.rmtree(run_dir)
        else:
            uploader.discard()
        raise
    summary = Run.open(run_dir)
    passes = sum(summary.passes(rank).count for rank in summary.ranks)
    recorded, gaps = bool(summary.ranks), summary.gaps
    replayable = options.detail.level != "steps" and options.detail.tokens != "none"
    where = finish_upload(uploader, run_dir)
    if not recorded:
        errors.print("[yellow]Nothing was recorded[/]: no scheduler of this command reported to the recorder.")
        errors.print("schedscope has to be installed in the environment that the command runs in.")
    elif not passes and replayable:
        errors.print("[yellow]No pass was recorded[/]: this command's scheduler had nothing to decide.")
    else:
        next_words = f"schedscope {'replay all --run' if replayable else 'inspect'} {shlex.quote(where)}"
        errors.print(f"Recorded {passes:,} passes. Next: {next_words}", markup=False, soft_wrap=True)
    for gap in gaps:
        errors.print(f"gap: {gap_words(gap)}", markup=False, soft_wrap=True)
    print(where, flush=True)
    return code


def finish_upload(uploader: Uploader | None, run_dir: Path) -> str:
    """Upload what is left of a run, if it is to go anywhere. Returns where it is now; says so if it had to stay."""
    if uploader is None:
        return str(run_dir)
    left = uploader.finish(PATIENCE_S)
    if left is None:
        return uploader.parcel.url_of(run_dir)
    errors.print(f"Not uploaded: {left}", style="yellow", markup=False, soft_wrap=True)
    return str(run_dir)


def run_name(command: Sequence[str]) -> str:
    """What a run of a command is called by default: the program, or what Python runs."""
    program, *words = command
    if not Path(program).name.startswith("python"):
        return Path(program).name
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].partition(".")[0]
    return next((Path(word).name for word in words if not word.startswith("-")), Path(program).name)


def run_recorded(
    command: Sequence[str], run_dir: Path, options: Options, control: str | None = None, *, strict: bool = False
) -> int:
    """Run a command with a companion that records it into `run_dir`; returns its exit code.

    Raises ServerError for a command that can't be started, UsageError for a control that can't listen.
    """
    words = list(command)
    if words[0] in OWN_COMMANDS:
        words = [sys.executable, "-m", "schedscope.cli.main", *words]
    with _passing_signals_on() as children:  # also while sealing, which is not to be interrupted
        companion = Companion.start(run_dir, options, follow(alone_s(options)))
        try:
            code = _run(words, companion, children, control, strict)
        finally:
            try:
                companion.stop()
            except SchedscopeError as error:
                errors.print(str(error), style="yellow", markup=False, soft_wrap=True)
    return code if code >= 0 else 128 - code


def _run(
    words: list[str],
    companion: Companion,
    children: list[subprocess.Popen[bytes]],
    control: str | None,
    strict: bool,
) -> int:
    with ExitStack() as stack:
        if control is not None:
            errors.print(f"Control: {stack.enter_context(Control(companion, control)).url}/status", markup=False)
        before = signal.signal(signal.SIGUSR1, lambda *_: companion.keep("SIGUSR1"))
        stack.callback(signal.signal, signal.SIGUSR1, before)
        errors.print(f"Recording into {companion.run_dir}", style="dim", markup=False, soft_wrap=True)
        try:
            # A group of its own: a terminal's Ctrl-C then reaches it once, through us.
            environ = {**os.environ, **companion.environment(), **({STRICT_VARIABLE: "1"} if strict else {})}
            child = subprocess.Popen(words, env=environ, process_group=0)
        except OSError as error:
            raise ServerError(f"record: can't run {words[0]!r}: {error.strerror or error}") from None
        children.append(child)
        return child.wait()


def alone_s(options: Options) -> float:
    """How often a checkpoint stands alone: what a flight recorder keeps must begin with one."""
    return min(ALONE_S, options.limits.seconds) if options.is_flight_recorder else ALONE_S


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


def _watch(text: str, detail: Detail) -> Watch:
    """What `--keep-when` asks for. Raises UsageError."""
    return DetectorWatch(text, detail) if is_for_detector(text) else Trigger(text)
