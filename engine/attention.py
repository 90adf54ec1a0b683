"""Paged attention: one forward over many requests whose keys and values lie scattered in a pool of slots.

A forward computes a *span* of positions of each request: a whole prompt, a chunk of one, or the one position
of a decode. The tokens of all spans are laid out one after another, so that every linear layer sees a single
batch; attention alone looks at the requests. Per layer it stores the new keys and values in their slots first
and reads second, so a span may even rest on slots that another span of the same forward fills.

Why keys are padded to whole blocks and queries to whole rows: the matrix kernels of a CPU choose their
summation order by shape, so the same token would get other bits in another batch or chunk. torch's CPU kernel
walks over keys in blocks of 512. If every block is whole, and no product has fewer than 16 rows, a query's
result depends on its own keys alone: a position decoded in a batch of 60 has the bits of the same position in
a whole prefill. Masked keys weigh exactly 0, so padding adds nothing. That much was measured, with MKL's
AVX-512 kernels and layers up to some 600 wide; wider layers and other CPUs differ by rounding, as anywhere.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

IMPLEMENTATION = "schedscope_paged"
"""Name under which `register` makes `paged_attention` known to transformers."""

KEY_BLOCK = 512
"""Keys that torch's CPU attention kernel takes at a time; a multiple of it is seen in whole blocks."""
ROW_BLOCK = 16
"""Fewest rows for which a matrix product takes the kernel that all larger ones take."""
RAGGED_KEY_BLOCK = 64
"""Keys are padded to multiples of this when speed matters more than equal bits."""
TILE_TOKENS = 128
"""Tokens of a span that attend together: a later tile needs more keys, so small tiles skip masked work."""
GROUP_KEYS = 16 * KEY_BLOCK
"""Most keys (padding included) that one group of decodes gathers: what stays in a core's cache."""


