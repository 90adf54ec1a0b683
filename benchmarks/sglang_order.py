"""The same queues through SGLang 0.5.23: its real `SchedulePolicy` over its default prefix cache (Rust core).

Import fails where SGLang is not installed. Without a GPU it needs a `sgl_kernel` that can be imported.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from workloads import PROCESSED_TOKENS, Arrival

POOL_TOKENS = 400_000


def prepare() -> None:
    """Let the scheduler's classes run without a server, on a CPU. Once per process."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    get_context().override_server_args(attention_backend="torch_native", device="cpu").install()


class SGLangQueue:
    """A waiting queue, its policy and its cache."""

    def __init__(self, policy: str) -> None:
        pool = ReqToTokenPool(size=1, max_context_len=8, device="cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(
            POOL_TOKENS, dtype=torch.float16, device="cpu", kvcache=None, need_sort=False
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                eviction_policy="lru",
                tree_components=(ComponentType.FULL,),
            )
        )
        if self.tree._tree_core_backend != "rust":
            raise RuntimeError("SGLang did not select its Rust tree core")
        self.policy = SchedulePolicy(policy, self.tree, False, False, False)
        self.queue: list[Req] = []

    @property
    def rids(self) -> list[str]:
        """The queue as it is."""
        return [req.rid for req in self.queue]

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return int(self.tree.evictable_size())

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Requests join the tail."""
        for rid, ids, entry_time, processed in arrivals:
            sampling = SamplingParams(max_new_tokens=128)
            sampling.normalize(None)
            req = Req(rid=rid, origin_input_text="", origin_input_ids=ids, sampling_params=sampling, vocab_size=1 << 40)
            req.time_stats.wait_queue_entry_time = entry_time
            req.arrival_processed_tokens = processed
            self.queue.append(req)

    def leave(self, count: int) -> None:
        """The head of the queue is admitted."""
        del self.queue[:count]

    def finish(self, ids: array[int], evict: bool) -> None:
        """A sequence enters the cache, at the expense of as many tokens of others if `evict`."""
        slots = self.allocator.alloc(len(ids))
        existing = self.tree.insert(InsertParams(key=RadixKey(ids), value=slots)).prefix_len
        self.allocator.free(slots[:existing])
        if evict:
            self.evict(len(ids) - existing)

    def evict(self, count: int) -> None:
        """As many tokens or more leave the cache."""
        self.tree.evict(EvictParams(num_tokens=count))

    def sort(self) -> float:
        """One `calc_priority`; seconds."""
        start = time.perf_counter()
        self.policy.calc_priority(self.queue, None, PROCESSED_TOKENS)
        return time.perf_counter() - start
