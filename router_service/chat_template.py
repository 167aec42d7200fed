"""A model's chat template: messages in, the prompt's text out.

Rules:
1. Only the template of the model folder is ever rendered, in a sandbox, with a cap on what it may write. A request
   brings none.
2. The text of a special token inside a message (``<|im_end|>`` in a question) stays text. Left to the tokenizer it
   would become the token, and a user could end his turn and write the system's; here it comes out of ``render`` as a
   literal segment of its own. Messages without such text give exactly the prompt that transformers gives.
3. The environment offers what transformers' does: ``raise_exception``, ``strftime_now``, ``tojson``, loop controls and
   the ``generation`` tag.

It knows nothing about token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.base.errors import InvalidRequest, ModelError
from slipstream.models.folder import read_json

MAX_RENDERED = 4 << 20  # characters
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PRIVATE_USE = range(0xE000, 0xF8FE, 2)  # characters that no text of meaning holds; two of them mark a literal


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the prompt. A literal one is the text of a special token that must not become the token."""

    text: str
    literal: bool = False


class GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The compiled template of one model."""

    __slots__ = ("_named", "_specials", "_template")

    def __init__(self, source: str, named: Mapping[str, str], specials: Iterable[str]) -> None:
        """``named`` are the template's bos_token and its like, ``specials`` the texts of all special tokens.

        Raises ModelError when ``source`` is not a template.
        """
        self._named = dict(named)
        longest_first = sorted((text for text in specials if text), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template = _compile(source)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[Segment]:
        """The prompt in order. Raises InvalidRequest("messages") for messages that the template refuses."""
        guards = _Guards.find(messages, self._specials)
        if guards is not None:
            messages = guards.put_into(messages)
        text = self._text(messages, add_generation_prompt)
        return [Segment(text)] if guards is None else guards.split(text)

    def _text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        names = {**self._named, "messages": messages, "tools": None, "documents": None,
                 "add_generation_prompt": add_generation_prompt}
        written, chunks = 0, []
        try:
            for chunk in self._template.generate(names):
                chunks.append(chunk)
                written += len(chunk)
                if written > MAX_RENDERED:
                    raise InvalidRequest("messages", f"longer than {MAX_RENDERED} characters when rendered")
        except SecurityError as error:
            raise ModelError(f"chat_template: does what the sandbox forbids: {error}") from error
        except TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses: {str(error)[:200]}") from error
        except (TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest("messages", "the model's chat template cannot render them "
                                 f"({type(error).__name__}); give every message a role and a text content") from error
        return "".join(chunks)


def load_chat_template(folder: Path, specials: Iterable[str]) -> ChatTemplate | None:
    """The template of a model folder (``chat_template.jinja`` or tokenizer_config.json); None if it has none."""
    config = read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if isinstance(source, list):  # several named ones
        named_ones = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named_ones.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template: expected text")
    named = {name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    return ChatTemplate(source, named, specials)


def _token_text(entry: object) -> str | None:
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ModelError(f"chat_template: not a template: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Guards:
    """Stand-ins for the special tokens' texts while the template works on the messages."""

    __slots__ = ("_close", "_found", "_open", "_specials")

    def __init__(self, specials: re.Pattern[str], found: list[str], marks: tuple[str, str]) -> None:
        self._specials = specials
        self._found = found
        self._open, self._close = marks

    @staticmethod
    def find(messages: Sequence[Mapping[str, Any]], specials: re.Pattern[str]) -> _Guards | None:
        """None, the usual case, when no message holds the text of a special token."""
        texts: list[str] = []
        _map_texts(messages, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        found = sorted({match for text in texts for match in specials.findall(text)})
        if not found:
            return None
        used = set().union(*texts)
        for code in PRIVATE_USE:
            if chr(code) not in used and chr(code + 1) not in used:
                return _Guards(specials, found, (chr(code), chr(code + 1)))
        raise InvalidRequest("messages", "hold special tokens and every private-use character")

    def put_into(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        index = {text: i for i, text in enumerate(self._found)}
        return _map_texts(messages, lambda text: self._specials.sub(
            lambda match: f"{self._open}{index[match[0]]}{self._close}", text))

    def split(self, text: str) -> list[Segment]:
        """``text`` with the stand-ins as literal segments; a neighbour that is empty is left out."""
        pieces = re.split(f"{self._open}([0-9]+){self._close}", text)  # plain, index, plain, index, …, plain
        segments = [Segment(self._found[int(piece)], literal=True) if i % 2 else Segment(piece)
                    for i, piece in enumerate(pieces)]
        return [segment for segment in segments if segment.text]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of messages with every text in them changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
