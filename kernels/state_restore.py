"""Copies and clears whole slots of the state pool in Triton: all layers, one launch. So K/V blocks.

A slot is one contiguous span of the arena, so restoring any number of (source, destination) pairs
is one flat copy: a persistent grid walks tiles of 16 KiB, each thread with eight 16-byte loads in
flight. Reads and writes go past the first-level cache: a restored slot is far larger.

Bytes: 2 x slot_bytes a pair (1 x to clear); HBM bandwidth is the roof, 21.5 us for the 49 MiB of a
Qwen3.5-9B slot at 4.8 TB/s.
"""

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.ids import Ids
from kernels.launch import cdiv, launch, require_runnable, target_of
from kernels.slot_rules import require

_TILE_WORDS = 4096
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _move(
    p_arena,
    p_slots,
    num_pairs,
    num_tiles,
    slot_words: tl.constexpr,
    stride_slot: tl.constexpr,
    COPY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tile i is tile i % tiles_per_slot of pair i // tiles_per_slot. p_slots: destinations, then
    (if COPY) their sources."""
    tiles_per_slot: tl.constexpr = (slot_words + TILE - 1) // TILE
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_pair = i // tiles_per_slot
        o_word = (i % tiles_per_slot) * TILE + tl.arange(0, TILE)
        m = o_word < slot_words
        p_to = p_arena + tl.load(p_slots + i_pair) * stride_slot + o_word
        b = tl.zeros([TILE], tl.int32)
        if COPY:
            p_from = p_arena + tl.load(p_slots + num_pairs + i_pair) * stride_slot + o_word
            b = tl.load(p_from, mask=m, other=0, cache_modifier=".cg")  # wide
        tl.store(p_to, b, mask=m, cache_modifier=".cs")  # wide


def _run(arena: torch.Tensor, destinations: list[int], sources: list[int]) -> None:
    for name, size in (("slot bytes", arena.shape[1]), ("slot stride", arena.stride(0))):
        require(size % 16 == 0, name, "a multiple of 16", size)
    require(arena.data_ptr() % 16 == 0, "address of arena", "a multiple of 16", arena.data_ptr())
    require_runnable(arena.device)
    words = arena.view(torch.int32)
    slots = Ids([*destinations, *sources], arena.device)  # one upload
    num_tiles = len(destinations) * cdiv(words.shape[1], _TILE_WORDS)
    launch(
        _move,
        (min(num_tiles, target_of(arena.device).num_processors * _PROGRAMS_PER_PROCESSOR),),
        words,
        slots.tensor,
        len(destinations),
        num_tiles,
        slot_words=words.shape[1],
        stride_slot=words.stride(0),
        COPY=bool(sources),
        TILE=_TILE_WORDS,
        num_warps=4,
        num_stages=1,
    )


def copy_slots(arena: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole slots of arena [num_slots, slot_bytes] uint8. Sources may repeat; destinations are
    distinct and none is a source, so the order of the copies does not matter."""
    validate.slot_copies(arena, sources, destinations)
    _run(arena, destinations, sources)


def copy_blocks(kv_cache: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole K/V blocks, all layers, inside kv_cache [layers, 2, num_blocks, ...]: the block of
    each layer, K and V, is moved as a slot of its own, all of them in one launch."""
    copy_slots(*validate.block_copies(kv_cache, sources, destinations))


def zero_slots(arena: torch.Tensor, slots: list[int]) -> None:
    """Zero whole slots of arena [num_slots, slot_bytes] uint8."""
    validate.zeroed_slots(arena, slots)
    _run(arena, slots, [])
