"""Real tiny models for the engine's tests: poisoned pools, arrival plans, memoised cold runs.

The reference for bits is a cold run: an engine without prefix caching, one request at a time.
Everything that nobody owns is NaN, in the pools of every engine made here and after every step.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.weights import read_weights
from experiments.make_model import make_model

_ROOT = Path(tempfile.mkdtemp(prefix="real-model-"))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)

_KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "attention": {"layers": 2, "overrides": {"layer_types": ["full_attention"] * 2}},
    "drafts": {"draft": True},
    "recurrent": {"layers": 2, "overrides": {"layer_types": ["linear_attention"] * 2}},
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=3)


def directory(kind="float32"):
    """The model directory of a kind: one tiny model, drawn once a process."""
    return _directory(kind)


@cache
def _directory(kind):
    return make_model(_ROOT / kind, like="tiny", seed=11, **_KINDS[kind])


@cache
def _model(kind, _owner):
    config = ModelConfig.from_directory(directory(kind))
    dtype = getattr(torch, config.weights_dtype)
    draft = kind == "drafts"
    weights = read_weights(directory(kind), config, draft=draft)
    return Qwen35Model(config, weights, dtype=dtype, draft=draft)


def at_ends(every=512):
    """A placement that saves at the very ends of prompts, so that short ones have states, too."""
    return f"prompt_end+branch+every({every})"


def make_engine(kind="float32", *, owner="tests", **config):
    """A fresh engine around the kind's model; its pools hold NaN wherever nothing was written.

    Engines of one owner share a model object: use one at a time.
    """
    config = {"memory_budget_bytes": 16 << 20} | config
    tokenizer = Tokenizer.from_directory(directory(kind))
    llm = LLM.from_model(_model(kind, owner), EngineConfig(**config), tokenizer)
    poison_unowned(llm)
    return llm


def poison_unowned(llm):
    """Fill every slot and every K/V block that nobody holds with NaN, padding included.

    It waits for its turn on the stream, as whoever is given them next does.
    """
    manager, worker = llm.manager, llm.worker
    memory = None if manager.linear is None else manager.linear.memory
    if memory is not None:
        worker.stream.submit(_poison_shared(memory, worker, manager.linear.scratch))
        return
    blocks, slots = _unowned(manager.kv.pool), []
    if manager.linear is not None:
        slots = [*_unowned(manager.linear.pool), *manager.linear.scratch]

    def poison():
        worker.kv_cache[:, :, blocks] = torch.nan
        if slots:
            worker.state_pool.arena[slots] = 255  # NaN in every dtype

    worker.stream.submit(poison)


def _poison_shared(memory, worker, scratch):
    """Pages that are nobody's, and on K/V pages the blocks that nobody holds. What they are is
    looked up at once, what is returned fills them."""
    pages = [0, *memory.unused]
    slots = [*pages, *scratch]
    each = range(memory.blocks_per_page)
    blocks = [page * memory.blocks_per_page + i for page in pages for i in each]
    blocks += [b for b in _unowned(memory.blocks)[1:] if _is_kv(memory, b)]

    def poison():
        worker.state_pool.arena[slots] = 255
        worker.kv_cache[:, :, blocks] = torch.nan

    return poison


def _is_kv(memory, block):
    return memory.owners[block // memory.blocks_per_page] is memory.blocks


def _unowned(pool):
    ids = range(1, pool.num_ids)
    return [0, *(i for i in ids if not pool.ref_count(i) and not pool.is_published(i))]


@cache
def tokens(family, length):
    """The first `length` ids of one endless random text, the same at every call."""
    generator = torch.Generator().manual_seed(1000 + family)
    return tuple(torch.randint(0, 256, (4096,), generator=generator)[:length].tolist())


def fork(shared, unique, *, branch=1, family=0):
    """`shared` tokens of a common text, then `unique` tokens that only this branch has."""
    return tokens(family, shared) + tokens(100 + branch, unique)


@cache
def _cold_engine(kind):
    return make_engine(
        kind,
        owner="cold",
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        num_slots=2,
        num_blocks=65,
    )


_COLD: dict[tuple, RequestOutput] = {}


def cold(kind, prompt, sampling=GREEDY):
    """What the prompt gives cold and alone; at least `sampling.max_tokens` tokens."""
    key = (kind, tuple(prompt), replace(sampling, max_tokens=1))
    known = _COLD.get(key)
    if known is None or len(known.token_ids) < sampling.max_tokens:
        [known] = _cold_engine(kind).generate([list(prompt)], sampling)
        assert all(row.isfinite().all() for row in known.logits)
        _COLD[key] = known
    return known


def assert_cold_bits(kind, output, sampling=GREEDY):
    """The output's tokens and every one of its logits are those of a cold run, bit for bit."""
    needed = replace(sampling, max_tokens=max(1, len(output.token_ids)))
    assert_same_bits(output, cold(kind, output.prompt_token_ids, needed))


def assert_same_bits(output, reference):
    """Token by token; the reference may go on for longer."""
    assert len(output.logits) == len(output.token_ids) <= len(reference.token_ids)
    rows = zip(output.logits, reference.logits, strict=False)
    for step, (row, expected) in enumerate(rows):
        distance = (row - expected).abs().max().item()
        assert torch.equal(row, expected), (
            f"{len(output.prompt_token_ids)} prompt tokens resumed at {output.boundary}: logits of "
            f"new token {step} differ by {distance}"
        )
    assert output.token_ids == reference.token_ids[: len(output.token_ids)]


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step `step` and is aborted before step `abort_step`, if ever."""

    prompt: tuple[int, ...]
    max_tokens: int = 3
    step: int = 0
    salt: str = ""
    abort_step: int | None = None
    sampling: SamplingParams = GREEDY


def drive(llm, arrivals: Iterable[Arrival]) -> list[RequestOutput]:
    """Run all arrivals to their end, invariants checked after every step; outputs in order."""
    pending = dict(enumerate(arrivals))
    aborts = {index: arrival.abort_step for index, arrival in pending.items()}
    outputs: dict[int, RequestOutput] = {}
    total, step = len(pending), 0
    while len(outputs) < total:
        for index in [i for i, arrival in pending.items() if arrival.step <= step]:
            arrival = pending.pop(index)
            sampling = replace(arrival.sampling, max_tokens=arrival.max_tokens)
            llm.add_request(
                arrival.prompt, sampling, request_id=str(index), cache_salt=arrival.salt
            )
        for index, abort_step in aborts.items():
            if abort_step is not None and abort_step <= step and index not in outputs | pending:
                outputs[index] = llm.abort(str(index))
        for output in llm.step():
            if output.finished:
                outputs[int(output.request_id)] = output
        llm.scheduler.check()
        poison_unowned(llm)
        step += 1
        assert step < 1000, "no progress"
    assert_idle(llm)
    return [outputs[index] for index in range(total)]


def assert_idle(llm):
    """Nothing runs, so nothing is held; every query was a hit or a miss."""
    assert not llm.has_unfinished()
    llm.scheduler.check()
    stats = llm.stats()
    assert stats.requests_waiting == stats.requests_running == 0
    assert stats.slots_live == stats.blocks_in_use == 0
    kept = stats.slots_checkpoint + stats.slots_scratch
    assert stats.slots_free + kept == stats.slots_total  # each counted on its own
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.hits + sum(stats.misses.values()) == stats.queries
