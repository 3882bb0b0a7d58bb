"""What the kernels on single rows share: strides, sizes and refusals."""

import torch

from kernels import launch
from kernels.slot_rules import require

MAX_WIDTH = 16384  # of a norm, which keeps its row in registers
ELEMENTS = 1024  # of a tile, where a row is long enough
_ELEMENTS_PER_LANE = 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def row_stride(x: torch.Tensor) -> int:
    """Elements from one row to the next; 0 for a lone row, whose stride torch leaves to chance."""
    return x.stride(0) if x.shape[0] > 1 else 0


def vector_width(x: torch.Tensor) -> int:
    """Elements that are sure to be loaded at once: 16 bytes where rows are whole multiples of them.

    It follows from the width alone, so that a row is the same instructions alone and among others:
    another layout of a tile would be another order of a norm's additions.
    """
    elements = 16 // x.element_size()
    return elements if x.shape[-1] % elements == 0 else 1


def num_warps(num_elements: int, device: torch.device) -> int:
    """Enough for 8 elements a lane, at most 8: a power of two that the rows have no say in."""
    lanes = 64 if launch.target_of(device).is_amd else 32
    warps = num_elements // (lanes * _ELEMENTS_PER_LANE)
    return min(8, launch.next_power_of_2(max(1, warps)))


def check(first: torch.Tensor, /, **tensors: torch.Tensor) -> None:
    """One device, known dtypes, contiguous last dims."""
    launch.require_runnable(first.device)
    for name, x in tensors.items():
        require(x.device == first.device, f"device of {name}", first.device, x.device)
        require(x.dtype in DTYPES, f"dtype of {name}", f"one of {DTYPES}", x.dtype)
        contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
        require(contiguous, f"last stride of {name}", 1, x.stride(-1))


def check_aligned(**tensors: torch.Tensor) -> None:
    """Addresses at multiples of 16 bytes, and rows and heads at multiples of `vector_width`."""
    for name, x in tensors.items():
        offset = x.data_ptr() % 16
        require(offset == 0, f"address of {name}", "a multiple of 16 bytes", f"{offset} more")
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            fits = size <= 1 or stride % vector_width(x) == 0
            require(fits, f"strides of {name}", f"multiples of {vector_width(x)}", x.stride())
