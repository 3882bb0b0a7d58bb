"""Ops on tensors. `ops_for(device)` is the one place that picks an implementation by device."""

from types import ModuleType

from kernels import torch_ops
from kernels.constants import KERNEL_CHUNK

__all__ = ["KERNEL_CHUNK", "ops_for"]


def ops_for(device_type: str) -> ModuleType:
    """The module whose functions run on this device type; ValueError where there is none."""
    if device_type == "cpu":
        return torch_ops
    raise ValueError(f"no kernels for device {device_type!r}; supported: 'cpu'")
