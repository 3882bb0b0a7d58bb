"""What decode steps wrote is kept apart from what prefill wrote, for those who ask for it.

Stride 4, block 2, a state at every stride.
"""

import pytest

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager, MissReason
from cache.hashing import Provenance
from tests.cache.builders import composite, run, schedule, sequence, served

PROMPT = [1, 2, 3, 4, 5, 6]
ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


def answered(
    manager: CompositeBlockManager, prompt: list[int], answer: list[int], *, exact: bool = False
) -> CachedSequence:
    """A sequence whose prompt was prefilled at once and whose answer was decoded, but its last."""
    seq = sequence(prompt, exact=exact)
    run(manager, seq, len(prompt))
    for token in answer[:-1]:
        seq.append_token(token)
        run(manager, seq, seq.num_tokens)
    seq.append_token(answer[-1])
    return seq


def turn(
    manager: CompositeBlockManager, tokens: list[int], *, exact: bool
) -> tuple[int, str | None]:
    """Where a prompt would resume, and why not later."""
    seq = sequence(tokens, exact=exact)
    match = manager.match(seq)
    return match.boundary, manager.limit_reason(seq, match)


NEXT_TURN = [*PROMPT, *ANSWER, 7, 7, 7]


def test_the_next_turn_resumes_in_the_answer_if_it_does_not_ask_for_exact_bits():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    assert turn(manager, NEXT_TURN, exact=False)[0] == 12
    assert turn(manager, NEXT_TURN, exact=True) == (4, MissReason.DECODE_ONLY)


def test_an_exact_answer_leaves_nothing_that_decode_steps_wrote():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER, exact=True))
    assert manager.linear.num_saves == 1 and len(manager.linear.cache) == 1
    assert turn(manager, NEXT_TURN, exact=False) == (4, MissReason.UNSEEN)
    assert manager.kv.reach(sequence(NEXT_TURN, exact=False)) == 4


def test_an_answer_keeps_its_latest_state_only():
    manager = composite()
    seq = answered(manager, PROMPT, [*ANSWER, *ANSWER])
    assert sorted(
        manager.linear.allocate_shared(sequence([*PROMPT, *ANSWER, *ANSWER], exact=False))
    ) == [4, 20]
    manager.check([seq])
    manager.release(seq)
    assert len(manager.linear.cache) == 2


def test_the_latest_state_of_an_answer_takes_the_slot_of_the_one_before():
    manager = composite(
        num_slots=5, max_num_seqs=1
    )  # live, prompt end, one decode state, one spare
    seq = answered(manager, PROMPT, [*ANSWER, *ANSWER, *ANSWER])
    assert manager.linear.saves_skipped == {} and manager.linear.pool.num_evictions == 0
    manager.check([seq])


def test_rows_of_the_stride_a_prompt_ends_in_are_decoded_ones_to_a_longer_prompt():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    assert manager.kv.reach(sequence(NEXT_TURN)) == 4
    assert manager.kv.reach(sequence(NEXT_TURN, exact=False)) == 12


def test_what_is_computed_from_a_decode_state_is_no_prefill_state():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    longer = [*NEXT_TURN, *range(20, 30)]
    heir = sequence(longer, exact=False)
    assert run(manager, heir, len(longer)).start == 12
    assert heir.provenance is Provenance.DECODE
    manager.release(heir)
    assert turn(manager, [*longer, 1], exact=False)[0] == 24
    assert turn(manager, [*longer, 1], exact=True) == (4, MissReason.DECODE_ONLY)
    assert manager.kv.reach(sequence([*longer, 1])) == 4


def test_a_sequence_that_reuses_only_prefill_states_leaves_prefill_states():
    manager = composite()
    served(manager, PROMPT)
    longer = [*PROMPT, *range(20, 30)]
    seq = sequence(longer, exact=False)
    assert run(manager, seq, len(longer)).start == 4
    assert seq.provenance is Provenance.PREFILL
    manager.release(seq)
    assert turn(manager, [*longer, 1], exact=True)[0] == 16


def test_a_sequence_that_starts_again_without_decode_states_is_exact_again():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    seq = sequence(NEXT_TURN, exact=False)
    run(manager, seq, len(NEXT_TURN))
    assert seq.provenance is Provenance.DECODE
    manager.discard(seq)
    manager.reset([])
    assert run(manager, seq, len(NEXT_TURN)).start == 0
    manager.release(seq)
    assert turn(manager, NEXT_TURN, exact=True)[0] == 16


