"""The companion: the process that owns a run's files while others do the work.

Schedulers say hello over a Unix socket and get a ring to write to. The companion empties the rings into journals and
seals those. A ring is all that it shares with the recorded processes, so it survives their death, and they its.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.compact import tidy
from schedscope.recorder.frame import HEADER_BYTES, SCHEMA_VERSION, FrameReader, Header, Kind, Rows, pack
from schedscope.recorder.hello import Detail, Hello, OnFull, Refusal, Welcome
from schedscope.recorder.journal import Journal, read_journal
from schedscope.recorder.keep import Keep, expire, freeze
from schedscope.recorder.lock import Lock, hold
from schedscope.recorder.manifest import Gap, Kept, Manifest, iso, read_manifest, sealed, write_manifest
from schedscope.recorder.parts import summarize
from schedscope.recorder.rank_log import LIMITS, Limits, RankLog
from schedscope.recorder.ring import CAPACITY, RingReader, create_ring, remove_ring
from schedscope.recorder.segment import Segment, write_segment
from schedscope.recorder.sink import record_environment
from schedscope.recorder.trigger import Trigger

Durability = Literal["process", "power"]

_CHUNK = 2**16
_TICK_S = 0.01
"""How long a frame may lie in its ring. Readers look there too, so this is not how old what they see is."""
_IDLE_S = 0.25
_SYNC_S = 0.1
_NICE = 19
_MAX_ADDRESS = 100
"""Bytes; the kernel takes 107."""

log = logging.getLogger("schedscope.recorder")


class Options(NamedTuple):
    """How to record."""

    detail: Detail = Detail()
    key: bytes = b""
    """Of hashed tokens; it is not kept."""
    on_full: OnFull = "drop"
    """What a scheduler does whose ring is full: `drop` frames, which shows as a gap, or `block`."""
    buffer: int = CAPACITY
    """Size of a rank's ring, bytes."""
    durability: Durability = "process"
    """What an acknowledged frame survives: that all processes are killed, or a loss of power after 0.1 s."""
    limits: Limits = LIMITS
    keep: Keep | None = None
    """What a flight recorder holds on to; None: everything."""
    triggers: tuple[Trigger, ...] = ()
    before_s: float = 60.0
    """How much is kept around an event."""
    after_s: float = 10.0
    most_kept: int = 20
    """Events that are kept; later ones are only counted."""
    grace_s: float = 2.0
    """How long `stop` waits for processes that are still connected."""


OPTIONS = Options()

Follower = Callable[[Rows], Rows]
"""Sees all rows of a rank, journal by journal, before they are sealed; what it returns is sealed with them."""
Follow = Callable[[Manifest, int], Follower | None]
"""Makes one for a rank; None: that rank needs none."""


