"""Wrong shapes, dtypes and layouts are refused by name, in every implementation."""

import pytest
import torch

from kernels import reference, torch_ops, validate
from kernels.ids import BlockTables, Ids
from tests.kernels.packs import normal

OPS = pytest.mark.parametrize("ops", [reference, torch_ops], ids=["reference", "torch_ops"])


def delta_arguments() -> dict[str, torch.Tensor]:
    sizes = {"q": (2, 2, 4), "k": (2, 2, 4), "v": (2, 4, 3), "g": (2, 4), "beta": (2, 4)}
    return {name: normal(1, *size) for name, size in {**sizes, "states": (4, 4, 3, 4)}.items()}


def test_the_delta_arguments_these_tests_spoil_are_accepted():
    slots = {"read_slots": torch.tensor([-1, -1]), "write_slots": torch.tensor([1, 2])}
    for ops in (reference, torch_ops):
        assert ops.gated_delta_step(**delta_arguments(), **slots).shape == (2, 4, 3)


SPOILED_DELTA = {
    "k of another shape": ("k", normal(1, 2, 2, 8), r"shape of k: expected \[2, 2, 4\]"),
    "v of other tokens": ("v", normal(1, 3, 4, 3), r"shape of v: expected \[2,"),
    "g per key head": ("g", normal(1, 2, 2), r"shape of g: expected \[2, 4\], got \[2, 2\]"),
    "beta per key head": ("beta", normal(1, 2, 2), "shape of beta"),
    "value heads that do not divide": ("v", normal(1, 2, 3, 3), "multiple of 2, got 3"),
    "states transposed": ("states", normal(1, 4, 4, 4, 3), r"shape of states: expected \['\*', 4"),
    "states in bfloat16": ("states", normal(1, 4, 4, 3, 4).bfloat16(), "dtype of states"),
    "g in bfloat16": ("g", normal(1, 2, 4).bfloat16(), "dtype of g: expected torch.float32"),
    "q narrower than k": ("q", normal(1, 2, 2, 4).bfloat16(), "dtype of k"),
    "states not K-contiguous": ("states", normal(1, 4, 4, 4, 3).mT, "strides of states"),
    "slots that overlap": ("states", normal(1, 1, 4, 3, 4).expand(4, -1, -1, -1), "slot stride"),
}


