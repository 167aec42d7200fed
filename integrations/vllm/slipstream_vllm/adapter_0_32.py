"""vLLM 0.32: where its runner asks for drafts, and what a step says of each request.

``GPUModelRunner.propose_draft_token_ids``, which the CPU runner inherits, knows the requests of its batch; the proposer
that it calls does not. So it is asked first whether the proposer is ours.

On a CPU, 0.32 verifies drafts of sampled requests wrongly (vLLM issue 55005): they are decoded without.
It knows nothing about drafts.
"""

from __future__ import annotations

from typing import Any

from slipstream_vllm.remote import RemoteDrafter, Row


def patch() -> None:
    """Once a process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner.propose_draft_token_ids
    if getattr(inner, "slipstream", False):
        return

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any,
                                **named: Any) -> Any:
        if not isinstance(self.drafter, RemoteDrafter):
            return inner(self, scheduler_output, sampled_token_ids, *rest, **named)
        rows = rows_of(self, scheduler_output, sampled_token_ids)
        return self.drafter.chains.step(rows, scheduler_output.finished_req_ids,
                                        scheduler_output.total_num_scheduled_tokens)

    propose_draft_token_ids.slipstream = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def rows_of(runner: Any, scheduler_output: Any, sampled: list[list[int]]) -> list[Row]:
    """The batch of ``runner`` after a step that gave ``sampled``, in the batch's order."""
    batch, verified = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens
    return [_row(runner, batch, place, request, sampled[place], len(verified.get(request, ())))
            for place, request in enumerate(batch.req_ids)]


def _row(runner: Any, batch: Any, place: int, request: str, new: list[int], drafted: int) -> Row:
    length, prompt = int(batch.num_tokens_no_spec[place]), int(batch.num_prompt_tokens[place])
    asked = runner.requests[request].sampling_params
    answer = asked.max_tokens if asked is not None and asked.max_tokens is not None else runner.max_model_len
    greedy = asked is not None and asked.temperature == 0.0
    return Row(request, length, tuple(int(token) for token in new), drafted, prompt,
               min(prompt + answer, runner.max_model_len), lambda: batch.token_ids_cpu[place, :length].tolist(),
               greedy or runner.device.type != "cpu")
