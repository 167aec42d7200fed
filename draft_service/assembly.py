"""Makes a draft (drafter and worker) from the configuration. It knows nothing about sockets."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from draft_service.worker import CPU, DraftWorker
from slipstream.base.config import Config
from slipstream.drafting import Drafter, create
from slipstream.engine.device import cores
from slipstream.engine.model import device_of
from slipstream.models.folder import made_for, resolve, resolve_draft_section, tokenizer_hash
from slipstream.observe.log import logger
from slipstream.observe.spans import spans_of
from slipstream.observe.trace import Trace
from slipstream.protocol.messages import FEATURE_DTYPES, Commit, Features, Open
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import LEASE_S

PROMPT, ROUNDS, BYTES = 24, 3, 256  # of a rehearsal: prompt tokens, rounds, and the vocabulary where any fits


def build(config: Config) -> DraftWorker:
    """Load the drafter and make its worker; the caller starts the worker and connects targets. Raises ModelError or
    ConfigError."""
    section = resolve_draft_section(config.draft, config.model)
    weights = section.drafter != "ngram"
    if weights:
        torch.set_num_threads(config.model.threads or max(1, cores() // 2))
    device = device_of(section.device) if weights else CPU
    # Triton launches kernels on the current device. The worker's thread gets the right one from its stream.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        drafter = create(section, config.model)
        rehearse(drafter, section.growth.num_draft_tokens)
    # A draft model must speak the target's tokens; a head has no vocabulary of its own, an n-gram fits any.
    digest = tokenizer_hash(resolve(section.model)) if section.drafter == "standalone" else ""
    logger("draft").info("drafter ready", drafter=drafter.name, reads_features=drafter.features is not None,
                         max_sessions=drafter.max_sessions)
    return DraftWorker(drafter, digest, LEASE_S, section.run_ahead, Trace(config.log.trace, "draft"),
                       spans=spans_of(config.log, "draft"),
                       made_for=made_for(resolve(section.model)) if section.model and weights else "",
                       device=device)


def rehearse(drafter: Drafter, nodes: int) -> None:
    """Draft for two made-up answers, a greedy and a sampled one, so that whatever is made at its first use (compiled
    code, graphs, buffers) exists before the first target waits for it."""
    size, spec = drafter.vocab_size or BYTES, drafter.features

    def absorb_zeros(session: int, start: int, rows: int) -> None:
        if spec is not None:
            states = bytes(rows * spec.width * FEATURE_DTYPES[spec.dtype])
            drafter.absorb([Features(session, start, states, rows, spec.dtype)])

    for session, sampling in enumerate((Sampling(), Sampling(temperature=1.0)), 1):
        drafter.open([Open(session, np.arange(PROMPT + 1, dtype=np.int32) % size, PROMPT, sampling)])
        absorb_zeros(session, 0, PROMPT)
        for base in range(PROMPT + 1, PROMPT + 1 + ROUNDS):
            drafter.grow([session], [nodes])
            drafter.commit([Commit(session, base, np.zeros(1, np.int32))])
            absorb_zeros(session, base - 1, 1)
        drafter.close([session])
