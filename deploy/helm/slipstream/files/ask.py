"""`helm test`: one question through the router; its answer must come, and from drafts where there are some.

Usage: ask.py ADDRESS drafts|plain [FILE WITH KEYS]. Needs Python alone.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = ("Copy this text exactly: The quick brown fox jumps over the lazy dog. The quick brown fox runs through the "
          "quiet forest. The lazy dog sleeps under the old tree. The quick brown fox jumps over the old tree.")
PATIENCE_S = 120


def call(address: str, path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=PATIENCE_S) as reply:
        return json.load(reply)


def model_when_ready(address: str, key: str) -> str:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return str(call(address, "/v1/models", key)["data"][0]["id"])
        except OSError as error:
            if time.monotonic() > end_s or (isinstance(error, urllib.error.HTTPError) and error.code == 401):
                raise
            time.sleep(2)


def accepted(address: str, key: str, model: str) -> int:
    """Ask; returns how many tokens of the answer came from drafts."""
    answer = call(address, "/v1/chat/completions", key, {
        "model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64, "temperature": 0})
    usage = answer["usage"]
    count = int(usage["completion_tokens_details"]["accepted_prediction_tokens"])
    print(f"{usage['completion_tokens']} tokens, {count} of them from drafts", flush=True)
    return count


def first_key(file: str) -> str:
    lines = (line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines())
    return next(line for line in lines if line and not line.startswith("#"))


def main(address: str, wanted: str, keys: str = "") -> None:
    key = first_key(keys) if keys else ""
    model = model_when_ready(address, key)
    end_s = time.monotonic() + PATIENCE_S
    while not accepted(address, key, model) and wanted == "drafts":
        if time.monotonic() > end_s:
            sys.exit("no draft token was accepted: see docs/runbooks/SlipstreamDraftDown.md")
        time.sleep(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
