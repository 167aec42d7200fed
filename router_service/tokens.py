"""Text and tokens: prompts in, incremental text out, stop strings.

Rules:
1. The pieces of ``Detokenizer`` joined are the decoded answer: never half a character, special tokens left out. (Where
   a model writes bytes that are no UTF-8, byte-fallback tokenizers decode a run of them to other counts of U+FFFD.)
2. ``StopStrings`` ends a text where the first stop string is complete, however the text was cut into pieces; the
   longest one if several end there. Nothing from its start on comes out.
3. A raw prompt is its author's in full: special tokens in it are tokens. Chat messages are not (see chat_template).

Files: tokenizer.json, tokenizer_config.json, generation_config.json, config.json of a model folder.
It knows nothing about HTTP, models or torch.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router_service.chat_template import load_chat_template
from slipstream.base.errors import InvalidRequest, ModelError
from slipstream.models.folder import load_tokenizer, read_json

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SPACE = "\u2581"  # how SentencePiece writes a space


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
        self._literals = _literals(self._tokenizer, self._specials.values())
        self._spell, self.starts_with_space = _spelling(self._tokenizer)
        self._bytes: dict[int, bytes] = {}  # of ordinary tokens that were asked for
        self._texts: dict[int, str | None] = {}  # what ``whole_text`` said
        self._template = load_chat_template(folder, self._specials.values())
        self.stop_token_ids: tuple[int, ...] = _stop_token_ids(folder, self._tokenizer)

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


class StopStrings:
    """Cuts one answer's text before the first stop string. ``matched`` names it once it came."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest("stop") for an empty string, too many of them, or one that is too long."""
        if len(stops) > MAX_STOPS:
            raise InvalidRequest("stop", f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise InvalidRequest("stop", f"each string must have 1 to {MAX_STOP_LENGTH} characters")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may go out now: what could still become a stop string is held back. "" after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        kept = self._unfinished(text)
        self._held = text[len(text) - kept:]
        return text[:len(text) - kept]

    def flush(self) -> str:
        """What was held back and did not become a stop string after all."""
        text, self._held = self._held, ""
        return text

    def _unfinished(self, text: str) -> int:
        """The length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _literals(tokenizer: Tokenizer, specials: Iterable[str]) -> dict[str, list[int]]:
    """The tokens that spell each special token as ordinary text."""
    tokenizer.encode_special_tokens = True
    literals = {text: list(tokenizer.encode(text, add_special_tokens=False).ids) for text in specials}
    tokenizer.encode_special_tokens = False
    return literals


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


def _stop_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the eos_token of tokenizer_config.json."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ModelError(f"{folder / name}: eos_token_id: expected token ids, found {found!r}")
        if ids:
            return tuple(dict.fromkeys(ids))
    entry = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = entry.get("content") if isinstance(entry, dict) else entry
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return () if token is None else (token,)
