"""How the next token is chosen from a row of logits, and what is reported with it."""

import math
from collections import Counter

import pytest
import torch

from engine import SamplingParams
from engine.sampler import likeliest, sample
from engine.sequence import Sequence
from tests.engine.real_model import assert_idle, make_engine, tokens

PROBS = torch.tensor([0.15, 0.5, 0.05, 0.3])
LOGITS = PROBS.log()
DRAWS = 4000


def sequence(**params):
    return Sequence("r", [1], SamplingParams(**params))


def choose(seqs, drafts, logits):
    return sample(seqs, drafts, logits, likeliest(logits).tolist() if len(logits) else [[], []])


def choice(seq, logits=LOGITS):
    [chosen] = choose([seq], [[]], logits[None])
    return chosen if chosen is None else chosen[0]


def token(seq, logits=LOGITS):
    return choice(seq, logits).token_id


def frequencies(**params):
    """Share of each token in many draws, each at a length of its own."""
    seq = sequence(seed=1, **params)
    counts = Counter()
    for _ in range(DRAWS):
        counts[token(seq)] += 1
        seq.append_token(0)
    return torch.tensor([counts[i] / DRAWS for i in range(len(PROBS))])


def assert_shares(shares, expected):
    expected = torch.tensor(expected)
    assert (shares - expected / expected.sum()).abs().max() < 0.03
    assert torch.equal(shares > 0, expected > 0), "a token that can't be drawn was drawn"


def generate(prompt, **params):
    llm = make_engine()
    [output] = llm.generate([prompt], SamplingParams(ignore_eos=True, **params))
    assert_idle(llm)
    return output


def test_temperature_zero_takes_the_likeliest_token():
    assert {token(sequence(temperature=0.0, seed=seed)) for seed in range(20)} == {1}


def test_draws_follow_the_probabilities():
    assert_shares(frequencies(), PROBS.tolist())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens_the_probabilities(temperature):
    expected = PROBS ** (1 / temperature)
    assert_shares(frequencies(temperature=temperature), expected.tolist())


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature):
    assert token(sequence(temperature=temperature), torch.tensor([1.0, 9.0, 3.0])) == 1


def test_top_k_draws_from_the_k_likeliest_only():
    assert_shares(frequencies(top_k=1), [0, 1.0, 0, 0])
    assert_shares(frequencies(top_k=2), [0, 0.5, 0, 0.3])
    assert_shares(frequencies(top_k=3), [0.15, 0.5, 0, 0.3])
    assert_shares(frequencies(top_k=0), PROBS.tolist())
    assert_shares(frequencies(top_k=99), PROBS.tolist())


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [0, 1.0, 0, 0]),
        (0.49, [0, 1.0, 0, 0]),
        (0.51, [0, 0.5, 0, 0.3]),
        (0.79, [0, 0.5, 0, 0.3]),
        (0.81, [0.15, 0.5, 0, 0.3]),
        (0.96, [0.15, 0.5, 0.05, 0.3]),
    ],
)
def test_top_p_draws_from_the_smallest_set_with_that_much_probability(top_p, expected):
    assert_shares(frequencies(top_p=top_p), expected)


def test_a_top_p_below_float32_leaves_the_likeliest_token():
    likeliest = [float(p == PROBS.max()) for p in PROBS]
    assert_shares(frequencies(top_p=1e-60), likeliest)


def test_top_p_counts_what_temperature_and_top_k_have_left():
    # After top_k=2 the likeliest token has 0.5 / 0.8 = 0.625; hot enough, each has about a half.
    assert_shares(frequencies(top_k=2, top_p=0.6), [0, 1.0, 0, 0])
    assert_shares(frequencies(top_k=2, top_p=0.65), [0, 0.5, 0, 0.3])
    flat = frequencies(top_k=2, top_p=0.6, temperature=1000.0)
    assert_shares(flat, [0, 0.5, 0, 0.5])


def test_a_seed_fixes_the_draws_and_another_seed_changes_them():
    prompt = tokens(0, 20)
    first, again, other = (
        generate(prompt, seed=seed, max_tokens=20).token_ids for seed in (1, 1, 2)
    )
    assert first == again != other


def test_without_a_seed_each_request_draws_its_own():
    llm = make_engine()
    outputs = llm.generate([tokens(0, 20)] * 4, SamplingParams(ignore_eos=True, max_tokens=20))
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_seeded_draws_do_not_depend_on_who_else_draws():
    params = SamplingParams(seed=3, ignore_eos=True, max_tokens=12)
    others = [SamplingParams(seed=i, max_tokens=9) for i in range(5)]
    alone = generate(tokens(0, 20), seed=3, max_tokens=12)
    prompts = [tokens(1 + i, 30) for i in range(5)]
    together = make_engine().generate([*prompts, tokens(0, 20)], [*others, params])
    assert together[-1].token_ids == alone.token_ids


