"""Triton attention and K/V writes: values against the specification, and rows that stay put."""

import itertools

import pytest
import torch

from kernels import KERNEL_CHUNK, attention, attention_decode, reference
from kernels.attention import attention_prefill, write_kv
from kernels.ids import BlockTables, Ids
from kernels.launch import Target, recording
from tests.kernels.packs import as_double, error, generator, normal, same_bits

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # float16 rounds the probabilities too
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NAN_NEIGHBOURS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says what they are
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
LONGEST = 1100
SHAPES = [  # query heads, K/V heads, D, block size
    (1, 1, 16, 2),
    (4, 4, 16, 16),
    (2, 1, 64, 64),
    (3, 1, 16, 64),
    (6, 2, 32, 16),
    (8, 2, 128, 64),
    (17, 1, 16, 64),
    (4, 1, 256, 64),
]


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch):
    """Fresh arrays hold NaN, so that reading what was never written shows."""

    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def short_parts(monkeypatch):
    """Parts of 32 K/V rows, so that short sequences have many."""
    monkeypatch.setattr(attention_decode, "SPLIT", 32)


def on_target(monkeypatch, name):
    for module in (attention, attention_decode):
        monkeypatch.setattr(module, "target_of", lambda device: Target(name))


class Cache:
    """K/V of sequences of these lengths in shuffled blocks; everything else is NaN.

    K lies between other layers, V between other heads and dims. Each table ends in a block that
    nobody may read. The values depend on the row of a sequence in `kv_lens` and on nothing else.
    """

    def __init__(self, kv_lens, *, kv, D, block_size, dtype, placement=1):
        needed = [-(-n // block_size) for n in kv_lens]
        num_blocks = sum(needed) + 2
        order = torch.randperm(num_blocks - 1, generator=generator(placement)).tolist()
        self.tables = [[order.pop() for _ in range(n)] + [num_blocks - 1] for n in needed]
        nan = float("nan")
        self.k = torch.full((num_blocks, 3, block_size, kv, D), nan, dtype=dtype)[:, 1]
        wide = torch.full((num_blocks, block_size, kv + 1, D + 16), nan, dtype=dtype)
        self.v = wide[:, :, 1:, 16:]
        for row, (kv_len, table) in enumerate(zip(kv_lens, self.tables, strict=True)):
            t = torch.arange(kv_len)
            blocks = torch.tensor(table)[t // block_size]
            for i, cache in enumerate((self.k, self.v)):
                values = normal(100 + 2 * row + i, LONGEST, kv, D, dtype=dtype)
                cache[blocks, t % block_size] = values[:kv_len]

    def all_but(self, row):
        """The others' blocks become NaN."""
        for block in set(range(len(self.k))) - set(self.tables[row][:-1]):
            self.k[block] = self.v[block] = float("nan")

    def double(self):
        return self.k.double(), self.v.double()


def queries(num_rows, heads, D, dtype, seed=1):
    """q with a gap between the rows, and a gate whose heads lie between others."""
    q = normal(seed, num_rows, heads + 1, D, dtype=dtype)[:, 1:]
    return q, normal(seed + 1, num_rows, heads, 2, D, dtype=dtype)[:, :, 1]


def packed(lengths, starts, tables):
    offsets = [0, *itertools.accumulate(lengths)]
    return {"cu_seqlens": offsets, "start_positions": starts, "block_tables": tables}


def check_prefill(lengths, starts, shape, dtype):
    heads, kv, D, block_size = shape
    kv_lens = [a + b for a, b in zip(lengths, starts, strict=True)]
    cache = Cache(kv_lens, kv=kv, D=D, block_size=block_size, dtype=dtype)
    q, gate = queries(sum(lengths), heads, D, dtype)
    pack = packed(lengths, starts, cache.tables)
    out = attention_prefill(q, gate, cache.k, cache.v, **pack)
    expected = reference.attention_prefill(*as_double(q, gate), *cache.double(), **pack)
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]


def decode(cache, q, gate, kv_lens, tables):
    lists = {"kv_lens": kv_lens, "block_tables": tables}
    return attention_decode.attention_decode(q, gate, cache.k, cache.v, **lists)


def check_decode(kv_lens, shape, dtype):
    heads, kv, D, block_size = shape
    cache = Cache(kv_lens, kv=kv, D=D, block_size=block_size, dtype=dtype)
    q, gate = queries(len(kv_lens), heads, D, dtype)
    rows = {"kv_lens": kv_lens, "block_tables": cache.tables}
    out = decode(cache, q, gate, kv_lens, cache.tables)
    expected = reference.attention_decode(*as_double(q, gate), *cache.double(), **rows)
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]


@FLOATS
@pytest.mark.parametrize("start", [0, 64, 128])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130])
def test_prefill_of_each_length_matches(length, start, dtype):
    check_prefill([length], [start], (2, 1, 16, 16), dtype)


@FLOATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_of_each_shape_matches(shape, dtype):
    check_prefill([65, 0, 3], [0, 64, 128], shape, dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_prefill_and_decode_match_with_the_tiles_of_each_target(target, monkeypatch, short_parts):
    on_target(monkeypatch, target)
    check_prefill([65, 3, 64], [0, 128, 64], (3, 1, 64, 64), torch.float16)
    check_decode([1, 65, 200], (3, 1, 64, 64), torch.float16)


@FLOATS
@pytest.mark.parametrize(("lengths", "starts"), [([], []), ([0], [0]), ([0, 0], [0, 64])], ids=str)
def test_prefill_of_nothing_is_empty(lengths, starts, dtype):
    check_prefill(lengths, starts, (2, 1, 16, 16), dtype)


@FLOATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_of_each_shape_matches(shape, dtype, short_parts):
    check_decode([1, 2, 31, 32, 33, 64, 100], shape, dtype)


@FLOATS
@pytest.mark.parametrize("kv_lens", [[], [8 * 32], [8 * 32 + 1, 1], [520, 550, 580, 610]], ids=str)
def test_decode_of_more_parts_than_one_step_combines_matches(kv_lens, dtype, short_parts):
    check_decode(kv_lens, (2, 1, 16, 16), dtype)


@FLOATS
def test_decode_with_parts_as_they_are_matches(dtype):
    split = attention_decode.SPLIT
    check_decode([split - 1, split, split + 1, 2 * split + 3], (2, 1, 16, 64), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp in a sigmoid
def test_large_scores_of_both_signs_do_not_overflow():
    cache = Cache([200], kv=1, D=16, block_size=16, dtype=torch.float32)
    q, gate = queries(136, 1, 16, torch.float32)
    pack = packed([136], [64], cache.tables)
    q, gate = q * 1e4, gate * 1e3  # scores of some 1e4, sigmoids of 0 and 1
    out = attention_prefill(q, gate, cache.k, cache.v, **pack)
    expected = reference.attention_prefill(*as_double(q, gate), *cache.double(), **pack)
    assert error(out, expected) < 1e-3  # a score of 1e4 is known to 1e-3
    last = decode(cache, q[-1:], gate[-1:], [200], cache.tables)
    assert error(last, expected[-1:]) < 1e-3


CUTS = [(130, [64]), (128, [64]), (193, [64, 128])]


@FLOATS
@pytest.mark.parametrize("shape", [(1, 1, 16, 2), (3, 1, 32, 16), (2, 1, 128, 64)], ids=str)
@pytest.mark.parametrize(("num_tokens", "cuts"), CUTS, ids=str)
def test_a_prefill_cut_at_multiples_of_64_gives_the_same_bits(num_tokens, cuts, shape, dtype):
    heads, kv, D, block_size = shape
    at = {"kv": kv, "D": D, "block_size": block_size, "dtype": dtype}
    cache = Cache([num_tokens], **at)
    q, gate = queries(num_tokens, heads, D, dtype)
    pack = packed([num_tokens], [0], cache.tables)
    whole = attention_prefill(q, gate, cache.k, cache.v, **pack)
    for a, b in itertools.pairwise([0, *cuts, num_tokens]):
        now = Cache([b], **at, placement=b)  # the rows after b do not exist yet
        pack = packed([b - a], [a], now.tables)
        part = attention_prefill(q[a:b], gate[a:b], now.k, now.v, **pack)
        assert torch.equal(part, whole[a:b]), (a, b)


@FLOATS
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 33, 63, 64, 65, 100])
def test_rows_of_a_prefill_do_not_depend_on_how_many_follow(num_tokens, dtype):
    cache = Cache([130], kv=1, D=64, block_size=16, dtype=dtype)
    q, gate = queries(130, 2, 64, dtype)
    whole = attention_prefill(q, gate, cache.k, cache.v, **packed([130], [0], cache.tables))
    pack = packed([num_tokens], [0], cache.tables)
    part = attention_prefill(q[:num_tokens], gate[:num_tokens], cache.k, cache.v, **pack)
    assert torch.equal(part, whole[:num_tokens])


