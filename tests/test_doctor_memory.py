"""Detectors of requests that lose their memory, of ranks, and of the log: one run each that must trigger, one not."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from crafted import Arrival, Clock, ask, play, prompt
from diagnosis import found, the
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.manifest import update_manifest
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from simulation import record

OPTIMIST = SchedulerConfig(max_total_tokens=600, schedule_conservativeness=0.02, new_token_ratio_decay_steps=10)
"""Reserves hardly anything for outputs, and soon forgets that it was too little."""


def talkers(count: int, new: int = 150) -> list[Arrival]:
    """Short questions with long answers."""
    return [Arrival(0.05 * n, ask(f"r{n}", prompt(20, n + 1), new=new)) for n in range(count)]


def test_a_retraction_storm(tmp_path: Path) -> None:
    run = play(tmp_path, OPTIMIST, talkers(60))
    storm = the(run, "retraction_storm")
    assert "retractions for 60 admitted requests" in storm.title
    assert storm.cost_s > 0
    assert storm.unchecked is not None
    careful = play(tmp_path, OPTIMIST.replace(schedule_conservativeness=1.4), talkers(60))
    assert not found(careful, "retraction_storm")


def test_one_request_is_retracted_by_every_wave(tmp_path: Path) -> None:
    config = OPTIMIST.replace(max_total_tokens=1000, retraction_policy="priority")
    victim = Arrival(0.0, ask("victim", prompt(20, 500), new=900, priority=-5))
    waves = [
        Arrival(1.0 + 3.0 * wave, ask(f"w{wave}r{n}", prompt(20, 20 * wave + n + 1), new=100, priority=0))
        for wave in range(6)
        for n in range(9)
    ]
    run = play(tmp_path, config, [victim, *waves])
    (finding,) = found(run, "repeated_victims", times=2)
    assert finding.evidence[0].rid == "victim"
    assert "to decoding" in finding.title
    assert not found(run, "repeated_victims"), "twice is not often"
    roomy = play(tmp_path, config.replace(max_total_tokens=4000), [victim, *waves])
    assert not found(roomy, "repeated_victims", times=2)


URGENT = SchedulerConfig(
    schedule_policy="fcfs",
    enable_priority_scheduling=True,
    priority_scheduling_preemption_threshold=5,
    max_total_tokens=600,
    max_running_requests=4,
)


def test_preempting_for_one_that_does_not_fit_anyway(tmp_path: Path) -> None:
    """A request that was never looked at counts as having no prompt; its prompt then doesn't fit."""
    low = [Arrival(0.0, ask(f"low{n}", prompt(100, n + 1), new=100, priority=0)) for n in range(4)]
    config = URGENT.replace(schedule_conservativeness=0.3)
    run = play(tmp_path, config, [*low, Arrival(0.1, ask("urgent", prompt(450, 9), new=10, priority=9))])
    finding = the(run, "pointless_preemption")
    assert finding.evidence[0].rid == "urgent"
    assert finding.checked[-1].helps
    small = play(tmp_path, config, [*low, Arrival(0.1, ask("urgent", prompt(50, 9), new=10, priority=9))])
    assert not found(small, "pointless_preemption")


def test_much_is_pushed_out_for_more_urgent_requests(tmp_path: Path) -> None:
    low = [Arrival(0.05 * n, ask(f"low{n}", prompt(40, n + 1), new=60, priority=0)) for n in range(30)]
    high = [Arrival(0.1 + 0.1 * n, ask(f"high{n}", prompt(40, 50 + n), new=20, priority=10)) for n in range(30)]
    finding = the(play(tmp_path, URGENT, [*low, *high]), "excessive_preemption")
    assert finding.cost_s > 0
    assert finding.checked[-1].helps
    long = Arrival(0.0, ask("low0", prompt(40), new=400, priority=0))
    now_and_then = [each._replace(at=0.5 + 10 * each.at) for each in high[:4]]
    victims = the(play(tmp_path, URGENT.replace(max_running_requests=1), [long, *now_and_then]), "repeated_victims")
    assert victims.evidence[0].rid == "low0"
    assert "to more urgent requests" in victims.title
    tolerant = URGENT.replace(priority_scheduling_preemption_threshold=20)
    assert not found(play(tmp_path, tolerant, [*low, *high]), "excessive_preemption")


