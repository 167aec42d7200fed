"""Shards: generated conversations with the target's states, on disk; states are read through memory maps.

Rules:
1. A shard is a folder: ``tokens.npy`` int32 [T], ``roles.npy`` uint8 [T], ``greedy.npy`` int32 [T], ``states.npy``
   uint16 [T, W] (bfloat16 bits), and ``index.json`` with the conversations in them. It is written beside its place and
   renamed when complete, so a killed run leaves only complete shards.
2. ``greedy[i]`` is the target's likeliest token after token i; -1 where its logits were not computed. ``states[i]``
   are the target's tapped states and its final state at token i.
3. ``identity`` (the target and its tapped layers) is the same in all shards of a folder; shards with another one are
   refused.
4. An incomplete shard (for example half copied) is an error that names it: once it is removed, its conversations are
   made again.

It knows nothing about where conversations come from.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import ConfigError
from slipstream.train.folders import work_files

FORMAT = 1
GIVEN, QUESTION, ANSWER = 0, 1, 2  # roles of tokens: template and given text, the target's questions, its answers


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a shard (rules 1 and 2); ``number``: that of its plan (see ``dialogue``)."""

    number: int
    held_out: bool
    temperature: float
    tokens: NDArray[np.int32]  # [T]
    roles: NDArray[np.uint8]  # [T]
    greedy: NDArray[np.int32]  # [T]
    states: NDArray[np.uint16]  # [T, W]

    @property
    def num_answer(self) -> int:
        return int((self.roles == ANSWER).sum())

    def beginning(self, count: int) -> Conversation:
        """Its first ``count`` tokens."""
        return replace(self, tokens=self.tokens[:count], roles=self.roles[:count], greedy=self.greedy[:count],
                       states=self.states[:count])


@dataclass(frozen=True, slots=True)
class Totals:
    """The content of all shards together."""

    conversations: int
    tokens: int
    answer_tokens: int
    seconds: float  # that it took to make them


class ShardWriter:
    """Collects conversations; ``flush`` writes them as a shard. Several processes may write into one folder if each has
    its own ``suffix`` (lower-case letters) of the shards' names."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], suffix: str = "",
                 prompts_given: bool = False) -> None:
        """prompts_given: whether the conversations' prompts were given."""
        self.folder = folder
        self._identity, self._suffix, self._prompts_given = dict(identity), suffix, prompts_given
        self._pending: list[Conversation] = []
        self.num_pending = 0  # tokens
        folder.mkdir(parents=True, exist_ok=True)
        self._next = max((_number(path) for path in _shard_folders(folder)), default=-1) + 1

    def add(self, conversation: Conversation) -> None:
        self._pending.append(conversation)
        self.num_pending += len(conversation.tokens)

    def flush(self, seconds: float) -> None:
        """Write the collected conversations, if there are any, as one shard. seconds: that it took to make them. Raises
        ConfigError if it cannot be written."""
        if not self._pending:
            return
        with work_files(self.folder / f"shard-{self._next:05d}{self._suffix}") as partial:
            self._fill(partial, seconds)
        self._next += 1
        self._pending, self.num_pending = [], 0

    def _fill(self, partial: Path, seconds: float) -> None:
        for name in ("tokens", "roles", "greedy", "states"):
            np.save(partial / f"{name}.npy", np.concatenate([getattr(c, name) for c in self._pending]))
        entries = [{"number": c.number, "held_out": c.held_out, "temperature": c.temperature, "tokens": len(c.tokens),
                    "answer_tokens": c.num_answer} for c in self._pending]
        index = {"format": FORMAT, "identity": self._identity, "given": self._prompts_given, "seconds": seconds,
                 "conversations": entries}
        (partial / "index.json").write_text(json.dumps(index), encoding="utf-8")


class Shards:
    """The shards of some folders, as they are now; a folder that is named twice counts once."""

    def __init__(self, folders: Sequence[Path], identity: Mapping[str, Any]) -> None:
        """Raises ConfigError when a shard has another identity, or is incomplete."""
        self._entries: list[tuple[Path, dict[str, Any]]] = []
        for path in [path for folder in dict.fromkeys(f.resolve() for f in folders) for path in _shard_folders(folder)]:
            with _read_errors(path):
                index = json.loads((path / "index.json").read_text(encoding="utf-8"))
                identified = index["format"], index["identity"]
            if identified != (FORMAT, dict(identity)):
                raise ConfigError(f"{path}: was made with another target or layout; choose another --work or "
                                  f"--data, or remove {path.parent}")
            self._entries.append((path, index))

    def numbers(self) -> set[int]:
        """The numbers of all conversations."""
        return {entry["number"] for _, index in self._entries for entry in index["conversations"]}

    @property
    def num_held_out(self) -> int:
        """Conversations that are never trained on."""
        return sum(entry["held_out"] for _, index in self._entries for entry in index["conversations"])

    def temperatures(self) -> dict[float, float]:
        """The share of conversations by the temperature of their answers, ascending."""
        counts = Counter(entry["temperature"] for _, index in self._entries for entry in index["conversations"])
        return {temperature: counts[temperature] / counts.total() for temperature in sorted(counts)}

    def prompts_given(self) -> set[bool]:
        """Whether prompts were given: the values in the shards."""
        return {index["given"] for _, index in self._entries}

    def totals(self) -> Totals:
        entries = [entry for _, index in self._entries for entry in index["conversations"]]
        return Totals(len(entries), sum(e["tokens"] for e in entries), sum(e["answer_tokens"] for e in entries),
                      sum(index["seconds"] for _, index in self._entries))

    def conversations(self, held_out: bool) -> Iterator[Conversation]:
        """All conversations that are held out, or all others. Their states are views of memory maps, one a shard.
        Raises ConfigError when a shard is incomplete."""
        for path, index in self._entries:
            with _read_errors(path):
                tokens, roles, greedy = (np.load(path / f"{name}.npy", allow_pickle=False)
                                         for name in ("tokens", "roles", "greedy"))
                states = np.load(path / "states.npy", mmap_mode="r", allow_pickle=False)
                num_tokens = sum(entry["tokens"] for entry in index["conversations"])
                if {num_tokens} != set(map(len, (tokens, roles, greedy, states))):
                    raise ValueError(f"its files do not hold {num_tokens} tokens each")
            first = 0
            for entry in index["conversations"]:
                rows = slice(first, first + entry["tokens"])
                first = rows.stop
                if entry["held_out"] == held_out:
                    yield Conversation(entry["number"], held_out, entry["temperature"], tokens[rows], roles[rows],
                                       greedy[rows], states[rows])


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """A context in which errors of reading an incomplete shard become a ConfigError that names it."""
    try:
        yield
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is no whole shard: {error!r}; copy it again, or remove it, and the same command "
                          "makes its conversations again") from error


def remove_partial(folder: Path) -> None:
    """Remove the partial shards of killed runs. Nobody may write to the folder meanwhile."""
    for partial in folder.glob("*.partial"):
        shutil.rmtree(partial)


def _shard_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("shard-*") if path.suffix != ".partial")


def _number(path: Path) -> int:
    return int(path.name.removeprefix("shard-").rstrip(ascii_lowercase))
