"""The whole engine on the Triton path, interpreted, at a tiny shape: tokens of the torch path, and
warm runs with the bits of cold ones."""

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.weights import read_weights
from experiments.make_model import make_model
from kernels import ops_for
from kernels.launch import INTERPRETED

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=2)
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


pytestmark = pytest.mark.usefixtures("rows_of_a_tile_alike")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "tiny"
    return make_model(out, like="tiny", layers=3, seed=5, overrides=SHAPE)


@pytest.fixture(scope="module")
def models(directory):
    config = ModelConfig.from_directory(directory)
    return {
        name: Qwen35Model(
            config,
            read_weights(directory, config),
            dtype=torch.float32,
            ops=ops_for("cpu", implementation=name),
        )
        for name in ("torch", "triton")
    }


def engine(model, **config):
    config = {"memory_budget_bytes": 4 << 20, "max_num_seqs": 4, "checkpoint_every": 64} | config
    llm = LLM.from_model(model, EngineConfig(**config))
    if llm.worker.state_pool is not None:
        llm.worker.state_pool.arena.fill_(255)  # NaN wherever nothing was written
    llm.worker.kv_cache.fill_(torch.nan)
    return llm


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def logits(output):
    return torch.stack(output.logits)


SHARED = prompt(150, 1)
PROMPTS = [SHARED + prompt(30, 2), SHARED + prompt(1, 3), SHARED[:100] + prompt(70, 4), SHARED]


@pytest.fixture(scope="module")
def cold_runs():
    return {}


@pytest.fixture
def cold(models, cold_runs):
    """The output of an engine without caching that serves one request; each is run once."""

    def run(tokens, name="triton"):
        key = (name, tuple(tokens))
        if key not in cold_runs:
            llm = engine(models[name], enable_prefix_caching=False)
            [cold_runs[key]] = llm.generate([tokens], GREEDY)
        return cold_runs[key]

    return run


def test_the_interpreter_is_what_require_runnable():
    assert INTERPRETED


def test_the_triton_path_gives_the_tokens_of_the_torch_path(cold):
    for tokens in PROMPTS:
        ours, torchs = cold(tokens), cold(tokens, "torch")
        assert ours.token_ids == torchs.token_ids
        assert (logits(ours) - logits(torchs)).abs().max() < 1e-4


def test_shared_memory_changes_no_bit_of_any_logit(models, cold):
    """As few pages as will do, so that most of them are states once and K/V another time."""
    sizes = {"max_num_seqs": 1, "memory": "shared"}
    page_bytes = engine(models["triton"], **sizes).worker.state_pool.arena.stride(0)
    llm = engine(models["triton"], **sizes, memory_budget_bytes=9 * page_bytes)
    memory = llm.manager.linear.memory
    owned, uses = memory._owned, {page: set() for page in range(memory.num_pages)}

    def note(page, pool):
        uses[page].add(pool)
        return owned(page, pool)

    memory._owned = note
    for tokens in [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[0]]:
        [output] = llm.generate([tokens], GREEDY)
        assert output.token_ids == cold(tokens).token_ids
        assert torch.equal(logits(output), logits(cold(tokens)))
    assert llm.stats().hits > 0
    assert sum(len(pools) == 2 for pools in uses.values()) >= 2


@pytest.mark.parametrize("block_size", [16, 64])
def test_whole_prompts_change_no_bit_of_any_logit(models, cold, block_size):
    llm = engine(models["triton"], placement="whole_prompt", block_size=block_size)
    for tokens in PROMPTS[:2]:
        llm.generate([tokens], GREEDY)
        [output] = llm.generate([tokens], GREEDY)
        assert output.boundary == output.num_cached_tokens == len(tokens)
        assert torch.equal(logits(output), logits(cold(tokens)))


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_hits_change_no_bit_of_any_logit(models, cold, restore):
    llm = engine(models["triton"], restore=restore)
    hits = 0
    for tokens in [*PROMPTS, PROMPTS[0]]:
        [output] = llm.generate([tokens], GREEDY)
        assert torch.equal(logits(output), logits(cold(tokens)))
        hits += output.num_cached_tokens > 0
    assert hits == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_at_once_have_the_bits_of_one_at_a_time(models, cold, overlap):
    """trap 34: also where a step's rows take their tokens from the step before."""
    llm = engine(models["triton"], max_num_batched_tokens=192, overlap=overlap)
    outputs = llm.generate(PROMPTS, GREEDY)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        assert torch.equal(logits(output), logits(cold(tokens)))


