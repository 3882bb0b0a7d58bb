"""The dense Qwen3.5 text decoder on packed rows, states in slots and K/V in blocks."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from cache.shared_memory import PageLayout
from cache.state_pool import StatePool, StateShape
from engine.batch import ModelInputs, ScheduledRow, draft_inputs
from engine.draft_head import DraftHead
from engine.model_config import ModelConfig
from engine.weights import expected_tensors
from kernels import Ops, ops_for
from kernels.heads import split_heads
from kernels.ids import Ids

Tensors = dict[str, torch.Tensor]


_ROW_MULTIPLE = 8  # elements: rows of a projection start at multiples of 16 bytes


class GatedDeltaNet:
    """One linear-attention mixer. Its state lives in layer `index` of the state pool."""

    def __init__(self, tensors: Tensors, config: ModelConfig, index: int, ops: Ops) -> None:
        self.config, self.index, self.ops = config, index, ops
        parts = [tensors.pop(f"in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]
        num_rows = sum(len(part) for part in parts)
        padding = parts[0].new_zeros(-num_rows % _ROW_MULTIPLE, config.hidden_size)
        self.in_proj = ops.linear(torch.cat([*parts, padding]))
        conv_weight = tensors.pop("conv1d.weight").squeeze(1)
        self.conv_weight = conv_weight.t().contiguous().t()  # [C, W], channels side by side
        self.A_log = tensors.pop("A_log").float()
        self.dt_bias = tensors.pop("dt_bias").float()
        self.norm = tensors.pop("norm.weight").float()
        self.out_proj = ops.linear(tensors.pop("out_proj.weight"))

    def __call__(self, x: torch.Tensor, inputs: ModelInputs, pool: StatePool) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]"""
        c = self.config
        heads = c.linear_num_value_heads
        P, N = inputs.num_prefill_tokens, inputs.num_decodes
        used = [c.conv_channels, c.value_channels, heads, heads]
        qkv, z, b, a = self.in_proj(x, P)[:, : sum(used)].split(used, dim=-1)
        mixed = []
        if P:
            mixed.append(self._prefill(qkv[:P], a[:P], b[:P], inputs, pool))
        if N:
            mixed.append(self._step(qkv[P:], a[P:], b[P:], inputs, pool))
        o = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        z = z.unflatten(-1, (heads, -1))
        normed = self.ops.gated_rms_norm(o, z, self.norm, eps=c.rms_norm_eps)
        return self.out_proj(normed.flatten(1), P)

    def _prefill(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inputs: ModelInputs,
        pool: StatePool,
    ) -> torch.Tensor:
        where = dict(
            cu_seqlens=inputs.cu_seqlens,
            read_slots=inputs.prefill_slots.read,
            write_slots=inputs.prefill_slots.write,
            snapshot_slots=inputs.snapshot_slots,
        )
        windows, states = pool.windows[:, self.index], pool.states[:, self.index]
        qkv = self.ops.causal_conv_prefill(qkv, self.conv_weight, windows, **where)
        q, k, v = split_heads(qkv, states, self.config.linear_num_key_heads)
        g, beta = self.ops.delta_gates(a, b, self.A_log, self.dt_bias)
        return self.ops.gated_delta_prefill(q, k, v, g, beta, states, **where)

    def _step(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inputs: ModelInputs,
        pool: StatePool,
    ) -> torch.Tensor:
        return self.ops.gated_delta_net_step(
            qkv,
            a,
            b,
            self.conv_weight,
            self.A_log,
            self.dt_bias,
            pool.windows[:, self.index],
            pool.states[:, self.index],
            num_key_heads=self.config.linear_num_key_heads,
            read_slots=inputs.decode_slots.read,
            write_slots=inputs.decode_slots.write,
            cu_seqlens=inputs.decode_cu_seqlens,
        )


