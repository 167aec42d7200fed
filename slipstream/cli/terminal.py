"""What a person sees: a streamed answer whose drafted tokens stand out, what it took, tables, and sentences for errors.

Rules:
1. Drafted tokens are green; a terminal that refuses colours gets underlines; what is no terminal gets plain text.
2. What a model or a user wrote is printed as text: no markup, and no control characters but line ends and tabs.
3. Whatever goes wrong is one sentence and what to do next, never a traceback.

It knows nothing about processes, gRPC or configuration.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.protocol.chat import Delta, Usage

# Model output must not drive the terminal: escape sequences and the like are left out.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}


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
    """One line that says how to tell drafted tokens, or none where nothing can stand out."""
    if console.color_system is None:
        return Text("(tokens that came from drafts are marked in colour on a terminal)", style="dim")
    style = drafted_style(console)
    return Text.assemble(("tokens that came from drafts", style), (" · tokens that the target chose alone", ""))


def show_answer(console: Console, deltas: Iterable[Delta], clock: Callable[[], float] = time.monotonic) -> Told:
    """Print deltas as they come. Errors of the stream pass through, with the cursor on a line of its own."""
    style = drafted_style(console)
    began_s = clock()
    first_s = last_s = 0.0
    num_first = 0
    parts: list[str] = []
    usage: Usage | None = None
    try:
        for delta in deltas:
            last_s = clock()
            if not first_s and delta.tokens:
                first_s, num_first = last_s, len(delta.tokens)
            _show_delta(console, delta, style)
            parts.append(delta.text)
            usage = delta.usage or usage
    finally:
        console.print()
    first_s = first_s or last_s
    return Told("".join(parts), usage, first_s - began_s, last_s - first_s, num_first)


def summary(told: Told) -> str:
    """What an answer took, in one line."""
    usage = told.usage
    if usage is None:
        return "the server said nothing about what it took"
    speed = f"{told.tokens_per_s:.1f} tokens/s" if told.tokens_per_s else "too short to time"
    return (f"acceptance length {usage.acceptance_length:.2f} · {speed} · {usage.accepted_prediction_tokens} of "
            f"{usage.completion_tokens} tokens came from drafts · first token after {told.first_s:.2f} s")


def checks_table(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """Rows of (status ok | warn | fail, name, found, advice)."""
    table = _table("", "check", "found", "what to do")
    for status, name, found, advice in rows:
        sign, colour = SIGNS[status]
        table.add_row(Text(sign, style=colour), Text(name), Text(found), Text(advice))
    return table


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = _table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def complain(error: BaseException) -> None:
    """One red sentence on standard error."""
    console = Console(stderr=True)
    first, _, rest = str(error).partition("\n")
    console.print(Text(clean(first), style="bold red"), soft_wrap=True)
    if rest:
        console.print(Text(clean(rest)), soft_wrap=True)


def ask(prompt: str) -> str | None:
    """A line from the person (or the pipe); None at the end of input."""
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
    else:  # a server that cut its text differently: the text is what counts
        shown = Text(clean(delta.text))
    if shown:
        console.print(shown, end="", soft_wrap=True)
        console.file.flush()


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
