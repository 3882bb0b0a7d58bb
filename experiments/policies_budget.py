"""What does a cache do with a trace when K/V and states have so many bytes together?

Replayed in blocks and on a grid of 512 tokens, which is the chat trace's own; the coding-agent one
would take hours in its blocks of 64. Three blocks share a page with a state (51.5 MB): 2.3 % of the
K/V of a shared memory is lost to that, which its rows carry.
"""

from collections.abc import Sequence
from typing import Any

from cache.hashing import HashDomain, PrefixHash, Provenance
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import parse_placement
from cache.policy_names import parse_policy
from cache.shared_memory import SharedMemory
from experiments.policies_model import (
    CHECKPOINT_BYTES,
    KV_BYTES_PER_TOKEN,
    PADDING_AND_LIVE,
    Outcome,
    Prompt,
    TracedManager,
    replay,
)

GRID = 512
BUDGETS_GB = (50, 100, 200, 500)
KV_SHARES = (0.5, 0.8, 0.84, 0.9, 0.95)  # 0.84: an engine's own, 8,192 tokens a checkpoint
PLACEMENT = "prompt_end+branch+comb(8192)"
POLICY = "value"
BLOCKS_PER_PAGE = CHECKPOINT_BYTES // (GRID * KV_BYTES_PER_TOKEN)


class TracedKV(KVBlockManager):
    """The real leaf; the keys of a trace are numbers, which no decoded content is filed under."""

    def _find(self, key: PrefixHash, least: Provenance) -> tuple[int, Provenance] | None:
        found = self._index.find(key)
        return None if found is None else (found[0], Provenance.PREFILL)


def split_memory(budget_gb: float, kv_share: float) -> TracedManager:
    """Two pools: `kv_share` of the bytes is K/V, the rest is slots."""
    block_bytes = GRID * KV_BYTES_PER_TOKEN
    num_blocks = int(budget_gb * 1e9 * kv_share) // block_bytes
    num_slots = int(budget_gb * 1e9 - num_blocks * block_bytes) // CHECKPOINT_BYTES
    return _manager(num_blocks + 1, num_slots + 1, None)


def shared_memory(budget_gb: float) -> TracedManager:
    """One budget."""
    num_pages = int(budget_gb * 1e9) // CHECKPOINT_BYTES + 1
    memory = SharedMemory(num_pages, BLOCKS_PER_PAGE)
    return _manager(memory.blocks.num_ids, num_pages, memory)


def _manager(num_blocks: int, num_slots: int, memory: SharedMemory | None) -> TracedManager:
    linear = LinearStateBlockManager(
        max(PADDING_AND_LIVE, num_slots),
        HashDomain("linear", GRID),
        placement=parse_placement(PLACEMENT, GRID),
        max_num_seqs=1,
        policy=parse_policy(POLICY, memory=memory, tokens_per_page=BLOCKS_PER_PAGE * GRID),
        memory=memory,
    )
    kv = TracedKV(num_blocks, HashDomain("kv", GRID), chunk_stride=GRID, memory=memory)
    return TracedManager(kv, linear, enable_prefix_caching=True)


def outcome(prompts: Sequence[Prompt], manager: TracedManager) -> Outcome | None:
    """None if the longest prompt does not fit."""
    longest = max(prompt.num_tokens for prompt in prompts)
    if manager.kv.num_blocks_for(longest) > manager.kv.pool.capacity:
        return None
    return replay(prompts, manager)


def kv_share_at_end(manager: TracedManager) -> float:
    """Of a shared memory: where the split has moved to."""
    assert manager.linear is not None and manager.linear.memory is not None
    memory = manager.linear.memory
    return memory.owners.count(memory.blocks) / (memory.num_pages - 1)


def mark_best(rows: list[dict[str, Any]]) -> None:
    """Of each trace and budget: the split with the least work."""
    splits = [row for row in rows if row["memory"] == "split" and row["budget_gb"] is not None]
    for row in splits:
        same = [r for r in splits if all(r[k] == row[k] for k in ("trace", "budget_gb"))]
        row["best_split"] = row is min(same, key=lambda r: r["work"])
