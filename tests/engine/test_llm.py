"""The front door: prompts in, outputs out, step by step or all at once."""

from dataclasses import replace

import pytest

from cache.flop_aware import FlopAware
from cache.value_index import ValueIndex
from engine import LLM, EngineConfig, SamplingParams
from engine.model_config import ModelConfig
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_idle,
    cold,
    directory,
    drive,
    fork,
    make_engine,
    tokens,
)

TEXT = "naïve 日本 🙂"


def test_a_directory_and_config_fields_make_an_engine():
    llm = LLM(str(directory()), block_size=32, num_blocks=30, num_slots=20)
    assert llm.config == EngineConfig(block_size=32, num_blocks=30, num_slots=20)
    stats = llm.stats()
    assert (stats.blocks_total, stats.slots_total) == (29, 19)
    [output] = llm.generate([list(tokens(0, 70))], GREEDY)
    assert_cold_bits("float32", output)


def test_a_directory_runs_in_the_dtype_of_its_weights_or_the_one_asked_for():
    pools = {"num_blocks": 30, "num_slots": 20}
    [output] = LLM(directory("bfloat16"), **pools).generate([tokens(0, 70)], GREEDY)
    assert_cold_bits("bfloat16", output)
    [wide] = LLM(directory("bfloat16"), dtype="float32", **pools).generate([tokens(0, 70)], GREEDY)
    assert (wide.logits[0] - output.logits[0]).abs().max() > 0
    [narrow] = LLM(directory(), dtype="bfloat16", **pools).generate([tokens(0, 70)], GREEDY)
    reference = cold("float32", tokens(0, 70))
    distance = (narrow.logits[0] - reference.logits[0]).abs().max()
    assert 0 < distance < 0.5


def test_text_and_ids_of_one_prompt_give_one_answer():
    llm = make_engine(enable_prefix_caching=False)
    ids = list(TEXT.encode())
    for prompt in (TEXT, ids, tuple(ids), [TEXT], [ids], (tuple(ids),)):
        [output] = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == ids
        assert_cold_bits("float32", output)


def test_special_tokens_in_a_text_become_their_ids():
    [output] = make_engine().generate("a<|im_end|>", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [97, 258]


def test_outputs_come_in_the_order_of_the_prompts_whenever_they_end():
    prompts = [tokens(0, 300), "short", tokens(1, 5), tokens(2, 129)]
    params = [replace(GREEDY, max_tokens=n) for n in (1, 9, 2, 5)]
    outputs = make_engine(max_num_batched_tokens=64, max_num_seqs=2).generate(prompts, params)
    expected = [list(p.encode()) if isinstance(p, str) else list(p) for p in prompts]
    assert [output.prompt_token_ids for output in outputs] == expected
    assert [len(output.token_ids) for output in outputs] == [1, 9, 2, 5]
    assert len({output.request_id for output in outputs}) == 4
    for output in outputs:
        assert output.finished and output.finish_reason == "length"
        assert_cold_bits("float32", output)


def test_no_prompts_give_no_outputs():
    assert make_engine().generate([]) == []


def test_steps_return_the_tokens_one_by_one():
    llm = make_engine(max_num_batched_tokens=64)
    assert llm.step() == []
    llm.add_request(tokens(0, 130), replace(GREEDY, max_tokens=3), request_id="mine")
    assert llm.has_unfinished()
    seen = [llm.step() for _ in range(5)]
    assert [len(outputs) for outputs in seen] == [0, 0, 1, 1, 1]
    outputs = [output for [output] in seen[2:]]
    reference = cold("float32", tokens(0, 130)).token_ids
    assert [output.token_ids for output in outputs] == [reference[:n] for n in (1, 2, 3)]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert {output.request_id for output in outputs} == {"mine"}
    assert {output.ttft_ms for output in outputs} == {outputs[0].ttft_ms}
    assert 0 < outputs[0].ttft_ms < 60_000
    assert_idle(llm)


def test_requests_wait_for_a_free_place():
    llm = make_engine(max_num_seqs=2)
    for i in range(5):
        llm.add_request(tokens(i, 10), GREEDY, request_id=str(i))
    llm.step()
    stats = llm.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.slots_live) == (2, 3, 2)
    order = []
    while llm.has_unfinished():
        order += [output.request_id for output in llm.step() if output.finished]
    assert order == ["0", "1", "2", "3", "4"]
    assert_idle(llm)


