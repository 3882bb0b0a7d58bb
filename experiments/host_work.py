"""What does the bookkeeping of a long prompt cost? Hashes, matches and blocks; no tensors."""

import random
import statistics

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import HashDomain
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import usual
from experiments.timing import seconds


def host_work(num_tokens: int = 32_768, stride: int = 64) -> dict[str, float]:
    """Hash, match and allocate for a long prompt: all of it, then stride by stride."""
    kv = KVBlockManager(num_tokens // stride + 2, HashDomain("kv", stride), chunk_stride=stride)
    linear = LinearStateBlockManager(
        256, HashDomain("linear", stride), placement=usual(512), max_num_seqs=16
    )
    manager = CompositeBlockManager(kv, linear, enable_prefix_caching=True)
    seq = CachedSequence(random.Random(0).randrange(8192) for _ in range(num_tokens))

    def advance() -> None:
        match = manager.match(seq)
        end = seq.num_computed_tokens + stride
        assert manager.allocate(seq, match, end)
        manager.plan_saves(seq, match, end)
        manager.commit(seq, end)

    first = seconds(advance)
    later = [seconds(advance) for _ in range(num_tokens // stride - 1)]
    again = CachedSequence(seq.token_ids)

    def hit() -> None:
        match = manager.match(again)
        assert match.boundary == num_tokens - stride
        assert manager.allocate(again, match, num_tokens)

    manager.release(seq)
    return {
        "first_ms": 1e3 * first,
        "further_stride_median_ms": 1e3 * statistics.median(later),
        "further_stride_max_ms": 1e3 * max(later),
        "full_hit_ms": 1e3 * seconds(hit),
    }
