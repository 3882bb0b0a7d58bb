"""Bits of the CPU path: cut or whole, alone or packed, snapshot or final, copied or redirected."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import KERNEL_CHUNK, torch_ops
from tests.kernels.packs import TOLERANCE, Pack, Pool, delta_inputs, normal, same_bits

FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# (H, HV, K, V); the odd one has slots whose rows are not aligned to a vector register
HEADS = pytest.mark.parametrize(
    "heads", [(1, 3, 32, 64), (2, 4, 128, 128), (1, 2, 20, 12)], ids=str
)
FEW = settings(max_examples=12)


class Delta:
    """The delta rule as a recurrence in slots; `seed` chooses the tokens."""

    def __init__(self, num_tokens, heads, dtype, seed=1):
        H, HV, K, V = heads
        self.inputs = delta_inputs(num_tokens, H, HV, K, V, dtype, seed=seed)
        self.inner, self.dtype = (HV, V, K), torch.float32

    def prefill(self, part, pool, pack):
        tokens = (x[part] for x in self.inputs)
        return torch_ops.gated_delta_prefill(*tokens, pool.view, **pack.vectors())

    def step(self, rows, pool, **slots):
        tokens = (x[rows] for x in self.inputs)
        return torch_ops.gated_delta_step(*tokens, pool.view, **slots)


class Conv:
    """The short convolution; a channel count that is no multiple of a vector register."""

    def __init__(self, num_tokens, heads, dtype, seed=1):
        channels = 3 * heads[2] + 7
        self.x = normal(seed, num_tokens, channels, dtype=dtype)
        self.weight = normal(seed + 1, channels, 4, dtype=dtype)
        self.inner, self.dtype = (3, channels), dtype

    def prefill(self, part, pool, pack):
        return torch_ops.causal_conv_prefill(self.x[part], self.weight, pool.view, **pack.vectors())

    def step(self, rows, pool, **slots):
        return torch_ops.causal_conv_step(self.x[rows], self.weight, pool.view, **slots)


def contiguous(sizes):
    return torch.empty(sizes, device="meta").stride()


OPS = pytest.mark.parametrize("op_class", [Delta, Conv])
WHOLE = slice(None)


def make_pool(op, num_slots, filled=()):
    return Pool.poisoned(num_slots, *op.inner, dtype=op.dtype, filled=tuple(filled))


@OPS
@FLOATS
@HEADS
@FEW
@given(
    num_tokens=st.integers(1, 260),
    cuts=st.sets(st.integers(1, 4)),
    read=st.sampled_from([-1, 7]),
    in_place=st.booleans(),
)
def test_a_prefill_cut_at_multiples_of_64_gives_the_same_bits(
    op_class, dtype, heads, num_tokens, cuts, read, in_place
):
    op = op_class(num_tokens, heads, dtype)
    whole, parts = make_pool(op, 9, [7]), make_pool(op, 9, [7])
    expected = op.prefill(WHOLE, whole, Pack([num_tokens], [read], [6]))
    edges = sorted({0, num_tokens, *(c * KERNEL_CHUNK for c in cuts if c * 64 < num_tokens)})
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        write = 1 if in_place else i + 1
        out = op.prefill(slice(a, b), parts, Pack([b - a], [read], [write]))
        assert same_bits(out, expected[a:b]), (a, b)
        read = write
    assert same_bits(parts.view[read], whole.view[6])


@OPS
@FLOATS
@HEADS
@FEW
@given(
    num_tokens=st.integers(64, 260),
    read=st.sampled_from([-1, 1]),
    wanted=st.sets(st.integers(0, 3)),
)
def test_a_snapshot_is_the_final_value_of_a_shorter_run(
    op_class, dtype, heads, num_tokens, read, wanted
):
    op = op_class(num_tokens, heads, dtype)
    entries = {c: 10 + c for c in wanted if (c + 1) * KERNEL_CHUNK <= num_tokens}
    plain, pool = make_pool(op, 15, [1]), make_pool(op, 15, [1])
    expected = op.prefill(WHOLE, plain, Pack([num_tokens], [read], [2]))
    out = op.prefill(WHOLE, pool, Pack([num_tokens], [read], [2], entries))
    assert same_bits(out, expected)
    assert same_bits(pool.view[2], plain.view[2])
    for chunk, slot in entries.items():
        end = (chunk + 1) * KERNEL_CHUNK
        shorter = make_pool(op, 15, [1])
        op.prefill(slice(0, end), shorter, Pack([end], [read], [3]))
        assert same_bits(pool.view[slot], shorter.view[3]), end


@OPS
@FLOATS
@HEADS
@pytest.mark.parametrize("shorter", [1, 3, 33, 63, 65, 129])
def test_outputs_do_not_depend_on_later_tokens(op_class, dtype, heads, shorter):
    op = op_class(135, heads, dtype)
    expected = op.prefill(WHOLE, make_pool(op, 5, [1]), Pack([135], [1], [2]))
    out = op.prefill(slice(0, shorter), make_pool(op, 5, [1]), Pack([shorter], [1], [2]))
    assert same_bits(out, expected[:shorter])


LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 63, 64, 65, 127, 130])


@OPS
@FLOATS
@HEADS
@FEW
@given(
    rows=st.lists(
        st.tuples(LENGTHS, st.sampled_from(["fresh", "shared", "own", "in place", "padding"])),
        min_size=1,
        max_size=6,
    )
)
def test_a_segment_alone_gives_the_same_bits_as_in_a_pack(op_class, dtype, heads, rows):
    lengths = [length for length, _ in rows]
    own = range(10, 10 + len(rows))
    sources = {"fresh": lambda i: -1, "shared": lambda i: 1, "padding": lambda i: 1}
    reads = [sources.get(kind, lambda i: own[i])(i) for i, (_, kind) in enumerate(rows)]
    targets = {"in place": lambda i: own[i], "padding": lambda i: 0}
    writes = [targets.get(kind, lambda i: 20 + i)(i) for i, (_, kind) in enumerate(rows)]
    pack = Pack(lengths, reads, writes)
    op = op_class(pack.num_tokens, heads, dtype)
    together = make_pool(op, 30, [1, *own])
    out = op.prefill(WHOLE, together, pack)
    for i, part in enumerate(pack.segments()):
        if writes[i] == 0:
            continue
        pool = make_pool(op, 30, [1, *own])
        alone = op.prefill(part, pool, Pack([lengths[i]], [reads[i]], [writes[i]]))
        assert same_bits(alone, out[part]), i
        assert same_bits(pool.view[writes[i]], together.view[writes[i]]), i


@OPS
@FLOATS
@HEADS
@FEW
@given(num_rows=st.integers(1, 33), redirect=st.booleans())
def test_a_step_of_one_row_gives_the_same_bits_as_among_others(
    op_class, dtype, heads, num_rows, redirect
):
    op = op_class(num_rows, heads, dtype)
    reads = torch.arange(1, num_rows + 1)
    writes = reads + 40 if redirect else reads
    together = make_pool(op, 80, reads.tolist())
    out = op.step(WHOLE, together, read_slots=reads, write_slots=writes)
    for i in {0, num_rows // 2, num_rows - 1}:
        row = slice(i, i + 1)
        pool = make_pool(op, 80, reads.tolist())
        alone = op.step(row, pool, read_slots=reads[row], write_slots=writes[row])
        assert same_bits(alone, out[row]), i
        assert same_bits(pool.view[writes[i]], together.view[writes[i]]), i


@OPS
@FLOATS
@HEADS
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 65, 130])
def test_redirected_and_copied_sources_give_the_same_bits(op_class, dtype, heads, num_tokens):
    op = op_class(num_tokens, heads, dtype)
    redirected, copied = make_pool(op, 9, [5]), make_pool(op, 9, [5])
    source = redirected.view[5].clone()
    expected = op.prefill(WHOLE, redirected, Pack([num_tokens], [5], [2]))
    copied.view[3] = copied.view[5]
    out = op.prefill(WHOLE, copied, Pack([num_tokens], [3], [3]))
    assert same_bits(out, expected)
    assert same_bits(copied.view[3], redirected.view[2])
    assert same_bits(redirected.view[5], source)  # a checkpoint is only read


@OPS
@FLOATS
@HEADS
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_the_bits_do_not_depend_on_the_alignment_of_the_slots(op_class, dtype, heads, num_tokens):
    op = op_class(num_tokens, heads, dtype)
    size = torch.Size(op.inner).numel()
    unit = 16 // op.dtype.itemsize  # slots are aligned to 16 bytes and to no more
    results = []
    for offset in range(4):
        arena = torch.full((8 * (size + 9 * unit),), float("nan"), dtype=op.dtype)
        stride = -(-size // unit) * unit + unit
        view = arena[offset * unit :].as_strided((6, *op.inner), (stride, *contiguous(op.inner)))
        view[4] = normal(5, *op.inner, dtype=op.dtype)
        pool = SimpleNamespace(view=view)
        outs = [op.prefill(WHOLE, pool, Pack([num_tokens], [4], [w])) for w in (1, 2, 3)]
        results += [(out, view[w].clone()) for out, w in zip(outs, (1, 2, 3), strict=True)]
    for out, final in results:
        assert same_bits(out, results[0][0])
        assert same_bits(final, results[0][1])


@OPS
@FLOATS
def test_a_zero_slot_and_no_slot_start_alike(op_class, dtype):
    op = op_class(70, (1, 2, 32, 32), dtype)
    pool = make_pool(op, 6)
    pool.view[3] = 0.0
    from_zeros = op.prefill(WHOLE, pool, Pack([70], [3], [1]))
    fresh = op.prefill(WHOLE, pool, Pack([70], [-1], [2]))
    assert same_bits(fresh, from_zeros)
    assert same_bits(pool.view[1], pool.view[2])


@OPS
@FLOATS
def test_inputs_are_left_alone_and_a_second_run_gives_the_same_bits(op_class, dtype):
    op = op_class(70, (1, 2, 32, 32), dtype)
    fresh = op_class(70, (1, 2, 32, 32), dtype)
    pools = [make_pool(op, 6, [3]) for _ in range(4)]
    slots = {"read_slots": torch.tensor([3, -1]), "write_slots": torch.tensor([1, 2])}
    outs = [op.prefill(WHOLE, pool, Pack([70], [3], [1])) for pool in pools[:2]]
    steps = [op.step(slice(0, 2), pool, **slots) for pool in pools[2:]]
    assert same_bits(*outs)
    assert same_bits(*steps)
    assert same_bits(pools[0].everything, pools[1].everything)
    assert same_bits(pools[2].everything, pools[3].everything)
    tensors = (op.inputs, fresh.inputs) if op_class is Delta else ((op.x,), (fresh.x,))
    assert all(same_bits(used, new) for used, new in zip(*tensors, strict=True))