@OPS
@pytest.mark.parametrize("name", SPOILED_DELTA)
def test_delta_rule_refuses(ops, name):
    argument, value, message = SPOILED_DELTA[name]
    arguments = {**delta_arguments(), argument: value}
    slots = {"read_slots": torch.tensor([-1, -1]), "write_slots": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_step(**arguments, **slots)
    pack = {"cu_seqlens": torch.arange(3), "snapshot_slots": torch.tensor([-1, -1])}
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_prefill(**arguments, **slots, **pack)


SPOILED_CONV = {
    "weight of other channels": ("weight", normal(1, 6, 4), "shape of weight"),
    "window as wide as the kernel": ("windows", normal(1, 4, 4, 5), "shape of windows"),
    "window channels first": ("windows", normal(1, 4, 5, 3), "shape of windows"),
    "narrower windows": ("windows", normal(1, 4, 3, 5).bfloat16(), "dtype of windows"),
    "windows not contiguous": ("windows", normal(1, 4, 5, 3).mT, "strides of windows"),
}


@OPS
@pytest.mark.parametrize("name", SPOILED_CONV)
def test_convolution_refuses(ops, name):
    argument, value, message = SPOILED_CONV[name]
    arguments = {"x": normal(1, 2, 5), "weight": normal(2, 5, 4), "windows": normal(3, 4, 3, 5)}
    slots = {"read_slots": torch.tensor([-1, -1]), "write_slots": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match=message):
        ops.causal_conv_step(**{**arguments, argument: value}, **slots)


@OPS
@pytest.mark.parametrize("offsets", [[1, 4], [0, 3], [0, 5], [0, 3, 2, 4], []])
def test_prefill_refuses_offsets_that_do_not_cover_the_pack(ops, offsets):
    row = torch.full((max(len(offsets) - 1, 0),), -1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ops.causal_conv_prefill(
            normal(1, 4, 5),
            normal(2, 5, 4),
            normal(3, 4, 3, 5),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int64),
            read_slots=row,
            write_slots=row + 2,
            snapshot_slots=row,
        )


def attention_arguments() -> dict[str, torch.Tensor]:
    caches = {"k_cache": normal(3, 4, 2, 2, 8), "v_cache": normal(4, 4, 2, 2, 8)}
    return {"q": normal(1, 1, 4, 8), "gate": normal(2, 1, 4, 8), **caches}


@OPS
@pytest.mark.parametrize(
    ("kv_lens", "block_tables", "message"),
    [
        ([5], [[1, 2]], "blocks of row 0: expected at least 3, got 2"),
        ([5], [[1, 2, 4]], r"block of row 0: expected in \[0, 4\), got 4"),
        ([5], [[1, 2, -1]], "block of row 0.*got -1"),
        ([0], [[1]], "K/V length of row 0: expected at least 1"),
        ([1], [], "block tables"),
        ([1, 1], [[1], [1]], "K/V lengths: expected 1, got 2"),
    ],
)
def test_decode_attention_refuses_rows_without_their_blocks(ops, kv_lens, block_tables, message):
    with pytest.raises(ValueError, match=message):
        ops.attention_decode(**attention_arguments(), kv_lens=kv_lens, block_tables=block_tables)


@OPS
@pytest.mark.parametrize(
    ("start", "table", "message"),
    [
        (63, list(range(4)) * 16, "start of row 0: expected a multiple of 64, got 63"),
        (-64, [1], "start of row 0"),
        (64, [1] * 32, "blocks of row 0: expected at least 33, got 32"),
    ],
)
def test_prefill_attention_refuses(ops, start, table, message):
    with pytest.raises(ValueError, match=message):
        ops.attention_prefill(
            **attention_arguments(),
            cu_seqlens=torch.tensor([0, 1]),
            start_positions=[start],
            block_tables=[table],
        )


@OPS
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("gate", normal(1, 1, 4, 4), "shape of gate"),
        ("q", normal(1, 1, 4, 4), "shape of gate"),
        ("v_cache", normal(1, 4, 2, 2, 4), "shape of v_cache"),
        ("k_cache", normal(1, 4, 2, 3, 8), "shape of v_cache"),
        ("gate", normal(1, 1, 4, 8).bfloat16(), "dtype of gate"),
    ],
)
def test_attention_refuses_tensors_that_do_not_fit(ops, argument, value, message):
    arguments = {**attention_arguments(), argument: value}
    with pytest.raises(ValueError, match=message):
        ops.attention_decode(**arguments, kv_lens=[1], block_tables=[[1]])


@OPS
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 8], r"K/V index: expected in \[0, 8\), got 8"),
        ([-1, 3], "K/V index.*got -1"),
        ([5, 5], "K/V index: expected used once, got 5"),
        ([5], "shape of k"),
    ],
)
def test_writing_kv_refuses_and_writes_nothing(ops, indices, message):
    caches = torch.zeros(2, 4, 2, 1, 3)
    rows = normal(1, 2, 1, 3)
    with pytest.raises(ValueError, match=message):
        ops.write_kv(rows, rows, *caches, torch.tensor(indices))
    assert torch.equal(caches, torch.zeros_like(caches))


@OPS
def test_writing_kv_lets_padding_rows_share_a_place_in_block_0(ops):
    caches = torch.zeros(2, 4, 2, 1, 3)
    rows = normal(1, 3, 1, 3)
    ops.write_kv(rows, rows, *caches, torch.tensor([1, 1, 5]))
    assert torch.equal(caches[0, 2, 1], rows[2])
    assert not caches[:, 1:].flatten(1, 2)[:, [0, 1, 2, 4, 5]].any()


@OPS
def test_writing_kv_finds_the_rows_of_blocks_that_lie_apart(ops):
    """K and V of a block side by side, and a gap behind them."""
    memory = torch.zeros(4, 5, 1, 3)  # of a block: two rows of K, two of V, and one of nobody
    rows = normal(1, 3, 1, 3)
    expected = memory.clone()
    for row, (block, offset) in enumerate([(2, 1), (1, 0), (3, 1)]):
        expected[block, offset] = rows[row]
        expected[block, 2 + offset] = 2 * rows[row]
    ops.write_kv(rows, 2 * rows, memory[:, :2], memory[:, 2:4], torch.tensor([5, 2, 7]))
    assert torch.equal(memory, expected)


