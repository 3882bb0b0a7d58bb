"""Dense layers: right values, and rows that do not depend on how many rows there are."""

import pytest
import torch

from kernels.linear import PackedLinear, matmul_nt
from tests.kernels.packs import error

SHAPES = [(8, 16), (40, 48), (64, 128), (513, 130), (33, 1152), (256, 2048), (128, 3584)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(out_features, in_features, dtype):
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(600, in_features, generator=generator).to(dtype)
    linear = PackedLinear(weight)
    whole = linear(x)
    exact = x.double() @ weight.double().T
    assert error(whole, exact) < (1e-6 if dtype == torch.float32 else 4e-3)
    for rows in (*range(1, 18), 31, 63, 64, 65, 128, 129, 511):
        for start in range(0, 80, 5 if rows < 4 else 40):
            part = linear(x[start : start + rows].contiguous())
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows from {start}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_keeps_its_bits_without_onednn(dtype, monkeypatch):
    monkeypatch.setattr("kernels.linear._onednn_packs", lambda dtype: False)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(200, 64, generator=generator).to(dtype)
    linear = PackedLinear(weight)
    whole = linear(x)
    assert error(whole, x.double() @ weight.double().T) < (1e-6 if dtype == torch.float32 else 4e-3)
    for rows in range(1, 80):
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), rows


def test_scores_are_the_product_with_the_transpose():
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(rows, 32, generator=generator) for rows in (7, 70))
    assert error(matmul_nt(x, y), x.double() @ y.double().T) < 1e-6
