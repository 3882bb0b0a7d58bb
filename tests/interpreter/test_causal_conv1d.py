"""The Triton convolution, interpreted: outputs, windows in slots, in place and from other slots."""

import pytest
import torch

from kernels import KERNEL_CHUNK, reference, torch_ops
from kernels.causal_conv1d import causal_conv_prefill, causal_conv_step
from tests.kernels.packs import (
    PACKS,
    STEPS,
    VERIFIES,
    Pack,
    Pool,
    as_double,
    error,
    normal,
    real_tokens,
    same_bits,
)

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
EVERY_PACK = pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
ALL_STEPS = STEPS | VERIFIES
EVERY_STEP = pytest.mark.parametrize("steps", ALL_STEPS.values(), ids=list(ALL_STEPS))


def assert_windows_exact(pool, expected, before, written):
    """Inputs are moved, never rounded; nothing else has changed."""
    for slot in written:
        assert same_bits(pool.view[slot], expected.view[slot].to(pool.view.dtype)), slot
    assert pool.untouched_but(before, written)


@FLOATS
@EVERY_PACK
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (96, 4), (33, 2), (7, 7)])
def test_prefill_matches_the_taps_and_keeps_windows_exactly(pack, channels, width, dtype):
    x, weight = normal(1, pack.num_tokens, channels + 9, dtype=dtype), normal(2, channels, width)
    x, weight = x[:, 9:], weight.to(dtype)  # rows of a wider projection
    pool = Pool.poisoned(pack.num_slots, width - 1, channels, dtype=dtype, filled=pack.sources)
    before, expected, plain = pool.clone(), pool.double(), pool.clone()
    y = causal_conv_prefill(x, weight, pool.view, **pack.vectors())
    y64 = reference.causal_conv_prefill(*as_double(x, weight), expected.view, **pack.vectors())
    y_torch = torch_ops.causal_conv_prefill(x, weight, plain.view, **pack.vectors())
    real = real_tokens(pack)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y[real], y64[real]) < TOLERANCE[dtype]
    assert error(y[real], y_torch[real]) < TOLERANCE[dtype]
    assert_windows_exact(pool, expected, before, pack.written)


@FLOATS
@EVERY_STEP
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (600, 4), (33, 2)])
def test_steps_match_the_taps_and_keep_windows_exactly(steps, channels, width, dtype):
    x, weight = normal(1, steps.num_tokens, channels + 3, dtype=dtype), normal(2, channels, width)
    x, weight = x[:, 3:], weight.to(dtype)
    pool = Pool.poisoned(14, width - 1, channels, dtype=dtype, filled=steps.sources)
    before, expected = pool.clone(), pool.double()
    y = causal_conv_step(x, weight, pool.view, **steps.vectors())
    y64 = reference.causal_conv_step(*as_double(x, weight), expected.view, **steps.vectors())
    real = steps.real_tokens()
    assert y.dtype == dtype
    assert error(y[real], y64[real]) < TOLERANCE[dtype]
    assert not y[~real].any()  # padding gives zeros
    assert_windows_exact(pool, expected, before, steps.written)


@pytest.mark.parametrize("suffix", [1, 2, 3, 4, 63, 64, 65])
def test_a_suffix_mixes_the_window_of_its_prefix_and_has_the_bits_of_the_whole(suffix):
    """trap 7"""
    x, weight = normal(1, 64 + suffix, 24, dtype=torch.float16), normal(2, 24, 4).half()
    pool = Pool.poisoned(6, 3, 24, dtype=torch.float16)
    whole = causal_conv_prefill(x, weight, pool.view, **Pack([64 + suffix], [-1], [3]).vectors())
    first = causal_conv_prefill(x[:64], weight, pool.view, **Pack([64], [-1], [1]).vectors())
    y = causal_conv_prefill(x[64:], weight, pool.view, **Pack([suffix], [1], [2]).vectors())
    assert torch.equal(torch.cat([first, y]), whole)
    assert torch.equal(pool.view[2], x[-3:]) and torch.equal(pool.view[3], x[-3:])
    assert torch.equal(pool.view[1], x[61:64])


