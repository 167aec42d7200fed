"""OpenAI's chat completions: the fields of a request, and the forms of answers, whole and in chunks.

Rules:
1. Arguments of calls in the history are JSON texts of objects, as the API returns them; templates get the objects. Text
   that is no such JSON (cut off, or wrongly written by a model) is given as {}, because a refusal would end its
   conversation. So is null, which some clients send for a call without arguments.
2. Parts of text are joined; the name that newer clients have for the system's role is replaced.

Format: the OpenAI API. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import Field, SkipValidation, ValidationInfo, field_validator

from router_service.dialects.fields import FILE_NOTES, REFUSED_IN_MESSAGE, THINKING, as_text_part, part_type
from router_service.dialects.openai import (
    MAX_CONTAINERS,
    Generation,
    Job,
    Options,
    StrictModel,
    UnknownFields,
    WholeNumber,
    at_most,
    known_fields,
    num_containers,
    read_json,
    unknown_of,
)
from router_service.dialects.prompts import MIN_LOGPROB, batches_of, json_list
from router_service.dialects.tools import Json, ToolUse, use_of
from router_service.dialects.usage import usage_fields
from router_service.text.calls import CallDelta, new_call_id
from router_service.text.deltas import AnswerToken, PackedLogprob, TextDelta
from router_service.text.markup import finish_reason
from router_service.text.tokens import TextCodec
from slipstream.base.errors import InvalidRequest
from slipstream.models.folder import NAMED_TOKENS
from slipstream.protocol.chat import MAX_CALLS, MAX_ITEMS, Usage
from slipstream.protocol.requests import MAX_TOP_LOGPROBS, TokenLogprob

MAX_VARIABLES = 64  # of the chat template
MAX_VARIABLES_BYTES = 64 << 10  # of all of them as JSON
RESERVED = frozenset({*NAMED_TOKENS, "messages", "tools", "documents", "add_generation_prompt",
                      "continue_final_message", "chat_template", "tokenize"})  # variables that we set


class Message(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: SkipValidation[list[dict[str, Any]]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The fields that are set."""
        extra = {name: value for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")
                 if (value := getattr(self, name))}
        return {"role": self.role, "content": self.content, **extra}


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: WholeNumber | None = Field(None, ge=0)
    echo: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: Literal[False] | None = None  # the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: SkipValidation[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    tools: SkipValidation[Any] = None  # see ``tools``
    tool_choice: SkipValidation[Any] = None
    parallel_tool_calls: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_messages(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        at_most("messages", len(value), "items")
        at_most("messages", sum(_num_parts(message) for message in value), "text parts in all")
        called = [message for message in value if isinstance(message, dict) and message.get("tool_calls")]
        if called and _num_argument_containers(called) > MAX_CONTAINERS:
            raise InvalidRequest("messages", f"hold more than {MAX_CONTAINERS} lists and objects in the arguments of "
                                 "their calls")
        return [_plain_message(f"messages[{i}]", message, unknown_of(info)) for i, message in enumerate(value)]

    @field_validator("logprobs", mode="before")
    @classmethod
    def _whether(cls, value: Any) -> Any:
        return value == 1 if type(value) in (int, float) and value in (0, 1) else value  # a completion's word

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _template_variables(cls, value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, dict):
            raise InvalidRequest("chat_template_kwargs", "must be an object")
        if len(value) > MAX_VARIABLES:
            raise InvalidRequest("chat_template_kwargs", f"must have at most {MAX_VARIABLES} names")
        if len(orjson.dumps(value)) > MAX_VARIABLES_BYTES:
            raise InvalidRequest("chat_template_kwargs", f"are larger than {MAX_VARIABLES_BYTES} bytes")
        for name in value:
            if name in RESERVED or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs.{name[:64]}", "is not a name that a request may give")
        return value

    def options(self) -> Options:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("add_generation_prompt", "must be false where the final message is continued")
        tool_use = None
        if self.tools is not None or self.tool_choice is not None:
            tool_use = use_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        options = self._options(getattr(self, name), (self.top_logprobs or 0) if self.logprobs else None)
        return replace(options, max_tokens_field=name, parse_markup=True, tool_use=tool_use,
                       reasoning_in_content=self.separate_reasoning is False,
                       return_reasoning=self.include_reasoning is not False, **_tool_grammar(options, tool_use))

    def template_variables(self) -> dict[str, Any]:
        """The template's variables besides messages and tools."""
        effort = self.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort, **dict.fromkeys(THINKING, effort != "none")}
        return {**variables, **(self.chat_template_kwargs or {})}


