"""The write-once map between keys and ids."""

import pytest

from cache.hashing import PrefixHash
from cache.prefix_index import PrefixIndex

KEY, OTHER = PrefixHash(b"k" * 16), PrefixHash(b"o" * 16)


def index() -> PrefixIndex[str]:
    filled: PrefixIndex[str] = PrefixIndex()
    filled.insert(KEY, 7, "entry")
    return filled


def test_a_key_finds_its_id_and_entry_and_an_id_its_key():
    filled = index()
    assert filled.find(KEY) == (7, "entry")
    assert filled.key_of(7) == KEY
    assert filled.contains(KEY) and len(filled) == 1 and filled.ids() == {7}


def test_an_unknown_key_is_none():
    filled = index()
    assert filled.find(OTHER) is None
    assert filled.key_of(8) is None
    assert not filled.contains(OTHER)


def test_a_key_is_written_once():
    with pytest.raises(AssertionError, match="key inserted twice"):
        index().insert(KEY, 8, "entry")


def test_an_id_has_one_key():
    with pytest.raises(AssertionError, match="id 7 has a key already"):
        index().insert(OTHER, 7, "entry")


def test_forgetting_an_id_returns_and_drops_both_directions():
    filled = index()
    assert filled.forget(7) == (KEY, "entry")
    assert len(filled) == 0 and filled.key_of(7) is None and filled.ids() == set()
    filled.insert(KEY, 8, "again")
    assert filled.find(KEY) == (8, "again")
    filled.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda filled: filled._by_id.pop(7),
        lambda filled: filled._by_key.update({KEY: (8, "entry")}),
    ],
    ids=["an id without its key", "a key of another id"],
)
def test_check_sees_maps_that_disagree(damage):
    filled = index()
    filled.check()
    damage(filled)
    with pytest.raises(AssertionError):
        filled.check()
