"""Doors of a whole router: what clients send in each dialect, what models write back, and ids of events.

A door's bytes are what a model says, a zero, and a body; a refusal is an answer of the API, so these doors raise none.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import orjson

from router_service.app import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from router_service.event_id import HEADER
from router_service.text.marks import BARE, LLAMA, REASONING_MARKS, Style
from router_service.text.markup import Markup, NamedCall
from slipstream.protocol.chat import ChatOptions, Function, Message, ToolCall
from slipstream.protocol.grammar import Grammar
from slipstream.wire.inference import decode_chat, decode_complete, encode_chat, encode_complete
from tests_fuzz.programs import folder
from tests_fuzz.surface import Router, events

READS = {"accept": "text/event-stream"}
COUNTING = ("/tokenize", "/detokenize", f"{MESSAGES}/count_tokens")
ID_BYTES = 57  # of an event's id, before it is written in base64
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}},
          "$defs": {"c": {"enum": ["x", "y"]}}}
CALL = '<think>why</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
STYLES = (Style(("<tool_call>",), REASONING_MARKS[0], True), Style(("[TOOL_CALLS]",), REASONING_MARKS[1], True), BARE,
          Style((LLAMA, "<tool_call>"), None, True), Style(("<｜tool▁calls▁begin｜>",), REASONING_MARKS[0], True),
          Style(("<|tool_calls_section_begin|>",), None, True))


@cache
def router() -> Router:
    return Router(folder())


def http_answer(data: bytes) -> None:
    """A chat with all that binds an answer: formats, tools, what was called before."""
    _answered(CHAT, data)


def http_messages(data: bytes) -> None:
    _answered(MESSAGES, data)


def http_responses(data: bytes) -> None:
    _answered(RESPONSES, data)


def http_counting(data: bytes) -> None:
    """Tokens of texts and texts of tokens; the first byte says which."""
    if data:
        status, told = router().post(COUNTING[data[0] % len(COUNTING)], data[1:], {})
        assert isinstance(json.loads(told), dict), (status, told)


def _answered(path: str, data: bytes) -> None:
    says, _, body = data.partition(b"\0")
    status, told = router().post(path, body, {}, says.decode(errors="replace"))
    try:
        answer = json.loads(told)
    except ValueError:
        answer = None
    assert isinstance(answer, dict) or (status == 200 and events(told)), (status, told)


def event_ids(data: bytes) -> None:
    """A stream that breaks behind one of its events and is picked up there; with a second byte that is not zero its id
    has changed on the way."""
    if len(data) < 3:
        return
    cut, lie, place, body = data[0], data[1], data[2], data[3:]
    path = COMPLETIONS if b'"prompt"' in body else CHAT
    status, told = router().post(path, body, READS)
    whole = events(told) if status == 200 and told.startswith((b"id: ", b"data: ")) else []
    known = [number for number, (id_, _) in enumerate(whole) if id_]
    if not known:
        return
    at = known[cut % len(known)]
    id_ = bytearray(urlsafe_b64decode(whole[at][0]))
    id_[place % ID_BYTES] ^= lie
    status, told = router().post(path, body, {HEADER: urlsafe_b64encode(id_).decode()})
    if lie:
        return
    assert status == 200, told
    # What an event of usage says of rounds is of this computation.
    kept = [said for _, said in whole[at + 1:] if said is None or said.get("choices")]
    assert [said for _, said in events(told) if said is None or said.get("choices")] == kept, (whole, at, told)


def grpc_answer(data: bytes) -> None:
    """Whole answers over gRPC: the first byte says whether to a conversation or to a text."""
    front, r = router().front, router()
    if data[:1] < b"\x80":
        model, messages, options = decode_chat(data[1:])
        r.told(front.chat(model, messages, replace(options, begun=None)))
    else:
        model, prompt, options = decode_complete(data[1:])
        r.told(front.complete(model, prompt, replace(options, begun=None)))


def markup(data: bytes) -> None:
    """What a model writes is told apart alike however it is cut: by style (the first byte), in pieces (the second)."""
    if len(data) < 2:
        return
    text, piece = data[2:].decode(errors="replace"), 1 + data[1] % 7
    number = data[0] % (2 * len(STYLES) + 1)

    def made() -> Markup | NamedCall:
        if number == 2 * len(STYLES):
            return NamedCall("f")
        return Markup(STYLES[number // 2], {"f": SCHEMA, "g": {}}, bool(number % 2), 1 if data[1] > 200 else None)

    cut = [text[at: at + piece] for at in range(0, len(text), piece)]
    whole, pieces = _parts(made(), [text]), _parts(made(), cut)
    assert whole == pieces, (whole, pieces)


def _parts(markup: Markup | NamedCall, texts: list[str]) -> Any:
    reasoning, content, calls = "", "", dict[int, list[str]]()
    for number, text in enumerate(texts):
        parts = markup.push(text, number == len(texts) - 1)
        reasoning, content = reasoning + parts.reasoning, content + parts.content
        for call in parts.calls:
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.name
            name_and_arguments[1] += call.arguments
    return reasoning, content, calls, markup.calls_complete


def answer_seeds() -> Iterator[bytes]:
    message = {"role": "user", "content": "hello"}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    base = {"model": "tiny", "messages": [message], "max_tokens": 90}
    for extra in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "required", "stream": True},
                  {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
                  {"messages": [message, called, result], "tools": [tool], "parallel_tool_calls": False},
                  {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
                  {"response_format": {"type": "json_object"}, "stream": True, "logprobs": True, "top_logprobs": 2},
                  {"structured_outputs": {"regex": "[ab]+"}, "n": 2}, {"guided_choice": ["x", "y"]},
                  {"guided_grammar": 'start: "a" | "b"'}, {"reasoning_effort": "low", "stop": ["w3"]},
                  {"chat_template_kwargs": {"enable_thinking": False}, "truncate_prompt_tokens": 4,
                   "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        yield CALL.encode() + b"\0" + json.dumps(base | extra).encode()


def messages_seeds() -> Iterator[bytes]:
    text = {"type": "text", "text": "hi"}
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    used = {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, text,
                                             {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [text]}, text]}
    base = {"model": "tiny", "max_tokens": 90, "messages": [{"role": "user", "content": "hello"}]}
    for extra in ({"system": [text], "stop_sequences": ["w3"], "temperature": 0.5}, {"stream": True, "tools": [tool]},
                  {"tools": [tool], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
                  {"messages": [*base["messages"], used, result], "tools": [tool], "tool_choice": {"type": "any"}},
                  {"messages": [*base["messages"], {"role": "assistant", "content": "so"}], "metadata": {}},
                  {"thinking": {"type": "enabled", "budget_tokens": 9}, "stream": True, "top_k": 5}):
        yield CALL.encode() + b"\0" + json.dumps(base | extra).encode()


def responses_seeds() -> Iterator[bytes]:
    part = {"type": "input_text", "text": "hi"}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
    items = [{"role": "user", "content": [part]}, {"type": "reasoning", "summary": []},
             {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
             {"type": "function_call_output", "call_id": "c", "output": "2"}]
    base = {"model": "tiny", "max_output_tokens": 90, "input": "hello"}
    for extra in ({"instructions": "be brief", "store": False}, {"input": items, "tools": [tool], "stream": True},
                  {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
                  {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "stream": True},
                  {"reasoning": {"effort": "none"}, "temperature": 0.0, "top_logprobs": 0}):
        yield CALL.encode() + b"\0" + json.dumps(base | extra).encode()


def counting_seeds() -> Iterator[bytes]:
    yield b"\0" + json.dumps({"model": "tiny", "prompt": "hello <|im_end|>", "add_special_tokens": False}).encode()
    yield b"\0" + json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
    yield b"\0" + json.dumps({"model": "tiny", "prompt": [1, 2, 259]}).encode()
    yield b"\1" + json.dumps({"model": "tiny", "tokens": [104, 105, 256]}).encode()
    yield from (b"\2" + body.partition(b"\0")[2] for body in messages_seeds())


def event_seeds() -> Iterator[bytes]:
    options = {"model": "tiny", "stream": True, "max_tokens": 20, "seed": 3}
    chat = options | {"messages": [{"role": "user", "content": "hello"}]}
    for extra in ({"stop": ["w2"]}, {"logprobs": True, "top_logprobs": 1, "speculate": False},
                  {"stream_options": {"include_usage": True}, "return_token_ids": True}):
        yield b"\x02\0\0" + orjson.dumps(chat | extra)
    yield b"\x03\0\0" + orjson.dumps(options | {"prompt": "ab", "logprobs": 2})
    yield b"\x03\x01\x30" + orjson.dumps(options | {"prompt": "ab"})


def grpc_answer_seeds() -> Iterator[bytes]:
    said = (Message("system", "be brief"), Message("user", "hello"))
    for grammar in (None, Grammar("json_schema", json.dumps(SCHEMA)), Grammar("choice", '["a", "b"]'),
                    Grammar("regex", "[a-c]+"), Grammar("lark", 'start: "a" | "b"')):
        options = ChatOptions(max_tokens=5, temperature=0.5, seed=9, stop=("x",), grammar=grammar)
        yield b"\x00" + encode_chat("tiny", said, options)
        yield b"\xff" + encode_complete("tiny", "once", options)
    yield from (b"\x00" + data for data in tools_seeds())


def tools_seeds() -> Iterator[bytes]:
    """Chats of a body over gRPC that call, and have called."""
    calls, tools = (ToolCall("f", '{"a": [1, {}]}', "c1"),), (Function("f", "does", json.dumps(SCHEMA)), Function("g"))
    said = (Message("user", "hello"), Message("assistant", "", calls, reasoning_content="hm"),
            Message("tool", "2", tool_call_id="c1", name="f"))
    for options in (ChatOptions(tool_choice="required", parallel_tool_calls=False), ChatOptions(function="f"),
                    ChatOptions(chat_template_kwargs='{"enable_thinking": [true]}', reasoning_effort="low",
                                include_reasoning=False, stop_token_ids=(3, 4), truncate_prompt_tokens=9)):
        yield encode_chat("tiny", said, replace(options, tools=tools, max_tokens=5, seed=9))


def markup_seeds() -> Iterator[bytes]:
    yield b"\x00\x01" + CALL.encode()
    yield b"\x00\x02<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call> then"
    yield b"\x00\x03<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    yield b'\x02\x01x [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, "}"]}}]'
    yield b'\x02\x01[TOOL_CALLS]f[CALL_ID]9[ARGS]{"a": 1}'
    yield b'\x04\x01{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    yield ('\x08\x02<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>").encode()
    yield (b'\x0a\x05<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 2}'
           b"<|tool_call_end|><|tool_calls_section_end|>")
    yield b'\x0c\x01{"a": 1}'

