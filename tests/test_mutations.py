"""The table of mutations fits the code that it breaks."""

import ast

import pytest

from tests.mutations import (
    KERNEL_TESTS,
    MUTANTS,
    ROOT,
    Mutation,
    main,
    ordered_tests,
    read_mutations,
)

MUTATIONS = read_mutations()
NAMES = [f"{mutation.file}: {mutation.name}" for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_the_old_text_is_there_exactly_once_and_the_new_one_is_another_program(mutation):
    source = (ROOT / mutation.file).read_text()
    mutated = mutation.apply(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    assert mutation.what


def test_a_text_that_is_there_twice_or_not_at_all_is_refused():
    mutation = Mutation("cache/ops.py", "name", "what", "old", "new")
    for source, count in (("", 0), ("old old", 2)):
        with pytest.raises(ValueError, match=f"found {count} times"):
            mutation.apply(source)
    assert mutation.apply("an old text") == "an new text"


def test_every_module_with_rules_has_mutations_and_every_name_is_its_own():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cache").glob("*.py")}
    files -= {"cache/__init__.py"}
    policy = ("scheduler", "sequence", "requests", "batch", "worker", "config", "step_loop")
    policy += ("decode_graphs", "stream", "whole_rows", "issued")
    files |= {f"engine/{name}.py" for name in policy}
    files |= {f"kernels/{name}.py" for name in KERNEL_TESTS}
    assert files == {mutation.file for mutation in MUTATIONS}
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert len(list(MUTANTS.rglob("*.*"))) == len(files)


def test_the_tests_that_are_run_are_there_and_those_of_the_file_come_first():
    tests = ordered_tests("cache/ops.py")
    assert tests[0] == "tests/cache/test_ops.py"
    assert all((ROOT / test).is_file() for test in tests)
    for name in KERNEL_TESTS:
        tests = ordered_tests(f"kernels/{name}.py")
        assert tests and all((ROOT / test).is_file() for test in tests)
    cache_tests = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/cache/test_*.py")}
    assert cache_tests <= set(ordered_tests("cache/ops.py"))


def test_every_triton_kernel_has_mutations_and_most_of_them_are_inside():
    triton = {path.stem for path in ROOT.glob("kernels/*.py") if "@triton.jit" in path.read_text()}
    assert triton <= set(KERNEL_TESTS)
    inside = dict.fromkeys(triton, 0)
    for mutation in MUTATIONS:
        name = mutation.file.removeprefix("kernels/").removesuffix(".py")
        if name in triton:
            source = (ROOT / mutation.file).read_text()
            line = source[: source.index(mutation.old)].count("\n") + 1
            inside[name] += any(
                isinstance(node, ast.FunctionDef)
                and node.lineno <= line <= node.end_lineno
                and any("jit" in ast.unparse(mark) for mark in node.decorator_list)
                for node in ast.walk(ast.parse(source))
            )
    assert min(inside.values()) >= 5 and sum(inside.values()) >= 100, inside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "argument --jobs: '0'; expected an integer of at least 1"),
        (["--only", "no such name"], "--only 'no such name': no mutation has these words"),
    ],
)
def test_options_that_leave_nothing_to_do_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
