"""Detectors of requests that wait: for each a run that must trigger it, and one that must not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from crafted import Arrival, ask, play, prompt
from diagnosis import found, the
from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.hello import Detail
from schedscope.replay.finding import Severity


def hot_and_cold(count: int) -> Iterable[Arrival]:
    """A stranger among followers of one hot prompt, who keep coming faster than they are served."""
    hot = prompt(200)
    yield Arrival(0.0, ask("first", hot))
    for number in range(count):
        yield Arrival(0.04 * max(number - 3, 1), ask(f"hot{number}", [*hot, *prompt(10, 100 + number)]))
    yield Arrival(0.2, ask("stranger", prompt(100, 50)))


def test_a_stranger_starves_under_lpm_and_not_under_fcfs(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", max_running_requests=1)
    run = play(tmp_path, config, hot_and_cold(150))
    finding = the(run, "starvation")
    assert finding.severity is not Severity.NOTE
    assert finding.evidence[0].rid == "stranger"
    assert "stranger was overtaken" in finding.title
    assert finding.cost_s > 4
    (checked,) = finding.checked
    assert checked.helps
    assert checked.trial.settings == {"schedule_policy": "hrrn"}
    fair = play(tmp_path, config.replace(schedule_policy="fcfs"), hot_and_cold(150))
    assert not found(fair, "starvation")


def test_a_starving_request_is_seen_while_it_waits_and_without_decisions(tmp_path: Path) -> None:
    config = SchedulerConfig(schedule_policy="lpm", max_running_requests=1)
    run = play(tmp_path, config, hot_and_cold(150), until=5.0)
    assert the(run, "starvation").evidence[0].rid == "stranger"
    short = play(tmp_path, config, hot_and_cold(150), detail=Detail(level="steps"))
    finding = the(short, "starvation")
    assert finding.evidence[0].rid == "stranger"
    assert finding.unchecked is not None
    assert "level steps" in finding.unchecked


def test_a_head_that_can_never_fit_with_pages_of_two(tmp_path: Path) -> None:
    """Its prompt and output fill the pool to the token; the page that admission wants on top is not there."""
    config = SchedulerConfig(page_size=2, max_total_tokens=200)
    arrivals = [Arrival(0.0, ask("giant", prompt(100), new=100)), Arrival(0.1, ask("small", prompt(10, 2)))]
    run = play(tmp_path, config, arrivals, until=5.0)
    finding = the(run, "never_fits")
    assert finding.severity is Severity.CRITICAL
    assert finding.evidence[0].rid == "giant"
    assert "needs 202 tokens, and with nothing running there are 200" in finding.title
    assert finding.checked[-1].helps
    assert finding.checked[-1].trial.settings == {"clip_max_new_tokens": "97"}
    assert finding.cost_s > 2
    fits = play(tmp_path, config.replace(page_size=1), [Arrival(0.0, ask("giant", prompt(100), new=98)), *arrivals[1:]])
    assert not found(fits, "never_fits")


def test_a_big_head_blocks_small_ones(tmp_path: Path) -> None:
    config = SchedulerConfig(max_total_tokens=1000)
    running = [Arrival(0.0, ask(f"run{n}", prompt(100, n + 1), new=60 + 40 * n)) for n in range(4)]
    small = [Arrival(0.3 + 0.01 * n, ask(f"small{n}", prompt(20, 20 + n))) for n in range(6)]
    run = play(tmp_path, config, [*running, Arrival(0.2, ask("big", prompt(700, 9))), *small])
    finding = the(run, "blocked_head")
    assert finding.evidence[0].rid == "big"
    assert finding.checked[-1].helps
    alike = [Arrival(0.3 + 0.01 * n, ask(f"small{n}", prompt(700, 20 + n))) for n in range(6)]
    run = play(tmp_path, config, [*running, Arrival(0.2, ask("big", prompt(700, 9))), *alike])
    assert not found(run, "blocked_head")


def test_a_mark_that_outlives_its_cause(tmp_path: Path) -> None:
    """The request that didn't fit is taken back by its client; small ones behind it still aren't looked at."""
    config = SchedulerConfig(max_total_tokens=1000)
    long = Arrival(0.0, ask("long", prompt(100), new=500))
    big = Arrival(0.1, ask("big", prompt(850, 2)))
    small = [Arrival(0.2 + 0.01 * n, ask(f"small{n}", prompt(20, 20 + n))) for n in range(6)]
    run = play(tmp_path, config, [long, big, *small], aborts={"big": 0.5})
    finding = the(run, "latched_full")
    assert finding.severity is Severity.CRITICAL
    assert "big was refused" in finding.title
    assert finding.evidence[0].rid == "small0"
    assert finding.cost_s > 5
    waits = play(tmp_path, config, [long, big, *small])
    assert not found(waits, "latched_full")
    told = play(tmp_path, config, [long, big, *small], aborts={"big": 0.5}, detail=Detail(tokens="none"))
    assert the(told, "latched_full").cost_s > 5


def test_a_long_prompt_takes_every_chunk(tmp_path: Path) -> None:
    config = SchedulerConfig(chunked_prefill_size=64)
    arrivals = [Arrival(0.0, ask("long", prompt(2000)))]
    arrivals += [Arrival(0.02 + 0.01 * n, ask(f"short{n}", prompt(20, 20 + n))) for n in range(6)]
    finding = the(play(tmp_path, config, arrivals), "chunk_monopoly")
    assert finding.evidence[0].rid == "long"
    assert finding.checked[-1].helps
    assert finding.checked[-1].trial.settings == {"schedule_policy": "shortest-prefill-first"}
    shared = play(tmp_path, config.replace(schedule_policy="shortest-prefill-first"), arrivals)
    assert not found(shared, "chunk_monopoly")


def test_running_requests_starve_behind_prefills(tmp_path: Path) -> None:
    config = SchedulerConfig(chunked_prefill_size=1000)
    arrivals = [Arrival(0.0, ask("talks", prompt(20), new=100))]
    arrivals += [Arrival(0.1 + 0.05 * n, ask(f"comes{n}", prompt(1000, 20 + n), new=2)) for n in range(40)]
    finding = the(play(tmp_path, config, arrivals), "decode_starvation")
    assert finding.severity is not Severity.NOTE
    mixed = play(tmp_path, config.replace(enable_mixed_chunk=True), arrivals)
    assert not found(mixed, "decode_starvation")


def test_a_limit_ends_passes_although_memory_is_free(tmp_path: Path) -> None:
    arrivals = [Arrival(0.01 * n, ask(f"r{n}", prompt(50, n + 1), new=50)) for n in range(60)]
    config = SchedulerConfig(max_total_tokens=20_000, max_running_requests=2)
    finding = the(play(tmp_path, config, arrivals), "budget_limit")
    assert "--max-running-requests 2" in finding.title
    assert finding.severity is Severity.CRITICAL
    assert finding.checked[-1].helps
    short_of_memory = config.replace(max_total_tokens=250, max_running_requests=256)
    # In the step in which a mark goes that memory had set, neither.
    assert not found(play(tmp_path, short_of_memory, arrivals), "budget_limit", share=0.0, free=0.0, seconds=0.0)
    chunked = SchedulerConfig(max_total_tokens=20_000, chunked_prefill_size=16)
    finding = the(play(tmp_path, chunked, arrivals), "budget_limit")
    assert "--chunked-prefill-size 16" in finding.title


def test_urgent_requests_behind_others(tmp_path: Path) -> None:
    arrivals = [Arrival(0.01 * n, ask(f"r{n}", prompt(50, n + 1), new=20, priority=0)) for n in range(60)]
    hot = [Arrival(0.01 * n, ask(f"r{n}", [*prompt(50), *prompt(5, n + 2)], new=20, priority=0)) for n in range(60)]
    urgent = Arrival(0.05, ask("urgent", prompt(60, 99), new=20, priority=9))
    config = SchedulerConfig(schedule_policy="lpm", max_running_requests=2)
    finding = the(play(tmp_path, config, [*hot, urgent]), "priority_inversion")
    assert finding.evidence[0].rid == "urgent"
    assert "priority scheduling is off" in finding.title
    assert finding.checked[-1].helps
    on = SchedulerConfig(schedule_policy="fcfs", enable_priority_scheduling=True, max_running_requests=2)
    assert not found(play(tmp_path, on, [*arrivals, urgent]), "priority_inversion")


def test_the_alphabet_decides_under_hrrn(tmp_path: Path) -> None:
    """All at the same moment: ratios are equal, and z comes last however early it came."""
    config = SchedulerConfig(schedule_policy="hrrn", max_running_requests=2, in_batch_prefix_caching_check_threshold=-1)

    def arrivals(names: list[str]) -> list[Arrival]:
        return [Arrival(0.0, ask(rid, prompt(50, n + 1), new=20)) for n, rid in enumerate(names)]

    backwards = [f"r{n:02}" for n in reversed(range(40))]
    finding = the(play(tmp_path, config, arrivals(backwards)), "rid_ties")
    assert finding.evidence[0].rid in {"r38", "r39"}
    assert not found(play(tmp_path, config, arrivals(backwards[::-1])), "rid_ties")
