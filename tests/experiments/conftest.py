"""For the tests of the experiments: a tiny model, and an engine that restores wrong states."""

import pytest

import engine.worker
from experiments.make_model import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A directory with random weights and a tokenizer; nobody writes into it."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", like="tiny", seed=1)


@pytest.fixture
def perturb_restores(monkeypatch):
    """perturb_restores(when, factor=1.001): scale the states that the engine restores from.

    when(op, num_ops, copy) chooses the restores; without it all are scaled.
    """
    original = engine.worker.restore_linear_state_slots

    def start(when=lambda op, num_ops, copy: True, *, factor=1.001):
        def perturbed(pool, ops, has_initial_state, *, copy):
            for op in ops:
                if op.restore_requested and when(op, len(ops), copy):
                    pool.states[op.restore_src_slot_id] *= factor
            return original(pool, ops, has_initial_state, copy=copy)

        monkeypatch.setattr(engine.worker, "restore_linear_state_slots", perturbed)

    return start


@pytest.fixture
def refusal(capsys):
    """refusal(main, options): the last line of what a script says to options that it refuses."""

    def say(main, options):
        with pytest.raises(SystemExit) as stopped:
            main([str(option) for option in options])
        assert stopped.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return say
