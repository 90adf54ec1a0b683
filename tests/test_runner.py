"""The runner against transformers' own forward, whatever the batch, the chunks and the slots."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedscope.engine import attention, tokens
from schedscope.engine.errors import ConfigError, ServerError
from schedscope.engine.model import Model, load_model
from schedscope.engine.request import SamplingParams
from schedscope.engine.runner import BatchRow, ModelRunner
from schedscope.engine.sampling import sample, token_seed

GREEDY = SamplingParams(temperature=0.0)
SLOTS = 8192
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")


@dataclass
class Job:
    """A request as a scheduler would drive it."""

    rid: str
    prompt: list[int]
    slots: array[int]
    """A slot for every position it may reach."""
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    def row(self, count: int | None = None) -> BatchRow:
        """Compute the next `count` positions, or all that are left."""
        ids = self.ids
        end = len(ids) if count is None else min(self.computed + count, len(ids))
        start, self.computed = self.computed, end
        return BatchRow(
            self.rid,
            tokens.encode(ids[start:end]),
            start,
            end,
            self.slots[:end],
            sample=end == len(ids),
            sampling=self.sampling,
        )


def step(runner: ModelRunner, *parts: tuple[Job, int | None]) -> None:
    rows = [job.row(count) for job, count in parts]
    for (job, _), row, token in zip(parts, rows, runner.forward(rows), strict=True):
        assert (token is not None) == row.sample
        if token is not None:
            job.output.append(token)


def finish(runner: ModelRunner, job: Job, length: int) -> list[int]:
    while len(job.output) < length:
        step(runner, (job, None))
    return job.output


def prompt_ids(seed: int, length: int, vocab: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab) for _ in range(length)]


def slot_maker(seed: int = 0, slots: int = SLOTS) -> Callable[[int], array[int]]:
    """Hands out slots in random order, so that no request has neighbouring ones."""
    free = list(range(slots))
    random.Random(seed).shuffle(free)

    def take(count: int) -> array[int]:
        taken = free[:count]
        del free[:count]
        return array("i", taken)

    return take


def plain_greedy(module: Any, prompt: Sequence[int], length: int) -> list[int]:
    """What transformers' own attention gives with no cache: each token from a forward over all before it."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > 1e-4, "a near tie proves nothing: choose another prompt"
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint in transformers' layout, with weights large enough for attention to matter."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 256,
            "max_position_embeddings": 1024,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.15,
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = getattr(transformers, f"{family}ForCausalLM")(config)
    module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def built_in() -> Model:
    return load_model(device="cpu")


