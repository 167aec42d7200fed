"""``slipstream train-head``: its options. What is heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.config import Dtype


def train_head(
    target: Annotated[str, typer.Option(help="A prepared model's name, or a model folder.")] = "smollm2-135m",
    minutes: Annotated[float, typer.Option(help="For everything together; 0: as --tokens and --steps say.")] = 10.0,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The head; else TARGET-eagle3 here.")] = None,
    work: Annotated[Path | None, typer.Option(
        metavar="FOLDER", help="What is made on the way, to go on from; else in the user's cache.")] = None,
    prompts: Annotated[Path | None, typer.Option(
        metavar="FILE", help="JSONL with `prompt` or `turns`; else the target asks itself.")] = None,
    data: Annotated[list[Path] | None, typer.Option(
        metavar="FOLDER", help="More conversations of this target, from another --work; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to generate, in all; 0: as time allows.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Training steps; 0: as time allows.")] = 0,
    generate: Annotated[bool, typer.Option(help="Make conversations first.")] = True,
    train: Annotated[bool, typer.Option(help="Train a head on them.")] = True,
    batch: Annotated[int, typer.Option(min=0, help="Conversations at a time; 0: 64 on a CPU, 512 on a GPU.")] = 0,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longest given prompt, in tokens.")] = 1024,
    max_answer: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    draft_vocab: Annotated[int, typer.Option(min=16, help="Tokens that the head can draft.")] = 8192,
    unroll: Annotated[int, typer.Option(help="Steps of training-time test.")] = 3,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="At its peak.")] = 1.5e-3,
    questions: Annotated[bool, typer.Option(help="Learn from the target's questions too, not answers alone.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Of the talking target, and of the head as it is saved.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda; else cuda where there is one.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all.")] = 0,
    save_every: Annotated[float, typer.Option(metavar="SECONDS", help="What a kill may lose, at most.")] = 60.0,
    seed: Annotated[int, typer.Option(help="The same seed plans the same conversations.")] = 0,
) -> None:
    """Train an EAGLE-3 draft head for a model, from nothing but the model. The same command again goes on.

    Examples:

    `slipstream train-head --minutes 10`

    `slipstream train-head --target path/to/model --minutes 120 --prompts prompts.jsonl --out my-head`
    """
    import torch

    from slipstream import training
    from train.generate import Limits
    from train.recipe import Recipe

    if threads:
        torch.set_num_threads(threads)
    recipe = Recipe(minutes, tokens, steps, generate, train, prompts, batch,
                    Limits(max_prompt=max_prompt, max_answer=max_answer), draft_vocab=draft_vocab, unroll=unroll,
                    learning_rate=learning_rate, learn_questions=questions, dtype=dtype,
                    device=device or training.best_device(), save_every_s=save_every,
                    seed=seed)
    training.run(target, out, work, tuple(data or ()), recipe, Console())
