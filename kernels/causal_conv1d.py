"""Short depthwise causal convolution and SiLU in Triton, its window in the slot.

y[t] = silu(sum_w weight[:, w] * input[t - (W-1) + w]): inputs before the first token of a row come
from its window [W-1, C], the oldest first. A program takes one chunk (prefill) or all tokens of one
row (step) for a block of channels.

In place: only the program of a row's first chunk reads the window, so that program also writes the
final one, after its own reads, from inputs that nobody changes. Snapshots follow full chunks, which
are longer than a window.

The weight [C, W] may have any strides; with channels side by side (stride 1) its loads are wide.

Bytes: x read and y written once (the W-1 overlapping reads hit the cache), windows read and stored.
"""

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.gates import silu
from kernels.ids import IdVector, as_ids
from kernels.launch import cdiv, launch, next_power_of_2, require_runnable
from kernels.packs import chunk_table, one_token_each
from kernels.rows import DTYPES, row_stride
from kernels.slot_rules import require

_PREFILL_TILE = dict(BT=KERNEL_CHUNK, BC=64, num_warps=8, num_stages=1)
_STEP_TILE = dict(BC=512, num_warps=4, num_stages=1)


@triton.jit
def _inputs(p_x, p_window, o_i, o_c, m, stride_x, C: tl.constexpr, W: tl.constexpr):
    """Inputs of one row by index: its tokens from 0 up, its window below; m says which exist."""
    b_x = tl.load(p_x + o_i * stride_x + o_c, mask=m & (o_i >= 0), other=0)
    b_old = tl.load(p_window + (o_i + W - 1) * C + o_c, mask=m & (o_i < 0), other=0)
    return tl.where(o_i >= 0, b_x, b_old)


