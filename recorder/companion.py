"""The companion: the process that owns a run's files while others do the work.

Schedulers send frames over a Unix socket; the companion appends them to journals and seals those. It shares nothing
with the recorded processes, so it survives their death, and they its.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.compact import tidy
from schedscope.recorder.frame import HEADER_BYTES, SCHEMA_VERSION, FrameReader, Header, Kind
from schedscope.recorder.hello import Hello
from schedscope.recorder.lock import Lock, hold
from schedscope.recorder.manifest import Gap, Manifest, read_manifest, sealed, write_manifest
from schedscope.recorder.parts import summarize
from schedscope.recorder.rank_log import LIMITS, Limits, RankLog, seal_journal
from schedscope.recorder.sink import record_environment

_CHUNK = 2**20
_TICK_S = 0.25
_MAX_ADDRESS = 100
"""Bytes; the kernel takes 107."""

log = logging.getLogger("schedscope.recorder")


class _Connection:
    """A scheduler process that sends frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.log: RankLog | None = None
        """None until it said hello."""


class Companion:
    """Records a run from other processes, in threads of this one.

    ```
    with Companion.start(create_run("schedscope-logs", "name")) as companion:
        subprocess.run(command, env={**os.environ, **companion.environment()})
    ```
    """

    def __init__(self, run_dir: Path, manifest: Manifest, lock: Lock, limits: Limits, grace_s: float) -> None:
        """Use `start`."""
        self.run_dir = run_dir
        self.manifest = manifest
        self._lock = lock
        self._limits = limits
        self._grace_s = grace_s
        self._logs: dict[int, RankLog] = {}
        self._open_logs: set[int] = set()
        self._failing: set[int] = set()
        """Ranks whose last frame could not be written."""
        self._socket_dir = _socket_directory()
        self._address = str(self._socket_dir / "companion")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._address)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(64))
        self._connections: set[_Connection] = set()
        self._journals: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._stopped = False
        self._server = threading.Thread(target=self._serve, name="schedscope-companion", daemon=True)
        self._sealer = threading.Thread(target=self._seal, name="schedscope-sealer", daemon=True)

    @classmethod
    def start(cls, run_dir: str | Path, limits: Limits = LIMITS, grace_s: float = 2.0) -> Companion:
        """Listen for schedulers and record them into a run made by `create_run`.

        Args:
            grace_s: how long `stop` waits for processes that still hold a connection.

        Raises RunNotFoundError, RunFormatError for a directory that is no run, UsageError for one that is recorded
        already or where no socket can be made.
        """
        path = Path(run_dir).resolve()
        manifest = read_manifest(path)
        if manifest.status == "sealed" or manifest.ranks:
            raise UsageError(f"{path} has been recorded already")
        lock = hold(path)
        if lock is None:
            raise UsageError(f"{path} is being recorded by another process")
        try:
            companion = cls(path, manifest, lock, limits, grace_s)
        except OSError as error:
            lock.release()
            raise UsageError(f"can't record into {path}: {error}") from None
        companion._server.start()
        companion._sealer.start()
        return companion

    def __enter__(self) -> Companion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """Variables that a process to be recorded, or one of its ancestors, has to be started with."""
        return record_environment(self.run_dir, self._address)

    def stop(self) -> Manifest:
        """Take everything that was sent, seal it, and finish the manifest. A second call does nothing.

        Ends the recording of processes that are still connected after the grace time. Raises SchedscopeError if the
        run can't be finished; what was recorded can be read all the same.
        """
        if self._stopped:
            return self.manifest
        self._stopped = True
        self._stopping.set()
        self._waker.send(b"x")
        self._server.join()
        self._journals.put(None)
        self._sealer.join()
        for rank_log in self._logs.values():
            tidy(rank_log.directory, grace_s=0.0, final=True)
        try:
            self.manifest = sealed(self.manifest, *summarize(self.run_dir, self.manifest))
            write_manifest(self.run_dir, self.manifest)
        except OSError as error:
            raise SchedscopeError(f"{self.run_dir}: can't write the manifest: {error}") from None
        finally:
            for rank_log in self._logs.values():
                rank_log.release()
            self._lock.release()
        return self.manifest

    # ---- the server thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._receive_all()
        except Exception:
            log.exception("the companion failed; recording ends here")
        for connection in list(self._connections):
            self._hang_up(connection)
        self._selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _receive_all(self) -> None:
        deadline = float("inf")
        while True:
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping and not self._connections else _TICK_S)
            for key, _ in ready:
                key.data()
            for rank in list(self._open_logs):
                self._guard(rank, self._logs[rank].tick)
            if stopping:
                deadline = min(deadline, time.monotonic() + self._grace_s)
                if (not ready and not self._connections) or time.monotonic() >= deadline:
                    return

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("a process could not connect: %s", error)
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: _Connection) -> None:
        try:
            chunk = connection.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        try:
            for header, frame in connection.reader.feed(chunk):
                if connection.log is None:
                    connection.log = self._greet(header, frame)
                elif header.kind in (Kind.ROWS, Kind.END):
                    self._append(connection.log, header, frame)
        except Exception as error:
            log.warning("hanging up on a process: %s", error or repr(error))
            chunk = b""
        if not chunk:
            self._hang_up(connection)

    def _greet(self, header: Header, frame: bytes) -> RankLog:
        """Begin the log of a rank. Raises ValueError for anyone that can't be recorded, OSError, FileExistsError."""
        if header.kind is not Kind.HELLO:
            raise ValueError("it did not say hello")
        hello = msgspec.msgpack.decode(frame[HEADER_BYTES:], type=Hello)
        if hello.version != SCHEMA_VERSION:
            raise ValueError(f"it writes log version {hello.version}, this is a companion for {SCHEMA_VERSION}")
        if hello.rank in self._logs:
            detail = "a second process wanted to record this rank"
            self._change(
                msgspec.structs.replace(self.manifest, gaps=[*self.manifest.gaps, _refused(hello.rank, detail)])
            )
            raise ValueError(f"rank {hello.rank}: {detail}")
        rank_log = RankLog(self.run_dir, hello.rank, self._journals.put, self._limits)
        self._logs[hello.rank] = rank_log
        self._open_logs.add(hello.rank)
        self._change(self.manifest.with_rank(hello.rank, hello.description))
        return rank_log

    def _append(self, rank_log: RankLog, header: Header, frame: bytes) -> None:
        self._guard(rank_log.rank, lambda: rank_log.append(header, frame))

    def _hang_up(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.log is not None:
            self._open_logs.discard(connection.log.rank)
            self._guard(connection.log.rank, connection.log.close)
            if not connection.log.ended:
                log.warning("rank %d ended without closing its recording", connection.log.rank)

    def _change(self, manifest: Manifest) -> None:
        self.manifest = manifest
        try:
            write_manifest(self.run_dir, manifest)
        except OSError as error:
            log.warning("can't write the manifest now: %s", error)

    def _guard(self, rank: int, write: Callable[[], None]) -> None:
        """Write, or lose a frame and go on: disks fill up and get space again. Says so once."""
        try:
            write()
        except OSError as error:
            if rank not in self._failing:
                log.warning("can't write the log of rank %d, records are being lost: %s", rank, error)
                self._failing.add(rank)
        else:
            self._failing.discard(rank)

    # ---- the sealer thread ---------------------------------------------------------------------------------

    def _seal(self) -> None:
        while (path := self._journals.get()) is not None:
            seal_journal(path)
            tidy(path.parent)


def _refused(rank: int, detail: str) -> Gap:
    return Gap(rank=rank, reason="refused", detail=detail)


def _socket_directory() -> Path:
    """A directory that only this user can enter, with a path short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="schedscope-"))
    if len(bytes(path)) < _MAX_ADDRESS - len("/companion"):
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="schedscope-", dir="/tmp"))
