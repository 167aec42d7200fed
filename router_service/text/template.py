"""What renders the chat template of a model, in a process of its own: conversations in, prompts out.

A template is a program that comes with the model, and what it costs depends on what it is given. Nothing inside a
process ends a program in the midst of ``'a' * 10 ** 9``, so it has a process that may be ended.

Rules:
1. Only the template of the model folder is ever rendered, in jinja2's sandbox. A request brings none.
2. One rendering has ``cpu_s`` of the processor, ``MEMORY`` and ``MAX_RENDERED`` characters. The first ends the process;
   the next rendering starts another one.
3. A template is tried on small conversations when it is loaded. One that is none, leaves the sandbox or exceeds a limit
   is a ModelError; so is any other end of its process. What it refuses by itself is no fault of its own. One that
   writes nothing of a text, as those of models that read images, too, is given lists of parts; one that writes nothing
   of what the system says, or says later, or before results of tools, is given that as the user's, as is one that
   writes no results of tools; one that writes no calls, as the assistant's words; one that writes the first alone of
   several calls, each in a message of its own.
4. The text of a special token inside a message (``<|im_end|>`` in a question) stays text. Left to the tokenizer it
   would become the token, and a user could end his turn and write the system's; here it comes out of ``render`` as a
   part of its own. Messages without such text give exactly the prompt that transformers gives.
5. Messages that a template refuses are tried again in other ``readings``, none of which loses a word: clients send
   several of the system, also in mid-conversation or where a model has no such role, and of a user; the assistant's
   before any of a user; words beside results of tools; ids of calls as other models write them; several calls at once.
   The API allows all that, and many templates do not. Some want arguments of calls as text, though others write JSON
   of what they are given.
6. Both ends write lines of JSON. The process logs nothing, and ends with its standard input.

It knows nothing about tokenizers, and imports little: it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError

from slipstream.base.offload import bounded
from slipstream.models.template import sandbox

MAX_RENDERED = 4 << 20  # characters
MEMORY = 512 << 20  # bytes that the process may map; it begins with 25 MB
CPU_S = 3.0  # of one rendering: thousands of messages take a tenth of it
PRIVATE_USE = range(0xE000, 0xF8FE, 2)  # characters that no text of meaning holds; two of them mark a literal
TRIALS = (("user",), ("system", "user"), ("user", "assistant", "user"))
LATER = (("system", "system", "user"), ("system", "user", "assistant", "system", "user"),
         ("system", "user", "assistant", "user", "system"))
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]}
CALLED = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "theircall", "type": "function", "function": {"name": "weather", "arguments": {"city": "Hello calls"}}}]})
OTHER = {"id": "otherscall", "type": "function", "function": {"name": "weather", "arguments": {"city": "otherscall"}}}
RESULT = {"role": "tool", "tool_call_id": "theircall", "name": "weather", "content": "Hello results"}
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
END = "\uf8fe\uf8ff"  # behind a message that goes on; two more such characters
REFUSED, BROKEN, COSTLY = "refused", "broken", "costly"  # what is wrong: the messages, the template, what both take
Messages = Sequence[Mapping[str, Any]]


class Renderer:
    """What runs in the process."""

    def __init__(self, source: str, named: Mapping[str, str], specials: Iterable[str]) -> None:
        self._named = dict(named)
        longest_first = sorted((text for text in specials if text), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template = compiled(source)
        self.in_parts = False  # whether texts are given as lists of parts
        self.systemless = False  # whether the system's are given as the user's
        self.one_system = False  # whether those that the system says later are
        self.forgets: list[str] = []  # whose last message leaves out the system's words, which are the user's then
        self.one_call = False  # whether it writes the first alone of several calls at once
        self.callless = False  # whether calls are given as the assistant's words
        self.resultless = False  # whether results of tools are given as the user's words
        self.toolless = False  # whether it writes nothing of the tools that it is given
        self._thinking = "message.thinking" in source and "reasoning_content" not in source
        self._marks = tuple(mark for mark in ("<tool_call>", "<|tool_call|>") if mark in source)

    def written(self, *roles: str) -> list[str]:
        """Those of whom the prompt has what they say."""
        said = [(role, f"Hello {i} {role}s") for i, role in enumerate(roles)]
        text = self.told([{"role": role, "content": words} for role, words in said])
        return [role for role, words in said if words in text]

    def told(self, messages: Messages, names: Mapping[str, Any] | None = None) -> str:
        """The prompt; "" where there is none."""
        try:
            return "".join(self.render(messages, names=names))
        except Problem:
            return ""

    def render(self, messages: Messages, begun: bool = True, continued: bool = False,
               names: Mapping[str, Any] | None = None) -> list[str]:
        """As ``ChatTemplate.render``, which asks for it. Raises Problem."""
        given: Any = [messages, names or {}]
        guards = _Guards.find(given, self._specials)
        if guards is not None:
            given = guards.put_into(given)
        if continued:
            *before, last = given[0]
            text = self._read([*before, {**last, "content": f"{last['content']}{END}"}], False, given[1])
            text, mark, _ = text.rpartition(END)
            if not mark:
                raise Problem(REFUSED, "the model's chat template does not write the final message as it is")
        else:
            text = self._read(given[0], begun, given[1])
        return [text] if guards is None else guards.split(text)

    def _read(self, messages: Messages, add_generation_prompt: bool, given: Mapping[str, Any]) -> str:
        """The first of the ``readings`` that can be rendered. Raises Problem."""
        refusal = Problem(REFUSED, "")
        if self.one_system and any(message.get("role") == "system" for message in messages[1:]):
            messages = joined(messages)
        if self.one_call:
            messages = one_by_one(messages)
        if self.callless:
            messages = in_words(messages, self._marks)
        if self.resultless and any(message.get("role") == "tool" for message in messages):
            messages = turns_of(map(as_users, messages))
        for reading in readings(messages):
            try:
                return self._text(reading, add_generation_prompt, given)
            except (Problem, MemoryError):
                raise
            except SecurityError as error:
                raise Problem(BROKEN, f"does what the sandbox forbids: {error}") from error
            except TemplateError as error:
                refusal = Problem(REFUSED, f"the model's chat template refuses: {str(error)[:200]}")
            except Exception as error:
                refusal = Problem(REFUSED, f"the model's chat template cannot render them ({type(error).__name__}); "
                                  "give every message a role and a text content")
        raise refusal

    def _text(self, messages: Messages, add_generation_prompt: bool, given: Mapping[str, Any]) -> str:
        """Raises whatever the template does."""
        if self.systemless:
            messages = by_users(messages)
        elif any(message.get("role") in self.forgets for message in messages[-1:]):
            messages = by_last_user(messages)
        if self._thinking:  # as GPT-OSS' calls it, which takes none beside words
            messages = [{**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content")
                        and not message["content"] else message for message in messages]
        if self.in_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        names = {"tools": None, "documents": None, **given, **self._named, "messages": messages,
                 "add_generation_prompt": add_generation_prompt}
        written, chunks = 0, []
        for chunk in self._template.generate(names):
            chunks.append(chunk)
            written += len(chunk)
            if written > MAX_RENDERED:
                raise Problem(COSTLY, f"longer than {MAX_RENDERED} characters when rendered")
        return "".join(chunks)


class Problem(Exception):
    """Why there is no prompt: one of the kinds above, and words for whoever asked."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(kind, words)
        self.kind = kind
        self.words = words


