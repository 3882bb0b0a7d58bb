"""What decode steps wrote is kept apart from what prefill wrote, for those who ask for it.

Stride 4, block 2, a state at every stride.
"""

import pytest

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager, MissReason
from cache.hashing import Provenance
from cache.linear_state_prefix_cache import Checkpoint
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


def _decode(manager: CompositeBlockManager, seq: CachedSequence, num_computed: int) -> None:
    while seq.num_computed_tokens < num_computed:
        if seq.num_tokens == seq.num_computed_tokens:
            seq.append_token(5)
        run(manager, seq, seq.num_computed_tokens + 1)


def turn(
    manager: CompositeBlockManager, tokens: list[int], *, exact: bool
) -> tuple[int, str | None]:
    """Where a prompt would resume, and why not later."""
    seq = sequence(tokens, exact=exact)
    match = manager.match(seq)
    return match.boundary, manager.limit_reason(seq, match)


NEXT_TURN = [*PROMPT, *ANSWER, 7, 7, 7]


def _state(manager: CompositeBlockManager, boundary: int, *, exact: bool) -> Checkpoint:
    """The best state of the next turn that there is at a boundary."""
    seq = sequence(NEXT_TURN, exact=exact)
    manager.linear.allocate_shared(seq)
    return manager.linear._checkpoint(seq, boundary)


def test_the_next_turn_resumes_in_the_answer_if_it_does_not_ask_for_exact_bits():
    """trap 30"""
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
    served(manager, NEXT_TURN)  # exact: up to 16, and what the heir computed after it is not
    assert manager.kv.reach(sequence([*longer, 1])) == 16


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


@pytest.mark.parametrize("dropped", [[4], [4, 5]])
def test_a_prefill_state_over_decoded_kv_is_no_prefill_any_more(dropped: list[int]):
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    served(manager, NEXT_TURN)
    seq = sequence([*NEXT_TURN[:13], 30, 31, 32], exact=False)
    manager.kv.reach(seq)
    for index in dropped:  # the prefilled blocks of the answer; the decoded ones are left
        id_, _ = manager.kv._index.find(seq.block_hashes[index])
        manager.kv._index.forget(id_)
        manager.kv.pool.unpublish(id_)
    assert _state(manager, 12, exact=False).provenance is Provenance.PREFILL
    assert run(manager, seq, 16).start == 12
    assert seq.provenance is Provenance.DECODE


def test_a_decode_state_over_prefilled_kv_is_no_prefill():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    served(manager, NEXT_TURN)
    manager.linear.quarantine(_state(manager, 12, exact=True).slot_id)
    seq = sequence([*NEXT_TURN[:13], 30, 31, 32], exact=False)
    assert manager.kv.reach(sequence(NEXT_TURN)) == 16
    assert run(manager, seq, 16).start == 12
    assert seq.provenance is Provenance.DECODE


def test_an_answer_that_was_prefilled_before_leaves_no_block_beside_it():
    manager = composite()
    served(manager, NEXT_TURN)  # 17 tokens
    assert len(manager.kv._index.ids()) == 8
    manager.release(answered(manager, PROMPT, ANSWER))
    assert len(manager.kv._index.ids()) == 8


def test_decoded_blocks_that_others_hold_cost_no_room():
    manager = composite()
    answered(manager, PROMPT, ANSWER)  # it stays
    counts = []
    for exact in (False, True):
        seq = sequence(NEXT_TURN, exact=exact)
        counts.append(manager.kv.num_in_use(seq, manager.kv.reach(seq)))
    assert counts == [6, 2]


def test_after_a_reset_a_sequence_is_exact_again_and_has_left_no_state():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    seq = sequence(NEXT_TURN, exact=False)
    run(manager, seq, 17)
    for token in range(4):
        seq.append_token(token)
        run(manager, seq, seq.num_tokens)
    assert seq.provenance is Provenance.DECODE and seq.decode_checkpoint is not None
    manager.reset([seq])
    assert seq.provenance is Provenance.PREFILL and seq.decode_checkpoint is None


def test_the_state_at_the_very_end_of_a_prompt_outlives_those_of_its_answer():
    manager = composite()
    seq = answered(manager, list(range(8)), [*ANSWER, 19])
    assert seq.num_computed_tokens == 16
    later = sequence([*seq.token_ids, 1], exact=False)
    assert manager.linear.allocate_shared(later) == [4, 8, 12]
    assert manager.linear.allocate_shared(sequence(range(9))) == [4, 8]


def test_an_answer_whose_last_state_was_evicted_goes_on():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER[:4])
    manager.linear.quarantine(_state(manager, 8, exact=False).slot_id)
    _decode(manager, seq, 13)
    assert manager.linear.allocate_shared(sequence([*seq.token_ids, 1], exact=False)) == [4, 12]


def test_a_checkpoint_that_took_over_the_slot_of_an_answer_s_last_state_stays():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER[:4])
    slot = _state(manager, 8, exact=False).slot_id
    manager.linear.quarantine(slot)
    for first in range(100, 2000, 100):
        if slot not in manager.linear.cache.slot_ids():
            served(manager, range(first, first + 5))
    assert slot in manager.linear.cache.slot_ids()
    answered(manager, PROMPT, ANSWER[:4])  # files its state of 8 tokens in another slot
    assert manager.linear.allocate_shared(sequence(NEXT_TURN, exact=False)) == [4, 8]
    _decode(manager, seq, 13)
    assert slot in manager.linear.cache.slot_ids()


