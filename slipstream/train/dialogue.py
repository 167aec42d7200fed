"""Plans of conversations for the target: with its own questions, or with given ones; and the text around the turns.

Rules:
1. A plan is a pure function of (seed, number), so an interrupted run makes the same plans again. The number of a given
   prompt follows from its text, not from its file or line: a prompt that was answered is not asked again, any other is,
   also in a folder where the target asked its own questions before.
2. The target writes its own questions (Magpie, arXiv 2406.08464): after its chat template up to the user's text, and an
   opener or nothing, it generates the rest. Or the questions are given. No benchmark's prompts are in here.
3. About two fifths of the answers are greedy, one fifth at temperature 0.7 and two fifths at 1: a head serves all of
   these, and sampled tokens are harder to predict. Without a chat template, and without given prompts, all are sampled:
   greedy texts would all be the same.
4. Every twentieth conversation is held out: it is never trained on, and the evaluation drafts for it. Of given prompts
   about one in twenty is, by a hash of the first turn, so that equal ones are on the same side; at least one of twenty
   or more different first turns, never all.

It knows nothing about models, batches or shards.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.base.errors import ConfigError, ModelError
from slipstream.models.folder import load_tokenizer, read_json, template_source, token_text
from slipstream.models.template import sandbox

PLACEHOLDERS = ("\ue000", "\ue001", "\ue002")  # private-use characters stand for the turns while the template is read
HELD_OUT_EVERY = 20
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
QUESTION_TEMPERATURES = (0.7, 1.0)
SECOND_TURN_SHARE = 0.25
OPENER_SHARE = 0.7
OPENERS = (
    "What", "How", "Why", "Can you", "Could you explain", "Explain", "Describe", "Write", "Write a short story about",
    "Write a poem about", "Write an email to", "Write a letter to", "Write a blog post about", "Write a dialogue",
    "Write a Python function", "Write a program that", "Here is a Python function:\n```python\ndef ", "Complete this "
    "Python function:\n\ndef ", "Fix the bug in this code:\n", "Translate", "Summarize", "Summarize this article:\n\n",
    "Read the following passage:\n\n", "Give me", "Give three", "List", "Name", "Compare", "Imagine", "Suppose",
    "Pretend that you are", "You are", "I am", "I need", "I want to", "My", "Is it", "Are there", "Should I", "Who",
    "When did", "Where", "Which", "Solve", "Calculate", "If", "A farmer has", "A shop sells", "Anna", "There are",
    "Identify", "Classify", "Rewrite", "Edit the following text", "Create", "Design", "Plan", "Tell me", "Help me",
    "Generate", "Rank", "Convert", "Define", "Discuss",
)
LONG_SHARE = 0.12  # of the conversations: a head trained on short prompts only drafts badly after a page of text
LONG_QUESTION = 768  # tokens
LONG_OPENERS = (
    "Summarize this article:\n\n", "Summarize the following news article in three sentences:\n\n(CNN)", "Read this "
    "report and list its main points:\n\n", "Here is a long story. Tell me what happens in it:\n\n", "Article:\n\n",
    "Write highlights for this article:\n\n", "Rewrite this text so that a child understands it:\n\n", "Translate this "
    "letter into simple English:\n\nDear", "Here is my essay. What could be better?\n\n", "Explain what this program "
    "does:\n```python\nimport",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned conversation. questions: its user turns; None: the target writes the question, after ``opener``."""

    number: int
    opener: str
    questions: tuple[str | None, ...]
    temperature: float  # of the answers
    question_temperature: float
    held_out: bool
    max_question: int = 0  # tokens of a question that the target writes, at most; 0: that of ``Limits``


@dataclass(frozen=True, slots=True)
class Prompt:
    """A given conversation: its user turns."""

    turns: tuple[str, ...]
    number: int
    held_out: bool


@dataclass(frozen=True, slots=True)
class TurnTemplate:
    """The text around turns, from the chat template. Without a template there are no turns: a conversation is one
    text."""

    tokenizer: Tokenizer
    opening: str  # before the first question
    to_answer: str  # between a question and an answer that is generated (templates may print given answers differently)
    to_question: str  # between an answer and the next question
    no_chat_template: bool

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_user_text(self, text: str) -> list[int]:
        """The tokens of a user's text: the text of a special token is encoded as plain text, as when serving."""
        self.tokenizer.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self.tokenizer.encode_special_tokens = False