class GatedAttention:
    """One full-attention mixer. Its K/V live in layer `index` of the K/V cache."""

    def __init__(self, tensors: Tensors, config: ModelConfig, index: int, ops: Ops) -> None:
        self.config, self.index, self.ops = config, index, ops
        self.in_proj = ops.linear(torch.cat([tensors.pop(f"{name}_proj.weight") for name in "qkv"]))
        self.q_norm = tensors.pop("q_norm.weight").float()
        self.k_norm = tensors.pop("k_norm.weight").float()
        self.out_proj = ops.linear(tensors.pop("o_proj.weight"))

    def __call__(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        kv_cache: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]"""
        c, ops = self.config, self.ops
        P, N = inputs.num_prefill_tokens, inputs.num_decodes
        q_gate = self.write_kv(x, inputs, kv_cache, rotations)
        # Per head: query, then gate.
        q, gate = q_gate.unflatten(-1, (c.num_attention_heads, 2, c.head_dim)).unbind(2)
        q = ops.qk_norm_rotary(q, self.q_norm, *rotations, eps=c.rms_norm_eps)
        k_cache, v_cache = kv_cache[self.index]
        mixed = []
        if P:
            prefilled = ops.attention_prefill(
                q[:P],
                gate[:P],
                k_cache,
                v_cache,
                cu_seqlens=inputs.cu_seqlens,
                start_positions=inputs.start_positions,
                block_tables=inputs.prefill_block_tables,
            )
            mixed.append(prefilled)
        if N:
            decoded = ops.attention_decode(
                q[P:],
                gate[P:],
                k_cache,
                v_cache,
                kv_lens=inputs.kv_lens,
                block_tables=inputs.decode_block_tables,
            )
            mixed.append(decoded)
        o = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self.out_proj(o.flatten(1), P)

    def write_kv(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        kv_cache: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Write the K/V rows of x [R, hidden]; returns the queries and gates as projected."""
        c = self.config
        heads, kv, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        projected = self.in_proj(x, inputs.num_prefill_tokens)
        q_gate, k, v = projected.split([2 * heads * D, kv * D, kv * D], dim=-1)
        k = self.ops.qk_norm_rotary(
            k.unflatten(-1, (kv, D)), self.k_norm, *rotations, eps=c.rms_norm_eps
        )
        k_cache, v_cache = kv_cache[self.index]
        v = v.unflatten(-1, (kv, D))
        self.ops.write_kv(k, v, k_cache, v_cache, inputs.kv_indices)
        return q_gate