def test_a_draw_does_not_touch_the_global_random_state():
    before = torch.get_rng_state()
    choice(sequence(seed=None))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_hold_the_chosen_token_first_then_the_likeliest(count, temperature):
    params = {"temperature": temperature, "logprobs": count, "seed": 4, "return_logits": True}
    output = generate(tokens(0, 20), max_tokens=6, **params)
    assert len(output.logprobs) == 6
    for token_id, report, row in zip(output.token_ids, output.logprobs, output.logits, strict=True):
        expected = row.double().log_softmax(-1)
        assert next(iter(report)) == token_id
        likeliest = expected.topk(max(count, 1)).indices.tolist()[:count]
        assert set(report) == {token_id, *likeliest}
        assert [t for t in report if t != token_id] == [t for t in likeliest if t != token_id]
        assert all(math.isclose(p, expected[t], abs_tol=1e-5) for t, p in report.items())
        assert sum(map(math.exp, report.values())) <= 1 + 1e-6
        if temperature == 0.0:
            assert report[token_id] == max(report.values())


def test_logprobs_and_logits_are_only_kept_where_asked_for():
    output = generate(tokens(0, 20), max_tokens=2)
    assert output.logprobs is None and output.logits is None


def test_logprobs_of_a_whole_tiny_vocabulary_sum_to_one():
    seq = sequence(temperature=0.0, logprobs=20)
    report = choice(seq).logprobs
    assert list(report) == [1, 3, 0, 2]
    assert math.isclose(sum(map(math.exp, report.values())), 1.0, abs_tol=1e-6)


def test_a_draw_is_a_function_of_seed_and_length_and_not_of_earlier_draws():
    seq = sequence(seed=5)
    assert len({token(seq) for _ in range(30)}) == 1
    lengths = {token(sequence(seed=seed)) for seed in range(30)}
    assert len(lengths) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_give_no_token(temperature, bad):
    logits = torch.tensor([1.0, bad, 3.0])
    rows = torch.stack([logits, LOGITS[:3], logits])
    seqs = [sequence(temperature=temperature) for _ in range(3)]
    chosen = choose(seqs, [[], [], []], rows)
    assert [c is None for c in chosen] == [True, False, True]
    assert choose([], [], rows[:0]) == []


def test_a_masked_token_is_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0])
    assert {token(sequence(seed=seed), logits) for seed in range(40)} == {0, 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", 1 << 2000),
        ("temperature", "1"),
        ("temperature", True),
        ("ignore_eos", "no"),
        ("stop", 5),
        ("stop", b"ab"),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", ([1],)),
        ("stop_token_ids", (-1,)),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("stop", ("fine", "")),
        ("stop", (5,)),
        ("stop", ("x",) * 17),
        ("stop", ("fine", "x" * 257)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (True,)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}=") as refusal:
        SamplingParams(**{field: value})
    assert repr(value) in str(refusal.value)


def test_an_unknown_sampling_parameter_is_refused():
    with pytest.raises(TypeError, match="top_n"):
        SamplingParams(top_n=3)


# ---- guesses


def next_tokens(seq, guesses, rows):
    [chosen] = choose([seq], [guesses], torch.stack(rows))
    return chosen if chosen is None else [choice.token_id for choice in chosen]


def one_hot(token_id):
    return torch.eye(4)[token_id]


def test_guesses_are_accepted_up_to_the_first_that_is_not_the_token_chosen():
    rows = [one_hot(2), one_hot(0), one_hot(3)]
    greedy = sequence(temperature=0.0)
    assert next_tokens(greedy, [2, 0], rows) == [2, 0, 3]
    assert next_tokens(greedy, [2, 1], rows) == [2, 0]
    assert next_tokens(greedy, [1, 0], rows) == [2]


def test_drawn_tokens_are_those_that_would_be_drawn_one_by_one():
    seq = sequence(seed=3)
    one_by_one = []
    for _ in range(4):
        one_by_one.append(token(seq))
        seq.append_token(one_by_one[-1])
    for right in range(4):
        guesses = [*one_by_one[:right], *((t + 1) % 4 for t in one_by_one[right:3])]
        chosen = next_tokens(sequence(seed=3), guesses, [LOGITS] * 4)
        assert chosen == one_by_one[: right + 1]


def test_rows_after_a_rejected_guess_are_not_looked_at():
    bad = torch.full((4,), math.nan)
    greedy = sequence(temperature=0.0)
    assert next_tokens(greedy, [1], [one_hot(2), bad]) == [2]
    assert next_tokens(greedy, [2], [one_hot(2), bad]) is None


def test_each_sequence_has_its_own_guesses():
    rows = torch.stack([one_hot(1), one_hot(2), one_hot(3), one_hot(0)])
    seqs = [sequence(temperature=0.0) for _ in range(3)]
    chosen = choose(seqs, [[], [2], []], rows)
    assert [[c.token_id for c in choices] for choices in chosen] == [[1], [2, 3], [0]]
