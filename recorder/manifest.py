"""The manifest: what a run is a record of, and what is missing from it.

It is rewritten as a whole, by temporary name and rename, so a reader sees the old one or the new one.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from schedscope.engine.errors import RunFormatError, RunNotFoundError, UsageError
from schedscope.recorder.frame import SCHEMA_VERSION
from schedscope.recorder.hello import Description, Detail, Source
from schedscope.recorder.lock import held

MANIFEST = "manifest.json"
FORMAT = "schedscope.run"

_MAX_NAME = 80
_ENCODER = msgspec.json.Encoder(enc_hook=repr)


class Gap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Records of a rank that were made and are lost."""

    rank: int
    reason: str
    """`lost`: numbered by the writer and never received, because its buffer was full or nothing could be written.
    `corrupt`: a checksum doesn't hold. `malformed`: rows that don't follow the schema. `torn`: a journal ends in
    the middle of a frame. `cut`: the writer ended without closing, and what it still held is unknown.
    `interrupted`: so did the recorder. `refused`: a second writer for the rank. `expired`: older than what a flight
    recorder keeps."""
    frame: int | None = None
    """Number of the first lost frame; None: unknown."""
    frames: int | None = None
    """How many frames; None: unknown, and perhaps none."""
    after_pass: int | None = None
    """Last pass recorded before it; None: there is none."""
    before_pass: int | None = None
    """First pass recorded behind it; None: there is none yet."""
    detail: str | None = None

    def may_hold(self, number: int) -> bool:
        """Whether a pass that isn't recorded could be in it."""
        return (self.after_pass is None or self.after_pass < number) and (
            self.before_pass is None or number < self.before_pass
        )


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Why a part of a flight recorder's run was made a run of its own."""

    run: str
    """Name of the run it comes from."""
    reason: str
    at: str
    """UTC, ISO 8601."""
    before_s: float
    after_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A run's manifest.json."""

    schema: str = FORMAT
    version: int = SCHEMA_VERSION
    schedscope: str = ""
    """Version of the schedscope that wrote the run."""
    name: str
    created: str
    """UTC, ISO 8601."""
    command: list[str] | None = None
    """The recorded command; None: recorded from inside a process."""
    source: Source | None = None
    ranks: list[int] = []
    config: dict[str, Any] = {}
    """The scheduler's configuration, as the first rank gave it."""
    rank_configs: dict[str, dict[str, Any]] = {}
    """Rank to configuration, only for ranks that have another one."""
    model: str | None = None
    detail: Detail = Detail(level="full")
    """How much is recorded. Runs of version 1 hold everything."""
    keep: str | None = None
    """How much of it a flight recorder keeps, such as `600 s`; None: all."""
    kept: Kept | None = None
    """It was cut out of another run."""
    status: Literal["recording", "sealed"] = "recording"
    sealed_at: str | None = None
    """UTC, ISO 8601."""
    totals: dict[str, dict[str, int]] = {}
    """Rank to table to rows; empty until sealed."""
    gaps: list[Gap] = []
    """While recording, only those that the files themselves don't show."""
    source_gaps: list[dict[str, str]] = []
    """What the source itself could not tell: `feature` and `effect`."""

    def config_of(self, rank: int) -> dict[str, Any]:
        """The configuration of a rank's scheduler."""
        return self.rank_configs.get(str(rank), self.config)

    def explain(self, gap: Gap) -> Gap:
        """The gap as such, or as what a flight recorder let go of: what its files can't tell."""
        expired = gap.reason == "lost" and gap.frame == 0 and (self.keep or self.kept)
        return msgspec.structs.replace(gap, reason="expired") if expired else gap

    def with_rank(self, rank: int, description: Description, detail: Detail) -> Manifest:
        """The manifest with one more rank, as it describes itself, and what is kept of it."""
        first = not self.ranks
        config = msgspec.json.decode(_ENCODER.encode(description.config))
        configs = self.rank_configs
        if not first and config != self.config:
            configs = {**configs, str(rank): config}
        return msgspec.structs.replace(
            self,
            ranks=sorted({*self.ranks, rank}),
            detail=detail,
            source=self.source or description.source,
            model=self.model or description.model,
            config=config if first else self.config,
            rank_configs=configs,
            source_gaps=[*self.source_gaps, *(gap for gap in description.source_gaps if gap not in self.source_gaps)],
        )


