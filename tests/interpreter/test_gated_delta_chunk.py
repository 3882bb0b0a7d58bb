"""The Triton prefill of the delta rule, interpreted: values, whole pools, and bits."""

import pytest
import torch

from kernels import KERNEL_CHUNK, reference, torch_ops
from kernels.gated_delta_chunk import gated_delta_prefill
from kernels.ids import Ids
from tests.kernels.packs import (
    PACKS,
    Pack,
    Pool,
    as_double,
    delta_inputs,
    error,
    normal,
    real_tokens,
    same_bits,
)

# Relative error in the norm against float64. In float16 the operands of the products are rounded.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
EVERY_PACK = pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
SMALL = (1, 2, 16, 32)


def prefill(inputs, pool, pack):
    return gated_delta_prefill(*inputs, pool.view, **pack.vectors())


def poisoned(pack, shape):
    _, HV, K, V = shape
    return Pool.poisoned(pack.num_slots, HV, V, K, dtype=torch.float32, filled=pack.sources)


def assert_matches(pack, shape, dtype):
    inputs = delta_inputs(pack.num_tokens, *shape, dtype)
    pool = poisoned(pack, shape)
    before, expected, plain = pool.clone(), pool.double(), pool.clone()
    o = prefill(inputs, pool, pack)
    o64 = reference.gated_delta_prefill(*as_double(*inputs), expected.view, **pack.vectors())
    o_torch = torch_ops.gated_delta_prefill(*inputs, plain.view, **pack.vectors())
    real = real_tokens(pack)
    assert o.dtype == torch.float32
    assert error(o[real], o64[real]) < TOLERANCE[dtype]
    assert error(o[real], o_torch[real]) < TOLERANCE[dtype]
    for slot in pack.written:
        assert error(pool.view[slot], expected.view[slot]) < TOLERANCE[dtype], slot
        assert error(pool.view[slot], plain.view[slot]) < TOLERANCE[dtype], slot
    assert pool.untouched_but(before, pack.written)


@FLOATS
@EVERY_PACK
def test_every_pack_matches_the_recurrence_and_the_torch_path(pack, dtype):
    assert_matches(pack, SMALL, dtype)


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 16, 16), (2, 4, 128, 128), (1, 3, 64, 128), (1, 4, 32, 64), (3, 3, 128, 64)],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130])
def test_every_head_shape_matches_at_odd_lengths(length, shape):
    assert_matches(Pack([length], [1], [2]), shape, torch.float32)


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_a_prefill_cut_at_a_multiple_of_the_chunk_has_the_bits_of_an_uncut_one(cut):
    inputs = delta_inputs(195, 1, 2, 32, 32, torch.float16)
    whole, parts = (poisoned(Pack([1], [4], [5]), (1, 2, 32, 32)) for _ in range(2))
    o = prefill(inputs, whole, Pack([195], [4], [1]))
    first = prefill([x[:cut] for x in inputs], parts, Pack([cut], [4], [2]))
    second = prefill([x[cut:] for x in inputs], parts, Pack([195 - cut], [2], [1]))
    assert torch.equal(torch.cat([first, second]), o)
    assert torch.equal(parts.view[1], whole.view[1])


def test_snapshots_are_the_final_states_of_shorter_prefills():
    inputs = delta_inputs(200, 1, 2, 32, 32, torch.float16)
    pack = Pack([200], [1], [2], {0: 3, 1: 4, 2: 5})
    pool = poisoned(pack, (1, 2, 32, 32))
    shorter = pool.clone()
    prefill(inputs, pool, pack)
    for chunk, slot in pack.snapshots.items():
        end = (chunk + 1) * KERNEL_CHUNK
        prefill([x[:end] for x in inputs], shorter, Pack([end], [1], [6]))
        assert torch.equal(pool.view[slot], shorter.view[6])


