"""Text and tokens: prompts and chat messages in, the text of an answer out.

Rules:
1. The pieces of ``Detokenizer`` joined are the decoded answer: never half a character, special tokens left out. (Where
   a model writes bytes that are no UTF-8, byte-fallback tokenizers decode a run of them to other counts of U+FFFD.)
2. In a raw prompt, the text of a special token becomes that token.
3. The cost of a text is limited before tokenizing: a token stands for at most so many characters, so a text longer than
   the room times that number is refused. Encoding releases the interpreter lock.
4. The text, the tokens and the usage of an answer do not depend on how its tokens came in commits: tokens are taken one
   by one, and what a commit holds beyond a stop string is no part of the answer.
5. The joined texts of an answer's tokens are its text; only an unfinished character at the very end has no token. While
   a stop string may be starting, tokens are held back; once it is complete, the last token's text is cut.
6. A stop string that is complete within the answer's ``min_tokens`` does not count.
7. An answer ends with a finish or with an error, never without either. Ending early frees the target at once.
8. Long texts are tokenized in another thread (``Lanes``), so that the event loop goes on.

It knows nothing about files (``files`` reads them), how templates are rendered (``template``), HTTP, models, torch or
who asked.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from router_service.text.deltas import AnswerToken, TextDelta
from router_service.text.files import byte_alphabet, literal_tokens, max_token_chars, sampling_defaults, turn_tokens
from router_service.text.marks import Style, mark_tokens
from router_service.text.scanner import StopStrings
from router_service.text.template import BROKEN, CPU_S, Renderer
from slipstream.base.errors import InvalidRequest, ModelError, Unavailable
from slipstream.base.fair_executor import FairExecutor
from slipstream.base.offload import ChildProcess
from slipstream.models.folder import end_tokens, load_tokenizer, template_source
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Answer, Finish, Piece, PromptScores, Request, State, TokenLogprob

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
BRIEF_TEXT = 512  # characters or token ids: half a millisecond of a slow tokenizer
LONG_TEXT = 16_384  # characters, or token ids
MAX_TEXTS = 8 << 21  # characters or token ids of one that wait: a body of 2 MiB takes one to three seconds
LARGE_BODY = 1 << 16  # bytes: two milliseconds of the event loop at worst
PAUSE_S = 0.005  # a token takes several turns of the loop from its target to its client
Result = TypeVar("Result")
Messages = Sequence[Mapping[str, Any]] | bytes  # or as JSON


@dataclass(frozen=True, slots=True)
class Turn:
    """How a prompt ends: with the beginning of the assistant's turn, or inside the final message. ``variables``:
    further ones for the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)


ASSISTANT = Turn()


class ChatTemplate:
    """The template of one model. Threads may share it; they render one after the other."""

    __slots__ = ("_config", "_cpu_s", "_lock", "process", "takes_tools")

    def __init__(self, source: str, named: Mapping[str, str], specials: Iterable[str], cpu_s: float = CPU_S) -> None:
        """``named`` are the template's bos_token and its like, ``specials`` texts that name no token in messages.

        Raises ModelError when ``source`` is not a template, or does in a trial what it must not.
        """
        self._cpu_s = cpu_s
        self._config = {"source": source, "named": dict(named), "specials": list(specials), "cpu_s": cpu_s}
        self._lock = threading.Lock()
        self.takes_tools = False  # whether it writes the tools that it is given
        self.process = self._start_process()  # replaced by another one when it has ended

    def render(self, messages: Messages, turn: Turn = ASSISTANT) -> list[str]:
        """The prompt in order: plain text, the text of a special token that must not become the token, plain text, and
        so on. Raises InvalidRequest("messages") for messages that the template refuses, or that take more than the
        limits; blocks meanwhile."""
        json_messages = messages if isinstance(messages, bytes) else json.dumps(messages).encode()
        ending = json.dumps([turn.add_generation_prompt, turn.continue_final_message, turn.variables]).encode()
        line = b"[%b,%b]" % (json_messages, ending[1:-1])
        with self._lock:
            if self.process.ended:
                self.process = self._restart_process()
            process = self.process
            reply = process.ask(line)
        if reply is None:
            if process.out_of_time:
                raise InvalidRequest("messages", "the model's chat template does not end with them within "
                                     f"{self._cpu_s:g} s of the processor")
            raise Unavailable("the chat template's process has ended; try again")
        if "parts" not in reply:
            problem, words = reply["problem"], reply["words"]
            raise ModelError(f"chat_template: {words}") if problem == BROKEN else InvalidRequest("messages", words)
        parts: list[str] = reply["parts"]
        return parts

    def close(self) -> None:
        """End the process, which would otherwise end with this object."""
        self.process.kill()

    def _restart_process(self) -> ChildProcess:
        try:
            return self._start_process()
        except ModelError as error:  # it worked before, so somebody ended it again
            raise Unavailable("the chat template's process has ended; try again") from error

    def _start_process(self) -> ChildProcess:
        process = ChildProcess(Renderer.__module__)
        reply = process.ask(json.dumps(self._config).encode())
        if reply is None:
            too_slow = f"does not end within {self._cpu_s:g} s of the processor"
            raise ModelError(f"chat_template: {too_slow if process.out_of_time else 'ends its process'}")
        if "problem" in reply:
            raise ModelError(f"chat_template: {reply['words']}")
        self.takes_tools = reply["takes_tools"]
        return process