def test_the_last_state_of_an_answer_is_there_while_it_is_replayed():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER)
    manager.release(seq)  # preempted
    run(manager, seq, 6)
    _decode(manager, seq, 9)
    assert turn(manager, NEXT_TURN, exact=False)[0] == 12


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


def test_a_sequence_that_is_sent_away_at_the_end_of_its_prompt_saves_it():
    manager = composite(every=400)
    seq = sequence(range(12))
    run(manager, seq, 12)
    manager.linear.save_here(seq)
    manager.release(seq)
    assert manager.linear.allocate_shared(sequence(range(30))) == [8, 12]


def test_an_exact_answer_is_not_saved_when_it_is_sent_away():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER[:3], exact=True)
    assert seq.num_computed_tokens == 8
    manager.linear.save_here(seq)
    assert seq.pending_save is None


def test_nothing_is_saved_here_with_caching_off():
    manager = composite(caching=False)
    seq = sequence(range(30))
    run(manager, seq, 12)
    manager.linear.save_here(seq)
    assert seq.pending_save is None


# ---- why not later


def test_a_prompt_that_resumes_at_its_last_boundary_has_no_reason():
    manager = composite()
    served(manager, range(30))
    assert turn(manager, list(range(30)), exact=True) == (28, None)
    assert turn(manager, list(range(28)), exact=True) == (24, None)  # its final token is computed


def test_a_miss_has_its_miss_reason():
    manager = composite()
    assert turn(manager, list(range(30)), exact=True) == (0, MissReason.NO_CHECKPOINT)
    assert turn(manager, list(range(4)), exact=True) == (0, MissReason.BELOW_STRIDE)


def test_tokens_that_nobody_sent_before_are_unseen():
    manager = composite()
    served(manager, range(10))
    assert turn(manager, [*range(10), *range(50, 60)], exact=True) == (8, MissReason.UNSEEN)


@pytest.mark.parametrize("shared", [12, 15])
def test_kv_without_a_state_is_no_checkpoint(shared: int):
    manager = composite(every=8)
    served(manager, range(22))  # states at 8, 16 and 20
    prompt = [*range(shared), *range(50, 60)]
    assert turn(manager, prompt, exact=True) == (8, MissReason.NO_CHECKPOINT)


def test_an_earlier_state_that_is_gone_is_no_reason():
    manager = composite()
    served(manager, range(10))
    seq = sequence(range(10))
    manager.linear.allocate_shared(seq)
    manager.linear.quarantine(manager.linear._checkpoint(seq, 4).slot_id)
    assert turn(manager, [*range(10), *range(50, 60)], exact=True) == (8, MissReason.UNSEEN)


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


# ---- found by breaking it


def test_an_answer_keeps_its_state_where_there_is_no_room_for_the_next_one():
    manager = composite(num_slots=6, max_num_seqs=3)
    seq = answered(manager, PROMPT, ANSWER[:5])
    run(manager, seq, seq.num_tokens)
    seq.append_token(16)
    reader = sequence([*seq.token_ids[:10], 7, 7, 7], exact=False)
    assert schedule(manager, reader, 13).start == 8
    for token in (17, 18, 19):
        run(manager, seq, seq.num_tokens)
        seq.append_token(token)
    assert manager.linear.saves_skipped["no_slot"] == 1
    tokens = sequence([*seq.token_ids, 7], exact=False)
    assert manager.linear.allocate_shared(tokens) == [4, 8]


def test_the_last_decode_state_is_withdrawn_though_a_prefill_state_of_its_prefix_is_there():
    manager = composite()
    seq = answered(manager, PROMPT, ANSWER[:4])
    run(manager, seq, seq.num_tokens)
    served(manager, [*PROMPT, *ANSWER[:4], 3, 3, 3])
    for token in (21, 22, 23, 24):
        seq.append_token(token)
        run(manager, seq, seq.num_tokens)
    index = manager.linear.cache._index
    found = [index.find(index.key_of(slot))[1] for slot in index.ids()]
    decoded = [entry.boundary for entry in found if entry.provenance is Provenance.DECODE]
    assert decoded == [12]


def test_a_decode_state_that_was_evicted_is_the_reason_for_who_would_have_taken_it():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    seq = sequence(NEXT_TURN, exact=False)
    manager.linear.allocate_shared(seq)
    manager.linear.quarantine(manager.linear._checkpoint(seq, 12).slot_id)
    assert turn(manager, NEXT_TURN, exact=False) == (4, MissReason.EVICTED)


def test_decoded_kv_alone_is_the_reason_of_an_exact_request_without_recurrent_layers():
    manager = composite(recurrent=False)
    manager.release(answered(manager, PROMPT, ANSWER))
    assert turn(manager, NEXT_TURN, exact=True) == (4, MissReason.DECODE_ONLY)


def test_a_decode_state_without_its_kv_would_serve_nobody_and_is_no_reason():
    manager = composite()
    manager.release(answered(manager, PROMPT, ANSWER))
    for id_ in list(manager.kv._index.ids()):
        manager.kv._index.forget(id_)
        manager.kv.pool.unpublish(id_)
    served(manager, PROMPT)
    assert turn(manager, NEXT_TURN, exact=True) == (4, MissReason.UNSEEN)
