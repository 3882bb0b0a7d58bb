"""The Triton step of the delta rule, interpreted: decode rows, and the drafts of a verify."""

import pytest
import torch

from kernels import gated_delta_step as module
from kernels import reference, torch_ops
from kernels.gated_delta_step import gated_delta_net_step, gated_delta_step
from tests.kernels.packs import (
    STEPS,
    VERIFIES,
    Pool,
    Steps,
    as_double,
    delta_inputs,
    error,
    normal,
    same_bits,
)

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-6}  # everything inside is float32
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ALL_STEPS = STEPS | VERIFIES
EVERY_STEP = pytest.mark.parametrize("steps", ALL_STEPS.values(), ids=list(ALL_STEPS))
SMALL = (1, 2, 16, 64)  # two programs of value rows


def poisoned(steps, shape):
    _, HV, K, V = shape
    return Pool.poisoned(14, HV, V, K, dtype=torch.float32, filled=steps.sources)


def assert_matches(steps, shape, dtype):
    inputs = delta_inputs(steps.num_tokens, *shape, dtype)
    pool = poisoned(steps, shape)
    before, expected, plain = pool.clone(), pool.double(), pool.clone()
    o = gated_delta_step(*inputs, pool.view, **steps.vectors())
    o64 = reference.gated_delta_step(*as_double(*inputs), expected.view, **steps.vectors())
    o_torch = torch_ops.gated_delta_step(*inputs, plain.view, **steps.vectors())
    real = steps.real_tokens()
    assert o.dtype == torch.float32
    assert error(o[real], o64[real]) < TOLERANCE[dtype]
    assert error(o[real], o_torch[real]) < TOLERANCE[dtype]
    assert not o[~real].any()  # padding gives zeros
    for slot in steps.written:
        assert error(pool.view[slot], expected.view[slot]) < TOLERANCE[dtype], slot
        assert error(pool.view[slot], plain.view[slot]) < TOLERANCE[dtype], slot
    assert pool.untouched_but(before, steps.written)


@FLOATS
@EVERY_STEP
def test_every_kind_of_row_matches_the_recurrence_and_the_torch_path(steps, dtype):
    assert_matches(steps, SMALL, dtype)


@pytest.mark.parametrize(
    "shape", [(2, 2, 16, 16), (2, 4, 128, 128), (1, 3, 64, 32), (2, 8, 32, 64)], ids=str
)
@pytest.mark.parametrize("name", ["mixed", "rows of several lengths"])
def test_every_head_shape_matches(name, shape):
    assert_matches(ALL_STEPS[name], shape, torch.float32)


