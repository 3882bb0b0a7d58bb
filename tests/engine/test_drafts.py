"""Guessed tokens are verified: same tokens, same bits, and nothing that was rejected is ever kept.

The oracle guesses right except where it is told not to; the real model's draft head is random, so
its guesses are replaced by true ones where acceptance matters.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cache.hashing import Provenance
from engine import LLM, EngineConfig, SamplingParams
from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.weights import read_weights
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_same_bits,
    cold,
    directory,
    drive,
    fork,
    make_engine,
    tokens,
)
from tests.oracle import OracleModel, expected_output, load, state_after

PROMPT = [(3 * i + i * i) % 251 for i in range(100)]


def oracle(drafts: int, right: Callable[[int], bool] = lambda position: True, **config) -> LLM:
    model = OracleModel()
    model.guesses_right = right
    config = {"num_slots": 60, "num_blocks": 60, "max_num_seqs": 4, **config}
    return LLM.from_model(model, EngineConfig(num_speculative_tokens=drafts, **config))


def finish(llm: LLM, prompt: list[int] = PROMPT, max_tokens: int = 40, **options):
    """One request to its end; the invariants hold after every step."""
    params = options.pop("params", SamplingParams(temperature=0, max_tokens=max_tokens))
    request_id = llm.add_request(prompt, params, **options)
    steps = 0
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished and output.request_id == request_id:
                last = output
        llm.scheduler.check()
        steps += 1
    assert_nothing_is_held(llm)
    return last, steps


def assert_nothing_is_held(llm: LLM) -> None:
    linear = llm.manager.linear
    assert linear.num_live == llm.manager.kv.pool.num_in_use == 0
    assert linear.pool.num_in_use == len(linear.scratch) == linear.num_scratch


def published_states(llm: LLM, token_ids: list[int]) -> dict[int, bool]:
    """boundary -> decoded, of every state in the index; each is the true state of its prefix."""
    index = llm.manager.linear.cache._index
    found = {}
    for slot in index.ids():
        entry = index.find(index.key_of(slot))[1]
        want = state_after(token_ids[: entry.boundary])
        assert load(llm.worker.state_pool, slot).words() == want.words(), entry
        found[entry.boundary] = entry.provenance is Provenance.DECODE
    return found


# ---- the same tokens


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("period", [1, 2, 3, 5, 7])
def test_any_pattern_of_right_and_wrong_guesses_gives_the_same_tokens(drafts: int, period: int):
    llm = oracle(drafts, lambda position: position % period != 0)
    output, _ = finish(llm)
    assert output.token_ids == expected_output(PROMPT, 40)


def test_right_guesses_save_steps_and_wrong_ones_cost_none():
    plain, steps = finish(oracle(0))
    assert steps == 40
    right = oracle(3)
    output, steps = finish(right)
    assert output.token_ids == plain.token_ids
    assert steps == 1 + 10  # the prompt and its token; then 3 guesses and one more a step
    stats = right.stats()
    assert (stats.tokens_drafted, stats.tokens_accepted) == (29, 29)
    wrong = oracle(3, lambda position: False)
    _, steps = finish(wrong)
    assert steps == 40
    assert wrong.stats().tokens_accepted == 0 < wrong.stats().tokens_drafted


def test_an_answer_is_never_longer_than_asked_for():
    for max_tokens in range(1, 9):
        output, _ = finish(oracle(5), max_tokens=max_tokens)
        assert output.token_ids == expected_output(PROMPT, max_tokens)
        assert output.finish_reason == "length"


def test_guesses_stop_at_the_longest_sequence():
    llm = oracle(5, max_model_len=len(PROMPT) + 7)
    output, _ = finish(llm, max_tokens=7)
    assert output.token_ids == expected_output(PROMPT, 7)


def test_requests_side_by_side_each_accept_their_own():
    """trap 10: one ends, others go on, prefills come between."""
    llm = oracle(3, lambda position: position % 4 != 0)
    prompts = [PROMPT[i : i + 60 + 7 * i] for i in range(6)]
    lengths = [3, 30, 11, 22, 1, 17]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n) for n in lengths])
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.token_ids == expected_output(prompt, length)


# ---- what is kept


def test_nothing_that_was_rejected_is_published():
    """trap 9: every guess across a boundary is rejected."""
    llm = oracle(5, lambda position: False, checkpoint_every=64)
    output, _ = finish(llm, exact=False, max_tokens=60)
    said = [*PROMPT, *output.token_ids]
    assert published_states(llm, said) == {64: False, 128: True}


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("length", [90, 91, 92, 93, 94, 95, 96])
def test_a_boundary_inside_the_guesses_is_saved_from_its_own_slot(drafts: int, length: int):
    llm = oracle(drafts, checkpoint_every=64)
    output, _ = finish(llm, PROMPT[:length], exact=False, max_tokens=50)
    said = [*PROMPT[:length], *output.token_ids]
    assert published_states(llm, said) == {64: False, 128: True}
    again, _ = finish(llm, [*said, 5], exact=False, max_tokens=9)
    assert again.boundary == 128
    assert again.token_ids == expected_output([*said, 5], 9)


@pytest.mark.parametrize("length", [90, 91, 92, 93, 94, 95, 96])
def test_an_answer_over_two_boundaries_keeps_the_later_state(length: int):
    llm = oracle(5, lambda position: position % 9 != 0, checkpoint_every=64)
    output, _ = finish(llm, PROMPT[:length], exact=False, max_tokens=110)
    said = [*PROMPT[:length], *output.token_ids]
    assert published_states(llm, said) == {64: False, 192: True}


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_stop_inside_the_guesses_ends_the_answer_and_nothing_wrong_is_published(stop: int):
    """trap 12: the live state is past the end of the answer."""
    prompt = PROMPT[:95]
    token = expected_output(prompt, 40)[stop]
    first = expected_output(prompt, 40).index(token)
    llm = oracle(5, checkpoint_every=64)
    params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=(token,))
    output, _ = finish(llm, prompt, params=params, exact=False)
    assert output.token_ids == expected_output(prompt, first + 1)
    assert output.finish_reason == "stop"
    published_states(llm, [*prompt, *output.token_ids])


def test_a_prompt_repeated_hits_at_the_same_boundary_with_and_without_guesses():
    """trap 11"""
    for length in (64, 65, 127, 128, 129, 200):
        prompt = [i % 251 for i in range(length)]
        boundaries = []
        for drafts in (0, 3):
            llm = oracle(drafts)
            finish(llm, prompt, max_tokens=8)
            boundaries.append(finish(llm, prompt, max_tokens=8)[0].boundary)
        assert boundaries[0] == boundaries[1]


@pytest.mark.parametrize("when", range(1, 6))
def test_an_abort_inside_a_verify_step_gives_everything_back(when: int, monkeypatch):
    llm = oracle(3)
    params = SamplingParams(temperature=0, max_tokens=40)
    llm.add_request(PROMPT, params, request_id="gone")
    llm.add_request(PROMPT[:70], params, request_id="stays")
    issue, calls = llm.worker.issue, iter(range(100))

    def aborting(batch: Batch, *before):
        if next(calls) == when:
            llm.abort("gone")
        return issue(batch, *before)

    monkeypatch.setattr(llm.worker, "issue", aborting)
    outputs = {}
    while llm.has_unfinished():
        outputs |= {o.request_id: o for o in llm.step() if o.finished}
        llm.scheduler.check()
    assert outputs["gone"].finish_reason == "abort"
    assert outputs["stays"].token_ids == expected_output(PROMPT[:70], 40)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("when", range(1, 6))
def test_a_verify_step_that_fails_leaves_nothing(when: int, monkeypatch):
    llm = oracle(3)
    llm.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=40), request_id="r")
    for _ in range(when):
        llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.worker.model, "fail_after", 0)
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.step()
    llm.scheduler.check()
    assert llm.manager.linear.num_live == 0
    while llm.has_unfinished():
        outputs = llm.step()
    assert outputs[-1].token_ids == expected_output(PROMPT, 40)


def test_tokens_that_are_replayed_are_not_guessed(monkeypatch):
    llm = oracle(3)
    llm.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=40), request_id="r")
    for _ in range(4):
        llm.step()
    [seq] = llm.scheduler.running
    known = seq.num_tokens
    llm.scheduler._preempt(seq)
    issue, rows = llm.worker.issue, []

    def watching(batch: Batch, *before):
        rows.extend(batch.rows)
        return issue(batch, *before)

    monkeypatch.setattr(llm.worker, "issue", watching)
    while llm.has_unfinished():
        outputs = llm.step()
    assert outputs[-1].token_ids == expected_output(PROMPT, 40)
    replayed = [row for row in rows if row.end < known]
    assert len(replayed) > 3 and not any(row.num_drafts for row in replayed)


def test_guesses_never_evict_a_state():
    """The slots they need are set aside: hits are those of plain decoding."""
    for drafts, num_slots in ((0, 8), (5, 8 + 6)):
        llm = oracle(drafts, lambda _: False, num_slots=num_slots, max_num_seqs=1)
        prompts = [[i, *PROMPT] for i in range(6)]
        for prompt in [*prompts, *prompts]:
            finish(llm, prompt, max_tokens=8)
        assert (llm.stats().hits, llm.stats().state_evictions) == (6, 0)


def test_too_few_slots_for_guesses_are_refused():
    with pytest.raises(ValueError, match=r"num_slots=16: must be at least 21: .*max_num_seqs=4"):
        EngineConfig(num_slots=16, max_num_seqs=4, num_speculative_tokens=3)
    EngineConfig(num_slots=21, max_num_seqs=4, num_speculative_tokens=3)


def test_nobody_is_preempted_for_guesses():
    """Blocks for both answers, and not one more: the guesses of the last block are given up."""
    for num_blocks in range(10, 16):
        llm = oracle(5, block_size=16, num_blocks=num_blocks, enable_prefix_caching=False)
        prompts = [PROMPT[:60], PROMPT[10:70]]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == expected_output(prompt, 6)
        if num_blocks >= 11:  # 5 each, and the padding
            assert llm.stats().preemptions == 0


# ---- the real model


def right_guesses(llm: LLM, prompts, sampling, period: int = 1000) -> None:
    """Replace the random draft head's guesses by true ones, but at each `period`-th position."""
    draft = llm.worker.model.draft
    known = {tuple(p): [*p, *cold("drafts", p, sampling).token_ids] for p in prompts}

    def guess(rows, read_slots, pool, kv_cache):
        guesses = draft(rows, read_slots, pool, kv_cache)
        for row, its in zip(rows, guesses, strict=True):
            said = known[tuple(row.seq.prompt_token_ids)]
            for i in range(len(its)):
                position = row.start + 1 + i
                if position < len(said) and position % period:
                    its[i] = said[position]
        return guesses

    llm.worker.model.draft = guess


