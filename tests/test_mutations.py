"""The table of mutations fits the code that it breaks."""

import ast

import pytest

from tests.mutations import MUTANTS, ROOT, Mutation, main, ordered_tests, read_mutations

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
    files |= {f"engine/{name}.py" for name in ("scheduler", "batch", "worker", "config")}
    assert files == {mutation.file for mutation in MUTATIONS}
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert len(list(MUTANTS.rglob("*.*"))) == len(files)


def test_the_tests_that_are_run_are_there_and_those_of_the_file_come_first():
    tests = ordered_tests("cache/ops.py")
    assert tests[0] == "tests/cache/test_ops.py"
    assert all((ROOT / test).is_file() for test in tests)
    cache_tests = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/cache/test_*.py")}
    assert cache_tests <= set(tests)


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
