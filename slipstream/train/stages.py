"""From a target's folder to a head's folder: collect, vocabulary, train, export, evaluate, card. An interrupted run is
resumed where it stopped.

Rules:
1. ``work`` keeps intermediate files: shards, and checkpoints of the one training on them. The same command resumes it;
   a recipe with other settings of the head is an error that names them, and so is a second run at the same time.
2. Further folders of shards (``data``) of the same target are trained on, too.
3. The draft vocabulary is chosen once, when training begins, and is stored in the checkpoints. A head that begins with
   an earlier head's weights (``begin``) has the vocabulary of that head.

It knows nothing about progress bars: it calls a ``Watcher``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from slipstream.base.errors import ConfigError
from slipstream.drafting.heads.block_checkpoint import BlockHead, read_block_head
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.rounds import Acceptance
from slipstream.engine.device import threads
from slipstream.engine.int8 import holds_int8, with_embedding
from slipstream.engine.model import FAMILIES, ModelConfig, device_of, dtype_of, load_tensors, text_of
from slipstream.models.folder import read_json, weights_hash
from slipstream.train.block_head import BLOCK, mask_token, warm_block_head
from slipstream.train.card import card
from slipstream.train.checkpoint import Checkpoint, load_newest, save
from slipstream.train.collect import collect, identity_of
from slipstream.train.dialogue import number_prompts, read_prompts
from slipstream.train.evaluate import MAX_PROMPT, evaluate, prompts_of
from slipstream.train.export import export
from slipstream.train.fit import Progress, Training
from slipstream.train.folders import check_out, check_work, lock_folder, write_errors
from slipstream.train.head import Head, answer_counts, coverage, draft_vocabulary, warm_head
from slipstream.train.plot import curves
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Shards, Totals

VOCABULARY, MASK = "vocabulary", "mask"  # among a checkpoint's tensors
DRAFTERS: Mapping[str, Literal["eagle3", "block"]] = {"eagle3": "eagle3", "dspark": "block"}  # kind -> draft.drafter
MIN_TOKENS = 3  # tokens of a conversation: a shorter one has no row to learn
MAX_TOKENS = 1024  # of a conversation, that are trained on
MAX_EVALUATED = 16  # held-out conversations that the evaluation drafts for
# Share of answer tokens: if an old vocabulary covers so much less than a new one would, a line says so.
MAX_COVERAGE_LOSS = 0.01


class Watcher(Protocol):
    """Gets reports of the progress."""

    def collecting(self, totals: Totals, share: float) -> None: ...

    def training(self, progress: Progress, share: float) -> None: ...

    def log(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    target: Path
    name: str  # of the target, for the card
    out: Path
    work: Path
    data: tuple[Path, ...]
    recipe: Recipe


def make_head(job: Job, watcher: Watcher) -> Mapping[str, Acceptance]:
    """Run all stages. Returns the head's acceptance on held-out prompts, by tree shape; empty if none was measured.
    Raises ConfigError, ModelError, CapacityError."""
    config = _config_of(job.target)
    check_work(job.work)
    with lock_folder(job.work):
        return _run_stages(job, config, watcher)


def _run_stages(job: Job, config: ModelConfig, watcher: Watcher) -> Mapping[str, Acceptance]:
    recipe = job.recipe
    if recipe.train:
        check_out(job.out, job.target, job.work)
    given_numbers = set[int]()
    if recipe.generate and recipe.prompts is not None:
        given_numbers = {prompt.number for prompt in number_prompts(read_prompts(recipe.prompts))}
    identity = identity_of(job.target, config)
    for folder in job.data:
        if not Shards([folder], identity).numbers():
            raise ConfigError(f"--data: there are no conversations in {folder}; name a folder that was --work before")
    if recipe.train and load_newest(*_checkpoints(job, identity)) is None:
        _check_begin(job, config)  # errors of either are raised before hours of generation
    if recipe.generate:
        with threads(1 if recipe.processes > 1 else torch.get_num_threads()):
            collect(job.target, job.work, recipe, watcher.collecting, identity)
    shards = Shards([job.work, *job.data], identity)
    totals = shards.totals()
    if not totals.conversations:
        raise ConfigError(f"there are no conversations in {job.work}: leave --no-generate out, or name a folder of "
                          "them with --data")
    watcher.log(f"{totals.conversations} conversations, {totals.tokens} tokens, {totals.answer_tokens} of them "
                "in answers")
    if unanswered := len(given_numbers - shards.numbers()):
        watcher.log(f"{unanswered} of {len(given_numbers)} given prompts have no answer: they are too long "
                    "(--max-prompt), or there was no time or room for them (--minutes, --tokens)")
    if not recipe.train:
        return {}
    head, vocabulary_share, training = _train(job, config, identity, shards, watcher)
    if recipe.mean and (earlier := _read_begin_head(job)) is not None:
        _move_towards(head, earlier, 0.5)
    dtype = dtype_of(recipe.dtype)
    weights = weights_hash(job.target)
    with write_errors("--out", job.out):
        export(head, job.out, dtype, weights)
    prompts = prompts_of(list(shards.conversations(held_out=True)), MAX_EVALUATED)
    acceptance = _evaluate(job, prompts, watcher)
    progress = training.progress
    text = card(job.name, head, recipe, shards, vocabulary_share, progress, acceptance, len(prompts))
    with write_errors("--out", job.out):
        (job.out / "training.svg").write_text(curves(progress.history), encoding="utf-8")
        (job.out / "README.md").write_text(text, encoding="utf-8")
    return acceptance


def _evaluate(job: Job, prompts: Sequence[Sequence[int]], watcher: Watcher) -> Mapping[str, Acceptance]:
    """The acceptance of the head on held-out ``prompts``, by tree shape."""
    if not prompts:
        watcher.log(f"no prompt of at most {MAX_PROMPT} tokens is held out, so what the head gives is not measured; "
                    "slipstream tune --prompts does it")
        return {}
    watcher.log("drafting for held-out prompts")
    recipe = job.recipe
    return evaluate(job.target, job.out, prompts, dtype=recipe.dtype, device=recipe.device,
                    drafter=DRAFTERS[recipe.kind])


def _config_of(target: Path) -> ModelConfig:
    """The target's configuration. Raises ConfigError for a model type that only engine hf serves, or for int8 weights,
    as a head begins with float ones; ModelError."""
    kind = text_of(read_json(target / "config.json")).get("model_type")
    if kind not in tuple(FAMILIES):  # whatever kind of value it is
        raise ConfigError(f"--target: {target} is of model_type {kind!r}, and heads are trained for "
                          f"{', '.join(FAMILIES)}; choose a model of one of these")
    if holds_int8(target):  # a head begins as a copy of the target's weights
        raise ConfigError(f"--target: {target} holds int8 weights; name the folder that it was prepared from")
    return ModelConfig.from_folder(target)


def _checkpoints(job: Job, target: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder of the checkpoints, and their identity. target: the target's identity."""
    identity = {**job.recipe.identity(), "max_rows": MAX_TOKENS, **target}  # the name that older checkpoints have
    return job.work / f"checkpoints-{job.recipe.kind}", identity