@pytest.fixture
def engine():
    """Engines whose model's `draft` is as it was, afterwards."""
    made = []

    def make(**config):
        config = {
            "num_speculative_tokens": 3,
            "num_slots": 60,
            "num_blocks": 60,
            "max_num_seqs": 4,
            **config,
        }
        made.append(make_engine("drafts", **config))
        return made[-1]

    yield make
    for llm in made:
        llm.worker.model.__dict__.pop("draft", None)


LONG = replace(GREEDY, max_tokens=24)
FORKS = [fork(70, 30, branch=i) for i in range(3)]


@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("period", [1, 3, 1000])
def test_verified_tokens_have_the_bits_of_tokens_decoded_one_by_one(engine, restore, period):
    llm = engine(restore=restore)
    right_guesses(llm, FORKS, LONG, period)
    arrivals = [Arrival(p, 24, step=2 * i, sampling=LONG) for i, p in enumerate([*FORKS, FORKS[0]])]
    outputs = drive(llm, arrivals)
    for prompt, output in zip([*FORKS, FORKS[0]], outputs, strict=True):
        assert_same_bits(output, cold("drafts", prompt, LONG))
    assert outputs[-1].boundary == 64
    if period == 1000:
        assert llm.stats().tokens_accepted == llm.stats().tokens_drafted > 0


