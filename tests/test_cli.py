"""The command line as scripts see it: outputs, exit codes, and clear words instead of tracebacks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from schedscope.cli.main import main
from schedscope.engine import ordering
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.run import Run
from schedscope.recorder.schema import SCHEMA_VERSION, TABLES
from schedscope.recorder.segment import LEVEL, make_segment
from simulation import record

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "sample_logs" / "traces" / "mooncake_conversation_300.jsonl"
SCENARIOS = ROOT / "sample_logs" / "scenarios"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sealed run under lpm."""
    config = SchedulerConfig(schedule_policy="lpm", chunked_prefill_size=64, max_total_tokens=600)
    return record(tmp_path_factory.mktemp("logs"), config, seed=4, requests=40)


def schedscope(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "schedscope.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=120)


# ---- replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHASHSEED": "1", "TZ": "America/St_Johns"},
        {"PYTHONHASHSEED": "4711", "TZ": "Asia/Kolkata", "LC_ALL": "C"},
    ],
    ids=["west", "east"],
)
def test_replay_is_identical_in_another_process_hash_seed_and_time_zone(run: Path, env: dict[str, str]) -> None:
    done = schedscope("replay", "all", "--run", run, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("identical")


def test_replay_all_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "all", "--run", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "schedscope.replay-all/1"
    assert document["identical"] is True
    assert document["passes"] == Run.open(run).passes(0).count
    assert document["ranks"][0]["divergence"] is None


def test_replay_pass_shows_places_keys_and_verdicts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = next(row["pass"] for row in Run.open(run).rows("passes", 0) if row["queue_len"] > 5)
    assert main(["replay", "pass", str(number), "--run", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "key: negative_matched" in shown
    assert "identical" in shown
    assert main(["replay", "pass", str(number), "--run", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    recorded = [row for row in Run.open(run).rows("decisions", 0) if row["pass"] == number]
    assert [entry["rid"] for entry in document["queue"]] == [
        row["rid"] for row in recorded if row["place_after"] is not None
    ]
    assert document["identical"] is True


def test_another_policy_moves_requests_and_leaves_the_recording_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [row["pass"] for row in Run.open(run).rows("passes", 0) if row["queue_len"] > 5]
    moved = 0
    for number in numbers[:10]:
        assert main(["replay", "pass", str(number), "--run", str(run), "--policy", "fcfs", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["other"]["active_policy"] == "fcfs"
        assert document["recorded"]["active_policy"] == "lpm"
        moved += len(document["moved"])
    assert moved > 0
    assert main(["replay", "pass", str(numbers[0]), "--run", str(run), "--set", "prefill_max_requests=1"]) == 0
    assert main(["replay", "all", "--run", str(run)]) == 0


# ---- divergence ----------------------------------------------------------------------------------------------


def _tamper(run: Path, table: str, column: str, row: int, value: Any) -> dict[str, Any]:
    """Change one recorded value; returns the row as it was."""
    for segment in list_segments(run, 0):
        tables = {name: segment.read(TABLES[name]) for name in segment.index.rows}
        rows = tables[table]
        if row < rows.num_rows:
            before: dict[str, Any] = rows.slice(row, 1).to_pylist()[0]
            values = rows.column(column).to_pylist()
            values[row] = value
            index = rows.schema.get_field_index(column)
            changed = pa.array(values, rows.schema.field(index).type)
            tables[table] = rows.set_column(index, rows.schema.field(index), changed)
            shutil.rmtree(segment.path)
            make_segment(segment.path.parent, segment.index, {name: [each] for name, each in tables.items()}, LEVEL)
            return before
        row -= rows.num_rows
    raise AssertionError(f"no row {row} in {table}")


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("decisions", "matched", 12345),
        ("decisions", "place_after", 77),
        ("decisions", "key", "[0,0]"),
        ("decisions", "reason", "memory"),
        ("decisions", "rem_total", 1.5),
        ("passes", "stop", "budget"),
        ("passes", "rem_total", 0.25),
        ("steps", "available", 3),
        ("steps", "new_token_ratio", 0.1234),
        ("events", "tokens", 4321),
        ("events", "node", 4321),
        ("requests", "cached_tokens", 4321),
        ("requests", "end_reason", "stolen"),
    ],
)
def test_one_changed_field_is_found_and_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, column: str, value: Any
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = _tamper(copy, table, column, 25, value)
    assert main(["replay", "all", "--run", str(copy)]) == 3
    shown = capsys.readouterr().out
    assert "divergent" in shown
    assert f"{table}.{column}" in shown
    if table != "requests":
        assert f"pass {before['pass']}" in shown or f"step {before['step']}" in shown
    assert repr(value) in shown


def test_one_changed_line_of_a_policy_is_found(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lpm = ordering.POLICIES["lpm"]

    def shortest_match_first(*arguments: Any) -> Any:
        keys, chance = lpm.keys(*arguments)
        assert keys is not None
        return [key._replace(negative_matched=-key.negative_matched) for key in keys], chance

    monkeypatch.setitem(ordering.POLICIES, "lpm", lpm._replace(keys=shortest_match_first))
    assert main(["replay", "all", "--run", str(run)]) == 3
    assert "decisions." in capsys.readouterr().out


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["replay", "pass", "999999", "--run", "RUN"], 5, "no pass 999999"),
        (["replay", "pass", "-1", "--run", "RUN"], 5, "no pass -1"),
        (["explain", "pass", "999999", "--run", "RUN"], 5, "no pass 999999"),
        (["replay", "pass", "first", "--run", "RUN"], 2, "first"),
        (["replay", "all", "--run", "RUN", "--rank", "7"], 5, "no rank 7"),
        (["replay", "all", "--run", "nowhere"], 5, "nowhere"),
        (["replay", "pass", "1", "--run", "RUN", "--policy", "best"], 2, "unknown policy"),
        (["replay", "pass", "1", "--run", "RUN", "--set", "page_size=2"], 2, "page_size"),
        (["replay", "pass", "1", "--run", "RUN", "--set", "chunked_prefill_size=0"], 4, "chunked_prefill_size=0"),
        (["replay", "pass", "1", "--run", "RUN", "--set", "warp=9"], 4, "warp"),
        (["replay", "pass", "1", "--run", "RUN", "--set", "max_prefill_tokens=many"], 4, "max_prefill_tokens=many"),
        (["replay", "sideways"], 2, "sideways"),
        (["frobnicate"], 2, "frobnicate"),
        (["query", "select nonsense from passes", "--run", "RUN"], 2, "nonsense"),
        (["query", "select 1", "--run", "RUN", "--format", "parquet"], 2, "--output"),
        (["runs", "--loud"], 2, "--loud"),
        (["serve", "--schedule-policy", "best"], 4, "schedule_policy=best"),
        (["serve", "--prefill-max-requests", "0"], 4, "prefill_max_requests=0"),
        (["serve", "--set", "disable_overlap_schedule=false"], 4, "disable_overlap_schedule=false"),
        (["serve", "--max-total-tokens", "-5"], 4, "max_total_tokens=-5"),
        (["serve", "--chunked-prefill-size", "0"], 4, "chunked_prefill_size=0"),
        (["serve", "--chunked-prefill-size", "100", "--page-size", "16"], 4, "not a multiple"),
        (["serve", "--retraction-policy", "priority"], 4, "enable_priority_scheduling"),
        (["serve", "--page-size", "64", "--max-total-tokens", "10"], 4, "page_size=64"),
        (["serve", "--enable-priority-scheduling", "--schedule-policy", "lpm"], 4, "enable_priority_scheduling"),
        (["serve", "--disable-radix-cache", "--schedule-policy", "shortest-prefill-first"], 4, "prefix cache"),
        (["serve", "--radix-eviction-policy", "mfu"], 4, "radix_eviction_policy=mfu"),
        (["serve", "--port", "70000"], 4, "port=70000"),
        (["serve", "--page-size", "large"], 2, "large"),
        (["serve", "--page-size", "64", "--max-total-tokens", "64"], 4, "no request at all"),
        (["serve", "--max-total-tokens", "1" + "0" * 30], 4, "max_total_tokens"),
        (["serve", "--schedule-conservativeness", "nan"], 4, "schedule_conservativeness=nan"),
        (["serve", "--set", "prefill_delayer_queue_min_ratio=inf"], 4, "prefill_delayer_queue_min_ratio=inf"),
        (["serve", "--set", "retraction=7"], 4, "did you mean retraction_policy"),
        (["serve", "--warp", "9"], 2, "--warp"),
        (["serve", "--model-path", "/no/such/model"], 9, "/no/such/model"),
        (["record"], 2, "record"),
        (["record", "--log", "TMP", "--", "/no/such/command"], 9, "/no/such/command"),
        (["load", "/no/such/trace", "--url", "http://127.0.0.1:9"], 7, "/no/such/trace"),
        (["load", "TRACE", "--url", "http://127.0.0.1:9", "--requests", "0"], 2, "--requests 0"),
        (["load", "TRACE", "--url", "http://127.0.0.1:9", "--requests", "1"], 9, "http://127.0.0.1:9"),
        (["load", "TRACE", "--url", "gopher://x", "--requests", "1"], 9, "gopher"),
        (["load", "TRACE", "--url", "http://127.0.0.1:99999", "--requests", "1"], 9, "99999"),
        (["load", "TRACE", "--url", "http://xn--/", "--requests", "1"], 9, "xn--"),
        (["load", "TRACE", "--url", "http://127.0.0.1:9", "--scale", "1e18"], 2, "scale"),
        (["scenario", "check"], 2, "file or folder"),
        (["scenario", "check", "/no/such/folder"], 7, "/no/such/folder"),
        (["scenario", "run", "BROKEN"], 7, "banana"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_bad_input_gets_a_clear_word_and_its_own_exit_code(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("version: 1\nid: x\nkind: pass\nbanana: yes\n")
    stand_ins = {"RUN": run, "TMP": tmp_path, "TRACE": TRACE, "BROKEN": broken}
    assert main([str(stand_ins.get(word, word)) for word in words]) == code
    captured = capfd.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (lambda run: (run / "manifest.json").write_text("{"), 6, "manifest.json"),
        (lambda run: (run / "manifest.json").unlink(), 5, "neither a run"),
        (
            lambda run: (run / "manifest.json").write_text(
                (run / "manifest.json").read_text().replace(f'"version": {SCHEMA_VERSION}', '"version": 99')
            ),
            6,
            "upgrade",
        ),
        (lambda run: _cut(next(run.rglob("decisions*.parquet"))), 6, "decisions"),
        (lambda run: next(run.rglob("steps*.parquet")).write_bytes(b"not parquet at all"), 6, "steps"),
    ],
    ids=["broken manifest", "no manifest", "newer schema", "truncated file", "foreign file"],
)
def test_a_damaged_run_is_refused_by_name(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Any, code: int, says: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    damage(copy)
    assert main(["replay", "all", "--run", str(copy)]) == code
    assert says in capfd.readouterr().err


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def test_the_terminal_debugger_does_not_start_without_a_terminal(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "schedscope.cli.main", "tui", str(run)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("schedscope: tui: needs a terminal")


def test_a_terminal_without_unicode_gets_question_marks(run: Path) -> None:
    env = {"PYTHONIOENCODING": "ascii", "COLUMNS": "0"}
    done = schedscope("replay", "pass", 3, "--run", run, env=env)
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    assert schedscope("scenario", "run", SCENARIOS / "02_cold_system_prompt.yaml", env=env).returncode == 0


def test_a_damaged_detail_is_named(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    _tamper(copy, "events", "detail", 0, "{broken")
    assert main(["replay", "all", "--run", str(copy)]) == 6
    assert "not JSON" in capfd.readouterr().err


@pytest.mark.parametrize("words", ["replay all", "doctor", "explain run", "inspect"])
def test_a_run_is_named_by_its_place_or_by_its_option(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    sample = str(ROOT / "sample_logs" / "sglang-cold-burst")
    said = []
    for naming in ([sample], ["--run", sample]):
        assert main([*words.split(), *naming]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_help_of_every_command() -> None:
    for words in (
        [],
        ["record"],
        ["serve"],
        ["load"],
        ["replay", "pass"],
        ["scenario", "check"],
        ["runs"],
        ["inspect"],
        ["demo"],
    ):
        done = schedscope(*words, "--help")
        assert done.returncode == 0
        assert "Usage" in done.stdout


def test_help_breaks_no_name_that_somebody_may_copy() -> None:
    shown = schedscope("serve", "--help", env={"COLUMNS": "80"}).stdout.splitlines()
    names = {word for line in shown for word in line.split() if word.startswith("--")}
    assert {"--priority-scheduling-preemption-threshold", "--prefill-delayer-token-usage-low-watermark"} <= names
    assert max(map(len, shown)) == 80
    assert "float32, bfloat16 or float16" in " ".join(shown)


# ---- scenarios and runs --------------------------------------------------------------------------------------


def test_scenario_check_counts_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "check", str(SCENARIOS)]) == 0
    assert "4 checked, 0 differ" in capsys.readouterr().out
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((SCENARIOS / "03_two_tenants.yaml").read_text().replace("stop: no_slot", "stop: queue_end"))
    assert main(["scenario", "check", str(wrong), str(SCENARIOS)]) == 1
    shown = capsys.readouterr().out
    assert "stop: expected 'queue_end', got 'no_slot'" in shown
    assert "5 checked, 1 differ" in shown
    assert main(["scenario", "check", str(wrong), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["differ"] == 1
    assert document["scenarios"][0]["differences"][0]["where"] == "stop"


def test_scenario_run_shows_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "run", str(SCENARIOS / "03_two_tenants.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "no running slot for the next request" in shown
    assert "-4000" in shown
    assert main(["scenario", "run", str(SCENARIOS / "02_cold_system_prompt.yaml"), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["scenarios"][0]["passes"][0]
    assert first["queue"][1]["partner"] == "user00"
    assert first["queue"][1]["shared_len"] == 20_000


def test_query_answers_in_every_format(run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    sql = "select pass, stop, preempted from passes where pass < 3 order by pass"
    for form in ("table", "csv", "json"):
        assert main(["query", sql, "--run", str(run), "--format", form]) == 0
        shown = capfdbinary.readouterr().out.decode()
        assert shown.count("\n") >= 4
        assert "stop" in shown
        if form == "json":
            assert [row["pass"] for row in json.loads(shown)["rows"]] == [0, 1, 2]
    file = tmp_path / "answer.parquet"
    assert main(["query", sql, "--run", str(run), "--format", "parquet", "--output", str(file)]) == 0
    assert pq.read_table(file).column("pass").to_pylist() == [0, 1, 2]


def test_query_knows_what_the_screens_measure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select count(*) as n, sum(ttft_ns - waited_ns - prefill_ns - scheduling_ns)::bigint as rest from measured"
    assert main(["query", sql, "--run", str(run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"n": 40, "rest": 0}]


def test_explain_run_names_the_run_in_what_to_type_next(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "run", "--run", str(run)]) == 0
    words = capsys.readouterr().out.splitlines()[-1].partition(": schedscope ")[2].split()
    assert words[-2:] == ["--run", str(run)]
    assert main(words) == 0


def test_inspect_adds_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "schedscope.inspect/1"
    assert document["bytes"] == sum(file.stat().st_size for file in (run / "rank=0").rglob("*.*") if file.is_file())
    assert [table["name"] for table in document["tables"]] == list(TABLES)
    for table in document["tables"]:
        assert table["rows"] == table["sealed_rows"] == Run.open(run).table(table["name"]).num_rows
        assert [column["name"] for column in table["columns"]] == list(TABLES[table["name"]].names)
        assert sum(column["bytes"] for column in table["columns"]) <= table["bytes"]
        assert table["rows"] == 0 or min(column["bytes"] for column in table["columns"]) > 0
    (rank,) = document["ranks"]
    assert (rank["passes"], rank["sealed"] + rank["merged"], rank["journals"]) == (Run.open(run).passes(0).count, 1, 0)
    assert document["gaps"] == []
    assert document["overhead"]["per_step_us"] > 0
    assert main(["inspect", "--log", str(run.parent)]) == 0
    shown = capsys.readouterr().out
    assert "bytes a decision" in shown
    assert all(name in shown for name in TABLES)
    assert main(["inspect", str(run), "--table", "decisions"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TABLES["decisions"].names)
    assert main(["inspect", str(run), "--table", "pass"]) == 2
    assert "no such table; there are: steps" in capsys.readouterr().err


def test_inspect_of_a_run_of_an_older_version_that_was_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(ROOT / "tests" / "data" / "run-v1")]) == 0
    shown = capsys.readouterr().out
    assert "interrupted; log version 1" in shown
    assert "gap: rank 0: records between pass 18 and the end: interrupted" in shown
    assert "19 (0 to 18)" in shown


def test_runs_lists_what_there_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--log", str(run.parent), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [entry["path"] for entry in listed] == [str(run)]
    assert listed[0]["status"] == "sealed"
    folder = tmp_path / "folder"
    assert main(["runs", "--log", str(folder)]) == 5
    assert "no such directory" in capsys.readouterr().err
    folder.mkdir()
    assert main(["runs", "--log", str(folder)]) == 0
    assert "No runs" in capsys.readouterr().out
    shutil.copytree(run, folder / "broken")
    (folder / "broken" / "manifest.json").write_text("{")
    assert main(["runs", "--log", str(folder)]) == 0
    assert "manifest.json: not the manifest of a" in capsys.readouterr().out


# ---- the main job, as typed ----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`schedscope record -- serve`, ready."""
    recorder = ["record", "--log", str(tmp_path), "--name", "job", "--"]
    options = ["--schedule-policy=lpm", "--page-size=16", "--max-total-tokens=4096", "--chunked-prefill-size=256"]
    command = [sys.executable, "-m", "schedscope.cli.main", *recorder, "serve", "--port=0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        if "Serving" in line:
            url = line.split(" on ")[1].split()[0]
            break
    assert url, "the server did not start"
    yield process, url
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_record_load_stop_replay(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path, how: signal.Signals
) -> None:
    process, url = server
    loaded = schedscope("load", TRACE, "--url", url, "--requests", 30, "--scale", 0.02, "--speed", 0, "--json")
    assert loaded.returncode == 0, loaded.stderr
    report = json.loads(loaded.stdout)
    assert report["schema"] == "schedscope.load/1"
    assert report["completed"] == 30
    live = schedscope("replay", "all", "--log", tmp_path)
    assert live.returncode == 0, "a run can be replayed while it is recorded"
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    path = Path(out.splitlines()[-1])
    assert path.parent == tmp_path
    assert Run.open(path).status == "sealed"
    replayed = schedscope("replay", "all", "--log", tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "identical" in replayed.stdout


def test_a_killed_server_leaves_a_readable_run(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    assert schedscope("load", TRACE, "--url", url, "--requests", 10, "--scale", 0.02, "--speed", 0).returncode == 0
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert schedscope("replay", "all", "--run", out.splitlines()[-1]).returncode == 0


def test_the_server_keeps_serving_after_bad_requests(server: tuple[subprocess.Popen[str], str]) -> None:
    _, url = server
    for body in (b"{", b"[]", b'{"text": 5}', b'{"input_ids": [1, 99999999]}', b'{"text": "x", "sampling_params": 3}'):
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 400
        assert b"Traceback" not in refused.value.read()
    too_long = json.dumps({"input_ids": [5] * 5000}).encode()
    request = urllib.request.Request(f"{url}/generate", too_long, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 400
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert answer.status == 200


def test_a_recorded_command_keeps_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--log", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    captured = capfd.readouterr()
    assert "Nothing was recorded" in captured.err
    assert Path(captured.out.splitlines()[-1]).is_dir()
