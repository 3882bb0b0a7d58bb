"""Short causal convolution in plain torch, its window in the slot; tiled as in `torch_ops`."""

import torch
from torch.nn import functional

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.ids import IdVector


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
    """Depthwise causal conv and SiLU of packed sequences; see reference.causal_conv_prefill."""
    segments = validate.causal_conv(
        x,
        weight,
        windows,
        cu_seqlens=cu_seqlens,
        read_slots=read_slots,
        write_slots=write_slots,
        snapshot_slots=snapshot_slots,
    )
    reads, writes, snaps = validate.as_lists(
        read_slots=read_slots, write_slots=write_slots, snapshot_slots=snapshot_slots
    )
    width = weight.shape[1]
    taps = weight.float().t().contiguous()  # [W, C]
    buf = torch.empty(width - 1 + KERNEL_CHUNK, x.shape[1])  # window, then one chunk
    acc = torch.empty(KERNEL_CHUNK, x.shape[1])
    y = torch.empty_like(x)
    chunk = 0
    for (start, end), read, write in zip(segments, reads, writes, strict=True):
        window = torch.zeros_like(windows[0]) if read < 0 else windows[read].clone()
        for lo in range(start, end, KERNEL_CHUNK):
            n = min(KERNEL_CHUNK, end - lo)
            buf[: width - 1] = window
            buf[width - 1 : width - 1 + n] = x[lo : lo + n]
            buf[width - 1 + n :] = 0.0
            torch.mul(buf[:KERNEL_CHUNK], taps[0], out=acc)
            for tap in range(1, width):
                acc.addcmul_(buf[tap : tap + KERNEL_CHUNK], taps[tap])
            y[lo : lo + n] = functional.silu(acc, inplace=True)[:n]  # one shape: silu is safe here
            window = buf[n : n + width - 1].to(windows.dtype)  # the inputs' own dtype: lossless
            if snaps[chunk] > 0:
                windows[snaps[chunk]] = window
            chunk += 1
        if write > 0:
            windows[write] = window
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
    """One token of each of N rows, or a few in order; see reference.causal_conv_step."""
    segments = validate.causal_conv(
        x,
        weight,
        windows,
        read_slots=read_slots,
        write_slots=write_slots,
        cu_seqlens=cu_seqlens,
    )
    reads, writes = validate.as_lists(read_slots=read_slots, write_slots=write_slots)
    taps = weight.float().t().contiguous()  # [W, C]
    y = torch.zeros_like(x)
    for (start, end), read in zip(segments, reads, strict=True):
        window = torch.zeros_like(windows[0]) if read < 0 else windows[read]
        for t in range(start, end):
            if end - start == 1 and writes[t] == 0:
                continue  # padding
            inputs = torch.cat([window, x[t : t + 1].to(windows.dtype)])  # [W, C]
            acc = inputs[0].float() * taps[0]
            for tap in range(1, len(taps)):
                acc.addcmul_(inputs[tap].float(), taps[tap])
            y[t] = functional.silu(acc)
            window = inputs[1:]
            if writes[t] > 0:
                windows[writes[t]] = window
    return y
