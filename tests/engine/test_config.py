"""What an engine is told at start: rules between the values, and how memory is shared out."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.shared_memory import PageLayout
from engine.config import EngineConfig, num_shared_pages, pool_sizes

EVICTION = ["lru", "lru_cap_per_path(1)", "lru_cap_per_path(2)", "flop_aware(0)"]
EVICTION += ["flop_aware(0.5)", "value"]
PLACEMENT = [None, "prompt_end", "branch", "every(64)", "comb(8192)", "prompt_end+branch"]
PLACEMENT += [
    "prompt_end(64)+branch+comb(8192)",
    "prompt_end(100)",
    "comb(64) + every(128) + branch",
]
REFUSED = {
    "a stride off the kernel chunk": ({"chunk_stride": 100}, "chunk_stride=100.*kernel chunk, 64"),
    "a stride below the kernel chunk": ({"chunk_stride": 32}, "chunk_stride=32.*multiple"),
    "a stride off the block": ({"block_size": 48}, "chunk_stride=64.*multiple of block_size=48"),
    "a block wider than the stride": ({"block_size": 128}, "chunk_stride=64.*block_size=128"),
    "saves off the stride": (
        {"chunk_stride": 128, "checkpoint_every": 192},
        "checkpoint_every=192.*chunk_stride=128",
    ),
    "a budget below a stride": (
        {"max_num_batched_tokens": 63},
        "max_num_batched_tokens=63.*at least chunk_stride=64",
    ),
    "no stride": ({"chunk_stride": 0}, "chunk_stride=0.*at least 1"),
    "no saves": ({"checkpoint_every": 0}, "checkpoint_every=0.*at least 1"),
    "no block": ({"block_size": -64}, "block_size=-64.*at least 1"),
    "no sequences": ({"max_num_seqs": 0}, "max_num_seqs=0.*at least 1"),
    "a slot too few": ({"num_slots": 16}, "num_slots=16.*at least 17.*max_num_seqs=16"),
    "no block beside the padding": ({"num_blocks": 1}, "num_blocks=1.*at least 2"),
    "no room for an answer": ({"max_model_len": 1}, "max_model_len=1.*at least 2"),
    "no memory": ({"memory_budget_bytes": 0}, "memory_budget_bytes=0.*positive"),
    "an unknown restore": ({"restore": "move"}, "restore='move'.*copy.*redirect"),
    "an unknown device": ({"device": "tpu"}, "device='tpu'.*'cpu'.*'cuda'"),
    "unknown kernels": ({"kernels": "cutlass"}, "kernels='cutlass'.*'auto'.*'torch'.*'triton'"),
    "an unknown delta rule": ({"delta_rule": "naive"}, "delta_rule='naive'.*'own'.*'fla'"),
    "an unknown matmul": ({"matmul": "fast"}, "matmul='fast'.*'invariant'.*'library'"),
    "an unknown dtype": ({"dtype": "float16"}, "dtype='float16'.*float32.*bfloat16"),
    "graphs of verify steps": (
        {"cuda_graphs": True, "num_speculative_tokens": 2},
        "cuda_graphs=True: no graph .*num_speculative_tokens=2: set that to 0, or cuda_graphs=F",
    ),
    "graphs as a number": ({"cuda_graphs": 1}, "cuda_graphs must be bool, got 1"),
    "a negative seed": ({"hash_seed": -1}, "hash_seed=-1"),
    "a seed of 65 bits": ({"hash_seed": 1 << 64}, r"hash_seed.*2\*\*64"),
    "a number as text": ({"chunk_stride": "64"}, "chunk_stride must be int, got '64'"),
    "a fraction": ({"max_num_batched_tokens": 512.0}, "must be int, got 512.0"),
    "a truth as number": ({"max_num_seqs": True}, "max_num_seqs must be int, got True"),
    "a number as truth": ({"enable_prefix_caching": 1}, "must be bool, got 1"),
    "an optional of another type": ({"num_slots": "20"}, "num_slots must be int or None"),
    "a dtype that is no text": ({"dtype": 32}, "dtype must be str or None, got 32"),
    "a placement that is no text": ({"placement": 64}, "placement must be str or None, got 64"),
    "an eviction that is no text": ({"eviction": None}, "eviction must be str, got None"),
}
NO_PLACEMENTS = ["", "tip", "Branch", "branch+", "branch,prompt_end", "comb", "comb()", "comb(0)"]
NO_PLACEMENTS += ["comb(-64)", "every(96)", "every(64.0)", "branch+branch", "prompt_end branch"]
NO_PLACEMENTS += ["every(64)+lru", "prompt_end()", "prompt_end(-1)", "branch(64)"]
NO_EVICTION = ["", "LRU", "fifo", "lru ", "lru(2)", "lru_cap_per_path", "lru_cap_per_path()"]
NO_EVICTION += ["lru_cap_per_path(-1)", "lru_cap_per_path(1.5)", "flop_aware", "flop_aware(-1)"]
NO_EVICTION += ["flop_aware(inf)", "flop_aware(0.5)x", "value(1)", "belady"]


@pytest.mark.parametrize("text", NO_PLACEMENTS)
def test_a_placement_that_is_none_is_refused_with_what_there_is(text):
    with pytest.raises(ValueError) as refused:
        EngineConfig(placement=text)
    assert str(refused.value) == (
        f"placement={text!r}: must be prompt_end, prompt_end(TOKENS), branch, whole_prompt, "
        "every(N) and comb(N), no part twice, with '+' between them, N a multiple of "
        "chunk_stride=64"
    )


@pytest.mark.parametrize("text", NO_EVICTION)
def test_an_eviction_policy_that_is_none_is_refused_with_what_there_is(text):
    with pytest.raises(ValueError) as refused:
        EngineConfig(eviction=text)
    assert str(refused.value) == (
        f"eviction={text!r}: must be lru, lru_cap_per_path(N), flop_aware(ALPHA) or value"
    )


def test_a_cap_of_no_states_is_refused():
    with pytest.raises(ValueError, match=r"eviction='lru_cap_per_path\(0\)'.*at least 1, got 0"):
        EngineConfig(eviction="lru_cap_per_path(0)")


def test_the_comb_of_a_placement_is_on_the_grid_of_its_own_config():
    assert EngineConfig(placement="comb(128)").placement == "comb(128)"
    with pytest.raises(ValueError, match=r"placement='comb\(128\)'.*chunk_stride=192"):
        EngineConfig(placement="comb(128)", chunk_stride=192, checkpoint_every=384)


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_a_bad_value_is_refused_with_its_name_and_the_rule(options, words):
    """trap 5: explicit odd strides are refused at start with the rule in the message."""
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"num_slots": 17},
        {"num_blocks": 2},
        {"max_model_len": 2},
        {"block_size": 1},
        {"chunk_stride": 192, "checkpoint_every": 384, "block_size": 96},
        {"dtype": "bfloat16", "restore": "copy"},
        {"cuda_graphs": True, "num_speculative_tokens": 0},
        {"cuda_graphs": False, "num_speculative_tokens": 2, "num_slots": 65},
        {"hash_seed": (1 << 64) - 1},
        {"memory_budget_bytes": 1},
        *({"eviction": name} for name in EVICTION),
        *({"placement": name} for name in PLACEMENT),
    ],
    ids=str,
)
def test_values_at_the_edge_are_taken(options):
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def test_a_misspelt_option_is_an_error():
    with pytest.raises(TypeError, match="chunk_strid"):
        EngineConfig(chunk_strid=64)


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().chunk_stride = 128


# ---- memory

CONFIGS = st.builds(
    EngineConfig,
    enable_prefix_caching=st.booleans(),
    chunk_stride=st.sampled_from([64, 128, 512]),
    checkpoint_every=st.sampled_from([512, 1024]),
    block_size=st.sampled_from([16, 32, 64]),
    max_num_seqs=st.integers(1, 40),
    memory_budget_bytes=st.integers(1, 4 << 30),
)
SLOT_BYTES = st.sampled_from([0, 64, 100_000, 2_500_000, 50_000_000])
KV_BYTES = st.sampled_from([1, 64, 4096, 32_768])
LENGTHS = st.integers(512, 300_000)


@given(CONFIGS, SLOT_BYTES, KV_BYTES, LENGTHS)
def test_pools_never_exceed_the_budget_nor_starve_a_live_slot(
    config, slot_bytes, kv_bytes, max_model_len
):
    """trap 25: auto-sizing starves live slots, or reserves more than it uses."""
    budget, block_bytes = config.memory_budget_bytes, config.block_size * kv_bytes
    stride_blocks = config.chunk_stride // config.block_size
    least = (config.max_num_seqs + 1) * slot_bytes + (stride_blocks + 1) * block_bytes
    try:
        slots, blocks = pool_sizes(
            config,
            slot_bytes=slot_bytes,
            kv_bytes_per_token=kv_bytes,
            max_model_len=max_model_len,
        )
    except ValueError as error:
        assert f"memory_budget_bytes={budget}" in str(error)
        spare = slot_bytes * -(-config.chunk_stride // config.checkpoint_every)
        assert budget < least + spare, "refused although it fits"
        return
    assert slots * slot_bytes + blocks * block_bytes <= budget
    assert slots >= config.max_num_seqs + 1
    assert blocks >= stride_blocks + 1
    longest = config.max_num_seqs * -(-max_model_len // config.block_size) + 1
    assert blocks <= longest, "K/V that no sequence can use"
    checkpoints = slots - config.max_num_seqs - 1
    assert checkpoints <= -(-blocks * config.block_size // config.chunk_stride)
    if not config.enable_prefix_caching or slot_bytes == 0:
        assert checkpoints == 0, "slots that nothing can be saved in"
    used = slots * slot_bytes + blocks * block_bytes
    if blocks < longest and config.enable_prefix_caching:
        per_slot = config.checkpoint_every // config.block_size
        assert budget - used < slot_bytes + block_bytes + slot_bytes / per_slot, "memory is wasted"


@given(CONFIGS, KV_BYTES, LENGTHS, st.integers(0, 50), st.integers(2, 5000))
def test_given_sizes_are_taken_and_the_rest_fits_beside_them(
    config, kv_bytes, max_model_len, spare_slots, num_blocks
):
    """trap 25: property over flags."""
    slot_bytes = 2_500_000
    num_slots = config.max_num_seqs + 1 + spare_slots
    block_bytes = config.block_size * kv_bytes
    model = dict(slot_bytes=slot_bytes, kv_bytes_per_token=kv_bytes, max_model_len=max_model_len)
    both = dataclasses.replace(config, num_slots=num_slots, num_blocks=num_blocks)
    assert pool_sizes(both, **model) == (num_slots, num_blocks)
    only_blocks = dataclasses.replace(config, num_blocks=num_blocks)
    slots, blocks = pool_sizes(only_blocks, **model)
    assert blocks == num_blocks and slots >= config.max_num_seqs + 1
    if slots > config.max_num_seqs + 1:
        assert slots * slot_bytes + blocks * block_bytes <= config.memory_budget_bytes
    only_slots = dataclasses.replace(config, num_slots=num_slots)
    least = num_slots * slot_bytes + (config.chunk_stride // config.block_size + 1) * block_bytes
    if least <= config.memory_budget_bytes:
        slots, blocks = pool_sizes(only_slots, **model)
        assert slots == num_slots
        assert slots * slot_bytes + blocks * block_bytes <= config.memory_budget_bytes


def test_memory_is_shared_between_kv_and_checkpoints_one_state_to_each_interval():
    config = EngineConfig(max_num_seqs=2, memory_budget_bytes=100_000, checkpoint_every=512)
    # 3 slots of 1000; then 8 blocks of 640 to a checkpoint: 765 a block
    slots, blocks = pool_sizes(
        config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=100_000
    )
    assert (slots, blocks) == (19, 126)
    assert slots * 1000 + blocks * 640 == 99_640


def test_with_prefix_caching_off_all_that_is_left_is_kv():
    config = EngineConfig(max_num_seqs=2, memory_budget_bytes=100_000, enable_prefix_caching=False)
    sizes = pool_sizes(config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=100_000)
    assert sizes == (3, 151)


def test_short_sequences_get_no_more_kv_than_they_can_use():
    config = EngineConfig(max_num_seqs=2)
    slots, blocks = pool_sizes(config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=1000)
    assert blocks == 2 * 16 + 1
    assert slots == 3 + 33  # a state at every boundary, and no more


@pytest.mark.parametrize("max_model_len", [2, 20, 63, 64])
def test_a_model_length_below_a_stride_is_no_lack_of_memory(max_model_len):
    """trap 25: property over flags."""
    config = EngineConfig(max_num_seqs=1, block_size=16, max_model_len=max_model_len)
    _, blocks = pool_sizes(
        config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=max_model_len
    )
    assert blocks >= -(-max_model_len // 16) + 1


def test_with_prefix_caching_off_memory_that_is_left_over_becomes_no_slots():
    config = EngineConfig(max_num_seqs=2, enable_prefix_caching=False)
    sizes = pool_sizes(config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=1000)
    assert sizes == (3, 33)


def test_a_budget_without_room_for_a_stride_is_refused_with_what_to_change():
    config = EngineConfig(max_num_seqs=4, memory_budget_bytes=5000 + 640 + 639)
    words = "memory_budget_bytes=6279.*5 slots of 1000 bytes.*max_num_seqs=4"
    with pytest.raises(ValueError, match=words):
        pool_sizes(config, slot_bytes=1000, kv_bytes_per_token=10, max_model_len=1000)


# ---- one memory for both


def test_pages_of_the_budget_but_no_more_than_all_sequences_can_use():
    layout = PageLayout(block_bytes=64, blocks_per_page=4)
    config = EngineConfig(max_num_seqs=2, memory_budget_bytes=256 * 40, memory="shared")
    assert num_shared_pages(config, layout, max_model_len=100_000) == 40
    # 2 x 3 blocks in 2 pages, 6 states, and 5 pages: padding, live slots, a source, one more
    assert num_shared_pages(config, layout, max_model_len=150) == 2 + 6 + 5


def test_a_shared_memory_must_hold_a_stride_beside_the_slots():
    layout = PageLayout(block_bytes=64, blocks_per_page=1)
    stride = {"max_num_seqs": 2, "chunk_stride": 128, "max_num_batched_tokens": 128}
    fits = EngineConfig(**stride, memory_budget_bytes=64 * 7)
    assert num_shared_pages(fits, layout, max_model_len=1000) == 7
    small = dataclasses.replace(fits, memory_budget_bytes=64 * 7 - 1)
    words = "memory_budget_bytes=447 holds no stride of K/V beside 5 pages of 64 bytes.*seqs=2"
    with pytest.raises(ValueError, match=words):
        num_shared_pages(small, layout, max_model_len=1000)
    assert num_shared_pages(small, layout, max_model_len=64) == 6


def test_scratch_slots_of_a_shared_memory_are_not_for_k_v():
    layout = PageLayout(block_bytes=64, blocks_per_page=1)
    config = EngineConfig(max_num_seqs=2, num_speculative_tokens=1, memory_budget_bytes=64 * 9)
    with pytest.raises(ValueError, match="beside 9 pages"):
        num_shared_pages(config, layout, max_model_len=1000)


@pytest.mark.parametrize(
    "sizes", [{"num_slots": 40}, {"num_blocks": 40}, {"num_slots": 40, "num_blocks": 40}]
)
def test_a_shared_memory_is_sized_by_the_budget_alone(sizes):
    assert EngineConfig(**sizes).memory == "split"
    with pytest.raises(ValueError, match="sized by memory_budget_bytes alone"):
        EngineConfig(**sizes, memory="shared")


def test_whole_prompts_in_shared_memory_are_refused():
    placement = "prompt_end+whole_prompt"
    with pytest.raises(
        ValueError, match=r"placement='prompt_end\+whole_prompt': .*memory=\"split\""
    ):
        EngineConfig(placement=placement, memory="shared")
    assert EngineConfig(placement=placement).memory == "split"
