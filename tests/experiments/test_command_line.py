"""Every experiment of the Makefile asks one question, which is in the list, in the same words."""

import re
from argparse import Namespace
from importlib import import_module

import pytest

from experiments.command_line import fill_in, new_parser, question
from experiments.figures import SCRIPTS
from experiments.results_io import ROOT

EXPERIMENTS = re.search(r"^EXPERIMENTS := (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
ALONE = ["policies", "regression"]  # run by hand: the traces, a server and a load generator
LIST = (ROOT / "experiments" / "README.md").read_text()


def test_the_list_of_the_makefile_is_the_one_of_the_figures():
    assert ["warm_start", *EXPERIMENTS, *ALONE] == list(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_line_is_the_question_of_the_list(name):
    assert (ROOT / "experiments" / f"{name}.py").is_file()
    first = question(import_module(f"experiments.{name}").__doc__)
    assert first.endswith("?")
    assert f"| {first} | `{name}.py` | `results/{name}.json`, `.png` |" in LIST


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_experiment_has_the_options_that_make_gives_it(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(f"experiments.{name}").main(["--help"])
    assert stopped.value.code == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--json", "--threads"} <= options
    assert ("--small" in options) is (name != "warm_start")
    assert ("--model" in options) is (name not in ("restore_cost", *ALONE))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_question_of_the_results_is_that_of_the_script(name):
    script = import_module(f"experiments.{name}")
    assert question(script.__doc__) == script.QUESTION


@pytest.mark.parametrize("small", [True, False])
def test_sizes_that_were_given_are_kept_and_the_others_are_those_of_the_run(small):
    options = Namespace(small=small, turns=None, slots=[7])
    fill_in(options, {"turns": 2, "slots": [1]}, {"turns": 8, "slots": [2]})
    assert (options.turns, options.slots) == (2 if small else 8, [7])


def test_results_go_beside_the_others_unless_another_file_is_named():
    parser = new_parser("x", "Why?\n\nMore.")
    assert parser.description == "Why?"
    options = parser.parse_args([])
    assert options.json == ROOT / "experiments" / "results" / "x.json"
    assert options.small is False and options.threads == 1
    assert not hasattr(new_parser("x", "Why?", small=None).parse_args([]), "small")