class _Version(msgspec.Struct):
    schema: str
    version: int
    schedscope: str = "a newer version"


def create_run(
    log_dir: str | Path,
    name: str = "run",
    *,
    command: list[str] | None = None,
    now: datetime | None = None,
    suffix: str = "",
) -> Path:
    """Make the directory of a new run, `YYYYMMDD-HHMMSS-name` in UTC, with its manifest. Returns its path.

    Characters that don't belong in a file name become `-`; a second run of the same second and name gets a number.
    `suffix` ends the directory's name. Raises UsageError where the directory can't be made.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC)
    short = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.")[:_MAX_NAME] or "run"
    base = f"{created:%Y%m%d-%H%M%S}-{short}{suffix}"
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        path, count = Path(log_dir) / base, 1
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:
                count += 1
                path = Path(log_dir) / f"{base}-{count}"
        words = None if command is None else [_printable(word) for word in command]
        write_manifest(path, Manifest(name=short, created=iso(created), command=words, schedscope=own_version()))
    except OSError as error:
        raise UsageError(f"can't create a run in {log_dir}: {error}") from None
    return path


def read_manifest(run_dir: Path) -> Manifest:
    """The manifest of a run.

    Raises RunNotFoundError if there is none, RunFormatError for one of a newer schedscope or of something else.
    """
    path = run_dir / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(f"{run_dir} is not a run: it has no {MANIFEST}") from None
    except OSError as error:
        raise RunFormatError(f"{path}: can't be read: {error}") from None
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunFormatError(f"{path}: not the manifest of a schedscope run: {error}") from None
    if version.schema != FORMAT:
        raise RunFormatError(f"{path}: a manifest of {version.schema!r}, not of {FORMAT!r}")
    if version.version > SCHEMA_VERSION:
        raise RunFormatError(
            f"{path}: log version {version.version}, written by schedscope {version.schedscope}; this one, "
            f"{own_version()}, reads up to version {SCHEMA_VERSION}: upgrade to schedscope>={version.schedscope}"
        )
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise RunFormatError(f"{path}: {error}") from None


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Replace the manifest, durably."""
    write_file(run_dir / MANIFEST, msgspec.json.format(_ENCODER.encode(manifest), indent=2) + b"\n")


def update_manifest(run_dir: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Read, change and replace the manifest; processes that do this take turns. Raises TimeoutError, OSError.

    Not for a companion, which holds its run for as long as it lives and is alone with the manifest.
    """
    with held(run_dir):
        manifest = change(read_manifest(run_dir))
        write_manifest(run_dir, manifest)
    return manifest


def sealed(manifest: Manifest, totals: Mapping[int, Mapping[str, int]], gaps: list[Gap]) -> Manifest:
    """The manifest of a run that is complete."""
    return msgspec.structs.replace(
        manifest,
        status="sealed",
        sealed_at=iso(datetime.now(UTC)),
        totals={str(rank): dict(rows) for rank, rows in totals.items()},
        gaps=gaps,
    )


@cache
def own_version() -> str:
    """Version of the schedscope that runs."""
    try:
        return importlib.metadata.version("schedscope")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def write_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole, durably: it is there with the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _printable(word: str) -> str:
    """A command's word without the unpaired surrogates that stand for bytes that are no text."""
    return word.encode("utf-8", "backslashreplace").decode()


def iso(moment: datetime) -> str:
    """A moment as manifests give it: ISO 8601 with milliseconds and `Z`."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