class _Event(NamedTuple):
    """Something that is to be kept with what lies around it."""

    reason: str
    at: str
    """UTC, ISO 8601; for people. All else goes by the monotonic clock, which never jumps."""
    noticed: float
    due: float
    """When all that follows it has been recorded."""


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
        self._follow = follow
        self._followers: dict[int, Follower | None] = {}
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
        self._to_seal: queue.SimpleQueue[Path | _Event | None] = queue.SimpleQueue()
        self._sealed_at: dict[Path, float] = {}
        self._events: list[_Event] = []
        """Those that are not due."""
        self._to_freeze = 0
        """Those that are."""
        self._events_seen = 0
        self._keeping = threading.Lock()
        self._missed = False
        """The run's directory is gone, and that was said."""
        self._stopping = threading.Event()
        self._stopped = False
        self._server = threading.Thread(target=self._serve, name="schedscope-companion", daemon=True)
        self._sealer = threading.Thread(target=self._seal, name="schedscope-sealer", daemon=True)

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

    def keep(self, reason: str) -> None:
        """Make a run of its own of what was recorded around this moment, as soon as the time after it is over.

        Events within that time share one. Any thread may call this.
        """
        with self._keeping:
            if self._events:
                return
            self._events_seen += 1
            if self._events_seen > self._options.most_kept:
                if self._events_seen == self._options.most_kept + 1:
                    log.warning("%d events are kept; no more will be", self._options.most_kept)
                return
            now = time.monotonic()
            self._events.append(_Event(reason, iso(datetime.now(UTC)), now, now + self._options.after_s))

    def wait_until_left(self) -> None:
        """Return when no process is connected."""
        while self._connections and self._server.is_alive():
            time.sleep(_IDLE_S)

    def status(self) -> dict[str, object]:
        """The run, its ranks, how full their rings are, and how many events were noticed. Any thread may ask."""
        ranks = {
            str(number): {
                "buffered_bytes": rank.ring.written - rank.ring.read,
                "buffer_bytes": rank.ring.capacity,
                "failing": rank.failing,
            }
            for number, rank in list(self._open.items())
        }
        return {"run": str(self.run_dir), "ranks": ranks, "events": self._events_seen}

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
        self._to_seal.put(None)
        self._sealer.join()
        if not self._is_flight_recorder:
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
        self._hand_over_events(float("inf"))
        self._selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _receive_all(self) -> None:
        deadline = float("inf")
        synced = time.monotonic()
        while True:
            stopping = self._stopping.is_set()
            for key, _ in self._selector.select(_TICK_S if self._open or stopping else _IDLE_S):
                key.data()
            now = time.monotonic()  # before taking: so an event that is due by now comes behind all that was before it
            for rank in list(self._open.values()):
                self._guard(rank, partial(self._take, rank))
            if self._options.durability == "power" and now - synced >= _SYNC_S:
                synced = now
                for rank in list(self._open.values()):
                    self._guard(rank, rank.log.sync)
            self._hand_over_events(now)
            if stopping:
                deadline = min(deadline, now + self._options.grace_s)
                if not self._connections or now >= deadline:
                    return

    def _hand_over_events(self, now: float) -> None:
        """Have those that are due kept, behind everything that was recorded up to now."""
        with self._keeping:
            due = [event for event in self._events if event.due <= now]
            self._events = [event for event in self._events if event.due > now]
            self._to_freeze += len(due)
        if due:
            for rank in list(self._open.values()):
                self._guard(rank, rank.log.rotate)
        for event in due:
            self._to_seal.put(event)

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
        rank_log = RankLog(self.run_dir, hello.rank, self._to_seal.put, self._options.limits)
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

    # ---- the sealer thread ---------------------------------------------------------------------------------

    def _seal(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (item := self._to_seal.get()) is not None:
            try:
                if isinstance(item, _Event):
                    self._freeze(item)
                else:
                    self._seal_journal(item)
            except (OSError, SchedscopeError) as error:
                self._warn_of_sealing(item, error)
            except Exception:
                log.exception("can't seal %s; it stays as it is and can be read", item)

    def _warn_of_sealing(self, item: Path | _Event, error: Exception) -> None:
        if self.run_dir.exists():
            log.warning("can't seal %s now; it stays as it is and can be read: %s", item, error)
        elif not self._missed:
            log.warning("%s was deleted: what is recorded from now on is lost; serving goes on", self.run_dir)
            self._missed = True

    def _seal_journal(self, path: Path) -> None:
        journal = read_journal(path)
        self._add_rows(journal)
        self._sealed_at[write_segment(journal).path] = time.monotonic()
        for trigger in self._options.triggers:
            if (reason := trigger.check(journal.rows)) is not None:
                self.keep(reason)
        with self._keeping:
            needed = self._events or self._to_freeze
        if self._options.keep is not None and not needed:
            for segment in expire(self.run_dir, journal.rank, self._options.keep, self._age):
                self._sealed_at.pop(segment.path, None)
        if not self._is_flight_recorder:
            tidy(path.parent)

    def _add_rows(self, journal: Journal) -> None:
        """Add what the rank's follower makes of a journal."""
        if journal.rank not in self._followers:
            self._followers[journal.rank] = self._follow and self._follow(self.manifest, journal.rank)
        follower = self._followers[journal.rank]
        if follower is not None:
            for table, rows in follower(journal.rows).items():
                journal.rows[table] = sorted([*journal.rows.get(table, ()), *rows])

    @property
    def _is_flight_recorder(self) -> bool:
        """Whether it lets go of old segments, or may have to tell some apart: then they stay small."""
        return self._options.keep is not None or bool(self._options.triggers)

    def _age(self, segment: Segment) -> float:
        """Seconds since it was sealed."""
        return time.monotonic() - self._sealed_at.get(segment.path, 0.0)

    def _freeze(self, event: _Event) -> None:
        options = self._options
        kept = Kept(
            run=self.run_dir.name,
            reason=event.reason,
            at=event.at,
            before_s=options.before_s,
            after_s=options.after_s,
        )
        try:
            since_s = time.monotonic() - event.noticed + options.before_s
            path = freeze(self.run_dir, kept, self._age, since_s)
        finally:
            with self._keeping:
                self._to_freeze -= 1
        log.warning("kept %s: %s", path, event.reason)


def _refused(rank: int, detail: str) -> Gap:
    return Gap(rank=rank, reason="refused", detail=detail)


def _socket_directory() -> Path:
    """A directory that only this user can enter, with a path short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="schedscope-"))
    if len(bytes(path)) < _MAX_ADDRESS - len("/companion"):
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="schedscope-", dir="/tmp"))
