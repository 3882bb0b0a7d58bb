"""Elementwise functions whose value does not depend on where in a tensor an element sits.

torch's float32 sigmoid, silu and softplus differ between the body and the scalar tail of a
vectorised loop; exp and log1p do not, so these are composed of them. In bfloat16 the native ones
agree on all 65,536 inputs (tests/kernels/test_position_independence.py).
"""

import torch
from torch.nn import functional


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in x's dtype."""
    return x.sigmoid() if x.dtype == torch.bfloat16 else torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in x's dtype."""
    return functional.silu(x) if x.dtype == torch.bfloat16 else x / torch.exp(-x).add_(1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of a float32 x; x itself above 20."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
