"""A whole prompt is found again with its state, all its K/V and its logits, or not at all.

Stride 4, block 2; no state is saved on the grid unless a test says so.
"""

from array import array

import pytest

from cache.cached_sequence import CachedSequence, WholeSave
from cache.composite_block_manager import CompositeBlockManager, MissReason
from cache.eviction import Kind
from cache.hashing import (
    TOKEN_TYPECODE,
    HashDomain,
    MultimodalItem,
    Namespace,
    Provenance,
    filed_under,
    tail_key,
)
from cache.placement import Combined, Every, combined
from cache.value_index import ValueIndex
from tests.cache.builders import composite, run, sequence

PROMPT = [1, 2, 3, 4, 5, 6]
LOGITS = "what the engine keeps"
WHOLE_ONLY = Combined((), whole_prompt=True)


def manager_with(**options) -> CompositeBlockManager:
    return composite(**({"placement": WHOLE_ONLY, "whole_prompts": True} | options))


def prefill(
    manager: CompositeBlockManager, seq: CachedSequence, *others: CachedSequence
) -> tuple[CachedSequence, WholeSave | None]:
    """The step that ends with the prompt, committed; its logits are not known yet. others: all
    that hold something, too."""
    match, end = manager.match(seq), seq.num_prompt_tokens
    assert manager.allocate(seq, match, end)
    manager.plan_saves(seq, match, end)
    save = manager.plan_whole(seq)
    manager.commit(seq, end)
    manager.check([seq, *others])
    return seq, save


def answered(manager: CompositeBlockManager, *args, **options) -> CachedSequence:
    """A sequence whose prompt was prefilled, and kept if there was room; it is still there."""
    seq, save = prefill(manager, sequence(*args, **options))
    if save is not None:
        manager.keep(seq, save, LOGITS)
    return seq


def served(manager: CompositeBlockManager, *args, **options) -> None:
    manager.release(answered(manager, *args, **options))


def found(manager: CompositeBlockManager, *args, **options) -> CachedSequence:
    """A sequence that has found its whole prompt; its step is not committed."""
    seq = sequence(*args, **options)
    match = manager.match(seq)
    assert match.whole is not None and match.boundary == seq.num_prompt_tokens
    assert manager.allocate(seq, match, match.boundary)
    return seq


def finds(manager: CompositeBlockManager, *args, **options) -> bool:
    return manager.match(sequence(*args, **options)).whole is not None


def why_not(manager: CompositeBlockManager, tokens: list[int]) -> MissReason | None:
    match = manager.match(sequence(tokens))
    assert match.whole is None
    return match.miss_reason


def evict(pool, id_: int) -> None:
    """Take out what was released longest ago, up to this id."""
    kept = []
    while (taken := pool.allocate()) != id_:
        kept.append(taken)
    for each in (*kept, taken):
        pool.release(each)


# ---- what is kept, and when


def test_a_step_copies_to_a_slot_and_blocks_of_their_own_and_nothing_is_found_before_its_logits():
    """traps 13, 14"""
    manager = manager_with()
    seq, save = prefill(manager, sequence(PROMPT))
    assert (seq.block_table, seq.live_slot) == ([1, 2, 3], 1)
    key = seq.whole_key(manager.linear.domain)
    assert save.slot == 2 and save.blocks == ((tail_key(key, 0), 3, 4),)
    assert not finds(manager, PROMPT) and why_not(manager, PROMPT) is MissReason.NO_CHECKPOINT
    manager.keep(seq, save, LOGITS)
    checkpoint = manager.linear.cache.find(key)
    assert (checkpoint.slot_id, checkpoint.boundary, checkpoint.logits) == (2, 6, LOGITS)
    assert manager.kv.find(tail_key(key, 0)) == 4
    assert manager.linear.pool.ref_count(2) == manager.kv.pool.ref_count(4) == 0
    assert manager.linear.num_saves == 1
    manager.release(seq)
    manager.check([])
    assert manager.kv.pool.num_free == 63 - 3, "the two blocks of the stride and the copy are left"