@NAN_NEIGHBOURS
@FLOATS
def test_prefill_of_a_sequence_alone_is_the_same_among_others_of_nan(dtype):
    lengths, starts = [65, 2, 0, 64, 1], [64, 0, 64, 0, 128]
    kv_lens = [a + b for a, b in zip(lengths, starts, strict=True)]
    ends = list(itertools.accumulate(lengths))
    for row, length in enumerate(lengths):
        part = slice(ends[row] - length, ends[row])
        cache = Cache(kv_lens, kv=2, D=32, block_size=16, dtype=dtype)
        q, gate = queries(sum(lengths), 6, 32, dtype)
        pack = packed([length], [starts[row]], cache.tables[row : row + 1])
        alone = attention_prefill(q[part], gate[part], cache.k, cache.v, **pack)
        cache.all_but(row)
        for x in (q, gate):
            x[: part.start] = x[part.stop :] = float("nan")
        pack = packed(lengths, starts, cache.tables)
        out = attention_prefill(q, gate, cache.k, cache.v, **pack)
        assert torch.equal(out[part], alone), row
        assert alone.isfinite().all()


@NAN_NEIGHBOURS
@FLOATS
@pytest.mark.parametrize("shape", [(2, 1, 16, 2), (6, 2, 32, 16), (2, 1, 128, 64)], ids=str)
def test_decode_of_a_row_alone_is_the_same_among_others_of_nan(shape, dtype, short_parts):
    heads, kv, D, block_size = shape
    kv_lens = [1, 260, 31, 32, 33, 65]
    cache = Cache(kv_lens, kv=kv, D=D, block_size=block_size, dtype=dtype)
    q, gate = queries(len(kv_lens), heads, D, dtype)
    out = decode(cache, q, gate, kv_lens, cache.tables)
    assert out.isfinite().all()
    for row, kv_len in enumerate(kv_lens):
        one = slice(row, row + 1)
        alone = decode(cache, q[one], gate[one], [kv_len], cache.tables[one])
        assert torch.equal(alone[0], out[row]), row
        gone = Cache(kv_lens, kv=kv, D=D, block_size=block_size, dtype=dtype)
        gone.all_but(row)
        mixed_q, mixed_gate = (torch.full_like(x, float("nan")) for x in (q, gate))
        mixed_q[row], mixed_gate[row] = q[row], gate[row]
        among = decode(gone, mixed_q, mixed_gate, kv_lens, gone.tables)
        assert torch.equal(among[row], out[row]), row


@FLOATS
def test_several_queries_of_one_sequence_are_rows_like_others(dtype, short_parts):
    cache = Cache([70], kv=2, D=32, block_size=16, dtype=dtype)
    q, gate = queries(4, 4, 32, dtype)
    kv_lens, tables = [67, 68, 69, 70], cache.tables * 4
    out = decode(cache, q, gate, kv_lens, tables)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(decode(cache, q[one], gate[one], kv_lens[one], tables[one])[0], out[row])


