"""RemoteDrafter: what stands where vLLM expects a proposer, and asks draft services for chains.

Rules:
1. ``step`` is called once after each step of the engine, on the engine's thread. It never raises and never waits past
   the deadline (``deadline_s``): whatever goes wrong is no draft, and one log line for each new problem.
2. A request that the engine computes from anew (preempted, resumed) is opened anew; one that it does not name any more
   is closed when the engine says that it is finished.
3. What is verified is the engine's affair: a draft can cost time and cannot change a greedy token.

It knows no vLLM: an adapter turns the engine's batch into ``Row`` values.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.base.address import SCHEME
from slipstream.base.config import PolicySection, TargetSection
from slipstream.base.errors import ConfigError
from slipstream.decision.beliefs import StepCosts
from slipstream.following.following import Followed, Following, Step, Verified
from slipstream.models.folder import tokenizer_hash
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, Sampling, TargetHello
from slipstream.protocol.pairing import check_pair
from slipstream.wire.link import DraftLink

# Seconds of a step by its rows, until steps were seen: their growth is a guess, their height does not matter.
GUESSED_COSTS = {1: 0.020, 16: 0.021, 64: 0.024, 256: 0.040}
OPTIONS = {"drafts", "deadline_s", "prompt_lookup", "always"}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the engine's batch, after a step. ``length``: its tokens, the newest included."""

    request: str
    length: int
    new: tuple[int, ...]  # committed by this step; none while its prompt is computed
    drafted: int  # draft tokens that this step verified
    prompt: int  # tokens of the prompt
    limit: int  # tokens that it has at most, the prompt included
    tokens: Callable[[], list[int]]  # all ``length`` of them; asked for when it is opened
    drafts: bool = True  # whether the engine can verify drafts for it


@dataclass(frozen=True, slots=True)
class Options:
    """``--additional-config '{"slipstream": {...}}'``."""

    drafts: tuple[str, ...]
    deadline_s: float = 0.25
    prompt_lookup: bool = True
    always: bool = False

    @staticmethod
    def of(given: Any) -> Options:
        """Raises ConfigError naming the field."""
        if not isinstance(given, Mapping) or not given.get("drafts"):
            raise ConfigError('slipstream.drafts: name the draft services, as in --additional-config '
                              '\'{"slipstream": {"drafts": ["draft:50052"]}}\'')
        unknown = set(given) - OPTIONS
        if unknown:
            raise ConfigError(f"slipstream.{min(unknown)}: not known; use one of {', '.join(sorted(OPTIONS))}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                  for name, value in given.items()}
        options = Options(**values)
        try:
            options.section(1)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"slipstream: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for address in options.drafts:
            if address.startswith(SCHEME):
                raise ConfigError(f"slipstream.drafts: {address}: pods are not looked for inside vLLM; write the "
                                  "host:port of the draft's service")
        return options

    def section(self, most: int) -> TargetSection:
        """As the settings of a target. most: tokens of a chain."""
        policy = PolicySection(max_nodes=most, deadline_max_s=self.deadline_s, always=self.always)
        return TargetSection(drafts=self.drafts, prompt_lookup=self.prompt_lookup, policy=policy)


class Chains:
    """The sessions of one engine: rows in, chains of draft tokens out."""

    def __init__(self, options: Options, most: int, metrics: TargetMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """most: tokens of a chain."""
        self.following = Following(options.section(most), StepCosts(GUESSED_COSTS), metrics, clock=clock)
        self._most, self._deadline_s, self._clock = most, options.deadline_s, clock
        self._sessions: dict[str, Followed] = {}
        self._opened = 0
        self._ended_s: float | None = None  # the step before, with what was done after it
        self._problem = ""
        self._log = logger("vllm")

    def step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: int) -> list[list[int]]:
        """A chain for each row; empty: none. ``scheduled``: rows of the step's forward."""
        try:
            return self._step(rows, finished, scheduled)
        except Exception as error:  # rule 1
            if (problem := repr(error)) != self._problem:
                self._problem = problem
                self._log.exception("no drafts for this step")
            sessions, self._sessions = self._sessions, {}
            for one in sessions.values():
                with suppress(Exception):  # what went wrong may go wrong again
                    self.following.close(one)
            return [[] for _ in rows]
        finally:
            self._ended_s = self._clock()

    def _step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: int) -> list[list[int]]:
        now_s = self._clock()
        for request in finished:
            self._close(request)
        self.following.inbox.drain()
        opened, verified = list[Followed](), list[Verified]()
        for row in rows:
            if not row.new or not row.drafts:
                continue
            one = self._sessions.get(row.request)
            if one is not None and one.side.base + len(row.new) == row.length:
                verified.append(Verified(one.session, row.new, row.drafted, min(row.drafted, len(row.new) - 1),
                                         row.drafted))
            else:
                opened.append(self._open(row))
        prompts = any(not row.new for row in rows) or bool(opened)
        began_s = self._ended_s if self._ended_s is not None else now_s
        drafted = sum(row.drafted for row in rows)
        self.following.committed(verified, Step(began_s, max(1e-6, now_s - began_s), scheduled, len(rows), drafted,
                                                prompts))
        self.following.begin(opened, now_s)
        self.following.flush()
        asked = [self._sessions[row.request] if row.new and row.drafts else None for row in rows]
        self.following.take([one for one in asked if one is not None], self._deadline_s)
        return [one.chain(self._most) if one is not None else [] for one in asked]

    def _open(self, row: Row) -> Followed:
        self._close(row.request)
        self._opened += 1
        one = self._sessions[row.request] = self.following.open(
            self._opened, row.tokens(), row.prompt, Sampling(), row.limit)
        return one

    def _close(self, request: str) -> None:
        one = self._sessions.pop(request, None)
        if one is not None:
            self.following.close(one)


class Links:
    """Streams to all drafts, on a thread of their own."""

    def __init__(self, drafts: Sequence[str], hello: TargetHello, following: Following) -> None:
        self._loop = asyncio.new_event_loop()
        self._links = [DraftLink(address, hello, following, check_pair) for address in drafts]
        self._thread = threading.Thread(target=self._run, name="slipstream-links", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(link.run() for link in self._links))


class RemoteDrafter:
    """What ``--speculative-config`` names. vLLM makes one in each worker."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError naming the field."""
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        options = Options.of((vllm_config.additional_config or {}).get("slipstream"))
        text = model.hf_text_config
        hello = TargetHello(PROTOCOL_VERSION, 0, str(model.model), model.get_vocab_size(),
                            tokenizer_hash(Path(model.tokenizer)), text.hidden_size, text.num_hidden_layers,
                            model.max_model_len)
        self.chains = Chains(options, speculative.num_speculative_tokens, TargetMetrics(str(model.model)))
        self._links = Links(options.drafts, hello, self.chains.following)

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM calls it; the model is elsewhere."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """What vLLM calls where no adapter is in place."""
        raise ConfigError("slipstream-vllm is not registered: its entry point vllm.general_plugins was not loaded "
                          "(is VLLM_PLUGINS set? it must name slipstream)")