@OPS
def test_writing_kv_refuses_blocks_that_overlap(ops):
    memory = torch.zeros(100)
    rows = normal(1, 1, 1, 3)
    k_cache = memory.as_strided((4, 2, 1, 3), (3, 3, 3, 1))
    with pytest.raises(ValueError, match="strides of k_cache: expected one block after the other"):
        ops.write_kv(rows, rows, k_cache, torch.zeros(4, 2, 1, 3), torch.tensor([5]))
    assert not memory.any()


@OPS
@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1], [0], r"written slot: expected in \[1, 8\), got 0"),
        ([1], [8], r"written slot: expected in \[1, 8\), got 8"),
        ([8], [1], r"source slot: expected in \[1, 8\), got 8"),
        ([-1], [1], r"source slot: expected in \[1, 8\), got -1"),
        ([1, 2], [3, 3], "written slots: expected distinct"),
        ([1, 2], [2, 3], r"source and destination: expected none, got \[2\]"),
        ([1, 2], [3], "number of sources: expected 1, got 2"),
    ],
)
def test_copying_blocks_refuses_and_writes_nothing(ops, sources, destinations, message):
    cache = torch.rand(2, 2, 8, 4, 1, 4)
    before = cache.clone()
    with pytest.raises(ValueError, match=message):
        ops.copy_blocks(cache, sources, destinations)
    assert torch.equal(cache, before)


@OPS
def test_copying_blocks_refuses_a_cache_that_is_no_flat_one(ops):
    with pytest.raises(ValueError, match="strides of kv_cache: expected contiguous"):
        ops.copy_blocks(torch.zeros(2, 2, 8, 4, 1, 8)[..., :4], [1], [2])
    with pytest.raises(ValueError, match=r"dims of kv_cache: expected \[layers, 2"):
        ops.copy_blocks(torch.zeros(2, 8, 4), [1], [2])


@OPS
def test_an_arena_is_bytes(ops):
    with pytest.raises(ValueError, match="dtype of arena"):
        ops.copy_slots(torch.zeros(4, 4), [1], [2])
    with pytest.raises(ValueError, match="dtype of arena"):
        ops.zero_slots(torch.zeros(4, 4), [1])


def test_the_reference_refuses_rotations_wider_than_the_head():
    with pytest.raises(ValueError, match="rotated dims: expected at most 8, got 10"):
        reference.rotary(normal(1, 2, 1, 8), normal(2, 2, 5), normal(3, 2, 5))


def test_the_reference_takes_int64_vectors_only():
    slots = {"read_slots": torch.tensor([-1.0, -1.0]), "write_slots": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match="int64 vector"):
        reference.gated_delta_step(**delta_arguments(), **slots)


def calls_on_one_device() -> dict[str, tuple]:
    """{name: (what is checked, its tensors, its other arguments)}, all of it accepted."""
    slots = {"read_slots": [-1, -1], "write_slots": [1, 2]}
    conv = {"x": normal(1, 2, 5), "weight": normal(2, 5, 4), "windows": normal(3, 4, 3, 5)}
    rows = {name: normal(1, 2, 2, 8) for name in ("k", "v")}
    caches = {name: normal(2, 4, 2, 2, 8) for name in ("k_cache", "v_cache")}
    mixer = {
        "qkv": normal(1, 2, 16),
        "a": normal(2, 2, 2),
        "b": normal(3, 2, 2),
        "conv_weight": normal(4, 16, 4),
        "A_log": normal(5, 2),
        "dt_bias": normal(6, 2),
        "windows": normal(7, 4, 3, 16),
        "states": normal(8, 4, 2, 4, 4),
    }
    one = {"kv_lens": [1], "block_tables": [[1]]}
    return {
        "delta rule": (validate.gated_delta, delta_arguments(), slots),
        "convolution": (validate.causal_conv, conv, slots),
        "mixer": (validate.gated_delta_net_step, mixer, {"num_key_heads": 1, "slots": slots}),
        "attention": (validate.attention_decode, attention_arguments(), one),
        "K/V writes": (validate.write_kv, {**rows, **caches}, {"kv_indices": [4, 5]}),
    }


