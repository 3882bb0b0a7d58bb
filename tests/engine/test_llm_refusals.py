"""What the engine refuses: by ValueError that names the value, and it goes on serving."""

import numpy as np
import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from tests.engine.real_model import GREEDY, assert_cold_bits, assert_idle, directory, make_engine
from tests.engine.real_model import tokens as ids


@pytest.fixture(scope="module")
def serving():
    return make_engine(num_blocks=9, num_slots=20)


def assert_refused(llm, prompt, message, sampling=GREEDY):
    """By add_request and by generate, beside a good prompt; nothing is queued; it serves on."""
    before = llm.stats()
    for call in (
        lambda: llm.add_request(prompt, sampling),
        lambda: llm.generate([ids(0, 9), prompt], sampling),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert llm.stats() == before
        assert_idle(llm)
    [output] = llm.generate([ids(0, 70)], GREEDY)
    assert_cold_bits("float32", output)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ((), "empty"),
        ("", "empty"),
        ([5, 512], r"512 at position 1 .* \[0, 512\)"),
        ([-1], r"-1 at position 0 .* \[0, 512\)"),
        ([1 << 40], r"1099511627776 at position 0"),
        ([1, 2, True], "True at position 2"),
        ([False], "False at position 0"),
        ([1.0], "1.0 at position 0"),
        (["a"], "'a' at position 0"),
        ([None], "None at position 0"),
        ([[1]], r"\[1\] at position 0"),
        (None, "NoneType"),
        (7, "int"),
        (b"bytes", "bytes"),
        ("\ud800", "surrogates"),
    ],
)
def test_a_prompt_that_is_not_text_or_ids_of_the_vocabulary_is_refused(serving, prompt, message):
    assert_refused(serving, prompt, message)


@pytest.mark.parametrize("prompt", [np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4)])
def test_arrays_tensors_and_ranges_of_ids_are_prompts(serving, prompt):
    [expected] = serving.generate([1, 2, 3], GREEDY)
    [output] = serving.generate(prompt, GREEDY)
    assert output.prompt_token_ids == [1, 2, 3] and output.token_ids == expected.token_ids
    [output] = serving.generate([prompt], GREEDY)
    assert output.token_ids == expected.token_ids


def test_a_numpy_integer_in_a_list_is_refused_by_position(serving):
    assert_refused(serving, [np.int64(1)], "at position 0 is not an id")


@pytest.mark.parametrize("prompts", [None, 5, {1, 2}, {1: 2}, b"ab", np.array(3), iter([1])])
def test_what_has_no_order_is_no_prompt(serving, prompts):
    with pytest.raises(ValueError, match="text"):
        serving.generate(prompts)
    with pytest.raises(ValueError, match="text"):
        serving.add_request(prompts)
    assert not serving.has_unfinished()


@pytest.mark.parametrize("params", [{"temperature": 0}, 0, "greedy", [GREEDY, None, 3]])
def test_sampling_params_of_another_type_are_refused(serving, params):
    with pytest.raises(ValueError, match="sampling_params"):
        serving.generate([[1], [1], [1]], params)


@pytest.mark.parametrize("salt", ["\ud800", None, 3, b"a"])
@pytest.mark.parametrize("name", ["cache_salt", "adapter_id"])
def test_a_salt_that_is_no_text_is_refused_when_it_is_added(serving, name, salt):
    with pytest.raises(ValueError, match=name):
        serving.add_request([1] * 70, GREEDY, **{name: salt})
    assert not serving.has_unfinished()


@pytest.mark.parametrize("model", [None, 5, b"dir"])
def test_a_model_that_is_no_path_is_refused(model):
    with pytest.raises(ValueError, match="model must be a directory"):
        LLM(model)


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len=1000000: the model ends at \d+"):
        LLM(directory(), max_model_len=1_000_000)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_numbers(serving):
    message = r"513 prompt tokens and max_tokens=3 need 9 K/V blocks of 64 tokens; the pool has 8"
    assert_refused(serving, ids(0, 513), message)


def test_an_answer_that_the_pool_can_never_hold_is_refused_with_the_numbers(serving):
    sampling = SamplingParams(max_tokens=504)
    message = r"10 prompt tokens and max_tokens=504 need 9 K/V blocks of 64 tokens; the pool has 8"
    assert_refused(serving, ids(0, 10), message, sampling)
    fits = SamplingParams(max_tokens=503, stop_token_ids=range(512))
    [output] = serving.generate([ids(0, 10)], fits)
    assert output.finish_reason == "stop"


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers():
    llm = make_engine(num_blocks=100, num_slots=20)
    assert_refused(llm, ids(0, 4096), "the prompt has 4096 tokens; with max_model_len=4096")
    short = make_engine(max_model_len=100, num_slots=20)
    assert_refused(short, ids(0, 100), "100 tokens; with max_model_len=100 at most 99")


def test_as_many_sampling_params_as_prompts_are_needed(serving):
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        serving.generate([[1], [2]], [GREEDY])
    assert_idle(serving)


