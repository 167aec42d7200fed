"""The adapter for vLLM 0.32: it patches the methods in which the runner asks for drafts and chooses tokens, and reads a
step's results.

``GPUModelRunner.propose_draft_token_ids``, which the CPU runner inherits, has the requests of its batch; the proposer
that it calls does not. So the patch checks whether the proposer is ours. States of inner layers come in the way of
vLLM's own EAGLE-3: its setup gets our layers.

``GPUModelRunner._sample`` chooses tokens: with our noise (``sampling``), if keyed sampling is on. If it is off, sampled
requests are decoded without drafts on a CPU, because 0.32 verifies them wrongly there (vLLM issue 55005).
All of this is private to vLLM: a release that lacks a part of it is refused before anything is changed.
It knows nothing about drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.base.errors import ConfigError
from slipstream.following.chains import GREEDY, SWITCH, Row
from slipstream.observe.log import logger
from slipstream.observe.spans import HEADER
from slipstream_vllm.features import Batch, FinalNorm
from slipstream_vllm.sampling import ChoiceRequest, KeyedSampling, refusal, with_named_tokens
from slipstream_vllm.signals import patch as patch_signals

# Methods of vLLM's runner, sampler and rejection sampler that are wrapped or called.
PARTS = (
    ("propose_draft_token_ids", "_setup_eagle3_aux_hidden_state_outputs", "_get_eagle3_aux_layers_from_config",
     "_input_fits_in_drafter", "_sample", "_bookkeeping_sync", "_update_states"),
    ("sample", "greedy_sample", "compute_logprobs", "gather_logprobs", "gather_specific_token_logprobs"),
    ("apply_logits_processors", "forward", "_get_logprobs_tensors"),
)


def patch(kind: type[Any]) -> None:
    """Patch vLLM; once a process. kind: our class of drafters. Raises ConfigError where vLLM lacks an expected
    method."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "slipstream"):
        return
    patched = (GPUModelRunner, Sampler, RejectionSampler)
    if missing := [f"{owner.__name__}.{name}" for owner, names in zip(patched, PARTS, strict=True) for name in names
                   if not hasattr(owner, name)]:
        raise ConfigError(f"this release of vLLM has no {', '.join(missing)}: install vLLM 0.32.0, or leave out "
                          "--speculative-config")
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    GPUModelRunner.slipstream = True
    RejectionSampler.forward = with_named_tokens(RejectionSampler.forward)
    inner = GPUModelRunner.propose_draft_token_ids

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any,
                                hidden_states: Any, sample_hidden_states: Any, aux_hidden_states: Any, *args: Any,
                                **kwargs: Any) -> Any:
        if not isinstance(self.drafter, kind):
            return inner(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states,
                         sample_hidden_states, aux_hidden_states, *args, **kwargs)
        if not self.drafter.connects:
            return [[] for _ in self.input_batch.req_ids]
        if (states := self.drafter.states) is not None:
            states.keep(lambda: batch_of(self, scheduler_output, sampled_token_ids, is_full_attention_spec),
                        aux_hidden_states, hidden_states, self.drafter.chains.reads_features)
        return self.drafter.chains.step_lazily(lambda: rows_of(self, scheduler_output, sampled_token_ids),
                                               len(self.input_batch.req_ids), scheduler_output.finished_req_ids,
                                               scheduler_output.total_num_scheduled_tokens)

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    _patch_taps(GPUModelRunner)
    _patch_reach(GPUModelRunner, kind)
    patch_sampling(GPUModelRunner)
    patch_seeds(GPUModelRunner)
    _patch_ends(GPUModelRunner, kind)
    patch_signals()


def _patch_taps(runner: Any) -> None:
    """Let the model return the states of the configured layers; vLLM asks for them when it loads, before compiling."""
    inner = runner._setup_eagle3_aux_hidden_state_outputs

    def setup(self: Any) -> None:
        states = getattr(getattr(self, "drafter", None), "states", None)
        if states is not None:
            if self.drafter.connects:
                width, dtype, device = self.model_config.get_hidden_size(), self.model_config.dtype, self.device
                states.allocate(width, dtype, device, final_norm(self.get_model(), width, dtype, device))
            if layers := states.taps.inner:
                self.use_aux_hidden_state_outputs = True
                self._get_eagle3_aux_layers_from_config = lambda: layers
        inner(self)

    runner._setup_eagle3_aux_hidden_state_outputs = setup