def test_a_request_id_is_free_again_when_its_request_has_ended():
    llm = make_engine()
    for _ in range(2):
        llm.add_request(tokens(0, 5), replace(GREEDY, max_tokens=1), request_id="a")
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            llm.add_request(tokens(1, 5), GREEDY, request_id="a")
        [output] = llm.step()
        assert output.finished
    assert_idle(llm)


def test_generate_refuses_to_swallow_the_outputs_of_queued_requests():
    llm = make_engine()
    llm.add_request(tokens(0, 70), replace(GREEDY, max_tokens=9), request_id="earlier")
    with pytest.raises(RuntimeError, match="generate runs alone"):
        llm.generate([tokens(1, 70)], GREEDY)
    while llm.has_unfinished():
        [other] = llm.step()
    assert other.request_id == "earlier" and len(other.token_ids) == 9
    assert_cold_bits("float32", other)
    [output] = llm.generate([tokens(1, 70)], GREEDY)
    assert_cold_bits("float32", output)


def test_aborting_the_unknown_and_the_ended_gives_none():
    llm = make_engine()
    assert llm.abort("nobody") is None
    request_id = llm.add_request(tokens(0, 5), replace(GREEDY, max_tokens=1))
    llm.step()
    assert llm.abort(request_id) is None
    assert_idle(llm)


def test_a_waiting_request_can_be_aborted():
    llm = make_engine(max_num_seqs=1)
    llm.add_request(tokens(0, 70), GREEDY)
    waiting = llm.add_request(tokens(1, 70), GREEDY)
    llm.step()
    output = llm.abort(waiting)
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert llm.abort(waiting) is None
    while llm.has_unfinished():
        [output] = llm.step()
    assert_cold_bits("float32", output)
    assert llm.stats().queries == 1
    assert_idle(llm)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_running_request_can_be_aborted_and_what_it_saved_stays_right(steps):
    llm = make_engine(max_num_batched_tokens=64, checkpoint_every=64)
    request_id = llm.add_request(fork(150, 20), GREEDY)
    for _ in range(steps):
        llm.step()
    output = llm.abort(request_id)
    assert output.finish_reason == "abort" and len(output.token_ids) == max(0, steps - 2)
    assert_cold_bits("float32", output)
    assert_idle(llm)
    [after] = drive(llm, [Arrival(fork(150, 9, branch=2))])
    assert after.boundary == min(steps * 64, 128)
    assert_cold_bits("float32", after)


def test_two_engines_around_one_model_object_do_not_disturb_each_other():
    large = make_engine(owner="shared", num_blocks=20, num_slots=20, max_num_seqs=2)
    make_engine(owner="shared", num_blocks=3, num_slots=3, max_num_seqs=2)
    [output] = large.generate([tokens(0, 700)], GREEDY)
    assert_cold_bits("float32", output)


def test_the_longest_prompt_a_model_can_take_is_answered():
    longest = ModelConfig.from_directory(directory()).max_position_embeddings
    llm = make_engine(max_num_batched_tokens=2048)
    [output] = llm.generate([tokens(0, longest - 1)], replace(GREEDY, max_tokens=9))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    assert_cold_bits("float32", output)


def test_a_pool_that_just_holds_a_request_serves_it():
    llm = make_engine(num_blocks=5, max_num_seqs=2, num_slots=3)
    [output] = llm.generate([tokens(0, 250)], replace(GREEDY, max_tokens=7))
    assert len(output.token_ids) == 7
    assert_cold_bits("float32", output)


@pytest.mark.parametrize("eviction", [None, "flop_aware(0.5)"])
def test_states_are_weighed_by_what_a_prefill_of_this_model_costs(eviction):
    llm = make_engine() if eviction is None else make_engine(eviction=eviction)
    policy = llm.manager.linear.pool.policy
    assert type(policy) is (ValueIndex if eviction is None else FlopAware)
    assert policy._flops(64, 200) == llm.model_config.prefill_flops(64, 200)