class TextCodec:
    """The tokenizer and the chat template of one model folder. Immutable; threads may share it.

    ``stop_token_ids`` end an answer (the model's end-of-text and end-of-turn tokens); ``vocab_size`` is the
    tokenizer's, which may be below the model's. ``specials``: special tokens and their texts; ``marks``: those of them
    that mark calls and reasoning.
    """

    __slots__ = ("_alphabet", "_bytes", "_literals", "_max_token_chars", "_template", "_texts", "_tokenizer",
                 "_turn_tokens", "defaults", "marks", "specials", "starts_with_space", "stop_token_ids", "style",
                 "vocab_size")

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError naming the file and field that cannot be used."""
        folder = Path(folder)
        self._tokenizer = load_tokenizer(folder)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[int, str] = {i: token.content for i, token in added.items() if token.special}
        source = template_source(folder)
        turns = {} if source is None else turn_tokens(self._tokenizer, source[0])
        self._turn_tokens = {*self.specials, *turns}
        self._literals = literal_tokens(self._tokenizer, [*self.specials.values(), *turns.values()])
        tokenizer_json = json.loads(self._tokenizer.to_str())
        self._alphabet, self.starts_with_space = byte_alphabet(tokenizer_json.get("decoder") or {"type": "none"})
        self._max_token_chars = max_token_chars(tokenizer_json, vocab)
        self._bytes: dict[int, bytes] = {}  # of ordinary tokens that were asked for
        self._texts: dict[int, str | None] = {}  # of ``complete_text``
        self._template = None if source is None else ChatTemplate(*source, self._literals)
        takes_tools = self._template is not None and self._template.takes_tools
        self.style = Style.of("" if source is None else source[0], takes_tools)
        self.marks = mark_tokens(self.specials, self.style)
        self.stop_token_ids: tuple[int, ...] = end_tokens(folder)
        self.defaults: Mapping[str, Any] = sampling_defaults(folder)

    def close(self) -> None:
        """Call it when no conversation needs the template any more."""
        if self._template is not None:
            self._template.close()

    def encode(self, text: str, room: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a raw prompt, begun as the tokenizer begins texts (BOS where the model has one). Raises
        InvalidRequest("prompt"), also for more tokens than there is ``room`` for."""
        return self._encode([text], "prompt", add_special_tokens, room)[0]

    def chat(self, messages: Messages, turn: Turn = ASSISTANT, room: int | None = None) -> list[int]:
        """The tokens of a conversation, as ``turn`` has it. Raises InvalidRequest("messages")."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send a prompt to /v1/completions")
        parts = self._template.render(messages, turn)  # there may be hundreds of thousands
        spelt = sum(len(self._literals[mark]) for mark in parts[1::2])
        if room is not None and spelt > room:
            raise too_long("messages", room, f"{spelt} tokens in its marks")
        plain = iter(self._encode([text for text in parts[::2] if text], "messages", False, room))
        tokens: list[int] = []
        for i, part in enumerate(parts):
            if part:
                tokens += self._literals[part] if i % 2 else next(plain)
        return tokens

    def starts_in_reasoning(self, prompt: Sequence[int], continues: bool = False) -> bool:
        """Whether the answer to ``prompt`` begins inside of reasoning. ``continues``: it goes on with its last message,
        which may have begun the reasoning long before."""
        tail = prompt[-(CONTINUED_TOKENS if continues else TAIL_TOKENS):]
        # Marks in a user's text do not count: only the turn that has not ended does.
        ended = [i for i, token in enumerate(tail, start=1) if token in self._turn_tokens and token not in self.marks]
        end = b"".join(map(self.token_bytes, tail[max(ended, default=0):])).decode("utf-8", "replace")
        marks = self.style.reasoning_marks
        return marks is not None and end.rfind(marks[0]) > end.rfind(marks[1])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, maybe part of a character; b"" for an id without a token."""
        found = self._bytes.get(token)
        if found is not None:
            return found
        if token in self.specials:
            return self.specials[token].encode()
        spelt = self._tokenizer.id_to_token(token) if 0 <= token < self.vocab_size else None
        if spelt is None:
            return b""
        try:
            found = _byte_fallback(spelt) if self._alphabet is None else bytes(map(self._alphabet.__getitem__, spelt))
        except KeyError:  # an added token is written as it is
            found = spelt.encode()
        self._bytes[token] = found
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """What ``tokens`` spell, special ones included."""
        detokenizer = Detokenizer(self, self.specials)
        return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """``tokens`` as the vocabulary has them, with its own signs for spaces and bytes; "" for an id without one."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def complete_text(self, token: int) -> str | None:
        """The text of a token of complete characters, whatever is before it; "" for a special one. None for a token
        that may need its neighbours."""
        try:
            return self._texts[token]
        except KeyError:
            self._texts[token] = text = "" if token in self.specials else _decoded(self.token_bytes(token))
            return text

    def token_text(self, token: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _encode(self, texts: Sequence[str], field: str, add_special_tokens: bool, room: int | None) -> list[list[int]]:
        num_chars = sum(map(len, texts))
        if room is not None and self._max_token_chars is not None and num_chars > room * self._max_token_chars:
            raise too_long(field, room, f"{num_chars} characters, which are more tokens")
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(field, f"not Unicode text: a lone surrogate at character {error.start}") from error
        # ``encode`` would keep the interpreter until it is done, seconds for a long text.
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if room is not None and (num_tokens := sum(map(len, found))) > room:
            raise too_long(field, room, f"{num_tokens} tokens")
        return [encoding.ids for encoding in found]


def too_long(field: str, room: int, length: str) -> InvalidRequest:
    """The error for a prompt that cannot fit. Agents recognise these words, and shorten their history."""
    return InvalidRequest(field, f"the prompt is too long: it has {length}, and this model's maximum context length is "
                          f"{room} tokens; shorten it", "context_length_exceeded")


class Detokenizer:
    """The text of one answer, token by token."""

    __slots__ = ("_at_start", "_codec", "_incomplete", "_shown_specials", "_utf8")

    def __init__(self, codec: TextCodec, shown_specials: Collection[int] = (), continues: bool = False) -> None:
        """``shown_specials``: special tokens that the text has. ``continues``: it continues another text."""
        self._codec = codec
        self._shown_specials = shown_specials
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = codec.starts_with_space and not continues
        self._incomplete = False  # whether a character is unfinished

    def push(self, token: int) -> str:
        """The text that is complete with ``token``; "" while a character is unfinished, and for special tokens that are
        not shown."""
        text = None if self._incomplete or token in self._shown_specials else self._codec.complete_text(token)
        if text is None:
            if token in self._codec.specials and token not in self._shown_specials:
                return ""
            text = self._utf8.decode(self._codec.token_bytes(token))
            self._incomplete = self._utf8.getstate()[0] != b""
        return self._without_first_space(text) if self._at_start else text

    def flush(self) -> str:
        """What is left at the end of an answer: U+FFFD for an unfinished character, else ""."""
        return self._without_first_space(self._utf8.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _byte_fallback(token: str) -> bytes:
    """SentencePiece: ``<0x0A>`` is a byte, U+2581 a space."""
    byte = BYTE.fullmatch(token)
    return token.replace(SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


@dataclass(slots=True)
class Tally:
    """An answer's counts: tokens, rounds of the target, verified and accepted draft nodes."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: Counter[int] = field(default_factory=Counter)  # accepted nodes -> how many rounds that verified some
    cached_tokens: int = 0
    lossy: bool = False
    first_state: State | None = None