@pytest.mark.parametrize(
    ("length", "copied"),
    [(1, [1]), (2, [1]), (3, [1, 2]), (4, []), (5, [3]), (7, [3, 4]), (8, []), (9, [5])],
)
def test_a_prompt_of_any_length_is_found_and_only_whole_strides_are_shared(length, copied):
    manager = manager_with()
    seq, save = prefill(manager, sequence(range(length)))
    assert [source for _, source, _ in save.blocks] == copied
    manager.keep(seq, save, LOGITS)
    manager.release(seq)
    again = found(manager, range(length))
    num_shared = length // 4 * 2
    assert again.block_table[:num_shared] == list(range(1, num_shared + 1))
    assert list(again.whole_hit.tail) == [copy for _, _, copy in save.blocks]
    own = again.block_table[num_shared:]
    assert len(own) == len(copied) and not set(own) & set(again.whole_hit.tail)
    assert not any(manager.kv.pool.is_published(id_) for id_ in own)
    manager.check([again])


def test_the_step_after_a_hit_reads_the_state_and_gives_it_back():
    manager = manager_with()
    served(manager, PROMPT)
    seq = found(manager, PROMPT)
    source = seq.state_source
    assert (source.slot_id, source.boundary, seq.num_computed_tokens) == (2, 6, 6)
    assert (seq.block_table[:2], seq.whole_hit.tail) == ([1, 2], (4,))
    assert manager.kv.pool.ref_count(4) == manager.linear.pool.ref_count(2) == 1
    manager.commit(seq, 6)
    assert seq.whole_hit is None and manager.kv.pool.ref_count(4) == 0
    assert manager.linear.pool.ref_count(2) == 1 and seq.state_source is source
    manager.check([seq])
    seq.append_token(9)
    row = run(manager, seq, 7)
    assert row.op.restore_requested and (row.op.restore_src_slot_id, row.op.boundary) == (2, 6)
    assert manager.linear.pool.ref_count(2) == 0
    manager.release(seq)
    manager.check([])
    assert finds(manager, PROMPT)


def test_a_prefill_under_way_goes_on_from_the_whole_prompt():
    manager = manager_with()
    seq = sequence(PROMPT)
    run(manager, seq, 4)
    other, save = prefill(manager, sequence(PROMPT), seq)
    manager.keep(other, save, LOGITS)
    manager.release(other)
    match = manager.match(seq)
    assert match.whole is not None and manager.allocate(seq, match, 6)
    assert (seq.num_computed_tokens, seq.state_source.boundary, len(seq.block_table)) == (6, 6, 3)
    manager.check([seq])


def test_the_end_of_a_prompt_on_the_grid_is_kept_as_a_boundary_and_as_a_whole():
    manager = manager_with(placement=Combined((Every(4),), whole_prompt=True))
    seq = answered(manager, range(8))
    manager.release(seq)
    assert sorted(manager.linear.cache.slot_ids()) == [1, 2, 3]
    assert manager.match(sequence(range(9))).boundary == 8
    assert manager.match(sequence(range(9))).whole is None
    assert finds(manager, range(8))


# ---- whose it is


@pytest.mark.parametrize("other", [[*PROMPT, 7], PROMPT[:5], PROMPT[:4], [*PROMPT[:5], 7], [1]])
def test_no_other_prompt_finds_it(other):
    manager = manager_with()
    served(manager, PROMPT)
    assert not finds(manager, other)
    assert finds(manager, PROMPT)


@pytest.mark.parametrize("length", [4, 8])
def test_a_whole_prompt_on_the_grid_is_no_grid_boundary_nor_the_other_way_round(length):
    manager = manager_with()
    served(manager, range(length))
    assert manager.match(sequence(range(length + 3))).boundary == 0
    domain, namespace = manager.linear.domain, Namespace()
    chain, token_ids = [], array(TOKEN_TYPECODE, range(length))
    root = domain.root(namespace)
    domain.extend(chain, root, token_ids, length)
    whole = domain.whole(chain, root, token_ids, length)
    assert whole not in chain and tail_key(whole, 0) not in (whole, *chain)
    assert tail_key(whole, 0) != tail_key(whole, 1)
    assert filed_under(whole, Provenance.DECODE) != whole