def _tool_grammar(options: Options, use: ToolUse | None) -> dict[str, Any]:
    """The grammar fields of ``options`` as the tools change them. Raises InvalidRequest."""
    grammar = options.grammar
    if use is not None and use.forced:
        if grammar is not None and grammar.kind != "json_schema":  # that is of the text, and there will be none
            raise InvalidRequest("tool_choice",
                                 f"cannot force a call beside {options.grammar_field}; leave out one of them")
        return {"grammar_field": "tool_choice", "grammar": use.grammar()}
    if use is not None and grammar is not None and grammar.kind == "json_schema":
        schema = read_json(options.grammar_field, grammar.source.encode())
        return dict(zip(("grammar", "fallback_grammar"), use.beside_schema(options.grammar_field, schema), strict=True))
    return {}


def _num_parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _plain_message(at: str, message: Any, unknown: UnknownFields) -> Any:
    """One message with text parts joined and the name that newer clients use for the system role replaced."""
    if not isinstance(message, dict):
        return message
    if isinstance(message.get("reasoning", ()), str | None):  # as vLLM and OpenRouter call it
        message = {"reasoning_content": message["reasoning"], **message}
        del message["reasoning"]
    if isinstance(message.get("refusal"), str) and not message.get("content"):  # what a model said instead
        message = {**message, "content": message["refusal"], "refusal": None}
    plain = known_fields(message, Message.model_fields, REFUSED_IN_MESSAGE, unknown, f"{at}.")
    if plain.get("role") == "function":
        raise InvalidRequest(f"{at}.role", "is not served here; use tools and the role 'tool'", "unsupported_parameter")
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = _calls(f"{at}.tool_calls", plain["tool_calls"])
    if plain.get("content") is None and plain.get("role") in ("assistant", "tool"):  # some write no empty text
        plain["content"] = ""
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(_part(f"{at}.content[{i}]", part, plain.get("role") == "tool", unknown)
                                     for i, part in enumerate(plain["content"]))
    return plain


def _part(at: str, part: Any, from_tool: bool, unknown: UnknownFields) -> str:
    """The text of a part. ``from_tool``: of a tool's result, in which files do not end the conversation."""
    part = as_text_part(part)
    kind = part_type(part)
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if from_tool and kind in FILE_NOTES:
        unknown.add(kind, f"{at}.", ())
        return FILE_NOTES[kind]
    raise InvalidRequest(at, 'must be text, as in {"type": "text", "text": "..."}: nothing else is served here',
                         "unsupported_parameter")