TAIL_TOKENS = 64  # enough for a character, which has at most four bytes
CONTINUED_TOKENS = 1 << 14  # of a message that goes on: some milliseconds


class Completion:
    """The text of ``answer`` to ``request``, after the part that was answered before. It ends with a finish or an
    error. Iterate once; the iteration raises the answer's errors. ``identity``: of the model that answers."""

    def __init__(self, request: Request, answer: Answer, detokenizer: Detokenizer, stops: Sequence[str],
                 vocab_size: int, identity: Callable[[], Identity | None] = lambda: None, keep_stop: bool = False,
                 return_all_tokens: bool = False) -> None:
        """``detokenizer``: a new one. ``keep_stop``: the stop string or token that ends the answer is part of its text.
        ``return_all_tokens``: also those that end the answer, without text."""
        self.identity = identity
        self.tally = Tally()
        self.finished = False
        self._answer = answer
        self._pieces = aiter(answer)
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._vocab_size = vocab_size
        self._detokenizer = detokenizer
        self._return_all_tokens, self._keep_stop = return_all_tokens, keep_stop
        self._ended_by: int | None = None
        self._prompt_length = len(request.tokens) - request.answered
        self._scores: list[PromptScores] = []
        self._num_unscored = 0 if request.prompt_logprobs is None else len(request.tokens) - 1
        self._stops = StopStrings(stops, keep_stop) if stops else None
        self._held: deque[tuple[int, AnswerToken]] = deque()  # each with the length of the text up to its end
        self._min_tokens_left = request.sampling.min_tokens  # until a stop string counts
        self._length = 0  # of the text so far
        self._released_length = 0  # of the text that may go out
        self._replay = partial(self._replay_answered, request, stops) if request.answered else None

    def _replay_answered(self, request: Request, stops: Sequence[str]) -> None:
        """Take over the state after the tokens that were answered before. Only the end of their text matters: an
        unfinished character, and what may become a stop string. Raises InvalidRequest if the answer was over."""
        end = min(max([TAIL_TOKENS, *map(len, stops)]), request.answered)
        self._min_tokens_left -= request.answered - end
        for token in request.tokens[len(request.tokens) - end:]:
            if self._push(token, False, None):
                raise InvalidRequest("begun.tokens", "a stop string ends them")
        self._held.clear()

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> TextDelta:
        if self.finished:
            raise StopAsyncIteration
        if self._replay is not None:
            replay, self._replay = self._replay, None
            replay()
        piece = await anext(self._pieces)
        while not (piece.tokens or piece.finish):
            self._score(piece)
            piece = await anext(self._pieces)
        self._score(piece)
        delta = self._take(piece)
        if self._num_unscored:
            delta = delta._replace(prompt=_checked_scores(self._scores, self._num_unscored))
            self._scores, self._num_unscored = [], 0
        if delta.finish:
            self.finished = True
            await self._answer.aclose()
        return delta

    async def aclose(self) -> None:
        await self._answer.aclose()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.matched

    def _score(self, piece: Piece) -> None:
        if not self.tally.tokens:  # a target that resumes an answer counts the answered tokens as prompt
            self.tally.cached_tokens = min(max(self.tally.cached_tokens, piece.cached_tokens), self._prompt_length)
        if piece.prompt is not None:
            if piece.prompt.start == 1:  # it begins again, at another target
                self._scores.clear()
            self._scores.append(_packed(piece.prompt))

    def _take(self, piece: Piece) -> TextDelta:
        tally = self.tally
        tally.first_state = tally.first_state or piece.state
        tally.rounds += 1 if piece.tokens else 0
        tally.lossy = tally.lossy or piece.lossy
        if piece.drafted:
            tally.drafted += piece.drafted
            tally.reached[piece.accepted] += 1
        for i, token in enumerate(piece.tokens):
            last = piece.finish == "stop" and i == len(piece.tokens) - 1
            tally.tokens += 1
            tally.accepted += i < piece.accepted
            logprob = piece.logprobs[i] if i < len(piece.logprobs) else None
            if last and token in self._stop_token_ids:
                self._ended_by = token
                if not self._keep_stop:
                    if self._return_all_tokens:
                        self._held.append((self._length, AnswerToken(token, "", i < piece.accepted, logprob)))
                    break
            if self._push(token, i < piece.accepted, logprob):
                return self._end("stop", i + 1)
        if piece.finish:
            return self._end(piece.finish, len(piece.tokens))
        return self._delta(self._released(), num_tokens=len(piece.tokens))

    def _push(self, token: int, drafted: bool, logprob: TokenLogprob | None) -> bool:
        """Take one token; returns whether a stop string is complete."""
        if not 0 <= token < self._vocab_size:
            raise Unavailable("the target sent a token outside its vocabulary")
        text = self._detokenizer.push(token)
        self._length += len(text)
        self._min_tokens_left -= 1
        self._held.append((self._length, AnswerToken(token, text, drafted, logprob)))
        if self._stops is None:  # nothing is ever held back
            return False
        self._released_length += len(self._stops.push(text, self._min_tokens_left < 0))
        return self._stops.matched is not None

    def _released(self) -> list[AnswerToken]:
        if self._stops is None:
            tokens = [token for _, token in self._held]
            self._held.clear()
            return tokens
        tokens = []
        while self._held and self._held[0][0] <= self._released_length:
            tokens.append(self._held.popleft()[1])
        return tokens

    def _end(self, finish: Finish, num_tokens: int) -> TextDelta:
        cut = self._stops is not None and self._stops.matched is not None
        if not cut:
            self._released_length = self._length
        tokens = self._released()
        if self._held and self._released_length > self._held[0][0] - len(self._held[0][1].text):
            end, token = self._held.popleft()
            tokens.append(token._replace(text=token.text[: len(token.text) - (end - self._released_length)]))
        if self._return_all_tokens:
            tokens += [token._replace(text="") for _, token in self._held]
        self._held.clear()
        delta = self._delta(tokens, "" if cut else self._detokenizer.flush(), finish, num_tokens)
        return delta._replace(stop=self.stopped_by if cut else self._ended_by)

    def _delta(self, tokens: list[AnswerToken], tail: str = "", finish: Finish = "", num_tokens: int = 0) -> TextDelta:
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        return TextDelta(text + tail, tuple(tokens), finish, num_tokens)


