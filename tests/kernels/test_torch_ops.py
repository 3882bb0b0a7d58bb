"""The CPU path against the specification in float64: values, whole pools, odd shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference, torch_ops
from tests.kernels.packs import (
    PACKS,
    STEPS,
    TOLERANCE,
    VERIFIES,
    Pack,
    Pool,
    Steps,
    as_double,
    delta_inputs,
    error,
    generator,
    normal,
    real_tokens,
    same_bits,
)

FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
EVERY_PACK = pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
HEAD_SHAPES = {  # H, HV, K, V
    "one to one": (2, 2, 32, 32),
    "one to two, wide": (2, 4, 128, 128),
    "one to three, K above V": (1, 3, 64, 32),
    "one to four, V above K": (2, 8, 32, 64),
}


def assert_pool_matches(pool: Pool, expected: Pool, before: Pool, written: set[int]) -> None:
    """Written slots are near the float64 ones, and no other bit of the pool has changed."""
    for slot in written:
        assert error(pool.view[slot], expected.view[slot]) < TOLERANCE[torch.float32], slot
    assert pool.untouched_but(before, written)


@FLOATS
@EVERY_PACK
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_delta_prefill_matches_the_recurrence(pack, shape, dtype):
    H, HV, K, V = shape
    inputs = delta_inputs(pack.num_tokens, H, HV, K, V, dtype)
    pool = Pool.poisoned(pack.num_slots, HV, V, K, dtype=torch.float32, filled=pack.sources)
    before, expected = pool.clone(), pool.double()
    o = torch_ops.gated_delta_prefill(*inputs, pool.view, **pack.vectors())
    o64 = reference.gated_delta_prefill(*as_double(*inputs), expected.view, **pack.vectors())
    real = real_tokens(pack)
    assert o.dtype == torch.float32
    assert error(o[real], o64[real]) < TOLERANCE[torch.float32]
    assert_pool_matches(pool, expected, before, pack.written)


@pytest.mark.parametrize("g", [0.0, -1e-4, -1.0, -30.0, -200.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_delta_prefill_bears_extreme_gates(g, beta):
    pack = PACKS["two chunks and two tokens"]
    q, k, v, _, _ = delta_inputs(pack.num_tokens, 1, 2, 32, 32, torch.float32)
    gates = torch.full((2, pack.num_tokens, 2), 0.0)
    gates[0], gates[1] = g, beta
    gates[0, ::7] = 0.0  # a chunk that mixes strong decay with none
    pool = Pool.poisoned(pack.num_slots, 2, 32, 32, dtype=torch.float32, filled=pack.sources)
    before, expected = pool.clone(), pool.double()
    o = torch_ops.gated_delta_prefill(q, k, v, *gates, pool.view, **pack.vectors())
    inputs = as_double(q, k, v, *gates)
    o64 = reference.gated_delta_prefill(*inputs, expected.view, **pack.vectors())
    assert error(o, o64) < 1e-5
    for slot in pack.written:
        assert error(pool.view[slot], expected.view[slot]) < 1e-5
    assert pool.untouched_but(before, pack.written)


def test_delta_rules_add_eps_to_the_norms_of_short_keys_and_queries():
    q, k, v, g, beta = delta_inputs(70, 1, 2, 32, 32, torch.float32)
    q, k = 1e-3 * q, 2e-4 * k  # sums of squares around 3e-5 and 1e-6, the eps
    pack, inputs = Pack([70], [1], [2]), (q, k, v, g, beta)
    pool = Pool.poisoned(5, 2, 32, 32, dtype=torch.float32, filled=(1,))
    expected = pool.double()
    o = torch_ops.gated_delta_prefill(*inputs, pool.view, **pack.vectors())
    o64 = reference.gated_delta_prefill(*as_double(*inputs), expected.view, **pack.vectors())
    assert error(o, o64) < TOLERANCE[torch.float32]
    assert error(pool.view[2], expected.view[2]) < TOLERANCE[torch.float32]
    row = [x[:1] for x in inputs]
    o = torch_ops.gated_delta_step(*row, pool.view, **Steps([1], [3]).vectors())
    o64 = reference.gated_delta_step(*as_double(*row), expected.view, **Steps([1], [3]).vectors())
    assert error(o, o64) < TOLERANCE[torch.float32]
    assert error(pool.view[3], expected.view[3]) < TOLERANCE[torch.float32]


def test_delta_prefill_bears_one_key_repeated_and_keys_of_zero():
    q, k, v, g, beta = delta_inputs(130, 1, 1, 32, 32, torch.float32)
    k[:100] = k[0]
    k[110:120] = 0.0
    pack = Pack([130], [-1], [1])
    pool = Pool.poisoned(3, 1, 32, 32, dtype=torch.float32)
    expected = pool.double()
    o = torch_ops.gated_delta_prefill(q, k, v, g, beta, pool.view, **pack.vectors())
    inputs = as_double(q, k, v, g, beta)
    o64 = reference.gated_delta_prefill(*inputs, expected.view, **pack.vectors())
    assert error(o, o64) < 1e-5
    assert error(pool.view[1], expected.view[1]) < 1e-5


ALL_STEPS = STEPS | VERIFIES
EVERY_STEP = pytest.mark.parametrize("steps", ALL_STEPS.values(), ids=list(ALL_STEPS))


@FLOATS
@EVERY_STEP
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_delta_step_matches_the_recurrence(steps, shape, dtype):
    H, HV, K, V = shape
    inputs = delta_inputs(steps.num_tokens, H, HV, K, V, dtype)
    pool = Pool.poisoned(14, HV, V, K, dtype=torch.float32, filled=steps.sources)
    before, expected, slots = pool.clone(), pool.double(), steps.vectors()
    o = torch_ops.gated_delta_step(*inputs, pool.view, **slots)
    o64 = reference.gated_delta_step(*as_double(*inputs), expected.view, **slots)
    real = steps.real_tokens()
    assert o.dtype == torch.float32
    assert error(o[real], o64[real]) < TOLERANCE[torch.float32]
    assert_pool_matches(pool, expected, before, steps.written)


@FLOATS
@EVERY_PACK
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (64, 4), (33, 2), (3, 1)])
def test_convolution_prefill_matches_the_taps_and_keeps_windows_exactly(
    pack, channels, width, dtype
):
    x, weight = normal(1, pack.num_tokens, channels, dtype=dtype), normal(2, channels, width)
    pool = Pool.poisoned(pack.num_slots, width - 1, channels, dtype=dtype, filled=pack.sources)
    before, expected = pool.clone(), pool.double()
    y = torch_ops.causal_conv_prefill(x, weight.to(dtype), pool.view, **pack.vectors())
    x64, weight64 = as_double(x, weight.to(dtype))
    y64 = reference.causal_conv_prefill(x64, weight64, expected.view, **pack.vectors())
    real = real_tokens(pack)
    assert y.dtype == dtype
    assert error(y[real], y64[real]) < TOLERANCE[dtype]
    for slot in pack.written:  # inputs are moved, never rounded
        assert same_bits(pool.view[slot], expected.view[slot].to(dtype))
    assert pool.untouched_but(before, pack.written)


@FLOATS
@EVERY_STEP
def test_convolution_step_matches_the_taps_and_keeps_windows_exactly(steps, dtype):
    x, weight = normal(1, steps.num_tokens, 37, dtype=dtype), normal(2, 37, 4)
    pool = Pool.poisoned(14, 3, 37, dtype=dtype, filled=steps.sources)
    before, expected, slots = pool.clone(), pool.double(), steps.vectors()
    y = torch_ops.causal_conv_step(x, weight, pool.view, **slots)
    y64 = reference.causal_conv_step(*as_double(x, weight), expected.view, **slots)
    real = steps.real_tokens()
    assert y.dtype == dtype
    assert error(y[real], y64[real]) < TOLERANCE[dtype]
    for slot in steps.written:
        assert same_bits(pool.view[slot], expected.view[slot].to(dtype))
    assert pool.untouched_but(before, steps.written)


@pytest.mark.parametrize("suffix", [1, 2, 3, 4, 63, 64, 65])
def test_convolution_of_a_suffix_mixes_the_window_of_its_prefix(suffix):
    x, weight = normal(1, 64 + suffix, 24), normal(2, 24, 4)
    whole, _ = reference.causal_conv(*as_double(x, weight), torch.zeros(3, 24).double())
    pool = Pool.poisoned(4, 3, 24, dtype=torch.float32)
    first, second = Pack([64], [-1], [1]), Pack([suffix], [1], [2])
    torch_ops.causal_conv_prefill(x[:64], weight, pool.view, **first.vectors())
    y = torch_ops.causal_conv_prefill(x[64:], weight, pool.view, **second.vectors())
    assert error(y, whole[64:]) < TOLERANCE[torch.float32]
    assert torch.equal(pool.view[2], x[-3:])
    assert torch.equal(pool.view[1], x[61:64])


@FLOATS
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("dim", [7, 128, 257])
def test_norms_match(rows, dim, dtype):
    x, gate = normal(1, rows, dim, dtype=dtype), normal(2, rows, dim, dtype=dtype)
    weight = 0.5 * normal(3, dim)
    y = torch_ops.rms_norm(x, weight, eps=1e-2)
    assert y.dtype == dtype
    x64, gate64, weight64 = as_double(x, gate, weight)
    assert error(y, reference.rms_norm(x64, weight64, eps=1e-2)) < TOLERANCE[dtype]
    wide = normal(4, rows, dim)  # the delta rule's output, float32 under a narrow gate
    y = torch_ops.gated_rms_norm(wide, gate, weight, eps=1e-2)
    assert y.dtype == dtype
    y64 = reference.gated_rms_norm(wide.double(), gate64, weight64, eps=1e-2)
    assert error(y, y64) < TOLERANCE[dtype]


@FLOATS
@pytest.mark.parametrize("half", [1, 4, 8])
def test_rotary_matches_and_passes_the_rest_through(half, dtype):
    x, angle = normal(1, 5, 3, 16, dtype=dtype), normal(2, 5, half)
    before = x.clone()
    y = torch_ops.rotary(x, angle.cos(), angle.sin())
    y64 = reference.rotary(*as_double(x, angle.cos(), angle.sin()))
    assert y.dtype == dtype
    assert error(y, y64) < TOLERANCE[dtype]
    assert same_bits(y[..., 2 * half :], x[..., 2 * half :])
    assert same_bits(x, before)


@FLOATS
def test_delta_gates_match_over_the_whole_range_of_inputs(dtype):
    a = torch.linspace(-60.0, 60.0, 241 * 3).view(-1, 3).to(dtype)
    b, A_log, dt_bias = a.flip(0), normal(1, 3), normal(2, 3)
    g, beta = torch_ops.delta_gates(a, b, A_log, dt_bias)
    g64, beta64 = reference.delta_gates(*as_double(a, b, A_log, dt_bias))
    assert g.dtype == beta.dtype == torch.float32
    # element by element: near 0 both are small numbers that a norm would not see
    torch.testing.assert_close(g.double(), g64, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(beta.double(), beta64, rtol=1e-5, atol=1e-12)


@FLOATS
def test_swiglu_gates_the_second_half_by_the_first(dtype):
    gate_up = normal(1, 5, 2 * 33, dtype=dtype)
    before = gate_up.clone()
    y = torch_ops.swiglu(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert y.dtype == dtype
    assert error(y, reference.silu(gate) * up) < TOLERANCE[dtype]
    assert same_bits(gate_up, before)


def test_slots_are_copied_and_zeroed_whole_and_alone():
    arena = torch.randint(0, 256, (9, 48), dtype=torch.uint8, generator=generator(1))
    strided = torch.zeros(9, 64, dtype=torch.uint8)
    strided[:, :48] = arena
    for pool in (arena.clone(), strided[:, :48]):
        expected = arena.clone()
        torch_ops.copy_slots(pool, [3, 3, 8], [1, 2, 5])
        torch_ops.zero_slots(pool, [4, 7])
        reference.copy_slots(expected, [3, 3, 8], [1, 2, 5])
        reference.zero_slots(expected, [4, 7])
        assert torch.equal(pool, expected)
        torch_ops.copy_slots(pool, [], [])
        torch_ops.zero_slots(pool, [])
        assert torch.equal(pool, expected)
    assert not strided[:, 48:].any()


@given(st.permutations(range(1, 9)), st.integers(0, 4))
def test_any_copies_between_disjoint_slots_move_the_sources(order, num_copies):
    arena = torch.randint(0, 256, (9, 16), dtype=torch.uint8, generator=generator(2))
    before = arena.clone()
    sources, destinations = order[:num_copies], order[4 : 4 + num_copies]
    torch_ops.copy_slots(arena, sources, destinations)
    assert torch.equal(arena[destinations], before[sources])
    others = [slot for slot in range(9) if slot not in destinations]
    assert torch.equal(arena[others], before[others])


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sources", "destinations"), [([], []), ([1], [2]), ([4, 4, 1], [2, 3, 5]), ([5], [1])]
)
def test_a_block_is_copied_in_all_layers_keys_and_values_and_nothing_else(
    layers, dtype, sources, destinations
):
    cache = normal(5, layers, 2, 6, 4, 2, 8).to(dtype)
    expected = cache.clone()
    torch_ops.copy_blocks(cache, sources, destinations)
    for plane in range(2 * layers):
        for source, destination in zip(sources, destinations, strict=True):
            expected[plane // 2, plane % 2, destination] = expected[plane // 2, plane % 2, source]
    assert same_bits(cache, expected)
    again = normal(5, layers, 2, 6, 4, 2, 8).to(dtype)
    reference.copy_blocks(again, sources, destinations)
    assert same_bits(again, expected)


# The first slot beyond 2**31 elements; pages of an empty tensor that nobody touches cost nothing.
def test_slots_beyond_two_to_the_31_elements_are_the_right_ones():
    stride = 2**27
    slot = 2**31 // stride + 1
    inputs, weight = delta_inputs(3, 1, 1, 8, 8, torch.float32), normal(3, 8, 4)
    pack, near = Pack([3], [-1], [slot]), Pack([3], [-1], [1])
    for dtype, inner in ((torch.float32, (1, 8, 8)), (torch.bfloat16, (3, 8))):
        far_pool = torch.empty(slot + 1, stride, dtype=dtype)
        size = torch.Size(inner).numel()
        view = far_pool[:, :size].unflatten(1, inner)
        small = torch.zeros(2, *inner, dtype=dtype)
        for states, rows in ((view, pack), (small, near)):
            if len(inner) == 3:
                torch_ops.gated_delta_prefill(*inputs, states, **rows.vectors())
            else:
                x = inputs[2][:, 0].to(dtype)
                torch_ops.causal_conv_prefill(x, weight, states, **rows.vectors())
        assert torch.equal(far_pool.view(-1)[slot * stride :][:size], small[1].flatten())
        assert small[1].any()
    arena = torch.empty(slot + 1, stride, dtype=torch.uint8)[:, :4096]
    arena[1], arena[slot] = 1, 2
    torch_ops.copy_slots(arena, [1], [slot])
    assert torch.equal(arena[slot], arena[1])
    torch_ops.zero_slots(arena, [slot])
    assert not arena[slot].any()
    assert arena[1].all()
