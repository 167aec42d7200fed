"""What renders the chat template of a model, in a process of its own: conversations in, prompts out.

A template is a program that comes with the model, and its cost depends on its input. Inside a process nothing can stop
``'a' * 10 ** 9``, so templates run in a child process that can be killed.

Rules:
1. Only the template of the model folder is ever rendered, in jinja2's sandbox. A request brings none.
2. One rendering has ``cpu_s`` of the processor, ``MEMORY`` and ``MAX_RENDERED`` characters. The first ends the process;
   the next rendering starts another one.
3. A template is tried on small conversations when it is loaded. A ModelError is raised if it is no template, breaks the
   sandbox or a limit, or its process ends. Messages that the template refuses are no fault. Whatever it omits of them
   (``omissions``) is rewritten so that it does not.
4. The text of a special token, or of one between turns (``files``), inside a message (``<|im_end|>`` in a question)
   stays text. Left to the tokenizer it would become the token, and a user could end his turn and write the system's;
   here it comes out of ``render`` as a part of its own. Messages without such text give exactly the prompt that
   transformers gives.
5. Messages that a template refuses are tried again in other ``variants``, none of which loses text. The API allows
   several system messages (also later, or for a model without that role), several user messages in a row, an assistant
   message first, text beside tool results, foreign call ids, and several calls at once; many templates do not. Some
   want arguments of calls as text, others as objects.
6. Both sides write lines of JSON. The process logs nothing, and ends when its standard input is closed.

It knows nothing about tokenizers, and imports little: it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError

from router_service.text.omissions import omissions, takes_tools
from router_service.text.rewritings import Messages, Rewriting, texts_as_parts, variants
from slipstream.base.offload import limit_resources
from slipstream.models.template import sandbox

MAX_RENDERED = 4 << 20  # characters
MEMORY = 512 << 20  # bytes that the process may map; it begins with 25 MB
CPU_S = 3.0  # of one rendering: thousands of messages take a tenth of it
PRIVATE_USE = range(0xE000, 0xF8FE, 2)  # characters that no text of meaning holds; two of them mark a literal
TRIALS = (("user",), ("system", "user"), ("user", "assistant", "user"))
END = "\uf8fe\uf8ff"  # behind a message that goes on; two more such characters
REFUSED, BROKEN, COSTLY = "refused", "broken", "costly"  # what is wrong: the messages, the template, what both take


class Renderer:
    """What runs in the process."""

    def __init__(self, source: str, named: Mapping[str, str], specials: Iterable[str]) -> None:
        self._named = dict(named)
        longest_first = sorted((text for text in specials if text), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template = compiled(source)
        self.source = source
        self.rewritings: list[Rewriting] = []  # without which it omits a part of the messages, in order

    def render_or_empty(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt; "" where there is none."""
        try:
            return "".join(self.render(messages, variables=variables))
        except TemplateProblem:
            return ""

    def render(self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False,
               variables: Mapping[str, Any] | None = None) -> list[str]:
        """As ``ChatTemplate.render``, which asks for it. Raises TemplateProblem."""
        (messages, variables), split = _guarded([messages, variables or {}], self._specials)
        if continue_final_message:
            *before, last = messages
            text = self._render_first([*before, {**last, "content": f"{last['content']}{END}"}], False, variables)
            text, mark, _ = text.rpartition(END)
            if not mark:
                raise TemplateProblem(REFUSED, "the model's chat template does not write the final message as it is")
        else:
            text = self._render_first(messages, add_generation_prompt, variables)
        return split(text)

    def _render_first(self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The first of the ``variants`` that can be rendered. Raises TemplateProblem."""
        refusal = TemplateProblem(REFUSED, "")
        for variant in variants(messages):
            try:
                for rewriting in self.rewritings:
                    variant = rewriting(variant)
                return self._render_text(variant, add_generation_prompt, variables)
            except (TemplateProblem, MemoryError):
                raise
            except SecurityError as error:
                raise TemplateProblem(BROKEN, f"does what the sandbox forbids: {error}") from error
            except TemplateError as error:
                refusal = TemplateProblem(REFUSED, f"the model's chat template refuses: {str(error)[:200]}")
            except Exception as error:
                refusal = TemplateProblem(REFUSED, "the model's chat template cannot render them "
                                          f"({type(error).__name__}); give every message a role and a text content")
        raise refusal

    def _render_text(self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Raises whatever the template does."""
        context = {"tools": None, "documents": None, **variables, **self._named, "messages": messages,
                   "add_generation_prompt": add_generation_prompt}
        length, chunks = 0, []
        for chunk in self._template.generate(context):
            chunks.append(chunk)
            length += len(chunk)
            if length > MAX_RENDERED:
                raise TemplateProblem(COSTLY, f"longer than {MAX_RENDERED} characters when rendered")
        return "".join(chunks)


class TemplateProblem(Exception):
    """Why there is no prompt: one of the kinds above, and words for whoever asked."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(kind, words)
        self.kind = kind
        self.words = words


def compiled(source: str) -> Template:
    """Raises TemplateProblem when ``source`` is not a template."""
    try:
        return sandbox().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja2's own, and what Python says of the program that jinja2 has made of it
        raise TemplateProblem(BROKEN, f"not a template: {type(error).__name__}: {str(error)[:200]}") from error


def _guarded(given: Any, specials: re.Pattern[str]) -> tuple[Any, Callable[[str], list[str]]]:
    """``given`` with stand-ins for the special tokens' texts while the template works on it, and what splits a prompt:
    plain text, a literal in place of its stand-in, plain text, and so on."""
    texts: list[str] = []
    _map_texts(given, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    found = sorted({match for text in texts for match in specials.findall(text)})
    if not found:  # the usual case
        return given, lambda text: [text]
    used = set().union(*texts)
    pairs = ((chr(code), chr(code + 1)) for code in PRIVATE_USE)
    marks = next((pair for pair in pairs if used.isdisjoint(pair)), None)
    if marks is None:
        raise TemplateProblem(REFUSED, "hold special tokens and every private-use character")
    begin, end = marks
    index = {text: i for i, text in enumerate(found)}

    def split(text: str) -> list[str]:
        pieces = re.split(f"{begin}([0-9]+){end}", text)
        return [found[int(piece)] if i % 2 else piece for i, piece in enumerate(pieces)]

    return _map_texts(given, lambda text: specials.sub(lambda match: f"{begin}{index[match[0]]}{end}", text)), split


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def trial(renderer: Renderer) -> None:
    """Findings about the template from small test conversations. Raises TemplateProblem for a faulty template."""
    for roles in TRIALS:
        try:
            renderer.render([{"role": role, "content": "Hello"} for role in roles])
        except TemplateProblem as problem:
            if problem.kind != REFUSED:
                raise
    for omission in omissions(renderer.source):
        if omission.occurs(renderer.render_or_empty):
            known = renderer.rewritings
            renderer.rewritings = sorted([*known, omission.rewriting], key=lambda found: found is texts_as_parts)
            if omission.occurs(renderer.render_or_empty):
                renderer.rewritings = known


def main() -> None:
    """Answer line by line: first what ``ChatTemplate`` opens with, then conversations."""
    limit_resources(MEMORY)
    renderer: Renderer | None = None
    cpu_s = CPU_S
    for line in sys.stdin.buffer:
        request = json.loads(line)
        cpu_s = cpu_s if renderer else request.pop("cpu_s")
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, whatever that is doing
        try:
            if renderer is None:
                renderer = Renderer(**request)
                trial(renderer)
                reply: Any = {"takes_tools": takes_tools(renderer.render_or_empty)}
            else:
                reply = {"parts": renderer.render(*request)}
            written = json.dumps(reply)
        except TemplateProblem as problem:
            written = json.dumps({"problem": problem.kind, "words": problem.words})
        except MemoryError:
            written = json.dumps({"problem": COSTLY, "words": f"takes more than {MEMORY >> 20} MiB when rendered"})
        except Exception as error:
            written = json.dumps({"problem": REFUSED, "words": f"cannot be rendered ({type(error).__name__})"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(written + "\n")
        sys.stdout.flush()

