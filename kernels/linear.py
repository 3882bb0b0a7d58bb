"""Dense layers on the CPU whose rows do not depend on how many rows there are.

`y = x @ weight.T`, bytes: weight once per call + x + y. oneDNN's prepacked matmul is used where
this torch build has it. Measured with torch 2.13 on a 2-core AMD EPYC (Zen 5), one and two threads,
1,024 to 12,288 wide: rows are bit-equal for every row count from 2 up, in float32 and bfloat16. A
lone row takes another path and differs (in bfloat16 only above 1,024 inputs, and then some rows
do), so it is computed as one of two. The MKL path behind `torch.nn.functional.linear`, the
fallback, gives other float32 bits below 12 rows off the multiples of 4: there rows are padded to a
multiple of 8.
"""

import torch
from torch.nn import functional

_FALLBACK_ROW_MULTIPLE = 8


def _onednn_packs(dtype: torch.dtype) -> bool:
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear:
    """A weight [out_features, in_features] in the layout the machine multiplies fastest.

    Owns a packed copy; the caller may drop the original. Call with x [rows, in_features] of the
    weight's dtype; returns [rows, out_features].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = weight.device.type == "cpu" and _onednn_packs(weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            if self._packed
            else weight.contiguous()
        )

    def __call__(self, x: torch.Tensor, num_prefill_rows: int | None = None) -> torch.Tensor:
        """num_prefill_rows: no matter here, all rows are computed alike."""
        rows = x.shape[0]
        padding = int(rows == 1) if self._packed else -rows % _FALLBACK_ROW_MULTIPLE
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        else:
            y = functional.linear(x, self._weight)
        return y[:rows]


def matmul_nt(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [M, K] @ y [N, K].T in float32. Equal shapes give equal bits; other row counts may not."""
    if x.device.type == "cpu" and _onednn_packs(torch.float32):
        return torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")
    return x @ y.T
