"""Imports point one way: experiments, tests -> engine -> cache -> kernels."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"kernels": 0, "cache": 1, "engine": 2, "experiments": 3, "tests": 4}
MODULES = sorted(path for name in LAYERS for path in (ROOT / name).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def in_package(name: str) -> list[Path]:
    return sorted((ROOT / name).glob("*.py"))


def named(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@named(MODULES)
def test_a_module_imports_only_from_layers_below_its_own(path):
    layer = path.relative_to(ROOT).parts[0]
    for other in packages(path) & set(LAYERS):
        assert other == layer or LAYERS[other] < LAYERS[layer], f"{layer} imports {other}"


@named(in_package("cache"))
def test_the_cache_has_no_tensors_outside_the_state_pool(path):
    allowed = path.name == "state_pool.py"
    assert not packages(path) & {"torch", "numpy", "triton", "kernels"} or allowed


@named([path for path in in_package("cache") if path.name != "state_pool.py"])
def test_no_module_of_the_cache_takes_tensors_in_through_the_state_pool(path):
    assert "cache.state_pool" not in imports(path)


@named([*in_package("kernels"), *in_package("cache"), *in_package("engine")])
def test_no_kernel_and_nothing_above_it_imports_the_reference(path):
    if path.name.startswith("reference"):
        return
    found = {name for name in imports(path) if name.startswith("kernels.reference")}
    assert not found, f"the specification is for tests only: {found}"


@named([*in_package("kernels"), *in_package("cache"), *in_package("engine")])
def test_the_oracle_is_not_a_dependency_of_the_hot_path(path):
    assert not packages(path) & {"transformers", "hypothesis", "pytest"}


@named([path for path in in_package("kernels") if path.name != "__init__.py"])
def test_devices_are_told_apart_in_one_place(path):
    assert "kernels.ops_for" not in imports(path)


def test_the_layers_are_all_there():
    assert all((ROOT / name).is_dir() for name in LAYERS)
    assert len(MODULES) > 40
