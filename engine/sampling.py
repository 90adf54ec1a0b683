"""Choosing output tokens from logits.

A token is a pure function of its logits, its sampling parameters and its seed: there is no generator that other
requests could advance. That makes a recorded request repeatable in any batch, on its own, or after a
retraction, and it costs one uniform number per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from schedscope.engine.request import SamplingParams
from torch import Tensor

_SEED_BITS = 64
GREEDY_TEMPERATURE = 1e-6
"""Temperatures below are greedy, as in SGLang."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most probable token is wanted, whatever the seed."""
    return params.temperature < GREEDY_TEMPERATURE or params.top_k == 1


def token_seed(seed: int, position: int, rid: str = "") -> int:
    """Seed of the token at `position`: 64 well-mixed bits of all arguments.

    Args:
        seed: Seed of the request, or of the server for a request without its own.
        position: Position of the token in its request.
        rid: The request, where requests that share `seed` should differ.
    """
    text = f"{seed},{position},{rid}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=_SEED_BITS // 8).digest(), "little")


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int]) -> list[int]:
    """Choose a token per row.

    The filters are SGLang's: top_k and top_p both look at the probabilities before any filter (a token stays
    while the mass before it is at most top_p), min_p compares with the most probable one. Among equal
    probabilities the lower id counts as the more probable.

    Args:
        logits: [rows, vocab], any float dtype; not changed.
        params: Of each row; temperature, top_k, top_p and min_p are used.
        seeds: Of each row, 0..2**64-1, from `token_seed`; a greedy row doesn't use its own.
    """
    if len(params) != logits.shape[0] or len(seeds) != len(params):
        raise ValueError(f"{logits.shape[0]} rows, {len(params)} params and {len(seeds)} seeds")
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    rows = [i for i, p in enumerate(params) if not is_greedy(p)]
    if not rows:
        return chosen
    temperatures = logits.new_tensor([params[i].temperature for i in rows], dtype=torch.float32)
    probabilities = torch.softmax(logits[rows].float() / temperatures[:, None], dim=-1)
    filtered = [place for place, i in enumerate(rows) if _filters(params[i])]
    if filtered:
        kept = _filter(probabilities[filtered], [params[rows[place]] for place in filtered])
        probabilities[filtered] = kept
    for i, token in zip(rows, _draw(probabilities, [seeds[i] for i in rows]), strict=True):
        chosen[i] = token
    return chosen


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _filter(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`probabilities`, [rows, vocab], with 0 for every token that a filter removes."""
    vocab = probabilities.shape[-1]
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=ranked.device)[:, None]

    top_k = column([p.top_k if p.top_k > 0 else vocab for p in params])
    top_p = column([p.top_p for p in params])
    min_p = column([p.min_p for p in params])
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    kept = (torch.arange(vocab, device=ranked.device) < top_k) & (before <= top_p)
    kept &= ranked >= min_p * ranked[:, :1]
    return torch.zeros_like(probabilities).scatter_(-1, ids, ranked * kept)


def _draw(probabilities: Tensor, seeds: Sequence[int]) -> list[int]:
    """Per row of [rows, vocab], the first token at which the summed weights exceed the row's uniform share."""
    summed = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = summed[:, -1:]
    # 53 bits: exact, and even the largest share of any total rounds to less than the total.
    shares = [(seed >> (_SEED_BITS - 53)) * 2.0**-53 for seed in seeds]
    target = total * torch.tensor(shares, dtype=torch.float64, device=total.device)[:, None]
    tokens: list[int] = torch.searchsorted(summed, target, right=True)[:, 0].tolist()
    return tokens
