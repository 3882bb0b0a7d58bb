"""Short ways to build managers and sequences, and to drive one row through a step.

The numbers are those of the worked timeline in the design: stride 4, block 2.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.eviction import EvictionPolicy
from cache.hashing import HashDomain, Namespace
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.ops import LinearStateCacheOp
from cache.placement import Placement, combined
from cache.shared_memory import SharedMemory

STRIDE = 4
BLOCK = 2


class Row(NamedTuple):
    """One sequence computes its tokens [start, end)."""

    seq: CachedSequence
    start: int
    end: int
    op: LinearStateCacheOp | None
    snapshots: tuple[tuple[int, int], ...]


def sequence(
    token_ids: Iterable[int],
    *,
    salt: str = "",
    exact: bool = True,
    save_points: Iterable[int] = (),
) -> CachedSequence:
    return CachedSequence(
        token_ids, namespace=Namespace(cache_salt=salt), exact=exact, save_points=save_points
    )


def kv_leaf(
    num_blocks: int = 64,
    *,
    block_size: int = BLOCK,
    stride: int | None = None,
    memory: SharedMemory | None = None,
) -> KVBlockManager:
    domain = HashDomain("kv", block_size)
    return KVBlockManager(num_blocks, domain, chunk_stride=stride or block_size, memory=memory)


def linear_leaf(
    num_slots: int = 16,
    *,
    stride: int = STRIDE,
    every: int = STRIDE,
    max_num_seqs: int = 4,
    caching: bool = True,
    placement: Placement | None = None,
    policy: EvictionPolicy | None = None,
    num_scratch: int = 0,
    memory: SharedMemory | None = None,
) -> LinearStateBlockManager:
    return LinearStateBlockManager(
        num_slots,
        HashDomain("linear", stride),
        placement=combined(every) if placement is None else placement,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        policy=policy,
        num_scratch=num_scratch,
        memory=memory,
    )


def composite(
    *,
    num_blocks: int = 64,
    num_slots: int = 16,
    block_size: int = BLOCK,
    stride: int = STRIDE,
    every: int = STRIDE,
    max_num_seqs: int = 4,
    caching: bool = True,
    recurrent: bool = True,
    placement: Placement | None = None,
    policy: EvictionPolicy | None = None,
    num_scratch: int = 0,
    memory: SharedMemory | None = None,
    whole_prompts: bool = False,
) -> CompositeBlockManager:
    """memory: one budget for both; num_blocks and num_slots say nothing then."""
    if memory is not None:
        num_blocks, num_slots = memory.blocks.num_ids, memory.num_pages
    linear = None
    if recurrent:
        linear = linear_leaf(
            num_slots,
            stride=stride,
            every=every,
            max_num_seqs=max_num_seqs,
            caching=caching,
            placement=placement,
            policy=policy,
            num_scratch=num_scratch,
            memory=memory,
        )
    return CompositeBlockManager(
        kv_leaf(num_blocks, block_size=block_size, stride=stride, memory=memory),
        linear,
        enable_prefix_caching=caching,
        whole_prompts=whole_prompts,
    )


def schedule(manager: CompositeBlockManager, seq: CachedSequence, end: int) -> Row | None:
    """Match, allocate and plan one row that runs to `end`, as the scheduler does; None: no room."""
    match = manager.match(seq)
    if not manager.allocate(seq, match, end):
        return None
    if seq.in_prefill:
        manager.plan_saves(seq, match, end)
    op = None if manager.linear is None else manager.linear.cache_op(seq)
    return Row(seq, seq.num_computed_tokens, end, op, tuple(seq.snapshots))


def run(manager: CompositeBlockManager, seq: CachedSequence, end: int) -> Row:
    """One row scheduled and committed."""
    row = schedule(manager, seq, end)
    assert row is not None, "no room for the row"
    manager.commit(seq, end)
    return row


def prefilled(
    manager: CompositeBlockManager, token_ids: Iterable[int], *ends: int, salt: str = ""
) -> CachedSequence:
    """A sequence whose prompt was computed in steps that end at `ends` and at its end."""
    seq = sequence(token_ids, salt=salt)
    for end in (*ends, seq.num_prompt_tokens):
        run(manager, seq, end)
    return seq


def served(
    manager: CompositeBlockManager, token_ids: Iterable[int], *ends: int, salt: str = ""
) -> None:
    """A request that was prefilled like `prefilled` and has left."""
    manager.release(prefilled(manager, token_ids, *ends, salt=salt))


def linear_step(
    linear: LinearStateBlockManager, seq: CachedSequence, end: int
) -> tuple[LinearStateCacheOp, list[tuple[int, int]]]:
    """One step of the LINEAR leaf alone, committed: what the worker is told, and the snapshots."""
    linear.allocate_shared(seq)
    assert linear.allocate_for_sequence(seq)
    if seq.in_prefill:
        linear.plan_snapshots(seq, seq.num_computed_tokens, end)
    op, snapshots = linear.cache_op(seq), list(seq.snapshots)
    seq.num_computed_tokens = end
    linear.commit(seq)
    linear.check()
    return op, snapshots


def checkpoints(linear: LinearStateBlockManager, seq: CachedSequence) -> dict[int, int]:
    """boundary -> slot of every state that could be restored for this prompt."""
    boundaries = linear.allocate_shared(seq)
    return {boundary: linear._checkpoint(seq, boundary).slot_id for boundary in boundaries}