def test_a_row_has_the_same_bits_alone_and_in_a_pack():
    pack = Pack([65, 130, 1], [1, -1, 2], [3, 4, 5], {0: 6})
    inputs = delta_inputs(pack.num_tokens, 1, 2, 32, 32, torch.float16)
    pool = poisoned(pack, (1, 2, 32, 32))
    alone = pool.clone()
    o = prefill(inputs, pool, pack)
    rows = zip(pack.segments(), pack.reads, pack.writes, strict=True)
    for part, read, write in rows:
        row = Pack([part.stop - part.start], [read], [write])
        assert torch.equal(prefill([x[part] for x in inputs], alone, row), o[part])
        assert torch.equal(alone.view[write], pool.view[write])


def test_rows_of_a_wider_projection_are_read_in_place():
    pack = PACKS["two chunks and two tokens"]
    T, (H, HV, K, V) = pack.num_tokens, SMALL
    q, k, v, g, beta = delta_inputs(T, *SMALL, torch.float32)
    wide = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1), normal(9, T, 16)], dim=1)
    views = wide.split([H * K, H * K, HV * V, 16], dim=1)
    heads = [x.unflatten(1, (n, -1)) for x, n in zip(views, (H, H, HV), strict=False)]
    gates = torch.cat([g, beta, g], dim=1).split([HV, HV, HV], dim=1)[:2]
    pool, strided = poisoned(pack, SMALL), poisoned(pack, SMALL)
    o = prefill((q, k, v, g, beta), pool, pack)
    assert torch.equal(prefill((*heads, *gates), strided, pack), o)
    assert same_bits(pool.everything, strided.everything)


