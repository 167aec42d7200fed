"""LiteLLM: chat, stream, tools, objects, completions, by its providers openai and hosted_vllm, and Anthropic's page."""

import json

import litellm
from checks import API, KEY, MODEL, URL, begin, check

ASKED = [{"role": "user", "content": "What is the sky like?"}]
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sky", "schema": {
    "type": "object", "properties": {"clouds": {"type": "boolean"}}, "required": ["clouds"],
    "additionalProperties": False}}}

begin("litellm")

for provider in ("openai", "hosted_vllm"):
    def ask(**more: object) -> object:
        return litellm.completion(f"{provider}/{MODEL}", messages=ASKED, api_base=API, api_key=KEY,
                                  **{"max_tokens": 300, **more})

    @check(f"{provider}: chat")
    def _() -> None:
        assert ask(max_tokens=8).usage.completion_tokens > 0

    @check(f"{provider}: stream")
    def _() -> None:
        assert list(ask(max_tokens=8, stream=True))

    @check(f"{provider}: tools")
    def _() -> None:
        call = ask(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")

    @check(f"{provider}: schema")
    def _() -> None:
        assert "clouds" in json.loads(ask(response_format=SCHEMA).choices[0].message.content)


@check("completions")
def _() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="One, two,", api_base=API,
                                     api_key=KEY, max_tokens=4)
    assert answer.choices[0].text


@check("anthropic")
def _() -> None:
    answer = litellm.completion(f"anthropic/{MODEL}", messages=ASKED, api_base=URL, api_key=KEY, max_tokens=8)
    assert answer.usage.completion_tokens > 0
