"""vLLM's engine on the default model, for another process: orders as JSON lines in, answers as JSON lines out.

    python engine.py MODEL '{"drafts": ["127.0.0.1:50052"]}'     # null: no drafts
    {"prompts": [...], "batch": 8, "max_tokens": 48}  ->  {"tokens": [[...], ...], "accepted": 12, "drafted": 40}

It runs in vLLM's environment and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

CHAIN = 4


def main() -> None:
    model, drafting = sys.argv[1], json.loads(sys.argv[2])
    remote = {"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter", "num_speculative_tokens": CHAIN}
    # Few rows a step, so that prompts come in chunks; prompts that came before are in the prefix cache.
    engine = LLM(model=model, dtype="float32", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64,
                 enforce_eager=True, enable_prefix_caching=True, disable_log_stats=False,
                 speculative_config=remote if drafting else None,
                 additional_config={"slipstream": drafting} if drafting else {})
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True)
        chats = [[{"role": "user", "content": prompt}] for prompt in order["prompts"]]
        tokens = list[list[int]]()
        for at in range(0, len(chats), order["batch"]):
            done = engine.chat(chats[at : at + order["batch"]], sampling, use_tqdm=False)
            tokens += [list(answer.outputs[0].token_ids) for answer in done]
        counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        say({"tokens": tokens, "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
             "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0)})


def say(answer: dict[str, object]) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