def test_text_and_stop_strings_need_a_tokenizer(serving):
    llm = LLM.from_model(serving.worker.model, EngineConfig(num_blocks=9, num_slots=20))
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        llm.generate("text")
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(stop="x"))
    [output] = llm.generate([ids(0, 70)], GREEDY)
    assert output.text == ""
    assert_cold_bits("float32", output)
    assert_idle(llm)


RULES = [
    ({"chunk_stride": 0}, "chunk_stride=0"),
    ({"chunk_stride": 100}, "chunk_stride=100: must be a multiple of the kernel chunk, 64"),
    ({"chunk_stride": 192, "block_size": 128}, "chunk_stride=192.*block_size=128"),
    ({"chunk_stride": 128, "checkpoint_every": 64}, "checkpoint_every=64.*chunk_stride=128"),
    ({"block_size": 0}, "block_size=0"),
    ({"block_size": 48}, "chunk_stride=64: must be a multiple of block_size=48"),
    ({"block_size": 128}, "chunk_stride=64: must be a multiple of block_size=128"),
    ({"checkpoint_every": 100}, "checkpoint_every=100: must be a multiple of chunk_stride=64"),
    ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_num_seqs": -1}, "max_num_seqs=-1"),
    ({"max_num_batched_tokens": 63}, "max_num_batched_tokens=63.*chunk_stride=64"),
    ({"chunk_stride": 128, "max_num_batched_tokens": 127}, "max_num_batched_tokens=127.*128"),
    ({"num_slots": 16}, r"num_slots=16: must be at least 17: .*max_num_seqs=16"),
    ({"num_slots": 4, "max_num_seqs": 4}, r"num_slots=4: must be at least 5: .*max_num_seqs=4"),
    ({"num_blocks": 1}, "num_blocks=1"),
    ({"max_model_len": 1}, "max_model_len=1"),
    ({"memory_budget_bytes": 0}, "memory_budget_bytes=0"),
    ({"restore": "move"}, "restore='move'.*copy.*redirect"),
    ({"device": "tpu"}, "device='tpu'"),
    ({"dtype": "int8"}, "dtype='int8'.*float32.*bfloat16"),
    ({"hash_seed": -1}, "hash_seed=-1"),
    ({"hash_seed": 1 << 64}, "hash_seed=18446744073709551616"),
    ({"chunk_stride": 64.0}, r"chunk_stride must be int, got 64\.0"),
    ({"max_num_seqs": True}, "max_num_seqs must be int, got True"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be bool, got 1"),
    ({"num_blocks": "many"}, "num_blocks must be int or None, got 'many'"),
    ({"chunk_stride": None}, "chunk_stride must be int, got None"),
    ({"dtype": 32}, "dtype must be str or None, got 32"),
    ({"device": None}, "device must be str, got None"),
]


@pytest.mark.parametrize(("fields", "message"), RULES, ids=[str(fields) for fields, _ in RULES])
def test_a_setting_that_breaks_a_rule_is_refused_with_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)
    with pytest.raises(ValueError, match=message):
        LLM(directory(), **fields)


def test_settings_on_the_edge_of_the_rules_are_accepted():
    edges = [
        {"num_slots": 17},
        {"num_blocks": 2},
        {"max_num_batched_tokens": 64, "block_size": 1, "checkpoint_every": 64},
        {"max_model_len": 2, "hash_seed": (1 << 64) - 1},
    ]
    for fields in edges:
        config = EngineConfig(**fields)
        assert {name: getattr(config, name) for name in fields} == fields


def test_a_setting_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match="num_slotz"):
        LLM(directory(), num_slotz=20)


def test_a_budget_that_holds_no_stride_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="memory_budget_bytes=100000 holds no stride of K/V"):
        make_engine(memory_budget_bytes=100_000)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        LLM(tmp_path)


@pytest.mark.parametrize(("slots", "blocks"), [(1 << 40, 10), (20, 1 << 50)])
def test_pools_that_no_machine_can_hold_are_refused_by_size(slots, blocks):
    message = f"no memory for num_slots={slots} and num_blocks={blocks} of 64 tokens"
    with pytest.raises(ValueError, match=message):
        LLM(directory(), num_slots=slots, num_blocks=blocks)


def test_slots_that_the_budget_does_not_hold_are_refused_with_their_number():
    with pytest.raises(ValueError, match=f"beside {1 << 40} slots"):
        LLM(directory(), num_slots=1 << 40)


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda': torch finds no such device"):
        LLM(tmp_path, device="cuda")


def test_a_model_on_another_device_is_refused():
    model = make_engine().worker.model
    with pytest.raises(ValueError, match="device='cuda': the model lies on 'cpu'"):
        LLM.from_model(model, EngineConfig(device="cuda"))


def test_triton_on_the_cpu_needs_its_interpreter():
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        LLM(directory(), kernels="triton")


@pytest.mark.parametrize("field", [{"delta_rule": "fla"}, {"matmul": "library"}])
def test_inexact_kernels_are_not_for_the_torch_path(field):
    with pytest.raises(ValueError, match="the torch implementation has only 'own'"):
        LLM(directory(), **field)
