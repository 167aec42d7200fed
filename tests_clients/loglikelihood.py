"""``python -m tests_clients.loglikelihood --lm-eval PYTHON``: questions of multiple choice, scored by lm-eval against
this server and by transformers. PYTHON: of an environment with ``lm-eval[api]``.

Each question is asked as tokens and as text, of a server with drafts that answers others meanwhile, and of one without.
The model runs in float32. Ends with 1 where two of these differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.base.config import ModelSection
from slipstream.models.folder import resolve
from tests_clients.server import colocated

CLOSE = 1e-3
NAME = "scored"
PROGRAM = Path(__file__).parent / "programs" / "loglikelihood_asked.py"
FACTS = (("capital of", (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
                         ("Egypt", "Cairo"))),
         ("opposite of", (("hot", "cold"), ("big", "small"), ("early", "late"), ("wet", "dry"), ("loud", "quiet"))),
         ("colour of", (("snow", "white"), ("grass", "green"), ("coal", "black"), ("blood", "red"),
                        ("the sky", "blue"))))
PLAIN = ("target.policy.max_nodes=0", "target.prompt_lookup=false")


def rows(count: int) -> list[dict[str, Any]]:
    """Questions, each with four choices; a seed makes them."""
    dice, found = np.random.default_rng(1), []
    for _ in range(count):
        kind, pairs = FACTS[dice.integers(len(FACTS))]
        order = dice.permutation(len(pairs))[:4]
        gold = int(dice.integers(4))
        listed = "\n".join(f"{letter}. {pairs[i][1]}" for letter, i in zip("ABCD", order, strict=True))
        found.append({"question": f"What is the {kind} {pairs[order[gold]][0]}?\n{listed}\nAnswer:",
                      "choices": [f" {pairs[i][1]}" for i in order], "gold": gold})
    return found


def by_transformers(folder: Path, asked: list[dict[str, Any]]) -> NDArray[np.float64]:
    """[rows, 4]."""
    tokens_of: Any = AutoTokenizer.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    torch.set_num_threads(1)  # of a short text's forward; more wait for one another without end where cores are busy
    model = auto.from_pretrained(folder, dtype=torch.float32)
    found = []
    for row in asked:
        for choice in row["choices"]:
            prompt, whole = (tokens_of(text)["input_ids"] for text in (row["question"], row["question"] + choice))
            with torch.no_grad():
                logged = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
            places = range(len(prompt), len(whole))
            found.append(float(sum(logged[place - 1, whole[place]] for place in places)))
    return np.array(found).reshape(len(asked), -1)


async def busy(url: str, model: str) -> None:
    """Others' answers, one after the other, for which drafts are asked."""
    async with httpx.AsyncClient(timeout=600) as client:
        while True:
            await client.post(f"{url}/v1/completions", json={"model": model, "prompt": "Once upon a time", "seed": 1,
                                                             "max_tokens": 64, "temperature": 0})


async def by_server(python: str, folder: Path, model: str, drafts: bool, further: Sequence[str],
                    log: Path) -> dict[str, NDArray[np.float64]]:
    """By how the questions were sent. ``further`` settings: where there are drafts."""
    settings = ("model.dtype=float32", f"model.path={model}", f"router.model_name={NAME}",
                *(further if drafts else PLAIN))
    found = {}
    async with colocated(log, settings) as url:
        other = asyncio.create_task(busy(url, NAME)) if drafts else None
        for how in ("tokens", "text"):
            process = await asyncio.create_subprocess_exec(
                python, str(PROGRAM), str(folder), f"{url}/v1/completions", NAME, str(resolve(model)), how,
                stdout=asyncio.subprocess.PIPE)
            told, _ = await process.communicate()
            if process.returncode:
                sys.exit(f"lm-eval ended with {process.returncode}; {log} is the server's log")
            found[how] = np.array(json.loads(told.splitlines()[-1]))
        if other is not None:
            other.cancel()
            with suppress(asyncio.CancelledError):
                await other
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, metavar="PYTHON")
    parser.add_argument("--model", default=ModelSection().path)
    parser.add_argument("--set", action="append", default=[], help="a setting of the server with drafts")
    parser.add_argument("--rows", type=int, default=100)
    arguments = parser.parse_args()
    asked, worst, all_ = rows(arguments.rows), 0.0, list[NDArray[np.float64]]()
    right = by_transformers(resolve(arguments.model), asked)
    with tempfile.TemporaryDirectory() as made:
        Path(made, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
        for drafts in (True, False):
            found = asyncio.run(by_server(arguments.lm_eval, Path(made), arguments.model, drafts,
                                          arguments.set, Path(made, "server.log")))
            for how, values in found.items():
                off = float(np.abs(values - right).max())
                worst = max(worst, off)
                all_.append(values)
                gold = [row["gold"] for row in asked]
                print(f"{'with drafts' if drafts else 'without'}, sent as {how}: {len(asked)} questions, "
                      f"{float((values.argmax(1) == gold).mean()):.2f} right, at most {off:.1e} from transformers")
    apart = float(np.ptp(all_, axis=0).max())
    print(f"these four are at most {apart:.1e} from one another")
    sys.exit(max(worst, apart) > CLOSE)


if __name__ == "__main__":
    main()