def compiled(source: str) -> Template:
    """Raises Problem when ``source`` is not a template."""
    try:
        return sandbox().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja2's own, and what Python says of the program that jinja2 has made of it
        raise Problem(BROKEN, f"not a template: {type(error).__name__}: {str(error)[:200]}") from error


class _Guards:
    """Stand-ins for the special tokens' texts while the template works on the messages."""

    __slots__ = ("_close", "_found", "_open", "_specials")

    def __init__(self, specials: re.Pattern[str], found: list[str], marks: tuple[str, str]) -> None:
        self._specials = specials
        self._found = found
        self._open, self._close = marks

    @staticmethod
    def find(given: Any, specials: re.Pattern[str]) -> _Guards | None:
        """None, the usual case, when no message holds the text of a special token."""
        texts: list[str] = []
        _map_texts(given, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        found = sorted({match for text in texts for match in specials.findall(text)})
        if not found:
            return None
        used = set().union(*texts)
        for code in PRIVATE_USE:
            if chr(code) not in used and chr(code + 1) not in used:
                return _Guards(specials, found, (chr(code), chr(code + 1)))
        raise Problem(REFUSED, "hold special tokens and every private-use character")

    def put_into(self, given: Any) -> Any:
        index = {text: i for i, text in enumerate(self._found)}
        return _map_texts(given, lambda text: self._specials.sub(
            lambda match: f"{self._open}{index[match[0]]}{self._close}", text))

    def split(self, text: str) -> list[str]:
        """``text`` as plain text, a literal in place of its stand-in, plain text, and so on."""
        pieces = re.split(f"{self._open}([0-9]+){self._close}", text)
        return [self._found[int(piece)] if i % 2 else piece for i, piece in enumerate(pieces)]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def readings(messages: Messages) -> Iterator[Messages]:
    """``messages``, then what else may be said in their place, for who refused those before."""
    said = [messages]
    yield messages
    turns = joined(messages)
    for reading in (turns, answered(turns), one_by_one(turns), as_text(turns), by_users(turns), greeted(turns)):
        if reading not in said:
            said.append(reading)
            yield reading


def joined(messages: Messages) -> list[dict[str, Any]]:
    """One of the system at the beginning, whose later words are a user's; and turns."""
    begun = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return turns_of([{**message, "role": "user"} if message["role"] == "system" and i >= begun else message
                     for i, message in enumerate(messages)])


def answered(turns: Messages) -> Messages:
    """As Mistral's templates have it: what a user says behind results of tools is part of the last of these, and ids of
    calls are nine letters and digits."""
    found = list[Mapping[str, Any]]()
    for message in turns:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": "\n".join([found[-1]["content"], message["content"]])}
            continue
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in message.get("tool_calls", ())]
        id_ = {"tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else {}
        found.append({**message, **id_, **({"tool_calls": calls} if calls else {})})
    return found


def _short(given: str) -> str:
    return given if SHORT_ID.fullmatch(given) else sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def one_by_one(turns: Messages) -> Messages:
    """As Llama 3's templates have it: each of several calls in a message of its own, its results behind it."""
    found, at = list[Mapping[str, Any]](), 0
    while at < len(turns):
        message, at = turns[at], at + 1
        calls, results = message.get("tool_calls", ()), list[Mapping[str, Any]]()
        if len(calls) < 2:
            found.append(message)
            continue
        while at < len(turns) and turns[at]["role"] == "tool":
            results.append(turns[at])
            at += 1
        for call in calls:
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            found += [{**message, "tool_calls": [call]}, *own]
            results = [result for result in results if result not in own]
            message = {"role": message["role"], "content": ""}
        found += results
    return found


def as_text(turns: Messages) -> Messages:
    """As templates of DeepSeek's kind have it: arguments are text already."""
    return [{**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": json.dumps(
        call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]]}
            if message.get("tool_calls") else message for message in turns]


