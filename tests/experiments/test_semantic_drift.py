"""Injected faults: each alters what it says, the control nothing, and nothing stays behind."""

import json

import pytest
import torch

import experiments.semantic_drift as module
from engine import LLM, SamplingParams
from experiments.drift_answers import well_formed
from experiments.fault_injection import FAULTS, checkpoint_slots, injected
from experiments.recall_documents import RELATIONS, Fact
from experiments.semantic_drift import draw, main

STRIDE, BOUNDARY = 64, 128
DOCUMENT = [(7 * i) % 251 for i in range(200)]  # saved at 64, 128 and 192
OTHER = [(11 * i + 3) % 251 for i in range(200)]
QUESTION = [*DOCUMENT, *range(60)]  # passes 256: without a fault a state would be saved there
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, return_logits=True, ignore_eos=True)
BY_NAME = {fault.name: fault for fault in FAULTS}


def engine(model, **more):
    sizes = dict(max_num_seqs=1, num_slots=16, num_blocks=16, checkpoint_every=STRIDE)
    return LLM(model, **(sizes | dict(restore="copy") | more))


@pytest.fixture
def filled(tiny_model):
    """An engine that has read both documents, and where their states lie."""
    llm = engine(tiny_model)
    llm.generate([DOCUMENT], SamplingParams(temperature=0.0, max_tokens=1))
    llm.generate([OTHER], SamplingParams(temperature=0.0, max_tokens=1))
    where = dict(boundary=BOUNDARY, slots=checkpoint_slots(llm, DOCUMENT))
    return llm, where | dict(other_slots=checkpoint_slots(llm, OTHER))


@pytest.fixture(scope="module")
def cold(tiny_model):
    return engine(tiny_model, enable_prefix_caching=False).generate(QUESTION, GREEDY)[0]


def ask(llm, where, name, look=None):
    """The output of the question under a fault; look(state, window, K/V) sees what is read."""
    forward = llm.worker.model.forward

    def watched(inputs, pool, kv_cache):
        if inputs.num_prefill_tokens:
            [slot], [table] = inputs.prefill_slots.read.host, inputs.prefill_block_tables.host
            known = kv_cache[:, :, list(table[: BOUNDARY // STRIDE])]
            look(pool.states[slot].clone(), pool.windows[slot].clone(), known)
        return forward(inputs, pool, kv_cache)

    with injected(llm, BY_NAME[name], **where) as altered, pytest.MonkeyPatch.context() as patch:
        if look is not None:
            patch.setattr(llm.worker.model, "forward", watched)
        [output] = llm.generate(QUESTION, GREEDY)
    assert len(altered) == 1 and output.boundary == BOUNDARY
    return output


def same_bits(a, b):
    rows = zip(a.logits, b.logits, strict=True)
    return a.token_ids == b.token_ids and all(torch.equal(x, y) for x, y in rows)


def test_without_a_fault_every_bit_is_that_of_a_cold_run(filled, cold):
    llm, where = filled
    assert same_bits(ask(llm, where, "none"), cold)


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS[1:]])
def test_a_fault_alters_what_it_says_and_nothing_stays_behind(filled, cold, name):
    llm, where = filled
    pool, kv_cache = llm.worker.state_pool, llm.worker.kv_cache
    saved = {**where["slots"], **{-b: slot for b, slot in where["other_slots"].items()}}
    states = {
        b: (pool.states[slot].clone(), pool.windows[slot].clone()) for b, slot in saved.items()
    }
    before, index = llm.stats(), llm.manager.linear.cache.slot_ids()
    right, seen = [], []
    ask(llm, where, "none", lambda *read: right.extend(read))
    published = [i for i in range(1, kv_cache.shape[2]) if llm.manager.kv.pool.is_published(i)]
    known_kv = kv_cache[:, :, published].clone()

    assert not same_bits(ask(llm, where, name, lambda *read: seen.extend(read)), cold)

    state, window, kv = right
    rounded = state.bfloat16().float()
    wanted = {
        "stride_earlier": (*states[BOUNDARY - STRIDE], kv),
        "stride_later": (*states[BOUNDARY + STRIDE], kv),
        "state_zero": (torch.zeros_like(state), torch.zeros_like(window), kv),
        "window_zero": (state, torch.zeros_like(window), kv),
        "other_document": (*states[-BOUNDARY], kv),
        "kv_zero": (state, window, torch.zeros_like(kv)),
        "bfloat16": (rounded, window, kv),
        "int8": (seen[0], window, kv),  # its values: the next test
    }[name]
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen, right, strict=True))

    for boundary, slot in saved.items():
        assert torch.equal(pool.states[slot], states[boundary][0])
        assert torch.equal(pool.windows[slot], states[boundary][1])
    assert torch.equal(kv_cache[:, :, published], known_kv)
    assert llm.manager.linear.cache.slot_ids() == index, "a state was saved under a fault"
    after = llm.stats()
    for count in ("slots_live", "slots_checkpoint", "slots_free", "saves", "state_evictions"):
        assert getattr(after, count) == getattr(before, count)
    for count in ("blocks_in_use", "blocks_cached", "blocks_free"):
        assert getattr(after, count) == getattr(before, count)
    llm.scheduler.check()
    assert same_bits(ask(llm, where, "none"), cold)
    assert same_bits(llm.generate(QUESTION, GREEDY)[0], cold), "a method was left replaced"