class KvCache:
    """Keys and values of all layers by slot.

    Attributes:
        data: [layers, 2, slots, kv_heads, head_dim]; keys at 0, values at 1 of the second dimension.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._buffer = data.new_empty(0)

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value`, each [len(slots), kv_heads, head_dim], to `slots` of `layer`."""
        self.data[layer, 0].index_copy_(0, slots, key)
        self.data[layer, 1].index_copy_(0, slots, value)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at `slots` of `layer`, each [len(slots), kv_heads, head_dim].

        Both are valid until the next call: one buffer serves all, because page faults in a fresh one would
        cost more than the copy itself.
        """
        shape = (2, slots.shape[0], *self.data.shape[3:])
        size = math.prod(shape)
        if self._buffer.numel() < size:
            self._buffer = self.data.new_empty(size)
        gathered = self._buffer[:size].view(shape)
        torch.index_select(self.data[layer], 1, slots, out=gathered)
        return gathered[0], gathered[1]


class Span(NamedTuple):
    """The positions of one request that a forward computes."""

    start: int
    """First position computed; all earlier ones are in the cache."""
    end: int
    """One past the last."""
    slots: array[int]
    """Cache slot of each position 0..end-1."""


class Decodes(NamedTuple):
    """Spans of one token with equally many padded keys, computed by one kernel call."""

    first: int
    """Place of their first token in the forward; the others follow."""
    size: int
    keys: int
    """Keys of each, padding included."""
    slots: Tensor
    """[size * keys]: slots to gather."""
    positions: Tensor
    """[size, 1]: position of each query."""


class Tile(NamedTuple):
    """Consecutive queries of one span."""

    first: int
    """Place of its first token in the forward."""
    size: int
    rows: int
    """Queries, padding included."""
    start: int
    """Position of its first query."""
    keys: int
    """Leading keys of the span that it needs, padding included."""


class Prefill(NamedTuple):
    """A span of several tokens."""

    keys: int
    slots: Tensor
    """[keys]: slots to gather."""
    tiles: tuple[Tile, ...]


class AttentionPlan:
    """Which slots a forward writes and reads: built once, used by every layer.

    Tokens are laid out with decodes first, shortest context first, then the longer spans as they came, so that
    spans computed together are neighbours; `order` says where each span went.

    Attributes:
        order: Indices of the spans in layout order.
        cache: What the forward reads, and where it writes the slots of the computed positions.
        row_block: Fewest rows of a product.
        num_tokens: Tokens of all spans; what a forward has beyond them is padding.
        written: [num_tokens] slots of the computed positions.
        decodes: Spans of one token, in groups.
        prefills: The longer spans.
    """

    def __init__(self, spans: Sequence[Span], cache: KvCache, *, invariant: bool) -> None:
        """Lay out `spans`. `invariant` pads for equal bits in any batch, at some cost for short contexts."""
        self.cache = cache
        self._device = cache.data.device
        self._key_block = KEY_BLOCK if invariant else RAGGED_KEY_BLOCK
        self.row_block = ROW_BLOCK if invariant else 1
        self._masks: dict[int | None, tuple[list[Tensor], Tensor]] = {}
        decodes = [i for i, span in enumerate(spans) if span.end - span.start == 1]
        decodes.sort(key=lambda i: spans[i].end)
        longer = [i for i, span in enumerate(spans) if span.end - span.start != 1]
        self.order = decodes + longer
        written = array("i")
        for i in self.order:
            written.extend(spans[i].slots[spans[i].start :])
        self.num_tokens = len(written)
        self.written = self._tensor(written)
        self.decodes = self._group([spans[i] for i in decodes])
        self.prefills: list[Prefill] = []
        first = len(decodes)
        for i in longer:
            self.prefills.append(self._tile(spans[i], first))
            first += spans[i].end - spans[i].start
        self._last_start = max((tile.start for tile in self._tiles()), default=0)

    def masks(self, window: int | None) -> Iterator[Tensor]:
        """What to add to the scores: one mask per group of decodes, then one per tile, in their order.

        A mask is 0 where a query sees a key and -inf elsewhere.

        Args:
            window: Number of last keys that a query sees (its own included), or None for all.
        """
        if window not in self._masks:
            decodes = [
                self._mask(torch.arange(d.keys, device=self._device) - d.positions, window) for d in self.decodes
            ]
            self._masks[window] = decodes, self._tile_template(window)
        decodes, template = self._masks[window]
        for mask in decodes:
            yield mask[:, None, None]
        for tile in self._tiles():
            mask = template[: tile.rows, self._last_start - tile.start :][:, : tile.keys]
            # A slice starts at any address, which only the CPU's kernel takes.
            yield mask if mask.is_cpu else mask.contiguous()

    def _tiles(self) -> list[Tile]:
        return [tile for prefill in self.prefills for tile in prefill.tiles]

    def _tile_template(self, window: int | None) -> Tensor:
        """A mask of which each tile's is a slice: all look alike but for where their first query stands.

        One each would be gigabytes for a long prompt. [most rows of a tile, keys], its first query being at
        key `_last_start`.
        """
        tiles = self._tiles()
        rows = max((tile.rows for tile in tiles), default=0)
        keys = max((self._last_start - tile.start + tile.keys for tile in tiles), default=0)
        queries = torch.arange(rows, device=self._device) + self._last_start
        return self._mask(torch.arange(keys, device=self._device) - queries[:, None], window)

    def _mask(self, distance: Tensor, window: int | None) -> Tensor:
        """The mask for keys that lie `distance` after their query."""
        hidden = distance > 0
        if window is not None:
            hidden |= distance <= -window
        return self.cache.data.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

    def _tensor(self, values: array[int]) -> Tensor:
        return torch.frombuffer(values, dtype=torch.int32).to(self._device, torch.int64)

    def _padded(self, length: int) -> int:
        return -(-length // self._key_block) * self._key_block

    def _group(self, spans: Sequence[Span]) -> list[Decodes]:
        """Cut `spans`, ordered by length, wherever the padded length changes or a group is full."""
        groups: list[Decodes] = []
        begin = 0
        while begin < len(spans):
            keys = self._padded(spans[begin].end)
            end = begin + 1
            while end < len(spans) and self._padded(spans[end].end) == keys and (end + 1 - begin) * keys <= GROUP_KEYS:
                end += 1
            slots, positions = array("i"), array("i")
            for span in spans[begin:end]:
                slots.extend(_padded_slots(span.slots, keys))
                positions.append(span.start)
            groups.append(Decodes(begin, end - begin, keys, self._tensor(slots), self._tensor(positions)[:, None]))
            begin = end
        return groups

    def _tile(self, span: Span, first: int) -> Prefill:
        keys = self._padded(span.end)
        tiles = []
        for start in range(span.start, span.end, TILE_TOKENS):
            end = min(start + TILE_TOKENS, span.end)
            rows = -(-(end - start) // self.row_block) * self.row_block
            place = first + start - span.start
            tiles.append(Tile(place, end - start, rows, start, self._padded(end)))
        return Prefill(keys, self._tensor(_padded_slots(span.slots, keys)), tuple(tiles))


def _padded_slots(slots: array[int], keys: int) -> array[int]:
    """`slots` and then its first one as often as needed: a slot that surely holds finite numbers."""
    return slots + slots[:1] * (keys - len(slots))


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    paged: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of all spans of `paged`, as a transformers attention function.

    Args:
        module: The attention layer; its `layer_idx` selects the layer of the cache.
        query: [1, heads, tokens, head_dim], tokens as `paged` lays them out, then padding.
        key: [1, kv_heads, tokens, head_dim]; stored in the plan's cache.
        value: As `key`.
        attention_mask: Not used; `paged` makes its own.
        paged: The plan of this forward; the slots it writes change.
        scaling: Factor of the scores; None for head_dim ** -0.5.
        sliding_window: Number of last keys that a query sees, None for all.

    Returns:
        [1, tokens, heads, head_dim], zeros for padding, and no weights.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    shared = heads // kv_heads
    new = slice(0, paged.num_tokens)
    paged.cache.store(layer, paged.written, key[0, :, new].transpose(0, 1), value[0, :, new].transpose(0, 1))
    masks = paged.masks(sliding_window)
    output = query.new_zeros((tokens, heads, head_dim))
    queries = query[0].view(kv_heads, shared, tokens, head_dim)

    for first, size, width, slots, _positions in paged.decodes:
        keys, values = paged.cache.gather(layer, slots)
        # The query heads that share a key head are the rows of one product: no key is copied per head.
        by_token = queries[:, :, first : first + size].permute(2, 0, 1, 3)
        attended = scaled_dot_product_attention(
            pad(by_token, (0, 0, 0, max(paged.row_block - shared, 0))),
            keys.view(size, width, kv_heads, head_dim).transpose(1, 2),
            values.view(size, width, kv_heads, head_dim).transpose(1, 2),
            attn_mask=next(masks),
            scale=scaling,
        )
        output[first : first + size] = attended[:, :, :shared].reshape(size, heads, head_dim)

    for prefill in paged.prefills:
        keys, values = paged.cache.gather(layer, prefill.slots)
        # Key heads take the batch dimension, the query heads that share one the head dimension (stride 0).
        keys = keys.transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
        values = values.transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
        for first, size, rows, _start, width in prefill.tiles:
            attended = scaled_dot_product_attention(
                pad(queries[:, :, first : first + size], (0, 0, 0, rows - size)),
                keys[:, :, :width],
                values[:, :, :width],
                attn_mask=next(masks),
                scale=scaling,
            )
            by_token = attended[:, :, :size].permute(2, 0, 1, 3)
            output[first : first + size] = by_token.reshape(size, heads, head_dim)
    return output.unsqueeze(0), None


def register() -> None:
    """Make `paged_attention` available to transformers' models as `IMPLEMENTATION`. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
