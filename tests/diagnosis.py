"""What the doctor says about a run, for tests of its detectors."""

from __future__ import annotations

from schedscope.recorder.run import Run
from schedscope.replay.doctor import examine, known_detectors
from schedscope.replay.finding import Finding


def found(run: Run, detector: str, **thresholds: float) -> list[Finding]:
    """What a detector says about a run."""
    return list(examine(run, [known_detectors()[detector]], settings={detector: thresholds}).findings)


def the(run: Run, detector: str) -> Finding:
    """Its only finding."""
    (finding,) = found(run, detector)
    return finding
