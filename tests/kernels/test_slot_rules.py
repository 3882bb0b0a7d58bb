"""What breaks a rule for slots is refused before anything is written, in every implementation."""

import pytest
import torch

from kernels import reference, torch_ops
from tests.kernels.packs import Pool, delta_inputs, normal, same_bits

OPS = pytest.mark.parametrize("ops", [reference, torch_ops], ids=["reference", "torch_ops"])
NUM_SLOTS = 8

# name: (lengths, reads, writes, snapshot entries, words of the message)
REFUSED = {
    "read slot below -1": ([2], [-2], [1], [-1], "read slot of row 0.*-2"),
    "read slot beyond the pool": ([2], [8], [1], [-1], r"read slot of row 0.*\[-1, 8\), got 8"),
    "a real row reads padding": ([2], [0], [1], [-1], "read slot of row 0.*got 0"),
    "write slot below 0": ([2], [1], [-1], [-1], "write slot of row 0.*-1"),
    "write slot beyond the pool": ([2], [1], [8], [-1], r"write slot of row 0.*\[0, 8\), got 8"),
    "two writers": ([2, 2], [1, 2], [3, 3], [-1, -1], "writers of slot 3.*rows 0, 1"),
    "read by a row, written by a later": ([2, 2], [1, 2], [3, 1], [-1, -1], "writer of slot 1"),
    "read by a row, written by an earlier": ([2, 2], [1, 2], [2, 3], [-1, -1], "writer of slot 2"),
    "shared source written in place": ([2, 2], [1, 1], [1, 2], [-1, -1], "writer of slot 1"),
    "padding row reads what another writes": ([2, 2], [1, 2], [0, 1], [-1, -1], "writer of slot 1"),
    "snapshot after 63 tokens": ([63], [1], [2], [3], "after token 63"),
    "snapshot after 64 + 1 tokens": ([65], [1], [2], [-1, 3], "after token 65"),
    "snapshot in padding": ([64], [1], [0], [3], "padding row"),
    "snapshot into slot 0": ([64], [1], [2], [0], "after token 64.*got 0"),
    "snapshot below -1": ([64], [1], [2], [-2], "after token 64.*got -2"),
    "snapshot beyond the pool": ([64], [1], [2], [8], "after token 64.*got 8"),
    "snapshot into the read slot": ([64], [1], [2], [1], "slot of its own, got 1"),
    "snapshot into the write slot": ([64], [1], [2], [2], "slot of its own, got 2"),
    "snapshot into another row's source": ([64, 1], [1, 4], [2, 3], [4, -1], "got 4"),
    "snapshot into a later row's write slot": ([64, 1], [1, 4], [2, 3], [3, -1], "got 3"),
    "one slot for two snapshots": ([128], [1], [2], [5, 5], "after token 128.*got 5"),
    "too few snapshot entries": ([65], [1], [2], [-1], "snapshot slots: expected 2, got 1"),
    "entries as if the pack were one row": ([65, 63], [1, 2], [3, 4], [-1, -1], "expected 3"),
    "a read slot too many": ([2], [1, 2], [3], [-1], "read slots: expected 1, got 2"),
    "a write slot too few": ([2, 2], [1, 2], [3], [-1, -1], "write slots: expected 2, got 1"),
}

FILLED = tuple(range(1, NUM_SLOTS))


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@OPS
@pytest.mark.parametrize("name", REFUSED)
def test_prefill_refuses_and_writes_nothing(ops, name):
    lengths, reads, writes, snapshots, message = REFUSED[name]
    num_tokens = sum(lengths)
    vectors = {
        "cu_seqlens": ids([0, *lengths]).cumsum(0),
        "read_slots": ids(reads),
        "write_slots": ids(writes),
        "snapshot_slots": ids(snapshots),
    }
    states = Pool.poisoned(NUM_SLOTS, 2, 4, 4, dtype=torch.float32, filled=FILLED)
    windows = Pool.poisoned(NUM_SLOTS, 3, 5, dtype=torch.float32, filled=FILLED)
    before = states.clone(), windows.clone()
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_prefill(
            *delta_inputs(num_tokens, 1, 2, 4, 4, torch.float32), states.view, **vectors
        )
    with pytest.raises(ValueError, match=message):
        ops.causal_conv_prefill(normal(1, num_tokens, 5), normal(2, 5, 4), windows.view, **vectors)
    assert same_bits(states.everything, before[0].everything)
    assert same_bits(windows.everything, before[1].everything)


