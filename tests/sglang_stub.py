"""As much of SGLang 0.5.23 as ``slipstream_sglang`` touches: its names and signatures, in our own words, with an engine
that ``chosen`` speaks for. ``installed`` puts it where imports look.

The worker verifies trees as SGLang's does: from the root to the child that carries the chosen token, first child first.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_following import chosen

NONE_OF = ("is_eagle", "is_eagle3", "is_dflash", "is_standalone", "is_ngram", "supports_mixed_chunk",
           "supports_grammar_overlap")


class CustomSpecAlgo:
    """What the registry makes of a name: it says what the algorithm is like."""

    def __init__(self, name: str, factory: Callable[[Any], type], *, supports_overlap: bool = False,
                 validate_server_args: Callable[[Any], None] | None = None) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap
        self.validate_server_args = validate_server_args

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None: ...

    def create_worker(self, server_args: Any) -> type:
        if not server_args.disable_overlap_schedule and not self.supports_overlap:
            raise ValueError(f"{self.name} has no overlapped schedule")
        return self.factory(server_args)


for _name in NONE_OF:
    setattr(CustomSpecAlgo, _name, lambda self: False)


class SpeculativeAlgorithm:
    """The registry."""

    known: dict[str, CustomSpecAlgo]

    def create_future_map(self, device: str, req_to_token_pool: Any, needs_cpu_seq_lens: bool = True,
                          needs_confidence_relay: bool = False) -> Any:
        """Of algorithms of SGLang's own alone, but its scheduler asks all of them, as it does the next two."""
        return SimpleNamespace(spec_algo=self, device=device, needs_cpu_seq_lens=needs_cpu_seq_lens)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool = False,
                 validate_server_args: Callable[[Any], None] | None = None,
                 spec_class: type[CustomSpecAlgo] = CustomSpecAlgo) -> Callable[[Any], Any]:
        if name.upper() in cls.known:
            raise ValueError(f"{name} is registered already")

        def decorate(factory: Any) -> Any:
            cls.known[name.upper()] = spec_class(name=name.upper(), factory=factory, supports_overlap=supports_overlap,
                                                 validate_server_args=validate_server_args)
            return factory

        return decorate


@dataclass
class Request:
    """``Req``: a prompt, and an answer that the scheduler appends to."""

    rid: str
    origin_input_ids_unpadded: Sequence[int]
    max_new_tokens: int = 400
    output_ids: array[int] = field(default_factory=lambda: array("q"))

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(max_new_tokens=self.max_new_tokens)


class Arguments(SimpleNamespace):
    """``ServerArgs``: what was written. What SGLang makes of the rest is declared beside it."""

    def __init__(self, declared: dict[str, Any], **written: Any) -> None:
        super().__init__(**written, _resolved_overrides=[("the pipeline", declared)])


class Resolving:
    """What ``resolving_view`` gives: what was declared last, else what was written."""

    def __init__(self, server_args: Any) -> None:
        self._server_args = server_args

    def __getattr__(self, name: str) -> Any:
        for _, declared in reversed(self._server_args._resolved_overrides):
            if name in declared:
                return declared[name]
        return getattr(self._server_args, name)


class Batch:
    """``ScheduleBatch`` of a decode step. ``spec_info`` is what the step before handed on."""

    def __init__(self, reqs: list[Request], accept_tokens: torch.Tensor, accept_lens: torch.Tensor) -> None:
        self.reqs = reqs
        self.spec_info = SimpleNamespace(accept_tokens=accept_tokens, accept_lens=accept_lens)

    def grammar_needs_sync(self) -> bool:
        return False


class NGRAMWorker:
    """The worker: it asks ``_prepare_draft_tokens`` and verifies. ``said`` is what ``verify`` committed."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.server_args = server_args
        self.enable_overlap = not server_args.disable_overlap_schedule
        self.draft_token_num: int = server_args.speculative_num_draft_tokens

    def _prepare_draft_tokens(self, batch: Batch) -> tuple[Any, Any]:
        raise AssertionError("the corpus was asked")

    def _update_ngram_corpus(self, batch: Batch) -> None:
        raise AssertionError("the corpus was taught")

    def clear_cache_pool(self) -> None: ...

    def verify(self, batch: Batch, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What each request of ``batch`` commits, whose whole texts are ``texts``."""
        nodes = self.draft_token_num
        tokens, mask = self._prepare_draft_tokens(batch)
        assert tokens.shape == (len(batch.reqs) * nodes,) and mask.shape == (len(batch.reqs) * nodes * nodes,)
        said = [self._walk(list(text), tokens[place * nodes : (place + 1) * nodes],
                           mask.reshape(-1, nodes, nodes)[place]) for place, text in enumerate(texts)]
        self._update_ngram_corpus(batch)
        return said

    def _walk(self, text: list[int], tokens: Any, mask: Any) -> list[int]:
        assert tokens[0] == text[-1], "the root is not the newest token"
        parents = [max(np.flatnonzero(mask[node, :node]), default=-1) for node in range(len(tokens))]
        depths = mask.sum(1) - 1
        assert parents[0] == -1 and all(depths[node] == depths[parents[node]] + 1 for node in range(1, len(tokens)))
        node, new = 0, list[int]()
        while True:
            new.append(chosen([*text, *new]))
            below = [child for child in range(len(tokens)) if parents[child] == node and tokens[child] == new[-1]]
            if not below:
                return new
            node = below[0]


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[dict[str, CustomSpecAlgo]]:
    """SGLang's modules. Gives what is registered."""
    SpeculativeAlgorithm.known = {}
    rooms = {"ngram_worker": {"NGRAMWorker": NGRAMWorker}, "spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
             "spec_registry": {"CustomSpecAlgo": CustomSpecAlgo}, "overrides": {"resolving_view": Resolving}}
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.arg_groups"):
        patch.setitem(sys.modules, name, ModuleType(name))
    for name, content in rooms.items():
        module = ModuleType(f"sglang.srt.{'arg_groups' if name == 'overrides' else 'speculative'}.{name}")
        for key, value in content.items():
            setattr(module, key, value)
        patch.setitem(sys.modules, module.__name__, module)
    yield SpeculativeAlgorithm.known


def relayed(said: Sequence[Sequence[int]], nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step hands on: accepted tokens in rows of ``nodes``, and how many."""
    tokens = np.zeros((len(said), nodes), np.int32)
    for place, new in enumerate(said):
        tokens[place, : len(new)] = new
    return torch.from_numpy(tokens).flatten(), torch.tensor([len(new) for new in said], dtype=torch.int32)
