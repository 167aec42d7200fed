"""Every field that a client may send, and what becomes of it: one table for OpenAI's, vLLM's and SGLang's names.

Rule: a field is honoured; or inert (it does not concern the answer); or refused, except with a value that asks for
nothing, as null does. A refusal says what to do instead. At the end of the file: how translated dialects read fields of
their own.

It knows nothing about how a field is honoured; the pages about the API are printed from here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_ITEMS


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused field, taken only with a ``neutral`` value. ``advice`` ends the sentence "is not served here"."""

    neutral: tuple[Any, ...]
    advice: str

    def refuses(self, value: Any) -> bool:
        """Whether ``value`` asks for what is not served."""
        return value is not None and not any(_equal(value, neutral) for neutral in self.neutral)


# The text for the API's pages, the default first.
HONOURED: Mapping[str, str] = MappingProxyType({
    "model": "the one here; as `GET /v1/models` names it",
    "messages": "of chats; roles `system` (or `developer`), `user`, `assistant`, `tool`; content: text, or parts of it",
    "prompt": "of completions; a text, token ids, or a list of either: 1,024 answers, in turn where fewer may run",
    "max_tokens": "at most what the context leaves; completions: 16; 0: the prompt alone",
    "max_completion_tokens": "chat's name of `max_tokens`",
    "temperature": "1; 0 to 100, 0 always takes the likeliest token", "top_p": "1, off; 0: the likeliest token",
    "top_k": "0, off", "min_p": "0, off", "presence_penalty": "0; -2 to 2", "frequency_penalty": "0; -2 to 2",
    "repetition_penalty": "1; above 0, at most 100", "logit_bias": "token id → -100 to 100, 300 at most",
    "seed": "-1, random; the same seed and prompt give the same answer, with drafts and without",
    "stop": "a text or at most 32, of at most 1,024 characters each; no part of the answer",
    "include_stop_str_in_output": "false; the answer ends with what stopped it", "stop_token_ids": "at most 48",
    "min_tokens": "0; no end before so many", "ignore_eos": "false; no end by itself",
    "n": "1; at most 128; choice i of a prompt has the seed `seed` + i",
    "logprobs": "chat: true, and as many as `top_logprobs`; completions: how many; at most 20, 1,048,576 in all",
    "top_logprobs": "chat: true, and as many as `top_logprobs`; completions: how many; at most 20, 1,048,576 in all",
    "stream": "false",
    "stream_options": "`include_usage` in a last chunk, `continuous_usage_stats` in each",
    "skip_special_tokens": "true; false shows them in the text",
    "return_token_ids": "false; `prompt_token_ids`, and each choice's `token_ids`, all of them",
    "return_tokens_as_token_ids": "false; `logprobs` name tokens as `token_id:7`",
    "truncate_prompt_tokens": "only the prompt's last ones; -1: as many as fit",
    "add_special_tokens": "completions: true; false: none at the prompt's beginning",
    "add_generation_prompt": "chat: true; false: the assistant's turn is not begun",
    "continue_final_message": "false; the answer continues the last message",
    "chat_template_kwargs": "at most 64 names for the chat template, as `enable_thinking`",
    "tools": "functions that the model may call, at most 128",
    "tool_choice": "`auto`, `none`, `required`, `allowed_tools` or a function; what is required binds the answer",
    "parallel_tool_calls": "true; false: the first call alone",
    "reasoning_effort": "given to the chat template; also `enable_thinking` and `thinking`, false for `none`",
    "include_reasoning": "true; false leaves `reasoning_content` out",
    "separate_reasoning": "true; false leaves reasoning in the content",
    "request_id": "random; ends the answer's `id`", "cache_salt": "cached prompts are shared only where it is the same",
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar"), "one of them: what the answer is bound to"),
    "echo": "completions: false; text and `logprobs` begin with the prompt's",
    "prompt_logprobs": "at most 20; the prompt is scored, as in vLLM",
    "logprobs_mode": "`raw_logprobs`; `tempered_logprobs`: behind penalties, bias, grammar, temperature; "
                     "`processed_logprobs`: and filters",
    "allowed_token_ids": "at most 1,024; no others", "bad_words": "at most 128, of at most 64 characters each",
    "speculate": "true; false: plain decoding",
})

