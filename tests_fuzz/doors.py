"""Where bytes come in from outside. A ``Door`` takes any bytes: it lets them in whole or refuses them by a typed error.

Rules:
1. A door raises what it names and nothing else; what it lets in survives being written and read again.
2. ``seeds`` are good inputs, from which a search begins. They are made by the code that writes such bytes.

It knows nothing about who makes the bytes up.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from router_service.dialects.chat import ChatBody
from router_service.dialects.completions import CompletionBody
from router_service.dialects.openai import parse, read_body
from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection, load
from slipstream.base.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    NotFound,
    RemoteProtocolError,
    SlipstreamError,
)
from slipstream.engine.loading import load_model
from slipstream.models.folder import load_tokenizer, template_source
from slipstream.protocol.chat import ChatOptions, Delta, Message, TextToken, ToolCall, Usage
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire.answers import (
    decode_answer_requests,
    decode_answer_responses,
    encode_answer_request,
    encode_answer_response,
)
from slipstream.wire.codec import (
    FrameLimits,
    decode_draft_frame,
    decode_draft_hello,
    decode_target_frame,
    decode_target_hello,
    encode_draft_frames,
    encode_draft_hello,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.inference import (
    decode_chat,
    decode_complete,
    decode_delta,
    encode_chat,
    encode_complete,
    encode_delta,
)
from tests_fuzz import asking, programs
from tests_fuzz.programs import folder

MOST_BYTES = 4 << 20  # of a gRPC message, which is refused beyond that before anybody looks at it
LIMITS = FrameLimits(vocab_size=500, max_context=4096, feature_width=4)
INCARNATION = 7
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


@dataclass(frozen=True, slots=True)
class Door:
    """``enter`` takes bytes and may raise ``refusals``."""

    enter: Callable[[bytes], None]
    refusals: tuple[type[SlipstreamError], ...]
    seeds: Callable[[], Iterable[bytes]]

    def knock(self, data: bytes) -> bool:
        """Whether ``data`` is let in. Raises whatever is no refusal."""
        try:
            self.enter(data)
        except self.refusals:
            return False
        return True


@cache
def codec() -> TextCodec:
    return TextCodec(folder())


def http_chat(data: bytes) -> None:
    body = parse(ChatBody, read_body(data))
    body.options()
    codec().chat([{"role": message.role, "content": message.content} for message in body.messages])


def http_completion(data: bytes) -> None:
    body = parse(CompletionBody, read_body(data))
    body.options()
    for prompt in body.prompt:
        if isinstance(prompt, str):
            codec().encode(prompt)


def http_seeds() -> Iterator[bytes]:
    message = {"role": "user", "content": "hello"}
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stop": ["a", "b"],
               "max_tokens": 9, "logit_bias": {"5": -2}, "presence_penalty": 1, "frequency_penalty": 1,
               "speculate": False, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2, "user": "u"}
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    yield json.dumps({"model": "tiny", "messages": [message], **options}).encode()
    yield json.dumps({"model": "tiny", "messages": [{"role": "system", "content": parts}, message], "stream": True,
                      "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3}).encode()
    yield json.dumps({"model": "tiny", "prompt": ["a", "b"], "logprobs": 2, **options}).encode()
    yield json.dumps({"model": "tiny", "prompt": [[1, 2], [3]], "echo": False, "best_of": 1}).encode()


def grpc_chat(data: bytes) -> None:
    model, messages, options = decode_chat(data)
    _settled(encode_chat(model, messages, options), lambda again: encode_chat(*decode_chat(again)))


def grpc_complete(data: bytes) -> None:
    model, prompt, options = decode_complete(data)
    _settled(encode_complete(model, prompt, options), lambda again: encode_complete(*decode_complete(again)))


def grpc_delta(data: bytes) -> None:
    _settled(encode_delta(decode_delta(data)), lambda again: encode_delta(decode_delta(again)))


def _settled(written: bytes, again: Callable[[bytes], bytes]) -> None:
    """What was written once reads the same from then on; bytes are compared, as NaN is not equal to itself."""
    assert again(written) == written


def grpc_seeds() -> Iterator[bytes]:
    options = ChatOptions(max_tokens=5, temperature=0.5, seed=9, stop=("x",), logit_bias=((3, 1.5),), speculate=False)
    yield encode_chat("tiny", (Message("system", "be brief"), Message("user", "hello")), options)
    yield encode_complete("tiny", "once", options)
    yield encode_complete("tiny", (3, 4), options)
    yield encode_complete("tiny", "once", replace(options, grammar=Grammar("choice", '["a", "b"]')))
    yield from asking.tools_seeds()
    tokens = TextToken(3, "h", True, -0.5, ((3, "h", -0.5),)), TextToken(4, "i")
    told = Delta("hi", tokens, "stop", Usage(3, 2, 5))
    yield encode_delta(told)
    yield encode_delta(told._replace(reasoning="hm", tool_calls=(ToolCall("f", "{}", "c1", 2),)))


def frame_of_target(data: bytes) -> None:
    """What a draft hears."""
    items, _ = decode_target_frame(data, INCARNATION, LIMITS)
    frames, left = encode_target_frames(INCARNATION, items, MOST_BYTES)
    again = [decode_target_frame(frame, INCARNATION, LIMITS) for frame in frames]
    assert not left and not any(faults for _, faults in again), "a good item is a fault the second time"
    assert sum(len(good) for good, _ in again) == len(items)


def frame_of_draft(data: bytes) -> None:
    """What a target hears."""
    items, _ = decode_draft_frame(data, INCARNATION, LIMITS)
    frames, left = encode_draft_frames(INCARNATION, items, MOST_BYTES)
    again = [decode_draft_frame(frame, INCARNATION, LIMITS) for frame in frames]
    assert not left and not any(faults for _, faults in again), "a good item is a fault the second time"
    assert sum(len(good) for good, _ in again) == len(items)


def frame_seeds() -> Iterator[bytes]:
    numbers = np.arange(1, 4, dtype=np.int32)
    rows = Features(1, 0, np.arange(12, dtype=np.float32).tobytes(), 3, "float32")
    bound: list[DraftBound] = [Open(1, numbers, 3, Sampling(seed=3)), rows, Commit(1, 3, numbers[:2], wanted=2),
                               Close(1)]
    heard: list[TargetBound] = [Growth(1, 3, numbers, np.array([-3, 1, 2], np.int32), numbers,
                                       np.array([-0.1, -0.2, -0.5], np.float32)), Drop(1, "full")]
    yield from encode_target_frames(INCARNATION, bound, MOST_BYTES)[0]
    yield from encode_draft_frames(INCARNATION, heard, MOST_BYTES)[0]


def hellos(data: bytes) -> None:
    """Both handshakes; the first byte says whose."""
    (decode_target_hello if data[:1] < b"\x80" else decode_draft_hello)(data[1:])


def hello_seeds() -> Iterator[bytes]:
    spec = FeatureSpec((2,), 48, "float32")
    yield b"\x00" + encode_target_hello(TargetHello(PROTOCOL_VERSION, 7, "tiny", 500, "digest", 48, 2, 4096))
    draft = DraftHello(PROTOCOL_VERSION, 7, "drafter", 500, "digest", spec, 48, 4096, 63, 64)
    yield b"\xff" + encode_draft_hello(draft)


def asked_of_target(data: bytes) -> None:
    """What a router sends."""
    for answer, content in decode_answer_requests(data):
        if not isinstance(content, Exception):
            encode_answer_request(answer, content)


def told_by_target(data: bytes) -> None:
    """What a router hears."""
    for answer, content in decode_answer_responses(data):
        if not isinstance(content, RemoteProtocolError):
            encode_answer_response(answer, content)


def target_seeds() -> Iterator[bytes]:
    yield encode_answer_request(1, Request("one", (4, 5), Sampling(temperature=0.5, seed=3), 9))
    yield encode_answer_request(2, True)
    yield encode_answer_request(3, Request("two", (4, 5), Sampling(), 9,
                                           identity=Identity("tiny", "float32", "none", "echo"),
                                           grammar=Grammar("json_schema", '{"type": "integer"}')))
    yield encode_answer_response(1, Piece((4, 5, 6), 2, 4))


def model_folder(data: bytes) -> None:
    """The first byte says which file of a good folder is replaced by the rest."""
    if not data:
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        replaced = FILES[data[0] % len(FILES)]
        for name in {*FILES, *(file.name for file in folder().iterdir())}:
            file = Path(made) / name
            if name == replaced:
                file.write_bytes(data[1:])
            elif (folder() / name).is_file():
                file.symlink_to(folder() / name)
        load_model(made, ModelSection(path=made, dtype="float64", kernels="torch"))
        load_tokenizer(Path(made))
        template_source(Path(made))


def folder_seeds() -> Iterator[bytes]:
    for number, name in enumerate(FILES):
        file = folder() / name
        if file.is_file():
            yield bytes([number]) + file.read_bytes()


def settings(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".yaml") as file:
        file.write(data)
        file.flush()
        load(file.name)


def settings_seeds() -> Iterator[bytes]:
    yield b"model: {path: tiny, dtype: float32}\ntarget: {drafts: ['127.0.0.1:1'], policy: {max_nodes: 8}}\n"
    yield b"target:\n  engine: {vllm: {a: 1}}\nwire: {tls: {folder: a, allowed_names: [b]}}\n"


DOORS: dict[str, Door] = {
    "http-chat": Door(http_chat, (InvalidRequest,), http_seeds),
    "http-completion": Door(http_completion, (InvalidRequest,), http_seeds),
    "grpc-chat": Door(grpc_chat, (InvalidRequest,), grpc_seeds),
    "grpc-complete": Door(grpc_complete, (InvalidRequest,), grpc_seeds),
    "grpc-delta": Door(grpc_delta, (RemoteProtocolError,), grpc_seeds),
    "frame-of-target": Door(frame_of_target, (RemoteProtocolError,), frame_seeds),
    "frame-of-draft": Door(frame_of_draft, (RemoteProtocolError,), frame_seeds),
    "hellos": Door(hellos, (RemoteProtocolError,), hello_seeds),
    "asked-of-target": Door(asked_of_target, (RemoteProtocolError,), target_seeds),
    "told-by-target": Door(told_by_target, (RemoteProtocolError,), target_seeds),
    "model-folder": Door(model_folder, (ModelError, ConfigError), folder_seeds),
    "template": Door(programs.template, (ModelError, InvalidRequest), programs.template_seeds),
    "settings": Door(settings, (ConfigError,), settings_seeds),
    "grammar": Door(programs.grammar, (InvalidRequest,), programs.grammar_seeds),
    "markup": Door(asking.markup, (), asking.markup_seeds),
    "http-answer": Door(asking.http_answer, (), asking.answer_seeds),
    "http-messages": Door(asking.http_messages, (), asking.messages_seeds),
    "http-responses": Door(asking.http_responses, (), asking.responses_seeds),
    "http-counting": Door(asking.http_counting, (), asking.counting_seeds),
    "event-ids": Door(asking.event_ids, (), asking.event_seeds),
    "grpc-answer": Door(asking.grpc_answer, (InvalidRequest, NotFound), asking.grpc_answer_seeds),
}
