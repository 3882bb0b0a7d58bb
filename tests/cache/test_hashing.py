"""Keys of prefixes: equal exactly for equal prefixes of one domain and namespace."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.cached_sequence import CachedSequence
from cache.hashing import HashDomain, MultimodalItem, Namespace

KV = HashDomain("kv", 2)
LINEAR = HashDomain("linear", 4)
TOKENS = st.lists(st.integers(0, 3), max_size=20)


def chain(domain, token_ids, *, namespace=Namespace(), items=()):  # noqa: B008
    keys = []
    tokens = array("I", token_ids)
    domain.extend(keys, domain.root(namespace), tokens, len(tokens), items)
    return keys


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 3, 4, 8]))
def test_two_prefixes_share_a_key_exactly_where_they_are_equal(first, second, step):
    """trap 4: property over strides."""
    domain = HashDomain("linear", step)
    a, b = chain(domain, first), chain(domain, second)
    assert len(a) == len(first) // step
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        end = (index + 1) * step
        assert (left == right) == (first[:end] == second[:end])


@given(TOKENS, st.integers(0, 20))
def test_a_chain_extended_in_two_parts_is_the_chain_computed_at_once(token_ids, cut):
    tokens = array("I", token_ids)
    keys = []
    root = LINEAR.root(Namespace())
    LINEAR.extend(keys, root, tokens, min(cut, len(tokens)))
    assert len(keys) == min(cut, len(tokens)) // 4
    LINEAR.extend(keys, root, tokens, len(tokens))
    assert keys == chain(LINEAR, token_ids)


def test_a_key_has_16_bytes_and_does_not_change_between_processes():
    keys = chain(HashDomain("linear", 4, 7), range(8))
    assert [key.hex() for key in keys] == [
        "2169c5981019ed358f413f63e9e77188",
        "b89f26f7a75c530b56adb52385e87efa",
    ]


def test_tokens_above_16_bits_are_not_cut_off():
    assert chain(KV, [1, 2]) != chain(KV, [1 + 2**16, 2])
    assert chain(KV, [1, 2]) != chain(KV, [1 + 2**24, 2])


def test_a_key_stands_for_the_whole_prefix_and_not_for_its_own_chunk():
    same_second_chunk = chain(KV, [1, 1, 5, 5]), chain(KV, [2, 2, 5, 5])
    assert same_second_chunk[0][1] != same_second_chunk[1][1]
    repeated = chain(KV, [5, 5, 5, 5])
    assert repeated[0] != repeated[1]


def test_kv_keys_and_state_keys_never_meet_even_at_one_step():
    """trap 31: stored under one domain, probed in the other."""
    tokens = range(16)
    chains = [chain(HashDomain(name, step), tokens) for name in ("kv", "linear") for step in (2, 4)]
    keys = [key for keys in chains for key in keys]
    assert len(set(keys)) == len(keys) == 24


def test_another_seed_gives_other_keys():
    assert chain(HashDomain("kv", 2, 0), [1, 2]) != chain(HashDomain("kv", 2, 1), [1, 2])


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", "adapter", "other"),
        Namespace("model", "other", "salt"),
        Namespace("other", "adapter", "salt"),
        Namespace("model", "adaptersalt", ""),
        Namespace("modeladapter", "", "salt"),
        Namespace("model", "salt", "adapter"),
    ],
)
def test_prefixes_of_different_namespaces_never_share_a_key(other):
    """trap 39: two tenants, one prefix; different salts never hit each other."""
    namespace = Namespace("model", "adapter", "salt")
    first = chain(KV, range(8), namespace=namespace)
    second = chain(KV, range(8), namespace=other)
    assert not set(first) & set(second)


def test_prefixes_of_equal_namespaces_share_their_keys():
    """trap 39: equal salts do hit each other."""
    first, second = (chain(KV, range(8), namespace=Namespace("m", "a", "s")) for _ in range(2))
    assert first == second


def test_an_other_image_changes_the_key_of_every_chunk_it_overlaps():
    """trap 40: same text, other image; an image that spans two chunks."""
    tokens = [0] * 16  # chunks of 4; the image covers [6, 10): the second and the third
    cat, dog = (chain(LINEAR, tokens, items=[MultimodalItem(c, 6, 4)]) for c in (b"cat", b"dog"))
    plain = chain(LINEAR, tokens)
    assert cat[0] == dog[0] == plain[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(cat[1:], dog[1:], plain[1:], strict=True))


def test_an_other_second_image_leaves_the_chunks_before_it_shared():
    tokens = [0] * 16
    first = MultimodalItem(b"cat", 0, 4)
    keys = [
        chain(LINEAR, tokens, items=[first, MultimodalItem(content, 8, 4)])
        for content in (b"cow", b"dog")
    ]
    assert keys[0][:2] == keys[1][:2]
    assert keys[0][2] != keys[1][2]


@pytest.mark.parametrize(
    ("start", "length", "changed"),
    [
        (0, 1, [0, 1, 2, 3]),
        (3, 1, [0, 1, 2, 3]),
        (4, 1, [1, 2, 3]),
        (3, 2, [0, 1, 2, 3]),
        (12, 4, [3]),
        (15, 1, [3]),
        (16, 1, []),
    ],
)
def test_an_image_enters_exactly_the_chunks_from_its_first_one_on(start, length, changed):
    tokens = [0] * 16
    plain = chain(LINEAR, tokens)
    keys = chain(LINEAR, tokens, items=[MultimodalItem(b"cat", start, length)])
    assert [i for i in range(4) if keys[i] != plain[i]] == changed


def test_an_image_that_reaches_into_the_next_chunk_is_another_prefix_from_there_on():
    """trap 40: an image that spans two chunks."""
    short, long = (chain(LINEAR, [0] * 12, items=[MultimodalItem(b"cat", 2, n)]) for n in (2, 4))
    assert short[0] == long[0]
    assert short[1] != long[1] and short[2] != long[2]


def test_an_image_that_ends_with_a_chunk_does_not_enter_the_next_one_by_itself():
    """The next key differs through its parent only: after an equal parent it is equal."""
    tokens = array("I", [0] * 8)
    parent = LINEAR.root(Namespace("the parent"))
    with_image, without = [parent], [parent]
    LINEAR.extend(with_image, parent, tokens, 8, [MultimodalItem(b"cat", 0, 4)])
    LINEAR.extend(without, parent, tokens, 8)
    assert with_image == without


def test_an_image_at_another_place_of_the_same_chunk_is_another_prefix():
    tokens = [0] * 4
    keys = {chain(LINEAR, tokens, items=[MultimodalItem(b"cat", at, 1)])[0] for at in range(4)}
    assert len(keys) == 4


@pytest.mark.parametrize("bad", [(b"cat", -1, 1), (b"cat", 0, 0), (b"", 0, 1)])
def test_an_impossible_image_is_refused(bad):
    with pytest.raises(ValueError, match="start >= 0, length >= 1 and a content hash"):
        MultimodalItem(*bad)


def test_tokens_of_another_width_are_an_assertion():
    with pytest.raises(AssertionError, match="type 'Q'"):
        KV.extend([], KV.root(Namespace()), array("Q", [1, 2]), 2)


# ---- the chains of a sequence


def test_a_sequence_has_keys_for_whole_prompt_chunks_only():
    seq = CachedSequence(range(9))
    for _ in range(2):  # the second call adds nothing
        seq.update_block_hashes(KV)
        seq.update_linear_state_hashes(LINEAR)
    assert seq.block_hashes == chain(KV, range(8))
    assert seq.linear_state_hashes == chain(LINEAR, range(8))


def test_generated_tokens_get_no_key():
    seq = CachedSequence(range(7))
    seq.append_token(7)
    seq.update_block_hashes(KV)
    seq.update_linear_state_hashes(LINEAR)
    assert seq.block_hashes == chain(KV, range(6))
    assert seq.linear_state_hashes == chain(LINEAR, range(4))
    assert (seq.num_tokens, seq.num_prompt_tokens) == (8, 7)


def test_the_images_of_a_sequence_are_in_both_of_its_chains():
    items = (MultimodalItem(b"cat", 0, 1),)
    seq = CachedSequence(range(8), multimodal_items=items)
    seq.update_block_hashes(KV)
    seq.update_linear_state_hashes(LINEAR)
    assert seq.block_hashes == chain(KV, range(8), items=items)
    assert seq.linear_state_hashes == chain(LINEAR, range(8), items=items)


@given(st.integers(0, 16), TOKENS)
def test_after_a_rewrite_the_keys_are_those_of_the_new_prompt(position, tail):
    seq = CachedSequence(range(100, 116))
    seq.update_block_hashes(KV)
    seq.update_linear_state_hashes(LINEAR)
    seq.rewrite_tail(position, tail, block_size=2, chunk_stride=4)
    assert len(seq.block_hashes) == position // 2
    assert len(seq.linear_state_hashes) == position // 4
    seq.update_block_hashes(KV)
    seq.update_linear_state_hashes(LINEAR)
    prompt = [*range(100, 100 + position), *tail]
    assert seq.num_prompt_tokens == len(prompt)
    assert seq.block_hashes == chain(KV, prompt)
    assert seq.linear_state_hashes == chain(LINEAR, prompt)


def test_tokens_that_were_computed_cannot_be_rewritten():
    seq = CachedSequence(range(8))
    seq.num_computed_tokens = 4
    with pytest.raises(AssertionError):
        seq.rewrite_tail(3, [], block_size=2, chunk_stride=4)
