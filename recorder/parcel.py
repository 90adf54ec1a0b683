"""Parcels: runs on their way to an object store, in a directory that outlives whoever brings them there."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path

import msgspec
from schedscope.engine.errors import RunFormatError, UsageError
from schedscope.recorder.lock import Lock, hold
from schedscope.recorder.manifest import MANIFEST, write_file
from schedscope.recorder.mirror import cache_dir
from schedscope.recorder.store import Store, join_url, shown_url

PARCEL = "parcel.json"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a parcel is to go."""

    url: str
    token: str
    """What tells its runs from those that others record at the same moment under the same name."""


class Parcel:
    """Runs on their way to an object store: a directory of the spool. Whoever has it open is alone with it."""

    def __init__(self, path: Path, address: Address, lock: Lock) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.address = address
        self._lock = lock

    @classmethod
    def create(cls, spool: Path, url: str) -> Parcel:
        """A new, empty one. Raises UsageError."""
        Store(url)
        address = Address(url=url, token=secrets.token_hex(3))
        path = spool / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{address.token}"
        try:
            path.mkdir(parents=True)
            write_file(path / PARCEL, msgspec.json.encode(address))
            (path / PARCEL).chmod(0o600)  # a URL may hold a password
            lock = hold(path)
        except OSError as error:
            raise UsageError(f"--spool {spool}: can't be written to: {error}") from None
        assert lock is not None
        return cls(path, address, lock)

    @classmethod
    def open(cls, path: Path, url: str | None = None) -> Parcel | None:
        """One that was left behind; None if someone works on it. Raises RunFormatError, UsageError.

        Args:
            url: where it is to go instead.
        """
        try:
            address = msgspec.json.decode((path / PARCEL).read_bytes(), type=Address)
            lock = hold(path)
        except (OSError, msgspec.DecodeError) as error:
            raise RunFormatError(f"{path}: not what a recording left behind: {error}") from None
        if url is not None:
            Store(url)
            address = Address(url=url, token=address.token)
        return None if lock is None else cls(path, address, lock)

    @property
    def suffix(self) -> str:
        """What the names of its runs end with, in the store."""
        return f"-{self.address.token}"

    @property
    def runs(self) -> list[Path]:
        """Directories of its runs, by name."""
        return sorted(path.parent for path in self.path.glob(f"*/{MANIFEST}"))

    @property
    def recorded(self) -> list[Path]:
        """Those that are not cut out of another one: a recorder writes to one of them."""
        return [path for path in self.runs if path.name.endswith(self.suffix)]

    def name_of(self, run_dir: Path) -> str:
        """A run's name in the store."""
        return run_dir.name if run_dir.name.endswith(self.suffix) else run_dir.name + self.suffix

    def url_of(self, run_dir: Path) -> str:
        """A run's URL, as shown to people."""
        return shown_url(join_url(self.address.url, self.name_of(run_dir)))

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave it to others."""
        self._lock.release()


def spool_dir() -> Path:
    """Where recordings wait that are on their way to an object store."""
    return cache_dir() / "spool"


def parcels(spool: Path) -> list[Path]:
    """The parcels of a spool, oldest first."""
    return sorted(path.parent for path in spool.glob(f"*/{PARCEL}"))