def test_a_length_is_part_of_the_key():
    domain = HashDomain("linear", 4)
    root = domain.root(Namespace())
    keys = {domain.whole([], root, array(TOKEN_TYPECODE, [0] * n), n) for n in range(4)}
    assert len(keys) == 4


def test_two_tenants_do_not_share_it():
    """trap 39"""
    manager = manager_with()
    served(manager, PROMPT, salt="a")
    assert not finds(manager, PROMPT, salt="b")
    assert finds(manager, PROMPT, salt="a")


@pytest.mark.parametrize("start", [0, 3, 5])
def test_an_image_anywhere_in_the_prompt_is_part_of_it(start):
    """trap 40"""
    manager = manager_with()

    def with_image(content):
        item = MultimodalItem(content, start, 1)
        return CachedSequence(PROMPT, multimodal_items=[item])

    seq, save = prefill(manager, with_image(b"cat"))
    manager.keep(seq, save, LOGITS)
    assert manager.match(with_image(b"cat")).whole is not None
    assert manager.match(with_image(b"dog")).whole is None
    assert not finds(manager, PROMPT)


def test_a_prompt_that_is_rewritten_is_another_one():
    manager = manager_with()
    served(manager, PROMPT)
    seq = sequence(PROMPT)
    assert manager.match(seq).whole is not None
    seq.rewrite_tail(5, [7], block_size=2, chunk_stride=4)
    assert manager.match(seq).whole is None


def after_decoding() -> CompositeBlockManager:
    """Where the prompt was answered by somebody who went on from decoded content."""
    manager = manager_with(placement=combined(None))
    parent = sequence([1, 2, 3], exact=False)
    run(manager, parent, 3)
    for token in (4, 5):
        parent.append_token(token)
        run(manager, parent, parent.num_tokens)
    manager.release(parent)
    served(manager, PROMPT, exact=False)
    return manager


def test_what_was_computed_from_decoded_content_is_for_those_who_take_it():
    manager = after_decoding()
    assert finds(manager, PROMPT, exact=False) and not finds(manager, PROMPT)
    child = found(manager, PROMPT, exact=False)
    assert child.provenance is Provenance.DECODE, "it is contagious"
    manager.release(child)
    served(manager, PROMPT)
    assert finds(manager, PROMPT)
    child = found(manager, PROMPT, exact=False)
    assert child.whole_hit.provenance is Provenance.PREFILL, "the better one is taken first"
    manager.release(child)
    manager.check([])


def test_the_answer_to_a_whole_prompt_is_shared_like_any_other():
    """Its first blocks begin in the stride that the prompt ends in."""
    manager = manager_with()
    served(manager, PROMPT)
    seq = found(manager, PROMPT, exact=False)
    manager.commit(seq, 6)
    for token in range(20, 27):
        seq.append_token(token)
        run(manager, seq, seq.num_tokens)
    manager.release(seq)
    following = sequence([*seq.token_ids, 7], exact=False)
    assert manager.kv.reach(following) == 12
    assert manager.match(following).boundary == 12
    assert finds(manager, PROMPT)


def test_a_request_that_is_to_leave_grid_states_neither_takes_nor_leaves_it():
    manager = manager_with()
    seq = sequence(PROMPT)
    seq.keeps_whole = False
    _, save = prefill(manager, seq)
    assert save is None and seq.whole_save is None
    manager.release(seq)
    served(manager, PROMPT)
    again = sequence(PROMPT)
    again.keeps_whole = False
    match = manager.match(again)
    assert match.whole is None and match.miss_reason is MissReason.NO_CHECKPOINT


@pytest.mark.parametrize("options", [{"recurrent": False}, {"caching": False}])
def test_without_states_or_caching_there_are_no_whole_prompts(options):
    manager = manager_with(**options)
    assert manager.whole is None
    seq, save = prefill(manager, sequence(PROMPT))
    assert save is None
    manager.release(seq)
    assert not finds(manager, PROMPT)


