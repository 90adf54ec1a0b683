"""Sinks: where a scheduler hands over its frames, and never hears of them again.

Handing over can't fail and can't stall the scheduler. What goes wrong behind it ends the recording of this rank,
with one line in the log. What there is no room for is counted, not kept, and shows in the run as a gap.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from schedscope.recorder.frame import SCHEMA_VERSION, Kind, pack, parse_header, stamp
from schedscope.recorder.hello import Description, Hello

if TYPE_CHECKING:
    from schedscope.recorder.rank_log import Limits

RUN_VARIABLE = "SCHEDSCOPE_RECORD"
"""Environment: the directory of the run that is being recorded."""
SOCKET_VARIABLE = "SCHEDSCOPE_RECORD_SOCKET"
"""Environment: where its companion listens."""

OnFull = Literal["block", "drop"]

_CAPACITY = 64 * 2**20
_SEND_BUFFER = 4 * 2**20
_CONNECT_S = 5.0
_CLOSE_S = 10.0
_ENDED = "recording of rank %d ended at frame %d, serving goes on: %s"

log = logging.getLogger("schedscope.recorder")


class Sink(Protocol):
    """Takes the frames of one rank, in order."""

    @property
    def attached(self) -> bool:
        """Whether frames still go anywhere: not after `close`, nor after a failure."""

    @property
    def dropped(self) -> int:
        """Frames for which there was no room."""

    def write(self, frame: bytes) -> None:
        """Hand over a frame of `encode_frame`. Never raises; waits only if the sink was made to."""

    def close(self) -> None:
        """Hand over what is still here and say that nothing comes behind. Never raises; a second call is fine."""


class CompanionSink:
    """Sends frames to the companion process, over a stream socket.

    A frame goes straight into the socket's buffer while there is room: that is one system call, no thread takes part,
    and the frame outlives this process. Only when the companion falls behind, frames queue up here, up to `capacity`
    bytes, and a thread sends them.

    Args:
        on_full: `drop` drops and counts what exceeds the capacity; `block` waits, at most `block_s` seconds a frame,
            and drops then.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        description: Description | None = None,
        *,
        on_full: OnFull = "drop",
        capacity: int = _CAPACITY,
        block_s: float = 30.0,
    ) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._rank = rank
        self._patience_s = block_s if on_full == "block" else 0.0
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        """What is left to send; the first item is on its way. While it isn't empty only the thread may send."""
        self._queued = 0
        """Bytes in the queue."""
        self._thread: threading.Thread | None = None
        self._attached = True
        self._frames = 0
        self._dropped = 0
        hello = Hello(version=SCHEMA_VERSION, rank=rank, description=description or Description())
        _OPEN.add(self)
        atexit.register(self.close)
        try:
            with self._changed:
                self._send_or_queue(pack(Kind.HELLO, msgspec.msgpack.encode(hello, enc_hook=repr)))
        except Exception as error:
            self._detach(error)

    @property
    def attached(self) -> bool:
        """Whether frames still go to the companion."""
        return self._attached

    @property
    def dropped(self) -> int:
        """Frames for which there was no room."""
        return self._dropped

    def write(self, frame: bytes) -> None:
        """Number the frame and hand it over, or drop it."""
        if not self._attached:
            return
        try:
            with self._changed:
                record = stamp(frame, self._frames)
                self._frames += 1
                if not self._queue or self._has_room(len(record)):
                    self._send_or_queue(record)
                else:
                    self._dropped += 1
        except Exception as error:
            self._detach(error)

    def close(self) -> None:
        """Send the rest, the last frame's number included, for at most ten seconds."""
        atexit.unregister(self.close)
        if not self._attached:
            return
        try:
            with self._changed:
                self._send_or_queue(pack(Kind.END, b"", self._frames))
                if not self._changed.wait_for(lambda: not self._queue, _CLOSE_S):
                    raise TimeoutError(f"the companion did not take the last frames within {_CLOSE_S:.0f} s")
                self._attached = False
                self._changed.notify_all()
            _OPEN.discard(self)
            self._sock.close()
        except Exception as error:
            self._detach(error)

    def _has_room(self, size: int) -> bool:
        """Whether the queue can take more; waits for it if the sink is to block."""

        def fits() -> bool:
            return not self._attached or not self._queue or self._queued + size <= self._capacity

        return fits() or (self._patience_s > 0 and self._changed.wait_for(fits, self._patience_s))

    def _send_or_queue(self, record: bytes) -> None:
        if not self._attached:
            return
        if not self._queue:
            with contextlib.suppress(BlockingIOError):
                record = record[self._sock.send(record, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        if not record:
            return
        self._queue.append(record)
        self._queued += len(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._forward, name="schedscope-sink", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _forward(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or not self._attached)
                    if not self._attached:
                        return
                    record = self._queue[0]
                self._sock.sendall(record, socket.MSG_NOSIGNAL)
                with self._changed:
                    if not self._attached:
                        return
                    self._queue.popleft()
                    self._queued -= len(record)
                    self._changed.notify_all()
        except Exception as error:
            self._detach(error)

    def _detach(self, error: BaseException) -> None:
        with self._changed:
            if not self._attached:
                return
            self._attached = False
            self._queue.clear()
            self._queued = 0
            self._changed.notify_all()
        _OPEN.discard(self)
        atexit.unregister(self.close)
        # The thread may be inside a send: this ends it. The socket itself goes with this object.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        log.warning(_ENDED, self._rank, self._frames, error or repr(error))

    def _abandon(self) -> None:
        """In a forked child: the stream is the parent's. Locks may be held by threads that don't exist here."""
        self._attached = False
        self._sock.close()


_OPEN: weakref.WeakSet[CompanionSink] = weakref.WeakSet()


def _abandon_all() -> None:
    for sink in list(_OPEN):
        sink._abandon()


os.register_at_fork(after_in_child=_abandon_all)


class DirectSink:
    """Writes the run's files itself, at once: for tests and programs that are their own companion.

    `write` does file I/O and now and then seals a segment. The last rank that closes seals the run.

    Args:
        run_dir: made by `create_run`. Raises RunNotFoundError, RunFormatError if it isn't.
        rank: raises FileExistsError if the run has it already.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        description: Description | None = None,
        limits: Limits | None = None,
    ) -> None:
        # Only here: a process with a companion needs no Arrow.
        from schedscope.recorder.manifest import read_manifest, update_manifest
        from schedscope.recorder.rank_log import LIMITS, RankLog, seal_journal

        self._run_dir = Path(run_dir)
        self._rank = rank
        self._frames = 0
        read_manifest(self._run_dir)
        self._log = RankLog(self._run_dir, rank, seal_journal, limits or LIMITS)
        self._attached = True
        try:
            update_manifest(self._run_dir, lambda manifest: manifest.with_rank(rank, description or Description()))
        except BaseException:
            self._log.release()
            raise

    @property
    def attached(self) -> bool:
        """Whether frames are still written."""
        return self._attached

    @property
    def dropped(self) -> int:
        """Always 0: it writes or ends."""
        return 0

    def write(self, frame: bytes) -> None:
        """Write the frame to the journal."""
        if not self._attached:
            return
        try:
            self._append(stamp(frame, self._frames))
            self._frames += 1
        except Exception as error:
            self._detach(error)

    def close(self) -> None:
        """Seal the rank, and the run if no other rank is being written."""
        if not self._attached:
            return
        try:
            self._append(pack(Kind.END, b"", self._frames))
            self._log.close()
            self._log.release()
            self._seal_run()
            self._attached = False
        except Exception as error:
            self._detach(error)

    def _append(self, record: bytes) -> None:
        self._log.append(parse_header(record), record)

    def _seal_run(self) -> None:
        from schedscope.recorder.manifest import Manifest, sealed, update_manifest
        from schedscope.recorder.parts import is_recorded, summarize

        def change(manifest: Manifest) -> Manifest:
            if is_recorded(self._run_dir, whole=False):
                return manifest
            return sealed(manifest, *summarize(self._run_dir, manifest))

        update_manifest(self._run_dir, change)

    def _detach(self, error: BaseException) -> None:
        self._attached = False
        self._log.release()
        log.warning(_ENDED, self._rank, self._frames, error or repr(error))


def open_sink(
    rank: int,
    description: Description | None = None,
    *,
    on_full: OnFull = "drop",
    capacity: int = _CAPACITY,
    environ: Mapping[str, str] = os.environ,
) -> Sink | None:
    """The sink that the environment asks for: to the companion that started this process, or None for none.

    None, with a line in the log, also if the companion can't be reached. Arguments are `CompanionSink`'s.
    """
    address = environ.get(SOCKET_VARIABLE)
    if not address:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        sock.settimeout(_CONNECT_S)
        sock.connect(address)
    except OSError as error:
        sock.close()
        log.warning("rank %d is not recorded: no companion at %s: %s", rank, address, error)
        return None
    return CompanionSink(sock, rank, description, on_full=on_full, capacity=capacity)


def record_environment(run_dir: Path, address: str) -> dict[str, str]:
    """What a process must find in its environment for `open_sink` to reach a companion."""
    return {RUN_VARIABLE: str(run_dir), SOCKET_VARIABLE: address}