def test_verified_guesses_have_the_bits_of_tokens_decoded_one_by_one(tmp_path):
    """Right and wrong ones, across a boundary of the grid."""
    out = make_model(
        tmp_path / "drafts", like="tiny", layers=3, seed=5, overrides=SHAPE, draft=True
    )
    config = ModelConfig.from_directory(out)
    model = Qwen35Model(
        config,
        read_weights(out, config, draft=True),
        dtype=torch.float32,
        ops=ops_for("cpu", implementation="triton"),
        draft=True,
    )
    greedy = SamplingParams(temperature=0, ignore_eos=True, return_logits=True, max_tokens=8)
    tokens = SHARED[:125]
    [plain] = engine(model, enable_prefix_caching=False).generate([tokens], greedy)
    said = [*tokens, *plain.token_ids]
    draft = model.draft

    def guess(rows, *where):
        guesses = draft(rows, *where)
        right = [said[row.start + 1 : row.end] for row in rows]
        return [
            its if row.start % 3 else true
            for row, its, true in zip(rows, guesses, right, strict=True)
        ]

    model.draft = guess
    llm = engine(model, num_speculative_tokens=2, num_slots=20)
    [output] = llm.generate([tokens], greedy)
    assert output.token_ids == plain.token_ids
    assert torch.equal(logits(output), logits(plain))
    assert 0 < llm.stats().tokens_accepted < llm.stats().tokens_drafted


def test_an_engine_is_told_its_kernels_by_its_settings(directory):
    llm = LLM(
        directory,
        kernels="triton",
        memory_budget_bytes=4 << 20,
        max_num_seqs=2,
        checkpoint_every=64,
    )
    [first] = llm.generate([SHARED], GREEDY)
    [again] = llm.generate([SHARED], GREEDY)
    assert again.num_cached_tokens == 128
    assert torch.equal(logits(first), logits(again))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 24}, "head_dim for Triton kernels: expected a power of two .* got 24"),
        ({"linear_key_head_dim": 8}, "linear_key_head_dim for Triton kernels: .* got 8"),
        ({"linear_value_head_dim": 24}, "linear_value_head_dim for Triton kernels: .* got 24"),
        ({"hidden_size": 16_400}, "hidden_size: expected at most 16384, got 16400"),
        ({"dtype": "bfloat16"}, "dtype: expected float32 .*interpreter multiplies no bfloat16"),
    ],
)
def test_a_model_that_the_kernels_do_not_take_is_refused_at_load(tmp_path, changed, message):
    out = make_model(tmp_path / "odd", like="tiny", layers=3, seed=5, overrides=SHAPE | changed)
    with pytest.raises(ValueError, match=message):
        LLM(out, kernels="triton", memory_budget_bytes=4 << 20)


@pytest.mark.parametrize("value_heads", [1, 3])
def test_odd_numbers_of_heads_have_aligned_projections(tmp_path, value_heads):
    """Rows of a projection start at 16 bytes, whatever the heads beside each other."""
    overrides = SHAPE | {"linear_num_value_heads": value_heads}
    out = make_model(tmp_path / "odd", like="tiny", layers=3, seed=5, overrides=overrides)
    prompts = [SHARED[:70], SHARED[:9]]
    answers = []
    for kernels in ("torch", "triton"):
        llm = LLM(out, kernels=kernels, memory_budget_bytes=4 << 20, max_num_seqs=2)
        answers.append([o.token_ids for o in llm.generate(prompts, GREEDY)])
    assert answers[0] == answers[1]


def test_the_library_matmul_is_a_choice_that_gives_the_same_tokens(directory, cold):
    """Its bits may be others, so only tokens are compared."""
    llm = LLM(directory, kernels="triton", matmul="library", memory_budget_bytes=4 << 20)
    [output] = llm.generate([SHARED], GREEDY)
    assert type(llm.worker.model.head).__name__ == "LibraryLinear"
    assert output.token_ids == cold(SHARED).token_ids
