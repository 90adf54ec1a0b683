"""`schedscope report [RUN] -o FILE`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from schedscope.cli.options import LogDir, RunName
from schedscope.cli.output import console
from schedscope.dashboard.cursor import Cursor
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.library import Library
from schedscope.dashboard.report import make_report
from schedscope.engine.errors import UsageError
from schedscope.recorder.runs import default_log_dir, resolve_run


def report(
    run: RunName = None,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("report.html"),
    log: LogDir = None,
    rank: int | None = None,
    theme: Literal["light", "dark"] = "light",
) -> int:
    """Write a run down as one HTML file that needs no server: charts, findings, and the passes behind them.

    Parameters
    ----------
    output
        The file to write.
    rank
        Only this scheduler of the run.
    theme
        What it is drawn on.
    """
    given = resolve_run(run, log)
    library = Library(log or default_log_dir(), given)
    book = library.book(given.name)
    desk = Desk(library, book, Cursor(run=book.name, rank=rank, theme=theme))
    try:
        output.write_text(make_report(desk), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"report: can't write {output}: {error}") from None
    console.print(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, needs nothing but a browser", markup=False, soft_wrap=True
    )
    return 0
