"""These tests run Triton kernels on the CPU, so triton must be imported as its interpreter."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs TRITON_INTERPRET=1 (make interpreter)")
