"""Runs a model over a batch of requests: token ids and slots in, next tokens out.

The runner knows nothing of queues, budgets or prefixes. A scheduler says which positions of which requests to
compute and in which slots their keys and values lie; prefill chunks, whole prompts and decodes mix freely.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from schedscope.engine import tokens
from schedscope.engine.attention import ROW_BLOCK, AttentionPlan, KvCache, Span
from schedscope.engine.errors import ConfigError, ServerError
from schedscope.engine.model import Model
from schedscope.engine.request import SamplingParams
from schedscope.engine.sampling import is_greedy, sample, token_seed
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's part of a forward: compute positions start..end-1; all earlier ones are in the pool.

    An earlier position may also be computed by another row of the same forward that shares its slot.
    """

    rid: str
    tokens: bytes
    """Packed ids (`schedscope.engine.tokens`) of positions start..end-1."""
    start: int
    """First position computed."""
    end: int
    """One past the last."""
    slots: array[int]
    """array('i'): pool slot of every position 0..end-1. Rows that share a prefix share its slots."""
    sample: bool
    """Whether the next token, that of position `end`, is wanted."""
    sampling: SamplingParams


class ModelRunner:
    """A model with its pool of keys and values.

    Attributes:
        model: The model.
        cache: The pool, [layers, 2, num_slots, kv_heads, head_dim] in `cache.data`.
        num_slots: Slots of the pool; each holds one position of all layers.
        seed: Seed of requests that bring none. Such requests differ by their rid.
        batch_invariant: Whether forwards are padded so that a token doesn't depend on what else is in the
            batch or on how its prompt was cut into chunks, as far as the CPU's kernels allow: see
            `schedscope.engine.attention`. Without it results differ by rounding, which rarely tips a token.
    """

    def __init__(self, model: Model, *, num_slots: int, seed: int = 0, batch_invariant: bool = True) -> None:
        """Allocate the pool.

        Raises:
            ConfigError: `num_slots` is not positive.
            ServerError: There is not enough memory.
        """
        if num_slots < 1:
            raise ConfigError(f"a pool needs at least 1 slot, not {num_slots}")
        self.model = model
        self.num_slots = num_slots
        self.seed = seed
        self.batch_invariant = batch_invariant
        shape = (model.num_layers, 2, num_slots, model.num_kv_heads, model.head_dim)
        try:
            self.cache = KvCache(torch.zeros(shape, dtype=model.dtype, device=model.device))
        except RuntimeError as error:  # torch has no error of its own for a CPU that is out of memory.
            gib = num_slots * model.bytes_per_slot / 2**30
            raise ServerError(
                f"no memory for {num_slots} KV slots ({gib:.1f} GiB) on {model.device}: ask for fewer"
            ) from error

    @torch.inference_mode()
    def forward(self, rows: Sequence[BatchRow]) -> list[int | None]:
        """Compute the rows' positions and write them to the pool.

        Args:
            rows: In any order and mix. Only the slots of their positions start..end-1 change.

        Returns:
            The next token of each row, None where `sample` is False.

        Raises:
            ValueError: A row contradicts itself, or leaves the model's context or the pool. Nothing was written.
        """
        if not rows:
            return []
        for row in rows:
            self._check(row)
        spans = [Span(row.start, row.end, row.slots) for row in rows]
        plan = AttentionPlan(spans, self.cache, invariant=self.batch_invariant)
        laid_out = [rows[i] for i in plan.order]
        hidden = self.model.hidden_states(*self._inputs(laid_out), plan)
        ends = torch.tensor([row.end - row.start for row in laid_out]).cumsum(0) - 1
        wanted = [place for place, row in enumerate(laid_out) if row.sample]
        results: list[int | None] = [None] * len(rows)
        if wanted:
            logits = self._logits(hidden[ends[wanted].to(hidden.device)])
            sampled = [laid_out[place] for place in wanted]
            chosen = sample(logits, [row.sampling for row in sampled], [self._seed(row) for row in sampled])
            for place, token in zip(wanted, chosen, strict=True):
                results[plan.order[place]] = token
        return results

    def _inputs(self, rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor]:
        """Ids and positions of all rows, each [tokens], padded to `ROW_BLOCK` if invariant."""
        ids = tokens.decode(b"".join(row.tokens for row in rows))
        if max(ids) >= self.model.vocab_size:
            raise ValueError(f"token {max(ids)} is not within the vocabulary of {self.model.vocab_size}")
        positions: list[int] = []
        for row in rows:
            positions.extend(range(row.start, row.end))
        if self.batch_invariant:
            padding = [0] * (ROW_BLOCK - len(ids))
            ids, positions = ids + padding, positions + padding
        return torch.tensor(ids, device=self.model.device), torch.tensor(positions, device=self.model.device)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits, [rows, vocab], of hidden states [rows, hidden], computed with at least `ROW_BLOCK` rows."""
        count = hidden.shape[0]
        if self.batch_invariant:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, max(ROW_BLOCK - count, 0)))
        return self.model.logits(hidden)[:count]

    def _seed(self, row: BatchRow) -> int:
        if is_greedy(row.sampling):
            return 0
        if row.sampling.seed is not None:
            return token_seed(row.sampling.seed, row.end)
        return token_seed(self.seed, row.end, row.rid)

    def _check(self, row: BatchRow) -> None:
        if not 0 <= row.start < row.end <= self.model.context_length:
            raise ValueError(
                f"row {row.rid!r}: positions {row.start}..{row.end - 1} are not within a context of "
                f"{self.model.context_length}"
            )
        if tokens.length(row.tokens) != row.end - row.start or len(row.slots) != row.end:
            raise ValueError(
                f"row {row.rid!r}: {tokens.length(row.tokens)} tokens and {len(row.slots)} slots "
                f"for positions {row.start}..{row.end - 1}"
            )
        written = row.slots[row.start :]
        if min(written) < 0 or max(written) >= self.num_slots:
            raise ValueError(f"row {row.rid!r}: a slot is not within the pool's {self.num_slots}")