class DecoderLayer:
    """Norm, mixer, norm, SwiGLU, with residuals."""

    def __init__(
        self, tensors: Tensors, config: ModelConfig, kind: str, index: int, ops: Ops
    ) -> None:
        self.eps, self.ops = config.rms_norm_eps, ops
        self.input_norm = tensors.pop("input_layernorm.weight").float()
        self.post_norm = tensors.pop("post_attention_layernorm.weight").float()
        gate_up = [tensors.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        self.gate_up = ops.linear(torch.cat(gate_up))
        self.down = ops.linear(tensors.pop("mlp.down_proj.weight"))
        mixer_type = GatedDeltaNet if kind == "linear_attention" else GatedAttention
        mixer = {name.split(".", 1)[1]: tensors.pop(name) for name in list(tensors)}
        self.mixer: GatedDeltaNet | GatedAttention = mixer_type(mixer, config, index, ops)
        assert not mixer, f"tensors that no layer uses: {sorted(mixer)}"

    def __call__(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        pool: StatePool | None,
        kv_cache: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]; x is consumed."""
        h = self.ops.rms_norm(x, self.input_norm, eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            assert pool is not None
            x += self.mixer(h, inputs, pool)
        else:
            x += self.mixer(h, inputs, kv_cache, rotations)
        h = self.ops.rms_norm(x, self.post_norm, eps=self.eps)
        P = inputs.num_prefill_tokens
        x += self.down(self.ops.swiglu(self.gate_up(h, P)), P)
        return x

    def write_kv(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        kv_cache: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Of an attention layer: write the K/V rows of x [R, hidden], and compute no more."""
        assert isinstance(self.mixer, GatedAttention)
        h = self.ops.rms_norm(x, self.input_norm, eps=self.eps)
        self.mixer.write_kv(h, inputs, kv_cache, rotations)


class Qwen35Model:
    """All layers, the embedding and the head.

    ops: `kernels.ops_for`; None: what the device takes by itself.
    weights: (canonical name, tensor), one at a time (`engine.weights.read_weights`); each layer is
    packed when its last tensor has come, so at most one layer is held twice.
    draft: build the draft head too; the weights hold its `mtp.*` tensors.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        ops: Ops | None = None,
        draft: bool = False,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.ops = ops_for(device) if ops is None else ops
        self.ops.check_model(
            device=device,
            dtype=dtype,
            hidden_size=config.hidden_size,
            head_dim=config.head_dim,
            linear_key_head_dim=config.linear_key_head_dim,
            linear_value_head_dim=config.linear_value_head_dim,
        )
        self._layers: dict[int, DecoderLayer] = {}
        sizes = Counter(
            int(name.split(".")[1])
            for name in expected_tensors(config)
            if name.startswith("layers.")
        )
        pending: dict[int, Tensors] = {}
        mtp: Tensors = {}
        for name, tensor in weights:
            vector = tensor.ndim == 1  # norms, A_log, dt_bias stay as precise as the files are
            tensor = tensor.to(device, tensor.dtype if vector else dtype)
            if name.startswith("mtp."):
                mtp[name.removeprefix("mtp.")] = tensor
                continue
            if not name.startswith("layers."):
                self._take(name, tensor)
                continue
            _, number, rest = name.split(".", 2)
            tensors = pending.setdefault(int(number), {})
            tensors[rest] = tensor
            if len(tensors) == sizes[int(number)]:
                self._layers[int(number)] = self._build(int(number), pending.pop(int(number)))
        assert not pending, f"incomplete layers {sorted(pending)}"
        self.layers = [self._layers[i] for i in range(config.num_hidden_layers)]
        if config.tie_word_embeddings:
            self.head = self.ops.linear(self.embedding)
        self._cos, self._sin = (table.to(device) for table in _rotations(config))
        self.draft_head = self._build_draft_head(mtp) if draft else None

    def _build_draft_head(self, tensors: Tensors) -> DraftHead:
        prefix = "layers.0."
        names = [name for name in tensors if name.startswith(prefix)]
        of_layer = {name.removeprefix(prefix): tensors.pop(name) for name in names}
        index = self.config.num_full_layers  # behind the K/V of the model's own layers
        layer = DecoderLayer(of_layer, self.config, "full_attention", index, self.ops)
        return DraftHead(
            tensors, layer, self.config, self.ops, embedding=self.embedding, head=self.head
        )

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed_tokens.weight":
            self.embedding = tensor
        elif name == "norm.weight":
            self.norm = tensor.float()
        else:
            assert name == "lm_head.weight", name
            self.head = self.ops.linear(tensor)

    def _build(self, number: int, tensors: Tensors) -> DecoderLayer:
        kind = self.config.layer_types[number]
        index = self.config.layer_types[:number].count(kind)
        return DecoderLayer(tensors, self.config, kind, index, self.ops)

    # ---- what the engine needs to know

    @property
    def can_draft(self) -> bool:
        return self.draft_head is not None

    @property
    def can_capture(self) -> bool:
        return self.ops.can_capture

    @property
    def state_shape(self) -> StateShape | None:
        c = self.config
        if c.num_linear_layers == 0:
            return None
        return StateShape(
            num_layers=c.num_linear_layers,
            num_value_heads=c.linear_num_value_heads,
            value_dim=c.linear_value_head_dim,
            key_dim=c.linear_key_head_dim,
            window_rows=c.linear_conv_kernel_dim - 1,
            conv_channels=c.conv_channels,
            window_dtype=self.dtype,
            hidden_size=0 if self.draft_head is None else c.hidden_size,
        )

    def make_pools(
        self, num_slots: int, num_blocks: int, block_size: int, layout: PageLayout | None = None
    ) -> tuple[StatePool | None, torch.Tensor]:
        """The state pool, and K/V [full layers, 2, num_blocks, block_size, kv, D], both zeroed.

        layout: both in one memory of `num_slots` pages; None: each in its own.
        """
        c = self.config
        shape = self.state_shape
        layers = c.num_full_layers + (self.draft_head is not None)
        sizes = (layers, 2, num_blocks, block_size, c.num_key_value_heads, c.head_dim)
        if layout is None or shape is None:
            pool = None if shape is None else StatePool(num_slots, shape, self.device, self.ops)
            return pool, torch.zeros(sizes, dtype=self.dtype, device=self.device)
        memory = torch.zeros(num_slots, layout.page_bytes, dtype=torch.uint8, device=self.device)
        pool = StatePool(num_slots, shape, self.device, self.ops, memory)
        row = c.num_key_value_heads * c.head_dim
        block_stride = layout.block_bytes // self.dtype.itemsize
        strides = (2 * block_size * row, block_size * row, block_stride, row, c.head_dim, 1)
        return pool, memory.view(self.dtype).as_strided(sizes, strides)

    def copy_blocks(
        self, kv_cache: torch.Tensor, sources: list[int], destinations: list[int]
    ) -> None:
        """Copy whole blocks of the K/V cache, all layers, K and V. No block is both."""
        self.ops.copy_blocks(kv_cache, sources, destinations)

    def forward(
        self, inputs: ModelInputs, pool: StatePool | None, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Logits [num_logits, vocab] float32 of `inputs.logit_rows`; states and K/V in place."""
        x = self.embedding[inputs.token_ids]
        rotations = self._cos[inputs.positions], self._sin[inputs.positions]
        for layer in self.layers:
            x = layer(x, inputs, pool, kv_cache, rotations)
        eps = self.config.rms_norm_eps
        if inputs.hidden is not None:
            assert pool is not None and self.draft_head is not None
            hidden = self.ops.rms_norm(x, self.norm, eps=eps)
            self.draft_head.remember(hidden, inputs, pool.hidden, kv_cache, rotations)
        if not len(inputs.logit_rows):
            return torch.empty(0, self.config.vocab_size, device=x.device)
        rows = x[inputs.logit_rows]
        return self.head(self.ops.rms_norm(rows, self.norm, eps=eps)).float()

    def draft(
        self,
        rows: Seq[ScheduledRow],
        read_slots: Seq[int],
        pool: StatePool,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """The tokens that are likeliest to follow each row's last known one: `num_drafts` of it.

        read_slots: where each row finds its state, and the hidden row that goes with it.
        """
        assert self.draft_head is not None
        tokens = Ids([row.seq.token_ids[row.start] for row in rows], self.device).tensor
        hidden = pool.hidden[Ids(read_slots, self.device).tensor]
        guessed = []
        block_size = kv_cache.shape[3]
        for depth in range(max(row.num_drafts for row in rows)):
            inputs = draft_inputs(rows, depth, block_size=block_size, device=self.device)
            rotations = self._cos[inputs.positions], self._sin[inputs.positions]
            tokens, hidden = self.draft_head.guess(tokens, hidden, inputs, kv_cache, rotations)
            guessed.append(tokens)
        columns = torch.stack(guessed, dim=1).tolist()
        return [ids[: row.num_drafts] for ids, row in zip(columns, rows, strict=True)]


def _rotations(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, rotary_dim / 2] of all positions: each has one value for good."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponents)
    return angles.cos(), angles.sin()
