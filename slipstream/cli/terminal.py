"""The terminal: prints streamed answers with marked draft tokens, conversations, tables, and errors as sentences.

Rules:
1. Draft tokens are green; underlined on a terminal without colours; plain text where there is no terminal. Reasoning is
   dim, and not part of a conversation.
2. Text of a model or a user is printed without markup and without control characters, except line ends and tabs.
3. An error is one sentence and what to do next, never a traceback.
4. A conversation is sent whole with each question; a question that failed is forgotten. Ctrl-C ends the answer, not the
   conversation; the end of input or /quit ends the conversation.

It knows nothing about processes, gRPC or configuration.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.base.errors import InvalidRequest, SlipstreamError
from slipstream.protocol.chat import Delta, Message, Usage

# Model output must not drive the terminal: escape sequences and the like are left out.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
HELP = "/plain switches drafts off and on · /new forgets the conversation · /quit ends"


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that was shown: its text, what it used, and when its tokens came."""

    text: str
    usage: Usage | None
    first_s: float  # from the question to the first tokens
    rest_s: float  # from the first tokens to the last
    num_first: int  # tokens that came first

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first ones; 0 when there were none."""
        if self.usage is None or self.rest_s <= 0:
            return 0.0
        return (self.usage.completion_tokens - self.num_first) / self.rest_s


def drafted_style(console: Console) -> str:
    return "underline" if console.no_color else "green"


def legend(console: Console) -> Text:
    """One line that explains how draft tokens are marked; empty where they cannot be marked."""
    if console.color_system is None:
        return Text("(tokens that came from drafts are marked in colour on a terminal)", style="dim")
    style = drafted_style(console)
    return Text.assemble(("tokens that came from drafts", style), (" · tokens that the target chose alone", ""))


def show_answer(console: Console, deltas: Iterable[Delta]) -> Told:
    """Print deltas as they arrive. Errors of the stream are raised, after a line end."""
    style = drafted_style(console)
    began_s = time.monotonic()
    first_s = last_s = 0.0
    num_first = 0
    thinking = False
    parts: list[str] = []
    usage: Usage | None = None
    try:
        for delta in deltas:
            last_s = time.monotonic()
            if not first_s and delta.tokens:
                first_s, num_first = last_s, len(delta.tokens)
            if delta.reasoning:
                console.print(Text(clean(delta.reasoning), style="dim"), end="", soft_wrap=True)
                thinking = True
            if thinking and delta.text:
                console.print("\n")
                thinking = False
            _show_delta(console, delta, style)
            parts.append(delta.text)
            usage = delta.usage or usage
    finally:
        console.print()
    first_s = first_s or last_s
    return Told("".join(parts), usage, first_s - began_s, last_s - first_s, num_first)


def summary(told: Told) -> str:
    """One line with an answer's tokens, times and acceptance."""
    usage = told.usage
    if usage is None:
        return "the server said nothing about what it took"
    speed = f"{told.tokens_per_s:.1f} tokens/s" if told.tokens_per_s else "too short to time"
    return (f"acceptance length {usage.acceptance_length:.2f} · {speed} · {usage.accepted_prediction_tokens} of "
            f"{usage.completion_tokens} tokens came from drafts · first token after {told.first_s:.2f} s")


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def complain(error: BaseException) -> None:
    """One red sentence on standard error."""
    console = Console(stderr=True)
    first, _, rest = str(error).partition("\n")
    console.print(Text(clean(first), style="bold red"), soft_wrap=True)
    if rest:
        console.print(Text(clean(rest)), soft_wrap=True)


def ask(prompt: str) -> str | None:
    """A line from the person (or the pipe); None at the end of input, and where it is closed."""
    if sys.stdin is None:
        return None
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def clean(text: str) -> str:
    """``text`` without control characters."""
    return text.translate(CONTROLS)


def _show_delta(console: Console, delta: Delta, style: str) -> None:
    shown = Text()
    for token in delta.tokens:
        shown.append(clean(token.text), style=style if token.drafted else "")
    tokens_text = "".join(token.text for token in delta.tokens)
    if delta.text.startswith(tokens_text):
        shown.append(clean(delta.text[len(tokens_text):]))
    else:  # the server split its text in another way: only the text counts
        shown = Text(clean(delta.text))
    if shown:
        console.print(shown, end="", soft_wrap=True)
        console.file.flush()


class Chatter(Protocol):
    """The part of ``slipstream.wire.client.Client`` that a conversation needs."""

    def chat(self, messages: Sequence[Message], *, model: str = "", **options: Any) -> Iterator[Delta]: ...


class Conversation:
    """The questions and answers so far. ``ask`` returns the user's next line, None at the end."""

    def __init__(self, console: Console, client: Chatter, model: str, ask: Callable[[str], str | None],
                 options: dict[str, Any]) -> None:
        self._console = console
        self._client = client
        self._model = model
        self._ask = ask
        self._options = options
        self._messages: list[Message] = []
        self._speculate = True

    def run(self) -> None:
        """Until /quit or the end of input."""
        self._console.print(legend(self._console))
        self._say(HELP)
        while (line := self._next()) is not None:
            if line.startswith("/"):
                if line == "/quit":
                    return
                self._command(line)
            elif line:
                self._answer(line)

    def _next(self) -> str | None:
        try:
            line = self._ask("\n> ")
        except KeyboardInterrupt:
            return None
        return None if line is None else line.strip()

    def _command(self, line: str) -> None:
        if line == "/plain":
            self._speculate = not self._speculate
            said = "drafts are on again" if self._speculate else "plain decoding: no drafts from here on"
        elif line == "/new":
            self._messages.clear()
            said = "forgotten; a new conversation begins"
        else:
            said = HELP if line == "/help" else f"no command {clean(line)}: {HELP}"
        self._say(said)

    def _answer(self, question: str) -> None:
        asked = [*self._messages, Message("user", question)]
        deltas = self._client.chat(asked, model=self._model, speculate=self._speculate, **self._options)
        try:
            told = show_answer(self._console, deltas)
        except KeyboardInterrupt:
            self._say("stopped; the question is forgotten")
            return
        except SlipstreamError as error:
            complain(error)
            if isinstance(error, InvalidRequest) and error.code == "context_length_exceeded":
                self._say("/new forgets the conversation, which makes room" if self._messages else
                          "a shorter question makes room, or a smaller --max-tokens")
            return
        self._messages = [*asked, Message("assistant", told.text)]
        self._say(summary(told))

    def _say(self, line: str) -> None:
        self._console.print(Text(line, style="dim"), soft_wrap=True)