FILE_NOTES: Mapping[Any, str] = MappingProxyType({  # types of parts of a tool's result -> the text in their place
    **dict.fromkeys(("image", "input_image", "image_url"), "(an image, which cannot be seen here)"),
    **dict.fromkeys(("document", "input_file", "file"), "(a file, which cannot be read here)")})
THINKING = ("enable_thinking", "thinking")  # what chat templates call the switch: Qwen's and GLM's, DeepSeek's

# Options that have no field of the same name over gRPC, and what takes their place.
GRPC_DIFFERENCES: Mapping[str, str] = MappingProxyType({
    "n": "one call, one answer; ask again with the next seed",
    "max_completion_tokens": "`max_tokens`", "logprobs": "`top_logprobs` alone",
    **dict.fromkeys(("stream", "stream_options"), "always a stream; usage comes last"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), "always told"),
    "request_id": "answers have no id",
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar"), "`grammar`, as in `Grammar(\"json_schema\", SCHEMA)`"),
})

# They do not change the answer: who asks, how to bill, keep, schedule and draft it, and in which pieces it is sent.
INERT = frozenset({
    "custom_labels", "metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "rid",
    "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store",
    "stream_interval", "stream_reasoning", "user",
})

_GRAMMARS = "use structured_outputs"
_TEXT_ONLY = "send text alone"
_CHOOSE = "ask for n answers and choose among them"
_PLACEMENT = "leave it out: routers and targets place requests themselves"
_OUTPUTS = "leave it out: usage, logprobs and return_token_ids are what is told"
_OWN = "leave it out: what runs is the model's own"
_PROMPT = "write it into the prompt"
_TOOLS = "send tools of type function"

