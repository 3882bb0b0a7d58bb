"""How the heads of q, k and v lie in one row of channels."""

import torch


def split_heads(
    qkv: torch.Tensor, states: torch.Tensor, num_key_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q, k [T, H, K] and v [T, HV, V] of qkv [T, 2 H K + HV V]; sizes as in `states`."""
    HV, V, K = states.shape[1:]
    q, k, v = qkv.split([num_key_heads * K, num_key_heads * K, HV * V], dim=-1)
    H = num_key_heads
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