def _packed(scores: PromptScores) -> PromptScores:
    """In a sixth of the memory: a prompt may have a million, which wait for all of an answer."""
    return PromptScores(scores.start, array("d", scores.logprobs), array("i", scores.ranks),
                        array("i", scores.top_ids), array("d", scores.top_logprobs))


def _checked_scores(parts: Sequence[PromptScores], count: int) -> tuple[PromptScores, ...]:
    """``parts``, which must be of ``count`` tokens from the second on, in order. Raises Unavailable."""
    ends = [1, *(part.start + len(part.logprobs) for part in parts)]
    if [part.start for part in parts] != ends[:-1] or ends[-1] != 1 + count:
        raise Unavailable("the target sent scores of other tokens than the prompt's")
    return tuple(parts)


class Lanes:
    """Two threads that tokenize texts and write answers, so that the event loop goes on. Each works on one text at a
    time; a client that leaves frees its place only when the running work is done. A short text never waits for a long
    one, and tenants take turns with long ones. Create it anywhere, use it on one event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "short-texts")
        self._long = FairExecutor("long-texts", 1.0, "too many long prompts wait to be read; try again later",
                                  MAX_TEXTS)
        self._large = asyncio.Lock()

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "", at_once: bool = False,
                  never_refuse: bool = False) -> Result:
        """Run ``work`` on a text of that size; returns or raises what it does. ``at_once``: the work never blocks, so a
        brief text needs no thread. Raises CapacityError beyond ``MAX_TEXTS`` of a tenant's long texts, unless
        ``never_refuse`` is set (for a finished answer that is only to be written): then it waits."""
        if at_once and size <= BRIEF_TEXT:
            return work()
        if size <= LONG_TEXT:
            return await asyncio.get_running_loop().run_in_executor(self._short, work)
        return await self._long.submit(tenant, work, size, never_refuse)

    async def off_loop(self, size: int, work: Callable[[], Result], tenant: str) -> Result:
        """The result of ``work`` on so many numbers of an answer, off the event loop if they are many."""
        return await self.run(size, work, tenant, at_once=True, never_refuse=True)

    async def wait_to_parse(self, size: int) -> None:
        """Wait until a body of so many bytes may be parsed, which blocks the event loop. Code after it without an await
        belongs to the same turn."""
        if size > LARGE_BODY:
            async with self._large:
                await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Call it when nobody waits any more; work that has begun ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.close()
