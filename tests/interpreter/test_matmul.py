"""The batch-invariant matmul in Triton's interpreter: values, and bits that ignore other rows."""

import pytest
import torch
from torch.nn import functional

from kernels import launch
from kernels.matmul import BatchInvariantLinear, LibraryLinear
from tests.kernels.packs import error, generator, normal, same_bits

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4}  # tl.dot of bfloat16 needs a GPU
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
INPUTS = pytest.mark.parametrize("K", [16, 64, 100, 257])
MOST_ROWS = 200
empty = torch.empty
pytestmark = pytest.mark.usefixtures("rows_of_a_tile_alike")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """torch.empty gives NaN between guards of NaN; the guards are looked at afterwards."""
    guards = []

    def poisoned(*sizes, dtype, device):
        shape = torch.Size(sizes)
        buffer = torch.full((shape.numel() + 16384,), float("nan"), dtype=dtype)
        out = buffer[8192 : 8192 + shape.numel()]
        guards.extend([buffer[:8192], buffer[8192 + shape.numel() :]])
        return out.view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for guard in guards:
        assert same_bits(guard, torch.full_like(guard, float("nan")))


def among_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values as strided rows of a buffer that is NaN all around them."""
    rows, width = x.shape
    buffer = torch.full((rows + 2, width + 24), float("nan"), dtype=x.dtype)
    return buffer[1:-1, 8:-16].copy_(x)


def in_role(linear: BatchInvariantLinear, x: torch.Tensor, role: str) -> torch.Tensor:
    return linear(x, x.shape[0] if role == "prefill" else None)


@FLOATS
@ROLES
@INPUTS
@pytest.mark.parametrize(("M", "N"), [(0, 5), (1, 1), (3, 33), (17, 128), (65, 40), (200, 70)])
def test_products_match_float64(M, N, K, role, dtype):
    x, weight = normal(1, M, K, dtype=dtype), normal(2, N, K, dtype=dtype)
    expected = x.double() @ weight.double().T
    for rows in (x, among_nan(x)):
        y = in_role(BatchInvariantLinear(weight), rows, role)
        assert y.dtype == dtype
        assert y.shape == (M, N)
        assert y.is_contiguous()
        assert error(y, expected) < TOLERANCE[dtype]
        assert error(y, functional.linear(x, weight)) < 2 * TOLERANCE[dtype]


@FLOATS
@ROLES
@INPUTS
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_its_place(K, role, dtype):
    x, weight = normal(1, MOST_ROWS, K, dtype=dtype), normal(2, 45, K, dtype=dtype)
    linear = BatchInvariantLinear(weight)
    together = in_role(linear, x, role)
    for M in (1, 2, 15, 16, 17, 63, 64, 65, 129):
        assert torch.equal(in_role(linear, x[:M].clone(), role), together[:M]), M
    for row in (1, 14, 16, 64, 128, 199):
        assert torch.equal(in_role(linear, x[row : row + 1].clone(), role)[0], together[row]), row
    order = torch.randperm(MOST_ROWS, generator=generator(3))
    assert torch.equal(in_role(linear, x[order], role), together[order])


@FLOATS
@pytest.mark.parametrize("num_prefill_rows", [0, 1, 17, 64, 129, 140])
def test_each_role_computes_its_own_rows(num_prefill_rows, dtype):
    P = num_prefill_rows
    x, weight = among_nan(normal(1, 140, 600, dtype=dtype)), normal(2, 45, 600, dtype=dtype)
    linear = BatchInvariantLinear(weight)
    y = linear(x, P)
    assert torch.equal(y[:P], in_role(linear, x, "prefill")[:P])
    assert torch.equal(y[P:], in_role(linear, x, "decode")[P:])
    assert error(y, x.double() @ weight.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_tiles_follow_the_role_and_never_the_number_of_rows(target):
    linear = BatchInvariantLinear(torch.zeros(64, 128, dtype=torch.bfloat16))
    with launch.recording(launch.Target(target)) as launches:
        for M, P in ((3, 1), (32, 16), (2000, 1000), (1000, 999)):
            linear(torch.zeros(M, 128, dtype=torch.bfloat16), P)
    roles = launches[0::2], launches[1::2]
    assert [len(role) for role in roles] == [4, 4]
    for first, *others in roles:
        for other in others:
            assert other.constexprs == first.constexprs
            assert other.options == first.options
    prefill, decode = launches[:2]
    assert (prefill.constexprs["BM"], decode.constexprs["BM"]) == (128, 64)
    assert [x for x in prefill.args if not isinstance(x, torch.Tensor)] == [0, 1, 128]
    assert [x for x in decode.args if not isinstance(x, torch.Tensor)] == [1, 3, 128]


def test_a_role_without_rows_launches_nothing():
    linear = BatchInvariantLinear(torch.zeros(8, 16))
    with launch.recording(launch.Target("sm_90")) as launches:
        linear(torch.zeros(0, 16))
        assert len(launches) == 0
        linear(torch.zeros(3, 16))
        linear(torch.zeros(3, 16), 3)
    assert len(launches) == 2


@ROLES
def test_a_row_beyond_two_to_the_31_elements_is_the_right_one(role):
    x, weight = normal(1, 3, 64, dtype=torch.float16), normal(2, 8, 64, dtype=torch.float16)
    # pages of an empty tensor that nobody touches cost nothing
    far = empty(3, 2**30 + 2**29, dtype=torch.float16)[:, :64].copy_(x)
    linear = BatchInvariantLinear(weight)
    assert torch.equal(in_role(linear, far, role), in_role(linear, x, role))


@ROLES
def test_steps_over_k_are_added_in_ascending_order(role):
    """2**24 first swallows every 1 of a later step, and none where it comes last."""
    x, weight = torch.zeros(1, 257), torch.ones(1, 257)
    x[0, 64::64] = 1.0  # the first of each step
    linear = BatchInvariantLinear(weight)
    x[0, 0] = 2.0**24
    assert in_role(linear, x, role).item() == 2.0**24
    x[0, 0], x[0, 256] = 1.0, 2.0**24
    assert in_role(linear, x, role).item() == 2.0**24 + 4.0


@FLOATS
@pytest.mark.parametrize("num_prefill_rows", [None, 0, 2, 5])
def test_the_library_has_the_same_signature_and_its_own_bits(num_prefill_rows, dtype):
    x, weight = among_nan(normal(1, 5, 100, dtype=dtype)), normal(2, 45, 100, dtype=dtype)
    y = LibraryLinear(weight)(x, num_prefill_rows)
    assert torch.equal(y, functional.linear(x, weight))


LINEARS = pytest.mark.parametrize("linear", [BatchInvariantLinear, LibraryLinear])
CALLS = {
    "other inputs": (torch.zeros(2, 4), None, r"shape of x: expected \['\*', 8\], got \[2, 4\]"),
    "a vector": (torch.zeros(8), None, "shape of x"),
    "another dtype": (torch.zeros(2, 8).half(), None, "dtype of x: expected torch.float32, got"),
    "another device": (torch.zeros(2, 8).to("meta"), None, "device of x: expected cpu, got meta"),
    "columns apart": (torch.zeros(8, 2).T, None, "last stride of x: expected 1, got 2"),
    "too many prefill rows": (torch.zeros(2, 8), 3, r"prefill rows: expected in \[0, 2\], got 3"),
    "fewer than none": (torch.zeros(2, 8), -1, r"prefill rows: expected in \[0, 2\], got -1"),
}
WEIGHTS = {
    "a vector": (torch.zeros(8), "shape of weight"),
    "float64": (torch.zeros(2, 8).double(), "dtype of weight: .*torch.float64"),
    "transposed": (torch.zeros(8, 2).T, "strides of weight"),
    "without inputs": (torch.zeros(2, 0), "inputs of weight: expected at least 1, got 0"),
}


@LINEARS
@pytest.mark.parametrize(("x", "num_prefill_rows", "message"), CALLS.values(), ids=list(CALLS))
def test_rows_that_do_not_fit_are_refused(linear, x, num_prefill_rows, message):
    with pytest.raises(ValueError, match=message):
        linear(torch.zeros(4, 8))(x, num_prefill_rows)


@LINEARS
@pytest.mark.parametrize(("weight", "message"), WEIGHTS.values(), ids=list(WEIGHTS))
def test_weights_that_do_not_fit_are_refused(linear, weight, message):
    with pytest.raises(ValueError, match=message):
        linear(weight)


def test_a_device_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="device: expected 'cuda'"):
        BatchInvariantLinear(torch.zeros(4, 8))(torch.zeros(2, 8))
