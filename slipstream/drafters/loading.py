"""From settings to drafters with weights: folders resolved, slots sized.

It knows nothing about how a network works.
"""

from __future__ import annotations

import torch

from slipstream.config import DraftSection, ModelSection
from slipstream.drafters.checkpoint import read_head
from slipstream.drafters.eagle import EagleNetwork
from slipstream.drafters.eagle2 import Eagle2Network
from slipstream.drafters.eagle2_checkpoint import read_eagle2_head
from slipstream.drafters.lent import lent_lm_head
from slipstream.drafters.network import Network
from slipstream.drafters.neural import NeuralDrafter
from slipstream.drafters.standalone import StandaloneNetwork
from slipstream.drafters.token_map import MappedModel, load_token_map
from slipstream.engine.model import CausalModel, ModelConfig, device_of, dtype_of
from slipstream.engine.runner import ModelRunner, default_slots
from slipstream.engine.weights import load_model
from slipstream.models import resolve


def load_standalone(section: DraftSection) -> NeuralDrafter:
    """A drafter over the model folder or name in ``section.model``. Raises ModelError."""
    folder = resolve(section.model)
    config = ModelConfig.from_folder(folder)
    vocabulary = _token_map(section, config)
    model: CausalModel = load_model(folder, section.dtype, section.device)
    if vocabulary is not None:
        model = MappedModel(model, lent_lm_head(folder, config, vocabulary))
        vocabulary = vocabulary.to(model.device)
    return _drafter(section, StandaloneNetwork(ModelRunner(model, _num_slots(section, config)), vocabulary))


def load_eagle(section: DraftSection, model: ModelSection) -> NeuralDrafter:
    """A drafter over the EAGLE-3 head in ``section.model`` for the target in ``model.path``. Raises ModelError."""
    head = read_head(resolve(section.model), resolve(model.path))
    network = EagleNetwork(head, section.dtype, device_of(section.device), _num_slots(section, head.config))
    return _drafter(section, network)


def load_eagle2(section: DraftSection, model: ModelSection) -> NeuralDrafter:
    """A drafter over the EAGLE-1 or EAGLE-2 head in ``section.model`` for the target in ``model.path``. Raises
    ModelError."""
    target = resolve(model.path)
    vocabulary = _token_map(section, ModelConfig.from_folder(target))
    head = read_eagle2_head(resolve(section.model), target, vocabulary)
    network = Eagle2Network(head, section.dtype, device_of(section.device), _num_slots(section, head.config))
    return _drafter(section, network)


def _token_map(section: DraftSection, config: ModelConfig) -> torch.Tensor | None:
    if not section.token_map:
        return None
    return load_token_map(section.token_map, config.vocab_size, section.growth.topk)


def _num_slots(section: DraftSection, config: ModelConfig) -> int:
    return section.slots or default_slots(config, dtype_of(section.dtype), section.max_sessions, section.max_context,
                                          device=section.device)


def _drafter(section: DraftSection, network: Network) -> NeuralDrafter:
    return NeuralDrafter(section.drafter, network, section.growth, section.max_sessions, section.max_context)
