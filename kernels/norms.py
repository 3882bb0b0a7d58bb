"""Norms and rotary embedding in Triton, rows of heads or of the hidden size.

Values are those of `reference.py`: float32 inside, one rounding at the end. Bound by bandwidth; the
bytes are in each docstring. One program works on one row, or on a few heads of it, so a row's bits
depend neither on the other rows nor on their number, which no kernel is told.

The order of a norm's additions follows the tile's layout, and that follows what is known of the
addresses: tensors start at multiples of 16 bytes, and rows are aligned as their width says.
Rows and heads may be strided. Whatever is refused is a ValueError before anything is launched.
"""

import torch
import triton
import triton.language as tl

from kernels import launch, validate
from kernels.gates import silu
from kernels.rows import (
    ELEMENTS,
    MAX_WIDTH,
    check,
    check_aligned,
    num_warps,
    row_stride,
    vector_width,
)
from kernels.slot_rules import require


@triton.jit(do_not_specialize=["row_x"])
def _rms_norm(
    p_x,
    p_weight,
    p_y,
    row_x,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HEAD_X: tl.constexpr,
    VEC: tl.constexpr,
    EPS: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_h < HEADS) & (o_d < D)  # [BH, BD]
    p_xs = p_x + tl.multiple_of(i_r * row_x, VEC) + o_h * HEAD_X + o_d
    b_x = tl.load(p_xs, mask=m, other=0.0).to(tl.float32)  # wide
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)  # [1, BD]
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + EPS)[:, None]
    b_y = b_x * b_scale * (1.0 + b_weight)
    tl.store(p_y + (i_r * HEADS + o_h) * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["row_x", "row_gate"])
def _gated_rms_norm(
    p_x,
    p_gate,
    p_weight,
    p_y,
    row_x,
    row_gate,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HEAD_X: tl.constexpr,
    VEC: tl.constexpr,
    HEAD_GATE: tl.constexpr,
    VEC_GATE: tl.constexpr,
    EPS: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_h < HEADS) & (o_d < D)  # [BH, BD]
    p_gates = p_gate + tl.multiple_of(i_r * row_gate, VEC_GATE) + o_h * HEAD_GATE + o_d
    p_xs = p_x + tl.multiple_of(i_r * row_x, VEC) + o_h * HEAD_X + o_d
    b_x = tl.load(p_xs, mask=m, other=0.0).to(tl.float32)  # wide
    b_gate = tl.load(p_gates, mask=m, other=0.0).to(tl.float32)  # wide
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)  # [1, BD]
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + EPS)[:, None]
    b_y = b_x * b_scale * b_weight * silu(b_gate)
    tl.store(p_y + (i_r * HEADS + o_h) * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["row_x"])
