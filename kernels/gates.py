"""Element by element in Triton: SwiGLU, and the gates of the delta rule.

Bound by bandwidth; the bytes are in each docstring. float32 inside, one rounding at the end, and an
element's value depends on nothing but its own inputs.
"""

import torch
import triton
import triton.language as tl

from kernels import launch, validate
from kernels.rows import ELEMENTS, check, num_warps, row_stride
from kernels.slot_rules import require

_GATE_ROWS = 16


@triton.jit
def sigmoid(b_x):
    b_exp = tl.exp(-tl.abs(b_x))  # at most 1: never overflows
    return tl.where(b_x < 0.0, b_exp, 1.0) / (1.0 + b_exp)


@triton.jit
def softplus(b_x):
    """max(x, 0) + log1p(exp(-|x|)), with log1p(u) = 2 atanh(u / (2 + u)) as a series.

    Free of cancellation for x << 0, and x itself from about 17 on. With u <= 1 the argument is at
    most 1/3, so what is left out is below 2e-9 of the sum.
    """
    b_exp = tl.exp(-tl.abs(b_x))
    b_s = b_exp / (2.0 + b_exp)
    b_square = b_s * b_s
    b_sum = tl.full(b_x.shape, 1.0 / 15.0, tl.float32)
    for i in tl.static_range(7):
        b_sum = b_sum * b_square + 1.0 / (13.0 - 2.0 * i)
    return tl.maximum(b_x, 0.0) + 2.0 * b_s * b_sum


@triton.jit
def silu(b_x):
    return b_x * sigmoid(b_x)


@triton.jit
def _swiglu(p_x, p_y, row_x, F: tl.constexpr, BF: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    m = o_f < F
    b_gate = tl.load(p_x + i_r * row_x + o_f, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + i_r * row_x + F + o_f, mask=m, other=0.0).to(tl.float32)
    b_y = silu(b_gate) * b_up
    tl.store(p_y + i_r * F + o_f, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_gates(
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_g,
    p_beta,
    num_rows,
    row_a,
    row_b,
    HV: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    o_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    o_h = tl.arange(0, BH)[None, :]
    m_h = o_h < HV
    m = (o_r < num_rows) & m_h  # [BR, BH]
    b_a = tl.load(p_a + o_r * row_a + o_h, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_r * row_b + o_h, mask=m, other=0.0).to(tl.float32)
    b_A = tl.exp(tl.load(p_A_log + o_h, mask=m_h, other=0.0).to(tl.float32))
    b_dt = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    tl.store(p_g + o_r * HV + o_h, -b_A * softplus(b_a + b_dt), mask=m)
    tl.store(p_beta + o_r * HV + o_h, sigmoid(b_b), mask=m)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [R, 2 * F] = (gate | up); returns [R, F] in the same dtype.

    Reads gate_up, writes y.
    """
    validate.shape(gate_up, "gate_up", None, None)
    R, width = gate_up.shape
    require(width % 2 == 0, "width of gate_up", "an even one", width)
    check(gate_up, gate_up=gate_up)
    F = width // 2
    y = torch.empty(R, F, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        block = min(ELEMENTS, launch.next_power_of_2(F))
        launch.launch(
            _swiglu,
            (R, launch.cdiv(F, block)),
            gate_up,
            y,
            row_stride(gate_up),
            F=F,
            BF=block,
            num_warps=num_warps(block, gate_up.device),
            num_stages=1,
        )
    return y


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) of a, b [R, HV].

    Both are float32 [R, HV], contiguous. Reads a and b, writes g and beta.
    """
    validate.delta_gates(a, b, A_log, dt_bias)
    check(a, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    R, HV = a.shape
    g = torch.empty(R, HV, dtype=torch.float32, device=a.device)
    beta = torch.empty(R, HV, dtype=torch.float32, device=a.device)
    if a.numel():
        block = launch.next_power_of_2(HV)
        launch.launch(
            _delta_gates,
            (launch.cdiv(R, _GATE_ROWS),),
            *(a, b, A_log, dt_bias, g, beta, R, row_stride(a), row_stride(b)),
            HV=HV,
            BR=_GATE_ROWS,
            BH=block,
            num_warps=num_warps(_GATE_ROWS * block, a.device),
            num_stages=1,
        )
    return g, beta
