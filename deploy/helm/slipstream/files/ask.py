"""`helm test`: one question through the router; its answer must come, and from drafts where there are some.

Usage: ask.py ADDRESS drafts|plain [FILE WITH KEYS]. Needs Python alone.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPT = ("Copy this text exactly: The quick brown fox jumps over the lazy dog. The quick brown fox runs through the "
          "quiet forest. The lazy dog sleeps under the old tree. The quick brown fox jumps over the old tree.")
PATIENCE_S = 120


def call(address: str, path: str, key: str, body: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, str]]:
    """The reply and its headers."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=PATIENCE_S) as reply:
        return json.load(reply), reply.headers


def model_when_ready(address: str, key: str) -> str:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return str(call(address, "/v1/models", key)[0]["data"][0]["id"])
        except OSError as error:
            if time.monotonic() > end_s or (isinstance(error, urllib.error.HTTPError) and error.code == 401):
                raise
            time.sleep(2)


def drafted(address: str, key: str, model: str) -> bool:
    """Ask; returns whether drafts served the answer. Accepted tokens alone may be copies of the prompt, which need no
    draft: the mode says that one is connected."""
    options = {"model": model, "max_tokens": 64, "temperature": 0}
    try:
        answer, headers = call(address, "/v1/chat/completions", key,
                               {**options, "messages": [{"role": "user", "content": PROMPT}]})
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        answer, headers = call(address, "/v1/completions", key, {**options, "prompt": PROMPT})  # a model without chats
    usage, mode = answer["usage"], headers.get("x-slipstream-mode", "")
    count = int(usage["completion_tokens_details"]["accepted_prediction_tokens"])
    print(f"{usage['completion_tokens']} tokens, {count} of them drafted or copied, mode {mode}", flush=True)
    return count > 0 and mode == "speculative"


def first_key(file: str) -> str:
    """The first word of a line; its tenant's fields stand behind it."""
    lines = (line.split() for line in Path(file).read_text(encoding="utf-8-sig").splitlines())
    return next(words[0] for words in lines if words and not words[0].startswith("#"))


def main(address: str, wanted: str, keys: str = "") -> None:
    key = first_key(keys) if keys else ""
    model = model_when_ready(address, key)
    end_s = time.monotonic() + PATIENCE_S
    while not drafted(address, key, model) and wanted == "drafts":
        if time.monotonic() > end_s:
            sys.exit("drafts did not serve the answer: see docs/runbooks/SlipstreamDraftDown.md")
        time.sleep(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
