"""The optimiser of a training: which tensors go where, and that a checkpoint's moments are all it needs to go on."""

from __future__ import annotations

import torch

from slipstream.train.optimizer import Optimizer

SHAPES = {"fc.weight": (8, 24), "midlayer.mlp.up_proj.weight": (16, 8), "lm_head.weight": (32, 8), "norm.weight": (8,)}


def weights() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=dice).requires_grad_() for name, shape in SHAPES.items()}


def push(tensors: dict[str, torch.Tensor], optimizer: Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step alone."""
    for step in steps:
        dice = torch.Generator().manual_seed(step)
        for tensor in tensors.values():
            tensor.grad = torch.randn(tensor.shape, generator=dice)
        optimizer.step(0.5)


def test_matrices_inside_the_layer_are_stepped_in_all_directions_alike() -> None:
    """Muon's step has singular values of about one size even where the gradient has a single direction; AdamW's
    step of the same gradient has a single direction too."""
    for name, few in (("fc.weight", False), ("lm_head.weight", True)):
        tensors = weights()
        before = tensors[name].detach().clone()
        optimizer = Optimizer(tensors, 0.1)
        dice = torch.Generator().manual_seed(3)
        rows, columns = SHAPES[name]
        grad = 10 * torch.ones(rows, columns) + 0.1 * torch.randn(rows, columns, generator=dice)
        for other in tensors.values():
            other.grad = torch.zeros_like(other)
        tensors[name].grad = grad
        optimizer.step(1.0)
        found = torch.linalg.svdvals(tensors[name].detach() - before * (1 - 0.1 * 0.01))
        assert bool(found[1] < 0.05 * found[0]) is few, (name, found)


def test_moments_are_all_that_is_needed_to_go_on() -> None:
    whole, first, second = weights(), weights(), weights()
    push(whole, Optimizer(whole, 0.01), range(6))
    before = Optimizer(first, 0.01)
    push(first, before, range(3))
    after = Optimizer(second, 0.01)
    with torch.no_grad():
        for name, tensor in second.items():
            tensor.copy_(first[name])
    after.load(before.moments())
    push(second, after, range(3, 6))
    for name in SHAPES:
        assert torch.equal(whole[name], second[name]), name
