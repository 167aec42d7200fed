"""What the files of a model folder say about text: how tokens are spelt, what ends an answer, the chat template.

All of it is read once, when a router starts. Files: tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json, config.json. It knows nothing about requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from slipstream.base.errors import ModelError
from slipstream.models.folder import read_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SPACE = "\u2581"  # how SentencePiece writes a space


class GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_source(folder: Path) -> tuple[str, dict[str, str]] | None:
    """The chat template of a model folder (``chat_template.jinja`` or tokenizer_config.json), and the bos_token and its
    like, which it may name; None if there is none."""
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
    return source, named


def _token_text(entry: object) -> str | None:
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def compiled(source: str) -> Template:
    """In a sandbox that offers what transformers' does: ``raise_exception``, ``strftime_now``, ``tojson``, loop
    controls and the ``generation`` tag. Raises ModelError when ``source`` is not a template."""
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


def literals(tokenizer: Tokenizer, specials: Iterable[str]) -> dict[str, list[int]]:
    """The tokens that spell each special token as ordinary text."""
    tokenizer.encode_special_tokens = True
    literals = {text: list(tokenizer.encode(text, add_special_tokens=False).ids) for text in specials}
    tokenizer.encode_special_tokens = False
    return literals


def spelling(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
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


def stop_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
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
