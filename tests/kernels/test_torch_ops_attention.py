"""Paged attention of the CPU path: values against the specification, and rows that stay put."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import KERNEL_CHUNK, reference, torch_ops
from tests.kernels.packs import ATTENTION_TOLERANCE, as_double, error, normal, same_bits

FLOATS = pytest.mark.parametrize("dtype", ATTENTION_TOLERANCE, ids=str)


class Cache:
    """K/V caches of sequences of these lengths; blocks handed out in turns, all other rows NaN."""

    def __init__(self, kv_lens, *, block_size, kv, D, dtype, seed=1):
        needed = [-(-n // block_size) for n in kv_lens]
        self.tables = [[] for _ in kv_lens]
        next_block = 1
        for turn in range(max(needed, default=0)):
            for row, table in enumerate(self.tables):
                if turn < needed[row]:
                    table.append(next_block)
                    next_block += 1
        shape = (next_block + 1, block_size, kv, D)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        for row, (kv_len, table) in enumerate(zip(kv_lens, self.tables, strict=True)):
            t = torch.arange(kv_len)
            indices = (
                torch.tensor(table, dtype=torch.int64)[t // block_size] * block_size
                + t % block_size
            )
            rows = [normal(seed + 10 * row + i, kv_len, kv, D, dtype=dtype) for i in (0, 1)]
            torch_ops.write_kv(*rows, self.k, self.v, indices)

    def double(self):
        return self.k.double(), self.v.double()


PREFILLS = {  # segment lengths, start positions
    "no rows": ([], []),
    "empty segment without blocks": ([0, 3], [0, 0]),
    "one token": ([1], [0]),
    "one token after a prefix": ([1], [64]),
    "tile - 1": ([63], [0]),
    "tile": ([64], [64]),
    "tile + 1": ([65], [128]),
    "mixed": ([130, 0, 3, 66], [0, 64, 64, 128]),
}
HEADS = [(1, 1, 8), (4, 2, 16), (6, 2, 256), (3, 3, 32)]


@FLOATS
@pytest.mark.parametrize(("lengths", "starts"), PREFILLS.values(), ids=list(PREFILLS))
@pytest.mark.parametrize(("heads", "kv", "D"), HEADS)
def test_prefill_attention_matches(lengths, starts, heads, kv, D, dtype):
    block_size = 7 if D == 16 else 16
    kv_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    cache = Cache(kv_lens, block_size=block_size, kv=kv, D=D, dtype=dtype)
    q, gate = (normal(seed, sum(lengths), heads, D, dtype=dtype) for seed in (1, 2))
    before = q.clone(), gate.clone()
    pack = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "start_positions": starts,
        "block_tables": cache.tables,
    }
    out = torch_ops.attention_prefill(q, gate, cache.k, cache.v, **pack)
    expected = reference.attention_prefill(*as_double(q, gate), *cache.double(), **pack)
    assert out.dtype == dtype
    assert error(out, expected) < ATTENTION_TOLERANCE[dtype]
    assert same_bits(q, before[0])
    assert same_bits(gate, before[1])


@FLOATS
@pytest.mark.parametrize("kv_lens", [[], [1], [16, 17, 1, 130], [64] * 3], ids=str)
@pytest.mark.parametrize(("heads", "kv", "D"), HEADS)
def test_decode_attention_matches(kv_lens, heads, kv, D, dtype):
    cache = Cache(kv_lens, block_size=16, kv=kv, D=D, dtype=dtype)
    q, gate = (normal(seed, len(kv_lens), heads, D, dtype=dtype) for seed in (1, 2))
    rows = {"kv_lens": kv_lens, "block_tables": cache.tables}
    out = torch_ops.attention_decode(q, gate, cache.k, cache.v, **rows)
    expected = reference.attention_decode(*as_double(q, gate), *cache.double(), **rows)
    assert out.dtype == dtype
    assert error(out, expected) < ATTENTION_TOLERANCE[dtype]


@FLOATS
def test_kv_rows_are_stored_unchanged_at_their_indices_and_nowhere_else(dtype):
    caches = torch.full((2, 5, 4, 2, 3), float("nan"), dtype=dtype)
    expected = caches.clone()
    k, v, indices = (*(normal(i, 3, 2, 3, dtype=dtype) for i in (1, 2)), torch.tensor([19, 4, 7]))
    torch_ops.write_kv(k, v, *caches, indices)
    reference.write_kv(k, v, *expected, indices)
    assert same_bits(caches, expected)
    assert same_bits(caches[0, 1, 0], k[1])


def prefill(cache, q, gate, lengths, starts, tables):
    return torch_ops.attention_prefill(
        q,
        gate,
        cache.k,
        cache.v,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        start_positions=starts,
        block_tables=tables,
    )


@FLOATS
@pytest.mark.parametrize(("heads", "kv", "D"), [(4, 2, 64), (3, 1, 256)])
@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 260),
    cuts=st.sets(st.integers(1, 4)),
    block_size=st.sampled_from([5, 16]),
)
def test_prefill_attention_cut_at_multiples_of_64_gives_the_same_bits(
    heads, kv, D, dtype, num_tokens, cuts, block_size
):
    cache = Cache([num_tokens], block_size=block_size, kv=kv, D=D, dtype=dtype)
    q, gate = (normal(seed, num_tokens, heads, D, dtype=dtype) for seed in (1, 2))
    whole = prefill(cache, q, gate, [num_tokens], [0], cache.tables)
    edges = sorted({0, num_tokens, *(c * KERNEL_CHUNK for c in cuts if c * 64 < num_tokens)})
    for a, b in itertools.pairwise(edges):
        part = prefill(cache, q[a:b], gate[a:b], [b - a], [a], cache.tables)
        assert torch.equal(part, whole[a:b]), (a, b)


@FLOATS
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 2)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2, 64), (2, 2, 32)]),
)
def test_prefill_attention_of_a_sequence_alone_is_the_same_among_others(dtype, rows, heads):
    num_heads, kv, D = heads
    lengths, starts = [n for n, _ in rows], [64 * tiles for _, tiles in rows]
    kv_lens = [a + b for a, b in zip(lengths, starts, strict=True)]
    cache = Cache(kv_lens, block_size=16, kv=kv, D=D, dtype=dtype)
    q, gate = (normal(seed, sum(lengths), num_heads, D, dtype=dtype) for seed in (1, 2))
    out = prefill(cache, q, gate, lengths, starts, cache.tables)
    end = 0
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        part = slice(end, end + length)
        end += length
        alone = prefill(cache, q[part], gate[part], [length], [start], [cache.tables[row]])
        assert torch.equal(alone, out[part]), row


@FLOATS
@given(kv_lens=st.lists(st.integers(1, 140), min_size=1, max_size=5))
@settings(max_examples=15)
def test_decode_attention_of_a_row_alone_is_the_same_among_others(dtype, kv_lens):
    cache = Cache(kv_lens, block_size=16, kv=2, D=64, dtype=dtype)
    q, gate = (normal(seed, len(kv_lens), 6, 64, dtype=dtype) for seed in (1, 2))
    rows = {"kv_lens": kv_lens, "block_tables": cache.tables}
    out = torch_ops.attention_decode(q, gate, cache.k, cache.v, **rows)
    for row, kv_len in enumerate(kv_lens):
        alone = torch_ops.attention_decode(
            q[row : row + 1],
            gate[row : row + 1],
            cache.k,
            cache.v,
            kv_lens=[kv_len],
            block_tables=[cache.tables[row]],
        )
        assert torch.equal(alone[0], out[row]), row


@FLOATS
def test_attention_does_not_depend_on_which_blocks_hold_the_rows(dtype):
    q, gate = (normal(seed, 70, 4, 64, dtype=dtype) for seed in (1, 2))
    outs = []
    for block_size, others in ((16, []), (7, []), (16, [40])):
        cache = Cache([70, *others], block_size=block_size, kv=2, D=64, dtype=dtype)
        outs.append(prefill(cache, q, gate, [70], [0], cache.tables[:1]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
