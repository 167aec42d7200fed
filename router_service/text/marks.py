"""The marks of model families: what models write around reasoning and tool calls, found in their chat templates.

It knows nothing about answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LLAMA, GRANITE = "<|python_tag|>", "<|tool_call|>"
GIVEN_TOOLS = re.compile(r"""(?<!['".])\btools\b(?!['"])""")  # by this name, not by a message's: Phi 4's has them there


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
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
HERMES, SEED, MINIMAX = "<tool_call>", "<seed:tool_call>", "<minimax:tool_call>"
CLOSERS = {opener: f"</{opener[1:]}" for opener in (HERMES, SEED, MINIMAX)}
HEADERS, HEADED = ("<|start|>", "<|channel|>"), "<|message|>"  # GPT-OSS': each text has a header before it
ANALYSIS = (f"<|channel|>analysis{HEADED}", "<|end|>")
OF_CHANNELS = (*HEADERS, HEADED, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
OPENERS = (*CLOSERS, "[TOOL_CALLS]", LLAMA, GRANITE, *(section.begin for section in SECTIONS))
MARKS = (*OPENERS, *CLOSERS.values(), "[ARGS]", "[CALL_ID]", *(mark for pair in THOUGHTS for mark in pair),
         *(mark for s in SECTIONS for mark in (s.call, s.arguments, s.end_call, s.end)))


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes: the marks that begin calls, those around its reasoning, and whether its template is given
    tools at all (else what it is told of them has to stand in a message)."""

    openers: tuple[str, ...] = ("<tool_call>",)
    thoughts: tuple[str, str] | None = None
    takes_tools: bool = False

    @staticmethod
    def of(template: str, ignores_tools: bool = False) -> Style:
        """Of a chat template's source; ``ignores_tools``: it writes nothing of tools that it is given."""
        takes_tools = not ignores_tools and GIVEN_TOOLS.search(template) is not None
        if ANALYSIS[0] in template:
            return Style(HEADERS if takes_tools else ("<tool_call>",), ANALYSIS, takes_tools)
        openers = tuple(mark for mark in OPENERS if mark in template)
        if takes_tools and not openers:
            openers = (LLAMA,)
        thoughts = next((pair for pair in THOUGHTS if pair[1] in template), None)
        return Style(openers if takes_tools else ("<tool_call>",), thoughts, takes_tools)

    @property
    def channels(self) -> bool:
        """Whether a header before each text says whether it is reasoning, a call or the answer."""
        return self.thoughts == ANALYSIS

    @property
    def bare(self) -> bool:
        """Whether a text that begins with JSON may be a call."""
        return LLAMA in self.openers or GRANITE in self.openers

    @property
    def calls_by_id(self) -> bool:
        """Whether the template writes of a call its id and no name: Kimi's, whose ids say it."""
        return KIMI.begin in self.openers


BARE = Style((LLAMA,))


def marks(specials: Mapping[int, str], style: Style) -> frozenset[int]:
    """Which special tokens are marks."""
    known = {*MARKS, *(OF_CHANNELS if style.channels else ())}
    known -= {GRANITE} - set(style.openers)  # Phi 4 mini has it, too
    return frozenset(token for token, text in specials.items() if text in known)