@pytest.mark.parametrize("name", ["mixed", "in place"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name):
    steps = STEPS[name]
    inputs = delta_inputs(steps.num_tokens, *SMALL, torch.float16)
    pool = poisoned(steps, SMALL)
    alone = pool.clone()
    o = gated_delta_step(*inputs, pool.view, **steps.vectors())
    for row, (read, write) in enumerate(zip(steps.reads, steps.writes, strict=True)):
        one = [x[row : row + 1] for x in inputs]
        single = gated_delta_step(*one, alone.view, **Steps([read], [write]).vectors())
        assert torch.equal(single[0], o[row])
        if write:
            assert torch.equal(alone.view[write], pool.view[write])


def test_drafts_in_one_call_have_the_bits_of_steps_one_by_one():
    inputs = delta_inputs(4, *SMALL, torch.float16)
    steps = VERIFIES["one row of four"]
    pool = poisoned(steps, SMALL)
    one_by_one = pool.clone()
    o = gated_delta_step(*inputs, pool.view, **steps.vectors())
    read = steps.reads[0]
    for t, write in enumerate(steps.writes):
        step = Steps([read], [write]).vectors()
        single = gated_delta_step(*[x[t : t + 1] for x in inputs], one_by_one.view, **step)
        assert torch.equal(single[0], o[t])
        read = write
    assert same_bits(pool.everything, one_by_one.everything)


def test_a_redirected_read_has_the_bits_of_a_copy_and_a_step_in_place():
    inputs = delta_inputs(1, *SMALL, torch.float16)
    redirected = poisoned(Steps([1], [2]), SMALL)
    copied = redirected.clone()
    copied.view[2] = copied.view[1]
    a = gated_delta_step(*inputs, redirected.view, **Steps([1], [2]).vectors())
    b = gated_delta_step(*inputs, copied.view, **Steps([2], [2]).vectors())
    assert torch.equal(a, b) and torch.equal(redirected.view[2], copied.view[2])


def net_arguments(steps, dtype=torch.float32):
    """A mixer's inputs as slices of one projection, and its two pools."""
    H, HV, K, V = SMALL
    T, C = steps.num_tokens, 2 * H * K + HV * V
    projection = normal(1, T, C + 2 * HV, dtype=dtype)
    qkv, b, a = projection.split([C, HV, HV], dim=1)
    windows = Pool.poisoned(14, 3, C, dtype=dtype, filled=steps.sources)
    weights = (normal(2, C, 4, dtype=dtype), 0.1 * normal(3, HV), normal(4, HV) - 4)
    return (qkv, a, b, *weights), windows, poisoned(steps, SMALL)


@EVERY_STEP
def test_the_fused_mixer_matches_its_parts_in_float64(steps):
    (qkv, a, b, *weights), windows, states = net_arguments(steps)
    before = windows.clone(), states.clone()
    windows64, states64 = windows.double(), states.double()
    where = steps.vectors()
    o = gated_delta_net_step(
        qkv, a, b, *weights, windows.view, states.view, num_key_heads=1, **where
    )
    conv_weight, A_log, dt_bias = as_double(*weights)
    y = reference.causal_conv_step(qkv.double(), conv_weight, windows64.view, **where)
    g, beta = reference.delta_gates(*as_double(a, b), A_log, dt_bias)
    H, HV, K, V = SMALL
    q, k, v = y.split([H * K, H * K, HV * V], dim=1)
    heads = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
    o64 = reference.gated_delta_step(*heads, g, beta, states64.view, **where)
    real = steps.real_tokens()
    assert error(o[real], o64[real]) < 1e-5
    for slot in steps.written:
        assert torch.equal(windows.view[slot].double(), windows64.view[slot])
        assert error(states.view[slot], states64.view[slot]) < 1e-5
    assert windows.untouched_but(before[0], steps.written)
    assert states.untouched_but(before[1], steps.written)


def test_the_fused_mixer_of_the_torch_path_agrees():
    steps = STEPS["mixed"]
    arguments, windows, states = net_arguments(steps)
    plain = windows.clone(), states.clone()
    where = dict(num_key_heads=1, **steps.vectors())
    o = gated_delta_net_step(*arguments, windows.view, states.view, **where)
    o_torch = torch_ops.gated_delta_net_step(*arguments, plain[0].view, plain[1].view, **where)
    real = steps.real_tokens()
    assert error(o[real], o_torch[real]) < 1e-5
    assert same_bits(windows.everything, plain[0].everything)


TORCH_TAKES = {"dtype of A_log: expected torch.float32", "last stride of A_log", "dtype of a"}


def test_a_refused_mixer_leaves_the_windows_alone_too():
    steps = STEPS["in place"]
    (qkv, a, b, weight, A_log, dt_bias), windows, states = net_arguments(steps)
    before = windows.clone()
    where = dict(num_key_heads=1, **steps.vectors())
    calls = {
        "dtype of states": (a, A_log, states.view.half()),
        "shape of a": (a[:2], A_log, states.view),
        "dtype of A_log: expected torch.float32": (a, A_log.half(), states.view),
        "last stride of A_log": (a, normal(3, 4)[::2], states.view),
        "dtype of a": (a.long(), A_log, states.view),
        "strides of states": (a, A_log, torch.zeros(14, 2, 64, 32)[..., ::2]),
        "shape of states": (a, A_log, states.view[:5]),
    }
    for ops in (module, torch_ops):
        for message, (a_, A_, states_) in calls.items():
            if ops is torch_ops and message in TORCH_TAKES:
                continue
            with pytest.raises(ValueError, match=message):
                ops.gated_delta_net_step(
                    qkv, a_, b, weight, A_, dt_bias, windows.view, states_, **where
                )
            assert same_bits(windows.everything, before.everything), message


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (Steps([1, 2], [3, 3]), "writers of slot 3"),
        (Steps([1, 3], [3, 4]), "writer of slot 3, which row 1 reads"),
        (Steps([1], [14]), "write slot of row 0"),
        (Steps([14], [1]), "read slot of row 0"),
        (Steps([1], [2, 1], [2]), "none of them the read slot 1"),
        (Steps([1, 4], [2, 3], [2]), "number of read slots"),
        (Steps([1], [2, 3], [3]), "cu_seqlens"),
        (Steps([1, 2], [3, 4, 2], [2, 1]), None),
    ],
)
def test_slots_that_would_race_are_refused_before_anything_is_written(steps, message):
    """trap 16"""
    pool = Pool.poisoned(14, 2, 64, 16, dtype=torch.float32, filled=(1, 2, 3, 4))
    before = pool.clone()
    inputs = delta_inputs(steps.num_tokens, *SMALL, torch.float32)
    if message is None:  # a row of one token may write what it reads
        gated_delta_step(*inputs, pool.view, **steps.vectors())
        assert pool.untouched_but(before, steps.written)
        return
    with pytest.raises(ValueError, match=message):
        gated_delta_step(*inputs, pool.view, **steps.vectors())
    assert same_bits(pool.everything, before.everything)


