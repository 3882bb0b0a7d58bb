"""How rows are laid out for the model, as literal tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.ops import LinearStateCacheOp
from engine.batch import ScheduledRow, build_inputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def request(prompt, *, generated=(), blocks=()) -> Sequence:
    seq = Sequence("r", prompt, SamplingParams())
    for token_id in generated:
        seq.append_token(token_id)
    seq.block_table = list(blocks)
    return seq


def row(seq, start, end, slot=1, snapshots=()) -> ScheduledRow:
    return ScheduledRow(seq, start, end, LinearStateCacheOp(slot), snapshots)


DECODE = row(request(range(30, 35), generated=[35], blocks=[4, 6]), 5, 6, slot=8)
MIDDLE = row(request(range(10, 19), blocks=[5, 2, 7]), 4, 7, slot=10)
REPLAY = row(request(range(40, 43), generated=[43, 44, 45], blocks=[9, 1]), 3, 4, slot=6)
WHOLE = row(request([20, 21], blocks=[3]), 0, 2, slot=11)
MIXED = [DECODE, MIDDLE, REPLAY, WHOLE]


def mixed():
    return build_inputs(MIXED, [8, 9, 6, -1], block_size=4)


def test_prefills_come_first_then_decodes():
    inputs = mixed()
    assert inputs.token_ids.tolist() == [14, 15, 16, 20, 21, 35, 43]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 1, 5, 3]
    assert inputs.cu_seqlens.tolist() == [0, 3, 5]
    assert inputs.start_positions.tolist() == [4, 0]
    assert (inputs.num_prefill_tokens, inputs.num_decodes) == (5, 2)


def test_each_token_has_the_flat_kv_row_of_its_block():
    assert mixed().kv_indices.tolist() == [8, 9, 10, 12, 13, 25, 39]


def test_logits_are_in_the_order_of_the_rows_and_not_of_the_layout():
    """trap 10: counts read from reordered batch rows."""
    assert mixed().logit_rows.tolist() == [5, 4]  # of the decode, then of the whole prompt


def test_replayed_tokens_and_unfinished_prompts_need_no_logits():
    assert [each.needs_logits for each in MIXED] == [True, False, False, True]
    assert [each.is_prefill for each in MIXED] == [False, True, False, True]


def test_a_prompt_that_is_prefilled_again_after_a_preemption_needs_no_logits():
    seq = request([1, 2, 3], generated=[4])
    assert not row(seq, 0, 3).needs_logits
    assert row(seq, 3, 4).needs_logits and not row(seq, 3, 4).is_prefill


def test_states_are_read_and_written_where_the_rows_say():
    inputs = mixed()
    assert inputs.prefill_slots.read.tolist() == [9, -1]
    assert inputs.prefill_slots.write.tolist() == [10, 11]
    assert inputs.decode_slots.read.tolist() == [8, 6]
    assert inputs.decode_slots.write.tolist() == [8, 6]


def test_block_tables_go_with_their_rows():
    inputs = mixed()
    assert inputs.prefill_block_tables.tolist() == [[5, 2, 7], [3]]
    assert inputs.decode_block_tables.tolist() == [[4, 6], [9, 1]]
    assert inputs.kv_lens.tolist() == [6, 4]


def test_tables_are_copies_that_later_steps_do_not_change():
    """trap 23: a handle is a view and later changes."""
    seq = request([1, 2], blocks=[3])
    inputs = build_inputs([row(seq, 0, 2)], [-1], block_size=4)
    seq.block_table.append(9)
    assert inputs.prefill_block_tables.tolist() == [[3]]


def test_snapshots_are_mapped_to_the_chunks_that_end_at_their_boundaries():
    long = request(range(400), blocks=range(1, 20))
    short = request(range(70), blocks=range(20, 30))
    rows = [
        row(short, 0, 70, slot=30, snapshots=((64, 9),)),
        DECODE,
        row(long, 64, 320, slot=31, snapshots=((128, 5), (256, 7))),
    ]
    inputs = build_inputs(rows, [-1, 8, 31], block_size=64)
    assert inputs.snapshot_slots.tolist() == [9, -1, 5, -1, 7, -1]


def test_chunks_are_counted_from_the_start_of_each_row_and_a_begun_one_counts():
    rows = [row(request(range(200), blocks=[1, 2, 3, 4]), 0, n) for n in (63, 64, 65)]
    inputs = build_inputs(rows, [-1] * 3, block_size=64)
    assert inputs.snapshot_slots.tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("boundary", [63, 65, 192, 0])
def test_a_snapshot_off_the_kernel_grid_or_outside_the_row_is_an_assertion(boundary):
    bad = row(request(range(128), blocks=[1, 2]), 0, 128, snapshots=((boundary, 5),))
    with pytest.raises(AssertionError, match="off the kernel grid"):
        build_inputs([bad], [-1], block_size=64)


def test_rows_of_a_model_without_recurrent_layers_write_the_padding_slot():
    bare = ScheduledRow(request([1, 2], blocks=[3]), 0, 2, None)
    inputs = build_inputs([bare], [-1], block_size=4)
    assert inputs.prefill_slots.write.tolist() == [0]


def test_a_step_of_decodes_only_has_no_prefill_part():
    inputs = build_inputs([DECODE], [8], block_size=4)
    assert inputs.cu_seqlens.tolist() == [0]
    assert inputs.num_prefill_tokens == 0 and inputs.start_positions.tolist() == []
    assert inputs.snapshot_slots.tolist() == [] and inputs.logit_rows.tolist() == [0]
    assert inputs.token_ids.tolist() == [35]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_rows_are_packed_without_gaps_as_int64(lengths):
    rows = [row(request([7] * n, blocks=[1] * 5), 0, n) for n in lengths]
    inputs = build_inputs(rows, [-1] * len(rows), block_size=4)
    for packed in (inputs.token_ids, inputs.positions, inputs.kv_indices.tensor):
        assert packed.shape == (sum(lengths),) and packed.dtype == torch.int64
    for ids in (inputs.cu_seqlens, inputs.prefill_slots.read, inputs.snapshot_slots):
        assert ids.tensor.dtype == inputs.logit_rows.dtype == torch.int64
        assert ids.tensor.tolist() == ids.tolist()
