"""Anthropic's Messages API as a translation onto chat: requests in, whole answers and events out.

Rules:
1. A request becomes a body of a chat, and is checked as one. Refusals name this API's fields; those within messages
   and tools may have the chat's names.
2. Content comes in blocks: thinking, text, calls, in the order in which the model wrote them.
3. Turns of one role are one. An answer continues the last where that is the assistant's.
4. A system message between turns becomes part of the user's turn before it, marked as Claude Code marks such text: many
   templates take a system message only at the beginning, and that agent sends one with every request.
5. Thinking is switched on where the request asks for it; its budget has no effect. Some templates begin reasoning in
   any case.
6. Tools are functions; of blocks only text, calls, their results, thinking, text documents and what a search found are
   known. Calls of tools that a server runs, which a talk has from elsewhere, are left out and named. What stands beside
   a tool's result is part of it: Claude Code sends files so. A chat has no mark for a result that is an error: its text
   says so.

It knows nothing about models, routes or the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import orjson

from router_service.dialects.blocks import AnswerHead, Block, Blocks, What, event_of, strip_id_prefix
from router_service.dialects.fields import (
    THINKING,
    as_text_part,
    other_fields,
    part_type,
    read_object,
    read_text,
    read_tool_result,
    tool_result_part,
    unknown_parts,
)
from router_service.dialects.problems import Problem
from router_service.dialects.tools import Json
from router_service.text.calls import parse_json
from router_service.text.deltas import TextDelta
from router_service.text.rewritings import merge_turns
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_ITEMS, Usage

SAME_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "speculate", "min_p",
               "ignore_eos", "min_tokens", "cache_salt")
INERT = ("metadata", "service_tier", "container", "context_management")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CALL_ID_PREFIX = "toolu_"
OTHER_CALLS = ("_tool_use", "_tool_result")  # end the types of blocks of tools that a server runs
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
# Claude Code begins the system's text with this line for its maker. It changes with each request, and a cached prefix
# would end there.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
SIGNATURE = "unsigned"  # clients do not send back a thought whose signature is missing or empty
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "call": ("input_json_delta", "partial_json")}
ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
               404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
               503: "overloaded_error", 504: "timeout_error"}
# The chat's fields with another name here.
FIELD_NAMES = MappingProxyType({"response_format.json_schema": "output_config.format",
                                "response_format": "output_config.format", "stop": "stop_sequences",
                                "reasoning_effort": "output_config.effort"})


def chat_of(raw: Json) -> Json:
    """The body of a chat that asks the same. Raises InvalidRequest."""
    chat = {name: raw[name] for name in SAME_FIELDS if name in raw}
    system = BILLING.sub("", read_text("system", raw.get("system") or ""))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    given = raw.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages", "must be a list of at least one message")
    if len(given) > MAX_ITEMS or sum(len(m["content"]) for m in given if isinstance(m, dict)
                                     and isinstance(m.get("content"), list)) > MAX_ITEMS:
        raise InvalidRequest("messages", f"must have at most {MAX_ITEMS} items, and blocks in all")
    unknown: dict[str, bool] = {}
    for i, message in enumerate(given):
        messages += _chat_messages(f"messages[{i}]", message, i == 0, unknown)
    chat["messages"] = messages = merge_turns(messages)
    if raw.get("stop_sequences"):
        chat["stop"] = raw["stop_sequences"]
    if raw.get("tools") or raw.get("tool_choice"):
        chat |= _tools(raw.get("tools") or [], raw.get("tool_choice"))
    config, thinking = read_object(raw, "output_config"), read_object(raw, "thinking")
    if not isinstance(thinking.get("type", ""), str):
        raise InvalidRequest("thinking.type", "must be a string")
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    chat |= _response_format(raw, config)
    known = {*SAME_FIELDS, *INERT, "system", "messages", "stop_sequences", "tools", "tool_choice", "thinking",
             "output_config", "output_format"}
    chat |= unknown | other_fields(raw, known, chat)
    chat |= unknown_parts("output_config", config, ("format", "effort"))
    chat |= unknown_parts("thinking", thinking, ("type", "budget_tokens"))
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat = {"continue_final_message": True, "add_generation_prompt": False} | chat
    given = chat.get("chat_template_kwargs") or {}
    if isinstance(given, dict):
        chat["chat_template_kwargs"] = dict.fromkeys(THINKING, thinking.get("type", "disabled") != "disabled") | given
    return chat


def _response_format(raw: Json, config: Json) -> Json:
    """The schema in ``output_config``, or in the older ``output_format``."""
    name, format_ = "output_config.format", config.get("format")
    if format_ is None:
        name, format_ = "output_format", raw.get("output_format")
    if format_ is None:
        return {}
    if not isinstance(format_, dict) or format_.get("type") != "json_schema":
        raise InvalidRequest(name, 'must be as in {"type": "json_schema", "schema": {...}}')
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": format_.get("schema")}}}


def _chat_messages(at: str, message: Any, first: bool, unknown: dict[str, bool]) -> Iterator[Json]:
    """The messages of a chat for one ``message``: several where it has tool results."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{at}.role", "must be 'user', 'assistant' or 'system'")
    content = message.get("content")
    if message["role"] == "system":
        text = read_text(f"{at}.content", content)
        yield {"role": "system", "content": text} if first else {"role": "user", "content": REMINDER.format(text)}
        return
    if isinstance(content, str):
        yield {"role": message["role"], "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{at}.content", "must be a string or a list of blocks")
    texts, calls, thoughts = [], [], []
    has_results = message["role"] == "user" and any(part_type(block) == "tool_result" for block in content)
    for i, block in enumerate(content):
        block = tool_result_part(f"{at}.content", block, unknown) if has_results else as_text_part(block)
        kind = part_type(block)
        where = f"{at}.content[{i}]"
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use" and message["role"] == "assistant":
            calls.append({"id": strip_id_prefix(block.get("id"), CALL_ID_PREFIX), "type": "function",
                          "function": {"name": block.get("name"), "arguments": block.get("input")}})
        elif kind == "tool_result" and message["role"] == "user":
            given = block.get("content")
            result = "" if given is None else read_tool_result(f"{where}.content", given, unknown)
            yield {"role": "tool", "tool_call_id": strip_id_prefix(block.get("tool_use_id"), CALL_ID_PREFIX),
                   "content": f"Error: {result}" if block.get("is_error") is True else result}
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind.endswith(OTHER_CALLS) and message["role"] == "assistant":
            unknown[f"messages[].content[].{kind}"] = True
        elif kind != "redacted_thinking":
            raise InvalidRequest(where, "must be text, an assistant's call or thinking, or a result in a user's turn: "
                                 "nothing else is served here", "unsupported_parameter")
    if texts or calls or thoughts:
        yield {"role": message["role"], "content": "\n".join(texts), **({"tool_calls": calls} if calls else {}),
               **({"reasoning_content": "\n".join(thoughts)} if thoughts else {})}