@pytest.mark.parametrize("name", calls_on_one_device())
def test_tensors_of_two_devices_are_refused(name):
    check, tensors, others = calls_on_one_device()[name]
    check(**tensors, **others)
    for moved in list(tensors)[1:]:
        with pytest.raises(ValueError, match=f"device of {moved.removeprefix('conv_')}"):
            check(**{**tensors, moved: tensors[moved].to("meta")}, **others)


def test_caches_that_lie_on_themselves_or_on_each_other_are_refused():
    rows, cache = torch.ones(2, 1, 4), torch.zeros(3, 4, 1, 4)
    with pytest.raises(ValueError, match="v_cache: expected other memory"):
        torch_ops.write_kv(rows, rows, cache, cache, [4, 5])
    stacked = torch.zeros(3, 4, 1, 4)[:1].expand(3, 4, 1, 4)
    on_top = torch.zeros(1, 1, 1, 4).expand(3, 4, 1, 4)
    for bad in (stacked, on_top):
        with pytest.raises(ValueError, match="strides of k_cache"):
            torch_ops.write_kv(rows, rows, bad, cache, [4, 5])
        assert not bad.any()
    assert not cache.any()


@pytest.mark.parametrize("ops", [torch_ops, reference], ids=["torch", "reference"])
def test_attention_without_heads_or_rows_of_a_block_is_refused(ops):
    no_heads, q = torch.zeros(1, 0, 4), torch.zeros(1, 2, 4)
    cache, no_rows = torch.zeros(3, 4, 1, 4), torch.zeros(3, 0, 1, 4)
    where = dict(kv_lens=[1], block_tables=[[1]])
    with pytest.raises(
        ValueError, match="query heads: expected a multiple of 1, at least 1, got 0"
    ):
        ops.attention_decode(no_heads, no_heads, cache, cache, **where)
    with pytest.raises(ValueError, match="block size: expected at least 1, got 0"):
        ops.attention_decode(q, q, no_rows, no_rows, **where)


def test_a_window_longer_than_a_chunk_is_refused_before_a_slot_is_written():
    x, weight, windows = torch.ones(70, 2), torch.ones(2, 65), torch.zeros(4, 64, 2)
    pack = dict(cu_seqlens=[0, 70], read_slots=[-1], write_slots=[1], snapshot_slots=[2, -1])
    with pytest.raises(ValueError, match=r"conv width: expected in \[1, 64\], got 65"):
        torch_ops.causal_conv_prefill(x, weight, windows, **pack)
    assert not windows.any()


def decode_ids(**changed):
    ids = dict(
        kv_indices=Ids([5, 9]),
        kv_lens=Ids([2, 2]),
        block_tables=BlockTables([[1], [2]]),
        read_slots=Ids([1, 3]),
        write_slots=Ids([2, 3]),
    )
    validate.decode_ids(**(ids | changed), num_blocks=3, block_size=4, num_slots=4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_indices": Ids([5])}, "number of K/V indices: expected 2, got 1"),
        ({"kv_indices": Ids([5, 5])}, "K/V index: expected used once, got 5"),
        ({"kv_indices": Ids([5, 12])}, r"K/V index: expected in \[0, 12\), got 12"),
        ({"kv_lens": Ids([2])}, "number of K/V indices: expected 1, got 2"),
        ({"kv_lens": Ids([2, 5])}, "blocks of row 1: expected at least 2, got 1"),
        ({"block_tables": BlockTables([[1]])}, "number of block tables: expected 2, got 1"),
        ({"block_tables": BlockTables([[1], [3]])}, r"block of row 1: expected in \[0, 3\), got 3"),
        ({"write_slots": Ids([2, 2])}, "writers of slot 2"),
        ({"write_slots": Ids([2, 4])}, "write slot of row 1"),
        ({"read_slots": Ids([1])}, "number of read slots: expected 2, got 1"),
    ],
)
def test_ids_of_a_step_for_a_graph_are_checked_as_the_ops_would(changed, message):
    decode_ids()
    with pytest.raises(ValueError, match=message):
        decode_ids(**changed)
