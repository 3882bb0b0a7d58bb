"""The fused slot copy, interpreted: every byte of the arena, and the restore that stands on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.ops import LinearStateCacheOp, RestoreOutcome
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from kernels import ops_for, reference, state_restore
from kernels.launch import Target, recording
from kernels.state_restore import copy_blocks, copy_slots, zero_slots

SHAPE = StateShape(
    num_layers=3,
    num_value_heads=2,
    value_dim=16,
    key_dim=16,
    window_rows=3,
    conv_channels=20,
    window_dtype=torch.float16,
)


def random_bytes(num_slots, slot_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_slots, slot_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("slot_bytes", [16, 64, 16_368, 16_384, 16_400, 40_000])
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([], []), ([1], [2]), ([1, 1, 1], [2, 3, 4]), ([5, 2], [1, 6]), ([3], [7])],
)
def test_a_copy_changes_its_destinations_and_not_a_byte_more(slot_bytes, sources, destinations):
    arena = random_bytes(8, slot_bytes)
    expected = arena.clone()
    copy_slots(arena, sources, destinations)
    reference.copy_slots(expected, sources, destinations)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("width", [4, 2048])  # blocks of 64 bytes, and of two tiles
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([], []), ([1], [2]), ([1, 1, 4], [2, 3, 5]), ([5, 2], [1, 4])],
)
def test_blocks_are_copied_in_all_layers_and_not_a_byte_more(layers, width, sources, destinations):
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(layers, 2, 6, 4, 1, width, generator=generator)
    expected = cache.clone()
    copy_blocks(cache, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    assert torch.equal(cache, expected)
    assert not destinations or not layers or not torch.equal(cache[:, :, 0], cache[:, :, 1])


@pytest.mark.parametrize("slots", [[], [1], [7, 2]])
def test_clearing_changes_its_slots_and_not_a_byte_more(slots):
    arena = random_bytes(8, 16_400)
    expected = arena.clone()
    zero_slots(arena, slots)
    reference.zero_slots(expected, slots)
    assert torch.equal(arena, expected)


@settings(max_examples=20)
@given(st.permutations(range(1, 9)), st.integers(0, 4), st.sampled_from([16, 48, 16_400]))
def test_any_pairs_of_distinct_slots_are_copied(order, num_copies, slot_bytes):
    sources, destinations = order[:num_copies], order[num_copies : 2 * num_copies]
    arena = random_bytes(9, slot_bytes)
    expected = arena.clone()
    copy_slots(arena, sources, destinations)
    reference.copy_slots(expected, sources, destinations)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("programs", [1, 2, 3, 100])
def test_a_persistent_grid_of_any_size_copies_everything(programs, monkeypatch):
    monkeypatch.setattr(state_restore, "_PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(state_restore, "target_of", lambda device: Target("sm_90", programs))
    arena = random_bytes(6, 3 * 16_384 + 16)
    expected = arena.clone()
    copy_slots(arena, [1, 2], [3, 4])
    reference.copy_slots(expected, [1, 2], [3, 4])
    assert torch.equal(arena, expected)


def test_slots_apart_in_a_larger_arena_are_found_by_their_stride():
    arena = random_bytes(6, 4096)
    expected = arena.clone()
    copy_slots(arena[:, :1040], [1], [2])
    expected[2, :1040] = expected[1, :1040]
    assert torch.equal(arena, expected)


def test_any_number_of_pairs_is_one_launch():
    pool = StatePool(20, SHAPE, "meta")
    with recording(Target("sm_90")) as launches:
        pool.copy(list(range(1, 10)), list(range(10, 19)))
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1], [0], "written slot"),
        ([1], [8], "written slot"),
        ([0], [1], "source slot"),
        ([8], [1], "source slot"),
        ([1, 2], [3], "number of sources"),
        ([1, 2], [3, 3], "distinct"),
        ([1, 2], [2, 3], "source and destination"),
    ],
)
def test_bad_slots_are_refused_before_anything_is_copied(sources, destinations, message):
    arena = random_bytes(8, 64)
    before = arena.clone()
    with pytest.raises(ValueError, match=message):
        copy_slots(arena, sources, destinations)
    assert torch.equal(arena, before)


@pytest.mark.parametrize(
    ("arena", "message"),
    [
        (torch.zeros(4, 24, dtype=torch.uint8), "slot bytes"),
        (torch.zeros(4, 72, dtype=torch.uint8)[:, :64], "slot stride"),
        (torch.zeros(4, 64, dtype=torch.int32), "dtype of arena"),
        (torch.zeros(4, 128, dtype=torch.uint8)[:, ::2], "strides of arena"),
        (torch.zeros(4, 128, dtype=torch.uint8)[:, 8:72], "address of arena"),
    ],
)
def test_an_arena_that_16_byte_accesses_do_not_fit_is_refused(arena, message):
    with pytest.raises(ValueError, match=message):
        copy_slots(arena, [1], [2])
    with pytest.raises(ValueError, match=message):
        zero_slots(arena, [1])


def op(live, source=None):
    return LinearStateCacheOp(
        linear_state_id=live,
        restore_requested=source is not None,
        restore_src_slot_id=-1 if source is None else source,
        boundary=64,
    )


def test_restore_reports_every_row_and_copies_all_layers_and_windows():
    pool = StatePool(8, SHAPE, ops=ops_for("cpu", implementation="triton"))
    pool.arena.copy_(random_bytes(8, SHAPE.slot_bytes))
    before = pool.arena.clone()
    has_initial_state = [0, 7, 1, 0]
    ops = [op(1, 5), op(2), op(3, 9), op(4, 5)]
    outcomes = restore_linear_state_slots(pool, ops, has_initial_state)
    R = RestoreOutcome
    assert outcomes == [R.RESTORED, R.NOT_REQUESTED, R.COLD_START, R.RESTORED]
    assert has_initial_state == [1, 7, 0, 1]
    before[1], before[4] = before[5], before[5]
    assert torch.equal(pool.arena, before)


def test_a_bad_batch_is_refused_whole():
    pool = StatePool(8, SHAPE, ops=ops_for("cpu", implementation="triton"))
    pool.arena.copy_(random_bytes(8, SHAPE.slot_bytes))
    before = pool.arena.clone()
    for ops in ([op(1, 5), op(1, 6)], [op(1, 5), op(5, 6)], [op(1, 5), op(8, 6)]):
        with pytest.raises(ValueError, match="slot"):
            restore_linear_state_slots(pool, ops, [0] * len(ops))
        assert torch.equal(pool.arena, before)
