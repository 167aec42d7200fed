"""aiperf: a few streamed chats with the server's own count of tokens; none may fail."""

import json
import sys
from pathlib import Path

from checks import KEY, MODEL, SCRATCH, TOKENIZER, URL, begin, check, command

begin("aiperf")


@check("chat")
def _() -> None:
    command(str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", URL,
            "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER, "--use-server-token-count",
            "--api-key", KEY, "--request-count", "4", "--concurrency", "2", "--synthetic-input-tokens-mean", "16",
            "--output-tokens-mean", "8", "--artifact-dir", SCRATCH, "--ui", "none")
    told = json.loads(Path(SCRATCH, "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 4, told["request_count"]
