"""Who is writing: a lock on a directory or file, held for as long as a writer lives.

The kernel lets go of it when the process dies, however it dies. So a reader can tell a run that is being recorded
from one whose recorder was killed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RETRY_S = 0.002


class Lock:
    """An exclusive hold on a directory or file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Let go. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hold(path: Path, patience_s: float = 0.1) -> Lock | None:
    """Take the lock; None if someone else keeps it for longer than `patience_s`.

    Where the file system knows no locks, everyone gets one.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Perhaps only a reader that looks whether we are here.
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(_RETRY_S)
        except OSError:
            return Lock(fd)
        else:
            return Lock(fd)


def is_held(path: Path) -> bool:
    """Whether a writer holds it. Readers never disturb each other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


@contextmanager
def held(directory: Path, patience_s: float = 5.0) -> Iterator[None]:
    """Hold a directory for a moment. Raises TimeoutError if it can't be had."""
    lock = hold(directory, patience_s)
    if lock is None:
        raise TimeoutError(f"{directory} is locked by another process")
    try:
        yield
    finally:
        lock.release()
