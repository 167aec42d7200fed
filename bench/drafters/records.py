"""Records of the shipped head's places in real answers (``slipstream.drafting.records``), kept in a folder, one file a
question, and computed again when what they were made of has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from rich.progress import Progress

from bench.asking import read
from router_service.text.tokens import TextCodec
from slipstream.base.config import DraftSection, Dtype, ModelSection
from slipstream.drafting.loading import load_eagle
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.records import CHILDREN, FORWARDS, LEAST, ROWS, TOGETHER, Place, Record, Recorder, slots_for
from slipstream.drafting.rounds import slots_needed
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import head_for, packaged_head, resolve

SETS = ("mt_bench", "alpaca", "gsm8k", "humaneval", "cnn_dm")
PROMPT = 512  # of its newest tokens


def recorder_of(target: Path, head: Path, tokens: int, dtype: Dtype = "bfloat16") -> Recorder:
    """A target and its EAGLE-3 head. Raises ModelError."""
    model, draft = ModelSection(path=str(target), dtype=dtype), DraftSection(model=str(head), dtype=dtype)
    drafter = load_eagle(draft, model, TOGETHER * slots_for(PROMPT, tokens))
    assert isinstance(drafter, NeuralDrafter)
    runner = ModelRunner(load_model(target, model), slots_needed([[0] * PROMPT] * TOGETHER, tokens))
    return Recorder(runner, drafter.network, tokens)


def gathered(prompts: str, count: int, tokens: int, folder: Path) -> list[Record]:
    """``count`` questions of each of SETS in the folder ``prompts``, answered by the default model with its shipped
    head; those that ``folder`` has are not computed again."""
    target = ModelSection().path
    known = head_for(target)
    assert known is not None
    questions = [question for name in SETS for question in read(prompts, name, count)]
    made = json.dumps([target, known.name, tokens, PROMPT, ROWS, FORWARDS, CHILDREN, LEAST])
    names = [folder / f"{hashlib.sha256((made + question.text).encode()).hexdigest()[:20]}.npz"
             for question in questions]
    missing = [place for place, name in enumerate(names) if not name.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        recorder, codec = recorder_of(resolve(target), packaged_head(known), tokens), TextCodec(resolve(target))
        with Progress() as bar:
            task = bar.add_task("answers and trees", total=len(missing))
            for first in range(0, len(missing), TOGETHER):
                some = missing[first : first + TOGETHER]
                asked = [codec.chat([{"role": "user", "content": questions[place].text}])[-PROMPT:] for place in some]
                for place, record in zip(some, recorder.record(asked), strict=True):
                    save(record, names[place])
                    bar.advance(task)
    return [load(name) for name in names]


def save(record: Record, path: Path) -> None:
    """Whole, or not at all."""
    arrays = {name: np.concatenate([getattr(place, name) for place in record.places])
              for name in ("tokens", "scores", "first", "count")}
    sizes = np.array([len(place.tokens) for place in record.places])
    fresh = path.with_suffix(".part.npz")
    np.savez_compressed(fresh, allow_pickle=False, answer=np.array(record.answer), sizes=sizes, **arrays)
    fresh.replace(path)


def load(path: Path) -> Record:
    """What ``save`` wrote."""
    with np.load(path, allow_pickle=False) as found:
        ends = np.cumsum(found["sizes"])[:-1]
        parts = [np.split(found[key], ends) for key in ("tokens", "scores", "first", "count")]
        return Record(found["answer"].tolist(), [Place(*one) for one in zip(*parts, strict=True)])
