"""``slipstream train-head``: its options. What is heavy is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.base.config import Dtype

Target = Annotated[str, typer.Option(metavar="NAME", help="The model to draft for: a name or a folder.")]
Minutes = Annotated[float, typer.Option(min=0, help="For all runs together: about 60 % talking, 35 % training. 0: no "
                                                    "limit but --tokens and --steps.")]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the head goes; else TARGET-eagle3 here.")]
Work = Annotated[Path | None, typer.Option(
    metavar="FOLDER", help="What is made on the way, to go on from; else in the user's cache folder.")]
Prompts = Annotated[Path | None, typer.Option(
    metavar="FILE", help="JSONL with `turns` or `prompt` in each line; else the target asks itself.")]
Data = Annotated[list[Path] | None, typer.Option(
    metavar="FOLDER", help="Conversations of this target from another --work, to train on too; may be repeated.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens to generate, in all runs; 0: as time allows.")]
Steps = Annotated[int, typer.Option(min=0, help="Training steps, in all runs; 0: as time allows.")]
Generate = Annotated[bool, typer.Option(help="Have conversations first.")]
Train = Annotated[bool, typer.Option(help="Train a head on them.")]
Batch = Annotated[int, typer.Option(min=0, help="Conversations at a time; 0: 64 on a CPU, 512 on a GPU.")]
MaxPrompt = Annotated[int, typer.Option(min=1, help="Tokens; longer given prompts are left out.")]
MaxAnswer = Annotated[int, typer.Option(min=1, help="Tokens; longer answers are cut.")]
DraftVocab = Annotated[int, typer.Option(min=16, help="How many tokens the head can draft: those used most.")]
Unroll = Annotated[int, typer.Option(help="Steps that the head is trained to draft from its own states.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="At its peak.")]
Questions = Annotated[bool, typer.Option(help="Learn from what the target asks too, not from its answers alone.")]
Kind = Annotated[Dtype, typer.Option("--dtype", help="Of the talking target, and of the head as it is saved.")]
Device = Annotated[str, typer.Option(help="`cpu` or `cuda`; else cuda where there is one.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: all. As many processes talk and train, up to four.")]
SaveEvery = Annotated[float, typer.Option(metavar="SECONDS", help="What a kill may lose, at most.")]
Seed = Annotated[int, typer.Option(help="The same seed plans the same conversations.")]
MOST_PROCESSES = 4  # a step has about 2,000 rows; a part below 500 would be mostly overhead


def train_head(
    target: Target = "smollm2-135m", minutes: Minutes = 10.0, out: Out = None, work: Work = None,
    prompts: Prompts = None, data: Data = None, tokens: Tokens = 0, steps: Steps = 0, generate: Generate = True,
    train: Train = True, batch: Batch = 0, max_prompt: MaxPrompt = 1024, max_answer: MaxAnswer = 256,
    draft_vocab: DraftVocab = 8192, unroll: Unroll = 3, learning_rate: LearningRate = 1.5e-3,
    questions: Questions = True, dtype: Kind = "bfloat16", device: Device = "", threads: Threads = 0,
    save_every: SaveEvery = 60.0, seed: Seed = 0,
) -> None:
    """Train an EAGLE-3 draft head for a model, from nothing but the model.

    The target talks to itself (or answers given prompts) and its states are kept; a head of one layer learns from them
    what the target will say next; then it drafts for conversations that were held out, and the folder it goes into says
    what that gave. The same command again goes on where it was, with more `--minutes` or after a kill. More
    conversations make a better head than more training does: hours pay.

    Examples:

    `slipstream train-head --minutes 10`

    `slipstream train-head --target path/to/model --minutes 120 --prompts prompts.jsonl --out my-head`

    `slipstream train-head --no-train --minutes 60 --work talk`, then
    `slipstream train-head --no-generate --data talk --minutes 30`
    """
    import torch

    from slipstream.cli import training
    from slipstream.train.generate import Limits
    from slipstream.train.recipe import Recipe

    if threads:
        torch.set_num_threads(threads)
    device = device or training.best_device()
    processes = min(torch.get_num_threads(), MOST_PROCESSES) if device == "cpu" else 1
    limits = Limits(max_prompt=max_prompt, max_answer=max_answer)
    recipe = Recipe(minutes, tokens, steps, generate, train, prompts, batch, limits, draft_vocab, unroll,
                    learning_rate, learn_questions=questions, dtype=dtype, device=device, processes=processes,
                    save_every_s=save_every, seed=seed)
    training.run(target, out, work, tuple(data or ()), recipe, Console())