REFUSED: Mapping[str, Refused] = MappingProxyType({name: Refused(neutral, advice) for advice, names in (
    (_TOOLS, {"functions": ([],), "function_call": ("none",), "web_search_options": ()}),
    (_GRAMMARS, {"json_schema": (), "regex": (), "ebnf": (), "stop_regex": ([], "")}),
    (_TEXT_ONLY, {"audio": (), "modalities": (["text"],), "images_config": (), "video_config": (),
                  "use_audio_in_video": (False,), "max_dynamic_patch": (), "min_dynamic_patch": (),
                  "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "mm_payload": ("tensors",),
                  "return_mm_kwargs": (False,), "prompt_embeds": ()}),
    (_CHOOSE, {"best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,)}),
    (_PLACEMENT, {"data_parallel_rank": (), "routed_dp_rank": (), "disagg_prefill_dp_rank": (), "bootstrap_host": (),
                "bootstrap_port": (), "bootstrap_room": (), "kv_transfer_params": (), "ec_transfer_params": (),
                "session_params": (), "extra_key": ()}),
    (_OUTPUTS, {"logprob_token_ids": (), "return_weight_versions": (False,),
                "return_token_offsets": (False,), "return_prompt_text": (False,),
                "return_prompt_token_ids": (False,), "return_hidden_states": (False,),
                "return_routed_experts": (False,), "routed_experts_start_len": (0,),
                "routed_experts_prompt_start": (0,), "return_meta_info": (False,),
                "return_cached_tokens_details": (False,), "return_spec_tokens_details": (False,),
                "return_input_ids_in_sglext": (False,), "return_output_ids_in_sglext": (False,),
                "return_sampling_mask": (False,), "sampling_logprobs_mode": (),
                "return_flat_raw_output_top_logprobs": (False,), "return_flat_raw_top_logprobs_b64": (False, True)}),
    (_OWN, {"chat_template": (), "lora_path": (), "custom_params": (), "custom_logit_processor": (),
            "logit_processors": ([],), "vllm_xargs": ({},), "watermark": (), "watermarking": (False,), "moderation": (),
            "prompt_cache_options": (), "thinking": (), "thinking_token_budget": (),
            "repetition_detection": (), "task": (), "verbosity": ("medium",)}),
    (_PROMPT, {"suffix": ("",), "documents": ([],), "input_ids": ()}),
    ("use include_stop_str_in_output", {"no_stop_trim": (False,)}),
    ("leave it out: a prompt is cut at its beginning", {"truncation_side": ("left",)}),
) for name, neutral in names.items()})

# Fields of a message.
REFUSED_IN_MESSAGE: Mapping[str, Refused] = MappingProxyType({
    "audio": Refused((), _TEXT_ONLY), "refusal": Refused(("",), "write it into the content"),
    "annotations": Refused(([],), "leave it out"), "function_call": Refused((), "use tool_calls"),
})


def other_fields(raw: Mapping[str, Any], known: Collection[str], chat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``raw``, a body of another dialect, that the dialect does not know: fields of a chat, or unknown.
    ``chat``: the translation of the known fields. Raises InvalidRequest if a chat field contradicts one of the
    dialect's own."""
    other = {name: value for name, value in raw.items() if name not in known and not (value is None and name in chat)}
    for name in other.keys() & chat.keys():
        if other[name] != chat[name]:
            raise InvalidRequest(name, f"stands beside {name!r}, which says otherwise; send one of them")
    return other


def unknown_parts(name: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, bool]:
    """The unknown parts of the field ``name``, as fields of their own."""
    return {f"{name}.{part}": True for part, value in given.items() if part not in known and value is not None}


def read_object(raw: Mapping[str, Any], name: str, at: str = "") -> dict[str, Any]:
    """The object in the field ``name`` of ``raw`` (which is at the place ``at``); {} for none. Raises
    InvalidRequest."""
    value = raw.get(name)
    if not isinstance(value, dict | None):
        raise InvalidRequest(at + name, "must be an object")
    return value or {}


def read_text(at: str, value: Any) -> str:
    """A text, or its parts joined. Raises InvalidRequest."""
    if isinstance(value, str):
        return value
    for i, part in enumerate(value if isinstance(value, list) else ()):
        if part_type(part) in FILE_NOTES:
            raise InvalidRequest(f"{at}[{i}]", "only parts of text are served here, no images or files",
                                 "unsupported_parameter")
    if not isinstance(value, list) or len(value) > MAX_ITEMS or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        raise InvalidRequest(at, f"must be a string or a list of at most {MAX_ITEMS} parts of text")
    return "\n".join(part["text"] for part in value)


def read_tool_result(at: str, value: Any, unknown: dict[str, bool]) -> str:
    """A tool's result as text, as ``read_text``."""
    return read_text(at, [tool_result_part(at, part, unknown) for part in value] if isinstance(value, list) else value)


def tool_result_part(at: str, part: Any, unknown: dict[str, bool]) -> Any:
    """A part of a tool's result, at the place ``at``. A file in it is replaced by a note that there was one, because a
    client cannot remove it from its conversation; ``unknown`` gets its place, reported like an unknown field."""
    part = as_text_part(part)
    kind = part_type(part)
    if kind not in FILE_NOTES:
        return part
    unknown[f"{re.sub(r'[0-9]+', '', at)}[].{kind}"] = True
    return {"type": "text", "text": FILE_NOTES[kind]}


def as_text_part(part: Any) -> Any:
    """A text document or what a search found, words about it first, a model's refusal, or a tool that a search found
    (all tools are offered anyway), as a text part; other parts unchanged."""
    kind = part_type(part)
    if kind == "refusal" and "refusal" in part:
        return {"type": "text", "text": part["refusal"]}
    if kind == "tool_reference" and isinstance(part.get("tool_name"), str):
        return {"type": "text", "text": f"(the tool {part['tool_name']} may be called)"}
    if kind == "search_result":
        return _headed_text((part.get("title"), part.get("source")), part.get("content")) or part
    source: Any = part.get("source") if kind == "document" else None
    name = {"text": "data", "content": "content"}.get(part_type(source))
    return part if name is None else _headed_text((part.get("title"), part.get("context")), source.get(name)) or part


def _headed_text(heads: Iterable[Any], content: Any) -> dict[str, str] | None:
    """A text part of ``content``, a text or a list of text parts, behind the texts among ``heads``; None if it is
    neither."""
    parts = content if isinstance(content, list) else [{"text": content}]
    lines: list[Any] = [inner.get("text") if isinstance(inner, dict) else None for inner in parts]
    if not all(isinstance(line, str) for line in lines):
        return None
    return {"type": "text", "text": "\n".join([*(head for head in heads if isinstance(head, str)), *lines])}


def part_type(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""


def _equal(value: Any, neutral: Any) -> bool:
    """Numbers are equal whether they were written as 1 or 1.0, but not to true."""
    numbers = isinstance(value, int | float) and isinstance(neutral, int | float)
    same_type = type(value) is type(neutral) or (numbers and bool not in (type(value), type(neutral)))
    return same_type and bool(value == neutral)
