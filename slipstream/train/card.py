"""A head's model card: its target, how it was made, its measured acceptance, and its limits.

It knows nothing about how these were measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.drafting.rounds import Acceptance
from slipstream.models.folder import KNOWN
from slipstream.train.block_head import BLOCK
from slipstream.train.evaluate import MAX_PROMPT
from slipstream.train.fit import Progress
from slipstream.train.head import Head
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Shards


def card(target: str, head: Head, recipe: Recipe, shards: Shards, coverage: float, progress: Progress,
         acceptance: Mapping[str, Acceptance], num_prompts: int) -> str:
    """The text of ``README.md``. target: a known model's name, or the name of its folder; acceptance: by tree shape on
    ``num_prompts`` held-out prompts."""
    return "\n".join((*_front_matter(target, recipe.kind), *_introduction(target, head),
                      *_data(recipe, shards, head, coverage), *_recipe(recipe, progress, shards),
                      *_results(recipe, progress, acceptance, num_prompts), *_limits(target)))


def _front_matter(target: str, kind: str) -> tuple[str, ...]:
    if target not in KNOWN:
        return ()
    return "---", f"license: {KNOWN[target].license.lower()}", f"tags: [speculative-decoding, {kind}]", "---", ""


def _introduction(target: str, head: Head) -> tuple[str, ...]:
    pair = "draft.model=THIS_FOLDER" + ("" if target in KNOWN else " --set model.path=TARGET_FOLDER")
    if head.mask_token is not None:
        return (
            f"# A DSpark head for {target}", "",
            f"It drafts for {target} and for no other model: blocks of {BLOCK} tokens in one pass. "
            f"{head.num_parameters / 1e6:.1f} million parameters; it reads what enters the target's layers "
            f"{', '.join(map(str, head.taps[:-1]))} and the final state. The layout is that of vLLM's speculators "
            f"(`dspark`, `sample_from_anchor` true), but layer id {head.target_layers} is the state behind the final "
            "norm, for vLLM the one before it. The embedding is the target's.", "",
            f"    slipstream run --set draft.drafter=block --set {pair}", "")
    return (
        f"# An EAGLE-3 head for {target}", "",
        f"It drafts for {target} and for no other model. {head.num_parameters / 1e6:.1f} million parameters; it reads "
        f"what enters the target's layers {', '.join(map(str, head.taps))}. The layout is the published one "
        f"(`LlamaForCausalLMEagle3`, arXiv 2503.01840): `{_layer_names(head)}`, `fc`, `norm`, `lm_head`, `d2t` as "
        "differences, `t2d` as a mask. The embedding is the target's.", "",
        f"    slipstream run --set draft.drafter=eagle3 --set {pair}", "")


def _layer_names(head: Head) -> str:
    return "midlayer.*" if head.config.num_layers == 1 else f"layers.0.*` to `layers.{head.config.num_layers - 1}.*"


def _data(recipe: Recipe, shards: Shards, head: Head, coverage: float) -> tuple[str, ...]:
    totals = shards.totals()
    temperatures = ", ".join(f"{share:.0%} {f'at temperature {temperature:g}' if temperature else 'greedy'}"
                             for temperature, share in shards.temperatures().items())
    prompts_given = shards.prompts_given() | ({True} if recipe.prompts else set())  # in a run before, too
    own_questions = ("the target wrote the questions too, from its own chat template and a list of openers (as Magpie "
                     "does, arXiv 2406.08464).")
    questions = f"No outside text: {own_questions} No benchmark's prompts were used."
    if True in prompts_given:
        questions = ("Prompts were given." if prompts_given == {True} else
                     f"Some prompts were given; elsewhere {own_questions}")
    chosen = "used most" if recipe.begin is None else f"of the head {recipe.begin.name}"
    return (
        "## Data", "",
        f"{totals.conversations:,} conversations with {totals.tokens:,} tokens, {totals.answer_tokens:,} of them in "
        f"answers. {questions} Of the answers {temperatures}. {shards.num_held_out:,} of the conversations were held "
        "out.",
        f"The draft vocabulary are the {len(head.vocabulary):,} tokens {chosen}; they cover {coverage:.1%} of the "
        "answers' tokens.", "")


def _recipe(recipe: Recipe, progress: Progress, shards: Shards) -> tuple[str, ...]:
    on_questions = recipe.learn_questions and shards.prompts_given() != {True}  # given questions are not learnt
    learnt = "questions and answers" if on_questions else "answers"
    how = (f"Training-time test over {recipe.unroll} unrolled steps; cross-entropy with the target's distribution over "
           "the draft vocabulary, which turns to what the two do not share (after arXiv 2602.23881), estimated from "
           "some of its tokens" if recipe.kind == "eagle3" else
           "Blocks at random anchors; 0.1 of cross-entropy, 0.9 of the distance to the target's distribution over the "
           "draft vocabulary, and the confidence head")
    last = "last layer" if recipe.kind == "eagle3" and recipe.layers == 1 else "last layers"
    start = f"the target's {last} and `lm_head`" if recipe.begin is None else f"the head {recipe.begin.name}"
    return (
        "## Recipe", "",
        f"{how}, on {learnt}. It began from {start}. Muon for the layers' matrices, AdamW "
        f"for the rest, peak learning rate {recipe.learning_rate:g}, cosine, about {recipe.rows_per_step} tokens a "
        "step.",
        f"{'Of what it had learnt and what it began with, this is the mean. ' if recipe.mean else ''}"
        f"{progress.step:,} steps, {progress.rows:,} tokens, {progress.epoch + 1} epochs begun, "
        f"{progress.seconds / 60:.0f} minutes on `{recipe.device}`. `training.svg` shows the curves.", "")


def _results(recipe: Recipe, progress: Progress, acceptance: Mapping[str, Acceptance],
             num_prompts: int) -> tuple[str, ...]:
    lines = ["## What it is worth", ""]
    if progress.history and progress.history[-1].held_out and not recipe.mean:  # it is of what was learnt
        shares = " / ".join(f"{share:.3f}" for share in progress.history[-1].held_out)
        lines += [f"Agreement with the target's likeliest token on held-out answers, by drafted token: {shares}.", ""]
    if acceptance:
        lines += [f"Real drafting against the target, greedy, {num_prompts} held-out prompts, drafted by the code that "
                  "serves:", "", "| shape | tokens a target step | acceptance by depth |", "|---|---|---|"]
        lines += [f"| {shape} | {a.length:.2f} | {' / '.join(f'{share:.2f}' for share in a.by_depth)} |"
                  for shape, a in acceptance.items()]
        lines.append("")
    else:
        lines += [f"No prompt of at most {MAX_PROMPT} tokens was held out, so what it gives is not measured; "
                  "`slipstream tune --prompts` does it.", ""]
    return tuple(lines)


def _limits(target: str) -> tuple[str, ...]:
    return (
        "## Limits", "",
        "The prompts above are of the kind that it was trained on, so acceptance on other text will differ; text that "
        "copies from a long prompt is served better by the n-gram drafter. The head never changes an answer, only how "
        f"fast it comes. Its weights derive from {target} and are under its licence{_licence(target)}.", "")


def _licence(target: str) -> str:
    return f" ({KNOWN[target].license})" if target in KNOWN else ""
