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


@pytest.mark.parametrize("name", sorted(claims()))
def test_every_number_is_the_one_in_the_results(name):
    assert claims()[name] in README


def test_every_target_the_readme_names_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile, target