def test_the_smallest_prompt_that_can_hit_has_one_token():
    assert manager_with().smallest_prompt_that_can_hit == 1
    assert composite().smallest_prompt_that_can_hit == 5


# ---- what is missing


def test_without_one_of_its_blocks_it_is_not_found_until_that_is_kept_again():
    """trap 37"""
    manager = manager_with()
    served(manager, PROMPT)
    evict(manager.kv.pool, 4)  # the copy of the last block
    assert why_not(manager, PROMPT) is MissReason.KV_SHORTER
    seq, save = prefill(manager, sequence(PROMPT))
    assert save.slot is None and len(save.blocks) == 1, "the state is there still"
    manager.keep(seq, save, LOGITS)
    assert finds(manager, PROMPT)


def test_without_a_block_of_its_whole_strides_it_is_not_found():
    """trap 2"""
    manager = manager_with()
    served(manager, PROMPT)
    manager.kv.unfile(sequence_hashes(manager, PROMPT)[1])
    assert why_not(manager, PROMPT) is MissReason.KV_SHORTER


def sequence_hashes(manager, tokens):
    seq = sequence(tokens)
    seq.update_block_hashes(manager.kv.domain)
    return seq.block_hashes


@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:3]])
def test_without_its_state_it_is_not_found_and_only_the_state_is_kept_again(tokens):
    manager = manager_with()
    served(manager, tokens)
    evict(manager.linear.pool, 2)
    assert why_not(manager, tokens) is MissReason.EVICTED
    seq, save = prefill(manager, sequence(tokens))
    assert save.slot is not None and save.blocks == ()
    manager.keep(seq, save, LOGITS)
    assert finds(manager, tokens)


def test_what_a_hit_pins_is_not_evicted_and_what_it_used_is_evicted_last():
    """traps 15, 28"""
    manager = manager_with(num_blocks=12)
    served(manager, PROMPT)
    seq = found(manager, PROMPT)
    pool = manager.kv.pool
    others = [pool.allocate() for _ in range(pool.num_available)]
    assert pool.allocate() is None and 4 not in others and seq.whole_hit.tail == (4,)
    for id_ in others:
        pool.release(id_)
    manager.release(seq)
    assert finds(manager, PROMPT)


# ---- room


def test_a_hit_that_does_not_fit_beside_what_it_reads_is_none():
    manager = manager_with(num_blocks=6, max_num_seqs=1, placement=combined(None))
    served(manager, PROMPT)
    manager.check([])
    held = [manager.kv.pool.allocate() for _ in range(manager.kv.pool.num_free)]
    assert len(held) == 2
    assert why_not(manager, PROMPT) is None, "it goes on from the grid: one block for its tail"
    manager.kv.pool.release(held.pop())
    seq = found(manager, PROMPT)
    assert manager.kv.pool.num_available == 0
    manager.release(seq)


def test_blocks_that_others_hold_cost_a_hit_no_room():
    manager = manager_with()
    answered(manager, PROMPT)
    held = [manager.kv.pool.allocate() for _ in range(manager.kv.pool.num_free)]
    manager.kv.pool.release(held.pop())
    assert manager.kv.pool.num_available == 2, "for its last block and the one that it copies"
    assert finds(manager, PROMPT)


def test_blocks_of_its_own_are_no_room_for_a_prefill_under_way():
    manager = manager_with()
    seq = sequence(PROMPT)
    run(manager, seq, 4)
    other, save = prefill(manager, sequence(PROMPT), seq)
    manager.keep(other, save, LOGITS)
    manager.release(other)
    held = [manager.kv.pool.allocate() for _ in range(manager.kv.pool.num_free)]
    assert manager.kv.pool.num_available == 1 and manager.match(seq).whole is None
    manager.kv.pool.release(held.pop())
    assert manager.match(seq).whole is not None