def test_a_refused_allocation_does_not_make_a_sequence_inexact():
    manager = composite(num_blocks=11)
    manager.release(answered(manager, PROMPT, ANSWER))
    holder = sequence(range(100, 106))
    run(manager, holder, 6)
    seq = sequence(NEXT_TURN, exact=False)
    assert manager.match(seq).boundary == 12
    assert schedule(manager, seq, len(NEXT_TURN)) is None
    assert seq.provenance is Provenance.PREFILL
    manager.check([holder, seq])


def test_a_prefill_state_is_taken_before_the_decode_state_of_the_same_prefix():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    served(manager, NEXT_TURN)  # exact: it prefills all after 4 again and publishes it beside
    seq = sequence(NEXT_TURN[:13], exact=False)
    assert run(manager, seq, 13).start == 12
    assert seq.provenance is Provenance.PREFILL


def test_an_answer_that_was_prefilled_before_is_not_saved_again():
    manager = composite()
    served(manager, NEXT_TURN)
    saves = manager.linear.num_saves
    manager.release(answered(manager, PROMPT, ANSWER))
    assert manager.linear.num_saves == saves
    assert manager.linear.saves_skipped["duplicate"] > 0


def test_forgetting_a_prompt_takes_its_decode_states_and_blocks_out_too():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER)
    manager.forget(seq)
    manager.release(seq)
    assert not manager.linear.cache.slot_ids() and not manager.kv._index.ids()


def test_an_answer_that_ends_on_the_grid_is_saved_as_its_sequence_leaves():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER[:7])  # computed: 12 tokens
    assert seq.num_computed_tokens == 12 and seq.pending_save is not None
    assert turn(manager, NEXT_TURN, exact=False)[0] < 12
    manager.release(seq)
    assert turn(manager, NEXT_TURN, exact=False)[0] == 12


def test_a_model_without_recurrent_layers_shares_an_answer_in_the_same_way():
    manager = composite(recurrent=False)
    manager.release(answered(manager, PROMPT, ANSWER))
    assert turn(manager, NEXT_TURN, exact=False)[0] == 12
    assert turn(manager, NEXT_TURN, exact=True)[0] == 4


# ---- save points


def test_a_save_point_is_saved_in_a_prefill_beside_the_usual_ones():
    manager = composite(every=400)
    seq = sequence(range(30), save_points=[8])
    run(manager, seq, 30)
    assert manager.linear.allocate_shared(seq) == [8, 28]


def test_a_sequence_that_is_sent_away_can_save_where_it_is():
    manager = composite(every=400)
    seq = sequence(range(30))
    run(manager, seq, 12)
    manager.linear.save_here(seq)
    manager.release(seq)
    assert manager.linear.allocate_shared(sequence(range(30))) == [12]


@pytest.mark.parametrize("computed", [0, 30])
def test_nothing_is_saved_off_the_grid(computed: int):
    manager = composite(every=400)
    seq = sequence(range(30))
    if computed:
        run(manager, seq, computed)
    manager.linear.save_here(seq)
    assert seq.pending_save is None


# ---- why not later


def test_a_prompt_that_resumes_at_its_last_boundary_has_no_reason():
    manager = composite()
    served(manager, range(30))
    assert turn(manager, list(range(30)), exact=True) == (28, None)


def test_a_miss_has_its_miss_reason():
    manager = composite()
    assert turn(manager, list(range(30)), exact=True) == (0, MissReason.NO_CHECKPOINT)
    assert turn(manager, list(range(4)), exact=True) == (0, MissReason.BELOW_STRIDE)


def test_tokens_that_nobody_sent_before_are_unseen():
    manager = composite()
    served(manager, range(10))
    assert turn(manager, [*range(10), *range(50, 60)], exact=True) == (8, MissReason.UNSEEN)


def test_kv_without_a_state_is_no_checkpoint():
    manager = composite(every=8)
    served(manager, range(22))  # states at 8, 16 and 20
    assert turn(manager, [*range(15), *range(50, 60)], exact=True) == (8, MissReason.NO_CHECKPOINT)


def test_a_later_state_that_is_gone_is_evicted():
    manager = composite()
    served(manager, range(22))
    seq = sequence(range(22))
    manager.linear.allocate_shared(seq)
    for boundary in (16, 20):
        slot = manager.linear._checkpoint(seq, boundary).slot_id
        manager.linear.cache.forget(slot)
        manager.linear.pool.unpublish(slot)
    assert turn(manager, list(range(22)), exact=True) == (12, MissReason.EVICTED)


def test_a_later_state_without_its_kv_is_kv_shorter():
    manager = composite()
    served(manager, range(22))
    seq = sequence(range(22))
    manager.kv.reach(seq)
    id_, _ = manager.kv._index.find(seq.block_hashes[7])
    manager.kv._index.forget(id_)
    manager.kv.pool.unpublish(id_)
    assert turn(manager, list(range(22)), exact=True) == (12, MissReason.KV_SHORTER)
