"""A sink for a scheduler that is its own companion: it writes the run's files itself."""

from __future__ import annotations

import logging
from pathlib import Path

from schedscope.recorder.frame import Body, Kind, pack, parse_header, stamp
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import Manifest, read_manifest, sealed, update_manifest
from schedscope.recorder.rank_files import is_recorded, summarize
from schedscope.recorder.rank_log import LIMITS, Limits, RankLog, seal_journal
from schedscope.recorder.sink import ENDED

log = logging.getLogger("schedscope.recorder")


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
        limits: Limits = LIMITS,
        detail: Detail | None = None,
        key: bytes = b"",
    ) -> None:
        self._run_dir = Path(run_dir)
        self._rank = rank
        self.detail, self.key = detail or Detail(), key
        self._frames = 0
        read_manifest(self._run_dir)
        self._log = RankLog(self._run_dir, rank, seal_journal, limits)
        self.attached = True
        self.dropped = 0
        """Always: it writes or ends."""
        try:
            described = description or Description()
            update_manifest(self._run_dir, lambda manifest: manifest.with_rank(rank, described, self.detail))
        except BaseException:
            self._log.release()
            raise

    def write(self, body: Body) -> None:
        """Write the frame to the journal."""
        if not self.attached:
            return
        try:
            self._append(bytes(stamp(body, self._frames)))
            self._frames += 1
        except Exception as error:
            self.detach(error)

    def close(self) -> None:
        """Seal the rank, and the run if no other rank is being written."""
        if not self.attached:
            return
        try:
            self._append(pack(Kind.END, b"", self._frames))
            self._log.close()
            self._log.release()
            self._seal_run()
            self.attached = False
        except Exception as error:
            self.detach(error)

    def _append(self, record: bytes) -> None:
        self._log.append(parse_header(record), record)

    def _seal_run(self) -> None:
        def change(manifest: Manifest) -> Manifest:
            if is_recorded(self._run_dir, whole=False):
                return manifest
            return sealed(manifest, *summarize(self._run_dir, manifest))

        update_manifest(self._run_dir, change)

    def detach(self, error: BaseException) -> None:
        """Hand nothing over any more, and say so in the log. That the end is open shows in the run as a gap."""
        self.attached = False
        self._log.release()
        log.warning(ENDED, self._rank, self._frames, error or repr(error))