def _rotary(
    p_x,
    p_cos,
    p_sin,
    p_y,
    row_x,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_X: tl.constexpr,
    VEC: tl.constexpr,
    BH: tl.constexpr,
    BI: tl.constexpr,
    BR: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)[:, None]
    o_i = tl.arange(0, BI)[None, :]  # of a pair
    o_rest = 2 * HALF + tl.arange(0, BR)[None, :]
    p_x += tl.multiple_of(i_r * row_x, VEC) + o_h * HEAD_X
    p_y += (i_r * HEADS + o_h) * D
    m_i = o_i < HALF
    m = (o_h < HEADS) & m_i  # [BH, BI]
    b_first = tl.load(p_x + o_i, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + HALF + o_i, mask=m, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + i_r * HALF + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_r * HALF + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_y = b_first * b_cos - b_second * b_sin
    tl.store(p_y + o_i, b_y.to(p_y.dtype.element_ty), mask=m)
    b_y = b_second * b_cos + b_first * b_sin
    tl.store(p_y + HALF + o_i, b_y.to(p_y.dtype.element_ty), mask=m)
    if D > 2 * HALF:
        m_rest = (o_h < HEADS) & (o_rest < D)  # [BH, BR]
        tl.store(p_y + o_rest, tl.load(p_x + o_rest, mask=m_rest), mask=m_rest)


@triton.jit(do_not_specialize=["row_x"])
def _qk_norm_rotary(
    p_x,
    p_weight,
    p_cos,
    p_sin,
    p_y,
    row_x,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_X: tl.constexpr,
    VEC: tl.constexpr,
    EPS: tl.constexpr,
    BH: tl.constexpr,
    BI: tl.constexpr,
    BR: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)[:, None]
    o_i = tl.arange(0, BI)[None, :]  # of a pair
    o_rest = 2 * HALF + tl.arange(0, BR)[None, :]
    p_x += tl.multiple_of(i_r * row_x, VEC) + o_h * HEAD_X
    p_y += (i_r * HEADS + o_h) * D
    m_i, m_r = o_i < HALF, o_rest < D
    m, m_rest = (o_h < HEADS) & m_i, (o_h < HEADS) & m_r  # [BH, BI], [BH, BR]
    b_first = tl.load(p_x + o_i, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + HALF + o_i, mask=m, other=0.0).to(tl.float32)
    b_sum = tl.sum(b_first * b_first, 1) + tl.sum(b_second * b_second, 1)
    if D > 2 * HALF:
        b_rest = tl.load(p_x + o_rest, mask=m_rest, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_rest * b_rest, 1)
    b_scale = tl.rsqrt(b_sum / D + EPS)[:, None]
    b_first *= b_scale * (1.0 + tl.load(p_weight + o_i, mask=m_i, other=0.0).to(tl.float32))
    b_weight = tl.load(p_weight + HALF + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_second *= b_scale * (1.0 + b_weight)
    b_cos = tl.load(p_cos + i_r * HALF + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_r * HALF + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_y = b_first * b_cos - b_second * b_sin
    tl.store(p_y + o_i, b_y.to(p_y.dtype.element_ty), mask=m)
    b_y = b_second * b_cos + b_first * b_sin
    tl.store(p_y + HALF + o_i, b_y.to(p_y.dtype.element_ty), mask=m)
    if D > 2 * HALF:
        b_weight = tl.load(p_weight + o_rest, mask=m_r, other=0.0).to(tl.float32)
        b_y = b_rest * (b_scale * (1.0 + b_weight))
        tl.store(p_y + o_rest, b_y.to(p_y.dtype.element_ty), mask=m_rest)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Zero-centred RMSNorm x * rsqrt(mean(x^2) + eps) * (1 + weight) over the last dim.

    x [R, hidden] or [R, heads, D]; returns the same shape and dtype, contiguous. Reads x, writes y.
    """
    require(x.ndim in (2, 3), "dims of x", "2 or 3", x.ndim)
    validate.shape(weight, "weight", x.shape[-1])
    _check_norm(x, x=x, weight=weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tile = _Tile(x)
        sizes = dict(width=tile.width, BD=launch.next_power_of_2(tile.width))
        head = x.stride(1) if x.ndim == 3 else 0
        tile.launch(_rms_norm, x, weight, y, row_stride(x), **sizes, HEAD_X=head, EPS=eps)
    return y


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMSNorm(x) * weight * silu(gate) over the last dim, x and gate [R, HV, V].

    Returns [R, HV, V] in gate's dtype, contiguous. Reads x and gate, writes y.
    """
    validate.shape(x, "x", None, None, None)
    validate.shape(gate, "gate", *x.shape)
    validate.shape(weight, "weight", x.shape[-1])
    _check_norm(x, x=x, gate=gate, weight=weight)
    y = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if x.numel():
        tile = _Tile(x)
        sizes = dict(width=tile.width, BD=launch.next_power_of_2(tile.width))
        sizes |= dict(HEAD_X=x.stride(1), HEAD_GATE=gate.stride(1), VEC_GATE=vector_width(gate))
        rows = (row_stride(x), row_stride(gate))
        tile.launch(_gated_rms_norm, x, gate, weight, y, *rows, **sizes, EPS=eps)
    return y


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rot/2) of the first rot dims of x [R, heads, D]; cos, sin [R, rot/2].

    The other dims pass through. Returns x's shape and dtype, contiguous. Reads x, cos and sin,
    writes y.
    """
    _check_rotary(x, cos, sin)
    check(x, x=x, cos=cos, sin=sin)
    check_aligned(x=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _Tile(x).launch(_rotary, x, cos, sin, y, row_stride(x), **_rotary_sizes(x, cos))
    return y


def qk_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """rotary(rms_norm(x)) for x [R, heads, D] with one rounding, at the end.

    Returns x's shape and dtype, contiguous. Reads x, cos and sin once, writes y.
    """
    _check_rotary(x, cos, sin)
    validate.shape(weight, "weight", x.shape[-1])
    _check_norm(x, x=x, weight=weight)
    check(x, cos=cos, sin=sin)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        sizes = _rotary_sizes(x, cos)
        _Tile(x).launch(_qk_norm_rotary, x, weight, cos, sin, y, row_stride(x), **sizes, EPS=eps)
    return y


class _Tile:
    """How x [R, width] or [R, heads, width] is cut: a program has `block` heads of one row."""

    def __init__(self, x: torch.Tensor) -> None:
        self.rows, self.width, self.device = x.shape[0], x.shape[-1], x.device
        self.vector = vector_width(x)
        self.heads = x.shape[1] if x.ndim == 3 else 1
        wanted = max(1, ELEMENTS // launch.next_power_of_2(self.width))
        self.block = min(wanted, launch.next_power_of_2(self.heads))

    def launch(
        self, kernel, *args: torch.Tensor | int, width: int, **constexprs: int | float
    ) -> None:
        """`width` columns of a head decide on the number of warps."""
        launch.launch(
            kernel,
            (self.rows, launch.cdiv(self.heads, self.block)),
            *args,
            HEADS=self.heads,
            D=self.width,
            BH=self.block,
            VEC=self.vector,
            num_warps=num_warps(self.block * width, self.device),
            num_stages=1,
            **constexprs,
        )


def _rotary_sizes(x: torch.Tensor, cos: torch.Tensor) -> dict[str, int]:
    half = cos.shape[1]
    return dict(
        width=2 * half,
        HALF=half,
        HEAD_X=x.stride(1),
        BI=launch.next_power_of_2(half),
        BR=launch.next_power_of_2(max(1, x.shape[2] - 2 * half)),
    )


def _check_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    validate.rotary(x, cos, sin)
    require(cos.shape[1] >= 1, "rotated dims", "at least 2", 2 * cos.shape[1])
    for name, table in (("cos", cos), ("sin", sin)):
        require(table.is_contiguous(), f"strides of {name}", "contiguous", table.stride())


def _check_norm(first: torch.Tensor, /, **tensors: torch.Tensor) -> None:
    check(first, **tensors)
    width = first.shape[-1]
    require(width <= MAX_WIDTH, "width", f"at most {MAX_WIDTH}", width)
    check_aligned(**tensors)
