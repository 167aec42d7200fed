"""An EAGLE head of any generation as a network: a decoder layer that reads a token and the target's state before it.

Rules:
1. The row of the token at position p reads (embedding of that token, state at p - 1) and predicts the token at p + 1.
   Its rotary position is p - 1, as where heads are trained: inputs shifted left by one.
2. EAGLE-3: ``fc`` (after norms, if the head has any there) projects target states once: when they arrive, or in the
   target before it sends them, which takes a third of the bytes; the spec then carries the weights. Draft tokens use
   the head's own output instead, before the final norm (EAGLE-3.1: after it), without ``fc``. Layers after the first,
   if there are any, are plain ones.
3. EAGLE-1 and EAGLE-2: ``fc`` joins token and state in each row. The layer has no norm before or after it: its output
   estimates the target's state after the final norm, and replaces that state for draft tokens.
4. States come in the dtype of the wire and are cast to the head's at this edge; target and head dtypes differ freely.

It knows nothing about sessions, trees or files. Source: arXiv 2401.15077, arXiv 2406.16858, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.choosing.sampling import Race
from slipstream.drafting.heads.checkpoint import LAYER, EagleHead
from slipstream.drafting.network import Output, some_tokens
from slipstream.engine.attention import Attend
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.kv import KVPool, Slots
from slipstream.engine.model import ModelConfig, Tensors, dtype_of
from slipstream.engine.native import native_or
from slipstream.engine.native.draft import NativeDraft
from slipstream.engine.native.program import Team
from slipstream.engine.ops.layer import (
    TORCH,
    DecoderLayer,
    LayerOps,
    LayerWeights,
    Linear,
    PartsNorm,
    Rope,
    Step,
    linear,
    next_norms,
    rms_norm,
)
from slipstream.engine.ops.races import MOST_DRAWN, DeviceRace, children
from slipstream.engine.runner import FeatureReader, fused_reader
from slipstream.protocol.messages import FeatureSpec

Forward = Callable[[ForwardBatch], tuple[torch.Tensor, torch.Tensor]]  # states [R, H], logits [R, V]
NORMS = (f"{LAYER}.input_layernorm.weight", f"{LAYER}.hidden_norm.weight", "norm.weight")  # of tokens, states, the head


class EagleNetwork:
    """A ``network.Network`` over an EAGLE head."""

    zero_fill = True

    def __init__(self, head: EagleHead, dtype: str, device: torch.device, num_slots: int,
                 project: bool = False, ops: LayerOps = TORCH, kernels: str = "torch", spare_slots: int = 0,
                 to_int8: bool = False, cores: int = 0, race: DeviceRace | None = None) -> None:
        """dtype: of weights, KV and features on the wire; project: let the target apply ``fc``, where rows get
        shorter by it; ops: how the layer runs; kernels: see ``native.native_or``, of an
        EAGLE-3 head; spare_slots: further slots of the pool (see ``graph``); to_int8: with kernels "native", round
        the matrices to int8 (see ``int8``); cores: see ``NativeDraft``; race: of its logits, where torch computes them.
        Raises ModelError for an unknown dtype."""
        kind = dtype_of(dtype)
        tensors = {name: t.to(device, kind, copy=True) for name, t in head.tensors.items() if t.is_floating_point()}
        config = head.config
        self.vocab_size, self.hidden_size = config.vocab_size, head.target_hidden_size
        self.max_context = config.max_context
        self.read = _reader(head, tensors, dtype, project)
        self.features: FeatureSpec | None = self.read.spec
        self.vocabulary = some_tokens(head.vocabulary, config.vocab_size, device)
        self.device, self.slots = device, Slots(num_slots)
        places = num_slots + spare_slots
        self._pool = KVPool(config.num_layers, places, config.num_kv_heads, config.head_dim, kind, device)
        self._config, self._dtype = config, kind
        self.native: NativeDraft | None = None  # kernels of our own compute
        self.race: Race | None = race
        self._device_race = race
        self.torch: TorchBody | None = None  # torch does

        def native(team: Team) -> Forward:
            body = NativeDraft(team, config, tensors, NORMS, self._pool, head.norm_before_residual,
                               self.vocabulary, to_int8, head.norm_output, cores)
            self.native, self.race = body, body.race
            return body.forward

        def on_torch() -> Forward:
            self.torch = TorchBody(config, tensors, head.joint, head.norm_before_residual, ops, head.norm_output)
            return partial(self.torch.forward, pool=self._pool)

        self._forward = native_or("torch" if head.joint else kernels, kind, device, "head", native, on_torch)

    def linears(self) -> tuple[Linear, ...]:
        """The products of a step on torch."""
        return () if self.torch is None else self.torch.linears()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """``batch.features`` [T, H]: projected target states, or this head's own states."""
        states, logits = self._forward(batch)
        return Output(logits, states)

    # Its forward taken apart, for whoever captures it (``graph``).

    @property
    def pool_slots(self) -> int:
        """Of the KV pool, those that nobody is handed included."""
        return self._pool.num_slots

    @property
    def state_type(self) -> tuple[int, torch.dtype]:
        """Width and dtype of a row's state."""
        return self._config.hidden_size, self._dtype

    def children(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``races.children``."""
        race = self._device_race
        return children(logits, k, self.vocabulary) if race is None else race.children(logits, k)

    @property
    def most_drawn(self) -> int:
        """Children that ``drawn`` finds."""
        return 0 if self._device_race is None else min(MOST_DRAWN, self._device_race.width)

    def drawn(self, logits: torch.Tensor, row_params: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``races.DeviceRace``."""
        assert self._device_race is not None
        return self._device_race.drawn(logits, row_params, k)

    def level(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, states: torch.Tensor,
              attend: Attend, wanted: torch.Tensor | None = None) -> Output:
        """Rows of token, position and slot (int64 [T]) and state [T, W]: logits and states of those that are wanted
        (int64 [R]; None: all)."""
        assert self.torch is not None, "only torch's kernels can be captured"
        step = Step(positions, slots, self.torch.rope, attend)
        out, logits = self.torch.run(step, self._pool, tokens, states, wanted)
        return Output(logits, out)

    def clear(self, slots: torch.Tensor) -> None:
        """Write zeros into these slots (int64 [M]) of the KV: unseen entries are multiplied by zero, so they must be
        finite."""
        for kv in self._pool.kv:
            kv.index_fill_(0, slots, 0)


class TorchBody:
    """What a row reads, the layers of a head, the final norm if it has one, and the head's ``lm_head``."""

    def __init__(self, config: ModelConfig, tensors: Tensors, joint: bool, norm_before_residual: bool,
                 ops: LayerOps, norm_output: bool = False) -> None:
        """joint, norm_before_residual, norm_output: see ``EagleHead``; ops: as in ``EagleNetwork``."""
        self._embedding = tensors["embed_tokens.weight"]
        self._join = Linear(tensors["fc.weight"], tensors.get("fc.bias")) if joint else None
        self._norms = None if joint else [tensors[name] for name in NORMS]
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output
        self._dtype, self._eps, device = self._embedding.dtype, config.norm_eps, self._embedding.device
        first = LayerWeights.from_tensors(config, tensors, LAYER, linear, (1 if joint else 2) * config.hidden_size,
                                          input_norm=False)
        further = (LayerWeights.from_tensors(config, tensors, f"layers.{layer}", linear)
                   for layer in range(1, config.num_layers))
        self._layers = [DecoderLayer(weights, ops) for weights in (first, *further)]
        self._behind = next_norms(self._layers, None if self._norms is None else self._norms[2])
        self._lm_head = Linear(tensors["lm_head.weight"])
        self.rope = Rope(config, self._dtype, device)
        self.attention = attention_for(config, self._dtype, device)

    def linears(self) -> tuple[Linear, ...]:
        """The products that may be replaced."""
        of_layers = (product for layer in self._layers for product in layer.linears())
        return *(() if self._join is None else (self._join,)), *of_layers, self._lm_head

    def forward(self, batch: ForwardBatch, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """``batch.features`` [T, H] -> of the rows with logits: states [R, H], logits [R, V] in float32 (float64 of a
        float64 head)."""
        assert batch.features is not None
        return self.run(Step.of(batch, self.rope, self.attention), pool, batch.tokens, batch.features,
                        batch.logit_rows)

    def run(self, step: Step, pool: KVPool, tokens: torch.Tensor, states: torch.Tensor,
            wanted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that are planned; wanted: int64 [R], None for all."""
        out, normed = self._inputs(tokens, states)
        for layer, norm, kv in zip(self._layers, self._behind, pool.kv, strict=True):
            out, normed = layer(out, normed, step, kv, norm)
        if wanted is not None:
            out, normed = out.index_select(0, wanted), normed.index_select(0, wanted)
        logits = self._lm_head(normed)
        return normed if self._norm_output else out, logits.to(torch.promote_types(self._dtype, torch.float32))

    def _inputs(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [T], states [T, H] -> what the first layer adds to [T, H], and what it reads [T, in]."""
        token = F.embedding(tokens, self._embedding)
        if self._join is not None:
            joined = self._join(torch.cat((token, state), -1))
            return joined, joined
        assert self._norms is not None
        of_tokens, of_states, _ = self._norms
        normed = rms_norm(state, of_states, self._eps)
        read = torch.cat((rms_norm(token, of_tokens, self._eps), normed), -1)
        return normed if self._norm_before_residual else state, read


def _reader(head: EagleHead, tensors: Tensors, dtype: str, project: bool) -> FeatureReader:
    """Rules 2 and 3. tensors: by name, where the head computes."""
    fc, width = tensors["fc.weight"], len(head.taps) * head.target_hidden_size
    if head.joint:
        return FeatureReader(FeatureSpec(head.taps, width, dtype), fc.device, fc.dtype)
    bias = tensors.get("fc.bias")
    return fused_reader(head.taps, dtype, project, fc, _norm(tensors, width, len(head.taps), head.config.norm_eps),
                        None if bias is None else lambda rows: rows + bias)


def _norm(tensors: Tensors, width: int, num_taps: int, eps: float) -> PartsNorm | None:
    """The norm of ``width`` numbers before ``fc``, if there is one."""
    if "input_norm.weight" in tensors:
        return PartsNorm(tensors["input_norm.weight"], width, eps)
    if "fc_norm.0.weight" in tensors:
        weight = torch.cat([tensors[f"fc_norm.{i}.weight"] for i in range(num_taps)])
        return PartsNorm(weight, width // num_taps, eps)
    return None
