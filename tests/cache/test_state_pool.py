"""The memory of the states, and the restore that runs before a forward pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.ops import NO_SLOT, LinearStateCacheOp, RestoreOutcome
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots

SHAPE = StateShape(
    num_layers=2,
    num_value_heads=3,
    value_dim=4,
    key_dim=5,
    window_rows=3,
    conv_channels=7,
    window_dtype=torch.bfloat16,
)
COLD, RESTORED, NOT_REQUESTED = RestoreOutcome


def poisoned(num_slots: int = 6) -> StatePool:
    """Every byte of the arena is NaN in both views, and differs from slot to slot."""
    pool = StatePool(num_slots, SHAPE)
    pool.arena.view(torch.int16).fill_(0x7FC0)  # NaN as bfloat16, and as float32 with any low half
    pool.arena[:, 0::4] = torch.arange(num_slots, dtype=torch.uint8)[:, None] + 1
    assert pool.states.isnan().all()
    return pool


def wants(live: int, source: int, boundary: int = 64) -> LinearStateCacheOp:
    return LinearStateCacheOp(live, True, source, boundary)


def test_a_slot_is_one_contiguous_span_with_all_layers_states_and_windows():
    pool = StatePool(4, SHAPE)
    pool.states[2] = 1.0
    pool.windows[2] = 1.0
    changed = pool.arena.ne(0).any(1).tolist()
    assert changed == [False, False, True, False]
    assert pool.states.shape == (4, 2, 3, 4, 5) and pool.states.dtype == torch.float32
    assert pool.windows.shape == (4, 2, 3, 7) and pool.windows.dtype == torch.bfloat16
    assert int(pool.arena[2].view(torch.float32).eq(1.0).sum()) == 2 * 3 * 4 * 5


def test_states_and_windows_of_a_slot_do_not_overlap():
    pool = StatePool(2, SHAPE)
    pool.windows.fill_(float("nan"))
    assert not pool.states.isnan().any()
    pool.states.fill_(3.0)
    assert pool.windows.isnan().all()


SIZES = st.integers(1, 5)


@given(
    st.builds(
        StateShape,
        SIZES,
        SIZES,
        SIZES,
        SIZES,
        SIZES,
        SIZES,
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
)
def test_offsets_and_slots_are_aligned_and_nothing_is_cut_off(shape):
    assert shape.windows_offset % 64 == 0 and shape.slot_bytes % 64 == 0
    assert shape.windows_offset >= shape.states_bytes > shape.windows_offset - 64
    assert shape.slot_bytes >= shape.windows_offset + shape.windows_bytes > shape.slot_bytes - 64
    pool = StatePool(2, shape)
    assert pool.states.stride()[-1] == pool.windows.stride()[-1] == 1
    assert pool.states[0].is_contiguous() and pool.windows[0].is_contiguous()
    assert pool.states[0].numel() * 4 == shape.states_bytes
    assert pool.windows[0].numel() * shape.window_dtype.itemsize == shape.windows_bytes


def test_a_slot_beyond_2_to_the_31_elements_lies_where_its_id_says():
    """trap 24: index arithmetic in 32 bits; slot id * stride beyond 2**31 elements."""
    shape = StateShape(24, 32, 128, 128, 3, 8192, torch.bfloat16)
    pool = StatePool(400, shape, device="meta")
    assert 399 * shape.slot_bytes // 4 > 2**31
    state, window = pool.states[399], pool.windows[399]
    assert state.storage_offset() * 4 == 399 * shape.slot_bytes
    assert window.storage_offset() * 2 == 399 * shape.slot_bytes + shape.windows_offset
    assert state[-1, -1, -1, -1].storage_offset() * 4 + 4 == (
        399 * shape.slot_bytes + shape.states_bytes
    )
    assert pool.arena[399].storage_offset() == 399 * shape.slot_bytes


def test_a_restore_copies_states_and_windows_of_all_layers_and_touches_no_other_slot():
    """trap 7: the conv window is restored together with the state."""
    pool = poisoned()
    before = pool.arena.clone()
    flags = [0]
    assert restore_linear_state_slots(pool, [wants(2, 5)], flags) == [RESTORED]
    assert flags == [1]
    before[2] = before[5]
    assert torch.equal(pool.arena, before)


def test_rows_without_a_request_are_untouched_and_keep_their_value():
    pool = poisoned()
    before = pool.arena.clone()
    ops = [LinearStateCacheOp(1), LinearStateCacheOp(2), LinearStateCacheOp(3, False, 99, 64)]
    flags = [0, 1, 7]
    assert restore_linear_state_slots(pool, ops, flags) == [NOT_REQUESTED] * 3
    assert flags == [0, 1, 7]
    assert torch.equal(pool.arena, before)


@pytest.mark.parametrize("source", [NO_SLOT, 0, 6, 7, 2**31 - 1, -2])
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "redirect"])
def test_a_missing_source_or_one_out_of_range_starts_cold_and_copies_nothing(source, copy):
    pool = poisoned()
    before = pool.arena.clone()
    flags = [1]
    outcomes = restore_linear_state_slots(pool, [wants(1, source)], flags, copy=copy)
    assert (outcomes, flags) == ([COLD], [0])
    assert torch.equal(pool.arena, before)


def test_each_row_has_its_own_outcome():
    pool = poisoned()
    before = pool.arena.clone()
    ops = [wants(1, 5), LinearStateCacheOp(2), wants(3, NO_SLOT), wants(4, 5)]
    flags = [0, 1, 1, 0]
    outcomes = restore_linear_state_slots(pool, ops, flags)
    assert outcomes == [RESTORED, NOT_REQUESTED, COLD, RESTORED]
    assert flags == [1, 1, 0, 1]
    before[1] = before[4] = before[5]
    assert torch.equal(pool.arena, before)


def test_all_valid_rows_are_copied_in_one_call(monkeypatch):
    pool = poisoned()
    calls = []
    monkeypatch.setattr(pool, "copy", lambda sources, lives: calls.append((sources, lives)))
    restore_linear_state_slots(pool, [wants(1, 5), LinearStateCacheOp(2), wants(3, 4)], [0] * 3)
    assert calls == [([5, 4], [1, 3])]


def test_a_redirect_has_the_same_outcomes_and_copies_nothing(monkeypatch):
    pool = poisoned()
    before = pool.arena.clone()
    monkeypatch.setattr(pool, "copy", lambda *_: pytest.fail("copied"))
    flags = [0, 0]
    outcomes = restore_linear_state_slots(pool, [wants(1, 5), wants(2, 9)], flags, copy=False)
    assert (outcomes, flags) == ([RESTORED, COLD], [1, 0])
    assert torch.equal(pool.arena, before)


def test_a_row_whose_source_is_its_own_live_slot_is_restored_already():
    pool = poisoned()
    before = pool.arena.clone()
    flags = [0]
    assert restore_linear_state_slots(pool, [wants(3, 3)], flags) == [RESTORED]
    assert flags == [1] and torch.equal(pool.arena, before)


@pytest.mark.parametrize("bad", [5, 4], ids=["the last row", "a row in the middle"])
def test_a_failed_copy_of_one_row_harms_no_other(monkeypatch, bad):
    """trap 20: fail the copy of one row in a batch of four."""
    pool = poisoned(9)
    before = pool.arena.clone()
    real = pool.copy

    def broken(sources, lives):
        if bad in sources:
            raise RuntimeError("device error")
        real(sources, lives)

    monkeypatch.setattr(pool, "copy", broken)
    ops = [wants(1, 8), wants(2, 7), wants(3, 4), wants(6, 5)]
    flags = [0] * 4
    outcomes = restore_linear_state_slots(pool, ops, flags)
    assert outcomes == [COLD if op.restore_src_slot_id == bad else RESTORED for op in ops]
    assert flags == [int(op.restore_src_slot_id != bad) for op in ops]
    for op in ops:
        if op.restore_src_slot_id != bad:
            before[op.linear_state_id] = before[op.restore_src_slot_id]
    assert torch.equal(pool.arena, before)


def test_an_error_that_is_not_the_device_s_is_not_swallowed(monkeypatch):
    pool = poisoned()

    def misused(*_):
        raise ValueError("misuse")

    monkeypatch.setattr(pool, "copy", misused)
    with pytest.raises(ValueError, match="misuse"):
        restore_linear_state_slots(pool, [wants(1, 2)], [0])


REFUSED = {
    "too few flags": ([wants(1, 5), wants(2, 5)], [0], "2 ops but 1 has_initial_state"),
    "too many flags": ([wants(1, 5)], [0, 0], "1 ops but 2 has_initial_state"),
    "live slot 0": ([wants(1, 5), wants(0, 5)], [0, 0], r"live slot.*\[1, 6\), got 0"),
    "live slot beyond the pool": ([wants(1, 5), wants(6, 5)], [0, 0], "got 6"),
    "negative live slot": ([wants(1, 5), LinearStateCacheOp(-1)], [0, 0], "got -1"),
    "two writers of a slot": ([wants(1, 5), LinearStateCacheOp(1)], [0, 0], "distinct"),
    "a source that a later row writes": ([wants(1, 2), wants(2, 5)], [0, 0], "slot 2 of row 0"),
    "a source that an earlier row writes": ([wants(1, 5), wants(2, 1)], [0, 0], "slot 1 of row 1"),
    "a source that a row without request writes": (
        [wants(1, 2), LinearStateCacheOp(2)],
        [0, 0],
        "slot 2 of row 0",
    ),
}


@pytest.mark.parametrize(("ops", "flags", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "redirect"])
def test_a_bad_batch_is_refused_before_anything_is_copied(ops, flags, words, copy):
    """trap 16: a slot being read in a step is given to another row as its write slot."""
    pool = poisoned()
    before, flags = pool.arena.clone(), list(flags)
    with pytest.raises(ValueError, match=words):
        restore_linear_state_slots(pool, ops, flags, copy=copy)
    assert torch.equal(pool.arena, before)
    assert flags == [0] * len(flags)


def test_two_rows_may_read_one_source():
    pool = poisoned()
    ops = [wants(1, 5), wants(2, 5)]
    assert restore_linear_state_slots(pool, ops, [0, 0]) == [RESTORED, RESTORED]
    assert torch.equal(pool.arena[1], pool.arena[2])


def test_an_empty_batch_restores_nothing():
    assert restore_linear_state_slots(poisoned(), [], []) == []