def test_int8_has_255_levels_for_each_head(filled):
    llm, where = filled
    right, seen = [], []
    ask(llm, where, "none", lambda *read: right.extend(read))
    ask(llm, where, "int8", lambda *read: seen.extend(read))
    largest = right[0].abs().amax(dim=(-2, -1), keepdim=True)
    levels = seen[0] / largest * 127
    assert torch.allclose(levels, levels.round(), atol=1e-3) and levels.abs().max() <= 127.001
    assert levels.unique().numel() > 30, "so few levels are not an int8's"
    error = (seen[0] - right[0]).abs() / largest
    assert 0 < error.max() <= 0.5001 / 127


def test_methods_and_kv_are_put_back_when_a_request_fails(filled, cold):
    llm, where = filled

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(llm, where, "kv_zero", fail)
    llm.scheduler.check()
    assert same_bits(llm.generate(QUESTION, GREEDY)[0], cold)
    assert "_restore" not in vars(llm.worker) and "publish" not in vars(llm.manager.kv)


def test_only_a_copied_state_can_be_altered(tiny_model):
    llm = engine(tiny_model, restore="redirect")
    with (
        pytest.raises(ValueError, match="restore='redirect'; expected 'copy'"),
        injected(llm, FAULTS[0], boundary=64, slots={}, other_slots={}),
    ):
        pass


def test_well_formed_is_a_value_of_the_asked_relation():
    lives, plays = RELATIONS[:2]
    fact = Fact("Ada", lives, "Oslo")
    assert well_formed("Ada lives in Oslo.", fact) and well_formed("Ada lives in Perth.", fact)
    for text in ("", "Ada lives in Oslo", "Ada lives in viola.", "Adam lives in Oslo."):
        assert not well_formed(text, fact)
    assert not well_formed(f"Ada {plays.verb} viola.", fact)


# ---- the script

SIZES = ["--documents", "2", "--questions", "2", "--sentences", "36", "--facts", "4"]


def run(tmp_path, *more):
    path = tmp_path / "out.json"
    return main([*SIZES, "--json", str(path), *map(str, more)]), path


def test_the_script_reports_every_fault_and_a_control_without_a_difference(tmp_path, capsys):
    status, path = run(tmp_path)
    content = json.loads(path.read_text())
    assert status == 0 and content["passed"]
    rows = {row["fault"]: row for row in content["rows"]}
    assert list(rows) == [fault.name for fault in FAULTS]
    assert rows["none"]["bits_equal"] and rows["none"]["largest_logit_difference"] == 0
    assert rows["none"]["differs_from_cold"] == 0
    assert all(not row["bits_equal"] for name, row in rows.items() if name != "none")
    for row in rows.values():
        mine = [a for a in content["answers"] if a["fault"] == row["fault"]]
        assert row["answers"] == len(mine) >= 4
        assert row["exact"] == sum(a["answer"] == a["expected"] for a in mine) / len(mine)
        assert row["differs_from_cold"] == sum(a["answer"] != a["cold"] for a in mine) / len(mine)
    for document in content["documents"]:
        assert document["boundary"] == document["last_saved_boundary"] - STRIDE
        assert document["last_saved_boundary"] < document["tokens"]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(content["conclusion"].split()))
    draw(content, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == path.with_suffix(".png").read_bytes()


def test_a_control_that_differs_fails_the_run(tmp_path, monkeypatch, capsys):
    wrong = module.FAULTS[0].__class__("none", "control", BY_NAME["bfloat16"].inject)
    monkeypatch.setattr(module, "FAULTS", (wrong, *FAULTS[1:]))
    path = tmp_path / "out.json"
    path.with_suffix(".png").write_bytes(b"of the good run before")
    status, _ = run(tmp_path)
    content = json.loads(path.read_text())
    assert status == 1 and not content["passed"] and content["conclusion"] is None
    assert not path.with_suffix(".png").exists()
    assert "bits differ from the cold run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--documents", 1), "--documents 1; expected at least 2"),
        (("--questions", 5), "--questions 5; expected at most --facts 4"),
    ],
)
def test_refused_options_name_value_and_rule(refusal, options, message):
    assert message in refusal(main, [*SIZES, *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sentences", 8), "expected at least 3"),
        (("--facts", 60), "num_sentences is 36; expected at least 67"),
    ],
)
def test_documents_that_cannot_be_end_with_status_2(tmp_path, capsys, options, message):
    status, path = run(tmp_path, *options)
    assert status == 2 and not path.exists()
    assert message in capsys.readouterr().err
