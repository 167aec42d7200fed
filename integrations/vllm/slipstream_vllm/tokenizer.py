"""The tokenizer of a model that an engine names by a folder or by a repository on the Hugging Face Hub, whose files the
engine has fetched already.

It knows nothing about engines.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.models.folder import tokenizer_hash
from slipstream.observe.log import logger

FILE = "tokenizer.json"


def digest_of(name: str, revision: str | None = None) -> str:
    """The ``tokenizer_hash`` of the model ``name``. "": unknown; then only n-gram drafters, which have no vocabulary,
    are accepted."""
    try:
        return tokenizer_hash(_folder(name, revision))
    except Exception as error:  # the Hub's client raises many types, and none may end the engine
        logger("vllm").warning("no tokenizer is known: only n-grams draft", model=name, why=str(error))
        return ""


def _folder(name: str, revision: str | None) -> Path:
    if (folder := Path(name)).is_dir():
        return folder
    # The engine's environment has this package, because the engine loads models with it.
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, FILE, revision=revision)).parent
