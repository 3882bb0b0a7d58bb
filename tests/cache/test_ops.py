"""What goes over the wire between scheduler and worker."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.ops import NO_SLOT, LinearStateCacheOp, RestoreOutcome

SLOTS = st.integers(-(2**31), 2**31 - 1)
OPS = st.builds(LinearStateCacheOp, SLOTS, st.booleans(), SLOTS, st.integers(-(2**63), 2**63 - 1))


@given(OPS)
def test_an_op_survives_the_wire(op):
    assert LinearStateCacheOp.from_bytes(op.to_bytes()) == op


@given(st.lists(OPS, max_size=5))
def test_ops_have_one_length_so_that_a_batch_can_be_cut_again(ops):
    data = b"".join(op.to_bytes() for op in ops)
    size = len(LinearStateCacheOp(1).to_bytes())
    cut = [data[at : at + size] for at in range(0, len(data), size)]
    assert [LinearStateCacheOp.from_bytes(part) for part in cut] == ops


def test_asked_for_a_restore_but_no_source_survives_the_wire():
    op = LinearStateCacheOp(3, restore_requested=True, restore_src_slot_id=NO_SLOT, boundary=64)
    again = LinearStateCacheOp.from_bytes(op.to_bytes())
    assert (again.restore_requested, again.restore_src_slot_id) == (True, -1)
    assert op != LinearStateCacheOp(3, boundary=64)


def test_the_layout_on_the_wire_is_fixed():
    op = LinearStateCacheOp(3, True, 7, 128)
    assert op.to_bytes() == struct.pack("<BiBiq", 1, 3, 1, 7, 128)


GOOD = LinearStateCacheOp(3, True, 7, 128).to_bytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "18 bytes, got 0"),
        (GOOD[:-1], "18 bytes, got 17"),
        (GOOD + b"\0", "18 bytes, got 19"),
        (b"\2" + GOOD[1:], "version 1 expected, got 2"),
        (b"\0" + GOOD[1:], "version 1 expected, got 0"),
        (GOOD[:5] + b"\2" + GOOD[6:], "0 or 1, got 2"),
        (GOOD[:5] + b"\xff" + GOOD[6:], "0 or 1, got 255"),
    ],
    ids=["empty", "short", "long", "newer version", "version 0", "flag 2", "flag 255"],
)
def test_bad_bytes_are_refused(data, words):
    with pytest.raises(ValueError, match=words):
        LinearStateCacheOp.from_bytes(data)


@given(st.binary(min_size=18, max_size=18))
def test_bytes_that_are_accepted_are_those_that_would_be_written(data):
    try:
        op = LinearStateCacheOp.from_bytes(data)
    except ValueError:
        assert data[0] != 1 or data[5] > 1
    else:
        assert op.to_bytes() == data


@pytest.mark.parametrize("op", [LinearStateCacheOp(2**31), LinearStateCacheOp(1, False, -1, 2**63)])
def test_an_id_that_does_not_fit_is_an_error_and_not_cut_off(op):
    with pytest.raises(struct.error):
        op.to_bytes()


def test_outcomes_are_the_values_of_has_initial_state():
    assert (int(RestoreOutcome.RESTORED), int(RestoreOutcome.COLD_START)) == (1, 0)
    assert RestoreOutcome.NOT_REQUESTED not in (0, 1)
