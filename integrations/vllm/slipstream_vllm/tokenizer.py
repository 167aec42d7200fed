"""Tokenizers of models by the names that engines know: a folder, or a repository on the Hugging Face Hub, of which the
engine has fetched what it needs.

It knows nothing about engines.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.models.folder import tokenizer_hash
from slipstream.observe.log import logger

FILE = "tokenizer.json"


def digest_of(name: str, revision: str | None = None) -> str:
    """Which tokens the ids of the model ``name`` stand for (``tokenizer_hash``). "": nobody knows, so that drafters
    with a vocabulary are refused, and n-grams draft."""
    try:
        return tokenizer_hash(_folder(name, revision))
    except Exception as error:  # the Hub's client raises many kinds, and no engine is to end by it
        logger("vllm").warning("no tokenizer is known: only n-grams draft", model=name, why=str(error))
        return ""


def _folder(name: str, revision: str | None) -> Path:
    if (folder := Path(name)).is_dir():
        return folder
    # The engine's environment has it: how else would it come by the model?
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, FILE, revision=revision)).parent
