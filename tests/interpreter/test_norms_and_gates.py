"""The row-wise Triton kernels against the specification in float64, in Triton's interpreter.

Every fresh output is poisoned with NaN and lies between guards that no kernel may write.
"""

import pytest
import torch

from kernels import gates, launch, norms, reference, torch_ops
from tests.kernels.packs import as_double, bits, error, generator, normal, same_bits

# The interpreter cuts bfloat16 off where the hardware rounds: twice the error of one rounding.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 6e-3}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ROWS = pytest.mark.parametrize("R", [0, 1, 2, 3, 17])
EPS = 1e-2  # large enough to be seen
empty = torch.empty


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """torch.empty gives NaN between guards of NaN; the guards are looked at afterwards."""
    guards = []

    def poisoned(*sizes, dtype, device):
        shape = torch.Size(*sizes) if len(sizes) == 1 else torch.Size(sizes)
        buffer = torch.full((64 + shape.numel() + 8192,), float("nan"), dtype=dtype)
        out = buffer[64 : 64 + shape.numel()]
        guards.extend([buffer[:64], buffer[64 + shape.numel() :]])
        return out.view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for guard in guards:
        assert same_bits(guard, torch.full_like(guard, float("nan")))


def assert_matches(y: torch.Tensor, y64: torch.Tensor, dtype: torch.dtype) -> None:
    """Near the float64 result, and where it is narrow all but always its one rounding."""
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == y64.shape
    assert error(y, y64) < TOLERANCE[dtype]
    if dtype != torch.float32 and y.numel() > 500:
        assert (y == y64.to(dtype)).double().mean() > 0.99 or cut_off(y, y64) > 0.99


def cut_off(y: torch.Tensor, y64: torch.Tensor) -> float:
    """The share of a bfloat16 y that is y64 without its low bits."""
    cut = (y64.float().view(torch.int32) & -(2**16)).view(torch.float32)
    return float((y.float() == cut).double().mean()) if y.dtype == torch.bfloat16 else 0.0


def among_nan(x: torch.Tensor, pad: int = 16) -> torch.Tensor:
    """The same values as a view with strided rows, in a buffer that is NaN all around it."""
    flat = x.flatten(1)
    buffer = torch.full((x.shape[0] + 2, flat.shape[1] + 2 * pad), float("nan"), dtype=x.dtype)
    view = buffer[1:-1, pad:-pad]
    view.copy_(flat)
    return view.unflatten(1, x.shape[1:]) if x.ndim == 3 else view