def test_a_hit_needs_a_slot_to_run_on_beside_its_state():
    manager = manager_with(num_slots=4, max_num_seqs=1)
    served(manager, PROMPT)
    held = [manager.linear.pool.allocate() for _ in range(2)]
    assert why_not(manager, PROMPT) is MissReason.NO_SLOT
    manager.linear.pool.release(held.pop())
    assert finds(manager, PROMPT)


def test_a_hit_that_lost_its_room_leaves_everything_as_it_was():
    manager = manager_with(num_blocks=8, max_num_seqs=1)
    served(manager, PROMPT)
    seq = sequence(PROMPT)
    match = manager.match(seq)
    held = [manager.kv.pool.allocate() for _ in range(manager.kv.pool.num_free)]
    assert match.whole is not None and not manager.allocate(seq, match, 6)
    assert seq.whole_hit is None and not seq.block_table and seq.num_computed_tokens == 0
    for id_ in held:
        manager.kv.pool.release(id_)
    manager.check([seq])


def test_saving_leaves_each_sequence_a_block_and_a_live_slot():
    manager = manager_with(num_blocks=8, max_num_seqs=4)
    _, save = prefill(manager, sequence(PROMPT))  # 7 blocks, 3 of its own, 4 for the others
    assert save is None and dict(manager.linear.saves_skipped) == {"no_block": 1}
    manager = manager_with(num_slots=5, max_num_seqs=4)
    seq, save = prefill(manager, sequence(PROMPT))
    assert save is None and dict(manager.linear.saves_skipped) == {"no_slot": 1}
    assert manager.kv.pool.num_free == 63 - 3, "no block is taken without a slot"
    manager.release(seq)
    manager = manager_with(num_blocks=9, max_num_seqs=4)
    assert prefill(manager, sequence(PROMPT))[1] is not None


def test_grid_states_are_saved_before_it():
    manager = manager_with(num_slots=3, max_num_seqs=1, placement=combined(None))
    seq = sequence(PROMPT)
    _, save = prefill(manager, seq)
    assert save is None
    manager.release(seq)
    assert manager.match(sequence(PROMPT)).boundary == 4


# ---- leaving


@pytest.mark.parametrize("leave", ["release", "discard"])
def test_who_leaves_before_its_logits_are_known_keeps_nothing(leave):
    """traps 14, 21"""
    manager = manager_with()
    seq, save = prefill(manager, sequence(PROMPT))
    getattr(manager, leave)(seq)
    manager.check([])
    assert seq.whole_save is None
    manager.keep(seq, save, LOGITS)
    assert not finds(manager, PROMPT) and manager.linear.pool.num_free == 15
    manager.check([])


def test_the_logits_of_one_save_are_not_taken_for_another():
    manager = manager_with()
    seq, before = prefill(manager, sequence(PROMPT))
    manager.discard(seq)
    _, save = prefill(manager, seq)
    manager.keep(seq, before, "logits of a step that failed")
    assert seq.whole_save is save and not finds(manager, PROMPT)


@pytest.mark.parametrize("leave", ["release", "discard"])
def test_who_leaves_before_its_hit_was_committed_gives_all_back(leave):
    manager = manager_with()
    served(manager, PROMPT)
    seq = found(manager, PROMPT)
    getattr(manager, leave)(seq)
    manager.check([])
    assert finds(manager, PROMPT)


def test_two_that_come_at_once_are_kept_once():
    manager = manager_with()
    first, save = prefill(manager, sequence(PROMPT))
    second, again = prefill(manager, sequence(PROMPT), first)
    manager.keep(first, save, LOGITS)
    manager.keep(second, again, "the same again")
    manager.check([first, second])
    assert manager.linear.saves_skipped["duplicate"] == 1
    assert found(manager, PROMPT).whole_hit.logits == LOGITS


def test_a_prompt_that_is_not_to_be_trusted_is_forgotten_as_a_whole():
    manager = manager_with()
    served(manager, PROMPT)
    served(manager, PROMPT[:3])
    broken = sequence(PROMPT)
    manager.forget(broken)
    manager.check([])
    assert not finds(manager, PROMPT) and finds(manager, PROMPT[:3])
    assert manager.kv.find(tail_key(broken.whole_key(manager.linear.domain), 0)) is None
    assert manager.linear.cache.slot_ids() and len(manager.linear.cache) == 1


