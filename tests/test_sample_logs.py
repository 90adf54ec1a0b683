"""The recordings of real SGLang servers that come with the repository: still read, and still the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.recorder.run import Run
from schedscope.replay.doctor import examine
from schedscope.replay.explain_pass import explain_pass
from schedscope.replay.explain_request import explain_request
from schedscope.replay.explain_words import ledger_rows
from schedscope.replay.ledger import request_ledger, run_ledger
from schedscope.replay.verify import verify
from schedscope.replay.verify_view import verify_views

SAMPLES = Path(__file__).parent.parent / "sample_logs"


@pytest.mark.parametrize("name", ["sglang-cold-burst", "sglang-hot-tenant"])
def test_a_sample_replays_from_what_was_seen_and_from_its_start(name: str) -> None:
    run = Run.open(SAMPLES / name)
    seen, rebuilt = verify_views(run, 0), verify(run, 0)
    assert (seen.divergence, rebuilt.divergence, run.gaps) == (None, None, [])
    assert seen.passes == rebuilt.passes == run.passes(0).count


def test_in_a_cold_burst_all_but_one_are_held_back_for_it() -> None:
    run = Run.open(SAMPLES / "sglang-cold-burst")
    rows = run.table("decisions", 0, ("rid", "partner", "deprioritized", "shared_len")).to_pylist()
    held = [row for row in rows if row["deprioritized"] and row["rid"].startswith("burst")]
    assert len({row["rid"] for row in held}) > 10
    assert all(row["partner"].startswith("burst") and row["shared_len"] >= 900 for row in held)


def test_a_hot_tenant_starves_cold_requests() -> None:
    ledger = request_ledger(Run.open(SAMPLES / "sglang-hot-tenant"), "cold-1")
    overtaken = [part for part in ledger.parts if part.cause == "longer_match"]
    assert len({part.rid for part in overtaken}) > 100
    assert sum(part.ns for part in overtaken) > 0.8 * ledger.queued_ns
    assert sum(part.ns for part in ledger.parts) == ledger.queued_ns


def test_the_pass_that_cost_most_is_the_one_in_which_most_went_first() -> None:
    found = explain_request(Run.open(SAMPLES / "sglang-hot-tenant"), "cold-1")
    worst = next(look for look in found.looks if look.why == "worst")
    assert found.ledger.worst_pass == worst.number == 72, "two requests of 76 ms each; no other pass cost 80 ms in all"


@pytest.mark.parametrize("name", ["sglang-cold-burst", "sglang-hot-tenant"])
def test_the_doctor_and_the_ledger_tell_the_same(name: str) -> None:
    run = Run.open(SAMPLES / name)
    found = examine(run)
    assert found.waiting_s == run_ledger(run).queued_ns / 1e9
    (limit,) = [each for each in found.findings if each.detector == "budget_limit"]
    (evidence,) = limit.evidence
    assert evidence.pass_number is not None
    places = explain_pass(run, 0, evidence.pass_number).places
    stayed = [place for place in places if place.verdict is None or not place.verdict.admitted]
    assert evidence.words == f"{len(stayed)} requests were left waiting"


def test_all_who_waited_under_a_mark_are_told_what_set_it() -> None:
    run = Run.open(SAMPLES / "sglang-cold-burst")
    ledger = request_ledger(run, "burst-07")
    marked = {(part.reason, part.first_step, part.first_pass) for part in ledger.parts if part.cause == "batch_full"}
    assert marked == {(None, 24992, None), ("no_slot", None, 6)}
    words = "the batch was marked full earlier: no running slot, 8 of 8 running"
    assert (words, "", "set at step 24992") in [row[2:] for row in ledger_rows(ledger)]
    totals = [each.mark for each in run_ledger(run).causes if each.cause == "batch_full"]
    assert {(mark.reason, mark.running, mark.slots) for mark in totals if mark is not None} == {
        (None, 8, 8),
        ("no_slot", None, None),
    }
    assert None not in totals
