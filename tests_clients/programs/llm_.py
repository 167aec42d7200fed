"""`llm` on the command line, with the server as one of its models: chat, stream, -T, --schema."""

import json
import os
import sys
from pathlib import Path

from checks import API, MODEL, SCRATCH, begin, check, command

os.environ["LLM_USER_PATH"] = SCRATCH
Path(SCRATCH, "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {API}\n  api_key_name: openai\n  supports_tools: true\n"
    "  supports_schema: true\n", encoding="utf-8")
FEW = ("-o", "max_tokens", "300", "--no-log")


def llm(*words: str) -> str:
    return command(sys.executable, "-m", "llm", "-m", "ours", *FEW, *words)


begin("llm")


@check("chat")
def _() -> None:
    assert llm("--no-stream", "Say something.").strip()


@check("stream")
def _() -> None:
    assert llm("Say something.").strip()


@check("tools")
def _() -> None:
    llm("-T", "llm_version", "--no-stream", "Which version is it?")


@check("schema")
def _() -> None:
    schema = {"type": "object", "properties": {"clouds": {"type": "boolean"}}, "required": ["clouds"],
              "additionalProperties": False}
    assert "clouds" in json.loads(llm("--schema", json.dumps(schema), "--no-stream", "What is the sky like?"))
