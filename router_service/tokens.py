"""Text and tokens: prompts and chat messages in, incremental text out.

Rules:
1. The pieces of ``Detokenizer`` joined are the decoded answer: never half a character, special tokens left out. (Where
   a model writes bytes that are no UTF-8, byte-fallback tokenizers decode a run of them to other counts of U+FFFD.)
2. A raw prompt is its author's in full: special tokens in it are tokens.
3. Only the chat template of the model folder is ever rendered, in a sandbox, with a cap on what it may write. A request
   brings none.
4. The text of a special token inside a message (``<|im_end|>`` in a question) stays text. Left to the tokenizer it
   would become the token, and a user could end his turn and write the system's; here it comes out of ``render`` as a
   literal segment of its own. Messages without such text give exactly the prompt that transformers gives.

It knows nothing about files (``text_files`` reads them), HTTP, models or torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer

from router_service.text_files import compiled, literals, stop_token_ids, template_source
from slipstream.base.errors import InvalidRequest, ModelError
from slipstream.models.folder import load_tokenizer

MAX_RENDERED = 4 << 20  # characters
FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SPACE = "\u2581"  # how SentencePiece writes a space
PRIVATE_USE = range(0xE000, 0xF8FE, 2)  # characters that no text of meaning holds; two of them mark a literal


class TextCodec:
    """The tokenizer and the chat template of one model folder. Nothing about it changes; threads may share it.

    ``stop_token_ids`` end an answer (the model's end-of-text and end-of-turn tokens); ``vocab_size`` is the
    tokenizer's, which may be below the model's.
    """

    __slots__ = ("_bytes", "_literals", "_specials", "_spell", "_template", "_texts", "_tokenizer", "starts_with_space",
                 "stop_token_ids", "vocab_size")

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError naming the file and field that cannot be used."""
        folder = Path(folder)
        self._tokenizer = load_tokenizer(folder)
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._specials: dict[int, str] = {i: token.content for i, token in added.items() if token.special}
        self._literals = literals(self._tokenizer, self._specials.values())
        self._spell, self.starts_with_space = _spelling(self._tokenizer)
        self._bytes: dict[int, bytes] = {}  # of ordinary tokens that were asked for
        self._texts: dict[int, str | None] = {}  # what ``whole_text`` said
        source = template_source(folder)
        self._template = None if source is None else ChatTemplate(*source, self._specials.values())
        self.stop_token_ids: tuple[int, ...] = stop_token_ids(folder, self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """The tokens of a raw prompt, begun as the tokenizer begins texts (BOS where the model has one)."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn. Raises InvalidRequest("messages")."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send a prompt to /v1/completions")
        tokens: list[int] = []
        for segment in self._template.render(messages, add_generation_prompt):
            if segment.literal:
                tokens += self._literals[segment.text]
            else:
                tokens += self._encode(segment.text, "messages", add_special_tokens=False)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a whole answer, special tokens left out."""
        detokenizer = Detokenizer(self)
        return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()

    def is_special(self, token: int) -> bool:
        return token in self._specials

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, maybe part of a character; b"" for an id without a token."""
        found = self._bytes.get(token)
        if found is not None:
            return found
        if token in self._specials:
            return self._specials[token].encode()
        spelt = self._tokenizer.id_to_token(token) if 0 <= token < self.vocab_size else None
        if spelt is None:
            return b""
        found = self._bytes[token] = self._spell(spelt)
        return found

    def whole_text(self, token: int) -> str | None:
        """The text of a token that is whole characters, whatever stands before it; "" for a special one. None for one
        that may need its neighbours."""
        try:
            return self._texts[token]
        except KeyError:
            self._texts[token] = text = "" if self.is_special(token) else _decoded(self.token_bytes(token))
            return text

    def token_text(self, token: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, f"not Unicode text: a lone surrogate at character {error.start}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


class Detokenizer:
    """The text of one answer, token by token."""

    __slots__ = ("_at_start", "_codec", "_open", "_utf8")

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = codec.starts_with_space
        self._open = False  # whether a character is unfinished

    def push(self, token: int) -> str:
        """The text that is complete with ``token``; "" while a character is unfinished and for special tokens."""
        text = None if self._open else self._codec.whole_text(token)
        if text is None:
            if self._codec.is_special(token):
                return ""
            text = self._utf8.decode(self._codec.token_bytes(token))
            self._open = self._utf8.getstate()[0] != b""
        return self._begin(text) if self._at_start else text

    def flush(self) -> str:
        """What is left at the end of an answer: U+FFFD for an unfinished character, else ""."""
        return self._begin(self._utf8.decode(b"", final=True))

    def _begin(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the prompt. A literal one is the text of a special token that must not become the token."""

    text: str
    literal: bool = False


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
        self._template = compiled(source)

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


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _spelling(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token is written in the vocabulary, and whether the first space of a text is not part of it."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level(), False
    if kinds & {"Replace", "Metaspace"} and kinds <= FALLBACK_STEPS:
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        return _byte_fallback, strips or any(step.get("prepend_scheme", "never") != "never" for step in steps)
    raise ModelError(f"tokenizer.json: decoder: {', '.join(sorted(kinds))} is not supported; "
                     "known: byte level, byte fallback, Metaspace")


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token is written as it is
            return token.encode()

    return spell


def _byte_fallback(token: str) -> bytes:
    """SentencePiece: ``<0x0A>`` is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()
