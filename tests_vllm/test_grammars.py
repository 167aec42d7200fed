"""Answers that are bound to grammars, in vLLM with drafts: those of plain vLLM, greedy and with a seed, and vLLM never
meets a draft token that its grammar forbids. Default model, float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import free_port
from slipstream.protocol.grammar import JSON_OBJECT, Grammar
from target_service.vllm_words import structured
from tests_vllm.running import PROMPTS, draft, engine

pytestmark = pytest.mark.timeout(900)
SCHEMA = {"type": "object", "properties": {"facts": {"type": "array", "items": {"type": "string", "maxLength": 40},
                                                     "minItems": 2, "maxItems": 4}, "sure": {"type": "boolean"}},
          "required": ["facts", "sure"], "additionalProperties": False}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)), "object": JSON_OBJECT,
    "regex": Grammar("regex", r"(The (quick|slow) (brown|red) fox\. ){3}[0-9]{2}"),
    "choice": Grammar("choice", json.dumps(["the moon is made of rock", "the moon is made of cheese", "no"])),
    "ebnf": Grammar("ebnf", r'root ::= "\u0054he fox:" word{1,6} "."' "\n" r'word ::= " " [\u0061-z]{1,9}'),
    "lark": Grammar("lark", 'start: "The fox:" word{1,6} "."\nword: " " /[a-z]{1,9}/'),
}
SEEDED = {"temperature": 0.8, "seed": 5}
TOKENS = 64


GREEDY = [(prompt, name, dict[str, Any]()) for name in GRAMMARS for prompt in (PROMPTS[1], PROMPTS[3])]
ALL = GREEDY + [(prompt, name, SEEDED) for prompt, name, _ in GREEDY]


def asked(running: Any, batch: int, what: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    each = [{"structured_outputs": structured(GRAMMARS[name]), **more} for _, name, more in what]
    said: dict[str, Any] = running.ask([prompt for prompt, _, _ in what], batch, TOKENS, each=each, ignore_eos=False)
    return said


def test_answers_are_plain_vllms_and_keep_to_their_grammars(vllm_python: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    bound = {"structured_outputs_config": {"backend": "guidance"}}
    drafting = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "deadline_s": 2.0}
    with engine(vllm_python, None, **bound) as alone:
        plain = asked(alone, 8, GREEDY)["tokens"]  # its noise is another
    with engine(vllm_python, drafting, log=log, **bound) as drafted:
        undrafted = asked(drafted, 8, ALL)
        assert not undrafted["drafted"] and undrafted["tokens"][: len(GREEDY)] == plain
        service = draft(port)
        try:
            while not drafted.ask(PROMPTS[3:], 1)["accepted"]:
                pass  # the draft may still come up
            for batch in (1, 8):
                before = drafted.ask(PROMPTS[:1], 1, 1)
                said = asked(drafted, batch, ALL)
                for what, ours, theirs in zip(ALL, said["tokens"], undrafted["tokens"], strict=True):
                    assert ours == theirs, what
                assert said["accepted"] > before["accepted"], "no draft token was used"
        finally:
            service.kill()
            service.wait()
    over = [(name, text) for (_, name, _), text, finish in zip(ALL, said["texts"], said["finishes"], strict=True)
            if finish == "stop"]
    assert {name for name, _ in over} >= {"schema", "regex", "choice", "lark", "ebnf"}
    for name, text in over:
        assert keeps(name, text), (name, text)
    assert "grammar" not in log.read_text(), "vLLM met what its grammar forbids"


def keeps(name: str, text: str) -> bool:
    """Whether an answer that is over keeps to its grammar."""
    if name in ("schema", "object"):
        said = json.loads(text)
        return isinstance(said, dict) and (name == "object" or (said.keys() == {"facts", "sure"}
                                                                and 2 <= len(said["facts"]) <= 4))
    if name == "choice":
        return text in json.loads(GRAMMARS[name].source)
    return re.fullmatch(GRAMMARS[name].source if name == "regex" else r"The fox:( [a-z]{1,9}){1,6}\.", text) is not None
