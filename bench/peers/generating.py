"""transformers' ``generate`` as a process, a peer of ``make bench``: ``python -m bench.peers.generating FOLDER KIND …``

A line in is a JSON object with ``prompt`` (token ids) and ``max_tokens``; a line out is one with ``tokens`` (how many),
``num_first`` (how many of them arrived first, together), ``first_s`` and ``total_s``. The first line out is
{"ready": true}.
KIND: plain, lookup (prompt lookup of 10 tokens, as its documentation has it) or assisted (the model assists itself, as
no smaller one with its vocabulary is at hand).

It imports nothing of Slipstream.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

KINDS = ("plain", "lookup", "assisted")


class TimingStreamer:
    """A streamer of transformers that notes when the first and the last tokens arrived, and how many arrived first:
    assisted generation yields all accepted tokens at once."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.num_first = -1  # the first call brings the prompt

    def put(self, tokens: torch.Tensor) -> None:
        if self.num_first < 0:
            self.num_first = 0
            return
        self.last_s = time.perf_counter() - self.began_s
        self.first_s = self.first_s or self.last_s
        self.num_first = self.num_first or tokens.numel()

    def end(self) -> None:
        """Nothing to do."""

    def result(self, tokens: int) -> dict[str, Any]:
        """The line out of an answer of so many tokens."""
        return {"tokens": tokens, "num_first": self.num_first, "first_s": self.first_s, "total_s": self.last_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def load() -> Any:
        models: Any = AutoModelForCausalLM
        return models.from_pretrained(arguments.folder, dtype=getattr(torch, arguments.dtype)).eval()

    model = load()
    extra: dict[str, Any] = {}
    if arguments.kind == "lookup":
        extra["prompt_lookup_num_tokens"] = 10
    elif arguments.kind == "assisted":
        extra["assistant_model"] = load()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request, streamer = json.loads(line), TimingStreamer()
        prompt = torch.tensor([request["prompt"]])
        with torch.inference_mode():
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, streamer=streamer,
                                    max_new_tokens=request["max_tokens"], **extra)
        print(json.dumps(streamer.result(output.shape[1] - prompt.shape[1])), flush=True)


if __name__ == "__main__":
    main()