def test_drawn_tokens_are_the_same_with_and_without_guesses(engine):
    drawn = replace(LONG, temperature=1.0, seed=5)
    llm = engine()
    right_guesses(llm, FORKS, drawn, 4)
    outputs = drive(llm, [Arrival(p, 24, sampling=drawn) for p in FORKS])
    for prompt, output in zip(FORKS, outputs, strict=True):
        assert_same_bits(output, cold("drafts", prompt, drawn))


def guesses_of(llm: LLM, prompt) -> list[list[int]]:
    """What the draft head says in each step of a request."""
    told = []
    draft = type(llm.worker.model).draft.__get__(llm.worker.model)

    def listening(*args):
        guesses = draft(*args)
        told.append(guesses[0])
        return guesses

    llm.worker.model.draft = listening
    llm.generate([list(prompt)], LONG)
    return told


def test_the_draft_head_says_the_same_after_a_hit_as_in_a_cold_run(engine):
    """Its K/V and its hidden row lie in the blocks and slots that are shared."""
    prompt = tokens(7, 150)
    cold_run = guesses_of(engine(enable_prefix_caching=False), prompt)
    for restore in ("copy", "redirect"):
        llm = engine(restore=restore)
        first, second = guesses_of(llm, prompt), guesses_of(llm, prompt)
        assert llm.stats().hits == 1
        assert first == second == cold_run