@pytest.mark.parametrize("g", [0.0, -1e-4, -1.0, -30.0, -200.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_extreme_gates_are_borne(g, beta):
    pack = PACKS["two chunks and two tokens"]
    q, k, v, _, _ = delta_inputs(pack.num_tokens, *SMALL, torch.float32)
    gates = torch.full((2, pack.num_tokens, SMALL[1]), 0.0)
    gates[0], gates[1] = g, beta
    gates[0, ::7] = 0.0  # a chunk that mixes strong decay with none
    pool = poisoned(pack, SMALL)
    expected = pool.double()
    o = prefill((q, k, v, *gates), pool, pack)
    inputs = as_double(q, k, v, *gates)
    o64 = reference.gated_delta_prefill(*inputs, expected.view, **pack.vectors())
    assert error(o, o64) < 1e-5
    for slot in pack.written:
        assert error(pool.view[slot], expected.view[slot]) < 1e-5


def test_one_key_repeated_and_keys_of_zero_are_borne():
    """Powers of the chunk's matrix would overflow here; blockwise substitution does not."""
    q, k, v, g, _ = delta_inputs(130, *SMALL, torch.float32)
    k[:100] = k[0]
    k[110:120] = 0.0
    g, beta = torch.zeros_like(g), torch.ones_like(g)
    pack = Pack([130], [-1], [1])
    pool = poisoned(pack, SMALL)
    expected = pool.double()
    o = prefill((q, k, v, g, beta), pool, pack)
    inputs = as_double(q, k, v, g, beta)
    o64 = reference.gated_delta_prefill(*inputs, expected.view, **pack.vectors())
    assert error(o, o64) < 1e-5
    assert error(pool.view[1], expected.view[1]) < 1e-5


def test_short_keys_and_queries_feel_the_epsilon_of_the_norm():
    q, k, v, g, beta = delta_inputs(70, *SMALL, torch.float32)
    inputs = (1e-3 * q, 2e-4 * k, v, g, beta)  # sums of squares near the epsilon
    pack = Pack([70], [1], [2])
    pool = poisoned(pack, SMALL)
    expected = pool.double()
    o = prefill(inputs, pool, pack)
    o64 = reference.gated_delta_prefill(*as_double(*inputs), expected.view, **pack.vectors())
    assert error(o, o64) < TOLERANCE[torch.float32]


def test_tokens_around_a_segment_do_not_leak_into_it():
    """Rows of a neighbour and of a padding row are NaN; the row between them does not see them."""
    pack = Pack([5, 70, 3], [-1, 1, -1], [0, 2, 0])
    inputs = delta_inputs(pack.num_tokens, *SMALL, torch.float32)
    clean = [x[5:75].clone() for x in inputs]
    for x in inputs:
        x[:5], x[75:] = torch.nan, torch.nan
    pool, alone = poisoned(pack, SMALL), poisoned(pack, SMALL)
    o = prefill(inputs, pool, pack)[5:75]
    assert torch.equal(o, prefill(clean, alone, Pack([70], [1], [2])))
    assert torch.equal(pool.view[2], alone.view[2])


def bad_calls():
    """{what: (changed arguments, changed slots, message)} for a pack of one row of 70 tokens."""
    T, (H, HV, K, V) = 70, SMALL
    q, k, v, g, beta = delta_inputs(T, *SMALL, torch.float32)
    states = torch.zeros(6, HV, V, K)
    return {
        "slot out of range": ({}, {"write_slots": [6]}, "write slot"),
        "read out of range": ({}, {"read_slots": [-2]}, "read slot"),
        "snapshot of a short chunk": ({}, {"snapshot_slots": [-1, 4]}, "not 64 tokens"),
        "snapshot into the read slot": ({}, {"snapshot_slots": [1, -1]}, "of its own"),
        "other dtype": ({"k": k.half()}, {}, "dtype of k"),
        "narrow states": ({"states": states.half()}, {}, "dtype of states"),
        "float64 states": (
            {"states": states.double(), "g": g.double(), "beta": beta.double()},
            {},
            "dtype of states",
        ),
        "strided heads": (
            {"v": v.transpose(0, 1).contiguous().transpose(0, 1)},
            {},
            "strides of v",
        ),
        "strided width": ({"v": torch.zeros(T, HV, 2 * V)[..., ::2]}, {}, "strides of v"),
        "strided states": ({"states": torch.zeros(6, HV, V, 2 * K)[..., ::2]}, {}, "strides"),
        "head width": (
            {"q": q[..., :12], "k": k[..., :12], "states": torch.zeros(6, HV, V, 12)},
            {},
            "power of two",
        ),
        "value heads": ({"v": v[:, :1], "q": q.repeat(1, 2, 1), "k": k.repeat(1, 2, 1)}, {}, "a m"),
        "strided gates": ({"g": torch.zeros(T, 2 * HV)[:, ::2]}, {}, "strides of g"),
        "ids of another type": (
            {},
            {"cu_seqlens": torch.tensor([0, 70], dtype=torch.int32)},
            "int64",
        ),
        "ids on another device": ({}, {"read_slots": Ids([1], "meta")}, "device of read_slots"),
        "misaligned": (
            {"k": torch.zeros(T * H * K + 1)[1:].view(T, H, K)},
            {},
            "address of k",
        ),
    }


@pytest.mark.parametrize("what", bad_calls())
def test_bad_input_is_refused_before_anything_is_written(what):
    changed, slots, message = bad_calls()[what]
    names = ("q", "k", "v", "g", "beta")
    arguments = dict(zip(names, delta_inputs(70, *SMALL, torch.float32), strict=True))
    arguments |= {"states": torch.zeros(6, SMALL[1], SMALL[3], SMALL[2])} | changed
    before = arguments["states"].clone()
    with pytest.raises(ValueError, match=message):
        gated_delta_prefill(**arguments, **(Pack([70], [1], [2]).vectors() | slots))
    assert same_bits(arguments["states"], before)


@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("lengths", [[3, 70], [70, 3], [65, 2, 3]], ids=str)
def test_outputs_of_padding_rows_and_the_memory_around_are_not_written(lengths):
    """On a GPU a row that spills into the next one races with it."""
    for padding in range(len(lengths)):
        writes = [0 if row == padding else row + 2 for row in range(len(lengths))]
        pack = Pack(lengths, [1] * len(lengths), writes)
        inputs = delta_inputs(pack.num_tokens, *SMALL, torch.float32)
        o = prefill(inputs, poisoned(pack, SMALL), pack)
        real = real_tokens(pack)
        assert o[real].isfinite().all()
        assert o[~real].isnan().all()
