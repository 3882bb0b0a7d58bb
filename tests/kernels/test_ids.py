"""Id vectors on the host and on a device: what is accepted, and that checks are made once."""

import pytest
import torch

from kernels import torch_ops, validate
from kernels.ids import BlockTables, Ids, as_ids, as_list, as_tables
from kernels.packs import chunk_table, one_token_each
from tests.kernels.packs import PACKS, Pack, Pool, delta_inputs, same_bits

CPU, META = torch.device("cpu"), torch.device("meta")


def test_ids_are_the_same_on_both_sides():
    ids = Ids(range(3, 6))
    assert ids.host == (3, 4, 5) and ids.tolist() == [3, 4, 5] and len(ids) == 3
    assert ids.tensor.tolist() == [3, 4, 5] and ids.tensor.dtype == torch.int64
    assert Ids([]).tensor.shape == (0,) and Ids([]).tensor.dtype == torch.int64


def test_ids_are_compared_by_identity_so_that_results_can_be_kept_by_them():
    a, b = Ids([1]), Ids([1])
    assert a == a and a != b and len({a, b}) == 2


def test_block_tables_are_padded_with_the_padding_block():
    tables = BlockTables([[5, 2, 7], [], (4,)])
    assert tables.host == ((5, 2, 7), (), (4,)) and len(tables) == 3
    assert tables.tensor.tolist() == [[5, 2, 7], [0, 0, 0], [4, 0, 0]]
    assert tables.tensor.dtype == torch.int32
    assert BlockTables([]).tensor.shape == (0, 0)


def test_ids_of_a_buffer_are_what_they_stand_for_on_the_host_and_the_buffer_itself():
    buffer = torch.zeros(2, dtype=torch.int64)
    ids = Ids.of_buffer(buffer, [7, 9])
    assert ids.host == (7, 9) and ids.tensor is buffer and len(ids) == 2
    assert as_ids(ids, "x", CPU) is ids
    rows = torch.ones(3, 2, dtype=torch.int32)
    tables = BlockTables.of_buffer(rows)
    assert tables.host == ((0, 0),) * 3 and tables.tensor is rows and len(tables) == 3


def test_buffers_that_an_op_would_misread_are_refused():
    whole = torch.zeros(2, dtype=torch.int64)
    for tensor, host in ((whole, [1]), (whole.int(), [1, 2]), (whole.view(2, 1), [1, 2])):
        with pytest.raises(ValueError, match="buffer of ids: expected int64"):
            Ids.of_buffer(tensor, host)
    for tensor in (whole, whole.view(1, 2)):
        with pytest.raises(ValueError, match=r"buffer of block tables: expected int32 \[N, width"):
            BlockTables.of_buffer(tensor)


def test_ids_on_another_device_are_refused():
    with pytest.raises(ValueError, match="device of read_slots: expected cpu, got meta"):
        as_ids(Ids([1], META), "read_slots", CPU)
    with pytest.raises(ValueError, match="device of block_tables"):
        as_tables(BlockTables([[1]], META), CPU)
    ids, tables = Ids([1]), BlockTables([[1]])
    assert as_ids(ids, "x", CPU) is ids and as_tables(tables, CPU) is tables


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), "an int64 vector"),
        (torch.tensor([[1]]), "an int64 vector"),
        (torch.tensor([1.0]), "an int64 vector"),
        ([1.0], "integers of 64 bits, got 1.0"),
        ([True], "integers of 64 bits, got True"),
        (["1"], "integers of 64 bits, got '1'"),
    ],
)
def test_what_is_no_vector_of_integers_is_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        as_list(ids, "slots")


@pytest.mark.parametrize("value", [1.0, 1.7, True, "1", None, 1 << 63, -(1 << 63) - 1])
def test_ids_and_block_tables_are_made_of_integers_that_fit(value):
    """What the host checks is what the device gets: 1.7 would be slot 1 there."""
    with pytest.raises(ValueError, match="ids: expected integers of 64 bits"):
        Ids([2, value])
    with pytest.raises(ValueError, match="blocks of row 1: expected integers of 32 bits"):
        BlockTables([[2], [3, value]])
    arena = torch.zeros(6, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="integers of 64 bits"):
        torch_ops.copy_slots(arena, [1], [value])
    with pytest.raises(ValueError, match="integers of 64 bits"):
        torch_ops.zero_slots(arena, [value])


