"""An identical prompt runs no forward pass and gives the bits of a cold run, whatever is set."""

import math
from dataclasses import replace

import pytest
import torch

from cache.hashing import Namespace
from cache.state_pool import StatePool
from engine import LLM, EngineConfig, SamplingParams
from engine.model import Qwen35Model
from engine.sequence import Sequence
from engine.stream import InlineStream, ThreadStream
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_idle,
    cold,
    drive,
    fork,
    make_engine,
    tokens,
)
from tests.engine.test_overlap import interrupt_at
from tests.lazy_stream import LazyStream
from tests.oracle import OracleModel, expected_output

PLACEMENT = "prompt_end+branch+whole_prompt"
POOLS = {"num_slots": 40, "num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
LENGTHS = [1, 40, 63, 64, 65, 130, 192, 200]
SETTINGS = [
    {"overlap": False, "restore": "copy", "block_size": 16},
    {"overlap": False, "restore": "redirect", "block_size": 64},
    {"overlap": True, "restore": "copy", "block_size": 64},
    {"overlap": True, "restore": "redirect", "block_size": 16},
    {"overlap": False, "restore": "copy", "block_size": 64, "num_speculative_tokens": 2},
    {"overlap": False, "restore": "redirect", "block_size": 16, "num_speculative_tokens": 1},
    {"overlap": True, "restore": "redirect", "block_size": 64, "chunk_stride": 128},
]


def engine(kind="float32", **config):
    return make_engine(kind, **POOLS | {"placement": PLACEMENT} | config)


@pytest.fixture
def forwards(monkeypatch):
    """The number of tokens of each forward pass."""
    seen = []
    forward = Qwen35Model.forward

    def counting(model, inputs, pool, kv_cache):
        seen.append(len(inputs.token_ids))
        return forward(model, inputs, pool, kv_cache)

    monkeypatch.setattr(Qwen35Model, "forward", counting)
    return seen


def one(llm, prompt, sampling=GREEDY, **options):
    """One request alone, to its end."""
    llm.add_request(prompt, sampling, request_id="one", **options)
    for _ in range(200):
        done = [output for output in llm.step() if output.finished]
        llm.scheduler.check()
        if done:
            llm.step()
            assert_idle(llm)
            return done[0]
    raise AssertionError("no progress")


def assert_whole(output):
    """It was found as a whole, and is told so."""
    length = len(output.prompt_token_ids)
    assert (output.num_cached_tokens, output.boundary) == (length, length)
    assert output.miss_reason is output.limit_reason is None


# ---- bits, and no forward pass


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_again_has_the_bits_of_a_cold_run_and_no_prefill(config, length, forwards):
    kind = "drafts" if config.get("num_speculative_tokens") else "float32"
    llm = engine(kind, **config)
    [first] = drive(llm, [Arrival(tokens(3, length))])
    assert first.boundary == 0
    prefilled = llm.stats().tokens_prefilled
    for max_tokens in (1, 5, 3):
        forwards.clear()
        [output] = drive(llm, [Arrival(tokens(3, length), max_tokens)])
        assert_whole(output)
        assert len(forwards) <= max_tokens - 1 and all(count <= 3 for count in forwards)
        assert_cold_bits(kind, output)
    assert llm.stats().tokens_prefilled == prefilled
    assert llm.stats().hits == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_for_one_token_runs_nothing_and_restores_nothing(overlap, forwards):
    llm = engine(overlap=overlap)
    once = replace(GREEDY, max_tokens=1)
    one(llm, tokens(3, 100), once)
    forwards.clear()
    output = one(llm, tokens(3, 100), once)
    assert forwards == [] and llm.last_restore_seconds is None
    assert_whole(output)
    assert_cold_bits("float32", output)


DRAWN = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.9,
    seed=7,
    max_tokens=6,
    ignore_eos=True,
    logprobs=4,
    return_logits=True,
)


@pytest.mark.parametrize("overlap", [False, True])
def test_drawn_tokens_and_log_probabilities_are_those_of_a_cold_run(overlap):
    llm = engine(overlap=overlap)
    one(llm, tokens(3, 100))
    for seed in (7, 8, 9):
        sampling = replace(DRAWN, seed=seed)
        output = one(llm, tokens(3, 100), sampling)
        assert_whole(output)
        assert_cold_bits("float32", output, sampling)
        assert output.logprobs == cold("float32", tokens(3, 100), sampling).logprobs


