"""The terminal: prints streamed answers with marked draft tokens, conversations, tables, and errors as sentences.

Rules:
1. Draft tokens are green; underlined on a terminal without colours; plain text where there is no terminal. Reasoning is
   dim, and not part of a conversation.
2. Text of a model or a user is printed without markup and without control characters, except line ends and tabs.
3. An error is one sentence and what to do next, never a traceback.
4. A conversation is sent whole with each question; a question that failed is forgotten. Ctrl-C ends the answer, not the
   conversation; the end of input or /quit ends the conversation.

It knows nothing about processes, the network or configuration.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.base.errors import InvalidRequest, SlipstreamError
from slipstream.protocol.chat import Delta, Message, Usage

if TYPE_CHECKING:
    from slipstream.wire.client import Client  # brings gRPC, which help does not need

# Model output must not drive the terminal: escape sequences and the like are left out.
CONTROL_CHARACTERS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
MAX_TABLE_WIDTH = 10_000  # where nothing limits it
HELP = "/plain switches drafts off and on · /new forgets the conversation · /quit ends"


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer that was printed, and the times of its tokens."""

    text: str
    usage: Usage | None
    first_token_s: float  # from the question to the first tokens
    decode_s: float  # from the first tokens to the last
    num_first_tokens: int  # tokens that arrived first, together

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first ones; 0 when there were none."""
        if self.usage is None or self.decode_s <= 0:
            return 0.0
        return (self.usage.completion_tokens - self.num_first_tokens) / self.decode_s


def drafted_style(console: Console) -> str:
    return "underline" if console.no_color else "green"


def legend(console: Console) -> Text:
    """One line that explains how draft tokens are marked; empty where they cannot be marked."""
    if console.color_system is None:
        return Text("(tokens that came from drafts are marked in colour on a terminal)", style="dim")
    style = drafted_style(console)
    return Text.assemble(("tokens that came from drafts", style), (" · tokens that the target chose alone", ""))


def show_answer(console: Console, deltas: Iterable[Delta]) -> ShownAnswer:
    """Print deltas as they arrive. Errors of the stream are raised, after a line end."""
    style = drafted_style(console)
    began_s = time.monotonic()
    first_s = last_s = 0.0
    num_first = 0
    in_reasoning = False
    parts: list[str] = []
    usage: Usage | None = None
    try:
        for delta in deltas:
            last_s = time.monotonic()
            if not first_s and delta.tokens:
                first_s, num_first = last_s, len(delta.tokens)
            if delta.reasoning:
                console.print(Text(strip_controls(delta.reasoning), style="dim"), end="", soft_wrap=True)
                in_reasoning = True
            if in_reasoning and delta.text:
                console.print("\n")
                in_reasoning = False
            _show_delta(console, delta, style)
            parts.append(delta.text)
            usage = delta.usage or usage
    finally:
        console.print()
    first_s = first_s or last_s
    return ShownAnswer("".join(parts), usage, first_s - began_s, last_s - first_s, num_first)


def summary(answer: ShownAnswer) -> str:
    """One line with an answer's tokens, times and acceptance."""
    usage = answer.usage
    if usage is None:
        return "the server said nothing about what it took"
    speed = f"{answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else "too short to time"
    return (f"acceptance length {usage.acceptance_length:.2f} · {speed} · {usage.accepted_prediction_tokens} of "
            f"{usage.completion_tokens} tokens came from drafts · first token after {answer.first_token_s:.2f} s")


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table on standard output. Where that is no terminal (a pipe, a log), each row is one line."""
    console = Console()
    if not console.is_terminal:
        console.width = MAX_TABLE_WIDTH
    console.print(plain_table(columns, rows))


def print_error(error: BaseException) -> None:
    """Print an error's sentence in red on standard error."""
    console = Console(stderr=True)
    first, _, rest = str(error).partition("\n")
    console.print(Text(strip_controls(first), style="bold red"), soft_wrap=True)
    if rest:
        console.print(Text(strip_controls(rest)), soft_wrap=True)


def read_line(prompt: str) -> str | None:
    """A line of standard input, from a person or a pipe; None at its end, and where it is closed."""
    if sys.stdin is None:
        return None
    if is_typed := sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  with it ``input`` takes arrow keys and remembers lines
    try:
        return input(prompt if is_typed else "")
    except EOFError:
        return None


def strip_controls(text: str) -> str:
    """``text`` without control characters."""
    return text.translate(CONTROL_CHARACTERS)


def _show_delta(console: Console, delta: Delta, style: str) -> None:
    shown = Text()
    for token in delta.tokens:
        shown.append(strip_controls(token.text), style=style if token.drafted else "")
    tokens_text = "".join(token.text for token in delta.tokens)
    if delta.text.startswith(tokens_text):
        shown.append(strip_controls(delta.text[len(tokens_text):]))
    else:  # the server split its text in another way: only the text counts
        shown = Text(strip_controls(delta.text))
    if shown:
        console.print(shown, end="", soft_wrap=True)
        console.file.flush()


class Conversation:
    """The questions and answers so far. ``read_line`` returns the user's next line, None at the end."""

    def __init__(self, console: Console, client: Client, model: str, read_line: Callable[[str], str | None],
                 options: dict[str, Any]) -> None:
        self._console = console
        self._client = client
        self._model = model
        self._read_line = read_line
        self._options = options
        self._messages: list[Message] = []
        self._speculate = True
        self._num_failed = 0

    def run(self) -> int:
        """Until /quit or the end of input. Returns the number of questions whose answers failed."""
        self._console.print(legend(self._console))
        self._print_note(HELP)
        while (line := self._next_line()) is not None:
            if line.startswith("/"):
                if line == "/quit":
                    break
                self._run_command(line)
            elif line:
                self._ask(line)
        return self._num_failed

    def _next_line(self) -> str | None:
        try:
            line = self._read_line("\n> ")
        except KeyboardInterrupt:
            return None
        return None if line is None else line.strip()

    def _run_command(self, line: str) -> None:
        if line == "/plain":
            self._speculate = not self._speculate
            note = "drafts are on again" if self._speculate else "plain decoding: no drafts from here on"
        elif line == "/new":
            self._messages.clear()
            note = "forgotten; a new conversation begins"
        else:
            note = HELP if line == "/help" else f"no command {strip_controls(line)}: {HELP}"
        self._print_note(note)

    def _ask(self, question: str) -> None:
        messages = [*self._messages, Message("user", question)]
        deltas = self._client.chat(messages, model=self._model, speculate=self._speculate, **self._options)
        try:
            answer = show_answer(self._console, deltas)
        except KeyboardInterrupt:
            self._print_note("stopped; the question is forgotten")
            return
        except SlipstreamError as error:
            print_error(error)
            self._num_failed += 1
            if isinstance(error, InvalidRequest) and error.code == "context_length_exceeded":
                self._print_note("/new forgets the conversation, which makes room" if self._messages else
                          "a shorter question makes room, or a smaller --max-tokens")
            return
        self._messages = [*messages, Message("assistant", answer.text)]
        self._print_note(summary(answer))

    def _print_note(self, note: str) -> None:
        self._console.print(Text(note, style="dim"), soft_wrap=True)