@pytest.mark.parametrize("name", ["mixed", "empty segment", "padding row", "no rows"])
def test_lists_tensors_and_ids_are_the_same_to_an_op(name):
    pack = PACKS[name]
    inputs = delta_inputs(pack.num_tokens, 1, 2, 16, 8, torch.float32)
    tensors = pack.vectors()
    results = []
    for make in (lambda x: x, torch.Tensor.tolist, lambda x: Ids(x.tolist())):
        pool = Pool.poisoned(pack.num_slots, 2, 8, 16, dtype=torch.float32, filled=pack.sources)
        where = {key: make(value) for key, value in tensors.items()}
        torch_ops.gated_delta_prefill(*inputs, pool.view, **where)
        results.append(pool.everything)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_a_check_is_made_once_for_all_layers_but_never_for_other_sizes():
    """The same ids against a smaller pool, another number of tokens, or other ids beside them."""
    pack = {name: Ids(x.tolist()) for name, x in Pack([70], [1], [4]).vectors().items()}
    inputs = delta_inputs(70, 1, 1, 16, 8, torch.float32)
    before = validate._kept_rows.cache_info()
    for _ in range(3):  # layers
        validate.gated_delta(*inputs, torch.zeros(6, 1, 8, 16), **pack)
    after = validate._kept_rows.cache_info()
    assert after.misses - before.misses == 1 and after.hits - before.hits == 2
    with pytest.raises(ValueError, match="write slot"):
        validate.gated_delta(*inputs, torch.zeros(4, 1, 8, 16), **pack)
    with pytest.raises(ValueError, match="offsets from 0 to 71"):
        more = delta_inputs(71, 1, 1, 16, 8, torch.float32)
        validate.gated_delta(*more, torch.zeros(6, 1, 8, 16), **pack)
    with pytest.raises(ValueError, match="a slot of its own"):
        other = pack | {"snapshot_slots": Ids([4, -1])}
        validate.gated_delta(*inputs, torch.zeros(6, 1, 8, 16), **other)


def test_kept_block_tables_are_checked_against_the_cache_at_hand():
    q = torch.zeros(1, 2, 4)
    where = dict(kv_lens=Ids([3]), block_tables=BlockTables([[2]]))
    big, small = torch.zeros(3, 4, 1, 4), torch.zeros(2, 4, 1, 4)
    validate.attention_decode(q, q, big, big, **where)
    with pytest.raises(ValueError, match="block of row 0"):
        validate.attention_decode(q, q, small, small, **where)
    with pytest.raises(ValueError, match="number of K/V lengths"):
        twice = torch.zeros(2, 2, 4)
        validate.attention_decode(twice, twice, big, big, **where)


def test_the_chunk_table_names_every_piece_once():
    ids = {name: Ids(x.tolist()) for name, x in PACKS["mixed"].vectors().items()}
    table = chunk_table(**ids)
    assert table.rows.tolist() == [
        [0, 65, 0, 3, 1],
        [65, 0, 2, 3, 2],
        [65, 130, 3, -1, 4],
        [195, 1, 6, 9, 6],
        [196, 64, 7, 5, 5],
        [260, 2, 8, 0, 0],
    ]
    assert table.chunks.tolist() == [
        [0, 0, 64, 7],
        [0, 64, 1, -1],
        [1, 65, 0, -1],
        [2, 65, 64, -1],
        [2, 129, 64, 8],
        [2, 193, 2, -1],
        [3, 195, 1, -1],
        [4, 196, 64, 10],
        [5, 260, 2, -1],
    ]
    assert chunk_table(**ids) is table


def test_a_chunk_table_without_rows_is_empty():
    ids = {name: Ids(x.tolist()) for name, x in PACKS["no rows"].vectors().items()}
    table = chunk_table(**ids)
    assert table.chunks.shape == (0, 4) and table.rows.shape == (0, 5)
    assert one_token_each(3, CPU).host == (0, 1, 2, 3)