# name: (lengths, reads, writes, snapshot entries)
ACCEPTED = {
    "padding rows share slot 0": ([1, 2, 2], [0, 0, 1], [0, 0, 0], [-1, -1, -1]),
    "rows share a source": ([1, 1], [3, 3], [1, 2], [-1, -1]),
    "rows in place": ([1, 1], [3, 4], [3, 4], [-1, -1]),
    "the last slot": ([64], [6], [7], [5]),
    "a snapshot after each full chunk": ([129], [1], [2], [3, 4, -1]),
    "no rows": ([], [], [], []),
}


@OPS
@pytest.mark.parametrize("name", ACCEPTED)
def test_prefill_accepts(ops, name):
    lengths, reads, writes, snapshots = ACCEPTED[name]
    pool = Pool.poisoned(NUM_SLOTS, 3, 5, dtype=torch.float32, filled=FILLED)
    before = pool.clone()
    ops.causal_conv_prefill(
        normal(1, sum(lengths), 5),
        normal(2, 5, 4),
        pool.view,
        cu_seqlens=ids([0, *lengths]).cumsum(0),
        read_slots=ids(reads),
        write_slots=ids(writes),
        snapshot_slots=ids(snapshots),
    )
    written = {*writes, *snapshots} - {0, -1}
    assert pool.untouched_but(before, written)
    assert all(not same_bits(pool.view[slot], before.view[slot]) for slot in written)


STEPS = [name for name, case in REFUSED.items() if set(case[0]) == {2}]


@OPS
@pytest.mark.parametrize("name", STEPS)
def test_step_refuses_and_writes_nothing(ops, name):
    lengths, reads, writes, _, message = REFUSED[name]
    slots = {"read_slots": ids(reads), "write_slots": ids(writes)}
    states = Pool.poisoned(NUM_SLOTS, 2, 4, 4, dtype=torch.float32, filled=FILLED)
    windows = Pool.poisoned(NUM_SLOTS, 3, 5, dtype=torch.float32, filled=FILLED)
    before = states.clone(), windows.clone()
    num_rows = len(lengths)
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_step(
            *delta_inputs(num_rows, 1, 2, 4, 4, torch.float32), states.view, **slots
        )
    with pytest.raises(ValueError, match=message):
        ops.causal_conv_step(normal(1, num_rows, 5), normal(2, 5, 4), windows.view, **slots)
    assert same_bits(states.everything, before[0].everything)
    assert same_bits(windows.everything, before[1].everything)


@OPS
@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1], [0], "written slot.*got 0"),
        ([0], [1], "source slot.*got 0"),
        ([1], [8], "written slot.*got 8"),
        ([8], [1], "source slot.*got 8"),
        ([-1], [1], "source slot.*got -1"),
        ([1, 2], [3, 3], "distinct"),
        ([1, 2], [2, 3], r"source and destination.*\[2\]"),
        ([1, 2], [3], "number of sources: expected 1, got 2"),
    ],
)
def test_copy_refuses_and_writes_nothing(ops, sources, destinations, message):
    arena = torch.arange(NUM_SLOTS, dtype=torch.uint8)[:, None].expand(-1, 16).clone()
    before = arena.clone()
    with pytest.raises(ValueError, match=message):
        ops.copy_slots(arena, sources, destinations)
    assert torch.equal(arena, before)


@OPS
@pytest.mark.parametrize("slots", [[0], [8], [-1], [2, 2]])
def test_zeroing_refuses_and_writes_nothing(ops, slots):
    arena = torch.ones(NUM_SLOTS, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="written slot"):
        ops.zero_slots(arena, slots)
    assert torch.equal(arena, torch.ones_like(arena))


@OPS
def test_drafts_of_one_row_have_a_slot_each(ops):
    states = Pool.poisoned(NUM_SLOTS, 2, 4, 4, dtype=torch.float32, filled=FILLED)
    before = states.clone()
    slots = {"read_slots": ids([1]), "write_slots": ids([2, 3, 2]), "cu_seqlens": ids([0, 3])}
    with pytest.raises(ValueError, match="writers of slot 2: expected one row, got rows 0, 0"):
        ops.gated_delta_step(*delta_inputs(3, 1, 2, 4, 4, torch.float32), states.view, **slots)
    assert same_bits(states.everything, before.everything)
