"""OpenAI's Responses API as a translation onto chat: requests in, whole answers and events out.

Rules:
1. A request becomes a body of a chat, and is checked as one. Refusals name this API's fields; those within messages
   and tools may have the chat's names.
2. Nothing is kept: a conversation comes whole with every request (``store: false``).
3. Tools are functions, also those in namespaces: the model gets both names as one. Other tools are left out and named.
   Known input items are messages, calls, their results and reasoning. Reasoning belongs to the message or calls after
   it; the template decides whether to show it. It is also returned as "encrypted" content (in plain text), because
   some clients send back only that.
4. Turns of one role are one: agents send instructions and what a developer says, then several messages of a user.

It knows nothing about models, routes or the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from router_service.dialects.blocks import AnswerHead, Block, Blocks, What, as_written, event_of
from router_service.dialects.fields import Refused, legible, object_of, others, parts_left, result_of, text_of
from router_service.dialects.problems import Problem
from router_service.dialects.tools import Json
from router_service.text.deltas import TextDelta
from router_service.text.rewritings import merge_turns
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_ITEMS, Usage

ALIKE = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "speculate", "top_k", "min_p",
         "cache_salt", "ignore_eos", "min_tokens", "stop", "chat_template_kwargs")
_KEPT = "nothing is kept: send the whole conversation as input"
_LOGPROBS = "chat completions and completions tell log probabilities"
REFUSED: Mapping[str, Refused] = MappingProxyType({
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), Refused((), _KEPT)),
    "messages": Refused((), "send them as input"),
    "background": Refused((False,), "leave it out and stream the answer"), "top_logprobs": Refused((0,), _LOGPROBS),
    "truncation": Refused(("disabled", "auto"), "shorten the input"),  # one that fits needs none
    "max_tool_calls": Refused((), "leave it out: whoever asks runs the tools"),
    "context_management": Refused((), "shorten the input")})
INERT = ("store", "include", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
         "safety_identifier", "stream_options", "client_metadata")
UNSEALED = "unsealed:"  # begins a thought's encrypted content: that of others tells nothing here
CALL = "call_"  # begins the ids of calls
TOOL = ("type", "name", "description", "parameters", "strict")  # what is told again of one
KNOWN = ("function", "namespace")  # types of tools
MAX_METADATA, MAX_METADATUM = 16, 576  # entries, and characters of each
# The chat's fields that are called otherwise here.
NAMES = MappingProxyType({"tool_choice.allowed_tools": "tool_choice",
                          "response_format.json_schema": "text.format", "response_format": "text.format",
                          "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"})


def chat_of(raw: Json) -> Json:
    """The body of a chat that asks the same. Raises InvalidRequest."""
    for name, refused in REFUSED.items():
        if refused.asks(raw.get(name)):
            raise InvalidRequest(name, f"is not served here; {refused.advice}", "unsupported_parameter")
    if isinstance(raw.get("include"), list) and "message.output_text.logprobs" in raw["include"]:
        raise InvalidRequest("include", f"message.output_text.logprobs is not served here; {_LOGPROBS}",
                             "unsupported_parameter")
    chat = {name: raw[name] for name in ALIKE if raw.get(name) is not None}
    if raw.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = raw["max_output_tokens"]
    if not isinstance(instructions := raw.get("instructions"), str | None):
        raise InvalidRequest("instructions", "must be a string")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    given = raw.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or len(items) > MAX_ITEMS:
        raise InvalidRequest("input", f"must be a string, or a list of 1 to {MAX_ITEMS} items")
    unseen: dict[str, bool] = {}
    for i, item in enumerate(items):
        messages += _messages(f"input[{i}]", item, unseen)
    chat["messages"] = merge_turns(messages)
    chat |= _tools(raw.get("tools"), raw.get("tool_choice"))
    text, reasoning = object_of(raw, "text"), object_of(raw, "reasoning")
    if text.get("format") is not None:
        form = object_of(text, "format", "text.")
        chat["response_format"] = form if form.get("type") != "json_schema" else {
            "type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    metadata = object_of(raw, "metadata")
    if len(metadata) > MAX_METADATA or not all(isinstance(value, str) and len(name) + len(value) <= MAX_METADATUM
                                               for name, value in metadata.items()):
        raise InvalidRequest("metadata", f"must be at most {MAX_METADATA} texts, of {MAX_METADATUM} characters with "
                             "their names")
    known = {*ALIKE, *REFUSED, *INERT, "max_output_tokens", "instructions", "input", "tools", "tool_choice", "text",
             "reasoning", "metadata"}
    return chat | unseen | others(raw, known, chat) | parts_left("text", text, ("format",)) | parts_left(
        "reasoning", reasoning, ("effort", "summary", "generate_summary"))


def _messages(at: str, item: Any, unseen: dict[str, bool]) -> Iterator[Json]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        said = item.get("content")
        yield {"role": role, "content": text_of(
            f"{at}.content", list(map(legible, said)) if isinstance(said, list) else said)}
    elif kind == "function_call":
        call = {"id": as_written(item.get("call_id"), CALL), "type": "function",
                "function": {"name": _whole_name(item.get("namespace"), item), "arguments": item.get("arguments")}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        yield {"role": "tool", "tool_call_id": as_written(item.get("call_id"), CALL),
               "content": result_of(f"{at}.output", item.get("output"), unseen)}
    elif kind == "reasoning":
        sealed = item.get("encrypted_content")
        ours = sealed.removeprefix(UNSEALED) if isinstance(sealed, str) and sealed.startswith(UNSEALED) else ""
        if thought := text_of(f"{at}.content", item.get("content") or ours):
            yield {"role": "assistant", "content": "", "reasoning_content": thought}
    elif kind == "item_reference":
        raise InvalidRequest(f"{at}.type", f"is not served here; {_KEPT}, as clients do with store: false")
    else:
        raise InvalidRequest(f"{at}.type", "must be 'message', 'function_call', 'function_call_output' or 'reasoning'")


def _tools(tools: Any, choice: Any) -> Json:
    if not tools:
        return {"tool_choice": choice} if choice is not None else {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a list of functions")
    made = [{"type": "function", "function": {
        "name": _whole_name(space, tool), "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {}}} for space, tool in _functions(tools)]
    # Nobody here would run the others, so the model is not told of them; as fields that nobody knows they are named.
    theirs: Json = {f"tools[].{tool.get('type')}": True for tool in tools if tool.get("type") not in KNOWN}
    theirs |= {f"tools[].tools[].{tool.get('type')}": True for group in tools for tool in _within(group)
               if tool.get("type") != "function"}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["tools"] if isinstance(choice.get("tools"), list) else []
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": [
            {"type": "function", "function": {"name": _whole_name(tool.get("namespace"), tool)}} for tool in allowed
            if isinstance(tool, dict) and tool.get("type") == "function"]}}
    elif isinstance(choice, dict):
        if not isinstance(choice.get("name"), str):
            raise InvalidRequest("tool_choice", 'must name a function, as in {"type": "function", "name": "..."}')
        choice = {"type": choice.get("type"), "function": {"name": _whole_name(choice.get("namespace"), choice)}}
    return {"tools": made, **({"tool_choice": choice} if choice is not None else {}), **theirs}


def _functions(tools: Iterable[Json]) -> Iterator[tuple[Any, Json]]:
    """Those that a model is told of, and the namespace of each; None: none."""
    for tool in tools:
        if tool.get("type") == "function":
            yield None, tool
        yield from ((tool.get("name"), one) for one in _within(tool) if one.get("type") == "function")


def _within(tool: Json) -> list[Json]:
    """The tools of a namespace."""
    tools = tool.get("tools") if tool.get("type") == "namespace" else None
    return [one for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []


def _whole_name(space: Any, tool: Json) -> Any:
    """What a model calls a function, as vLLM has it."""
    name = tool.get("name")
    if space is None:
        return name
    return f"{space}__{name}" if isinstance(space, str) and isinstance(name, str) else None


def _told(tool: Json) -> Json:
    within = [_told(one) for one in _within(tool) if one.get("type") == "function"]
    return {name: tool[name] for name in TOOL if name in tool} | ({"tools": within} if within else {})


def repeated_fields(asked: Mapping[str, Any]) -> Json:
    """The fields of a request that its response repeats, and nothing else, because a whole body takes much memory while
    it waits. Applied to its own result it changes nothing."""
    choice, tools = asked.get("tool_choice") or "auto", asked.get("tools") or []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["tools"] if isinstance(choice.get("tools"), list) else []
        choice = {"type": "allowed_tools", "mode": choice.get("mode"), "tools": [
            {name: tool[name] for name in ("type", "name") if name in tool}
            for tool in allowed if isinstance(tool, dict)]}
    elif isinstance(choice, dict):
        choice = {"type": "function", "name": choice.get("name")}
    return {"instructions": asked.get("instructions"),
            "tools": [_told(tool) for tool in tools if tool.get("type") in KNOWN],
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "tool_choice": choice,
            **{name: asked.get(name) for name in ("temperature", "top_p", "max_output_tokens")}}


class ResponsesReply:
    """A response and its events."""

    def __init__(self, head: AnswerHead) -> None:
        self._head: Json = {
            "id": f"resp_{head.answer_id}", "object": "response", "created_at": head.created, "model": head.model,
            "error": None, "incomplete_details": None, "store": False,
            **repeated_fields(head.request_fields)}
        self._blocks = Blocks(head.answer_id, head.markup, head.return_reasoning)
        self._sent = 0
        self._spaces = {_whole_name(space, tool): (space, tool["name"])
                        for space, tool in _functions(self._head["tools"]) if space is not None}

    def opening(self, usage: Usage) -> bytes:
        """The events before any token."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", {"response": begun}) + self._event(
            "response.in_progress", {"response": begun})

    def events(self, delta: TextDelta) -> bytes:
        """The events of ``delta``; b"" for none."""
        return b"".join(self._event(f"response.{name}", {"output_index": block.index, **fields})
                        for what, block, text in self._with_client_names(delta)
                        for name, fields in _steps(what, block, text))

    def _with_client_names(self, delta: TextDelta) -> Iterator[tuple[What, Block, str]]:
        """With calls as clients name them."""
        for what, block, text in self._blocks.take(delta):
            if what == "begin":
                block.namespace, block.name = self._spaces.get(block.name, ("", block.name))
            yield what, block, text

    def closing(self, usage: Usage, stop: str | None) -> bytes:
        """The last events."""
        whole = self.whole(usage, stop)
        return self._event(f"response.{whole['status']}", {"response": whole})

    def error_events(self, problem: Problem) -> bytes:
        """The events of an answer that ends with an error: clients wait for one that says how the response ended."""
        self._blocks.break_off()
        error = {"code": problem.code or problem.kind, "message": problem.message}
        failed = {**self._head, "status": "failed", "error": error, "usage": None,
                  "output": [_item(block) for block in self._blocks.all]}
        return self._event("error", {**error, "code": problem.code, "param": problem.param}) + self._event(
            "response.failed", {"response": failed})

    def whole(self, usage: Usage, stop: str | None) -> Json:
        """The whole answer as one object."""
        cut = self._blocks.finish == "length"
        return {**self._head, "status": "incomplete" if cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "output": [_item(block) for block in self._blocks.all],
                "usage": _usage(usage, self._blocks.reasoning_tokens)}

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return event_of(name, {"sequence_number": number, **fields})


