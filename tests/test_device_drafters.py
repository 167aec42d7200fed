"""Every drafter drafts on a device what it drafts on a CPU, in float64. ``make gpu`` runs this with ``--device cuda``;
on a CPU the device is one in name (``pretended``): where a tensor lies is what counts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, ModelSection
from slipstream.drafting import Drafter, create
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.block_folder import deepspec_config, speculators_block_config, write_block_folder, zlab_config
from tests.eagle_folder import eagle2_config, eagle_config, write_eagle2_folder, write_eagle_folder
from tests.mtp_folder import mtp_config, write_mtp_target
from tests.pretended import pretended
from tests.tiny import VOCAB, write_tiny_model

LENGTH, TURNS, NODES = 9, 2, 10
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=4),
             Sampling(temperature=0.7, top_p=0.9, frequency_penalty=0.5, seed=5))
BLOCKS = {"dflash": zlab_config(), "dspark": deepspec_config(), "gated": deepspec_config(markov_head_type="gated"),
          "rnn": deepspec_config(markov_head_type="rnn"), "mapped": speculators_block_config()}
KINDS = ("standalone", "pard", "eagle2", "eagle3", "mtp", *BLOCKS)


def sections(kind: str, place: Path, device: str) -> tuple[DraftSection, ModelSection]:
    """A draft and its target, in folders that are made the first time."""
    target, head = place / "target", place / "head"
    if not target.exists():
        if kind == "mtp":
            write_mtp_target(target, mtp_config("mimo", num_nextn_predict_layers=2))
        else:
            write_tiny_model(target, num_hidden_layers=8)
        if kind in BLOCKS:
            write_block_folder(head, BLOCKS[kind])
        elif kind == "eagle2":
            write_eagle2_folder(head, eagle2_config())
        elif kind == "eagle3":
            write_eagle_folder(head, eagle_config())
        elif kind == "pard":
            write_tiny_model(head, noise=0.1, pard_token=258)
        elif kind == "standalone":
            write_tiny_model(head, noise=0.1)
    drafter = "block" if kind in BLOCKS else "standalone" if kind == "pard" else kind
    draft = {"drafter": drafter, "model": "" if kind == "mtp" else str(head), "dtype": "float64", "device": device,
             "growth": {"num_steps": 3, "topk": 3, "num_draft_tokens": NODES}}
    return DraftSection.model_validate(draft), ModelSection(path=str(target), kernels="torch")


def drafted(drafter: Drafter) -> list[Growth]:
    """Of some sessions, behind prompts and commits."""
    dice, spec, found = np.random.default_rng(3), drafter.features, list[Growth]()

    def absorb_states(session: int, start: int, count: int) -> None:
        if spec is not None:
            rows = dice.standard_normal((count, spec.width))
            drafter.absorb([Features(session, start, rows.tobytes(), count, "float64")])

    for session, sampling in enumerate(SAMPLINGS, start=1):
        tokens = dice.integers(VOCAB // 2, size=LENGTH).astype(np.int32)
        drafter.open([Open(session, tokens, LENGTH - 1, sampling)])
        absorb_states(session, 0, LENGTH - 1)
    ids = range(1, 1 + len(SAMPLINGS))
    for base in range(LENGTH, LENGTH + 2 * TURNS, 2):
        found += drafter.grow([*ids], [NODES] * len(ids))
        drafter.commit([Commit(session, base, dice.integers(VOCAB // 2, size=2).astype(np.int32)) for session in ids])
        for session in ids:
            absorb_states(session, base - 1, 2)
        drafter.read([*ids])
    drafter.close([*ids])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_drafts_what_it_drafts_on_a_cpu(device: torch.device, kind: str, tmp_path: Path) -> None:
    right = drafted(create(*sections(kind, tmp_path, "cpu"), 900))
    with pretended() if device.type == "cpu" else nullcontext():
        found = drafted(create(*sections(kind, tmp_path, "cuda"), 900))
    assert len(found) == len(right) == TURNS * len(SAMPLINGS) and any(len(growth.tokens) for growth in right)
    for ours, theirs in zip(found, right, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.parents.tolist() == theirs.parents.tolist()
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)