def _train(job: Job, config: ModelConfig, target: Mapping[str, Any], shards: Shards,
           watcher: Watcher) -> tuple[Head, float, Training]:
    recipe, device = job.recipe, device_of(job.recipe.device)
    counts = answer_counts(shards.conversations(held_out=False), config.vocab_size)
    training_set, held_out = ([c.beginning(MAX_TOKENS) for c in shards.conversations(is_held_out)
                               if len(c.tokens) >= MIN_TOKENS] for is_held_out in (False, True))
    if not training_set:
        raise ConfigError("every conversation so far is held out: generate more (--minutes, --tokens)")
    if not any(np.isin(c.roles[MIN_TOKENS - 1:], recipe.learnt_roles).any() for c in training_set):
        raise ConfigError(f"there is nothing to learn: of a conversation the first {MAX_TOKENS} tokens are read, "
                          "and no answer begins there; give shorter prompts")
    folder, identity = _checkpoints(job, target)
    checkpoint = load_newest(folder, identity)
    earlier = _read_begin_head(job) if checkpoint is None else None
    if checkpoint is not None:
        vocabulary = checkpoint.tensors[VOCABULARY]
    else:
        vocabulary = draft_vocabulary(counts, recipe.draft_vocab) if earlier is None else earlier.vocabulary
    vocabulary_share = coverage(counts, vocabulary)
    new_share = coverage(counts, draft_vocabulary(counts, recipe.draft_vocab))
    poor = checkpoint is not None and recipe.begin is None and new_share - vocabulary_share > MAX_COVERAGE_LOSS
    watcher.log(f"the draft vocabulary of {len(vocabulary)} tokens covers {vocabulary_share:.1%} of the answers" + (
        f"; one chosen now would cover {new_share:.1%}: remove {folder} to train anew with it" if poor else ""))
    mask = (int(checkpoint.tensors[MASK]) if checkpoint is not None and recipe.kind == "dspark" else earlier.mask_token
            if isinstance(earlier, BlockHead) else mask_token(counts))
    head = _new_head(job, config, vocabulary, mask, device)
    if earlier is not None:
        _check_shape(head, earlier)
        _move_towards(head, earlier)
        watcher.log(f"beginning with {recipe.begin}")
    extra_tensors = {VOCABULARY: vocabulary}
    if head.mask_token is not None:
        extra_tensors[MASK] = torch.tensor(head.mask_token)
    with threads(1 if recipe.processes > 1 else torch.get_num_threads()):
        training = Training(head, recipe, training_set, held_out, _checkpoint_writer(folder, extra_tensors, identity))
        if checkpoint is not None:
            training.resume(checkpoint)
            watcher.log(f"going on at step {training.progress.step}")
        generated_s = Shards([job.work], target).totals().seconds  # what --data took was another run's
        training.run(recipe.train_seconds(generated_s), watcher.training)
    return head, vocabulary_share, training


