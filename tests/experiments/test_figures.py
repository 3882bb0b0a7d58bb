"""Every plot can be drawn from its committed JSON alone, and a missing one is an error."""

import shutil

import pytest

from experiments.figures import SCRIPTS, main
from experiments.results_io import RESULTS


def test_every_plot_is_drawn_again_from_its_json(tmp_path, capsys):
    for name in SCRIPTS:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in SCRIPTS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png: " in printed


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_result_that_is_missing_or_broken_is_named(tmp_path, capsys, content):
    for name in SCRIPTS:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    broken = tmp_path / "restore_cost.json"
    broken.unlink()
    if content is not None:
        broken.write_text(content)
    assert main([str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"figures: {broken}: ")