def final_norm(model: Any, width: int, dtype: torch.dtype, device: torch.device) -> FinalNorm | None:
    """The norm that ``model`` applies only when it computes logits; None: its states are right already. Drafters read
    the normed state, but some models of vLLM (MiMo's) return the one before their final norm."""
    norm, logits = getattr(getattr(model, "model", None), "norm", None), getattr(model, "logits_processor", None)
    if norm is None or logits is None:
        return None
    row = torch.linspace(-1.0, 2.0, width, dtype=dtype, device=device)[None]
    captured = list[torch.Tensor]()

    def capture(_: Any, args: tuple[Any, ...]) -> None:
        captured.append(args[1])
        raise _Captured  # the rest of the call is not needed, and would wait for other ranks

    handle = logits.register_forward_pre_hook(capture)
    try:
        with torch.inference_mode(), suppress(_Captured):
            model.compute_logits(row.clone())
        normed: torch.Tensor = norm(row.clone())
    except Exception as error:
        logger("vllm").warning("whether the final norm stands before the last states is not known", why=repr(error))
        return None
    finally:
        handle.remove()
    final: FinalNorm = norm
    return final if captured and torch.equal(captured[0], normed) else None


class _Captured(Exception):
    """Ends the trial call in ``final_norm`` once the state was seen."""


def _patch_reach(runner: Any, kind: type[Any]) -> None:
    """vLLM skips the proposer for all requests if one is near the longest context. Ours needs no room there."""
    inner = runner._input_fits_in_drafter

    def fits(self: Any, common_attn_metadata: Any) -> bool:
        if isinstance(self.drafter, kind):
            return common_attn_metadata is not None
        return bool(inner(self, common_attn_metadata))

    runner._input_fits_in_drafter = fits


def patch_sampling(runner: Any) -> None:
    inner = runner._sample

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        keyed = keyed_of(self)
        requests = choice_requests(self, keyed, spec_decode_metadata) if keyed is not None else ()
        if keyed is None or not requests:
            return inner(self, logits, spec_decode_metadata)
        self.input_batch.generators.clear()  # a CPU's cannot be set back, as vLLM does after a part of a prompt
        with keyed.step(requests):
            return inner(self, logits, spec_decode_metadata)

    runner._sample = _sample


def patch_seeds(runner: Any) -> None:
    """A step with a part of a prompt draws a token that is not used. vLLM then resets the request's generator, which
    raises for a CPU generator and ends the engine. So on a CPU such a draw uses no generator of a request."""
    sample, book = runner._sample, runner._bookkeeping_sync

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        self.slipstream_aside = {}
        if self.device.type == "cpu":
            batch = self.input_batch
            parts = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs]).tolist()
            self.slipstream_aside = {index: batch.generators.pop(index) for index in parts if index in batch.generators}
        return sample(self, logits, spec_decode_metadata)

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return book(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self.slipstream_aside)

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


def keyed_of(runner: Any) -> KeyedSampling | None:
    """The keyed sampling of ``runner``; None: vLLM chooses alone."""
    drafter: Any = getattr(runner, "drafter", None)
    if not getattr(drafter, "keyed", False):  # only ours has it
        return None
    if drafter.chooser is None:
        if why := refusal(runner.vllm_config):
            drafter.keyed = False
            logger("vllm").warning("sampling is not keyed", why=why)
            return None
        drafter.chooser = KeyedSampling(runner.sampler, runner.rejection_sampler, runner.model_config.seed,
                                        runner.input_batch.vocab_size)
    keyed: KeyedSampling = drafter.chooser
    return keyed


def choice_requests(runner: Any, keyed: KeyedSampling, spec: Any) -> list[ChoiceRequest]:
    """The requests of the batch for which tokens are chosen now; empty if all are greedy."""
    batch = runner.input_batch
    keyed.cache.keep(batch.req_ids)
    if batch.sampling_metadata.all_greedy:
        return []
    return [ChoiceRequest(keyed.cache.of(request, runner.requests[request].sampling_params)[1],
                          int(batch.num_tokens_no_spec[index]), spec.num_draft_tokens[index] if spec is not None else 0)
            for index, request in enumerate(batch.req_ids)]