def _steps(what: What, block: Block, text: str) -> Iterator[tuple[str, Json]]:
    own = {"item_id": _id(block)}
    if what == "begin":
        yield "output_item.added", {"item": _item(block, open_=True)}
        if block.kind == "text":
            yield "content_part.added", {**own, "content_index": 0, "part": _part("")}
    elif what == "add":
        if block.kind == "call":
            yield "function_call_arguments.delta", {**own, "delta": text}
        else:
            name = "output_text" if block.kind == "text" else "reasoning_text"
            yield f"{name}.delta", {**own, "content_index": 0, "delta": text} | (
                {"logprobs": []} if block.kind == "text" else {})
    else:
        whole = block.text
        if block.kind == "call":
            yield "function_call_arguments.done", {**own, "name": block.name, "arguments": whole}
        elif block.kind == "text":
            yield "output_text.done", {**own, "content_index": 0, "text": whole, "logprobs": []}
            yield "content_part.done", {**own, "content_index": 0, "part": _part(whole)}
        else:
            yield "reasoning_text.done", {**own, "content_index": 0, "text": whole}
        yield "output_item.done", {"item": _item(block)}


def _item(block: Block, open_: bool = False) -> Json:
    text = block.text
    status = "in_progress" if open_ else "incomplete" if block.cut else "completed"
    if block.kind == "call":
        return {"type": "function_call", "id": _id(block), "call_id": CALL + block.call_id, "name": block.name,
                "arguments": text, "status": status, **({"namespace": block.namespace} if block.namespace else {})}
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
    return {"input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens}