@FLOATS
def test_attention_does_not_depend_on_which_blocks_hold_the_rows(dtype, short_parts):
    q, gate = queries(130, 2, 32, dtype)
    prefills, decodes = [], []
    for placement, block_size in enumerate((64, 16, 2, 7, 64)):
        at = {"block_size": block_size, "placement": placement}
        cache = Cache([130], kv=1, D=32, dtype=dtype, **at)
        pack = packed([130], [0], cache.tables)
        prefills.append(attention_prefill(q, gate, cache.k, cache.v, **pack))
        decodes.append(decode(cache, q[-1:], gate[-1:], [130], cache.tables))
    for outs in (prefills, decodes):
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv", "D"), [(1, 16), (2, 64), (3, 5)])
def test_kv_rows_are_stored_unchanged_at_their_indices_and_nowhere_else(kv, D, dtype):
    indices = [19, 4, 7, 33, 5]
    arena = torch.full((12, 5, 2, kv + 1, D + 3), float("nan"), dtype=dtype)
    expected = arena.clone()
    rows = normal(1, len(indices), (2 * kv + 1) * D, dtype=dtype)
    k, v = (rows[:, a : a + kv * D].unflatten(1, (kv, D)) for a in (D, (kv + 1) * D))
    write_kv(k, v, arena[:, :, 0, 1:, 1:-2], arena[:, :, 1, :-1, 2:-1], indices)
    reference.write_kv(k, v, expected[:, :, 0, 1:, 1:-2], expected[:, :, 1, :-1, 2:-1], indices)
    assert same_bits(arena, expected)
    assert same_bits(arena[3, 4, 0, 1, 1:-2], k[0, 0])


def test_k_and_v_have_their_own_strides():
    k, v = normal(1, 3, 2, 16), normal(2, 3, 3, 2, 16)[:, 1]
    caches = torch.zeros(4, 2, 2, 16), torch.zeros(4, 2, 5, 4, 16)[:, :, 3, ::2]
    expected = [x.clone() for x in caches]
    write_kv(k, v, *caches, [7, 2, 5])
    reference.write_kv(k, v, *expected, [7, 2, 5])
    assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))


