"""An element's result does not depend on where it sits: packed rows may be padded, cut and moved.

A vectorised loop treats the last elements of a tensor one by one, and torch's float32 sigmoid, silu
and softplus round differently there; exp does not. The CPU path composes its float32 functions from
ops that agree, and uses the native ones in bfloat16, where all 65536 values are checked here.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import elementwise, torch_ops
from tests.kernels.packs import TOLERANCE, error, normal, same_bits

VECTOR = 64  # at least twice the elements of the widest register
FUNCTIONS = {
    "sigmoid": elementwise.sigmoid,
    "silu": elementwise.silu,
    "softplus": elementwise.softplus,
}
EVERY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)


def one_by_one(function, x: torch.Tensor) -> torch.Tensor:
    """The function of each element as a tensor of its own: always the scalar tail."""
    return torch.cat([function(element.clone()) for element in x.split(1)])


def in_the_body(function, x: torch.Tensor) -> torch.Tensor:
    """The function of each element with whole registers around it: never the scalar tail."""
    padded = torch.cat([x, x.new_zeros(VECTOR - len(x) % VECTOR)])
    return function(padded)[: len(x)]


def equal_or_both_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(a.nan_to_num(nan=0.0, posinf=None), b.nan_to_num(nan=0.0)) and torch.equal(
        a.isnan(), b.isnan()
    )


@EVERY_FUNCTION
def test_every_bfloat16_value_has_one_result_in_body_and_tail(name):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    function = FUNCTIONS[name]
    body = in_the_body(function, values)
    tail = torch.cat([function(part.clone()) for part in values.split(3)])
    assert equal_or_both_nan(body, tail)


@EVERY_FUNCTION
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 100.0])
def test_float32_values_have_one_result_in_body_and_tail(name, scale):
    x = scale * normal(1, 2001)
    function = FUNCTIONS[name]
    body = in_the_body(function, x)
    assert same_bits(body, one_by_one(function, x))


@EVERY_FUNCTION
@given(length=st.integers(1, 200), start=st.integers(0, 70), scale=st.sampled_from([1.0, 8.0]))
def test_any_stretch_of_a_tensor_gives_the_bits_of_the_whole(name, length, start, scale):
    x = scale * normal(2, 300)
    function = FUNCTIONS[name]
    whole = function(x.clone())
    assert same_bits(function(x[start : start + length].clone()), whole[start : start + length])


@EVERY_FUNCTION
def test_rows_of_a_strided_view_give_the_bits_of_the_packed_ones(name):
    x = normal(3, 9, 70)
    function = FUNCTIONS[name]
    assert same_bits(function(x[:, :37]), function(x[:, :37].clone()))


@EVERY_FUNCTION
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_functions_are_right_over_their_range(name, dtype):
    x = torch.linspace(-30.0, 30.0, 1001).to(dtype)
    native = {
        "sigmoid": torch.sigmoid,
        "silu": torch.nn.functional.silu,
        "softplus": torch.nn.functional.softplus,
    }
    expected = native[name](x.double())
    assert error(FUNCTIONS[name](x.clone()), expected) < TOLERANCE[dtype]
    if dtype == torch.float32:
        y = FUNCTIONS[name](x.clone()).double()
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=1e-30)


@EVERY_FUNCTION
def test_the_argument_is_left_alone(name):
    for dtype in TOLERANCE:
        x = normal(4, 70, dtype=dtype)
        before = x.clone()
        FUNCTIONS[name](x)
        assert same_bits(x, before)


def row_ops(rows: int, dtype: torch.dtype) -> dict:
    """Every op on packed rows, as a function of a slice of its rows."""
    x, gate, wide = (
        normal(i, rows, 3, 37).to(t) for i, t in ((1, dtype), (2, dtype), (3, torch.float32))
    )
    weight, angle = normal(4, 37), normal(5, rows, 9)
    a, b = normal(6, rows, 5, dtype=dtype), normal(7, rows, 5, dtype=dtype)
    heads = normal(8, 5), normal(9, 5)
    gate_up = normal(10, rows, 2 * 37, dtype=dtype)
    return {
        "rms_norm": lambda s: torch_ops.rms_norm(x[s], weight, eps=1e-6),
        "gated_rms_norm": lambda s: torch_ops.gated_rms_norm(wide[s], gate[s], weight, eps=1e-6),
        "rotary": lambda s: torch_ops.rotary(x[s], angle[s].cos(), angle[s].sin()),
        "log decay": lambda s: torch_ops.delta_gates(a[s], b[s], *heads)[0],
        "beta": lambda s: torch_ops.delta_gates(a[s], b[s], *heads)[1],
        "swiglu": lambda s: torch_ops.swiglu(gate_up[s]),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", row_ops(1, torch.float32))
@given(rows=st.integers(1, 40), data=st.data())
def test_packed_rows_do_not_depend_on_their_neighbours(name, dtype, rows, data):
    op = row_ops(rows, dtype)[name]
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    whole = op(slice(None))
    assert same_bits(op(slice(start, stop)), whole[start:stop])
