"""Dense layers on a GPU: y = x @ weight.T, as one Triton kernel whose rows do not depend on others.

`BatchInvariantLinear` is exact in the sense of this project: the bits of an output row depend on
the row, the weight and the row's role, and on nothing else. Every output is one program's sum over
ascending K in float32, in steps fixed by the tile; there is no split over K and no autotuning, and
the tile is not chosen by the number of rows. The role is the caller's to choose:
"prefill" rows go through big tiles, "decode" rows through tiles of 64 rows that read the weight
once for up to 64 of them (with 16-bit weights; float32 tiles are smaller). The two roles may differ
in the last bits, as two libraries would.

Bytes: the weight once a call and role (again, from L2, for each further 64 decode rows or 128
prefill rows) + x + y. Decode is bound by the bytes of the weight, prefill by arithmetic.

`LibraryLinear` has the same signature and is whatever the library does: fast, and free to choose
another order of additions for another number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels import launch, validate
from kernels.rows import DTYPES, row_stride
from kernels.slot_rules import require

__all__ = ["BatchInvariantLinear", "LibraryLinear"]

_GROUP_M = 8  # row tiles that share a column tile before the next one is read


@dataclass(frozen=True)
class _Tiles:
    """Everything about a launch that could change bits."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["first_row", "end_row"])
def _matmul(
    p_x,
    p_weight,
    p_y,
    first_row,
    end_row,
    row_x,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    # Programs in groups of GROUP_M row tiles: within a group, row tiles of one column tile first.
    i = tl.program_id(0)
    num_m, num_n = tl.cdiv(end_row - first_row, BM), tl.cdiv(N, BN)
    first_m = i // (GROUP_M * num_n) * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    i_in_group = i % (GROUP_M * num_n)
    i_m, i_n = first_m + i_in_group % group, i_in_group // group

    o_m = first_row + i_m * BM + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    # Beyond the edge the last row is read again; what comes of it is not stored.
    p_xs = p_x + tl.minimum(o_m, end_row - 1).to(tl.int64)[:, None] * row_x + o_k[None, :]
    p_weights = p_weight + tl.minimum(o_n, N - 1).to(tl.int64)[None, :] * K + o_k[:, None]
    b_y = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            b_x = tl.load(p_xs + k)  # [BM, BK]
            b_weight = tl.load(p_weights + k)  # wide
        else:
            b_x = tl.load(p_xs + k, mask=(k + o_k < K)[None, :], other=0.0)
            b_weight = tl.load(p_weights + k, mask=(k + o_k < K)[:, None], other=0.0)
        b_y = tl.dot(b_x, b_weight, b_y, input_precision="ieee")
    m = (o_m < end_row)[:, None] & (o_n < N)[None, :]
    p_ys = p_y + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_ys, b_y.to(p_y.dtype.element_ty), mask=m)


class BatchInvariantLinear:
    """A weight [N, K], contiguous, that is borrowed and must not change.

    Call with x [M, K] in the weight's dtype, last dim contiguous, rows strided or not: rows
    [0, num_prefill_rows) are computed in the prefill role and the rest in the decode role (None:
    all are decode rows). Returns [M, N] in the same dtype. ValueError for any other input.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        _check_weight(weight)
        self._weight = weight

    def __call__(self, x: torch.Tensor, num_prefill_rows: int | None = None) -> torch.Tensor:
        num_prefill_rows = _check_call(x, self._weight, num_prefill_rows)
        launch.require_runnable(x.device)
        M, N = x.shape[0], self._weight.shape[0]
        y = torch.empty(M, N, dtype=x.dtype, device=x.device)
        roles = {"prefill": (0, num_prefill_rows), "decode": (num_prefill_rows, M)}
        target = launch.target_of(x.device)
        for role, (first_row, end_row) in roles.items():
            self._run(x, y, first_row, end_row, _tiles(role, x.dtype, target))
        return y

    def _run(
        self, x: torch.Tensor, y: torch.Tensor, first_row: int, end_row: int, tiles: _Tiles
    ) -> None:
        N, K = self._weight.shape
        num_programs = launch.cdiv(end_row - first_row, tiles.m) * launch.cdiv(N, tiles.n)
        launch.launch(
            _matmul,
            (num_programs,),
            *(x, self._weight, y, first_row, end_row, row_stride(x)),
            N=N,
            K=K,
            BM=tiles.m,
            BN=tiles.n,
            BK=tiles.k,
            GROUP_M=_GROUP_M,
            EVEN_K=K % tiles.k == 0,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


class LibraryLinear:
    """The library's matmul behind the same signature: the fast option, not batch-invariant.

    The weight [N, K] is borrowed. The number of prefill rows is checked and otherwise ignored.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        _check_weight(weight)
        self._weight = weight

    def __call__(self, x: torch.Tensor, num_prefill_rows: int | None = None) -> torch.Tensor:
        _check_call(x, self._weight, num_prefill_rows)
        return functional.linear(x, self._weight)


def _tiles(role: str, dtype: torch.dtype, target: launch.Target) -> _Tiles:
    """The fixed tiles of a role: by dtype and target, never by the number of rows."""
    if dtype == torch.float32:  # no tensor cores at full precision: small tiles, in registers
        if role == "prefill":
            return _Tiles(64, 64, 32, num_warps=8, num_stages=2)
        return _Tiles(16, 32, 64, num_warps=4, num_stages=2)
    if role == "prefill":
        return _Tiles(128, 128, 64, num_warps=8, num_stages=2 if target.is_amd else 3)
    # 64 rows: at a full decode batch the weight passes the second-level cache once, not four times
    return _Tiles(64, 32, 128, num_warps=4, num_stages=2 if target.is_amd else 5)


def _check_weight(weight: torch.Tensor) -> None:
    validate.shape(weight, "weight", None, None)
    require(weight.dtype in DTYPES, "dtype of weight", f"one of {DTYPES}", weight.dtype)
    require(weight.shape[1] >= 1, "inputs of weight", "at least 1", weight.shape[1])
    contiguous = weight.is_contiguous()
    require(contiguous, "strides of weight", (weight.shape[1], 1), weight.stride())


def _check_call(x: torch.Tensor, weight: torch.Tensor, num_prefill_rows: int | None) -> int:
    """The number of prefill rows, once everything is checked."""
    validate.shape(x, "x", None, weight.shape[1])
    require(x.dtype == weight.dtype, "dtype of x", weight.dtype, x.dtype)
    require(x.device == weight.device, "device of x", weight.device, x.device)
    contiguous = x.stride(1) == 1 or x.shape[1] == 1
    require(contiguous, "last stride of x", 1, x.stride(1))
    rows = 0 if num_prefill_rows is None else num_prefill_rows
    require(type(rows) is int, "number of prefill rows", "an integer", repr(rows))
    require(0 <= rows <= x.shape[0], "number of prefill rows", f"in [0, {x.shape[0]}]", rows)
    return rows
