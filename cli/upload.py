"""`schedscope upload`: what recordings left in the spool because their object store didn't take it."""

from __future__ import annotations

from schedscope.cli.options import Spool
from schedscope.cli.output import console, errors
from schedscope.engine.errors import SchedscopeError, StoreError
from schedscope.recorder.parcel import Parcel, parcels, spool_dir
from schedscope.recorder.salvage import finish_run, salvage
from schedscope.recorder.upload import Uploader


def upload(*, spool: Spool = None, to: str | None = None) -> int:
    """Upload the runs that wait in the spool, those of killed recorders too, to where they were meant to go.

    Runs that are still being recorded are left alone. Exit code 10 if one could not be uploaded.

    Parameters
    ----------
    to
        Upload to this URL instead, such as s3://BUCKET/PREFIX.
    """
    folder = spool or spool_dir()
    salvage()
    done, failed = 0, 0
    for path in parcels(folder):
        try:
            parcel = Parcel.open(path, to)
            if parcel is not None:
                done += _upload(parcel)
        except (SchedscopeError, OSError) as error:
            errors.print(f"{path}: {error}", style="yellow", markup=False, soft_wrap=True)
            failed += 1
    if not done and not failed:
        console.print(f"Nothing waits in {folder}.", markup=False, soft_wrap=True)
    return StoreError.exit_code if failed else 0


def _upload(parcel: Parcel) -> int:
    """Upload a parcel, and print the URLs of its runs. Returns how many. Raises SchedscopeError, OSError."""
    if not all(finish_run(run_dir) for run_dir in parcel.recorded):
        parcel.release()
        raise SchedscopeError("its scheduler still runs; try again when that has ended")
    uploader = Uploader(parcel)
    urls = [parcel.url_of(run_dir) for run_dir in parcel.runs]
    uploader.start()
    left = uploader.finish()
    if left is not None:
        raise StoreError(str(left))
    for url in urls:
        console.print(url, markup=False, soft_wrap=True)
    return len(urls)