def read_turn_template(folder: Path) -> TurnTemplate:
    """The turns of a target's folder. Raises ModelError naming what cannot be used."""
    tokenizer, found = load_tokenizer(folder), template_source(folder)
    if found is None:
        config = read_json(folder / "tokenizer_config.json", missing_ok=True)
        begin = token_text(config.get("bos_token")) or token_text(config.get("eos_token")) or "\n"
        return TurnTemplate(tokenizer, begin, "", "", no_chat_template=True)
    source, special_tokens = found
    messages = [{"role": role, "content": placeholder}
                for role, placeholder in zip(("user", "assistant", "user"), PLACEHOLDERS, strict=True)]
    text = _render(source, {"tools": None, "documents": None, **special_tokens, "messages": messages,
                            "add_generation_prompt": True})
    pieces = [text]
    for placeholder in PLACEHOLDERS:
        pieces[-1:] = pieces[-1].split(placeholder, 1)
    if len(pieces) != len(PLACEHOLDERS) + 1:
        raise ModelError(f"{folder}: chat_template: it does not print what users and assistants say, in order")
    return TurnTemplate(tokenizer, pieces[0], pieces[3], pieces[2], no_chat_template=False)


def read_prompts(path: Path) -> list[tuple[str, ...]]:
    """The user turns of a JSONL file: objects with ``turns`` (a list of texts) or ``prompt``. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        lines = text.split("\n")  # not splitlines: texts may have its other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}") from error
    prompts = [_turns_of(line, f"--prompts: {path}, line {number}")
               for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {path} holds no prompts; write one JSON object with 'prompt' a line")
    return prompts


def number_prompts(prompts: Iterable[tuple[str, ...]]) -> list[Prompt]:
    """``prompts`` with their numbers (rule 1), held out or not (rule 4). The same prompt a second time gets another
    number."""
    numbered, num_seen = list[Prompt](), Counter[tuple[str, ...]]()
    for turns in prompts:
        held_out = _hash(turns[0]) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        numbered.append(Prompt(turns, _hash(json.dumps([num_seen[turns], *turns])), held_out))
        num_seen[turns] += 1
    first_turns = {prompt.turns[0] for prompt in numbered}
    held_out_turns = {prompt.turns[0] for prompt in numbered if prompt.held_out}
    if len(first_turns) >= HELD_OUT_EVERY and not held_out_turns:
        held_out_turns = {max(first_turns, key=_hash)}
    elif held_out_turns == first_turns:  # else nothing would be left to train on
        held_out_turns = set()
    return [replace(prompt, held_out=prompt.turns[0] in held_out_turns) for prompt in numbered]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")


def make_plan(index: int, seed: int, prompts: Sequence[Prompt] | None, no_chat_template: bool = False) -> Plan | None:
    """Plan number ``index``: of all, or of ``prompts``, None after the last of these."""
    if prompts is not None and index >= len(prompts):
        return None
    number = index if prompts is None else prompts[index].number
    rng = random.Random(f"{seed}/{number}")
    temperature, question_temperature = rng.choice(TEMPERATURES), rng.choice(QUESTION_TEMPERATURES)
    if no_chat_template and prompts is None:
        temperature = rng.choice(TEMPERATURES[TEMPERATURES.count(0.0):])
    opener = rng.choice(OPENERS) if rng.random() < OPENER_SHARE and not no_chat_template else ""
    second = rng.random() < SECOND_TURN_SHARE and not no_chat_template
    if prompts is not None:
        return Plan(number, "", prompts[index].turns, temperature, question_temperature, prompts[index].held_out)
    held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    if not no_chat_template and rng.random() < LONG_SHARE:
        return Plan(number, rng.choice(LONG_OPENERS), (None,), temperature, question_temperature, held_out,
                    LONG_QUESTION)
    return Plan(number, opener, (None, None) if second else (None,), temperature, question_temperature, held_out)


def _turns_of(line: str, where: str) -> tuple[str, ...]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    turns: Any = None
    if isinstance(entry, dict):
        turns = entry["turns"] if "turns" in entry else [entry.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{where}: expected an object with 'turns' (a list of texts) or 'prompt' (a text)")
    try:
        "".join(turns).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: not Unicode text: a lone surrogate at character {error.start}") from error
    return tuple(turns)


def _render(source: str, names: dict[str, Any]) -> str:
    try:
        return sandbox().from_string(source).render(names)
    except Exception as error:  # it is a program
        raise ModelError(f"chat_template: cannot be rendered: {error}") from error
