"""The marks of model families: what models write around reasoning and tool calls, found in their chat templates.

It knows nothing about answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LLAMA, GRANITE = "<|python_tag|>", "<|tool_call|>"


@dataclass(frozen=True, slots=True)
class Section:
    """Marks of a family that writes calls in sections."""

    begin: str
    call: str
    arguments: str
    end_call: str
    end: str


KIMI = Section("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
               "<|tool_call_end|>", "<|tool_calls_section_end|>")
SECTIONS = (
    Section("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>"), KIMI)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Marks of a family that writes the arguments of a call as names and values. ``name_end``: behind the function's
    name, if there are arguments; ``value``: before a value, ``padding``: around it."""

    begin: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    value: str = ""
    padding: str = ""


GLM = Pairs("", "<arg_key>", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>")
CODER = Pairs("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", padding="\n")
INVOKE = Pairs('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>")
REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
HERMES, SEED, MINIMAX = "<tool_call>", "<seed:tool_call>", "<minimax:tool_call>"
NEMOTRON, HUNYUAN = "<TOOLCALL>", "<tool_calls>"
CLOSERS = {opener: f"</{opener[1:]}" for opener in (HERMES, SEED, MINIMAX, NEMOTRON, HUNYUAN)}
START, CHANNEL, HEADER_END = "<|start|>", "<|channel|>", "<|message|>"  # GPT-OSS writes a header before each text
HEADERS = (START, CHANNEL)
ANALYSIS = (f"{CHANNEL}analysis{HEADER_END}", "<|end|>")
TEXT_ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNEL_MARKS = (*HEADERS, HEADER_END, "<|constrain|>", *TEXT_ENDS)
OPENERS = (*CLOSERS, "[TOOL_CALLS]", LLAMA, GRANITE, *(section.begin for section in SECTIONS))
MARKS = (*OPENERS, *CLOSERS.values(), "[ARGS]", "[CALL_ID]", *(mark for pair in REASONING_MARKS for mark in pair),
         *(mark for s in SECTIONS for mark in (s.call, s.arguments, s.end_call, s.end)))


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes: the marks that begin calls, those around its reasoning, and whether its template takes tools
    (else a message has to describe them)."""

    openers: tuple[str, ...] = (HERMES,)
    reasoning_marks: tuple[str, str] | None = None
    takes_tools: bool = False

    @staticmethod
    def of(template: str, takes_tools: bool) -> Style:
        """The style in a chat template's source. DeepSeek's take no tools, but write their calls: a model that was
        asked for others may write these."""
        reasoning_marks = next((pair for pair in REASONING_MARKS if pair[1] in template), None)
        openers = tuple(mark for mark in OPENERS if mark in template)
        if ANALYSIS[0] in template:
            reasoning_marks, openers = ANALYSIS, HEADERS
        elif not takes_tools:
            openers = tuple(dict.fromkeys((HERMES, *openers)))
        return Style(openers or (LLAMA,), reasoning_marks, takes_tools)

    @property
    def has_channels(self) -> bool:
        """Whether a header before each text says whether it is reasoning, a call or the answer."""
        return self.reasoning_marks == ANALYSIS

    @property
    def bare_calls(self) -> bool:
        """Whether a text that begins with JSON may be a call."""
        return LLAMA in self.openers or GRANITE in self.openers


BARE = Style((LLAMA,))


def mark_tokens(specials: Mapping[int, str], style: Style) -> frozenset[int]:
    """The special tokens that are marks."""
    known = {*MARKS, *(CHANNEL_MARKS if style.has_channels else ())}
    known -= {GRANITE} - set(style.openers)  # Phi 4 mini has this token, too
    return frozenset(token for token, text in specials.items() if text in known)
