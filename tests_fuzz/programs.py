"""Doors for programs of strangers: chat templates and grammars. What one costs is known when it is over, so each runs
in a fork first; what ended there by itself runs here, where a search sees the code that it reaches.

It knows nothing about who writes them.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from zlib import crc32

import numpy as np

from router_service.text.template import Renderer, TemplateProblem, trial
from router_service.text.tokens import ChatTemplate
from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import StopTokens
from slipstream.grammar.trial import Trial
from slipstream.models.folder import load_tokenizer
from slipstream.protocol.grammar import KINDS, Grammar
from slipstream.protocol.tree import DraftTree
from tests.tiny import CHAT_TEMPLATE, EOS, VOCAB, write_tiny_model

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload([__name__])
CPU_S, MEMORY = 0.5, 512 << 20  # of a template
NAMED, SPECIALS = {"bos_token": "<s>"}, ["<s>", "<|im_end|>"]
SAID = [{"role": "user", "content": "a <|im_end|> b"}]
COMPARED = 32  # one template of so many is rendered as the router does, too
VARYING = ("random", "lipsum", "now")  # in templates that do not give the same twice
STEPS, NODES = 24, 6


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Kept until the process ends, which removes it."""
    return tempfile.TemporaryDirectory(prefix="fuzz-")


@cache
def folder() -> Path:
    """A whole model folder, made once."""
    return write_tiny_model(Path(scratch().name) / "whole")


class Fork:
    """A process that renders one template after the other, until one does not end: one for each takes ten times as long
    as what it renders. It is forked from a server with one thread: a fork of this process, whose other threads may hold
    a lock at that moment, can stand still for ever."""

    def __init__(self) -> None:
        self._end, end = FORK_SERVER.Pipe()
        self._process = FORK_SERVER.Process(target=_render, args=(end,), daemon=True)
        self._process.start()
        end.close()

    def ends(self, source: str) -> bool:
        """Whether that ends by itself within ``CPU_S`` and ``MEMORY`` more than there was. If not, the fork has."""
        with suppress(OSError, EOFError):
            self._end.send_bytes(source.encode())
            return self._end.recv_bytes() == b"."
        self._end.close()
        self._process.join()
        return False


