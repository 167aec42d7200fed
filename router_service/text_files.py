"""What the files of a model folder say about text: what ends an answer, special tokens as plain text, chat templates.

All of it is read once, when a router starts. Files: tokenizer_config.json, chat_template.jinja, generation_config.json,
config.json. It knows nothing about requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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


def stop_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the eos_token of tokenizer_config.json."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ModelError(f"{folder / name}: eos_token_id: expected token ids, found {found!r}")
        if ids:
            return tuple(dict.fromkeys(ids))
    text = _token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    token = None if text is None else tokenizer.token_to_id(text)
    return () if token is None else (token,)