def test_blocks_of_a_shared_memory_are_written_and_read_where_they_lie():
    """Every block has the K and V of both layers side by side, and a gap behind them."""
    kv, D, size, blocks = 2, 16, 16, 6
    row = kv * D
    arena = torch.full((blocks, 4 * size * row + 24), float("nan"))
    sizes, strides = (2, blocks, size, kv, D), (size * row, arena.shape[1], row, D, 1)
    far = arena[:, 2 * size * row :].as_strided(sizes, strides, 2 * size * row)
    near = torch.full(sizes, float("nan"))
    k, v = normal(1, 40, kv, D), normal(2, 40, kv, D)
    q, gate = queries(40, 4, D, torch.float32)
    table = [4, 1, 3]
    indices = [table[t // size] * size + t % size for t in range(40)]
    outs = []
    for pair in (near, far):
        write_kv(k, v, *pair, indices)
        prefill = attention_prefill(q, gate, *pair, **packed([40], [0], [table]))
        lists = {"kv_lens": [40], "block_tables": [table]}
        step = attention_decode.attention_decode(q[-1:], gate[-1:], *pair, **lists)
        outs.append(torch.cat([prefill, step]))
    assert same_bits(near, far.contiguous())
    assert arena[:, : 2 * size * row].isnan().all() and arena[:, -24:].isnan().all()
    assert torch.equal(*outs) and outs[0].isfinite().all()


def test_padding_rows_share_block_0_and_no_rows_write_nothing():
    k, v = normal(1, 4, 2, 16), normal(2, 4, 2, 16)
    caches = torch.full((2, 3, 4, 2, 16), float("nan"))
    expected = caches.clone()
    write_kv(k[:0], v[:0], *caches, [])
    assert same_bits(caches, expected)
    write_kv(k, v, *caches, [0, 5, 0, 11])
    reference.write_kv(k, v, *expected, [0, 5, 0, 11])
    assert same_bits(caches[:, 1:], expected[:, 1:])
    assert same_bits(caches[:, 0, 1:], expected[:, 0, 1:])
    assert any(same_bits(caches[0, 0, 0], k[row]) for row in (0, 2))


def test_blocks_beyond_2_to_the_31_elements_are_written_and_read(short_parts):
    """trap 24"""
    D, block_size = 64, 64
    last = 2**31 // (block_size * 2 * D) + 2  # block ids fit, element offsets do not
    half = torch.zeros(0, dtype=torch.float16)
    caches = half.new_empty(last + 1, block_size, 2, 1, D).unbind(2)  # few pages are touched
    k, v = (normal(i, 65, 1, D, dtype=torch.float16) for i in (1, 2))
    q, gate = queries(65, 2, D, torch.float16)
    small = [torch.zeros(2, block_size, 1, D, dtype=torch.float16) for _ in range(2)]
    outs = []
    for pair, blocks in ((caches, [last, last - 1]), (small, [0, 1])):
        indices = [blocks[t // block_size] * block_size + t % block_size for t in range(65)]
        write_kv(k, v, *pair, indices)
        prefill = attention_prefill(q, gate, *pair, **packed([65], [0], [blocks]))
        lists = {"kv_lens": [65], "block_tables": [blocks]}
        step = attention_decode.attention_decode(q[-1:], gate[-1:], *pair, **lists)
        outs.append(torch.cat([prefill, step]))
    assert torch.equal(caches[1][last, :, 0], small[1][0, :, 0])
    assert torch.equal(outs[0], outs[1])
    assert outs[0].isfinite().all()


def test_ids_on_the_device_give_what_lists_give():
    cache = Cache([66, 131], kv=1, D=16, block_size=16, dtype=torch.float32)
    q, gate = queries(69, 2, 16, torch.float32)
    pack = packed([66, 3], [0, 128], cache.tables)
    by_lists = attention_prefill(q, gate, cache.k, cache.v, **pack)
    ids = {name: Ids(pack[name]) for name in ("cu_seqlens", "start_positions")}
    tables = BlockTables(cache.tables)
    by_ids = attention_prefill(q, gate, cache.k, cache.v, **ids, block_tables=tables)
    assert torch.equal(by_ids, by_lists)
    lens = [66, 131]
    by_lists = decode(cache, q[:2], gate[:2], lens, cache.tables)
    assert torch.equal(decode(cache, q[:2], gate[:2], Ids(lens), tables), by_lists)


def record(lengths, starts, width, kv_lens):
    """Launches of one prefill, twice, and one decode, at fixed strides."""
    cache = torch.empty(2, 99, 64, 2, 128, dtype=torch.float16, device="meta")
    q = torch.empty(sum(lengths), 8, 128, dtype=torch.float16, device="meta")
    ids = {
        "cu_seqlens": Ids([0, *itertools.accumulate(lengths)], "meta"),
        "start_positions": Ids(starts, "meta"),
        "block_tables": BlockTables([list(range(width))] * len(lengths), "meta"),
    }
    with recording(Target("sm_90")) as launches:
        for _ in range(2):
            attention_prefill(q, q, *cache, **ids)
        lists = {"kv_lens": kv_lens, "block_tables": [list(range(width))] * len(kv_lens)}
        attention_decode.attention_decode(q[: len(kv_lens)], q[: len(kv_lens)], *cache, **lists)
    return launches


def test_counts_of_a_step_do_not_change_the_binary():
    few, many = record([65], [0], 3, [9]), record([128, 3], [64, 128], 40, [9, 2000, 300])
    for a, b in zip(few, many, strict=True):
        assert a.kernel is b.kernel
        assert a.constexprs == b.constexprs
        assert a.options == b.options


def test_layers_share_the_list_of_query_tiles():
    first, second, *_ = record([65], [0], 3, [9])
    tiles = [arg for arg in first.args if isinstance(arg, torch.Tensor) and arg.shape == (8,)]
    assert len(tiles) == 1
    assert any(arg is tiles[0] for arg in second.args)


def test_tiles_with_the_most_kv_rows_are_started_first():
    tiles = attention._tiles([0, 65, 65, 68], [0, 64, 256], torch.device("cpu")).host
    expected = [(2, 65, 256, 3), (0, 64, 64, 1), (0, 0, 0, 64)]
    assert tiles == tuple(itertools.chain.from_iterable(expected))
    assert KERNEL_CHUNK == 64


def test_writes_refuse_before_anything_is_written():
    k, v = normal(1, 2, 2, 16), normal(2, 2, 2, 16)
    caches = torch.full((2, 3, 4, 2, 16), 7.0)
    wide = torch.full((2, 3, 4, 2, 32), 7.0)
    swapped = normal(1, 2, 16, 2).transpose(1, 2)
    calls = {
        "K/V index": (k, v, *caches, [4, 12]),
        "K/V index: expected used once": (k, v, *caches, [5, 5]),
        "dtype of v": (k, v.half(), *caches, [4, 5]),
        "dtype of k_cache": (k.half(), v.half(), *caches, [4, 5]),
        "strides of k: expected contiguous rows": (swapped, v, *caches, [4, 5]),
        "strides of v: expected contiguous rows": (k, swapped, *caches, [4, 5]),
        "strides of k_cache: expected a contiguous": (k, v, wide[0, ..., ::2], caches[1], [4, 5]),
        "strides of v_cache: expected a contiguous": (k, v, caches[0], wide[1, ..., ::2], [4, 5]),
    }
    for message, args in calls.items():
        with pytest.raises(ValueError, match=message):
            write_kv(*args)
    assert torch.equal(caches, torch.full_like(caches, 7.0))
    assert torch.equal(wide, torch.full_like(wide, 7.0))


def change(call, **changes):
    return {**call, **changes}


def test_attention_refuses_what_it_cannot_do():
    cache = Cache([70], kv=2, D=16, block_size=16, dtype=torch.float32)
    q, gate = queries(70, 4, 16, torch.float32)
    base = {"q": q, "gate": gate, "k_cache": cache.k, "v_cache": cache.v}
    pack, table = packed([70], [0], cache.tables), cache.tables[0]
    rows = {"kv_lens": [70], "block_tables": cache.tables}
    one = {"q": q[:1], "gate": gate[:1]}

    def last_strided(x):
        return x.repeat_interleave(2, -1)[..., ::2]

    def narrow(D):
        return {name: x[..., :D] for name, x in base.items()}

    bad_tensors = {
        "dtype of gate": {"gate": gate.half()},
        "shape of gate": {"gate": gate[:, :2]},
        "query heads: expected a multiple of 2, at least 1, got 3": {
            "q": q[:, :3],
            "gate": gate[:, :3],
        },
        "strides of q": {"q": last_strided(q)},
        "strides of gate": {"gate": last_strided(gate)},
        "strides of k_cache": {"k_cache": last_strided(cache.k)},
        "strides of v_cache": {"v_cache": last_strided(cache.v)},
        "head dim: .* got 8": narrow(8),
        "head dim: .* got 12": narrow(12),
        "dtype: .* got torch.float64": {name: x.double() for name, x in base.items()},
    }
    bad_packs = {
        "start of row 0: expected a multiple of 64, got 32": {"start_positions": [32]},
        "cu_seqlens": {"cu_seqlens": [0, 69]},
        "blocks of row 0: expected at least 5, got 4": {"block_tables": [table[:4]]},
        "block of row 0": {"block_tables": [[*table[:4], len(cache.k)]]},
        "block of row 0: .* got -1": {"block_tables": [[*table[:4], -1]]},
    }
    bad_rows = {
        "K/V length of row 0: expected at least 1, got 0": {"kv_lens": [0]},
        "number of K/V lengths": {"kv_lens": [70, 70]},
        "blocks of row 0: expected at least 5, got 4": {"block_tables": [table[:4]]},
        "block of row 0": {"block_tables": [[len(cache.k), *table]]},
    }
    for message, changes in bad_tensors.items():
        with pytest.raises(ValueError, match=message):
            attention_prefill(**change(base, **changes), **pack)
        decoded = change(base, **changes)
        decoded = change(decoded, q=decoded["q"][:1], gate=decoded["gate"][:1])
        with pytest.raises(ValueError, match=message):
            attention_decode.attention_decode(**decoded, **rows)
    for message, changes in bad_packs.items():
        with pytest.raises(ValueError, match=message):
            attention_prefill(**base, **change(pack, **changes))
    for message, changes in bad_rows.items():
        with pytest.raises(ValueError, match=message):
            attention_decode.attention_decode(**change(base, **one), **change(rows, **changes))


def test_small_blocks_beyond_2_to_the_31_elements_are_read(short_parts):
    """Tiles of K/V rows that hold several blocks."""
    D, block_size, num_rows = 64, 16, 65
    last = 2**31 // (block_size * 2 * D) + 5
    half = torch.zeros(0, dtype=torch.float16)
    far = half.new_empty(last + 1, block_size, 2, 1, D).unbind(2)  # few pages are touched
    near = [torch.zeros(5, block_size, 1, D, dtype=torch.float16) for _ in range(2)]
    k, v = (normal(i, num_rows, 1, D, dtype=torch.float16) for i in (1, 2))
    q, gate = queries(num_rows, 2, D, torch.float16)
    outs = []
    for pair, first in ((far, last - 4), (near, 0)):
        table = [first + i for i in range(5)]
        write_kv(k, v, *pair, [first * block_size + t for t in range(num_rows)])
        prefill = attention_prefill(q, gate, *pair, **packed([num_rows], [0], [table]))
        lists = {"kv_lens": [num_rows], "block_tables": [table]}
        step = attention_decode.attention_decode(q[-1:], gate[-1:], *pair, **lists)
        outs.append(torch.cat([prefill, step]))
    assert torch.equal(outs[0], outs[1])
    assert outs[0].isfinite().all()


def test_rows_beyond_2_to_the_31_elements_are_the_right_ones():
    """As slices of a projection as wide as that: pages that nobody touches cost nothing."""

    def far(x):
        wide = x.new_empty(len(x), 2**30 + 2**29)[:, : x[0].numel()]
        return wide.copy_(x.flatten(1)).unflatten(1, x.shape[1:])

    cache = Cache([3], kv=1, D=16, block_size=16, dtype=torch.float16)
    q, gate = (normal(i, 3, 2, 16, dtype=torch.float16) for i in (1, 2))
    kv_lens, tables = [1, 2, 3], cache.tables * 3
    pack = packed([3], [0], cache.tables)
    prefill = attention_prefill(q, gate, cache.k, cache.v, **pack)
    step = decode(cache, q, gate, kv_lens, tables)
    for q_, gate_ in ((far(q), gate), (q, far(gate))):
        assert torch.equal(attention_prefill(q_, gate_, cache.k, cache.v, **pack), prefill)
        assert torch.equal(decode(cache, q_, gate_, kv_lens, tables), step)
    k, v = (normal(i, 3, 1, 16, dtype=torch.float16) for i in (3, 4))
    for k_, v_ in ((far(k), v), (k, far(v))):
        caches = torch.zeros(2, 1, 4, 1, 16, dtype=torch.float16)
        write_kv(k_, v_, *caches, [3, 1, 2])
        assert same_bits(caches[0, 0, [3, 1, 2]], k) and same_bits(caches[1, 0, [3, 1, 2]], v)


@pytest.mark.parametrize("most", [2, 3])
def test_long_sequences_have_longer_parts_so_that_the_workspace_is_bounded(monkeypatch, most):
    """Part lengths follow from a row's own length: alone or beside others, the same bits."""
    monkeypatch.setattr(attention_decode, "SPLIT", 16)
    monkeypatch.setattr(attention_decode, "MOST_PARTS", most)
    lengths = [1, 16, 17, 16 * most, 16 * most + 1, 150]
    parts = [attention_decode.most_parts_of(n) for n in lengths]
    assert parts == [1, 1, 2, most, most, most]
    q, gate = normal(1, len(lengths), 2, 16), normal(2, len(lengths), 2, 16)
    caches = normal(3, 64, 16, 1, 16), normal(4, 64, 16, 1, 16)
    tables = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(len(lengths))]
    together = attention_decode.attention_decode(
        q, gate, *caches, kv_lens=lengths, block_tables=tables
    )
    wide = [x.double() for x in (q, gate, *caches)]
    expected = reference.attention_decode(*wide, kv_lens=lengths, block_tables=tables)
    assert error(together, expected) < 1e-6
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        alone = attention_decode.attention_decode(
            q[i : i + 1], gate[i : i + 1], *caches, kv_lens=[length], block_tables=[table]
        )
        assert torch.equal(alone[0], together[i])