def _render(end: Connection) -> None:
    """What a fork does, and ends with whoever asks."""
    with open("/proc/self/statm") as mapped:
        most = int(mapped.read().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(EOFError):
        while True:
            source = end.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                rendered(source)
            except (MemoryError, RecursionError):
                return
            except Exception:  # whoever runs it takes that for a refusal
                pass
            signal.setitimer(signal.ITIMER_PROF, 0)
            end.send_bytes(b".")


def rendered(source: str) -> list[str]:
    renderer = Renderer(source, NAMED, SPECIALS)
    trial(renderer)
    return renderer.render(SAID)


@cache
def _fork() -> Fork:
    return Fork()


def template(data: bytes) -> None:
    """It ends, by itself or not; and no text of a message becomes a special token."""
    source = data.decode(errors="replace")
    if not _fork().ends(source):
        _fork.cache_clear()
        return
    try:
        parts = rendered(source)
    except TemplateProblem:
        return
    except Exception:  # whoever runs it takes that for a refusal
        return
    assert all(part in SPECIALS for part in parts[1::2])
    assert "im_end" in source or not any("<|im_end|>" in part for part in parts[::2]), parts
    varies = any(word in source for word in VARYING) or "0x" in "".join(parts)  # an address of Python's
    if crc32(data) % COMPARED == 0 and not varies:
        made = ChatTemplate(source, NAMED, SPECIALS, cpu_s=CPU_S)
        assert made.render(SAID) == parts
        made.close()


def template_seeds() -> Iterator[bytes]:
    yield CHAT_TEMPLATE.encode()
    yield b"{{ bos_token }}{% for m in messages %}{% if loop.first %}{{ m.role | upper }}{% endif %}{% endfor %}"
    yield b"{% macro f(x) %}{{ x }}{% endmacro %}{% for i in range(3) %}{{ f(messages[0].content) }}{% endfor %}"
    yield (b"{%- set ns = namespace(x='') -%}{% for m in messages if m.content is string %}{% set ns.x = ns.x ~ "
           b"m['content'] | trim %}{% if not loop.last %}{% continue %}{% endif %}{% endfor %}{{ ns.x[1:] }}")
    yield b"{{ messages | tojson(indent=2) }}{{ raise_exception('no') if tools else strftime_now('%d') }}"
    yield b"{% generation %}{{ messages[-1].content.split('a') | join(', ') }}{% endgeneration %}{# c #}"


@cache
def _tried() -> tuple[Trial, Vocabulary]:
    return Trial(folder()), Vocabulary(load_tokenizer(folder()), VOCAB)


def grammar(data: bytes) -> None:
    """What passes its trial is compiled and followed: trees change nothing, and what it writes is what it allows. The
    first byte says its kind, the second draws the answer."""
    if len(data) < 3:
        return
    asked = Grammar(KINDS[data[0] % len(KINDS)], data[2:].decode(errors="replace"))
    tried, vocabulary = _tried()
    tried.check(asked)
    try:
        alone, drafted = (vocabulary.compile(asked, StopTokens((EOS,))) for _ in range(2))
    except InvalidRequest as error:
        raise AssertionError("it passed its trial") from error
    rng, answer = np.random.default_rng(data[1]), list[int]()
    for step in range(STEPS):
        mask, known = alone.masks(DraftTree.root_only(step + 1, 0))
        if not known:
            return
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:VOCAB])
        tokens = rng.choice(np.concatenate([allowed, rng.integers(0, VOCAB, 2)]), NODES)
        masks, seen = drafted.masks(_tree(step + 1, tokens.tolist(), rng))
        assert 0 in seen and (masks[0] == mask[0]).all(), "a tree changes what its root allows"
        token = int(rng.choice(allowed))
        if token == EOS or not (alone.commit([token]) and drafted.commit([token])):
            break
        answer.append(token)
        if alone.ended:
            _check(asked, bytes(token for token in answer if token < 256))
            break


def _tree(base: int, tokens: list[int], rng: np.random.Generator) -> DraftTree:
    """Of a root and nodes of these tokens, siblings distinct."""
    nodes = [(0, -1)]
    for token in tokens:
        parent = int(rng.integers(len(nodes)))
        if (token, parent) not in nodes:
            nodes.append((token, parent))
    return DraftTree(base, [token for token, _ in nodes], [parent for _, parent in nodes], list(range(len(nodes))),
                     [0.0] * len(nodes))


def _check(asked: Grammar, written: bytes) -> None:
    if asked.kind == "json_schema":
        json.loads(written)
    elif asked.kind == "choice":
        assert written.decode() in json.loads(asked.source)


def grammar_seeds() -> Iterator[bytes]:
    numbers = {kind: bytes([number, 7]) for number, kind in enumerate(KINDS)}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", None]},
              "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2}}, "required": ["a"],
              "additionalProperties": False, "$defs": {"d": {"anyOf": [{"type": "string", "pattern": "^a+$"},
                                                                        {"const": 1.5}]}}}
    yield numbers["json_schema"] + json.dumps(schema).encode()
    yield numbers["json_schema"] + b'{"type": "string", "format": "date", "minLength": 2}'
    yield numbers["json_schema"] + b'{"allOf": [{"type": "number"}, {"maximum": 9, "multipleOf": 2}]}'
    yield numbers["regex"] + b"[a-e]+(-[0-9]{2}){1,2}|(?i:x.)*"
    yield numbers["choice"] + b'["the cat", "the cat sat", "a dog"]'
    yield numbers["lark"] + b'start: sum\nsum: sum "+" term | term\nterm: /[0-9A]{1,3}/ | "(" sum ")"'
    yield numbers["lark"] + b'start: T "b"? list{1,2}\nlist[max_tokens=3]: /[a-f]+/\nT: "a".."f" | /x+/ & /.{2}/'