def _calls(at: str, calls: Any) -> list[Json]:
    """The calls of a message in history, arguments as objects. Raises InvalidRequest."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(at, f"must be a list of at most {MAX_CALLS} calls")
    return [_call(f"{at}[{i}]", call) for i, call in enumerate(calls)]


def _num_argument_containers(messages: Sequence[Json]) -> int:
    """Lists and objects in the JSON of all arguments of the calls in ``messages``, which all have some."""
    calls = [call for message in messages if isinstance(message["tool_calls"], list)
             for call in message["tool_calls"] if isinstance(call, dict)]
    arguments = [function.get("arguments") for call in calls if isinstance(function := call.get("function"), dict)]
    # Joined: if one is no JSON and ends what can be counted, reading ends there, too.
    return num_containers(_bytes(",".join([text for text in arguments if isinstance(text, str)])))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _call(at: str, call: Any) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{at}.function.name", "must be a string")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    if isinstance(arguments, str):
        arguments = _read(f"{at}.function.arguments", arguments)
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at}.function.arguments", "must be an object written as JSON")
    if not isinstance(id_ := call.get("id"), str | None):
        raise InvalidRequest(f"{at}.id", "must be a string")
    return {**({} if id_ is None else {"id": id_}), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


def _read(at: str, arguments: str) -> Json:
    try:
        found = read_json(at, _bytes(arguments))
    except InvalidRequest as error:
        if error.code != "invalid_json":
            raise
        found = {}
    return found if isinstance(found, dict) else {}


class ChatReply:
    """``chat.completion`` and its chunks, of the answers to ``job``. identity: of the model that gives them."""

    def __init__(self, answer_id: str, created: int, job: Job, codec: TextCodec, identity: str) -> None:
        options = job.options
        self._head: Json = {"id": f"chatcmpl-{answer_id}", "created": created, "model": job.model,
                            "system_fingerprint": identity or None}
        self._markups = job.markups(codec)  # one a choice; [] leaves all to the content
        self._return_reasoning = options.return_reasoning
        self._codec, self._token_name = codec, options.token_namer(codec)
        self._logprobs = options.top_logprobs is not None
        self._stop_ids = options.sampling.stop_token_ids
        self._prompt: Json = {"prompt_token_ids": list(job.prompts[0])} if options.return_token_ids else {}
        self._prompts = job.returned_prompts(codec)
        self.detailed = self._logprobs or options.return_token_ids or bool(self._markups) or self._prompts is not None

    def opening(self, number: int) -> Json | None:
        return self._chunk([_choice(number, {"role": "assistant", "content": ""})]) | self._prompt

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        fields, scores = self._fields_of(number, delta), self._scores_of(number, delta)
        if not (scores or fields or delta.finish or (delta.tokens and (self._logprobs or self._prompt))):
            return None
        choice = _choice(number, fields, self._finish(number, delta), self._logprobs_of(delta.tokens))
        if delta.finish:
            choice["stop_reason"] = delta.ended_by(self._stop_ids)
        return self._chunk([choice | self._ids_of(delta.tokens)]) | scores

    def usage_chunk(self, usage: Usage) -> Json:
        return self._chunk([]) | usage_fields(usage, self._reasoning_tokens)

    def body(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = []
        for number, deltas in enumerate(answers):
            tokens = [token for delta in deltas for token in delta.tokens]
            message = _message([self._fields_of(number, delta) for delta in deltas])
            choices.append({"index": number, "message": message, "finish_reason": self._finish(number, deltas[-1]),
                            "stop_reason": deltas[-1].ended_by(self._stop_ids), "logprobs": self._logprobs_of(tokens),
                            **self._ids_of(tokens)})
        return {**self._head, "object": "chat.completion", "choices": choices, **self._prompt,
                **self._scores_of(0, answers[0][0]), **usage_fields(usage, self._reasoning_tokens)}

    @property
    def _reasoning_tokens(self) -> int:
        return sum(markup.reasoning_tokens for markup in self._markups)

    def _scores_of(self, number: int, delta: TextDelta) -> Json:
        """Of the prompt, with the first delta of the first answer."""
        if self._prompts is None or number:
            return {}
        prompts, self._prompts = self._prompts, None
        return {"prompt_logprobs": prompts.prompt_logprobs(0, delta.prompt)}

    def _fields_of(self, number: int, delta: TextDelta) -> Json:
        """What ``delta`` adds to the message of a choice."""
        if not self._markups:
            return {"content": delta.text} if delta.text else {}
        parts = self._markups[number].push_delta(delta)
        fields: Json = {}
        if parts.reasoning and self._return_reasoning:
            fields["reasoning_content"] = parts.reasoning
        if parts.content:
            fields["content"] = parts.content
        if parts.calls:
            fields["tool_calls"] = [_call_delta(call) for call in parts.calls]
        return fields

    def _finish(self, number: int, delta: TextDelta) -> str:
        return finish_reason(delta.finish, self._markups[number]) if self._markups else delta.finish

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _logprobs_of(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._logprobs:
            return None
        entries = ([self._scored_token(token.id, token.logprob) for token in part if token.logprob is not None]
                   for part in batches_of(tokens))
        return {"content": json_list(entries), "refusal": None}

    def _scored_token(self, token: int, scored: TokenLogprob | PackedLogprob) -> Json:
        return {**self._entry(token, scored.logprob), "top_logprobs": [self._entry(*one) for one in scored.top]}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._token_name(token), "logprob": max(logprob, MIN_LOGPROB),
                "bytes": list(self._codec.token_bytes(token))}

    def _ids_of(self, tokens: Sequence[AnswerToken]) -> Json:
        return {"token_ids": [token.id for token in tokens]} if self._prompt else {}


def _call_delta(call: CallDelta) -> Json:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": new_call_id(), "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


def _message(deltas: Sequence[Json]) -> Json:
    """The fields of deltas joined to a message, whose calls have no index."""
    content, reasoning = ("".join([delta[name] for delta in deltas if name in delta])
                          for name in ("content", "reasoning_content"))
    calls: list[Json] = []
    arguments: list[list[str]] = []  # of each call
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            arguments.append([])
        arguments[call["index"]].append(call["function"]["arguments"])
    for call, pieces in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(pieces)
    return {"role": "assistant", "content": None if calls and not content else content, "refusal": None,
            **({"reasoning_content": reasoning} if reasoning else {}), **({"tool_calls": calls} if calls else {})}


def _choice(number: int, delta: Json, finish: str = "", logprobs: Json | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish or None}