@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("name", ["padding", "mixed"])
def test_padding_steps_are_zeros_in_memory_that_held_something_else(name):
    """trap 18"""
    steps = STEPS[name]
    inputs = delta_inputs(steps.num_tokens, *SMALL, torch.float32)
    o = gated_delta_step(*inputs, poisoned(steps, SMALL).view, **steps.vectors())
    real = steps.real_tokens()
    assert o[real].isfinite().all()
    assert same_bits(o[~real], torch.zeros_like(o[~real]))


def test_short_keys_and_queries_feel_the_epsilon_of_the_norm():
    steps = VERIFIES["rows of several lengths"]
    q, k, v, g, beta = delta_inputs(steps.num_tokens, *SMALL, torch.float32)
    inputs = (1e-4 * q, 2e-4 * k, v, g, beta)  # sums of squares near the epsilon
    pool = poisoned(steps, SMALL)
    expected = pool.double()
    o = gated_delta_step(*inputs, pool.view, **steps.vectors())
    o64 = reference.gated_delta_step(*as_double(*inputs), expected.view, **steps.vectors())
    assert error(o, o64) < TOLERANCE[torch.float32]


def test_gates_with_rows_of_their_own_are_found_by_their_strides():
    steps = STEPS["mixed"]
    q, k, v, g, beta = delta_inputs(steps.num_tokens, *SMALL, torch.float32)
    wide = torch.full((steps.num_tokens, 7), torch.nan)
    wide[:, 3:5] = beta
    pool = poisoned(steps, SMALL)
    strided = pool.clone()
    o = gated_delta_step(q, k, v, g, beta, pool.view, **steps.vectors())
    again = gated_delta_step(q, k, v, g, wide[:, 3:5], strided.view, **steps.vectors())
    assert torch.equal(o, again)
    assert same_bits(pool.everything, strided.everything)


def test_a_mixer_whose_gates_do_not_fit_leaves_the_windows_alone_too():
    steps = STEPS["in place"]
    (qkv, a, b, weight, A_log, dt_bias), windows, states = net_arguments(steps)
    before = windows.clone()
    where = dict(num_key_heads=1, **steps.vectors())
    calls = {
        "shape of b": (a, b[:, :1], A_log, dt_bias),
        "shape of A_log": (a, b, A_log[:1], dt_bias),
        "shape of dt_bias": (a, b, A_log, dt_bias[:1]),
        "last stride of a": (a.repeat_interleave(2, 1)[:, ::2], b, A_log, dt_bias),
        "last stride of b": (a, b.repeat_interleave(2, 1)[:, ::2], A_log, dt_bias),
        "dtype of dt_bias": (a, b, A_log, dt_bias.double()),
    }
    for ops in (module, torch_ops):
        for message, gates in calls.items():
            if ops is torch_ops and "shape" not in message:
                continue  # it takes any strides, and widens the parameters itself
            with pytest.raises(ValueError, match=message):
                ops.gated_delta_net_step(
                    qkv, *gates[:2], weight, *gates[2:], windows.view, states.view, **where
                )
            assert same_bits(windows.everything, before.everything), message