def _patch_ends(runner: Any, kind: type[Any]) -> None:
    """Close the last requests too: they end in a step that computes nothing, so the proposer is not called."""
    inner = runner._update_states

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if scheduler_output.finished_req_ids and isinstance(drafter, kind):
            drafter.chains.close_finished(scheduler_output.finished_req_ids)
        return inner(self, scheduler_output)

    runner._update_states = _update_states


def rows_of(runner: Any, scheduler_output: Any, sampled: list[list[int]]) -> list[Row]:
    """The requests of ``runner`` after a step, in the batch's order; sampled: the new tokens of each. vLLM checks
    ``min_tokens`` for the token after draft tokens as if these were not there, so fewer are drafted near that limit."""
    batch, verified, keyed = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens, keyed_of(runner)
    count, requests, longest = len(batch.req_ids), runner.requests, runner.max_model_len
    scheduled = scheduler_output.num_spec_tokens_to_schedule  # fewer in large batches, if vLLM is told so
    verifiable = runner.device.type != "cpu" or keyed is not None  # drafts of sampled requests, too
    embedded = getattr(batch, "req_prompt_embeds", {})
    facts = zip(batch.req_ids, sampled, batch.num_tokens_no_spec[:count].tolist(),
                batch.num_prompt_tokens[:count].tolist(), strict=True)
    rows = list[Row]()
    for index, (request, new, length, prompt) in enumerate(facts):
        params = requests[request].sampling_params
        drafted = len(verified[request]) if request in verified else 0
        most, extra, least = params.max_tokens, params.extra_args, prompt + params.min_tokens - length
        rows.append(Row(request, length, tuple(new), drafted, prompt,
                        longest if most is None else min(prompt + most, longest),
                        partial(text_of, batch, index, length, index in embedded),
                        verifiable or params.temperature == 0.0,
                        GREEDY if keyed is None else keyed.cache.of(request, params)[0],
                        extra.get(SWITCH) if extra else None, None, extra.get(HEADER) if extra else None,
                        min(scheduled, least - 1) if least > 0 else scheduled, ends(params, new)))
    return rows


def ends(params: Any, new: list[int]) -> bool:
    """Whether vLLM's scheduler ends a request at one of the tokens that a step gave it."""
    stops = params.stop_token_ids or ()
    return not {params.eos_token_id, *stops}.isdisjoint(new)


def text_of(batch: Any, index: int, length: int, embedded: bool) -> list[int]:
    """The first ``length`` tokens of row ``index``. An image's placeholder may be an id beyond the vocabulary, which
    drafts refuse and which would crash the engine in verification, so it becomes token 0; so does, in an ``embedded``
    prompt, what is no token: the row there has the text of the request before."""
    tokens = batch.token_ids_cpu[index, :length]
    valid = (tokens >= 0) & (tokens < batch.vocab_size)
    if embedded:
        valid &= batch.is_token_ids[index, :length]
    text: list[int] = np.where(valid, tokens, 0).tolist()
    return text


def batch_of(runner: Any, scheduler_output: Any, sampled: list[list[int]], is_lasting: Callable[[Any], bool]) -> Batch:
    """The rows and KV blocks of each request in the step, for ``features``. The blocks are those of the first KV group
    whose spec ``is_lasting``, or else of the first. In a group of sliding windows vLLM gives blocks before the window
    to others, and the runner's table does not say so. With decode context parallelism a block is one of each rank."""
    batch, groups = runner.input_batch, runner.kv_cache_config.kv_cache_groups
    lasting = next((index for index, group in enumerate(groups) if is_lasting(group.kv_cache_spec)), 0)
    count, table = len(batch.req_ids), batch.block_table[lasting]
    scheduled = np.array([scheduler_output.num_scheduled_tokens[request] for request in batch.req_ids], np.int64)
    computed = batch.num_computed_tokens_cpu[:count].astype(np.int64)
    new = np.array([len(tokens) for tokens in sampled], np.int64)
    # The newest token has no KV yet; later rows are those of refused draft tokens.
    ends = np.where(new > 0, batch.num_tokens_no_spec[:count] - 1, computed + scheduled)
    return Batch(list(batch.req_ids), scheduled, computed, ends, new, batch.token_ids_cpu, table.get_numpy_array(),
                 table.block_size * table.dcp_world_size)
