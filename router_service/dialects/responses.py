"""OpenAI's Responses API as a translation onto chat: requests in, whole answers and events out.

Rules:
1. A request becomes a body of a chat, and is checked as one. Refusals name this API's fields; those within messages
   and tools may have the chat's names.
2. Nothing is kept: a conversation comes whole with every request (``store: false``).
3. Tools are functions, also those in namespaces: the model gets both names as one. Other tools and their calls are left
   out and named; calls of tools that take text, which a talk has from elsewhere, are those of functions. Known input
   items are messages, calls, their results and reasoning. Reasoning belongs to the message or calls after it; the
   template decides whether to show it. It is also returned as "encrypted" content (in plain text), because some
   clients send back only that.
4. Turns of one role are one: agents send instructions and what a developer says, then several messages of a user.

It knows nothing about models, routes or the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from router_service.dialects.blocks import AnswerHead, Block, Blocks, What, event_of, strip_id_prefix
from router_service.dialects.fields import (
    Refused,
    as_text_part,
    other_fields,
    read_object,
    read_text,
    read_tool_result,
    unknown_parts,
)
from router_service.dialects.problems import Problem
from router_service.dialects.tools import Json
from router_service.text.deltas import TextDelta
from router_service.text.rewritings import merge_turns
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_ITEMS, Usage

SAME_FIELDS = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "speculate", "top_k", "min_p",
               "cache_salt", "ignore_eos", "min_tokens", "stop", "chat_template_kwargs")
_STATELESS = "nothing is kept: send the whole conversation as input"
_LOGPROBS = "chat completions and completions tell log probabilities"
REFUSED: Mapping[str, Refused] = MappingProxyType({
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), Refused((), _STATELESS)),
    "messages": Refused((), "send them as input"),
    "background": Refused((False,), "leave it out and stream the answer"), "top_logprobs": Refused((0,), _LOGPROBS),
    "truncation": Refused(("disabled", "auto"), "shorten the input"),  # one that fits needs none
    "max_tool_calls": Refused((), "leave it out: whoever asks runs the tools"),
    "context_management": Refused((), "shorten the input")})
INERT = ("store", "include", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
         "safety_identifier", "stream_options", "client_metadata")
UNSEALED = "unsealed:"  # begins our "encrypted" content of reasoning; other servers' cannot be read here
CALL_ID_PREFIX = "call_"
TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")  # that a response repeats
TOOL_TYPES = ("function", "namespace")
OTHER_CALLS = ("_call", "_call_output")  # end the types of items of other tools
MAX_METADATA, MAX_METADATA_CHARS = 16, 576  # entries, and characters of each
# The chat's fields with another name here.
FIELD_NAMES = MappingProxyType({"tool_choice.allowed_tools": "tool_choice",
                                "response_format.json_schema": "text.format", "response_format": "text.format",
                                "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"})


def chat_of(raw: Json) -> Json:
    """The body of a chat that asks the same. Raises InvalidRequest."""
    for name, refused in REFUSED.items():
        if refused.refuses(raw.get(name)):
            raise InvalidRequest(name, f"is not served here; {refused.advice}", "unsupported_parameter")
    if isinstance(raw.get("include"), list) and "message.output_text.logprobs" in raw["include"]:
        raise InvalidRequest("include", f"message.output_text.logprobs is not served here; {_LOGPROBS}",
                             "unsupported_parameter")
    chat = {name: raw[name] for name in SAME_FIELDS if raw.get(name) is not None}
    if raw.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = raw["max_output_tokens"]
    if not isinstance(instructions := raw.get("instructions"), str | None):
        raise InvalidRequest("instructions", "must be a string")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    given = raw.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or len(items) > MAX_ITEMS:
        raise InvalidRequest("input", f"must be a string, or a list of 1 to {MAX_ITEMS} items")
    unknown: dict[str, bool] = {}
    for i, item in enumerate(items):
        messages += _chat_messages(f"input[{i}]", item, unknown)
    if not messages:
        raise InvalidRequest("input", "holds no item that is served here")
    chat["messages"] = merge_turns(messages)
    chat |= _tools(raw.get("tools"), raw.get("tool_choice"))
    text, reasoning = read_object(raw, "text"), read_object(raw, "reasoning")
    if text.get("format") is not None:
        format_ = read_object(text, "format", "text.")
        chat["response_format"] = format_ if format_.get("type") != "json_schema" else {
            "type": "json_schema", "json_schema": {"name": format_.get("name"), "schema": format_.get("schema")}}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    metadata = read_object(raw, "metadata")
    if len(metadata) > MAX_METADATA or not all(isinstance(value, str) and len(name) + len(value) <= MAX_METADATA_CHARS
                                               for name, value in metadata.items()):
        raise InvalidRequest("metadata", f"must be at most {MAX_METADATA} texts, of {MAX_METADATA_CHARS} characters "
                             "with their names")
    known = {*SAME_FIELDS, *REFUSED, *INERT, "max_output_tokens", "instructions", "input", "tools", "tool_choice",
             "text", "reasoning", "metadata"}
    chat |= unknown | other_fields(raw, known, chat)
    return chat | unknown_parts("text", text, ("format",)) | unknown_parts(
        "reasoning", reasoning, ("effort", "summary", "generate_summary"))


def _chat_messages(at: str, item: Any, unknown: dict[str, bool]) -> Iterator[Json]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        content = item.get("content")
        yield {"role": role, "content": read_text(
            f"{at}.content", list(map(as_text_part, content)) if isinstance(content, list) else content)}
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        call = {"id": strip_id_prefix(item.get("call_id"), CALL_ID_PREFIX), "type": "function",
                "function": {"name": _qualified_name(item.get("namespace"), item), "arguments": arguments}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        yield {"role": "tool", "tool_call_id": strip_id_prefix(item.get("call_id"), CALL_ID_PREFIX),
               "content": read_tool_result(f"{at}.output", item.get("output"), unknown)}
    elif kind == "reasoning":
        encrypted = item.get("encrypted_content")
        is_ours = isinstance(encrypted, str) and encrypted.startswith(UNSEALED)
        ours = encrypted.removeprefix(UNSEALED) if is_ours else ""
        if thought := read_text(f"{at}.content", item.get("content") or ours):
            yield {"role": "assistant", "content": "", "reasoning_content": thought}
    elif isinstance(kind, str) and kind.endswith(OTHER_CALLS):
        unknown[f"input[].{kind}"] = True
    elif kind == "item_reference":
        raise InvalidRequest(f"{at}.type", f"is not served here; {_STATELESS}, as clients do with store: false")
    else:
        raise InvalidRequest(f"{at}.type", "must be 'message', 'function_call', 'function_call_output' or 'reasoning'")


def _tools(tools: Any, choice: Any) -> Json:
    if not tools:
        return {"tool_choice": choice}
    if not _are_objects(tools):
        raise InvalidRequest("tools", "must be a list of functions")
    for i, tool in enumerate(tools):
        if tool.get("type") == "namespace" and not _are_objects(tool.get("tools")):
            raise InvalidRequest(f"tools[{i}].tools", "must be a list of functions")
    functions = [{"type": "function", "function": {
        "name": _qualified_name(namespace, tool), "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {}}} for namespace, tool in _functions(tools)]
    # Nobody here would run the others, so the model does not see them; they are named like unknown fields.
    unknown: Json = {f"tools[].{tool.get('type')}": True for tool in tools if tool.get("type") not in TOOL_TYPES}
    unknown |= {f"tools[].tools[].{tool.get('type')}": True for group in tools for tool in _namespace_tools(group)
               if tool.get("type") != "function"}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["tools"] if isinstance(choice.get("tools"), list) else []
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": [
            {"type": "function", "function": {"name": _qualified_name(tool.get("namespace"), tool)}} for tool in allowed
            if isinstance(tool, dict) and tool.get("type") == "function"]}}
    elif choice not in (None, "none", "auto", "required"):
        if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
            raise InvalidRequest("tool_choice", "must be 'none', 'auto', 'required', or a function among tools, as in "
                                 '{"type": "function", "name": "..."}')
        choice = {"type": choice.get("type"), "function": {"name": _qualified_name(choice.get("namespace"), choice)}}
    return {"tools": functions, "tool_choice": choice, **unknown}


def _are_objects(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(item, dict) for item in given)


def _functions(tools: Iterable[Json]) -> Iterator[tuple[Any, Json]]:
    """The functions that the model sees, and the namespace of each; None: none."""
    for tool in tools:
        if tool.get("type") == "function":
            yield None, tool
        yield from ((tool.get("name"), inner) for inner in _namespace_tools(tool) if inner.get("type") == "function")


def _namespace_tools(tool: Json) -> list[Json]:
    """The tools of a namespace."""
    return (tool.get("tools") or []) if tool.get("type") == "namespace" else []


def _qualified_name(namespace: Any, tool: Json) -> Any:
    """The model's name of a function, as in vLLM."""
    name = tool.get("name")
    if namespace is None:
        return name
    return f"{namespace}__{name}" if isinstance(namespace, str) and isinstance(name, str) else None