@pytest.fixture(scope="module")
def reference(built_in: Model) -> Any:
    """The built-in model's weights under transformers' attention."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    source: Any = built_in.module
    config = type(source.config)(**source.config.to_dict())
    config._attn_implementation = "eager"
    module = LlamaForCausalLM(config).eval()
    module.load_state_dict(source.state_dict())
    return module


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_checkpoint(family: str, invariant: bool, tmp_path: Path) -> None:
    """Staggered arrivals, odd chunks, decodes in between, a shared prefix and a retraction, in one run."""
    from transformers import AutoModelForCausalLM

    folder = checkpoint(family, tmp_path / family)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model = load_model(str(folder), device="cpu")
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (3, 2, 8)
    runner = ModelRunner(model, num_slots=SLOTS, batch_invariant=invariant)
    take = slot_maker()

    shared, own = prompt_ids(1, 37, 256), prompt_ids(2, 5, 256)
    first = Job("first", shared, take(80))
    second = Job("second", shared + own, first.slots[:37] + take(43))
    third = Job("third", prompt_ids(3, 61, 256), take(100))
    step(runner, (first, 13))
    step(runner, (first, 11), (third, 7))
    # The second rests on slots that the first fills in this very forward.
    second.computed = 37
    step(runner, (third, 1), (second, 3), (first, None))
    step(runner, (first, None), (second, None), (third, 30))
    step(runner, (third, 19), (first, None), (second, None))
    # Retracted: its slots are given to others, and everything is computed again, output included.
    retracted = Job("second", second.prompt, take(80), output=list(second.output))
    other = Job("other", prompt_ids(4, 43, 256), second.slots[37:] + take(20))
    step(runner, (retracted, 29), (first, None), (third, None), (other, 17))
    step(runner, (retracted, None), (first, None), (third, None), (other, None))
    for job in (first, retracted, third, other):
        assert finish(runner, job, 10)[:10] == plain_greedy(plain, job.prompt, 10), job.rid


def test_sliding_window(tmp_path: Path) -> None:
    """A window shorter than the context, across a block of keys, as transformers applies it."""
    from transformers import AutoModelForCausalLM

    folder = checkpoint("Mistral", tmp_path, sliding_window=9)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    runner = ModelRunner(load_model(str(folder), device="cpu"), num_slots=SLOTS)
    take = slot_maker()
    for length in (5, 40, attention.KEY_BLOCK + 20):
        job = Job("a", prompt_ids(length, length, 256), take(length + 8))
        step(runner, (job, 3))
        step(runner, (job, 17))
        assert finish(runner, job, 8) == plain_greedy(plain, job.prompt, 8)


@pytest.mark.parametrize("length", [1, 2, 15, 17, attention.KEY_BLOCK - 2, 3 * attention.TILE_TOKENS + 5])
def test_built_in_model_matches_transformers(built_in: Model, reference: Any, length: int) -> None:
    runner = ModelRunner(built_in, num_slots=SLOTS)
    job = Job("a", prompt_ids(length, length, 1024), slot_maker()(length + 8))
    assert finish(runner, job, 8) == plain_greedy(reference, job.prompt, 8)


def test_built_in_tokens_stay_the_same(built_in: Model, reference: Any) -> None:
    """Sample logs and scenarios rely on these very tokens: a change of the weights is a breaking one."""
    runner = ModelRunner(built_in, num_slots=64)
    job = Job("a", prompt_ids(10, 12, 1024), array("i", range(64)))
    golden = [172, 666, 666, 917, 82, 300, 735, 89, 397, 335, 320, 871]
    assert finish(runner, job, 12) == golden == plain_greedy(reference, job.prompt, 12)


# ---------------------------------------------------------------------------------------------------------
# Any plan gives the same tokens, and the same bits.

PROMPTS = tuple(tuple(prompt_ids(100 + i, n, 1024)) for i, n in enumerate((1, 9, 33, 140, attention.KEY_BLOCK - 3)))
LENGTH = 6
WARM = SamplingParams(temperature=1.3, top_k=200, top_p=0.97)


@cache
def kernels_treat_rows_alike() -> bool:
    """Whether a row of a product of at least `ROW_BLOCK` rows has the same bits whatever the other rows.

    So it is with MKL on AVX-512. Its AVX2 kernels take six rows at a time and the rest differently.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 64, generator=generator) for size in (2048, 128))
    whole = torch.nn.functional.linear(left, right)
    sizes = (attention.ROW_BLOCK, 17, 22, 33, 64, 100, 1000)
    return all(torch.equal(torch.nn.functional.linear(left[:n], right), whole[:n]) for n in sizes)


@cache
def solo(index: int, sampling: SamplingParams) -> tuple[list[int], torch.Tensor]:
    """Tokens, and keys and values, of a prompt on its own: one whole prefill, then decodes."""
    runner = ModelRunner(load_model(device="cpu"), num_slots=1024)
    job = Job(f"job-{index}", list(PROMPTS[index]), array("i", range(1024)), sampling)
    finish(runner, job, LENGTH)
    return job.output, runner.cache.data[:, :, : job.computed].clone()


@cache
def expected_greedy(index: int, module: Any) -> list[int]:
    return plain_greedy(module, PROMPTS[index], LENGTH)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_plan_gives_the_same(built_in: Model, reference: Any, data: st.DataObject) -> None:
    """Any subset of requests in any chunks at each step, in any order of rows and any slots.

    Equal tokens everywhere; equal bits where the CPU's kernels allow them.
    """
    runner = ModelRunner(built_in, num_slots=SLOTS)
    take = slot_maker(data.draw(st.integers(0, 1000), label="slots"))
    indices = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=6), label="prompts")
    jobs = [
        Job(
            f"job-{i}",
            list(PROMPTS[i]),
            take(len(PROMPTS[i]) + LENGTH),
            data.draw(st.sampled_from((GREEDY, WARM)), label="sampling"),
        )
        for i in indices
    ]
    chunk = st.one_of(st.none(), st.integers(1, 40), st.integers(100, 300))
    while waiting := [job for job in jobs if len(job.output) < LENGTH]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique_by=id), label="rows")
        step(runner, *((job, data.draw(chunk, label="chunk")) for job in chosen))
    for index, job in zip(indices, jobs, strict=True):
        output, bits = solo(index, job.sampling)
        assert job.output == output
        if job.sampling is GREEDY:
            assert job.output == expected_greedy(index, reference)
        slots = torch.tensor(job.slots[: job.computed])
        if kernels_treat_rows_alike():
            assert torch.equal(runner.cache.data[:, :, slots], bits)


