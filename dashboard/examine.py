"""Examines a run in a process of its own: `python -m schedscope.dashboard.examine RUN`.

The doctor takes seconds and memory for a long run. Here both are a child's, which is less important than the server and
ends when it is done.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.mirror import mirror_of
from schedscope.recorder.run import Run
from schedscope.replay.case import Case
from schedscope.replay.detect_cache import Repeats, repeats
from schedscope.replay.doctor import Examination, examine

_NICENESS = 10


class Examined(NamedTuple):
    """What the doctor says about a run."""

    examination: Examination
    bounds: Mapping[int, Repeats]
    """By rank: what of its prompts repeats, and so could be found at most."""


def examine_run(run: Run) -> Examined:
    """Examine a run here. Raises SchedscopeError."""
    case = Case.of_run(run)
    found = examine(run, case=case)
    return Examined(found, {rank: known for rank in case.ranks if (known := repeats(case, rank)) is not None})


def examine_apart(run: Run) -> Examined:
    """Examine a run in a child. Raises SchedscopeError."""
    if mirror_of(run.path) is not None:
        # What was fetched of an object store is known to this process.
        return examine_run(run)
    command = [sys.executable, "-m", __name__, str(run.path)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SchedscopeError(
            f"the doctor ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}"
        )
    answer: Examined | SchedscopeError = pickle.loads(done.stdout)
    if isinstance(answer, SchedscopeError):
        raise answer
    return answer


def main() -> None:
    """The child."""
    os.nice(_NICENESS)
    answer: Examined | SchedscopeError
    try:
        answer = examine_run(Run.open(Path(sys.argv[1])))
    except SchedscopeError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    # Under its own name, so that what is pickled here is known there.
    from schedscope.dashboard import examine as this

    this.main()
