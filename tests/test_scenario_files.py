"""Scenario files that break the format get one clear line and exit code 7, whatever is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.cli.main import main

GOOD = {
    "version": 1,
    "id": "t",
    "kind": "pass",
    "segments": {"a": 20},
    "waiting_queue": [{"rid": "r1", "input": ["a"]}],
}


def _check(file: Path, capfd: pytest.CaptureFixture[str], command: str = "check") -> tuple[int, str]:
    code = main(["scenario", command, str(file)])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.err


@pytest.mark.parametrize(
    "change",
    [
        {"passes": 0},
        {"passes": -1},
        {"passes": [{"ranks": [{"prefillable": True}]}]},
        {"config": {"page_size": 1.5}},
        {"config": {"page_size": 0}},
        {"config": {"chunked_prefill_size": "abc"}},
        {"config": {"max_running_requests": True}},
        {"config": {"speed": 9}},
        {"config": {"max_total_tokens": 10}, "running": [{"rid": "r", "input": ["a"]}]},
        {"config": {"max_total_tokens": 10}, "cache": [{"seq": ["a"]}]},
        {"chunked_req": {"rid": "c", "input": ["a"], "done": 5}},
        {"config": {"chunked_prefill_size": 8}, "chunked_req": {"rid": "c", "input": ["a"], "done": 20}},
        {"segments": {"a": -3}},
        {"segments": {"a": 10**10}},
        {"waiting_queue": [{"rid": "r", "input": ["b:²"]}]},
        {"waiting_queue": [{"rid": "r", "input": ["b:" + "9" * 5000]}]},
        {"waiting_queue": [{"rid": "r", "input": ["nowhere"]}]},
        {"waiting_queue": [{"rid": "r", "input": ["a:21"]}]},
        {"waiting_queue": [{"rid": "r", "input": [{"tokens": [-1]}]}]},
        {"waiting_queue": [{"rid": "r", "input": ["a"]}, {"rid": "r", "input": ["a"]}]},
        {"waiting_queue": [{"rid": "r", "input": ["a"], "max_new_tokens": -1}]},
        {"waiting_queue_generate": [{"count": 10**7, "template": {"rid": "{i}", "input": ["a"]}}]},
        {"waiting_queue_generate": [{"count": 1, "template": {"rid": 5, "input": ["a"]}}]},
        {"kind": "evict", "ops": [{"insert": ["a"], "evict": 3}]},
        {"kind": "evict", "ops": [{}]},
        {"kind": "evict", "ops": [{"evict": -5}]},
        {"kind": "delayer", "passes": 3},
        {"kind": "delayer", "config": {"dp_size": 2, "enable_dp_attention": True}, "passes": [{"ranks": []}]},
        {"kind": "dance"},
        {"version": 2},
        {"banana": 1},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({**GOOD, **change}))
    for command in ("check", "run"):
        code, says = _check(file, capfd, command)
        assert code == 7
        assert "bad.jsonl" in says


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.jsonl", b"[" * 100_000),
        ("text.jsonl", b"no json"),
        ("latin.yaml", b"id: \xff\xfe"),
        ("date.yaml", b"id: 2001-13-45"),
        ("hex.yaml", b"id: 0x_"),
        ("tab.yaml", b"a:\n\t- b"),
        ("cycle.yaml", b"version: 1\nid: x\nkind: pass\nwaiting_queue_generate:\n"
         b"  - {count: 1, template: &t {rid: '{i}', input: [a], routing_key: *t}}"),
        ("cut.jsonl.gz", gzip.compress(json.dumps(GOOD).encode())[:-9]),
        ("corrupt.yaml.gz", gzip.compress(b"version: 1" * 50)[:12] + b"\xff" * 40),
        ("empty.yaml", b""),
    ],
)  # fmt: skip
def test_files_that_are_no_scenarios(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    code, says = _check(file, capfd, "run")
    assert code == 7
    assert name in says


@pytest.mark.parametrize(
    "expect",
    [
        {"order_head": 5},
        {"deprioritized": None},
        {"deprioritized": [1, "a"]},
        {"waiting_after": None},
        {"admitted": "r1"},
        {"matched": [1]},
        {"evicted": "none"},
        {"bananas": 1},
        {"error": "x"},
    ],
    ids=json.dumps,
)
def test_an_expectation_of_the_wrong_form_is_a_difference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], expect: dict[str, object]
) -> None:
    file = tmp_path / "scenario.jsonl"
    file.write_text(json.dumps({**GOOD, "expect": expect}))
    assert _check(file, capfd)[0] == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*GOOD, "config", "cache", "running", "pool", "probe", "delayer", "expect"]), value=_JSON)
def test_any_value_under_any_key_is_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    file = tmp_path / "scenario.jsonl"
    file.write_text(json.dumps({**GOOD, key: value}))
    assert _check(file, capfd)[0] in {0, 1, 7}
