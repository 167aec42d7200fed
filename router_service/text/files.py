"""What the router reads from a model folder: the sampling defaults, special tokens spelt as plain text, and how many
characters a token can stand for.

All of it is read once, when a router starts. It knows nothing about requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from slipstream.base.errors import InvalidRequest, ModelError
from slipstream.models.folder import read_json
from slipstream.protocol.requests import Sampling

# Steps of a tokenizer that drop no character: a text of n characters has n / ``max_token_chars`` tokens at least.
LOSSLESS_STEPS = {
    "Sequence", "Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "Digits", "Metaspace", "Split",
    "Punctuation", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
# Without min_p: vLLM takes it only where there are no drafts.
DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "repetition_penalty")
TURN = re.compile(r"[|\uff5c].*(user|assistant|system|chatbot|turn|role).*[|\uff5c]", re.IGNORECASE)
MAX_COMPOSED = 4  # characters that Unicode may write as one


def literal_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, list[int]]:
    """The tokens of each of ``texts``, those of added tokens, as ordinary text."""
    normalizer, split, model = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model

    def tokens(text: str) -> list[int]:  # ``encode`` would find the added token
        normal: str = text if normalizer is None else normalizer.normalize_str(text)
        pieces = [(normal, (0, 0))] if split is None else split.pre_tokenize_str(normal)
        return [token.id for piece, _ in pieces for token in model.tokenize(piece)]

    return {text: tokens(text) for text in texts}


def turn_tokens(tokenizer: Tokenizer, template: str) -> dict[int, str]:
    """The tokens between turns that are not special, and their texts, as DeepSeek's <｜User｜>: added ones with a role
    between bars that the chat template writes. Others, as those of calls, may stand in what a model said."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()
            if not token.special and TURN.search(token.content) and token.content in template}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The defaults in generation_config.json for sampling fields that a request leaves out, as in vLLM and SGLang.
    Raises ModelError."""
    path = folder / "generation_config.json"
    config = read_json(path, missing_ok=True)
    found = {name: value for name in DEFAULT_FIELDS if (value := config.get(name)) is not None}
    try:
        for name, value in found.items():
            if type(value) not in ((int,) if name == "top_k" else (int, float)):
                raise InvalidRequest(name, f"expected a number, found {value!r}")
        Sampling(**found | {"top_k": max(found.get("top_k", 0), 0), "top_p": found.get("top_p") or 1.0})
    except InvalidRequest as error:
        raise ModelError(f"{path}: {error}") from error
    return found


def max_token_chars(tokenizer_json: Mapping[str, Any], vocab: Iterable[str]) -> int | None:
    """The largest number of characters that one token can stand for; None if there is no limit, because the tokenizer
    drops characters or joins unknown ones into one token. ``tokenizer_json``: the file's content."""
    model, added, vocabulary = tokenizer_json["model"], tokenizer_json.get("added_tokens") or (), set(vocab)
    if model["type"] == "BPE" and model.get("byte_fallback"):
        complete = vocabulary.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    else:
        complete = model["type"] == "BPE" and vocabulary.issuperset(ByteLevel.alphabet())
    steps = list(_steps([tokenizer_json.get("normalizer"), tokenizer_json.get("pre_tokenizer")]))
    kinds = {step["type"] for step in steps} | {step["behavior"] for step in steps if "behavior" in step}
    shortens = any(step["type"] == "Replace" and len(step["content"]) < len(step["pattern"].get("String", "x" * 99))
                   for step in steps)
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    if not complete or shortens or not kinds <= LOSSLESS_STEPS or strips:
        return None
    return max(map(len, vocabulary)) * (MAX_COMPOSED if kinds & {"NFC", "NFKC"} else 1)


def _steps(parts: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for part in parts:
        if part is not None:
            yield part
            yield from _steps(part.get("normalizers") or part.get("pretokenizers") or ())


def byte_alphabet(decoder: Mapping[str, Any]) -> tuple[dict[str, int] | None, bool]:
    """The byte that each character of a token stands for, None where tokens are spelt as by SentencePiece; and whether
    the first space of a text is not part of it. ``decoder``: of tokenizer.json."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level(), False
    if kinds & {"Replace", "Metaspace"} and kinds <= FALLBACK_STEPS:
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        return None, strips or any(step.get("prepend_scheme", "never") != "never" for step in steps)
    raise ModelError(f"tokenizer.json: decoder: {', '.join(sorted(kinds))} is not supported; "
                     "known: byte level, byte fallback, Metaspace")


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other characters for the other bytes, in order."""
    printable = {char: ord(char) for char in ByteLevel.alphabet() if ord(char) < 256}
    others = sorted(set(ByteLevel.alphabet()) - printable.keys())
    return printable | dict(zip(others, sorted(set(range(256)) - set(printable.values())), strict=True))