@triton.jit
def _prefill(
    p_x,
    p_weight,
    p_windows,
    p_y,
    p_chunks,
    p_rows,
    stride_x,
    stride_slot: tl.constexpr,
    weight_c: tl.constexpr,
    weight_w: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    i_b, i_c = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_chunk = p_chunks + i_c * 4
    start, n, snapshot = tl.load(p_chunk + 1), tl.load(p_chunk + 2), tl.load(p_chunk + 3)
    p_row = p_rows + tl.load(p_chunk) * 5
    row_start, num_tokens = tl.load(p_row), tl.load(p_row + 1)
    read, write = tl.load(p_row + 3), tl.load(p_row + 4)
    if write == 0:  # padding
        return
    o_t, o_w, o_c = tl.arange(0, BT), tl.arange(0, BW), i_b * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_in = p_x + row_start * stride_x
    p_old = p_windows + tl.maximum(read, 0) * stride_slot
    first = start - row_start  # index of this chunk's first token in its row
    m_y = (o_t < n)[:, None] & m_c[None, :]
    b_y = tl.zeros([BT, BC], tl.float32)
    for w in tl.static_range(W):
        o_i = (first + o_t - (W - 1) + w)[:, None]
        m_i = m_y & ((o_i >= 0) | (read >= 0))
        b_x = _inputs(p_in, p_old, o_i, o_c[None, :], m_i, stride_x, C, W)
        b_weight = tl.load(p_weight + o_c * weight_c + w * weight_w, mask=m_c, other=0).to(
            tl.float32
        )
        b_y += b_x.to(tl.float32) * b_weight[None, :]
    p_out = p_y + (start + o_t)[:, None] * C + o_c[None, :]
    tl.store(p_out, silu(b_y).to(p_y.dtype.element_ty), mask=m_y)
    m_w = (o_w < W - 1)[:, None] & m_c[None, :]
    o_window = o_w[:, None] * C + o_c[None, :]
    if snapshot > 0:
        p_last = p_in + (first + n - (W - 1) + o_w)[:, None] * stride_x + o_c[None, :]
        b_window = tl.load(p_last, mask=m_w, other=0)
        tl.store(p_windows + snapshot * stride_slot + o_window, b_window, mask=m_w)
    if first == 0:
        o_last = (num_tokens - (W - 1) + o_w)[:, None]
        m_last = m_w & ((o_last >= 0) | (read >= 0))
        b_final = _inputs(p_in, p_old, o_last, o_c[None, :], m_last, stride_x, C, W)
        tl.debug_barrier()  # other threads have read what is overwritten now
        tl.store(p_windows + write * stride_slot + o_window, b_final, mask=m_w)


@triton.jit
def _step(
    p_x,
    p_weight,
    p_windows,
    p_y,
    p_reads,
    p_writes,
    p_offsets,
    stride_x,
    stride_slot: tl.constexpr,
    weight_c: tl.constexpr,
    weight_w: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    i_b, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, end = tl.load(p_offsets + i_n), tl.load(p_offsets + i_n + 1)
    if start == end:
        return
    o_w, o_c = tl.arange(0, BW), i_b * BC + tl.arange(0, BC)
    m_c = o_c < C
    if (end == start + 1) & (tl.load(p_writes + start) == 0):  # padding
        tl.store(p_y + start * C + o_c, tl.zeros([BC], p_y.dtype.element_ty), mask=m_c)
        return
    read = tl.load(p_reads + i_n)
    p_in = p_x + start * stride_x
    p_old = p_windows + tl.maximum(read, 0) * stride_slot
    m_w = (o_w < W - 1)[:, None] & m_c[None, :]
    for t in range(start, end):
        b_y = tl.zeros([BC], tl.float32)
        for w in tl.static_range(W):
            i = t - start - (W - 1) + w
            m_i = m_c & ((i >= 0) | (read >= 0))
            b_x = _inputs(p_in, p_old, i, o_c, m_i, stride_x, C, W)
            b_weight = tl.load(p_weight + o_c * weight_c + w * weight_w, mask=m_c, other=0).to(
                tl.float32
            )
            b_y += b_x.to(tl.float32) * b_weight
        tl.store(p_y + t * C + o_c, silu(b_y).to(p_y.dtype.element_ty), mask=m_c)
        write = tl.load(p_writes + t)
        if write > 0:
            o_last = (t - start - (W - 2) + o_w)[:, None]
            m_last = m_w & ((o_last >= 0) | (read >= 0))
            b_window = _inputs(p_in, p_old, o_last, o_c[None, :], m_last, stride_x, C, W)
            tl.debug_barrier()  # other threads have read what is overwritten now
            p_new = p_windows + write * stride_slot + o_w[:, None] * C + o_c[None, :]
            tl.store(p_new, b_window, mask=m_w)


def _check(x: torch.Tensor, weight: torch.Tensor) -> dict[str, int]:
    """What the kernels ask for beyond `validate.causal_conv`; the constants they share."""
    width = weight.shape[1]
    require(width >= 2, "conv width", f"in [2, {KERNEL_CHUNK}]", width)
    for name, tensor in (("x", x), ("weight", weight)):
        require(tensor.dtype in DTYPES, f"dtype of {name}", f"one of {DTYPES}", tensor.dtype)
    apart = x.stride(1) == 1 or x.numel() == 0
    require(apart, "strides of x", "[*, 1]", x.stride())
    require_runnable(x.device)
    return dict(
        weight_c=weight.stride(0),
        weight_w=weight.stride(1),
        C=x.shape[1],
        W=width,
        BW=next_power_of_2(width - 1),
    )


def causal_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    read_slots: IdVector,
    write_slots: IdVector,
    snapshot_slots: IdVector,
) -> torch.Tensor:
    """Packed rows x [T, C], weight [C, W] -> y [T, C]; windows [num_slots, W-1, C] in place.

    Rows of x may be apart. Output rows of a padding row are not written. See
    reference.causal_conv_prefill.
    """
    validate.causal_conv(
        x,
        weight,
        windows,
        cu_seqlens=cu_seqlens,
        read_slots=read_slots,
        write_slots=write_slots,
        snapshot_slots=snapshot_slots,
    )
    sizes = _check(x, weight)
    table = chunk_table(
        as_ids(cu_seqlens, "cu_seqlens", x.device),
        as_ids(read_slots, "read_slots", x.device),
        as_ids(write_slots, "write_slots", x.device),
        as_ids(snapshot_slots, "snapshot_slots", x.device),
    )
    y = x.new_empty(x.shape)
    launch(
        _prefill,
        (cdiv(x.shape[1], _PREFILL_TILE["BC"]), len(table.chunks)),
        x,
        weight,
        windows,
        y,
        table.chunks,
        table.rows,
        row_stride(x),
        stride_slot=windows.stride(0),
        **sizes,
        **_PREFILL_TILE,
    )
    return y


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None = None,
) -> torch.Tensor:
    """Rows of one token, or of the few of `cu_seqlens`: x [T, C] -> y [T, C]; windows in place.

    read_slots [N], write_slots [T]; a padding row gives zeros. See reference.causal_conv_step.
    """
    validate.causal_conv(
        x,
        weight,
        windows,
        read_slots=read_slots,
        write_slots=write_slots,
        cu_seqlens=cu_seqlens,
    )
    sizes = _check(x, weight)
    reads = as_ids(read_slots, "read_slots", x.device)
    writes = as_ids(write_slots, "write_slots", x.device)
    if cu_seqlens is None:
        offsets = one_token_each(len(reads), x.device)
    else:
        offsets = as_ids(cu_seqlens, "cu_seqlens", x.device)
    y = x.new_empty(x.shape)
    launch(
        _step,
        (cdiv(x.shape[1], _STEP_TILE["BC"]), len(reads)),
        x,
        weight,
        windows,
        y,
        reads.tensor,
        writes.tensor,
        offsets.tensor,
        row_stride(x),
        stride_slot=windows.stride(0),
        **sizes,
        **_STEP_TILE,
    )
    return y
