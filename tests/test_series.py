"""The queries behind the screens, against a count by hand over the rows of simulated runs."""

from __future__ import annotations

import shutil
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crafted import Arrival, ask, play, prompt
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunNotFoundError, UsageError
from schedscope.engine.ordering import POLICIES
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tokens import encode
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail, Level
from schedscope.recorder.manifest import create_run, update_manifest
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.series import Timeline
from schedscope.replay.summary import summarize
from schedscope.replay.window import Window
from simulation import EVERYTHING, Workload, drive, record

TIGHT = SchedulerConfig(
    schedule_policy="lpm",
    chunked_prefill_size=48,
    max_total_tokens=600,
    max_running_requests=60,
    schedule_conservativeness=0.02,
    waiting_queue_prefix_match_max=20,
)


def _timeline(folder: Path, config: SchedulerConfig = TIGHT, **options: Any) -> tuple[Run, Timeline]:
    path = record(folder, config, seed=26, requests=70, outputs=(40, 160), **options)
    run = Run.open(path)
    return run, Timeline.open(run)


def _steps(run: Run) -> list[dict[str, Any]]:
    return list(run.rows("steps"))


def test_buckets_add_up_to_the_rows_of_the_log(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window(buckets=7)
    load = timeline.load(window).to_pydict()
    assert load["bucket"] == list(range(7))
    assert load["begin_ns"][0] == timeline.extent.first_ns
    steps, requests = _steps(run), list(run.rows("requests"))
    assert sum(load["steps"]) == sum(step["count"] for step in steps)
    assert sum(load["passes"]) == run.passes(0).count == timeline.extent.passes
    assert sum(load["computed_tokens"]) == sum(step["batch_tokens"] for step in steps)
    assert sum(load["retractions"]) == sum(len(step["retracted"]) for step in steps) > 0
    evicted = [row["tokens"] for row in run.rows("events") if row["kind"] == "evict"]
    assert sum(load["evicted_tokens"]) == sum(evicted) > 0
    admitted = [row for row in requests if row["admit_ns"] is not None]
    assert sum(load["admitted"]) == len(admitted)
    assert sum(load["prompt_tokens"]) == sum(row["prompt_tokens"] for row in admitted)
    queues = defaultdict(list)
    lengths = {row["pass"]: row["queue_len"] for row in run.rows("passes")}
    for step in steps:
        queues[window.bucket_of(step["start_ns"])].append(lengths.get(step["pass"], step["queue_len"]))
    assert load["queue_max"] == [max(queues[bucket]) for bucket in range(7)]


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_bucket_in_the_midst_of_a_step_has_what_the_step_has(tmp_path: Path, by_rank: bool) -> None:
    run, timeline = _timeline(tmp_path)
    steps = _steps(run)
    lengths = {row["pass"]: row["queue_len"] for row in run.rows("passes")}
    begin, end = steps[40]["start_ns"] + 1, steps[44]["end_ns"]
    window = timeline.window(begin, end, buckets=60)
    expected = []
    for at in range(begin, begin + 60 * window.width_ns, window.width_ns):
        begun = [step for step in steps if at <= step["start_ns"] < min(at + window.width_ns, end)]
        before = [step["queue_len"] for step in steps if step["start_ns"] < at]
        expected.append(max((lengths.get(step["pass"], step["queue_len"]) for step in begun), default=before[-1]))
    load = timeline.load(window, by_rank=by_rank).to_pydict()
    assert load["steps"].count(0) > 50, "most buckets lie in the midst of a step"
    assert load["queue_max"] == expected
    assert None not in load["used_max"]


def test_of_several_ranks_it_is_the_largest(tmp_path: Path) -> None:
    arrivals = [Arrival(0.03 * n, ask(f"r{n}", prompt(50, n + 1), new=40), int(n % 3 == 0)) for n in range(150)]
    run = play(tmp_path, SchedulerConfig(max_running_requests=3), arrivals, ranks=2)
    timeline = Timeline.open(run)
    middle = (timeline.extent.first_ns + timeline.extent.last_ns) // 2
    window = timeline.window(middle, middle + 10**8, buckets=150)
    each = timeline.load(window, by_rank=True).to_pylist()
    together = timeline.load(window).to_pydict()
    assert together["steps"].count(0) > 50
    for column in ("queue_max", "running_max", "used_max", "cached_max"):
        largest = [max(row[column] for row in each if row["bucket"] == bucket) for bucket in range(150)]
        assert together[column] == largest


def test_quantiles_are_those_of_the_requests(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window(buckets=3)
    latency = timeline.latency(window).to_pydict()
    times = defaultdict(list)
    for row in run.rows("requests"):
        if row["first_token_ns"] is not None:
            times[window.bucket_of(row["first_token_ns"])].append((row["first_token_ns"] - row["arrive_ns"]) / 1e9)
    assert latency["first_tokens"] == [len(times[bucket]) for bucket in range(3)]
    for bucket, p50 in enumerate(latency["ttft_p50"]):
        assert p50 == (pytest.approx(statistics.median(times[bucket])) if times[bucket] else None)
    cells = timeline.heat_map(window, rows=5)
    assert len(cells.edges_s) == 6
    counted: Counter[int] = Counter()
    for bucket, row, requests in zip(*cells.cells.to_pydict().values(), strict=True):
        low, high = cells.edges_s[row] * (1 - 1e-9), cells.edges_s[row + 1] * (1 + 1e-9)
        assert sum(low <= time <= high for time in times[bucket]) >= requests > 0
        counted[bucket] += requests
    assert counted == {bucket: len(found) for bucket, found in times.items() if found}


def test_what_a_bucket_was_made_of(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window(buckets=1)
    passes = list(run.rows("passes"))

    def counts(of: Any) -> dict[str, int]:
        shares = timeline.shares(of, window)
        return dict(zip(shares["what"].to_pylist(), shares["count"].to_pylist(), strict=True))

    assert counts("stop") == Counter(row["stop"] for row in passes)
    assert counts("gate") == Counter(row["gate"] for row in _steps(run) if row["gate"])
    names = {None: "lpm", "queue_too_long": "fcfs (queue_too_long)"}
    assert counts("policy") == Counter(names[row["fallback"]] for row in passes)
    assert len(counts("policy")) == 2
    refused = [row for row in run.rows("decisions") if row["result"] is not None and not row["admitted"]]
    assert counts("refused") == Counter(row["reason"] for row in refused)
    assert counts("delayer") == {}


def test_stretches_cover_what_they_name_and_no_more(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window()
    found = timeline.stretches("policy", window)
    assert found.others == 0
    active = {row["pass"]: row["active_policy"] for row in run.rows("passes")}
    covered = [number for each in found.longest for number in range(each.first_pass or 0, (each.last_pass or 0) + 1)]
    assert covered == sorted(active)
    for stretch in found.longest:
        assert {active[n] for n in range(stretch.first_pass or 0, (stretch.last_pass or 0) + 1)} == {
            stretch.what.split(" ")[0]
        }
    two = timeline.stretches("policy", window, most=2)
    assert (len(two.longest), two.others) == (2, len(found.longest) - 2)
    gates = timeline.stretches("gate", window)
    assert sum(each.total or 0 for each in gates.longest) == sum(step["gate"] is not None for step in _steps(run))


def test_gaps_lie_between_the_passes_around_them(tmp_path: Path) -> None:
    path = record(tmp_path, TIGHT, seed=26, requests=70, limits=Limits(passes=5))
    lost = sorted((path / "rank=0").glob("*.p*"))[3]
    shutil.rmtree(lost)
    update_manifest(path, lambda manifest: msgspec.structs.replace(manifest, status="recording"))
    run = Run.open(path)
    timeline = Timeline.open(run)
    (gap,) = timeline.stretches("gap", timeline.window()).longest
    assert (gap.what, gap.first_pass, gap.last_pass) == ("lost", 14, 20)
    steps = _steps(run)
    behind = next(i for i, step in enumerate(steps) if i and step["step"] > steps[i - 1]["step"] + 1)
    assert gap.begin_ns == steps[behind - 1]["end_ns"]
    assert gap.end_ns == steps[behind]["start_ns"]
    before = timeline.window(end_ns=gap.begin_ns - 10)
    assert timeline.stretches("gap", before).longest == ()
    parts = timeline.request_parts().to_pylist()
    over = [row for row in parts if row["admit_ns"] is not None and row["admit_ns"] < gap.begin_ns]
    assert all(row["prefill_ns"] is None for row in over if (row["first_token_ns"] or 0) > gap.end_ns)


def test_what_the_delayer_said(tmp_path: Path) -> None:
    config = SchedulerConfig(enable_prefill_delayer=True, dp_size=2, max_running_requests=8)
    lonely = [Arrival(0.1 * n, ask(f"r{n}", prompt(20, n + 1), new=30)) for n in range(10)]
    run = play(tmp_path, config, lonely, ranks=2)
    timeline = Timeline.open(run)
    shares = timeline.shares("delayer", timeline.window(buckets=1, rank=0)).to_pylist()
    said = Counter(row["delayer_reason"] for row in run.rows("passes", 0) if row["delayer_reason"])
    assert {row["what"]: row["count"] for row in shares} == said
    assert said["delay"] > 0


def test_windows_by_time_and_by_pass(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window(passes=(10, 19), buckets=4)
    assert sum(timeline.load(window)["passes"].to_pylist()) == 10
    steps = {step["pass"]: step for step in _steps(run)}
    assert timeline.pass_at(steps[10]["start_ns"], 0) == 10
    assert timeline.pass_at(steps[10]["start_ns"] - 1, 0) == 9
    assert timeline.pass_at(timeline.extent.first_ns - 1, 0) is None
    with pytest.raises(UsageError, match="empty"):
        timeline.window(5, 5)
    with pytest.raises(RunNotFoundError, match="no pass from 1000"):
        timeline.window(passes=(1000, 2000))
    with pytest.raises(RunNotFoundError, match="rank 3"):
        timeline.window(rank=3)
    narrow = Window(window.begin_ns, window.begin_ns + 3, 10)
    assert timeline.load(narrow).num_rows == 10


def test_requests_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    _, timeline = _timeline(tmp_path)
    assert {each.rid for each in timeline.find("r1", most=100)} == {"r1", *(f"r{n}" for n in range(10, 20))}
    assert [each.rid for each in timeline.find("", most=2)] == ["r70", "r69"]


@pytest.mark.parametrize("level", ["steps", "passes", "decisions"])
def test_what_was_not_recorded_is_null(tmp_path: Path, level: Level) -> None:
    run, timeline = _timeline(tmp_path, detail=Detail(level=level))
    load = timeline.load(timeline.window(buckets=1)).to_pylist()[0]
    assert load["evicted_tokens"] is None
    assert (load["again"] is None) == (level != "decisions")
    assert load["retractions"] > 0
    assert load["hit_rate"] == pytest.approx(
        sum(row["cached_tokens"] for row in run.rows("requests"))
        / sum(row["prompt_tokens"] for row in run.rows("requests") if row["admit_ns"] is not None)
    )
    assert load["passes"] == timeline.extent.passes > 0


def test_a_run_under_way_shows_requests_that_have_not_ended(tmp_path: Path) -> None:
    path = create_run(tmp_path, "live")
    sink = DirectSink(path, 0, Description(config=TIGHT.to_dict()), Limits(passes=5), detail=EVERYTHING)
    tracer = RunTracer(sink)
    scheduler = Scheduler(TIGHT, tracer)
    tracer.attach(scheduler)
    workload = Workload(3)
    for count in range(6):
        scheduler.arrive(workload.request(), float(count))
    for now in range(6, 10):
        step = scheduler.step(float(now))
        assert step.batch is not None
        sampled = [None if member.unfinished else 5 for member in step.batch.members]
        scheduler.commit(step.batch, sampled, {}, now + 0.5)
    timeline = Timeline.open(Run.open(path))
    assert timeline.extent.requests == 6
    assert len(timeline.find("r")) == 6
    load = timeline.load(timeline.window(buckets=1)).to_pylist()[0]
    rows = [row for row in Run.open(path).rows("events") if row["kind"] == "admit"]
    first = {row["rid"]: row["tokens"] for row in reversed(rows)}
    assert load["admitted"] == len(first) > 0
    assert load["cached_tokens"] == sum(first.values())
    with pytest.raises(RunNotFoundError, match="no step yet"):
        Timeline.open(Run.open(create_run(tmp_path, "empty")))


def test_the_end_of_a_run_alone(tmp_path: Path) -> None:
    arrivals = [Arrival(0.1 * n, ask(f"r{n}", prompt(50, n + 1), new=10), n % 2) for n in range(200)]
    run = play(tmp_path, SchedulerConfig(), arrivals, ranks=2)
    whole, end = Timeline.open(run), Timeline.open(run, last_s=5.0)
    assert 4.9e9 < end.extent.last_ns - end.extent.first_ns < 5.1e9
    assert end.extent.last_ns == whole.extent.last_ns
    window = end.window(buckets=5)
    assert end.load(window).equals(whole.load(window))
    assert end.shares("stop", window).equals(whole.shares("stop", window))
    parts = end.latency(window)
    assert parts.drop_columns(["prefill_mean", "scheduling_mean"]).equals(
        whole.latency(window).drop_columns(["prefill_mean", "scheduling_mean"])
    )
    assert len(end.find("", most=1000)) < 60 < len(whole.find("", most=1000))
    assert Timeline.open(run, last_s=10_000.0).extent == whole.extent


def test_a_name_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    arrivals = [Arrival(at, ask("same", prompt(40 + int(at), 1), new=5)) for at in (0.0, 1.0)]
    arrivals.append(Arrival(2.0, ask("same", prompt(42, 1), new=500)))
    run = play(tmp_path, SchedulerConfig(), arrivals, until=3.0)
    found = Timeline.open(run).find("same")
    assert [each.arrive_ns // 10**9 for each in found] == [2, 1, 0]
    assert [each.end_reason for each in found] == [None, "length", "length"]
    load = Timeline.open(run).load(Timeline.open(run).window(buckets=1)).to_pylist()[0]
    assert (load["admitted"], load["prompt_tokens"]) == (3, 40 + 41 + 42)
    assert load["cached_tokens"] == 40 + 41


def test_the_summary_of_a_run_says_the_same(tmp_path: Path) -> None:
    run, timeline = _timeline(tmp_path)
    window = timeline.window(buckets=1)
    (load,), (latency,) = timeline.load(window).to_pylist(), timeline.latency(window).to_pylist()
    summary = summarize(run)
    assert summary.hit_rate == load["hit_rate"]
    assert (summary.prompt_tokens, summary.cached_tokens) == (load["prompt_tokens"], load["cached_tokens"])
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (latency["ttft_p50"], latency["ttft_p99"])
    assert (summary.evicted_tokens, summary.retractions) == (load["evicted_tokens"], load["retractions"])
    assert summary.requests == load["admitted"]


def test_ranks_side_by_side(tmp_path: Path) -> None:
    path = create_run(tmp_path, "ranks")
    for rank in range(2):
        sink = DirectSink(path, rank, Description(config=TIGHT.to_dict()), detail=EVERYTHING)
        tracer = RunTracer(sink)
        scheduler = Scheduler(TIGHT, tracer)
        tracer.attach(scheduler)
        drive(scheduler, Workload(rank), 10 + 20 * rank)
        tracer.close()
    timeline = Timeline.open(Run.open(path))
    window = timeline.window(buckets=3)
    ranks = timeline.ranks(window).to_pylist()
    assert [row["rank"] for row in ranks] == [0, 1]
    for row in ranks:
        alone = timeline.window(rank=row["rank"], buckets=1)
        assert row["admitted"] == timeline.load(alone)["admitted"][0].as_py() > 0
        assert row["ttft_p99"] == timeline.latency(alone)["ttft_p99"][0].as_py()
    apart = timeline.load(window, by_rank=True)
    assert apart.num_rows == 6
    assert sum(apart["steps"].to_pylist()) == sum(timeline.load(window)["steps"].to_pylist())


def test_a_request_that_comes_back_does_not_hit_what_it_computed_itself(tmp_path: Path) -> None:
    """One prompt that nobody shares: its own prefix is in the cache when it is admitted again."""
    config = SchedulerConfig(max_total_tokens=100, schedule_conservativeness=0.01)
    path = create_run(tmp_path, "again")
    tracer = RunTracer(DirectSink(path, 0, Description(config=config.to_dict()), detail=EVERYTHING))
    scheduler = Scheduler(config, tracer)
    tracer.attach(scheduler)
    for number in range(2):
        prompt = encode(range(1000 * number + 3, 1000 * number + 13))
        scheduler.arrive(Request(rid=f"r{number}", prompt=prompt, sampling=SamplingParams(max_new_tokens=50)), 0.0)
    for now in range(1, 200):
        step = scheduler.step(float(now))
        if step.batch is None:
            break
        lives = [member.live for member in step.batch.members]
        ends = {live.rid: Finish("length", 50) for live in lives if live.output_len == 49}
        scheduler.commit(step.batch, [5] * len(lives), ends, now + 0.5)
    tracer.close()
    timeline = Timeline.open(Run.open(path))
    load = timeline.load(timeline.window(buckets=1)).to_pylist()[0]
    assert (load["admitted"], load["prompt_tokens"], load["cached_tokens"], load["hit_rate"]) == (2, 20, 0, 0.0)
    assert (load["retractions"], load["again"]) == (1, 1)
    assert 10 <= load["again_cached"] < load["again_tokens"] <= 60


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_hit_rates_are_those_of_first_admissions_recounted_from_events(tmp_path: Path, policy: str) -> None:
    config = TIGHT.replace(schedule_policy=policy)
    run, timeline = _timeline(tmp_path, config)
    prompts: dict[str, int] = {}
    first: dict[str, tuple[int, int]] = {}
    again: list[tuple[str, int]] = []
    last: dict[str, str] = {}
    for event in run.rows("events"):
        rid, kind = event["rid"], event["kind"]
        if kind == "arrive":
            prompts[rid] = event["tokens"]
        elif kind == "admit" and rid not in first:
            first[rid] = (prompts[rid], event["tokens"])
        elif kind == "admit" and last[rid] in {"retract", "preempt"}:
            again.append((rid, event["tokens"]))
        if kind in {"admit", "retract", "preempt"}:
            last[rid] = kind
    load = timeline.load(timeline.window(buckets=1)).to_pylist()[0]
    assert load["prompt_tokens"] == sum(prompt for prompt, _ in first.values())
    assert load["cached_tokens"] == sum(cached for _, cached in first.values())
    assert (load["again"], load["again_cached"]) == (len(again), sum(cached for _, cached in again))
    retracted = {row["rid"] for row in run.rows("events") if row["kind"] in {"retract", "preempt"}}
    assert retracted
    for row in timeline.load(timeline.window(buckets=50)).to_pylist():
        assert row["hit_rate"] is None or 0 <= row["hit_rate"] <= 1
        assert row["again_cached"] <= row["again_tokens"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_parts_of_a_time_to_first_token_add_up_to_it(tmp_path: Path, policy: str, overlap: bool) -> None:
    """And the prefill part is the model's time for the batches that its own `admit` events name."""
    config = TIGHT.replace(schedule_policy=policy, disable_overlap_schedule=not overlap)
    run, timeline = _timeline(tmp_path, config)
    model: dict[int, tuple[int, int]] = {}
    free_ns = 0
    for step in _steps(run):
        if step["committed"] is not None:
            model[step["committed"]] = (max(step["end_ns"] - step["forward_ns"], free_ns), step["end_ns"])
            free_ns = step["end_ns"]
    batches: dict[str, list[int]] = defaultdict(list)
    began: set[str] = set()
    for event in run.rows("events"):
        if event["kind"] == "admit" and event["rid"] not in began:
            batches[event["rid"]].append(event["step"])
        if event["kind"] == "first_token":
            began.add(event["rid"])
    parts = timeline.request_parts()
    several = 0
    for row in parts.to_pylist():
        if row["ttft_ns"] is None:
            continue
        assert row["waited_ns"] + row["prefill_ns"] + row["scheduling_ns"] == row["ttft_ns"]
        assert min(row["waited_ns"], row["prefill_ns"], row["scheduling_ns"]) >= 0
        own = [model[number] for number in batches[row["rid"]]]
        several += len(own) > 1
        assert row["prefill_ns"] == sum(min(end, row["first_token_ns"]) - begin for begin, end in own)
    assert several > 0


def test_a_brief_timeline_tells_the_same_and_less(tmp_path: Path) -> None:
    path = record(tmp_path, SchedulerConfig(schedule_policy="lpm", max_total_tokens=600), seed=3, requests=60)
    whole, brief = Timeline.open(Run.open(path)), Timeline.open(Run.open(path), memory_mb=64, brief=True)
    assert brief.extent == whole.extent
    window = whole.window(buckets=20)
    unknown = {"needed", "needed_tokens", "prefill_mean", "scheduling_mean"}
    for one, other in ((whole.load(window), brief.load(window)), (whole.latency(window), brief.latency(window))):
        for name in one.column_names:
            assert other[name].to_pylist() == ([None] * 20 if name in unknown else one[name].to_pylist()), name
    for share in ("refused", "gate", "policy", "stop"):
        assert brief.shares(share, window).equals(whole.shares(share, window))
    assert brief.anomalies() == whole.anomalies()
