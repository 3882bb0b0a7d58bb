"""TRAPS.md is true: tests cite its numbers; the files that it names are there and cite them."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CITATION = re.compile(r"\btraps? (\d+(?:(?:, | and )\d+)*)")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.M)
LISTED = {int(n): shown for n, _, shown in ROW.findall((TESTS / "TRAPS.md").read_text())}


def cited_in(path: Path) -> set[int]:
    """Every n of "trap n" and "traps n, n and n" in a file."""
    citations = CITATION.findall(path.read_text())
    return {int(n) for citation in citations for n in re.findall(r"\d+", citation)}


CITED = {
    path.relative_to(TESTS).as_posix(): cited_in(path)
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__)
}


def test_the_list_is_numbered_without_gaps_and_says_of_each_what_shows_it():
    rows = ROW.findall((TESTS / "TRAPS.md").read_text())
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    for number, fault, shown in rows:
        assert len(fault.split()) <= 22, number
        assert "`test_" in shown or "/test_" in shown or "not yet: no " in shown, number


@pytest.mark.parametrize("file", [file for file, numbers in CITED.items() if numbers])
def test_every_number_that_a_test_cites_is_in_the_list(file):
    assert not CITED[file] - set(LISTED)


@pytest.mark.parametrize("number", sorted(LISTED))
def test_every_file_of_the_list_is_there_and_cites_the_number(number):
    for file in re.findall(r"`([\w/]+\.py)`", LISTED[number]):
        assert number in CITED[file], file


def test_citations_are_found_in_every_form():
    text = "trap 3, traps 4 and 31, and traps 5, 6 and 7; not attrap 9"
    numbers = [re.findall(r"\d+", citation) for citation in CITATION.findall(text)]
    assert numbers == [["3"], ["4", "31"], ["5", "6", "7"]]
