"""Options of the scripts: what they take, and that a bad one is refused before the work begins."""

import argparse
from pathlib import Path

import pytest

from experiments.options import results_file, seconds, share


def test_a_results_file_may_lie_in_folders_that_are_yet_to_be_made(tmp_path):
    wanted = tmp_path / "a" / "b" / "x.json"
    assert results_file(str(wanted)) == wanted
    assert results_file("x.json") == Path("x.json")


@pytest.mark.parametrize("text", ["", "x", "x.txt", ".", "/dev/null/x.json"])
def test_a_results_file_that_can_not_be_is_refused(text, tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match=r"ends in \.json|can't be written"):
        results_file(text)
    folder = tmp_path / "x.json"
    folder.mkdir()
    with pytest.raises(argparse.ArgumentTypeError, match=r"ends in \.json"):
        results_file(str(folder))


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_no_time_at_all_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a positive number of seconds"):
        seconds(text)


def test_seconds_are_a_number():
    assert seconds("270.5") == 270.5


def test_a_share_is_a_part_of_a_whole():
    assert [share(text) for text in ("0", "0.95", "1")] == [0, 0.95, 1]


@pytest.mark.parametrize("text", ["1.01", "-0.1", "nan", "95 %", ""])
def test_more_than_the_whole_is_no_share(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a share from 0 to 1"):
        share(text)