def _repeated_tool(tool: Json) -> Json:
    inner_tools = [_repeated_tool(inner) for inner in _namespace_tools(tool) if inner.get("type") == "function"]
    return {name: tool[name] for name in TOOL_FIELDS if name in tool} | ({"tools": inner_tools} if inner_tools else {})


def repeated_fields(fields: Mapping[str, Any]) -> Json:
    """The fields of a request that its response repeats, and nothing else, because a whole body takes much memory while
    it waits. Applied to its own result it changes nothing."""
    choice, tools = fields.get("tool_choice") or "auto", fields.get("tools") or []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["tools"] if isinstance(choice.get("tools"), list) else []
        choice = {"type": "allowed_tools", "mode": choice.get("mode"), "tools": [
            {name: tool[name] for name in ("type", "name") if name in tool}
            for tool in allowed if isinstance(tool, dict)]}
    elif isinstance(choice, dict):
        choice = {"type": "function", "name": choice.get("name")}
    return {"instructions": fields.get("instructions"),
            "tools": [_repeated_tool(tool) for tool in tools if tool.get("type") in TOOL_TYPES],
            "metadata": fields.get("metadata") or {},
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "tool_choice": choice,
            **{name: fields.get(name) for name in ("temperature", "top_p", "max_output_tokens")}}


