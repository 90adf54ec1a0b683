"""The doctor as a whole: what it says, to whom, and how it is extended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crafted import Arrival, ask, play, play_into, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import until
from schedscope.cli.main import main
from schedscope.cli.record import How
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import UsageError
from schedscope.recorder.companion import Companion
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs, resolve_run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.sink import open_sink
from schedscope.replay.case import Case
from schedscope.replay.doctor import BUILT_IN, examine, known_detectors, parse_thresholds, thresholds
from schedscope.replay.finding import Finding, Severity
from schedscope.replay.watch import DetectorWatch
from simulation import any_config, record

CROWDED = SchedulerConfig(max_total_tokens=20_000, max_running_requests=2)


def crowd(count: int) -> list[Arrival]:
    return [Arrival(0.01 * n, ask(f"r{n}", prompt(50, n + 1), new=50)) for n in range(count)]


def test_a_healthy_run_has_nothing_to_say(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", chunked_prefill_size=512)
    shared = [Arrival(0.5 * n, ask(f"r{n}", [*prompt(200), *prompt(20, n + 2)], new=20)) for n in range(40)]
    found = examine(play(tmp_path, config, shared))
    assert found.findings == ()
    assert found.worst is None
    assert found.not_judged == {}
    assert set(found.examined) == {each.name for each in BUILT_IN}


def test_all_waiting_is_what_requests_spent_in_the_queue(tmp_path: Path) -> None:
    run = play(tmp_path, CROWDED, crowd(40))
    waited = sum(row["admit_ns"] - row["arrive_ns"] for row in run.rows("requests")) / 1e9
    assert Case.of_run(run).waiting_s() == pytest.approx(waited, rel=1e-3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    detail=st.builds(
        Detail,
        level=st.sampled_from(["steps", "passes", "decisions", "full"]),
        sample=st.sampled_from([1, 3]),
        tokens=st.sampled_from(["full", "hashed", "none"]),
    ),
)
def test_any_run_can_be_examined(tmp_path: Path, seed: int, detail: Detail) -> None:
    run = Run.open(record(tmp_path, any_config(seed), seed=seed, requests=40, detail=detail))
    found = examine(run)
    assert set(found.examined) | set(found.not_judged) == {each.name for each in BUILT_IN}
    order = [(each.severity.rank, -each.cost_s) for each in found.findings]
    assert order == sorted(order)
    for finding in found.findings:
        assert finding.title
        assert finding.advice
        assert finding.evidence or finding.detector == "lost_records"
        assert finding.cost_s >= 0
        for evidence in finding.evidence:
            if evidence.pass_number is not None and detail.level != "steps":
                assert run.pass_rows(evidence.rank, evidence.pass_number)


def test_worst_comes_first_and_every_detector_is_known_by_its_name(tmp_path: Path) -> None:
    found = examine(play(tmp_path, CROWDED, crowd(60)))
    assert found.findings[0].detector == "budget_limit"
    assert found.worst is Severity.CRITICAL
    for detector in BUILT_IN:
        assert detector.look.__name__ == detector.name
        assert detector.look.__doc__
        assert all(isinstance(default, int | float) for default in thresholds(detector).values())


def test_exit_codes_gate_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crowded, calm = (play(tmp_path, CROWDED, crowd(count)).path for count in (60, 1))
    assert main(["doctor", "--run", str(crowded)]) == 0
    assert main(["doctor", "--run", str(crowded), "--fail-on", "critical"]) == 11
    assert main(["doctor", "--run", str(crowded), "--fail-on", "note", "--only", "rid_ties"]) == 0
    assert main(["doctor", "--run", str(calm), "--fail-on", "note"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--run", str(crowded)]) == 0
    told = capsys.readouterr().out
    assert "1. CRITICAL  --max-running-requests 2 kept requests waiting" in told
    assert "it would admit 4 instead of 2" in told
    assert "schedscope replay pass" in told
    assert main(["doctor", "--run", str(calm)]) == 0
    assert "1 request waited" in (told := capsys.readouterr().out)
    assert "Nothing found by" in told
    assert main(["doctor", "--run", str(create_run(tmp_path, "empty"))]) == 5
    assert "nothing was recorded" in capsys.readouterr().err


def test_a_server_that_had_nothing_to_do_passes_no_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy, idle = (play(tmp_path, CROWDED, crowd(count)).path for count in (60, 0))
    assert main(["doctor", "--run", str(idle), "--fail-on", "critical"]) == 5
    assert "nothing to judge" in capsys.readouterr().err
    assert resolve_run(None, tmp_path) == busy, "the newest in which anything was decided"


def test_json_tells_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = play(tmp_path, CROWDED, crowd(60))
    assert main(["doctor", "--run", str(run.path), "--json", "--no-check"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "schedscope.doctor/1"
    assert told["worst"] == "critical"
    first = told["findings"][0]
    assert (first["detector"], first["severity"], first["rank"]) == ("budget_limit", "critical", 0)
    assert first["checked"] == []
    assert first["cost_s"] == pytest.approx(told["waiting_s"], rel=0.1)
    assert main(["doctor", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["detectors"]
    assert [each["name"] for each in listed] == list(known_detectors())
    assert next(each for each in listed if each["name"] == "starvation")["thresholds"]["overtaken"] == 20


def test_thresholds_are_set_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(play(tmp_path, CROWDED, crowd(60)).path)
    strict = ["doctor", "--run", run, "--only", "budget_limit", "--fail-on", "note"]
    assert main(strict) == 11
    assert main([*strict, "--set", "budget_limit.share=1.5"]) == 0
    capsys.readouterr()
    for words, said in (
        ("budget_limit.shar=1", "budget_limit has no threshold 'shar'; it has: share, free, seconds"),
        ("budget=1", "expected DETECTOR.NAME=VALUE"),
        ("budgets.share=1", "no detector 'budgets'"),
        ("budget_limit.share=much", "expected a number such as 0.25"),
    ):
        assert main([*strict, "--set", words]) == 2
        assert said in capsys.readouterr().err
    assert parse_thresholds(["starvation.overtaken=5"], known_detectors()) == {"starvation": {"overtaken": 5}}


OWN = '''
from schedscope.replay.finding import Finding, Severity
from schedscope.replay.watch import DetectorWatch


def too_many_tenants(case, *, tenants=2):
    """More prefixes than that."""
    count = case.one("SELECT count(DISTINCT rid) AS n FROM measured")["n"]
    if count > tenants:
        yield Finding(detector="too_many_tenants", severity=Severity.WARNING, rank=None, title=f"{count} tenants",
                      cost_s=0.0, evidence=(), advice="Fewer.")


def broken(case):
    """Fails."""
    raise RuntimeError("no idea")
'''


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of detectors, and what an installed package says about it."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "our_detectors.py").write_text(OWN)
    about = folder / "our_detectors-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: our-detectors\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[schedscope.detectors]\ntoo_many_tenants = our_detectors:too_many_tenants\n"
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("our_detectors", None)


@pytest.mark.usefixtures("package")
def test_a_detector_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(play(tmp_path, CROWDED, crowd(3)).path)
    own = ["doctor", "--run", run, "--detector", "our_detectors:too_many_tenants", "--only", "too_many_tenants"]
    assert main(own) == 0
    assert "3 tenants" in capsys.readouterr().out
    assert main([*own, "--set", "too_many_tenants.tenants=3"]) == 0
    assert "Nothing found" in capsys.readouterr().out
    assert main(["doctor", "--run", run, "--detector", "our_detectors:broken"]) == 2
    assert "detector broken failed: RuntimeError('no idea')" in capsys.readouterr().err
    for path, said in (
        ("our_detectors", "expected package.module:function"),
        ("our_detectors:none", "can't be loaded"),
        ("no_such_module:x", "can't be loaded"),
        ("our_detectors:OWN", "can't be loaded"),
        ("our_detectors:Finding.advice", "can't be loaded"),
    ):
        assert main(["doctor", "--run", run, "--detector", path]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UsageError, match="not a function"):
        known_detectors(["our_detectors:__name__"])
    assert main(["doctor", "--run", run, "--only", "nothing"]) == 2
    assert "no such detector; there are: never_fits" in capsys.readouterr().err


def test_a_detector_of_an_installed_package(tmp_path: Path, package: Path) -> None:
    run = str(play(tmp_path, CROWDED, crowd(3)).path)
    command = [sys.executable, "-m", "schedscope.cli.main", "doctor", "--run", run, "--fail-on", "warning", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 11, ended.stderr
    assert [each["title"] for each in json.loads(ended.stdout)["findings"]] == ["3 tenants"]


def test_a_run_without_checkpoints_nearby_is_not_re_run_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedscope.replay.case._REACH", 2)
    arrivals = [Arrival(0.01 * n, ask(f"r{n}", prompt(50, n + 1), new=50)) for n in range(60)]
    finding: Finding = examine(play(tmp_path, CROWDED, arrivals)).findings[0]
    assert finding.checked == () or all(each.trial.pass_number % 50 <= 2 for each in finding.checked)


def test_a_detector_watches_what_is_recorded(tmp_path: Path) -> None:
    """Journal by journal, as the flight recorder seals them."""
    config = SchedulerConfig(max_total_tokens=600, schedule_conservativeness=0.02, new_token_ratio_decay_steps=10)
    talkers = [Arrival(0.05 * n, ask(f"r{n}", prompt(20, n + 1), new=150)) for n in range(60)]
    storm, calm = (
        play(tmp_path, each, talkers, limits=Limits(passes=10**9))
        for each in (config, config.replace(schedule_conservativeness=1.4))
    )
    watch = DetectorWatch("doctor: retraction_storm", storm.manifest.detail)
    assert watch.check(_rows(storm), 3, config.to_dict()) is not None
    reason = watch.check(_rows(storm), 3, config.to_dict())
    assert reason is not None
    assert reason.startswith("doctor: retraction_storm: ")
    assert "retractions for 60 admitted requests" in reason
    assert watch.check(_rows(calm), 3, config.to_dict()) is None
    assert watch.check({}, 0, {}) is None
    for text, said in (("doctor: storm", "no such detector"), ("doctor: thrashing_pool", "could never go off")):
        with pytest.raises(UsageError, match=said):
            DetectorWatch(text, Detail())


def _rows(run: Run) -> Rows:
    """What its journal held."""
    names = {name: table.names[1:] for name, table in TABLES.items()}
    return {name: [tuple(row[key] for key in keys) for row in run.rows(name)] for name, keys in names.items()}


def test_every_detector_can_watch(tmp_path: Path) -> None:
    run = play(tmp_path, CROWDED, crowd(60))
    rows = _rows(run)
    went_off = [
        detector.name
        for detector in BUILT_IN
        if DetectorWatch(f"doctor: {detector.name}", run.manifest.detail).check(rows, 0, CROWDED.to_dict())
    ]
    assert went_off == ["budget_limit"]


def test_a_recorder_keeps_what_a_detector_finds(tmp_path: Path) -> None:
    """The real companion, sealer and flight recorder."""
    options = How(keep="1h", keep_when=["doctor: budget_limit"], keep_after=0.0).options()
    run_dir = create_run(tmp_path, "watched")
    with Companion.start(run_dir, options) as companion:
        described = Description(config=CROWDED.to_dict())
        sink = open_sink(0, described, environ={**os.environ, **companion.environment()})
        assert sink is not None
        play_into([sink], CROWDED, crowd(60))
        until(lambda: len(find_runs(tmp_path)) == 2)
    (kept,) = [info for info in find_runs(tmp_path) if info.name == "watched-kept"]
    reason = Run.open(kept.path).manifest.kept
    assert reason is not None
    assert reason.reason.startswith("doctor: budget_limit: --max-running-requests 2 kept requests waiting")
