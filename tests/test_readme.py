"""The README says what is true: its file map and its numbers."""

import re
from pathlib import Path

import pytest

from experiments.readme_numbers import claims

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAP = README.split("## Map")[1].split("## Limits")[0]


def test_every_module_of_the_library_is_on_the_map_and_every_name_on_it_exists():
    for package in ("kernels", "cache", "engine"):
        there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
        section = re.split(r"\n(?=\S)", MAP.split(f"\n{package}/")[1])[0]
        assert set(re.findall(r"\w+\.py", section)) == there, package


def test_every_path_the_readme_names_exists():
    for name in re.findall(r"`((?:experiments|tests)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def states(text: str, figure: str) -> bool:
    """Whether the figure stands in the text, and not as a part of a longer one."""
    return bool(re.search(rf"(?<![\w.])(?<!\d,){re.escape(figure)}(?!\w|[.,]\d)", text))


@pytest.mark.parametrize("name", sorted(claims()))
def test_every_number_is_the_one_in_the_results(name):
    assert states(README, claims()[name]), claims()[name]


def test_a_part_of_a_longer_number_is_another_number():
    for text in ("357 ms", "takes 357, not", "**357**", "at 357."):
        assert states(text, "357"), text
    for text in ("1357", "3570", "357.5", "0.357", "1,357", "357,000", "357x"):
        assert not states(text, "357"), text


def test_every_target_the_readme_names_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile, target