def in_words(messages: Messages, marks: Sequence[str]) -> list[Mapping[str, Any]]:
    """As templates of SmolLM3's and Granite's kind have it: they ask for calls as objects between marks, or as a list
    behind one, and write of a call in the past what the assistant said besides."""
    found = list[Mapping[str, Any]]()
    for message in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        if calls:
            words = ([f"<tool_call>\n{call}\n</tool_call>" for call in calls] if "<tool_call>" in marks
                     else [f"{''.join(marks)}[{', '.join(calls)}]"])
            said = "\n".join([*([message["content"]] if message["content"] else []), *words])
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": said}
        found.append(message)
    return found


def as_users(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """As Granite 3.0's and older templates of Mistral's have it: they know results by other roles than the API's."""
    said = f"<tool_response>\n{message['content']}\n</tool_response>"
    return {"role": "user", "content": said} if message["role"] == "tool" else message


def by_users(turns: Messages) -> Messages:
    """As Gemma's and older templates of Mistral's have it: what the system says begins the user's first turn."""
    return turns_of([{**message, "role": "user"} if message["role"] == "system" else message for message in turns])


def by_last_user(turns: Messages) -> Messages:
    """As Mistral's templates have it where that is the last message: what the system says begins the user's last."""
    said = [message["content"] for message in turns if message["role"] == "system"]
    others = [message for message in turns if message["role"] != "system"]
    last = max((i for i, message in enumerate(others) if message["role"] == "user"), default=None)
    if last is None or not said:
        return turns
    return [{**message, "content": "\n\n".join([*said, message["content"]])} if i == last else message
            for i, message in enumerate(others)]


def greeted(turns: Messages) -> Messages:
    """As Gemma's and Mistral's templates have it: a user is first, who says nothing where the assistant began."""
    begun = by_users(turns)
    return [{"role": "user", "content": ""}, *begun] if begun[0]["role"] == "assistant" else begun


def turns_of(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With those of one role that follow one another as one, words and calls: many templates take no others. Results
    of tools stay apart, and reasoning begins another."""
    turns: list[list[Mapping[str, Any]]] = []
    for message in messages:
        role = turns[-1][0]["role"] if turns else "tool"
        if message["role"] != role or role == "tool" or "reasoning_content" in message:
            turns.append([])
        turns[-1].append(message)
    return [_one(turn) for turn in turns]


def _one(turn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    content = "\n".join([message["content"] for message in turn if message["content"]])
    return {**turn[0], "content": content, **({"tool_calls": calls} if calls else {})}


def trial(renderer: Renderer) -> None:
    """Raises Problem if any of the small conversations shows a fault of the template."""
    for roles in TRIALS:
        try:
            renderer.render([{"role": role, "content": "Hello"} for role in roles])
        except Problem as problem:
            if problem.kind != REFUSED:
                raise
    if not renderer.written("user"):
        renderer.in_parts = True
        renderer.in_parts = renderer.written("user") == ["user"]
    elif not renderer.told((*CALLED, RESULT), TOOLS):  # of a call without words it may look at the first part
        talk = [{"role": role, "content": "Hello"} for role in TRIALS[-1]]
        text, renderer.in_parts = renderer.told(talk), True
        renderer.in_parts = renderer.told(talk) == text and renderer.told((*CALLED, RESULT), TOOLS) != ""
    renderer.systemless = renderer.written("system", "user") == ["user"]
    renderer.one_system = any(renderer.written(*roles).count("system") == 1 for roles in LATER)
    asked = [{"role": role, "content": "Hello"} for role in TRIALS[1]]
    offered, bare = renderer.told(asked, TOOLS), renderer.told(asked)
    renderer.toolless = offered != "" and offered.count("weather") == bare.count("weather")
    called = renderer.told(CALLED, TOOLS)
    renderer.callless = called != "" and "Hello calls" not in called and "theircall" not in called
    several = (CALLED[0], {**CALLED[1], "tool_calls": [*CALLED[1]["tool_calls"], OTHER]})
    renderer.one_call = "Hello" in called and "otherscall" not in renderer.told(several, TOOLS) and (
        "otherscall" in renderer.told(one_by_one(several), TOOLS))
    whole = renderer.told((*CALLED, RESULT), TOOLS)
    named = whole.count("theircall") > called.count("theircall")
    renderer.resultless = whole != "" and "Hello results" not in whole and not named
    for last, said in (("assistant", CALLED), ("tool", (*CALLED, RESULT))):
        text = renderer.told([{"role": "system", "content": "Hello system"}, *said], TOOLS)
        if text and "Hello system" not in text:
            renderer.forgets.append(last)


def main() -> None:
    """Answer line by line: first what ``ChatTemplate`` opens with, then conversations."""
    bounded(MEMORY)
    renderer: Renderer | None = None
    cpu_s = CPU_S
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        cpu_s = cpu_s if renderer else asked.pop("cpu_s")
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, whatever that is doing
        try:
            if renderer is None:
                renderer = Renderer(**asked)
                trial(renderer)
                reply: Any = {"toolless": renderer.toolless}
            else:
                reply = {"parts": renderer.render(*asked)}
            written = json.dumps(reply)
        except Problem as problem:
            written = json.dumps({"problem": problem.kind, "words": problem.words})
        except MemoryError:
            written = json.dumps({"problem": COSTLY, "words": f"takes more than {MEMORY >> 20} MiB when rendered"})
        except Exception as error:
            written = json.dumps({"problem": REFUSED, "words": f"cannot be rendered ({type(error).__name__})"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(written + "\n")
        sys.stdout.flush()

