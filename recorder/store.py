"""An object store: what lies under a URL such as `s3://bucket/prefix`, through `pyarrow.fs` and nothing else.

An object appears whole or not at all, and is there for everyone once a call has returned. Nothing more is asked of a
store: no locks, no renames, no lists of a single moment.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.fs as pafs
from schedscope.engine.errors import StoreError, UsageError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file")

PARALLEL = 16
"""Questions to ask a store at a time."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_TRIES = 5
_CHUNK = 8 * 2**20
"""Bytes that are moved at a time."""
_CONNECT_S = 5.0
_REQUEST_S = 10.0
"""Without a byte."""
_GCS_RETRY_S = 10
"""Google's client tries for 15 minutes by itself; whoever calls us has a better idea of how long to wait."""
_TEXTS = {"region", "scheme", "endpoint_override", "tls_ca_file_path"}
_SWITCHES = {"anonymous", "allow_bucket_creation", "allow_bucket_deletion", "force_virtual_addressing"}

_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|UNRECOGNIZED_CLIENT|EXPIRED_TOKEN|TOKEN_EXPIRED"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|AuthenticationFailed|Forbidden|\b40[13]\b|credential",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(r"NETWORK_CONNECTION|curl|UNAVAILABLE|TIMEOUT|timed out|resolve host", re.IGNORECASE)
_DETAIL = re.compile(r"(?:AWS Error \w+[^:]*: |curlCode: \d+, )")


class Entry(NamedTuple):
    """An object."""

    name: str
    """Below the directory that was listed."""
    size: int
    """Bytes."""
    changed: float
    """Unix time by the store's clock, s."""


def is_url(text: object) -> TypeGuard[str]:
    """Whether this names a place in an object store rather than a path."""
    return isinstance(text, str) and _URL.match(text) is not None


def shown_url(url: str) -> str:
    """A URL without the secrets that it may hold."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    # In Azure's URLs the container stands in front of the host; only behind a colon is something to hide.
    return urlunsplit(parts._replace(netloc=f"***@{host}")) if at and ":" in user else url


def join_url(url: str, name: str) -> str:
    """The URL of something below another one; options stay behind it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name, safe='/=+')}"))


def split_url(url: str) -> tuple[str, str]:
    """A URL and the last name of its path, which may be empty."""
    parts = urlsplit(url)
    above, _, name = parts.path.rstrip("/").rpartition("/")
    return urlunsplit(parts._replace(path=above)), unquote(name)


class Store:
    """The objects below a URL. Names are relative to it, with slashes; any thread may call.

    Methods raise FileNotFoundError for an object that isn't there, StoreError for everything else that a store does.
    Nothing is sent before the first of them.

    Args:
        url: with the options of `pyarrow.fs.FileSystem.from_uri` behind a question mark.
        attempts: at a request, by S3's client.

    Raises UsageError for a URL that makes no sense.
    """

    def __init__(self, url: str, attempts: int = 4) -> None:
        self.url = url
        self.shown = shown_url(url)
        parts = urlsplit(url)
        if parts.scheme.lower() not in SCHEMES:
            raise UsageError(f"{self.shown}: unknown scheme {parts.scheme!r}; there are: {', '.join(SCHEMES)}")
        if not (parts.netloc or parts.scheme == "file"):
            raise UsageError(f"{self.shown}: it names no bucket")
        self._connect = _s3(url, attempts) if parts.scheme == "s3" else _other(url)
        self._connecting = threading.Lock()
        self._connected: tuple[pafs.FileSystem, str] | None = None

    def read(self, name: str) -> bytes:
        """An object's content, also of one that is being replaced."""
        fs, path = self._at(name)
        content = b""
        for _ in range(_TRIES):
            with self._explained(name):
                with fs.open_input_file(path) as stream:
                    content = stream.readall()
                # Replaced by a longer one between the look at its size and the reading, it would be cut off.
                if fs.get_file_info(path).size == len(content):
                    break
        return content

    def download(self, name: str, target: Path) -> None:
        """Copy an object to a file. Raises OSError also where that can't be written."""
        fs, path = self._at(name)
        with self._explained(name):
            stream = fs.open_input_file(path)
        with stream, target.open("wb") as file:
            while True:
                with self._explained(name):
                    data = stream.read(_CHUNK)
                if not data:
                    return
                file.write(data)

    def write(self, name: str, data: bytes) -> None:
        """Make or replace an object."""
        self._put(name, pa.BufferReader(data), lambda: None)

    def upload(self, name: str, source: Path, progress: Callable[[], None] = lambda: None) -> None:
        """Make or replace an object. Raises FileNotFoundError if the source isn't there."""
        with pa.OSFile(str(source)) as file:
            self._put(name, file, progress)

    def directories(self, name: str = "") -> list[str]:
        """Names of the directories in one, ascending; of one that isn't there, none."""
        return sorted(info.base_name for info in self._list(name, recursive=False) if not info.is_file)

    def files(self, name: str = "") -> list[Entry]:
        """All objects in a directory and below it, by name; of one that isn't there, none."""
        above = len(self._at(name)[1].rstrip("/")) + 1
        found = [info for info in self._list(name, recursive=True) if info.is_file]
        return sorted(Entry(info.path[above:], info.size or 0, _changed(info)) for info in found)

    def find(self, name: str) -> Entry | None:
        """What is known of an object; None if there is none."""
        fs, path = self._at(name)
        with self._explained(name):
            info = fs.get_file_info([path])[0]
        return Entry(name, info.size or 0, _changed(info)) if info.is_file else None

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        self._delete(name, "delete_file")

    def remove_all(self, name: str) -> None:
        """Remove a directory, if it is there, with everything in it."""
        self._delete(name, "delete_dir")

    def check(self) -> None:
        """Raises StoreError if there is no such bucket: an empty list doesn't tell."""
        fs, path = self._at("")
        if isinstance(fs, pafs.LocalFileSystem):
            return
        bucket = path.partition("/")[0]
        with self._explained(""):
            missing = fs.get_file_info([bucket])[0].type == pafs.FileType.NotFound
        if missing:
            raise StoreError(f"{self.shown}: there is no bucket {bucket!r}", final=True)

    def _list(self, name: str, *, recursive: bool) -> list[pafs.FileInfo]:
        fs, path = self._at(name)
        with self._explained(name):
            infos: list[pafs.FileInfo] = fs.get_file_info(
                pafs.FileSelector(path, recursive=recursive, allow_not_found=True)
            )
        return infos

    def _put(self, name: str, source: pa.NativeFile, progress: Callable[[], None]) -> None:
        fs, path = self._at(name)
        # A file appears when it is made, an object when it is closed.
        local = isinstance(fs, pafs.LocalFileSystem)
        target = f"{path}.{os.getpid()}-{threading.get_native_id()}.tmp" if local else path
        with self._explained(name):
            if local:
                fs.create_dir(path.rpartition("/")[0], recursive=True)
            stream = fs.open_output_stream(target)
            try:
                while data := source.read(_CHUNK):
                    stream.write(data)
                    progress()
                stream.close()
            finally:
                # One that failed is sent again when it is let go of: not later than now, when it may be out of date.
                del stream
            if local:
                fs.move(target, path)
        progress()

    def _delete(self, name: str, how: str) -> None:
        fs, path = self._at(name)
        try:
            with self._explained(name):
                getattr(fs, how)(path)
        except FileNotFoundError:
            return

    def _at(self, name: str) -> tuple[pafs.FileSystem, str]:
        with self._connecting:
            if self._connected is None:
                with self._explained(""):
                    self._connected = self._connect()
        fs, root = self._connected
        return fs, f"{root.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            where = shown_url(join_url(self.url, name)) if name else self.shown
            raise _explanation(where, " ".join(str(error).split())) from None


