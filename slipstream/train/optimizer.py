"""The optimiser of a training: Muon for ``fc`` and the layers' matrices, AdamW for all else.

Rules:
1. Muon updates the matrices that map hidden states to hidden states. AdamW updates norms and ``lm_head``, whose rows
   are channels and tokens, and the markov and confidence heads. Both have the same learning rate: Muon's updates are
   scaled to the size that AdamW's would have (``match_rms_adamw``, arXiv 2502.16982).
2. ``moments`` are all that a checkpoint needs, by ``NAME/KIND``.

It knows nothing about heads or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

MOMENTS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}
WEIGHT_DECAY = 0.01


class Optimizer:
    """Updates ``tensors`` by their gradients."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        self._tensors, self._learning_rate = tensors, learning_rate
        self._others = sorted(name for name, tensor in tensors.items()
                              if tensor.dim() != 2 or name.startswith(("lm_head", "markov_head", "confidence_head")))
        self._matrices = sorted(set(tensors) - set(self._others))
        self._muon = torch.optim.Muon([tensors[name] for name in self._matrices], lr=learning_rate, momentum=0.95,
                                      weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([tensors[name] for name in self._others], lr=learning_rate, betas=(0.9, 0.95),
                                        weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, rate: float) -> None:
        """One step with ``rate`` times the learning rate."""
        for optimizer in (self._muon, self._adamw):
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * rate
            optimizer.step()  # type: ignore[no-untyped-call]

    def moments(self) -> dict[str, torch.Tensor]:
        """The state for a checkpoint (rule 2). Empty before the first step."""
        found = {}
        for optimizer, names, kinds in self._parts():
            for name in names:
                state = optimizer.state[self._tensors[name]]
                found.update({f"{name}/{kind}": state[kind] for kind in kinds if kind in state})
        return found

    def load(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue with ``moments``; tensors without any start anew."""
        for optimizer, names, kinds in self._parts():
            for name in names:
                tensor = self._tensors[name]
                known = {kind: moments[f"{name}/{kind}"] for kind in kinds if f"{name}/{kind}" in moments}
                optimizer.state[tensor] = {
                    kind: kept.clone() if kind == "step" and tensor.device.type == "cpu" else kept.to(tensor.device)
                    for kind, kept in known.items()}

    def _parts(self) -> tuple[tuple[torch.optim.Optimizer, list[str], tuple[str, ...]], ...]:
        return ((self._muon, self._matrices, MOMENTS["muon"]), (self._adamw, self._others, MOMENTS["adamw"]))