def query_and_key(
    R: int, heads: int, kv: int, D: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as the model cuts them from one projection: per head query and gate, then k, v."""
    projected = normal(1, R, (2 * heads + 2 * kv) * D, dtype=dtype)
    q_gate, k, v = projected.split([2 * heads * D, kv * D, kv * D], dim=-1)
    q, gate = q_gate.unflatten(-1, (heads, 2, D)).unbind(2)
    gate.fill_(float("nan"))
    v.fill_(float("nan"))
    return q, k.unflatten(-1, (kv, D))


def tables(R: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = normal(7, R, half)
    return angle.cos(), angle.sin()


def gates_of(R: int, HV: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """b and a as the model cuts them, behind qkv and z."""
    projected = torch.full((R, 48 + 2 * HV), float("nan"), dtype=dtype)
    _, b, a = projected.split([48, HV, HV], dim=-1)
    b.copy_(normal(2, R, HV))
    a.copy_(normal(3, R, HV))
    return a, b


@FLOATS
@ROWS
@pytest.mark.parametrize("hidden", [64, 96, 2560])
def test_rms_norm_of_rows_matches(R, hidden, dtype):
    x, weight = normal(1, R, hidden, dtype=dtype), 0.5 * normal(2, hidden)
    y64 = reference.rms_norm(*as_double(x, weight), eps=EPS)
    for view in (x, among_nan(x)):
        before = view.clone()
        y = norms.rms_norm(view, weight, eps=EPS)
        assert_matches(y, y64, dtype)
        assert error(y, torch_ops.rms_norm(x, weight, eps=EPS)) < 2 * TOLERANCE[dtype]
        assert same_bits(view, before)


@FLOATS
@ROWS
@pytest.mark.parametrize(("heads", "kv", "D"), [(1, 1, 64), (3, 2, 96), (8, 1, 256)])
def test_rms_norm_of_strided_heads_matches(R, heads, kv, D, dtype):
    weight = 0.5 * normal(2, D)
    for x in query_and_key(R, heads, kv, D, dtype):
        y = norms.rms_norm(x, weight, eps=EPS)
        assert_matches(y, reference.rms_norm(*as_double(x, weight), eps=EPS), dtype)
        assert error(y, torch_ops.rms_norm(x, weight, eps=EPS)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("hidden", [4096, 8192])
def test_rms_norm_matches_at_the_widths_of_the_large_models(hidden):
    x, weight = normal(1, 2, hidden), 0.5 * normal(2, hidden)
    y64 = reference.rms_norm(*as_double(x, weight), eps=EPS)
    assert_matches(norms.rms_norm(x, weight, eps=EPS), y64, torch.float32)


@FLOATS
@ROWS
@pytest.mark.parametrize(("HV", "V"), [(1, 64), (3, 96), (16, 128)])
def test_gated_rms_norm_matches_in_the_dtype_of_the_gate(R, HV, V, dtype):
    x, weight = among_nan(normal(1, R, HV, V)), normal(2, V)
    gate = among_nan(3.0 * normal(3, R, HV, V, dtype=dtype), pad=32)
    y64 = reference.gated_rms_norm(*as_double(x, gate, weight), eps=EPS)
    for values in (x, x.contiguous()):
        y = norms.gated_rms_norm(values, gate, weight, eps=EPS)
        assert_matches(y, y64, dtype)
        y_torch = torch_ops.gated_rms_norm(x, gate, weight, eps=EPS)
        assert error(y, y_torch) < 2 * TOLERANCE[dtype]


def test_gated_rms_norm_follows_the_head_strides_of_x_and_of_the_gate():
    x, gate = normal(1, 3, 5, 96)[..., :64], normal(2, 3, 5, 192)[..., 64:128]
    y64 = reference.gated_rms_norm(*as_double(x, gate, torch.ones(64)), eps=EPS)
    assert_matches(norms.gated_rms_norm(x, gate, torch.ones(64), eps=EPS), y64, torch.float32)


def test_gated_rms_norm_bears_gates_of_any_size():
    gate = torch.tensor([-1e4, -200.0, -100.0, -88.0, -30.0, -1e-3, 0.0, 30.0, 100.0, 1e4])
    x = torch.ones(1, 10, 64)
    gate = gate[None, :, None].expand(1, 10, 64).contiguous()
    y = norms.gated_rms_norm(x, gate, torch.ones(64), eps=1e-6)
    y64 = reference.gated_rms_norm(*as_double(x, gate, torch.ones(64)), eps=1e-6)
    torch.testing.assert_close(y.double(), y64, rtol=1e-6, atol=1e-36)


def test_norms_of_rows_without_variance_are_held_by_eps():
    for scale in (0.0, 1e-4):
        x = scale * normal(1, 2, 3, 64)
        weight, gate = normal(2, 64), normal(3, 2, 3, 64)
        cos, sin = tables(2, 8)
        y = norms.rms_norm(x, weight, eps=1e-6)
        assert error(y, reference.rms_norm(*as_double(x, weight), eps=1e-6)) < 1e-6
        y = norms.gated_rms_norm(x, gate, weight, eps=1e-6)
        y64 = reference.gated_rms_norm(*as_double(x, gate, weight), eps=1e-6)
        assert error(y, y64) < 1e-6
        y = norms.qk_norm_rotary(x, weight, cos, sin, eps=1e-6)
        y64 = reference.rms_norm(*as_double(x, weight), eps=1e-6)
        assert error(y, reference.rotary(y64, *as_double(cos, sin))) < 1e-6


ROTATED = pytest.mark.parametrize(
    ("heads", "kv", "D", "half"), [(1, 1, 64, 8), (3, 1, 256, 32), (5, 2, 64, 32), (2, 3, 40, 12)]
)


@FLOATS
@ROWS
@ROTATED
def test_rotary_matches_and_passes_the_rest_through(R, heads, kv, D, half, dtype):
    cos, sin = tables(R, half)
    for x in query_and_key(R, heads, kv, D, dtype):
        y = norms.rotary(x, cos, sin)
        assert_matches(y, reference.rotary(*as_double(x, cos, sin)), dtype)
        assert error(y, torch_ops.rotary(x, cos, sin)) < 2 * TOLERANCE[dtype]
        assert same_bits(y[..., 2 * half :], x[..., 2 * half :])


@FLOATS
@ROWS
@ROTATED
def test_qk_norm_rotary_is_the_rotated_norm_with_one_rounding(R, heads, kv, D, half, dtype):
    (cos, sin), weight = tables(R, half), 0.5 * normal(2, D)
    for x in query_and_key(R, heads, kv, D, dtype):
        y = norms.qk_norm_rotary(x, weight, cos, sin, eps=EPS)
        y64 = reference.rms_norm(*as_double(x, weight), eps=EPS)
        assert_matches(y, reference.rotary(y64, *as_double(cos, sin)), dtype)
        unfused = norms.rotary(norms.rms_norm(x, weight, eps=EPS), cos, sin)
        assert error(y, unfused) < 2 * TOLERANCE[dtype]


@FLOATS
@ROWS
@pytest.mark.parametrize("F", [1, 33, 96, 1100])
def test_swiglu_gates_the_second_half_by_the_first(R, F, dtype):
    x = 3.0 * normal(1, R, 2 * F, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    for view in (x, among_nan(x)):
        y = gates.swiglu(view)
        assert_matches(y, reference.silu(gate) * up, dtype)
        assert error(y, torch_ops.swiglu(x)) < 2 * TOLERANCE[dtype]


def test_swiglu_bears_gates_of_any_size():
    gate = torch.tensor([[-1e30, -200.0, -100.0, -88.0, -30.0, 0.0, 30.0, 100.0, 1e30]])
    y = gates.swiglu(torch.cat([gate, torch.full_like(gate, 2.0)], -1))
    y64 = 2.0 * reference.silu(gate.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-6, atol=1e-36)


@FLOATS
@ROWS
@pytest.mark.parametrize("HV", [1, 3, 32, 48])
def test_delta_gates_match(R, HV, dtype):
    a, b = gates_of(R, HV, dtype)
    parameters = normal(4, HV), normal(5, HV)
    g, beta = gates.delta_gates(a, b, *parameters)
    g64, beta64 = reference.delta_gates(*as_double(a, b, *parameters))
    g_torch, beta_torch = torch_ops.delta_gates(a, b, *parameters)
    for y, y64, y_torch in ((g, g64, g_torch), (beta, beta64, beta_torch)):
        assert_matches(y, y64, torch.float32)
        assert error(y, y_torch) < 1e-6


@FLOATS
def test_delta_gates_keep_their_digits_over_the_whole_range_of_inputs(dtype):
    points = torch.cat([torch.linspace(-60.0, 60.0, 481), torch.tensor([-1e4, -30.0, 20.0, 1e4])])
    a = points.view(-1, 1).expand(-1, 3).to(dtype).contiguous()
    b, A_log, dt_bias = a.flip(0).contiguous(), normal(1, 3), torch.tensor([0.0, 0.3, -1e-3])
    g, beta = gates.delta_gates(a, b, A_log, dt_bias)
    # softplus of the sum in float32: the sum's own rounding is no loss of the kernel
    x = (a.float() + dt_bias).double()
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    g64 = -torch.exp(A_log.double()) * softplus
    _, beta64 = reference.delta_gates(*as_double(a, b, A_log, dt_bias))
    torch.testing.assert_close(g.double(), g64, rtol=1e-6, atol=1e-36)
    torch.testing.assert_close(beta.double(), beta64, rtol=1e-6, atol=1e-36)


def test_softplus_is_the_identity_above_20():
    a = torch.tensor([[20.000002, 20.5, 33.3, 1e5]])
    zero = torch.zeros(4)
    g, _ = gates.delta_gates(a, a, zero, zero)
    assert torch.equal(g, -a)


def every_op(R: int, dtype: torch.dtype, seed: int = 0):
    """{name: (op on its row tensors, these tensors with R rows)}, at sizes with masked edges."""
    x = normal(seed + 1, R, 320, dtype=dtype)
    heads = among_nan(normal(seed + 2, R, 3, 96, dtype=dtype))
    values, gate = normal(seed + 3, R, 3, 96), 2 * normal(seed + 4, R, 3, 96, dtype=dtype)
    angle = normal(seed + 5, R, 16)
    angles = (angle.cos(), angle.sin())
    a, b = normal(seed + 6, R, 16, dtype=dtype), normal(seed + 7, R, 16, dtype=dtype)
    wide, narrow = normal(8, 320), normal(9, 96)
    A_log, dt_bias = normal(10, 16), normal(11, 16)
    return {
        "rms_norm": (lambda x: norms.rms_norm(x, wide, eps=1e-6), (x,)),
        "rms_norm of heads": (lambda x: norms.rms_norm(x, narrow, eps=1e-6), (heads,)),
        "gated_rms_norm": (
            lambda x, gate: norms.gated_rms_norm(x, gate, narrow, eps=1e-6),
            (values, gate),
        ),
        "rotary": (norms.rotary, (heads, *angles)),
        "qk_norm_rotary": (
            lambda x, *angles: norms.qk_norm_rotary(x, narrow, *angles, eps=1e-6),
            (heads, *angles),
        ),
        "swiglu": (gates.swiglu, (x,)),
        "g": (lambda a, b: gates.delta_gates(a, b, A_log, dt_bias)[0], (a, b)),
        "beta": (lambda a, b: gates.delta_gates(a, b, A_log, dt_bias)[1], (a, b)),
    }


OPS = list(every_op(1, torch.float32))


@FLOATS
@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(name, dtype):
    op, tensors = every_op(35, dtype)[name]
    together = op(*tensors)
    for row in (0, 1, 15, 16, 33, 34):
        alone = op(*(x[row : row + 1] for x in tensors))
        assert torch.equal(alone, together[row : row + 1]), row
    order = torch.randperm(35, generator=generator(1))
    assert torch.equal(op(*(x[order] for x in tensors)), together[order])
    assert torch.equal(op(*(x[5:22] for x in tensors)), together[5:22])


@pytest.mark.parametrize("name", OPS)
def test_a_row_beyond_two_to_the_31_elements_is_the_right_one(name):
    op, tensors = every_op(3, torch.float16)[name]
    far = []
    for x in tensors:  # pages of an empty tensor that nobody touches cost nothing
        if "rotary" in name and x is not tensors[0]:  # tables of angles are contiguous
            far.append(x)
            continue
        view = empty(3, 2**30 + 2**29, dtype=x.dtype)[:, : x[0].numel()]
        far.append(view.copy_(x.flatten(1)).unflatten(1, x.shape[1:]))
    assert torch.equal(op(*far), op(*tensors))


@pytest.mark.parametrize("name", OPS)
def test_the_number_of_rows_is_nothing_a_binary_could_be_made_for(name):
    with launch.recording(launch.Target("sm_90")) as launches:
        for R in (1, 2, 16, 17, 1000):
            op, tensors = every_op(R, torch.bfloat16)[name]
            op(*tensors)
    assert len(launches) == 5
    for other in launches[1:]:
        assert other.kernel is launches[0].kernel
        assert other.constexprs == launches[0].constexprs
        assert other.options == launches[0].options
    for one in launches:  # Triton looks at divisibility by 16, and at num_rows not at all
        integers = [x for x in one.args if not isinstance(x, torch.Tensor)]
        strides = integers[1:] if name in ("g", "beta") else integers
        assert all(stride % 16 == 0 for stride in strides)


def test_an_op_leaves_its_inputs_alone():
    for op, tensors in every_op(3, torch.float16).values():
        before = [bits(x).clone() for x in tensors]
        op(*tensors)
        assert all(torch.equal(bits(x), y) for x, y in zip(tensors, before, strict=True))


def zeros(*sizes, dtype=torch.float32):
    return torch.zeros(*sizes, dtype=dtype)


REFUSED = {
    "x of one dim": (lambda: norms.rms_norm(zeros(4), zeros(4), eps=1), "dims of x"),
    "weight too short": (lambda: norms.rms_norm(zeros(2, 8), zeros(4), eps=1), "shape of weight"),
    "columns apart": (
        lambda: norms.rms_norm(zeros(8, 2).T, zeros(8), eps=1),
        "last stride of x: expected 1, got 2",
    ),
    "weight apart": (
        lambda: norms.rms_norm(zeros(2, 8), zeros(16)[::2], eps=1),
        "last stride of weight: expected 1, got 2",
    ),
    "float64": (
        lambda: norms.rms_norm(zeros(2, 8, dtype=torch.float64), zeros(8), eps=1),
        "dtype of x: .*torch.float64",
    ),
    "an address between": (
        lambda: norms.rms_norm(zeros(4, 8)[:, 1:5], zeros(4), eps=1),
        "address of x: expected a multiple of 16 bytes, got 4 more",
    ),
    "a row that no program holds": (
        lambda: norms.rms_norm(zeros(1, 32768), zeros(32768), eps=1),
        "width: expected at most 16384, got 32768",
    ),
    "another device": (
        lambda: norms.rms_norm(zeros(2, 8), zeros(8).to("meta"), eps=1),
        "device of weight: expected cpu, got meta",
    ),
    "gate of another shape": (
        lambda: norms.gated_rms_norm(zeros(2, 3, 8), zeros(2, 3, 4), zeros(8), eps=1),
        "shape of gate",
    ),
    "gated rows without heads": (
        lambda: norms.gated_rms_norm(zeros(2, 8), zeros(2, 8), zeros(8), eps=1),
        "shape of x",
    ),
    "gated weight": (
        lambda: norms.gated_rms_norm(zeros(2, 3, 8), zeros(2, 3, 8), zeros(3), eps=1),
        "shape of weight",
    ),
    "tables for other rows": (
        lambda: norms.rotary(zeros(2, 1, 8), zeros(3, 2), zeros(3, 2)),
        "cos",
    ),
    "tables that differ": (lambda: norms.rotary(zeros(2, 1, 8), zeros(2, 2), zeros(2, 3)), "sin"),
    "tables too wide": (
        lambda: norms.rotary(zeros(2, 1, 8), zeros(2, 5), zeros(2, 5)),
        "rotated dims",
    ),
    "tables of nothing": (
        lambda: norms.rotary(zeros(2, 1, 8), zeros(2, 0), zeros(2, 0)),
        "rotated dims",
    ),
    "tables apart": (
        lambda: norms.rotary(zeros(2, 1, 8), zeros(2, 4)[:, :2], zeros(2, 2)),
        "strides of cos",
    ),
    "fused weight": (
        lambda: norms.qk_norm_rotary(zeros(2, 1, 8), zeros(4), zeros(2, 2), zeros(2, 2), eps=1),
        "shape of weight",
    ),
    "an odd gate_up": (lambda: gates.swiglu(zeros(2, 5)), "width of gate_up: .* got 5"),
    "a gate_up of heads": (lambda: gates.swiglu(zeros(2, 2, 4)), "shape of gate_up"),
    "b of other rows": (
        lambda: gates.delta_gates(zeros(2, 4), zeros(3, 4), zeros(4), zeros(4)),
        "b",
    ),
    "A_log apart": (
        lambda: gates.delta_gates(zeros(2, 4), zeros(2, 4), zeros(8)[::2], zeros(4)),
        "last stride of A_log",
    ),
    "integers": (
        lambda: gates.delta_gates(zeros(2, 4, dtype=torch.int64), zeros(2, 4), zeros(4), zeros(4)),
        "dtype of a",
    ),
    "rotary at an address between": (
        lambda: norms.rotary(zeros(2, 1, 12)[..., 1:9], zeros(2, 2), zeros(2, 2)),
        "address of x",
    ),
    "a gate at an address between": (
        lambda: norms.gated_rms_norm(zeros(2, 1, 8), zeros(2, 1, 12)[..., 1:9], zeros(8), eps=1),
        "address of gate",
    ),
    "rows at an odd distance": (
        lambda: norms.rms_norm(zeros(3, 9)[:, :8], zeros(8), eps=1),
        "strides of x: expected multiples of 4",
    ),
    "a table of another device": (
        lambda: norms.qk_norm_rotary(
            zeros(2, 1, 8), zeros(8), zeros(2, 2), zeros(2, 2).to("meta"), eps=1
        ),
        "device of sin",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_device_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for op, tensors in every_op(2, torch.float32).values():
        with pytest.raises(ValueError, match="device: expected 'cuda'"):
            op(*tensors)


@FLOATS
def test_norms_of_a_width_that_no_wide_load_fits(dtype):
    x, weight = normal(1, 3, 33, dtype=dtype), 0.5 * normal(2, 33)
    y = norms.rms_norm(x, weight, eps=EPS)
    assert_matches(y, reference.rms_norm(*as_double(x, weight), eps=EPS), dtype)


def test_delta_gates_follow_the_row_strides_of_a_and_of_b():
    a, b, parameters = normal(1, 20, 3), normal(2, 20, 3), (normal(3, 3), normal(4, 3))
    expected = gates.delta_gates(a, b, *parameters)
    for pair in ((among_nan(a), b), (a, among_nan(b))):
        outs = gates.delta_gates(*pair, *parameters)
        assert all(torch.equal(y, z) for y, z in zip(outs, expected, strict=True))
