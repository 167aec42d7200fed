"""``slipstream chat``: a conversation with a running router, in the terminal.

Rules:
1. The whole conversation is sent with each question; a question that failed is forgotten.
2. Ctrl-C ends the answer, not the conversation; the end of input or /quit ends the conversation.

It knows nothing about gRPC or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from slipstream.base.errors import InvalidRequest, SlipstreamError
from slipstream.cli.terminal import clean, complain, legend, show_answer, summary
from slipstream.protocol.chat import Delta, Message

HELP = "/plain switches drafts off and on · /new forgets the conversation · /quit ends"


class Chatter(Protocol):
    """Who answers: ``slipstream.wire.client.Client``."""

    def chat(self, messages: Sequence[Message], *, model: str = "", **options: Any) -> Iterator[Delta]: ...


class Conversation:
    """Questions and answers so far. ``ask`` gives the next line of the person, None at the end."""

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
                self._say("/new forgets the conversation, which makes room")
            return
        self._messages = [*asked, Message("assistant", told.text)]
        self._say(summary(told))

    def _say(self, line: str) -> None:
        self._console.print(Text(line, style="dim"), soft_wrap=True)
