"""These tests run Triton kernels on the CPU, so triton must be imported as its interpreter."""

import os

import numpy
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs TRITON_INTERPRET=1 (make interpreter)")


@pytest.fixture
def rows_of_a_tile_alike(monkeypatch):
    """The interpreter's tl.dot is numpy's matmul, whose BLAS adds in another order in another row
    of a tile. Here it is a loop over ascending k, as the rows of a tensor core are: alike."""

    def matmul(a, b, dtype):
        a, b = a.astype(dtype), b.astype(dtype)
        total = numpy.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return total

    monkeypatch.setattr(numpy, "matmul", matmul)


@pytest.fixture
def guarded_outputs(monkeypatch):
    """new_empty gives NaN between guards of NaN; the guards are looked at afterwards."""
    guards, new_empty = [], torch.Tensor.new_empty

    def guarded(self, *sizes, **options):
        if options:  # the interpreter's own
            return new_empty(self, *sizes, **options)
        shape = torch.Size(sizes[0] if len(sizes) == 1 else sizes)
        buffer = torch.full((shape.numel() + 16384,), float("nan"), dtype=self.dtype)
        guards.extend([buffer[:8192], buffer[8192 + shape.numel() :]])
        return buffer[8192 : 8192 + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    yield
    for guard in guards:
        assert guard.isnan().all()
