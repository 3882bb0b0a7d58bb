"""The front door: a model, its cache, and a loop that steps."""

import uuid
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields
from pathlib import Path

import torch

from cache.hashing import Namespace
from engine.answer_text import AnswerText
from engine.cache_plan import CachePlan
from engine.config import EngineConfig
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.output import EngineStats, RequestOutput
from engine.requests import (
    Prompt,
    as_batch,
    as_sampling_params,
    check_text,
    grid_boundaries,
    token_ids_of,
)
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_loop import StepLoop
from engine.tokenizer import Tokenizer
from engine.weights import read_weights
from engine.worker import Model, Worker
from kernels import ops_for


class LLM:
    """A Qwen3.5-architecture model behind a prefix cache.

    `LLM(model_dir, **EngineConfig fields)`. One thread: `add_request`, `step` and `abort` are not
    to be called from several at once.
    """

    def __init__(self, model: str | Path, **config: object) -> None:
        if not isinstance(model, str | Path):
            raise ValueError(f"model must be a directory, got {model!r}")
        known = [field.name for field in fields(EngineConfig)]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; known are {known}")
        engine_config = EngineConfig(**config)  # type: ignore[arg-type]
        if engine_config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': torch finds no such device here; use device='cpu'")
        model_config = ModelConfig.from_directory(model)
        dtype = getattr(torch, engine_config.dtype or model_config.weights_dtype or "float32")
        if dtype == torch.float16:
            dtype = torch.float32  # float16 weights run wider: nothing is lost
        ops = ops_for(
            engine_config.device,
            implementation=engine_config.kernels,
            delta_rule=engine_config.delta_rule,
            matmul=engine_config.matmul,
        )
        draft = engine_config.num_speculative_tokens > 0
        weights = read_weights(model, model_config, draft=draft)
        loaded = Qwen35Model(
            model_config, weights, dtype=dtype, device=engine_config.device, ops=ops, draft=draft
        )
        self._start(loaded, engine_config, Tokenizer.from_directory(model))

    @classmethod
    def from_model(
        cls, model: Model, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> "LLM":
        """An engine around a model object that is there already, on the device it lies on."""
        device = getattr(model, "device", config.device)
        if device != config.device:
            raise ValueError(f"device={config.device!r}: the model lies on {device!r}")
        self = cls.__new__(cls)
        self._start(model, config, tokenizer)
        return self

    def _start(self, model: Model, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer, self.model_config = config, tokenizer, model.config
        limit = self.model_config.max_position_embeddings
        self.max_model_len = limit if config.max_model_len is None else config.max_model_len
        if self.max_model_len > limit:
            raise ValueError(f"max_model_len={self.max_model_len}: the model ends at {limit}")
        _check_model(model, config)
        plan = CachePlan.of(
            config,
            model.state_shape,
            kv_bytes_per_token=self.model_config.kv_bytes_per_token(
                model.dtype.itemsize, draft=model.can_draft
            ),
            max_model_len=self.max_model_len,
        )
        self.worker = Worker(
            model,
            config,
            num_slots=plan.num_slots,
            num_blocks=plan.num_blocks,
            layout=plan.layout,
        )
        self.manager = plan.manager(
            has_states=model.state_shape is not None, flops=self.model_config.prefill_flops
        )
        self.scheduler = Scheduler(config, self.manager, max_model_len=self.max_model_len)
        self._requests: dict[str, Sequence] = {}
        self._loop = StepLoop(
            self.scheduler,
            self.worker,
            overlap=config.overlaps,
            requests=self._unfinished,
            eos_token_ids=self.model_config.eos_token_ids,
            max_model_len=self.max_model_len,
        )

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step; returns every request that got a token or ended.

        If the model or the sampler fails, the step's requests start again on the next one, without
        loss, and the error is raised (with overlap: by the call after, and all requests start
        again, with an empty cache). If anything else fails, or an interrupt comes in between, all
        requests start again and the cache is empty.
        """
        return self._outputs(self._loop.step())

    def _outputs(self, advanced: Iterable[Sequence]) -> list[RequestOutput]:
        """Of those that got a token, and of every request that has ended, which is dropped."""
        ended = [seq for seq in self._requests.values() if seq.finish_reason is not None]
        outputs = [RequestOutput.of(seq) for seq in dict.fromkeys([*advanced, *ended])]
        for seq in ended:
            self._drop(seq)
        return outputs

    def _unfinished(self) -> list[Sequence]:
        return [seq for seq in self._requests.values() if seq.finish_reason is None]

    def _drop(self, seq: Sequence) -> None:
        self._requests.pop(seq.request_id, None)

    @property
    def failed_request_ids(self) -> tuple[str, ...]:
        """The requests of the step for which the last call of `step` raised."""
        return self._loop.failed_request_ids

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        adapter_id: str = "",
        exact: bool = True,
        save_points: Seq[int] = (),
        background: bool = False,
    ) -> str:
        """Queue a prompt (text, or token ids) and return its id.

        Requests share prefixes only within one (adapter_id, cache_salt). ValueError, and nothing
        queued, for a prompt that is empty, holds ids outside the vocabulary, or can never fit.

        exact: reuse only what prefill wrote: the bits of a cold run. False: also take, and leave,
            what decode steps wrote (an answer's K/V and its last state), which is equal in
            mathematics only.
        save_points: prompt lengths that later prompts are known to go on from: a state is kept at
            the grid boundary at or below each.
        background: run only in steps that nobody else needs, to have a prefix ready; not counted
            among queries, hits and prefilled tokens.
        """
        sampling = as_sampling_params(sampling_params)
        token_ids = token_ids_of(prompt, self.tokenizer, self.model_config.vocab_size)
        self._check_fits(len(token_ids), sampling)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} needs a tokenizer, and the model has none")
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        check_text("cache_salt", cache_salt)
        check_text("adapter_id", adapter_id)
        for name, value in (("exact", exact), ("background", background)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: must be a bool")
        seq = Sequence(
            request_id,
            token_ids,
            sampling,
            namespace=Namespace(self.model_config.fingerprint, adapter_id, cache_salt),
            exact=exact,
            save_points=grid_boundaries(save_points, self.config.chunk_stride),
            background=background,
        )
        self._requests[request_id] = seq
        seq.answer = AnswerText(self.tokenizer, sampling.stop)
        self.scheduler.add(seq)
        return request_id

    def _check_fits(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """The request must be able to run alone, to its last token."""
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; with max_model_len="
                f"{self.max_model_len} at most {self.max_model_len - 1} leave room for an answer"
            )
        longest = min(num_prompt_tokens + sampling.max_tokens, self.max_model_len) - 1
        needed = self.manager.kv.num_blocks_for(longest)  # the last token is never computed
        there = self.manager.kv.pool.capacity
        if needed > there:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and max_tokens={sampling.max_tokens} need "
                f"{needed} K/V blocks of {self.config.block_size} tokens; the pool has {there}"
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and give back all it holds. None if it is unknown or was reported as ended.

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
        """Whether a request is left to run, or has ended without being reported by `step`."""
        return bool(self._requests)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        adapter_id: str = "",
    ) -> list[RequestOutput]:
        """Run prompts to their end, together; outputs in their order.

        A single prompt (text, or a list of ids) gives a list of one. A bad prompt raises before any
        of them is queued. If a step fails, the requests of this call are aborted. RuntimeError
        while requests of `add_request` are unfinished: their outputs would be lost.
        """
        if self.has_unfinished():
            raise RuntimeError("generate runs alone: step or abort the queued requests first")
        batch = as_batch(prompts)
        if isinstance(sampling_params, list | tuple):
            params = [as_sampling_params(each) for each in sampling_params]
        else:
            params = [as_sampling_params(sampling_params)] * len(batch)
        if len(params) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(params)} sampling_params")
        vocab_size = self.model_config.vocab_size
        token_ids = [token_ids_of(prompt, self.tokenizer, vocab_size) for prompt in batch]
        for ids, sampling in zip(token_ids, params, strict=True):
            self._check_fits(len(ids), sampling)
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for ids, sampling in zip(token_ids, params, strict=True):
                request_ids.append(
                    self.add_request(ids, sampling, cache_salt=cache_salt, adapter_id=adapter_id)
                )
            while any(r not in outputs for r in request_ids):
                for output in self.step():
                    if output.finished:
                        outputs[output.request_id] = output
        finally:
            for request_id in request_ids:
                self.abort(request_id)
        return [outputs[r] for r in request_ids]

    @property
    def last_restore_seconds(self) -> float | None:
        """`Worker.last_restore_seconds`."""
        return self.worker.last_restore_seconds

    def stats(self) -> EngineStats:
        """Counters and pool contents now."""
        return EngineStats.of(self.scheduler, self.worker)


def _check_model(model: Model, config: EngineConfig) -> None:
    """ValueError for what this model can't do."""
    if config.num_speculative_tokens and not model.can_draft:
        raise ValueError(
            f"num_speculative_tokens={config.num_speculative_tokens}: the model was loaded "
            "without a draft head; use 0"
        )
    if config.num_speculative_tokens and model.state_shape is None:
        raise ValueError(
            f"num_speculative_tokens={config.num_speculative_tokens}: the model has no "
            "recurrent layers, and drafting starts from what lies in their slots; use 0"
        )
    if config.cuda_graphs and not model.can_capture:
        raise ValueError(
            f"cuda_graphs=True: the ops of kernels={config.kernels!r} on device="
            f"{config.device!r} read ids on the host, which no graph can; use kernels='triton' "
            "(on the CPU with TRITON_INTERPRET=1), or cuda_graphs=False"
        )