def test_so_is_what_was_kept_for_those_who_take_decoded_content():
    manager = after_decoding()
    key = filed_under(sequence(PROMPT).whole_key(manager.linear.domain), Provenance.DECODE)
    assert manager.kv.find(tail_key(key, 0)) is not None
    manager.forget(sequence(PROMPT))
    assert not finds(manager, PROMPT, exact=False)
    assert manager.linear.cache.find(key) is manager.kv.find(tail_key(key, 0)) is None
    manager.check([])


def test_a_state_that_could_not_be_restored_is_not_found_again():
    manager = manager_with()
    served(manager, PROMPT)
    manager.linear.quarantine(2)
    assert not finds(manager, PROMPT)
    manager.check([])


def test_a_reset_forgets_saves_and_hits():
    manager = manager_with()
    served(manager, PROMPT)
    hit = found(manager, PROMPT)
    manager.reset([hit])
    saving, _ = prefill(manager, sequence(PROMPT))
    manager.reset([saving])
    manager.check([hit, saving])
    assert hit.whole_hit is saving.whole_save is None
    assert not finds(manager, PROMPT)


def test_a_leaking_pin_is_noticed():
    manager = manager_with()
    served(manager, PROMPT)
    seq = found(manager, PROMPT)
    seq.whole_hit = None
    with pytest.raises(AssertionError, match="block 4 leaks"):
        manager.check([seq])
    manager = manager_with()
    seq, _ = prefill(manager, sequence(PROMPT))
    seq.whole_save = None
    with pytest.raises(AssertionError, match="leaks"):
        manager.check([seq])


# ---- what it is worth


class Told(ValueIndex):
    """Notes what the policy is told."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def request(self, keys, mounted):
        self.notes.append(("request", len(keys), mounted))
        super().request(keys, mounted)

    def saved(self, id_, boundary, keys, kind):
        self.notes.append(("saved", id_, boundary, len(keys), kind))
        super().saved(id_, boundary, keys, kind)


@pytest.mark.parametrize(("length", "strides"), [(6, 2), (8, 2), (3, 1), (4, 1)])
def test_the_eviction_policy_is_told_of_a_state_one_key_deeper_than_the_strides(length, strides):
    policy = Told()
    manager = manager_with(policy=policy)
    served(manager, range(length))
    manager.release(found(manager, range(length)))
    assert policy.notes == [
        ("request", 0, None),
        ("saved", 2, length, strides, Kind.WHOLE),
        ("request", strides, 2),
    ]
    policy.check()
    manager.check([])


def test_the_tip_of_a_prompt_is_not_superseded_by_its_own_whole():
    policy = Told()
    manager = manager_with(policy=policy, placement=combined(None))
    served(manager, PROMPT)
    kinds = [note[4] for note in policy.notes if note[0] == "saved"]
    assert kinds == [Kind.TIP, Kind.WHOLE]
    assert {policy._live[slot].kind for slot in manager.linear.cache.slot_ids()} == set(kinds)


def test_a_whole_prompt_that_is_worth_less_than_what_would_go_for_it_is_not_kept():
    """Beyond the state that its own step saves on the grid it is worth one token."""
    policy = Told()
    manager = manager_with(policy=policy, num_slots=4, max_num_seqs=1, placement=combined(None))
    served(manager, range(100, 105))  # at 4 and as a whole: both slots
    assert finds(manager, range(100, 105))
    seq, save = prefill(manager, sequence(range(9)))
    assert save is None and manager.linear.saves_skipped["not_worth"] == 1
    assert not finds(manager, range(100, 105)), "it was worth one token, the state at 8 is more"
    assert manager.match(sequence(range(100, 105))).boundary == 4
    key = seq.whole_key(manager.linear.domain)
    assert policy._by_key[key].kind is Kind.WHOLE, "it is remembered"
    policy.check()