@pytest.mark.parametrize("overlap", [False, True])
def test_a_first_token_that_stops_ends_it(overlap, forwards):
    llm = engine(overlap=overlap)
    first = one(llm, tokens(3, 100)).token_ids[0]
    forwards.clear()
    output = one(llm, tokens(3, 100), replace(GREEDY, stop_token_ids=(first,)))
    assert (output.token_ids, output.finish_reason) == ([first], "stop")
    assert len(forwards) <= int(overlap), "with overlap the next step was issued before it was read"


def test_logits_that_a_caller_changes_are_his_own():
    llm = engine()
    for _ in range(3):
        output = one(llm, tokens(3, 100))
        assert_cold_bits("float32", output)
        for row in output.logits:
            row.fill_(0.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_hits_beside_prefills_and_decodes_change_no_bit(kind, overlap):
    """trap 34"""
    llm = engine(kind, overlap=overlap, max_num_batched_tokens=256)
    again, other = fork(128, 40), fork(70, 30, branch=2)
    drive(llm, [Arrival(again), Arrival(other)])
    arrivals = [
        Arrival(fork(200, 50, branch=3), 8),
        Arrival(again, 6, step=1),
        Arrival(again, 4, step=1, sampling=replace(GREEDY, temperature=0.8, seed=3)),
        Arrival(fork(20, 9, branch=4), 5, step=1),
        Arrival(other, 1, step=2),
        Arrival(other, 6, step=2),
        Arrival(again, 3, step=3),
    ]
    outputs = drive(llm, arrivals)
    for output, arrival in zip(outputs, arrivals, strict=True):
        assert_cold_bits(kind, output, arrival.sampling)
    for index in (1, 2, 4, 5, 6):
        assert_whole(outputs[index])


def test_a_hit_needs_no_token_budget():
    llm = engine(max_num_batched_tokens=128)
    one(llm, tokens(3, 100))
    llm.add_request(fork(400, 0), GREEDY)
    llm.add_request(tokens(3, 100), GREEDY, request_id="again")
    assert [output.request_id for output in llm.step()] == ["again"]


def test_it_is_off_unless_it_is_asked_for():
    llm = engine(placement=None)
    one(llm, tokens(3, 100))
    assert one(llm, tokens(3, 100)).boundary == 64
    assert llm.stats().smallest_prompt_that_can_hit == 65
    assert engine().stats().smallest_prompt_that_can_hit == 1


@pytest.mark.parametrize(
    ("kind", "config"), [("attention", {}), ("float32", {"enable_prefix_caching": False})]
)
def test_without_recurrent_layers_or_caching_the_placement_has_no_effect(kind, config):
    llm = engine(kind, **config)
    outputs = [one(llm, tokens(3, 100)) for _ in range(2)]
    assert [output.boundary for output in outputs] == [0, 64 if kind == "attention" else 0]
    for output in outputs:
        assert_cold_bits(kind, output)


def test_a_model_without_attention_layers_has_whole_prompts():
    llm = engine("recurrent")
    outputs = [one(llm, tokens(3, 100)) for _ in range(2)]
    assert_whole(outputs[1])
    for output in outputs:
        assert_cold_bits("recurrent", output)


# ---- whose it is


def test_background_requests_neither_take_nor_leave_it():
    llm = engine()
    one(llm, tokens(3, 100), replace(GREEDY, max_tokens=1), background=True)
    assert one(llm, tokens(3, 100)).boundary == 64
    assert one(llm, tokens(3, 100)).boundary == 100
    before = llm.stats().tokens_prefilled_idle
    one(llm, tokens(3, 100), background=True)
    assert llm.stats().tokens_prefilled_idle == before + 36


def test_it_is_exact_for_requests_of_both_kinds():
    llm = engine()
    one(llm, tokens(3, 100), exact=False)
    for exact in (False, True):
        output = one(llm, tokens(3, 100), exact=exact)
        assert_whole(output)
        assert output.exact
        assert_cold_bits("float32", output)


def test_what_follows_from_decoded_content_is_not_for_exact_requests():
    llm = engine()
    said = one(llm, tokens(3, 100), replace(GREEDY, max_tokens=60), exact=False)
    following = [*tokens(3, 100), *said.token_ids, 5, 6, 7]
    assert not one(llm, following, exact=False).exact
    inexact = one(llm, following, exact=False)
    assert_whole(inexact)
    assert not inexact.exact
    exact = one(llm, following)
    assert exact.boundary < len(following)
    assert_cold_bits("float32", exact)


def test_salts_are_apart():
    llm = engine()
    one(llm, tokens(3, 40), cache_salt="a")
    assert one(llm, tokens(3, 40), cache_salt="b").num_cached_tokens == 0
    assert_whole(one(llm, tokens(3, 40), cache_salt="a"))


# ---- when something goes wrong


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("config", [{}, {"restore": "copy"}])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_hit_that_is_preempted_replays_its_tokens(overlap, config, steps):
    """trap 19"""
    llm = engine(overlap=overlap, **config)
    one(llm, tokens(3, 100))
    llm.add_request(tokens(3, 100), replace(GREEDY, max_tokens=6), request_id="again")
    for _ in range(steps + 1):
        llm.step()
    llm.scheduler._preempt(llm.scheduler.running[0])
    llm.scheduler.check()
    done = []
    while not done:
        done = [output for output in llm.step() if output.finished]
        llm.scheduler.check()
    assert_whole(done[0])
    assert_cold_bits("float32", done[0])
    llm.step()
    assert_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_hit", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_abort_at_any_step_leaks_nothing(overlap, is_hit, step):
    """trap 21"""
    llm = engine(overlap=overlap)
    if is_hit:
        one(llm, tokens(3, 100))
    drive(llm, [Arrival(tokens(3, 100), 8, abort_step=step), Arrival(tokens(4, 90), 8)])
    for _ in range(2):
        output = one(llm, tokens(3, 100))
        assert_cold_bits("float32", output)
    assert_whole(output)


def test_an_abort_before_its_logits_are_read_keeps_nothing():
    llm = engine(overlap=True)
    llm.add_request(tokens(3, 100), GREEDY, request_id="gone")
    assert llm.step() == []
    assert llm.abort("gone") is not None
    llm.step()
    assert_idle(llm)
    assert one(llm, tokens(3, 100)).boundary == 64


def whole_slot(llm, prompt):
    """The slot of the state after a whole prompt; None if it is not kept."""
    namespace = Namespace(llm.model_config.fingerprint)
    seq = Sequence("probe", prompt, GREEDY, namespace=namespace)
    found = llm.manager.linear.cache.find(seq.whole_key(llm.manager.linear.domain))
    return None if found is None else found.slot_id


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_that_can_not_be_restored_costs_a_prefill_and_is_not_found_again(
    overlap, monkeypatch
):
    """trap 20"""
    llm = engine(overlap=overlap, restore="copy")
    one(llm, tokens(3, 100))
    bad, copy = whole_slot(llm, tokens(3, 100)), StatePool.copy

    def failing(pool, sources, destinations):
        if bad in sources:
            pool.arena[destinations] = 255
            raise RuntimeError("copy failed")
        copy(pool, sources, destinations)

    monkeypatch.setattr(StatePool, "copy", failing)
    output = one(llm, tokens(3, 100), replace(GREEDY, max_tokens=5))
    assert_cold_bits("float32", output)
    assert llm.stats().cold_starts == 1
    assert whole_slot(llm, tokens(3, 100)) is None
    for _ in range(2):
        output = one(llm, tokens(3, 100))
        assert_cold_bits("float32", output)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_that_fails_costs_what_would_be_kept_and_nothing_else(overlap, monkeypatch):
    llm = engine(overlap=overlap)

    def failing(pool, sources, destinations):
        raise RuntimeError("copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "copy", failing)
        output = one(llm, tokens(3, 100))
    assert_cold_bits("float32", output)
    assert output.finish_reason == "length" and whole_slot(llm, tokens(3, 100)) is None
    assert one(llm, tokens(3, 100)).boundary == 64
    assert_whole(one(llm, tokens(3, 100)))


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_finite_are_never_kept(overlap, monkeypatch):
    llm = engine(overlap=overlap)
    forward = Qwen35Model.forward

    def spoiling(model, inputs, pool, kv_cache):
        return forward(model, inputs, pool, kv_cache) * math.nan

    with monkeypatch.context() as patch:
        patch.setattr(Qwen35Model, "forward", spoiling)
        assert one(llm, tokens(3, 100)).finish_reason == "error"
    assert whole_slot(llm, tokens(3, 100)) is None
    output = one(llm, tokens(3, 100))
    assert output.num_cached_tokens == 0
    assert_cold_bits("float32", output)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_whose_answer_breaks_is_forgotten_as_a_whole(overlap, monkeypatch):
    llm = engine(overlap=overlap)
    one(llm, tokens(3, 100))
    forward = Qwen35Model.forward

    def spoiling(model, inputs, pool, kv_cache):
        return forward(model, inputs, pool, kv_cache) * math.nan

    with monkeypatch.context() as patch:
        patch.setattr(Qwen35Model, "forward", spoiling)
        output = one(llm, tokens(3, 100))
    assert output.finish_reason == "error" and len(output.token_ids) == 1
    assert whole_slot(llm, tokens(3, 100)) is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_keeps_nothing_and_its_hits_start_again(overlap, monkeypatch):
    llm = engine(overlap=overlap)
    one(llm, tokens(3, 100))
    forward = Qwen35Model.forward

    def failing(model, inputs, pool, kv_cache):
        raise RuntimeError("the device is gone")

    for name, prompt in (("again", tokens(3, 100)), ("new", tokens(4, 90))):
        llm.add_request(prompt, GREEDY, request_id=name)
    with monkeypatch.context() as patch:
        patch.setattr(Qwen35Model, "forward", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            for _ in range(2):
                llm.step()
    llm.scheduler.check()
    assert whole_slot(llm, tokens(4, 90)) is None
    monkeypatch.setattr(Qwen35Model, "forward", forward)
    done = {}
    while len(done) < 2:
        done |= {o.request_id: o for o in llm.step() if o.finished}
    for output in done.values():
        assert_cold_bits("float32", output)
    llm.step()
    assert_idle(llm)


@pytest.mark.parametrize("eviction", ["lru", "value", "lru_cap_per_path(2)", "flop_aware(0.5)"])
@pytest.mark.parametrize("overlap", [False, True])
def test_under_pressure_hits_come_and_go_and_no_bit_changes(overlap, eviction):
    llm = engine(
        overlap=overlap,
        eviction=eviction,
        num_slots=10,
        num_blocks=40,
        block_size=16,
        max_num_seqs=3,
        max_num_batched_tokens=128,
    )
    prompts = [tokens(family, 60 + 17 * family) for family in range(6)]
    order = [0, 1, 0, 2, 0, 1, 3, 3, 4, 0, 5, 5, 2, 2, 1, 0, 4, 4]
    arrivals = [Arrival(prompts[p], 4, step=3 * i) for i, p in enumerate(order)]
    outputs = drive(llm, arrivals)
    for output in outputs:
        assert_cold_bits("float32", output)
    whole = sum(output.boundary == len(output.prompt_token_ids) for output in outputs)
    assert 1 <= whole < len(order) - 6, "some are found, some are evicted"


# ---- when it is known, with the integer oracle


ORACLE = {"num_slots": 14, "num_blocks": 60, "max_num_seqs": 3, "placement": PLACEMENT}
PROMPT = list(range(100))


def oracle(stream=None, **options):
    config = EngineConfig(**(ORACLE | {"overlap": stream is not None} | options))
    llm = LLM.from_model(OracleModel(), config)
    if stream is not None:
        llm.worker.stream.submit(lambda: None).result()
        llm.worker.stream = stream()
    return llm


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def scheduled(llm, monkeypatch):
    """(name, start, end) of all rows from now on."""
    schedule, seen = llm.scheduler.schedule, []

    def scheduling():
        batch = schedule()
        if batch is not None:
            seen.append([(row.seq.request_id, row.start, row.end) for row in batch.rows])
        return batch

    monkeypatch.setattr(llm.scheduler, "schedule", scheduling)
    return seen


@pytest.mark.parametrize("stream", [InlineStream, LazyStream, ThreadStream])
def test_it_is_not_found_before_its_logits_were_read(stream, monkeypatch):
    """trap 13: the step that is scheduled ahead goes on from the grid."""
    llm = oracle(stream)
    seen = scheduled(llm, monkeypatch)
    for name in "abc":
        llm.add_request(PROMPT, greedy(3), request_id=name)
        llm.step()
    assert seen[0] == [("a", 0, 100)]
    assert ("b", 64, 100) in seen[1] and ("c", 100, 100) in seen[2]
    done = {}
    while len(done) < 3:
        done |= {o.request_id: o for o in llm.step() if o.finished}
    for output in done.values():
        assert output.token_ids == expected_output(PROMPT, 3)


def test_without_overlap_the_next_step_finds_it(monkeypatch):
    llm = oracle()
    seen = scheduled(llm, monkeypatch)
    for name in "ab":
        llm.add_request(PROMPT, greedy(1), request_id=name)
        [output] = llm.step()
        assert output.token_ids == expected_output(PROMPT, 1)
    assert seen == [[("a", 0, 100)], [("b", 100, 100)]]


def test_a_prompt_that_is_prefilled_again_for_its_answer_has_no_logits_to_keep():
    llm = oracle()
    llm.add_request(PROMPT, greedy(4), request_id="a")
    for _ in range(2):
        llm.step()
    [seq] = llm.scheduler.running
    llm.manager.forget(seq)
    llm.scheduler._preempt(seq)
    llm.step()
    assert (seq.num_computed_tokens, seq.num_generated) == (100, 2)
    assert seq.whole_save is None and llm.manager.linear.pool.num_in_use == 1
    while llm.has_unfinished():
        [output] = llm.step() or [None]
    assert output.token_ids == expected_output(PROMPT, 4)


@pytest.mark.parametrize("verified", [[True, False], [False, True], [False, False]])
def test_a_prompt_is_kept_beside_guesses_that_are_verified(verified):
    """verified: whether those requests want their logits."""
    llm = oracle(num_speculative_tokens=2, num_slots=30)
    for index, wants in enumerate(verified):
        sampling = replace(greedy(20), return_logits=wants)
        llm.add_request([index, *range(50)], sampling, request_id=str(index))
    llm.step()
    llm.add_request(PROMPT, greedy(1), request_id="new")
    done = {o.request_id: o for o in llm.step() if o.finished}
    llm.add_request(PROMPT, greedy(3), request_id="again")
    while llm.has_unfinished():
        done |= {o.request_id: o for o in llm.step() if o.finished}
    assert_whole(done["again"])
    assert done["again"].token_ids == expected_output(PROMPT, 3)
    for index in range(len(verified)):
        assert done[str(index)].token_ids == expected_output([index, *range(50)], 20)


@pytest.mark.parametrize("stream", [None, InlineStream, LazyStream])
def test_a_hit_beside_one_that_replays_gets_its_own_token(stream):
    llm = oracle(stream)
    prompts = {"a": PROMPT, "b": PROMPT[:40]}
    llm.generate(list(prompts.values()), greedy(1))
    llm.add_request(prompts["a"], greedy(5), request_id="a")
    for _ in range(3):
        llm.step()
    llm.scheduler._preempt(llm.scheduler.running[0])
    llm.add_request(prompts["b"], greedy(5), request_id="b")
    done = {}
    while llm.has_unfinished():
        done |= {o.request_id: o for o in llm.step() if o.finished}
    for name, prompt in prompts.items():
        assert_whole(done[name])
        assert done[name].token_ids == expected_output(prompt, 5)


def test_a_doubted_hit_starts_again(monkeypatch):
    """What it found may go on from something broken, as the step before has shown."""
    llm = oracle(LazyStream)
    llm.generate([PROMPT], greedy(2))
    llm.add_request(PROMPT[:70], greedy(2), request_id="bad")
    forward = llm.worker.model.forward
    llm.worker.model.forward = lambda *args: forward(*args) * math.nan
    llm.step()
    seen = scheduled(llm, monkeypatch)
    llm.add_request(PROMPT, greedy(2), request_id="again")
    llm.step()
    llm.worker.model.forward = forward
    assert seen == [[("bad", 70, 71), ("again", 100, 100)]]
    done = {}
    while llm.has_unfinished():
        done |= {o.request_id: o for o in llm.step() if o.finished}
    assert seen[1] == [("again", 0, 100)]
    assert done["again"].token_ids == expected_output(PROMPT, 2)


@pytest.mark.parametrize("stream", [None, InlineStream, LazyStream])
def test_an_interrupt_at_any_line_of_a_hit_changes_no_token_and_leaks_nothing(stream):
    number = 1
    while True:
        llm = oracle(stream)
        llm.generate([PROMPT, PROMPT[:40]], greedy(2))
        for name, prompt in (("a", PROMPT), ("b", PROMPT[:40]), ("c", PROMPT[:90])):
            llm.add_request(prompt, greedy(3), request_id=name)
        if not interrupt_at(llm, number):
            break
        done = {}
        while len(done) < 3:
            done |= {o.request_id: o for o in llm.step() if o.finished}
            llm.scheduler.check()
        for name, prompt in (("a", PROMPT), ("b", PROMPT[:40]), ("c", PROMPT[:90])):
            assert done[name].token_ids == expected_output(prompt, 3), f"at line event {number}"
        llm.step()
        stats = llm.stats()
        assert stats.blocks_in_use == stats.slots_live == llm.manager.linear.pool.num_in_use == 0
        number += 23
    assert number > 200


def test_the_kept_logits_are_those_of_the_last_token():
    llm = engine()
    reference = cold("float32", tokens(3, 100)).logits[0]
    one(llm, tokens(3, 100))
    namespace = Namespace(llm.model_config.fingerprint)
    seq = Sequence("probe", tokens(3, 100), GREEDY, namespace=namespace)
    found = llm.manager.linear.cache.find(seq.whole_key(llm.manager.linear.domain))
    assert torch.equal(found.logits.logits, reference)
    assert found.logits.likeliest == int(reference.argmax())
    assert found.boundary == 100