def test_the_draft_head_is_the_function_that_its_tensors_say():
    """Against the equations, on dense tensors: row p of embedding p and hidden row p - 1."""
    config = ModelConfig.from_directory(directory("drafts"))
    weights = dict(read_weights(directory("drafts"), config, draft=True))
    mtp = {n.removeprefix("mtp."): t.double() for n, t in weights.items() if n.startswith("mtp.")}
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    ids = list(tokens(3, 9))
    expected = draft_reference(config, weights, mtp, ids, hidden)
    llm = make_engine("drafts", num_speculative_tokens=1, num_slots=60, num_blocks=60)
    model = llm.worker.model
    got = draft_stepwise(model, llm.worker.kv_cache, ids, hidden.float())
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def draft_reference(config, weights, mtp, ids, hidden):
    """The head's hidden rows of all positions, in float64."""

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (1 + weight)

    def rotated(x):  # [T, heads, D]
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
        angles = torch.outer(torch.arange(len(x)).double(), config.rope_theta**-exponents)[:, None]
        a, b = x[..., : config.rotary_dim].chunk(2, -1)
        turned = torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )
        return torch.cat([turned, x[..., config.rotary_dim :]], -1)

    layer = {n.removeprefix("layers.0."): t for n, t in mtp.items() if n.startswith("layers.0.")}
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    embedded = weights["embed_tokens.weight"].double()[ids]
    fused = torch.cat(
        [
            norm(embedded, mtp["pre_fc_norm_embedding.weight"]),
            norm(before, mtp["pre_fc_norm_hidden.weight"]),
        ],
        -1,
    )
    x = fused @ mtp["fc.weight"].T
    T, heads, kv, D = (
        len(ids),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    h = norm(x, layer["input_layernorm.weight"])
    q_gate = (h @ layer["self_attn.q_proj.weight"].T).view(T, heads, 2, D)
    q = rotated(norm(q_gate[:, :, 0], layer["self_attn.q_norm.weight"]))
    k = rotated(
        norm(
            (h @ layer["self_attn.k_proj.weight"].T).view(T, kv, D),
            layer["self_attn.k_norm.weight"],
        )
    )
    v = (h @ layer["self_attn.v_proj.weight"].T).view(T, kv, D)
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * D**-0.5
    scores += torch.full((T, T), -torch.inf).double().triu(1)
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v) * q_gate[:, :, 1].sigmoid()
    x = x + mixed.reshape(T, -1) @ layer["self_attn.o_proj.weight"].T
    h = norm(x, layer["post_attention_layernorm.weight"])
    gate, up = (h @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return norm(x, mtp["norm.weight"])


def draft_stepwise(model, kv_cache, ids, hidden):
    """The head run row by row over paged K/V, as in a draft."""
    from engine.batch import ScheduledRow, draft_inputs
    from engine.sequence import Sequence

    seq = Sequence("r", ids, SamplingParams())
    seq.block_table = [5, 2]
    rows = []
    for p, token in enumerate(ids):
        inputs = draft_inputs([ScheduledRow(seq, p, p + 1, None)], 0, block_size=64)
        rotations = model._cos[inputs.positions], model._sin[inputs.positions]
        before = hidden[p - 1 : p] if p else torch.zeros_like(hidden[:1])
        _, out = model.draft_head.guess(torch.tensor([token]), before, inputs, kv_cache, rotations)
        rows.append(out)
    return torch.cat(rows)


# ---- refusals


def test_a_model_directory_without_a_draft_head_is_refused():
    with pytest.raises(ValueError, match=r"no mtp\.\* tensors.*num_speculative_tokens=0"):
        LLM(directory("float32"), num_speculative_tokens=2, memory_budget_bytes=16 << 20)


def test_a_model_loaded_without_its_draft_head_is_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens=2: the model was loaded without"):
        make_engine("float32", num_speculative_tokens=2)


@pytest.mark.parametrize("count", [-1, 17])
def test_a_number_of_guesses_out_of_range_is_refused(count: int):
    with pytest.raises(ValueError, match=rf"num_speculative_tokens={count}: must be in \[0, 16\]"):
        EngineConfig(num_speculative_tokens=count)


def test_the_draft_head_is_loaded_from_a_directory_and_used():
    llm = LLM(directory("drafts"), num_speculative_tokens=2, memory_budget_bytes=32 << 20)
    [output] = llm.generate([list(tokens(1, 80))], LONG)
    assert_same_bits(output, cold("drafts", tokens(1, 80), LONG))
    assert llm.stats().tokens_drafted > 0
    plain = LLM(directory("drafts"), memory_budget_bytes=32 << 20)
    [same] = plain.generate([list(tokens(1, 80))], LONG)
    assert_same_bits(same, output)
    assert plain.stats().tokens_drafted == 0
