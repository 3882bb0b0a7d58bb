"""The front door: a model, its cache, and a loop that steps."""

import time
import uuid
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields
from pathlib import Path

import torch

from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import HashDomain, Namespace
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from engine.batch import Batch
from engine.config import EngineConfig, pool_sizes
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.output import EngineStats, RequestOutput
from engine.sampler import Choice, sample
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.tokenizer import Detokenizer, Tokenizer
from engine.weights import read_weights
from engine.worker import Model, Worker

Prompt = str | Seq[int]


class LLM:
    """A Qwen3.5-architecture model behind a prefix cache.

    `LLM(model_dir, **EngineConfig fields)`. One thread: `add_request`, `step` and `abort` are not
    to be called from several at once.
    """

    def __init__(self, model: str | Path, **config: object) -> None:
        known = [field.name for field in fields(EngineConfig)]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; known are {known}")
        engine_config = EngineConfig(**config)  # type: ignore[arg-type]
        model_config = ModelConfig.from_directory(model)
        dtype = getattr(torch, engine_config.dtype or model_config.weights_dtype or "float32")
        if dtype == torch.float16:
            dtype = torch.float32  # float16 weights run wider: nothing is lost
        weights = read_weights(model, model_config)
        loaded = Qwen35Model(model_config, weights, dtype=dtype, device=engine_config.device)
        self._start(loaded, engine_config, Tokenizer.from_directory(model))

    @classmethod
    def from_model(
        cls, model: Model, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> "LLM":
        """An engine around a model object that is there already."""
        self = cls.__new__(cls)
        self._start(model, config, tokenizer)
        return self

    def _start(self, model: Model, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer, self.model_config = config, tokenizer, model.config
        limit = self.model_config.max_position_embeddings
        self.max_model_len = min(limit, config.max_model_len or limit)
        shape = model.state_shape
        num_slots, num_blocks = pool_sizes(
            config,
            slot_bytes=0 if shape is None else shape.slot_bytes,
            kv_bytes_per_token=self.model_config.kv_bytes_per_token(model.dtype.itemsize),
            max_model_len=self.max_model_len,
        )
        caching, seed = config.enable_prefix_caching, config.hash_seed
        linear = None
        if shape is not None:
            linear = LinearStateBlockManager(
                num_slots,
                HashDomain("linear", config.chunk_stride, seed),
                checkpoint_every=config.checkpoint_every,
                max_num_seqs=config.max_num_seqs,
                enable_prefix_caching=caching,
            )
        self.manager = CompositeBlockManager(
            KVBlockManager(num_blocks, HashDomain("kv", config.block_size, seed)),
            linear,
            chunk_stride=config.chunk_stride,
            enable_prefix_caching=caching,
        )
        self.scheduler = Scheduler(config, self.manager)
        self.worker = Worker(model, config, num_slots=num_slots, num_blocks=num_blocks)
        self._requests: dict[str, Sequence] = {}
        self._detokenizers: dict[str, Detokenizer] = {}

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step; returns every request that got a token, and those that an abort ended.

        If the step fails, its requests start again on the next one and the error is raised.
        """
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            result = self.worker.execute(batch)
            rows = [row for row in result.rows if row.needs_logits]
            choices = [sample(r.seq, x) for r, x in zip(rows, result.logits, strict=True)]
        except BaseException:
            self.scheduler.rollback(batch)
            self._drop_finished(batch)
            raise
        broken = [row for row, choice in zip(rows, choices, strict=True) if choice is None]
        self.scheduler.commit(batch, cold=result.cold, broken=broken)
        for row, choice in zip(rows, choices, strict=True):
            if choice is not None and not row.seq.abort_requested:
                self._append(row.seq, choice)
        ended = [row.seq for row in batch.rows if row.seq.finish_reason is not None]
        told = dict.fromkeys([*(row.seq for row in rows), *ended])
        outputs = [RequestOutput.of(seq) for seq in told]
        self._drop_finished(batch)
        return outputs

    def _append(self, seq: Sequence, choice: Choice) -> None:
        """Add a new token and end the request if that is what it means."""
        if seq.first_token_time is None:
            seq.first_token_time = time.perf_counter()
        token_id = choice.token_id
        seq.append_token(token_id)
        if choice.logprobs is not None:
            seq.logprobs.append(choice.logprobs)
        if choice.logits is not None:
            seq.logits.append(choice.logits)
        stops = seq.sampling.stops_at(token_id, self.model_config.eos_token_ids)
        full = seq.num_generated >= seq.sampling.max_tokens or seq.num_tokens >= self.max_model_len
        if self._extend_text(seq, token_id, last=stops or full) or stops:
            self.scheduler.finish(seq, "stop")
        elif full:
            self.scheduler.finish(seq, "length")

    def _extend_text(self, seq: Sequence, token_id: int, *, last: bool) -> bool:
        """Decode one more token; True, and the text cut, if a stop string has appeared."""
        detokenizer = self._detokenizers.get(seq.request_id)
        if detokenizer is None:
            return False
        seen = len(seq.text)
        seq.text += detokenizer.append(token_id)
        if last:
            seq.text += detokenizer.flush()
        found = [
            at
            for stop in seq.sampling.stop
            if (at := seq.text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if found:
            seq.text = seq.text[: min(found)]
        return bool(found)

    def _drop_finished(self, batch: Batch) -> None:
        for row in batch.rows:
            if row.seq.finish_reason is not None:
                self._drop(row.seq)

    def _drop(self, seq: Sequence) -> None:
        self._requests.pop(seq.request_id, None)
        self._detokenizers.pop(seq.request_id, None)

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        adapter_id: str = "",
    ) -> str:
        """Queue a prompt (text, or token ids) and return its id.

        Requests share prefixes only within one (adapter_id, cache_salt). ValueError, and nothing
        queued, for a prompt that is empty, holds ids outside the vocabulary, or can never fit.
        """
        sampling = sampling_params or SamplingParams()
        token_ids = self._token_ids(prompt)
        self._check_fits(len(token_ids), sampling)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} needs a tokenizer, and the model has none")
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        namespace = Namespace(self.model_config.fingerprint, adapter_id, cache_salt)
        seq = Sequence(request_id, token_ids, sampling, namespace=namespace)
        self._requests[request_id] = seq
        if self.tokenizer is not None:
            self._detokenizers[request_id] = self.tokenizer.detokenizer(skip_special_tokens=True)
        self.scheduler.add(seq)
        return request_id

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer.json: give token ids, not text")
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt is text or token ids, got {type(prompt).__name__}")
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        vocab_size = self.model_config.vocab_size
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"token {token_id!r} at position {position} is not an id in [0, {vocab_size})"
                )
        return token_ids

    def _check_fits(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """The request must be able to run alone, to its last token."""
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; with max_model_len="
                f"{self.max_model_len} at most {self.max_model_len - 1} leave room for an answer"
            )
        longest = min(num_prompt_tokens + sampling.max_tokens, self.max_model_len) - 1
        needed = self.manager.kv.num_blocks_for(longest)  # the last token is never computed
        there = self.manager.kv.pool.num_ids - 1
        if needed > there:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and max_tokens={sampling.max_tokens} need "
                f"{needed} K/V blocks of {self.config.block_size} tokens; the pool has {there}"
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and give back all it holds. None if it is unknown or has ended.

        Called while its step runs, it takes effect at the end of that step.
        """
        seq = self._requests.get(request_id)
        if seq is None:
            return None
        self.scheduler.abort(seq)
        if seq.finish_reason is not None:
            self._drop(seq)
        return RequestOutput.of(seq)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Run prompts to their end, together; outputs in their order.

        A single prompt (text, or a list of ids) gives a list of one. A bad prompt raises before any
        of them is queued. If a step fails, the requests of this call are aborted. RuntimeError
        while requests of `add_request` are unfinished: their outputs would be lost.
        """
        if self.has_unfinished():
            raise RuntimeError("generate runs alone: step or abort the queued requests first")
        batch = _as_batch(prompts)
        params = (
            list(sampling_params)
            if isinstance(sampling_params, Iterable)
            else [sampling_params or SamplingParams()] * len(batch)
        )
        if len(params) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(params)} sampling_params")
        token_ids = [self._token_ids(prompt) for prompt in batch]
        for ids, sampling in zip(token_ids, params, strict=True):
            self._check_fits(len(ids), sampling)
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for ids, sampling in zip(token_ids, params, strict=True):
                request_ids.append(self.add_request(ids, sampling, cache_salt=cache_salt))
            while any(r not in outputs for r in request_ids):
                for output in self.step():
                    if output.finished:
                        outputs[output.request_id] = output
        finally:
            for request_id in request_ids:
                self.abort(request_id)
        return [outputs[r] for r in request_ids]

    def stats(self) -> EngineStats:
        """Counters and pool contents now."""
        return EngineStats.of(self.scheduler)


def _as_batch(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
