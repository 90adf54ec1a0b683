"""Sinks: where a scheduler hands over its frames, and never hears of them again.

Handing over can't fail, and stalls the scheduler only if that was asked for. What goes wrong behind it ends the
recording of this rank, with one line in the log. What there is no room for is counted, not kept, and shows in the run
as a gap.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from schedscope.recorder.frame import (
    HEADER_BYTES,
    SCHEMA_VERSION,
    Body,
    FrameReader,
    Kind,
    pack,
    stamp,
)
from schedscope.recorder.hello import Description, Detail, Hello, Refusal, Welcome
from schedscope.recorder.ring import RingWriter

RUN_VARIABLE = "SCHEDSCOPE_RUN"
"""Environment: the directory of the run that is being recorded."""
SOCKET_VARIABLE = "SCHEDSCOPE_RECORD_SOCKET"
"""Environment: where its companion listens."""

_RETRY_S = 0.0005
_CONNECT_S = 5.0
_CLOSE_S = 10.0
ENDED = "recording of rank %d ended at frame %d, serving goes on: %s"

log = logging.getLogger("schedscope.recorder")


class Sink(Protocol):
    """Takes the frames of one rank, in order."""

    @property
    def detail(self) -> Detail:
        """What to record."""

    @property
    def key(self) -> bytes:
        """Of hashed tokens."""

    @property
    def attached(self) -> bool:
        """Whether frames still go anywhere: not after `close`, nor after a failure."""

    @property
    def dropped(self) -> int:
        """Frames for which there was no room."""

    def write(self, body: Body) -> None:
        """Hand over what `encode` made. Never raises; waits only if the sink was made to."""

    def detach(self, error: BaseException) -> None:
        """Hand nothing over any more, and say so in the log. That the end is open shows in the run as a gap."""

    def close(self) -> None:
        """Hand over what is still here and say that nothing comes behind. Never raises; a second call is fine."""


class CompanionSink:
    """Hands frames to the companion process through a ring: a copy in memory, and the frame outlives this process.

    Args:
        sock: the connection to the companion. Its end tells either side that the other one is gone.
        welcome: what the companion answered.
        block_s: with `on_full` `block`, how long a frame waits for room before it, and all behind it until there is
            room again, are dropped.
    """

    def __init__(self, sock: socket.socket, rank: int, welcome: Welcome, *, block_s: float = 30.0) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._rank = rank
        self._ring = RingWriter(Path(welcome.ring))
        self._patience_s = block_s if welcome.on_full == "block" else 0.0
        self.detail, self.key = welcome.detail, welcome.key
        self.attached = True
        self.dropped = 0
        self._stalled = False
        """A frame has waited in vain, and there was no room since."""
        self._frames = 0
        _OPEN.add(self)
        atexit.register(self.close)

    def write(self, body: Body) -> None:
        """Number the frame and hand it over, or drop it."""
        if not self.attached:
            return
        try:
            record = stamp(body, self._frames)
            self._frames += 1
            if self._ring.write(record) or (not self._stalled and self._wait(record, self._patience_s)):
                self._stalled = False
            else:
                self._stalled = True
                self._drop(len(record))
        except Exception as error:
            self.detach(error)

    def close(self) -> None:
        """Say that nothing comes behind, the last frame's number included; waits at most ten seconds for room."""
        atexit.unregister(self.close)
        if not self.attached:
            return
        try:
            end = pack(Kind.END, b"", self._frames)
            if not self._ring.write(end) and not self._wait(end, _CLOSE_S):
                raise TimeoutError(f"the companion did not make room for the end within {_CLOSE_S:.0f} s")
            self.attached = False
            self._let_go()
        except Exception as error:
            self.detach(error)

    def _wait(self, record: bytes | bytearray, patience_s: float) -> bool:
        """Write as soon as there is room; False: not in time, or never."""
        if len(record) > self._ring.capacity:
            return False
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self._is_alone():
            time.sleep(_RETRY_S)
            if self._ring.write(record):
                return True
        return False

    def _drop(self, size: int) -> None:
        if self._is_alone():
            raise ConnectionError("the companion is gone, and its buffer is full")
        if not self.dropped:
            room = "is too big for" if size > self._ring.capacity else "finds no room in"
            log.warning(
                "rank %d: records are being lost: a frame of %d bytes %s the buffer of %d; see --buffer and --on-full",
                *(self._rank, size, room, self._ring.capacity),
            )
        self.dropped += 1

    def _is_alone(self) -> bool:
        """Whether the companion is gone."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def detach(self, error: BaseException) -> None:
        """Hand nothing over any more, and say so in the log. That the end is open shows in the run as a gap."""
        if not self.attached:
            return
        self.attached = False
        atexit.unregister(self.close)
        self._let_go()
        log.warning(ENDED, self._rank, self._frames, error or repr(error))

    def _let_go(self) -> None:
        _OPEN.discard(self)
        self._ring.close()
        self._sock.close()

    def _abandon(self) -> None:
        """In a forked child: the ring is the parent's."""
        self.attached = False
        self._let_go()


_OPEN: weakref.WeakSet[CompanionSink] = weakref.WeakSet()


def _abandon_all() -> None:
    for sink in list(_OPEN):
        sink._abandon()


os.register_at_fork(after_in_child=_abandon_all)


def open_sink(
    rank: int,
    description: Description | None = None,
    *,
    block_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
) -> Sink | None:
    """The sink that the environment asks for: to the companion that started this process, or None for none.

    None, with a line in the log, also if the companion can't be reached or says no.
    """
    address = environ.get(SOCKET_VARIABLE)
    if not address:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(address)
        hello = Hello(version=SCHEMA_VERSION, rank=rank, description=description or Description())
        sock.sendall(pack(Kind.HELLO, msgspec.msgpack.encode(hello, enc_hook=repr)))
        return CompanionSink(sock, rank, _answer(sock), block_s=block_s)
    except Exception as error:
        sock.close()
        log.warning("rank %d is not recorded: the companion at %s: %s", rank, address, error)
        return None


def _answer(sock: socket.socket) -> Welcome:
    """What the companion says to a hello. Raises OSError, ValueError."""
    reader = FrameReader()
    while chunk := sock.recv(4096):
        for header, frame in reader.feed(chunk):
            if header.kind is Kind.WELCOME:
                return msgspec.msgpack.decode(frame[HEADER_BYTES:], type=Welcome)
            raise ConnectionRefusedError(msgspec.msgpack.decode(frame[HEADER_BYTES:], type=Refusal).reason)
    raise ConnectionResetError("it hung up")


def record_environment(run_dir: Path, address: str) -> dict[str, str]:
    """What a process must find in its environment for `open_sink` to reach a companion."""
    return {RUN_VARIABLE: str(run_dir), SOCKET_VARIABLE: address}