def _tools(tools: Any, choice: Any) -> Json:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a list of tools")
    # Nobody here would run the others, so the model does not see them; they are named like unknown fields.
    server_tools = [tool for tool in tools if "input_schema" not in tool]
    tools = [tool for tool in tools if "input_schema" in tool]
    if any(tool.get("type", "custom") == "custom" for tool in server_tools):
        raise InvalidRequest("tools", "must have an input_schema each")
    unknown: Json = {f"tools[].{tool['type']}": True for tool in server_tools}
    functions = [{"type": "function", "function": {
        "name": tool.get("name"), "description": tool.get("description") or "", "parameters": tool["input_schema"]}}
        for tool in tools]
    choice = {"type": "auto"} if choice is None else choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    chat_choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind if isinstance(kind, str) else "")
    if kind == "tool":
        chat_choice = {"type": "function", "function": {"name": choice.get("name")}}
    if chat_choice is None:
        raise InvalidRequest("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    if not isinstance(single := choice.get("disable_parallel_tool_use"), bool | None):
        raise InvalidRequest("tool_choice.disable_parallel_tool_use", "must be true or false")
    has_choice = functions or choice.get("type") != "auto"
    return {"tools": functions, **({"tool_choice": chat_choice} if has_choice else {}), **unknown,
            **({"parallel_tool_calls": False} if single else {})}


class MessagesReply:
    """A message and its events."""

    def __init__(self, head: AnswerHead) -> None:
        self._head: Json = {"id": f"msg_{head.answer_id}", "type": "message", "role": "assistant", "model": head.model}
        self._blocks = Blocks(head.answer_id, head.markup, head.return_reasoning)

    def opening(self, usage: Usage) -> bytes:
        """The events before any token. ``usage``: what is known by then."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return event_of("message_start", {"message": message})

    def events(self, delta: TextDelta) -> bytes:
        """The events of ``delta``; b"" for none."""
        return b"".join(event_of(f"content_block_{name}", {"index": block.index, **fields})
                        for what, block, text in self._blocks.push_delta(delta)
                        for name, fields in _block_events(what, block, text))

    def closing(self, usage: Usage, stop: str | None) -> bytes:
        """The last events. ``stop``: the stop string that came."""
        last = {"delta": self._stop_fields(stop), "usage": _usage(usage)}
        return event_of("message_delta", last) + event_of("message_stop", {})

    def error_events(self, problem: Problem) -> bytes:
        """The event of an answer that ends with an error."""
        return event_of("error", error_of(problem))

    def body(self, usage: Usage, stop: str | None) -> Json:
        """The whole answer as one object."""
        content = [_block(block, block.text) for block in self._blocks.all]
        return {**self._head, "content": content, **self._stop_fields(stop), "usage": _usage(usage)}

    def _stop_fields(self, stop: str | None) -> Json:
        reason = STOP_REASONS[self._blocks.finish]
        return {"stop_reason": "stop_sequence" if reason == "end_turn" and stop else reason, "stop_sequence": stop}


def _block_events(what: What, block: Block, text: str) -> Iterator[tuple[str, Json]]:
    if what == "begin":
        yield "start", {"content_block": _block(block, "")}
    elif what == "add":
        yield "delta", {"delta": {"type": DELTAS[block.kind][0], DELTAS[block.kind][1]: text}}
    else:
        if block.kind == "reasoning":
            yield "delta", {"delta": {"type": "signature_delta", "signature": SIGNATURE}}
        yield "stop", {}


def _block(block: Block, text: str) -> Json:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": CALL_ID_PREFIX + block.call_id, "name": block.name, "input": _input(text)}


def error_of(problem: Problem) -> Json:
    """An error as the API writes it."""
    param = f"{problem.param}: " if problem.param and not problem.message.startswith(problem.param) else ""
    return {"type": "error", "error": {"type": ERROR_TYPES.get(problem.status, "api_error"),
                                       "message": param + problem.message}}


def _usage(usage: Usage) -> Json:
    # Clients add up all three counts of the prompt, so none may be missing.
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "output_tokens": usage.completion_tokens,
            "cache_read_input_tokens": usage.cached_tokens, "cache_creation_input_tokens": 0}


def _input(text: str) -> Json | orjson.Fragment:
    """A call's arguments as the model wrote them: its numbers may be longer than orjson's; {} for cut ones."""
    return orjson.Fragment(text) if isinstance(parse_json(text), dict) else {}
