"""The model that all targets of a fleet have: a law gives its text, with words, thoughts and calls of functions in it.

Rules:
1. What it says depends on the last token of a prompt and its place: a prompt that ends with a stream's ``word`` has an
   answer of that stream, thoughts of ``THOUGHTS``, calls of ``CALLS``.
2. Every token has a logit of its own, so whatever binds, forbids or draws tokens has something to choose from.
3. Other weights have another law, and other logits.

It knows nothing about requests.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

from slipstream.drafting.tree import Indices
from slipstream.grammar.compiling import Vocabulary
from slipstream.models.folder import load_tokenizer
from slipstream.simulate.timed import SYMBOLS, VOCAB, Device, SyntheticText, TimedDrafter, TimedModel, Timing
from tests.tiny import EOS, tiny_tokenizer
from tests.tiny import VOCAB as BYTES_AND_SPECIALS

FIRST, THOUGHTS, CALLS = 33, 62, 63  # the streams from FIRST on are of words
THOUGHT = ("<think>", "</think>", " hm", " so", " why", "\n", " well", " it")
CALL = ("<tool_call>", '{"name": "f", "arguments": {"a": "', " x", 'y\\"z', " é", '"}}', "</tool_call>", " then")
# It ends a turn of the assistant's with what was asked last, so that this says whose text the answer is.
TEMPLATE = """{#- <think> </think> <tool_call> -#}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ messages[-1].content }}{% endif %}"""


@cache
def scratch() -> TemporaryDirectory[str]:
    """Kept until the process ends, which removes it."""
    return TemporaryDirectory(prefix="chaos-")


@cache
def folder() -> Path:
    """Tokenizer and template, written once a process; the weights are nowhere."""
    made = Path(scratch().name)
    own = tiny_tokenizer()
    spelt = [f" {''.join(letters)}" for letters in product("bdfgklmnprstvz", "aeiou", "lmnrst")]
    own.add_tokens([AddedToken(text, normalized=False) for text in
                    (*spelt[: THOUGHTS * SYMBOLS - BYTES_AND_SPECIALS], *THOUGHT, *CALL)])
    assert own.get_vocab_size() == VOCAB
    own.save(str(made / "tokenizer.json"))
    for name, content in (("config", {"model_type": "llama", "vocab_size": VOCAB}),
                          ("generation_config", {"eos_token_id": [EOS]}),
                          ("tokenizer_config", {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})):
        (made / f"{name}.json").write_text(json.dumps(content))
    return made


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(folder())


@cache
def vocabulary() -> Vocabulary:
    """For grammars; takes a second, once."""
    return Vocabulary(tokenizer(), VOCAB)


@cache
def word(stream: int) -> str:
    """A text whose only token is of this stream."""
    token = stream * SYMBOLS + (1 if stream == CALLS else 0)
    text = tokenizer().decode([token], skip_special_tokens=False)
    assert tokenizer().encode(text, add_special_tokens=False).ids == [token]
    return text


def streams() -> range:
    """Of words."""
    return range(FIRST, THOUGHTS)


class ScriptedLaw(SyntheticText):
    """Thoughts are thought and calls are called; all else follows the law."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(timing)
        self._scripts = [(stream, np.array(_script(stream, timing.seed))) for stream in (THOUGHTS, CALLS)]

    def following(self, tokens: Indices, positions: Indices) -> Indices:  # type: ignore[override]
        said, places = super().following(tokens, positions), np.asarray(positions, np.int64)
        for stream, script in self._scripts:
            said = np.where(said // SYMBOLS == stream, stream * SYMBOLS + script[places % len(script)], said)
        return said


def _script(stream: int, seed: int) -> list[int]:
    """Symbols, again and again: in marks, some more or fewer each time."""
    random, script = Random(seed), list[int]()
    for _ in range(5):
        if stream == THOUGHTS:
            within = (random.randint(2, 5) for _ in range(random.randint(0, 4)))
            script += [0, *within, 1, *random.sample((3, 6, 7), 2)]
        else:
            arguments = (random.randint(2, 4) for _ in range(random.randint(1, 6)))
            script += [0, 1, *arguments, 5, 6, random.choice((4, 7))]
    return script


@cache
def _logits(seed: int) -> torch.Tensor:
    """float32 [V, V]: where the law says so, of each token."""
    return torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4 + 8 * torch.eye(VOCAB)


class WordyModel(TimedModel):
    def __init__(self, timing: Timing, device: Device) -> None:
        super().__init__(timing, device, ScriptedLaw(timing))
        self._logits = _logits(timing.seed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[hidden[:, 0].long()]


def drafter(timing: Timing, most: int) -> TimedDrafter:
    """Of so many sessions, on a device of its own."""
    return TimedDrafter(timing, Device(), True, most, ScriptedLaw(timing))