def test_padding_is_what_makes_bits_equal(built_in: Model) -> None:
    """Measures what `batch_invariant` buys: without it the same tokens come from other bits."""
    spread = {}
    for invariant in (True, False):
        runner = ModelRunner(built_in, num_slots=SLOTS, batch_invariant=invariant)
        take = slot_maker()
        alone = Job("a", prompt_ids(5, 90, 1024), take(120))
        finish(runner, alone, 20)
        crowd = [Job(f"{i}", prompt_ids(50 + i, 20 + i, 1024), take(120)) for i in range(20)]
        batched = Job("a", alone.prompt, take(120))
        step(runner, *((job, None) for job in crowd))
        for _ in range(9):
            step(runner, (batched, 10), *((job, None) for job in crowd))
        while len(batched.output) < 20:
            step(runner, (batched, None), *((job, None) for job in crowd))
        assert batched.output == alone.output
        kept = [runner.cache.data[:, :, torch.tensor(job.slots[: job.computed])] for job in (alone, batched)]
        spread[invariant] = (kept[0] - kept[1]).abs().max().item()
    assert max(spread.values()) < 1e-4
    if kernels_treat_rows_alike():
        assert spread[True] == 0.0 < spread[False]


def test_logits_have_the_same_bits_in_any_batch(built_in: Model) -> None:
    if not kernels_treat_rows_alike():
        pytest.skip("this CPU's matrix kernels treat the last rows of a product differently")
    runner = ModelRunner(built_in, num_slots=8)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    together = runner._logits(hidden)
    assert all(torch.equal(runner._logits(hidden[i : i + 1])[0], together[i]) for i in range(40))


def test_rows_of_one_forward_may_share_slots_that_it_fills(built_in: Model) -> None:
    runner = ModelRunner(built_in, num_slots=SLOTS)
    take = slot_maker()
    prefix = prompt_ids(1, 70, 1024)
    leader = Job("leader", prefix, take(100))
    follower = Job("follower", [*prefix, 5, 6, 7], leader.slots[:70] + take(30), computed=70)
    step(runner, (follower, None), (leader, None))
    alone = Job("follower", follower.prompt, take(100))
    step(runner, (alone, None))
    assert follower.output == alone.output


def test_a_forward_changes_only_its_own_slots(built_in: Model) -> None:
    runner = ModelRunner(built_in, num_slots=256)
    job = Job("a", prompt_ids(1, 50, 1024), slot_maker(slots=256)(60))
    step(runner, (job, 20))
    before = runner.cache.data.clone()
    step(runner, (job, 25))
    changed = (runner.cache.data != before).flatten(3).any(-1).any(0).any(0).nonzero()[:, 0].tolist()
    assert changed == sorted(job.slots[20:45])


# ---------------------------------------------------------------------------------------------------------
# Refusals


def row(**changes: Any) -> BatchRow:
    fields: dict[str, Any] = {
        "rid": "a",
        "tokens": tokens.encode([5, 6]),
        "start": 1,
        "end": 3,
        "slots": array("i", [0, 1, 2]),
        "sample": True,
        "sampling": GREEDY,
    }
    return BatchRow(**{**fields, **changes})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (row(start=3), "positions 3..2"),
        (row(start=-1), "positions -1..2"),
        (row(tokens=tokens.encode([5])), "1 tokens and 3 slots"),
        (row(slots=array("i", [0, 1])), "2 tokens and 2 slots"),
        (row(slots=array("i", [0, 1, 8])), "within the pool's 8"),
        (row(slots=array("i", [0, -1, 2])), "within the pool's 8"),
        (row(tokens=tokens.encode([5, 1024])), "token 1024"),
        (row(end=40000), "context of 32768"),
    ],
)
def test_wrong_rows_are_refused_and_write_nothing(built_in: Model, wrong: BatchRow, text: str) -> None:
    runner = ModelRunner(built_in, num_slots=8)
    with pytest.raises(ValueError, match=text):
        runner.forward([row(), wrong])
    assert not runner.cache.data.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    """Runs, and stays near the same model in float32 (rounding may choose other tokens)."""
    half, full = (ModelRunner(load_model(device="cpu", dtype=d), num_slots=64) for d in (dtype, "float32"))
    for runner in (half, full):
        job = Job("a", prompt_ids(1, 30, 1024), array("i", range(64)))
        step(runner, (job, 7))
        step(runner, (job, None))
        step(runner, (job, None))
    near = half.cache.data[:, :, :30].float() - full.cache.data[:, :, :30]
    assert near.abs().max() < 0.15


def test_no_rows(built_in: Model) -> None:
    assert ModelRunner(built_in, num_slots=8).forward([]) == []


def test_pools_that_cannot_be(built_in: Model) -> None:
    with pytest.raises(ConfigError, match="at least 1 slot"):
        ModelRunner(built_in, num_slots=0)
    with pytest.raises(ServerError, match="GiB"):
        ModelRunner(built_in, num_slots=2**46)


# ---------------------------------------------------------------------------------------------------------
# Sampling