class ResponsesReply:
    """A response and its events."""

    def __init__(self, head: AnswerHead) -> None:
        self._head: Json = {
            "id": f"resp_{head.answer_id}", "object": "response", "created_at": head.created, "model": head.model,
            "error": None, "incomplete_details": None, "store": False,
            **repeated_fields(head.request_fields)}
        self._blocks = Blocks(head.answer_id, head.markup, head.return_reasoning)
        self._sent = 0
        self._namespaces = {_qualified_name(namespace, tool): (namespace, tool["name"])
                            for namespace, tool in _functions(self._head["tools"]) if namespace is not None}

    def opening(self, usage: Usage) -> bytes:
        """The events before any token."""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response})

    def events(self, delta: TextDelta) -> bytes:
        """The events of ``delta``; b"" for none."""
        return b"".join(self._event(f"response.{name}", {"output_index": block.index, **fields})
                        for what, block, text in self._with_client_names(delta)
                        for name, fields in _block_events(what, block, text))

    def _with_client_names(self, delta: TextDelta) -> Iterator[tuple[What, Block, str]]:
        """With calls as clients name them."""
        for what, block, text in self._blocks.push_delta(delta):
            if what == "begin":
                block.namespace, block.name = self._namespaces.get(block.name, ("", block.name))
            yield what, block, text

    def closing(self, usage: Usage, stop: str | None) -> bytes:
        """The last events."""
        response = self.body(usage, stop)
        return self._event(f"response.{response['status']}", {"response": response})

    def error_events(self, problem: Problem) -> bytes:
        """The events of an answer that ends with an error: clients wait for one that says how the response ended."""
        self._blocks.break_off()
        error = {"code": problem.code or problem.kind, "message": problem.message}
        failed = {**self._head, "status": "failed", "error": error, "usage": None,
                  "output": [_item(block) for block in self._blocks.all]}
        return self._event("error", {**error, "code": problem.code, "param": problem.param}) + self._event(
            "response.failed", {"response": failed})

    def body(self, usage: Usage, stop: str | None) -> Json:
        """The whole answer as one object."""
        cut = self._blocks.finish == "length"
        return {**self._head, "status": "incomplete" if cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "output": [_item(block) for block in self._blocks.all],
                "usage": _usage(usage, self._blocks.reasoning_tokens)}

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return event_of(name, {"sequence_number": number, **fields})


def _block_events(what: What, block: Block, text: str) -> Iterator[tuple[str, Json]]:
    item_id = {"item_id": _id(block)}
    if what == "begin":
        yield "output_item.added", {"item": _item(block, open_=True)}
        if block.kind == "text":
            yield "content_part.added", {**item_id, "content_index": 0, "part": _part("")}
    elif what == "add":
        if block.kind == "call":
            yield "function_call_arguments.delta", {**item_id, "delta": text}
        else:
            name = "output_text" if block.kind == "text" else "reasoning_text"
            yield f"{name}.delta", {**item_id, "content_index": 0, "delta": text} | (
                {"logprobs": []} if block.kind == "text" else {})
    else:
        text = block.text
        if block.kind == "call":
            yield "function_call_arguments.done", {**item_id, "name": block.name, "arguments": text}
        elif block.kind == "text":
            yield "output_text.done", {**item_id, "content_index": 0, "text": text, "logprobs": []}
            yield "content_part.done", {**item_id, "content_index": 0, "part": _part(text)}
        else:
            yield "reasoning_text.done", {**item_id, "content_index": 0, "text": text}
        yield "output_item.done", {"item": _item(block)}


def _item(block: Block, open_: bool = False) -> Json:
    text = block.text
    status = "in_progress" if open_ else "incomplete" if block.cut else "completed"
    if block.kind == "call":
        return {"type": "function_call", "id": _id(block), "call_id": CALL_ID_PREFIX + block.call_id,
                "name": block.name, "arguments": text, "status": status,
                **({"namespace": block.namespace} if block.namespace else {})}
    if block.kind == "text":
        content = [] if open_ else [_part(text)]
        return {"type": "message", "id": _id(block), "role": "assistant", "status": status, "content": content}
    return {"type": "reasoning", "id": _id(block), "summary": [], "status": status,
            "content": [{"type": "reasoning_text", "text": text}] if text else [],
            **({} if open_ else {"encrypted_content": UNSEALED + text})}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(block: Block) -> str:
    return {"call": "fc_", "text": "msg_", "reasoning": "rs_"}[block.kind] + block.id


def _usage(usage: Usage, reasoning: int) -> Json:
    # Clients add up the tokens of a cache, so none of them may be missing.
    return {"input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens}