def test_snapshots_are_the_final_windows_of_shorter_prefills():
    x, weight = normal(1, 200, 8), normal(2, 8, 4)
    pool = Pool.poisoned(8, 3, 8, dtype=torch.float32)
    pack = Pack([200], [-1], [1], {0: 2, 1: 3, 2: 4})
    causal_conv_prefill(x, weight, pool.view, **pack.vectors())
    for chunk, slot in pack.snapshots.items():
        end = (chunk + 1) * KERNEL_CHUNK
        assert torch.equal(pool.view[slot], x[end - 3 : end])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": normal(2, 8, 1), "windows": torch.zeros(6, 0, 8)}, "conv width"),
        ({"x": normal(1, 3, 16)[:, ::2]}, "strides of x"),
        ({"x": normal(1, 3, 8).half()}, "dtype of windows"),
        ({"windows": torch.zeros(6, 3, 16)[..., ::2]}, "strides of windows"),
        ({"windows": torch.zeros(2, 3, 8)}, "write slot"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changed, message):
    arguments = {"x": normal(1, 3, 8), "weight": normal(2, 8, 4), "windows": torch.ones(6, 3, 8)}
    arguments |= changed
    before = arguments["windows"].clone()
    with pytest.raises(ValueError, match=message):
        causal_conv_prefill(**arguments, **Pack([3], [1], [2]).vectors())
    with pytest.raises(ValueError, match=message):
        causal_conv_step(
            **arguments,
            **STEPS["redirected"].vectors() | {"read_slots": [1, 1, 1], "write_slots": [2, 3, 4]},
        )
    assert same_bits(arguments["windows"], before)


@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("lengths", [[3, 70], [70, 3], [65, 2, 3]], ids=str)
def test_outputs_of_padding_rows_and_the_memory_around_are_not_written(lengths):
    """On a GPU a row that spills into the next one races with it."""
    for padding in range(len(lengths)):
        writes = [0 if row == padding else row + 2 for row in range(len(lengths))]
        pack = Pack(lengths, [1] * len(lengths), writes)
        x, weight = normal(1, pack.num_tokens, 70), normal(2, 70, 4)
        pool = Pool.poisoned(pack.num_slots, 3, 70, dtype=torch.float32, filled=pack.sources)
        o = causal_conv_prefill(x, weight, pool.view, **pack.vectors())
        real = real_tokens(pack)
        assert o[real].isfinite().all()
        assert o[~real].isnan().all()


@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("name", ["padding", "mixed"])
def test_padding_steps_are_zeros_in_memory_that_held_something_else(name):
    steps = STEPS[name]
    pool = Pool.poisoned(14, 3, 600, dtype=torch.float32, filled=steps.sources)
    y = causal_conv_step(
        normal(1, steps.num_tokens, 600), normal(2, 600, 4), pool.view, **steps.vectors()
    )
    real = steps.real_tokens()
    assert y[real].isfinite().all()
    assert same_bits(y[~real], torch.zeros_like(y[~real]))


def test_a_window_as_long_as_a_chunk_is_refused():
    """A snapshot after the first chunk would need inputs before it."""
    x, weight, windows = normal(1, 3, 8), normal(2, 8, 65), torch.ones(6, 64, 8)
    with pytest.raises(ValueError, match=r"conv width: expected in \[1, 64\], got 65"):
        causal_conv_prefill(x, weight, windows, **Pack([3], [1], [2]).vectors())
    with pytest.raises(ValueError, match=r"conv width: expected in \[1, 64\], got 65"):
        causal_conv_step(x[:1], weight, windows, read_slots=[1], write_slots=[2])
    assert same_bits(windows, torch.ones(6, 64, 8))