LOGITS = torch.randn(9, 300, generator=torch.Generator().manual_seed(3)) * 3
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_p=st.sampled_from((0.05, 0.5, 0.9, 1.0)),
    top_k=st.sampled_from((-1, 1, 2, 40, 1000)),
    min_p=st.sampled_from((0.0, 0.02, 0.5, 1.0)),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 8), PARAMS, st.integers(0, 2**64 - 1)), min_size=1, max_size=9))
def test_a_sample_depends_on_its_own_row_alone(rows: list[tuple[int, SamplingParams, int]]) -> None:
    state = torch.get_rng_state()
    before = LOGITS.clone()
    together = sample(LOGITS[[i for i, _, _ in rows]], [p for _, p, _ in rows], [s for _, _, s in rows])
    assert together == [sample(LOGITS[i : i + 1], [p], [s])[0] for i, p, s in rows]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(LOGITS, before)


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """The filters as SGLang states them, one token at a time."""
    weights = torch.tensor(logits, dtype=torch.float64).div(params.temperature).softmax(0).tolist()
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept, before = set(), 0.0
    for rank, token in enumerate(ranked):
        if (
            (params.top_k < 1 or rank < params.top_k)
            and before <= params.top_p
            and weights[token] >= params.min_p * weights[ranked[0]]
        ):
            kept.add(token)
        before += weights[token]
    return kept


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.4),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=0.5, top_k=6, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=3.0, top_p=0.9),
    ],
)
def test_filters_keep_what_they_should(params: SamplingParams) -> None:
    logits = LOGITS[:1, :40]
    drawn = sample(logits.expand(4000, -1), [params] * 4000, [token_seed(0, position) for position in range(4000)])
    kept = allowed(logits[0].tolist(), params)
    assert set(drawn) <= kept
    weights = torch.tensor([w if i in kept else 0.0 for i, w in enumerate(_softmax(logits[0], params))])
    frequencies = torch.bincount(torch.tensor(drawn), minlength=40) / 4000
    assert (frequencies - weights / weights.sum()).abs().max() < 0.03


def _softmax(logits: torch.Tensor, params: SamplingParams) -> Iterable[float]:
    weights: list[float] = (logits / params.temperature).softmax(0).tolist()
    return weights


def test_sampling_at_the_edges() -> None:
    tied = torch.zeros(1, 8)
    for seed in (0, 2**64 - 1):
        assert sample(tied, [SamplingParams(top_k=2)], [seed])[0] == (0 if seed == 0 else 1)
        assert sample(tied, [SamplingParams()], [seed])[0] == (0 if seed == 0 else 7)
    masked = torch.tensor([[float("-inf"), 1.0, float("-inf")]])
    assert sample(masked.expand(2, -1), [SamplingParams()] * 2, [0, 2**64 - 1]) == [1, 1]
    assert sample(torch.empty(0, 8), [], []) == []
    # Sums of 300 rounded probabilities lie on either side of 1; the largest share must not leave the row.
    largest = sample(LOGITS, [SamplingParams()] * 9, [2**64 - 1] * 9)
    assert largest == [299] * 9
    with pytest.raises(ValueError, match="1 rows, 0 params"):
        sample(tied, [], [])


def test_filters_at_ties() -> None:
    def reachable(size: int, params: SamplingParams) -> set[int]:
        draws = range(0, 2**64, 2**64 // (2 * size))
        return set(sample(torch.zeros(1, size).expand(len(draws), -1), [params] * len(draws), draws))

    assert reachable(4, SamplingParams(top_p=0.5)) == {0, 1, 2}
    assert reachable(4, SamplingParams(min_p=1.0)) == {0, 1, 2, 3}
    assert reachable(1024, SamplingParams(top_k=3)) == {0, 1, 2}
    assert reachable(1024, SamplingParams(temperature=0.0)) == {0}


def test_seeds_tell_requests_apart_unless_they_bring_their_own(built_in: Model) -> None:
    def outputs(seed: int | None, server: int) -> list[list[int]]:
        runner = ModelRunner(built_in, num_slots=SLOTS, seed=server)
        take = slot_maker()
        sampling = SamplingParams(seed=seed)
        return [finish(runner, Job(rid, [5, 6, 7], take(20), sampling), 8) for rid in ("a", "b")]

    unseeded = outputs(None, 0)
    assert unseeded == outputs(None, 0)
    assert unseeded[0] != unseeded[1]
    assert unseeded != outputs(None, 1)
    seeded = outputs(11, 0)
    assert seeded[0] == seeded[1] == outputs(11, 1)[0]
    assert len({token_seed(s, p, r) for s in (0, 1, -1, 2**80) for p in range(50) for r in ("", "a")}) == 400
