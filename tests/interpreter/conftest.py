"""These tests run Triton kernels on the CPU, so triton must be imported as its interpreter."""

import os

import numpy
import pytest

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
