"""The companion: the process that owns a run's files while others do the work.

Schedulers say hello over a Unix socket and get a ring to write to. The companion empties the rings into journals and
has those sealed. A ring is all that it shares with the recorded processes, so it survives their death, and they its.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.frame import HEADER_BYTES, SCHEMA_VERSION, FrameReader, Header, Kind, pack
from schedscope.recorder.hello import Hello, Refusal, Welcome
from schedscope.recorder.lock import Lock, hold
from schedscope.recorder.manifest import Gap, Manifest, read_manifest, sealed, write_manifest
from schedscope.recorder.options import OPTIONS, Options
from schedscope.recorder.rank_files import summarize
from schedscope.recorder.rank_log import RankLog
from schedscope.recorder.ring import RingReader, create_ring, remove_ring
from schedscope.recorder.sealer import Follow, Sealer
from schedscope.recorder.sink import record_environment

_CHUNK = 2**16
_TICK_S, _LONGEST_TICK_S = 0.01, 0.1
"""How long a frame may lie in its ring while there are many, and while there are none. Readers look there too, so this
is not how old what they see is."""
_IDLE_S = 0.25
_SYNC_S = 0.1
_MAX_ADDRESS = 100
"""Bytes; the kernel takes 107."""

log = logging.getLogger("schedscope.recorder")


class _Rank:
    """A scheduler that is recorded."""

    def __init__(self, rank_log: RankLog, ring: RingReader) -> None:
        self.log = rank_log
        self.ring = ring
        self.failing = False
        """The last frame could not be written."""


class _Connection:
    """A scheduler process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.rank: _Rank | None = None
        """None until it said hello."""