def _explanation(where: str, text: str) -> StoreError:
    if _NO_BUCKET.search(text):
        return StoreError(f"{where}: there is no such bucket", final=True)
    detail = _DETAIL.split(text)[-1].partition(" (Request ID")[0].partition("; Details")[0][:200]
    if _UNREACHABLE.search(text):
        return StoreError(f"{where}: the store can't be reached: {detail}")
    if _DENIED.search(text):
        hint = "check the credentials, such as AWS_ACCESS_KEY_ID"
        return StoreError(f"{where}: access denied ({detail}): {hint}", final=True)
    return StoreError(f"{where}: {detail}")


def _s3(url: str, attempts: int) -> Callable[[], tuple[pafs.FileSystem, str]]:
    """Like pyarrow's own reading of the URL, but it fails in seconds and puts small objects by one request."""
    parts = urlsplit(url)
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _TEXTS:
            options[name] = value
        elif name in _SWITCHES:
            options[name] = value.lower() in {"true", "1", "yes"}
        else:
            known = ", ".join(sorted(_TEXTS | _SWITCHES))
            raise UsageError(f"{shown_url(url)}: unknown option {name!r}; there are: {known}")
    if parts.password is not None:
        options |= {"access_key": unquote(parts.username or ""), "secret_key": unquote(parts.password)}
    bucket = parts.hostname or ""

    def connect() -> tuple[pafs.FileSystem, str]:
        given = {"connect_timeout": _CONNECT_S, "request_timeout": _REQUEST_S, **_endpoint(), **options}
        given["retry_strategy"] = pafs.AwsStandardS3RetryStrategy(max_attempts=attempts)
        if "region" not in given and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
            given["region"] = "us-east-1" if "endpoint_override" in given else pafs.resolve_s3_region(bucket)
        try:
            fs = pafs.S3FileSystem(**given, allow_delayed_open=True)
        except TypeError:  # an older pyarrow: three requests for an object
            fs = pafs.S3FileSystem(**given)
        return fs, bucket + unquote(parts.path)

    return connect


def _endpoint() -> dict[str, str]:
    """What the environment says about another server than Amazon's."""
    parts = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc} if parts.netloc else {}


def _other(url: str) -> Callable[[], tuple[pafs.FileSystem, str]]:
    parts = urlsplit(url)
    if parts.scheme in {"gs", "gcs"} and "retry_limit_seconds" not in parts.query:
        query = "&".join(filter(None, [parts.query, f"retry_limit_seconds={_GCS_RETRY_S}"]))
        url = urlunsplit(parts._replace(query=query))
    try:
        made = pafs.FileSystem.from_uri(url)
    except (ValueError, OSError) as error:
        raise UsageError(f"{shown_url(url)}: {error}") from None
    return lambda: made


def _changed(info: pafs.FileInfo) -> float:
    return 0.0 if info.mtime is None else float(info.mtime.timestamp())
