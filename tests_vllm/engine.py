"""vLLM's engine on the default model, for another process: orders as JSON lines in, answers as JSON lines out.

    python engine.py MODEL '{"drafts": ["127.0.0.1:8052"]}' '{"max_num_seqs": 4}'
    {"prompts": [...], "batch": 8, "sampling": {"max_tokens": 48}, "each": [], "chat": true}
                                                                     ->  {"tokens": [[...], ...], "accepted": 12, ...}

The first two arguments behind the model: our options (null: no drafts), and settings of ``LLM``. "each" are more of
``SamplingParams``, one a prompt; "structured_outputs" among it is an object of vLLM's fields. Without "chat" a prompt
is text or tokens, as it is. Answers of n > 1 stand one behind the other. With "abort": N the first prompt is asked once
more beforehand, beside the second, and given up after N steps.
It runs in vLLM's environment and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

CHAIN = 4


class Proposing:
    """What steps take in their proposer, vLLM's own or ours, from now on."""

    def __init__(self) -> None:
        self.seconds, self.steps, self._longest_s = 0.0, 0, 0.0
        inner = GPUModelRunner.propose_draft_token_ids

        def propose_draft_token_ids(*given: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                took_s = time.perf_counter() - began_s
                self.seconds, self._longest_s = self.seconds + took_s, max(self._longest_s, took_s)
                self.steps += 1

        GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids

    def longest(self) -> float:
        """In seconds, since it was asked before."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


def main() -> None:
    model, drafting, given = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    remote = {"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter", "num_speculative_tokens": CHAIN}
    # Few rows a step, so that prompts come in chunks; prompts that came before are in the prefix cache.
    settings = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64,
                "enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": False,
                "speculative_config": remote if drafting else None,
                "additional_config": {"slipstream": drafting} if drafting else {}, **given}
    engine = LLM(model=model, **settings)
    proposing = Proposing()
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        asked = order["prompts"]
        each = order.get("each") or [{}] * len(asked)
        sampling = [parameters({**order["sampling"], **more}) for more in each]
        done = list[Any]()
        if order.get("abort"):
            give_up(engine, asked[:2], sampling[0], order["abort"])
        began_s, proposing.seconds, proposing.steps = time.perf_counter(), 0.0, 0
        for at in range(0, len(asked), order["batch"]):
            some, how = asked[at : at + order["batch"]], sampling[at : at + order["batch"]]
            if order.get("chat", True):
                done += engine.chat([[{"role": "user", "content": prompt}] for prompt in some], how, use_tqdm=False)
            else:
                done += engine.generate([prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                                         for prompt in some], how, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        outputs = [one for answer in done for one in answer.outputs]
        counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        say({"tokens": [list(one.token_ids) for one in outputs], "texts": [one.text for one in outputs],
             "finishes": [one.finish_reason for one in outputs], "prompts": [one.prompt_token_ids for one in done],
             "logprobs": [[at[token].logprob for token, at in zip(one.token_ids, one.logprobs or (), strict=False)]
                          for one in outputs],
             "seconds": seconds, "propose_s": proposing.seconds, "steps": proposing.steps,
             "longest_s": proposing.longest(),
             "rounds": counts.get("vllm:spec_decode_num_drafts", 0),
             "preempted": counts.get("vllm:num_preemptions", 0), "cached": counts.get("vllm:prefix_cache_hits", 0),
             "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
             "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0)})


def parameters(asked: dict[str, Any]) -> SamplingParams:
    bound = asked.pop("structured_outputs", None)
    return SamplingParams(**asked, structured_outputs=StructuredOutputsParams(**bound) if bound else None)


def give_up(engine: LLM, prompts: list[str], sampling: SamplingParams, steps: int) -> None:
    running = engine.llm_engine
    for number, prompt in enumerate(prompts):
        running.add_request(f"aborted-{number}", prompt, sampling)
    for _ in range(steps):
        running.step()
    running.abort_request(["aborted-0"])
    while running.has_unfinished_requests():
        running.step()


def say(answer: dict[str, object]) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