def _new_head(job: Job, config: ModelConfig, vocabulary: torch.Tensor, mask: int, device: torch.device) -> Head:
    """A new head with first weights from the target. mask: the mask token of a DSpark head."""
    recipe, tensors = job.recipe, with_embedding(config, load_tensors(job.target))
    if recipe.kind == "dspark":
        return warm_block_head(config, tensors, vocabulary, mask, recipe.seed, device)
    return warm_head(config, tensors, vocabulary, recipe.layers, recipe.seed, device)


def _read_begin_head(job: Job) -> EagleHead | BlockHead | None:
    """The head whose weights training begins with; None: the target's. Raises ModelError, ConfigError."""
    begin = job.recipe.begin
    if begin is None:
        return None
    return (read_block_head if job.recipe.kind == "dspark" else read_head)(begin, job.target)


def _check_begin(job: Job, config: ModelConfig) -> None:
    """Raises ModelError or ConfigError if training cannot begin with the recipe's earlier head."""
    earlier = _read_begin_head(job)
    if earlier is not None:
        mask = earlier.mask_token if isinstance(earlier, BlockHead) else 0
        _check_shape(_new_head(job, config, earlier.vocabulary, mask, torch.device("cpu")), earlier)


def _check_shape(head: Head, earlier: EagleHead | BlockHead) -> None:
    """Raises ConfigError if the earlier head has another shape than ``head``."""
    if earlier.taps != head.taps:
        raise ConfigError(f"--begin: it reads layers {earlier.taps}, and a head that is trained here {head.taps}")
    if isinstance(earlier, BlockHead) and (
            not earlier.from_anchor or (earlier.block_size, earlier.markov) != (BLOCK, "vanilla")):
        raise ConfigError(f"--begin: it is not one of blocks of {BLOCK} from the anchor with a vanilla markov head")
    rotary = ("rope_theta", "rope_scaling", "norm_eps")
    if any(getattr(earlier.config, name) != getattr(head.config, name) for name in rotary):
        raise ConfigError(f"--begin: {', '.join(rotary)} must be those of the target")
    if isinstance(earlier, EagleHead) and (earlier.norm_before_residual or earlier.norm_output):
        raise ConfigError("--begin: it norms its states otherwise than heads that are trained here")
    shapes = {name: tuple(t.shape) for name, t in earlier.tensors.items()
              if t.is_floating_point() and name != "embed_tokens.weight"}
    added = _added_tensors(head, earlier)
    for name in sorted(shapes.keys() | head.tensors.keys() - added):
        wanted = tuple(head.tensors[name].shape) if name in head.tensors else None
        if shapes.get(name) != wanted:
            raise ConfigError(f"--begin: {name}: expected {wanted or 'no such tensor'}, found {shapes.get(name)}")


def _move_towards(head: Head, earlier: EagleHead | BlockHead, share: float = 1.0) -> None:
    """Move the head's weights towards the earlier one's by ``share``; 1: copy them. A mean of both (0.5) is after
    Wortsman et al., arXiv 2109.01903."""
    added = _added_tensors(head, earlier)
    with torch.no_grad():
        for name, tensor in head.tensors.items():
            if name not in added:
                tensor.lerp_(earlier.tensors[name].to(tensor), share)
            elif share == 1.0 and name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()


def _added_tensors(head: Head, earlier: EagleHead | BlockHead) -> set[str]:
    """The tensors of layers that the earlier head does not have. At first these layers add nothing, so the new head
    begins with the earlier one's outputs."""
    if head.mask_token is not None or earlier.config.num_layers >= head.config.num_layers:
        return set()
    added = range(earlier.config.num_layers, head.config.num_layers)
    return {name for name in head.tensors if name.startswith(tuple(f"layers.{layer}." for layer in added))}


def _checkpoint_writer(folder: Path, extra_tensors: dict[str, torch.Tensor],
           identity: dict[str, Any]) -> Callable[[int, Checkpoint], None]:
    def write(step: int, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors | extra_tensors
        save(folder, step, Checkpoint(tensors, checkpoint.optimizer, checkpoint.state), identity)

    return write


