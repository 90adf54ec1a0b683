"""Detectors of prefixes that are computed again: for each a run that must trigger it, and one that must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from crafted import Arrival, ask, play, prompt
from diagnosis import found, the
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.hello import Detail
from schedscope.replay.doctor import examine
from schedscope.replay.finding import Severity
from schedscope.replay.series import Timeline


def tenants(count: int, every: float, tenants: int = 8, shared: int = 200, **options: object) -> list[Arrival]:
    """Requests of tenants in turn, each with a prefix of its own."""
    return [
        Arrival(every * n, ask(f"r{n}", [*prompt(shared, 1 + n % tenants), *prompt(5, 100 + n)], **options))  # type: ignore[arg-type]
        for n in range(count)
    ]


def test_a_queue_that_is_too_long_to_sort_makes_the_hit_rate_saw(tmp_path: Path) -> None:
    """Bursts push the queue over the limit, again and again; then nobody sorts by what is cached."""
    config = SchedulerConfig(
        schedule_policy="lpm", max_running_requests=2, max_total_tokens=700, waiting_queue_prefix_match_max=16
    )
    bursts = [
        Arrival(2.0 * burst, ask(f"b{burst}r{n}", [*prompt(200, 1 + n % 6), *prompt(5, 100 + n)]))
        for burst in range(6)
        for n in range(30)
    ]
    run = play(tmp_path, config, bursts)
    finding = the(run, "queue_too_long")
    assert finding.severity is not Severity.NOTE
    assert "6 times" in finding.title
    assert finding.cost_s > 0
    assert finding.checked[-1].helps
    roomy = play(tmp_path, config.replace(waiting_queue_prefix_match_max=128), bursts)
    assert not found(roomy, "queue_too_long")


def test_a_policy_that_can_not_run_is_replaced_unsaid(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", disable_radix_cache=True)
    finding = the(play(tmp_path, config, tenants(10, 0.1)), "silent_fallback")
    assert finding.title.startswith("lpm was asked for and fcfs ran, in 10 passes")
    assert not found(play(tmp_path, config.replace(schedule_policy="fcfs"), tenants(10, 0.1)), "silent_fallback")
    assert not found(play(tmp_path, config.replace(disable_radix_cache=False), tenants(10, 0.1)), "silent_fallback")


def test_holding_back_a_short_prefix_costs_more_than_it_saves(tmp_path: Path) -> None:
    """Small requests are held back for forty tokens of a huge one, whose turn never comes."""
    config = SchedulerConfig(schedule_policy="shortest-prefill-first", max_running_requests=1)
    arrivals = [Arrival(0.0, ask("busy", prompt(50, 9), new=10)), Arrival(0.01, ask("huge", prompt(2000)))]
    arrivals += [Arrival(0.02, ask(f"held{n}", [*prompt(40), *prompt(20, 300 + n)])) for n in range(6)]
    arrivals += [Arrival(0.03 + 0.04 * max(n - 3, 0), ask(f"later{n}", prompt(100, 400 + n))) for n in range(80)]
    run = play(tmp_path, config, arrivals)
    finding = the(run, "held_back")
    assert finding.evidence[0].rid is not None
    assert finding.evidence[0].rid.startswith("held")
    assert any(checked.helps for checked in finding.checked)
    assert 6 * 2.0 < finding.cost_s < 6 * 6.0
    off = config.replace(in_batch_prefix_caching_check_threshold=-1)
    assert not found(play(tmp_path, off, arrivals), "held_back")
    hot = [Arrival(0.0, ask("hot", prompt(300, 7)))]
    hot += [
        Arrival(0.02 + 0.04 * max(n - 3, 0), ask(f"h{n}", [*prompt(300, 7), *prompt(5, 200 + n)])) for n in range(80)
    ]
    behind_anyway = play(tmp_path, config.replace(schedule_policy="lpm"), [*hot, *arrivals[2:8]])
    assert not found(behind_anyway, "held_back")


def storm(count: int, shared: int = 600) -> list[Arrival]:
    """Requests over one cold prefix, all at once."""
    return [Arrival(0.0, ask(f"r{n}", [*prompt(shared), *prompt(5, 100 + n)])) for n in range(count)]


def test_many_requests_over_a_cold_prefix(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", max_running_requests=64, chunked_prefill_size=512)
    finding = the(play(tmp_path, config, storm(30)), "cold_prefix_storm")
    assert finding.evidence[0].pass_number == 0
    assert finding.title.startswith("29 requests over a cold prefix of 600 tokens were held back for r0")
    warm = [Arrival(-1.0, ask("warm", prompt(600))), *storm(30)]
    late = [each._replace(at=each.at + 2.0) if each.request.rid != "warm" else each._replace(at=0.0) for each in warm]
    assert not found(play(tmp_path, config, late), "cold_prefix_storm")
    assert not found(play(tmp_path, config, storm(4)), "cold_prefix_storm")


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_batch_that_computes_one_prefix_twice(tmp_path: Path, policy: str) -> None:
    """Whether duplicates are held back (lpm), or nobody looks (fcfs), what fits is admitted."""
    config = SchedulerConfig(schedule_policy=policy, max_running_requests=8)
    finding = the(play(tmp_path, config, storm(6)), "duplicate_prefill")
    assert finding.evidence[0].pass_number == 0
    assert "3,000 tokens" in finding.title
    different = [Arrival(0.0, ask(f"r{n}", prompt(600, n + 1))) for n in range(6)]
    assert not found(play(tmp_path, config, different), "duplicate_prefill")
    salted = [Arrival(0.0, ask(f"r{n}", prompt(600), cache_salt=f"s{n}")) for n in range(6)]
    assert not found(play(tmp_path, config, salted), "duplicate_prefill")


def test_hashed_tokens_tell_duplicates_too(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="fcfs", page_size=16, max_running_requests=8)
    run = play(tmp_path, config, storm(6), detail=Detail(level="full", tokens="hashed"))
    assert "tokens more than once" in the(run, "duplicate_prefill").title
    blind = play(tmp_path, config, storm(6), detail=Detail(level="full", tokens="none"))
    assert not found(blind, "duplicate_prefill")
    assert "low_hit_rate" in examine(blind).not_judged


def test_a_waiting_prefix_is_evicted(tmp_path: Path) -> None:
    """Its prefix is in the cache when it joins the queue; strangers run first and push it out."""
    config = SchedulerConfig(
        schedule_policy="shortest-prefill-first",
        max_total_tokens=1000,
        max_running_requests=1,
        radix_eviction_policy="fifo",
    )
    arrivals = [Arrival(0.0, ask("first", prompt(400)))]
    arrivals += [Arrival(0.2, ask(f"stranger{n}", prompt(150, 10 + n), new=200)) for n in range(5)]
    arrivals += [Arrival(0.2, ask("waits", [*prompt(400), *prompt(200, 50)]))]
    run = play(tmp_path, config, arrivals)
    finding = the(run, "evicted_before_use")
    assert finding.evidence[0].rid == "waits"
    assert "had 400, and 0 when it was admitted" in finding.title
    timeline = Timeline.open(run)
    window = timeline.window(buckets=50)
    load = timeline.load(window)
    assert (sum(load["needed"].to_pylist()), sum(load["needed_tokens"].to_pylist())) == (1, 400)
    (lost,) = timeline.forgone(window)
    assert (lost.rid, lost.best, lost.cached, lost.lost) == ("waits", 400, 0, 400)
    admitted = timeline.request("waits")
    assert admitted is not None
    assert load["needed"][window.bucket_of(admitted["admit_ns"])].as_py() == 1
    touched = play(tmp_path, config.replace(radix_eviction_policy="lru"), arrivals)
    assert not found(touched, "evicted_before_use"), "each look at it makes it recent"


def test_an_id_that_comes_again_lost_nothing_of_the_other_request(tmp_path: Path) -> None:
    arrivals = [Arrival(0.0, ask("first", prompt(400)))]
    arrivals += [Arrival(1.0, ask("again", [*prompt(400), *prompt(100, 50)]))]
    arrivals += [Arrival(3.0, ask("again", prompt(500, 90)))]
    run = play(tmp_path, SchedulerConfig(schedule_policy="lpm"), arrivals)
    timeline = Timeline.open(run)
    assert [row["cached_tokens"] for row in run.rows("requests") if row["rid"] == "again"] == [400, 0]
    assert not timeline.forgone(timeline.window(buckets=1))


def test_prefixes_repeat_and_the_pool_is_too_small(tmp_path: Path) -> None:
    config = SchedulerConfig(max_total_tokens=900, max_running_requests=2)
    finding = the(play(tmp_path, config, tenants(100, 0.03)), "thrashing_pool")
    assert "the pool was evicted" in finding.title
    assert not found(play(tmp_path, config.replace(max_total_tokens=5000), tenants(100, 0.03)), "thrashing_pool")


def test_prefixes_repeat_and_nobody_shares(tmp_path: Path) -> None:
    config = SchedulerConfig(disable_radix_cache=True)
    finding = the(play(tmp_path, config, tenants(60, 0.1)), "low_hit_rate")
    assert "the prefix cache is off" in finding.title
    on = play(tmp_path, SchedulerConfig(), tenants(60, 0.1))
    assert not found(on, "low_hit_rate")
    salted = play(
        tmp_path,
        SchedulerConfig(),
        [Arrival(0.1 * n, ask(f"r{n}", prompt(200), cache_salt=f"user{n}")) for n in range(60)],
    )
    assert not found(salted, "low_hit_rate")
    assert the(salted, "apart_by_namespace").title.startswith("94% of prompt tokens repeat, but only 0%")
    assert not found(on, "apart_by_namespace")
    strangers = [Arrival(0.1 * n, ask(f"r{n}", prompt(200, n + 1))) for n in range(60)]
    assert not found(play(tmp_path, config, strangers), "low_hit_rate")
