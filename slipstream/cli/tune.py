"""``slipstream tune``: its options and what it shows. What is heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.base.config import load
from slipstream.cli.options import ConfigFile, Overrides

MOST_STEPS, MOST_TOPK, MOST_NODES = 16, 16, 63


Target = Annotated[str, typer.Option("--target", metavar="NAME", help="A name or a folder; else `model.path`.")]
Head = Annotated[str, typer.Option(
    "--head", metavar="NAME", help="Its draft head or draft model: a name or a folder; else `draft.model`.")]
Kind = Annotated[str, typer.Option(
    "--drafter", metavar="KIND", help="eagle3, eagle2, mtp or standalone; else `draft.drafter`, or eagle3.")]
Prompts = Annotated[Path | None, typer.Option(
    "--prompts", metavar="FILE", help="JSONL with `turns` or `prompt` in each line; else six questions of our own.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the best setting goes.")]
Tokens = Annotated[int, typer.Option("--tokens", min=8, help="Tokens of each answer.")]
Steps = Annotated[str, typer.Option("--steps", metavar="LIST", help="Depths to try.")]
Topk = Annotated[str, typer.Option("--topk", metavar="LIST", help="Children of a node to try; 1 is a chain.")]
Nodes = Annotated[str, typer.Option(
    "--nodes", metavar="LIST", help="Nodes of a tree to try; a chain has as many as steps.")]
Exchange = Annotated[float, typer.Option(
    "--exchange-ms", min=0.0, help="What a round spends between the services: about 1 on one machine, 0 colocated, "
                                   "more across a network.")]


def tune(
    target: Target = "", head: Head = "", drafter: Kind = "", prompts: Prompts = None, out: Out = Path("tuned.yaml"),
    tokens: Tokens = 48, steps: Steps = "1,2,3,4,5,6,8", topk: Topk = "1,2,4", nodes: Nodes = "8,16,32",
    exchange_ms: Exchange = 1.0, config: ConfigFile = None, overrides: Overrides = None,
) -> None:
    """Find the tree shape that pays for a target and its draft on this device, and write it as a configuration.

    A deeper or wider tree gets more tokens accepted, and costs more to draft and to verify; where the best trade lies
    depends on both models and on the device. Every shape drafts and verifies the same prompts here, in one process,
    and what comes out is **acceptance length / (draft + verify + exchange)**, in tokens a second. Takes minutes; do
    nothing else on the machine meanwhile.

    Examples:

    `slipstream tune --target smollm2-135m --head smollm2-135m-eagle3`

    `slipstream tune --head my-head --steps 3,5 --topk 1,4 --nodes 8,16 --out my.yaml`, then
    `slipstream run --config my.yaml`

    `slipstream tune --drafter standalone --target big-model --head small-model --prompts questions.jsonl`
    """
    from router_service.tokens import TextCodec
    from slipstream.cli.tuning import as_yaml, numbers, prompts_of, run, save, table, with_pair
    from slipstream.drafting.sweep import shapes
    from slipstream.models.folder import resolve

    settings = with_pair(load(config, tuple(overrides or ())), target, head, drafter)
    wanted = shapes(numbers("--steps", steps, MOST_STEPS), numbers("--topk", topk, MOST_TOPK),
                    numbers("--nodes", nodes, MOST_NODES))
    result = run(settings, wanted, prompts_of(prompts, TextCodec(resolve(settings.model.path))), tokens)
    console, exchange_s = Console(), exchange_ms / 1e3
    console.print(table(result, exchange_s))
    best = result.best(exchange_s)
    gain = result.gain(best, exchange_s)
    shape = best.growth
    console.print(f"best: {shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} nodes, about {gain:.2f} "
                  "times plain decoding" + ("" if gain > 1 else "; speculation does not pay with this pair here"))
    save(out, as_yaml(settings, best, gain))
    console.print(f"written to {out}; use it with: slipstream run --config {out}", soft_wrap=True)