class Companion:
    """Records a run from other processes, in threads of this one.

    ```
    with Companion.start(create_run("schedscope-logs", "name")) as companion:
        subprocess.run(command, env={**os.environ, **companion.environment()})
    ```
    """

    def __init__(self, run_dir: Path, manifest: Manifest, lock: Lock, options: Options, follow: Follow | None) -> None:
        """Use `start`."""
        self.run_dir = run_dir
        self.manifest = manifest
        self._lock = lock
        self._options = options
        self._sealer = Sealer(run_dir, options, follow, lambda: self.manifest)
        self._logs: dict[int, RankLog] = {}
        self._open: dict[int, _Rank] = {}
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
        self._stopping = threading.Event()
        self._stopped = False
        self._server = threading.Thread(target=self._serve, name="schedscope-companion", daemon=True)

    @classmethod
    def start(cls, run_dir: str | Path, options: Options = OPTIONS, follow: Follow | None = None) -> Companion:
        """Listen for schedulers and record them into a run made by `create_run`.

        Args:
            follow: for each rank, who adds to what is sealed.

        Raises RunNotFoundError, RunFormatError for a directory that is no run, UsageError for one that is recorded
        already or where no socket can be made.
        """
        path = Path(run_dir).resolve()
        manifest = read_manifest(path)
        if options.keep is not None:
            manifest = msgspec.structs.replace(manifest, keep=str(options.keep))
        if manifest.status == "sealed" or manifest.ranks:
            raise UsageError(f"{path} has been recorded already")
        lock = hold(path)
        if lock is None:
            raise UsageError(f"{path} is being recorded by another process")
        try:
            companion = cls(path, manifest, lock, options, follow)
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

    def keep(self, reason: str) -> bool:
        """Make a run of its own of what is recorded around this moment, see `Sealer.keep`. Any thread may call this."""
        return self._sealer.keep(reason)

    def wait_until_left(self) -> None:
        """Return when no process is connected."""
        while self._connections and self._server.is_alive():
            time.sleep(_IDLE_S)

    def status(self) -> dict[str, object]:
        """The run, its ranks, how full their rings are, and how many moments were kept. Any thread may ask."""
        ranks = {}
        for number, rank in list(self._open.items()):
            with contextlib.suppress(ValueError):  # it is being closed
                buffered = rank.ring.written - rank.ring.read
                facts = {"buffered_bytes": buffered, "buffer_bytes": rank.ring.capacity, "failing": rank.failing}
                ranks[str(number)] = facts
        return {"run": str(self.run_dir), "ranks": ranks, "kept": self._sealer.kept}

    def stop(self) -> Manifest:
        """Take everything that was sent, seal it, and finish the manifest. A second call does nothing.

        Ends the recording of processes that are still connected after the grace time. Raises SchedscopeError if the
        run can't be finished; what was recorded can be read all the same.
        """
        if self._stopped:
            return self.manifest
        self._stopped = True
        self._stopping.set()
        with contextlib.suppress(OSError):  # it has failed, and said so
            self._waker.send(b"x")
        self._server.join()
        self._sealer.stop([rank_log.directory for rank_log in self._logs.values()])
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
        self._hand_over_moment(float("inf"))
        self._selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _receive_all(self) -> None:
        deadline = float("inf")
        synced = time.monotonic()
        tick = _TICK_S
        while True:
            stopping = self._stopping.is_set()
            for key, _ in self._selector.select(_TICK_S if stopping else tick if self._open else _IDLE_S):
                key.data()
            tick = min(2 * tick, _LONGEST_TICK_S)
            if any(rank.ring.written > rank.ring.read for rank in self._open.values()):
                tick = _TICK_S
            now = time.monotonic()  # before taking: so a moment that is due by now comes behind all that was before it
            for rank in list(self._open.values()):
                self._guard(rank, partial(self._take, rank))
            if self._options.durability == "power" and now - synced >= _SYNC_S:
                synced = now
                for rank in list(self._open.values()):
                    self._guard(rank, rank.log.sync)
            self._hand_over_moment(now)
            if stopping:
                deadline = min(deadline, now + self._options.grace_s)
                if not self._connections or now >= deadline:
                    return

    def _hand_over_moment(self, now: float) -> None:
        """Have it kept if it is due, behind everything that was recorded up to now."""
        moment = self._sealer.take_due(now)
        if moment is None:
            return
        for rank in list(self._open.values()):
            self._guard(rank, rank.log.rotate)
        self._sealer.put(moment)

    def _take(self, rank: _Rank) -> None:
        """Move what lies in a ring to the journal. What can't be written now stays there. Raises OSError."""
        for header, frame in rank.ring.frames():
            rank.log.append(header, frame)
        rank.log.tick()

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
                if connection.rank is None:
                    self._greet(connection, header, frame)
        except Exception as error:
            log.warning("hanging up on a process: %s", error or repr(error))
            refusal = pack(Kind.REFUSAL, msgspec.msgpack.encode(Refusal(str(error) or repr(error))))
            with contextlib.suppress(OSError):
                connection.sock.send(refusal, socket.MSG_NOSIGNAL)
            chunk = b""
        if not chunk:
            self._hang_up(connection)

    def _greet(self, connection: _Connection, header: Header, frame: bytes) -> None:
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
        rank_log = RankLog(self.run_dir, hello.rank, self._sealer.put, self._options.limits)
        self._logs[hello.rank] = rank_log
        path = create_ring(rank_log.directory, self._options.buffer)
        connection.rank = self._open[hello.rank] = _Rank(rank_log, RingReader(path))
        self._change(self.manifest.with_rank(hello.rank, hello.description, self._options.detail))
        options = self._options
        welcome = Welcome(ring=str(path), on_full=options.on_full, detail=options.detail, key=options.key)
        connection.sock.send(pack(Kind.WELCOME, msgspec.msgpack.encode(welcome)), socket.MSG_NOSIGNAL)

    def _hang_up(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        rank = connection.rank
        if rank is None:
            return
        connection.rank = None
        number = rank.log.rank
        self._guard(rank, partial(self._take, rank))
        del self._open[number]
        rank.log.close()
        if not rank.log.ended:
            log.warning("rank %d ended without closing its recording", number)
        rank.ring.close()
        if not rank.failing:  # else its last frames are still there, and readers find them
            with contextlib.suppress(OSError):  # the directory is no more
                remove_ring(rank.log.directory)
            rank.ring.path.unlink(missing_ok=True)

    def _change(self, manifest: Manifest) -> None:
        self.manifest = manifest
        try:
            write_manifest(self.run_dir, manifest)
        except OSError as error:
            log.warning("can't write the manifest now: %s", error)

    def _guard(self, rank: _Rank, write: Callable[[], None]) -> None:
        """Write, or leave it for later: disks fill up and get space again. Says so once."""
        try:
            write()
        except (OSError, ValueError) as error:
            if not rank.failing:
                log.warning("can't write the log of rank %d now: %s", rank.log.rank, error)
                rank.failing = True
        else:
            rank.failing = False


def _refused(rank: int, detail: str) -> Gap:
    return Gap(rank=rank, reason="refused", detail=detail)


def _socket_directory() -> Path:
    """A directory that only this user can enter, with a path short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="schedscope-"))
    if len(bytes(path)) < _MAX_ADDRESS - len("/companion"):
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="schedscope-", dir="/tmp"))