DELAYER = SchedulerConfig(
    enable_prefill_delayer=True,
    prefill_delayer_max_delay_passes=20,
    prefill_delayer_max_prefill_bs_window_size=1000,
    dp_size=2,
    max_running_requests=8,
)


def test_the_delayer_loops_until_its_waits_time_out(tmp_path: Path) -> None:
    """Slots are always fewer than the largest batch it has seen, so every prefill waits for all the passes it may."""
    ranks = (0, 1)
    burst = [
        Arrival(0.0, ask(f"b{rank}{n}", prompt(20, 10 * rank + n + 1), new=5), rank) for rank in ranks for n in range(4)
    ]
    later = [
        Arrival(0.5 + 0.5 * n, ask(f"l{rank}{n}", prompt(20, 100 + 50 * rank + n), new=100), rank)
        for n in range(20)
        for rank in ranks
    ]
    run = play(tmp_path, DELAYER, [*burst, *later], ranks=2)
    finding = found(run, "delayer_veto")[0]
    assert "brought no fuller batch but ended after 20 passes" in finding.title
    assert finding.checked[-1].helps
    off = play(tmp_path, DELAYER.replace(enable_prefill_delayer=False), [*burst, *later], ranks=2)
    assert not found(off, "delayer_veto")


def test_ranks_wait_for_one_that_has_nothing(tmp_path: Path) -> None:
    lonely = [Arrival(0.1 * n, ask(f"r{n}", prompt(20, n + 1), new=30)) for n in range(30)]
    finding = the(play(tmp_path, DELAYER, lonely, ranks=2), "delayer_mixed")
    assert "ranks 0 were held back" in finding.title
    assert finding.checked[-1].helps
    both = [
        Arrival(each.at, ask(f"{rank}-{each.request.rid}", prompt(20, 7), new=4), rank)
        for each in lonely
        for rank in (0, 1)
    ]
    assert not found(play(tmp_path, DELAYER, both, ranks=2), "delayer_mixed")


def test_one_rank_is_behind_the_others(tmp_path: Path) -> None:
    config = SchedulerConfig(max_running_requests=2, dp_size=3)

    def load(counts: list[int]) -> list[Arrival]:
        return [
            Arrival(0.05 * n, ask(f"{rank}-{n}", prompt(20, 100 * rank + n + 1), new=20), rank)
            for rank, count in enumerate(counts)
            for n in range(count)
        ]

    finding = the(play(tmp_path, config, load([10, 80, 12]), ranks=3), "rank_behind")
    assert finding.rank == 1
    assert finding.evidence[0].words.startswith("80 requests")
    assert not found(play(tmp_path, config, load([50, 55, 50]), ranks=3), "rank_behind")


def test_numbers_that_can_not_be_right(tmp_path: Path) -> None:
    still = play(tmp_path, SchedulerConfig(), talkers(10), clock=lambda: 5)
    finding = the(still, "dead_metrics")
    assert "its clock stands still" in finding.title
    ticking = Clock()

    def back() -> int:
        return 10**9 - ticking()

    assert "goes backwards" in the(play(tmp_path, SchedulerConfig(), talkers(10), clock=back), "dead_metrics").title
    for config in (SchedulerConfig(), OPTIMIST, URGENT, SchedulerConfig(chunked_prefill_size=16, page_size=4)):
        assert not found(play(tmp_path, config, talkers(30)), "dead_metrics")


def test_lost_records_are_said(tmp_path: Path) -> None:
    path = record(tmp_path, SchedulerConfig(), seed=1, requests=40, limits=Limits(passes=5))
    assert not found(Run.open(path), "lost_records")
    shutil.rmtree(sorted((path / "rank=0").glob("*.p*"))[1])
    update_manifest(path, lambda manifest: msgspec.structs.replace(manifest, status="recording"))
    finding = the(Run.open(path), "lost_records")
    assert finding.title.startswith("records are missing in 1 place")
