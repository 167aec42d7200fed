"""From settings to drafters with weights: folders resolved, slots sized.

It knows nothing about how a network works.
"""

from __future__ import annotations

from slipstream.config import DraftSection, ModelSection
from slipstream.drafters.checkpoint import read_head
from slipstream.drafters.eagle import EagleNetwork
from slipstream.drafters.network import Network
from slipstream.drafters.neural import NeuralDrafter
from slipstream.drafters.standalone import StandaloneNetwork
from slipstream.engine.model import ModelConfig, device_of, dtype_of
from slipstream.engine.runner import ModelRunner, default_slots
from slipstream.engine.weights import load_model
from slipstream.models import resolve


def load_standalone(section: DraftSection) -> NeuralDrafter:
    """A drafter over the model folder or name in ``section.model``. Raises ModelError."""
    folder = resolve(section.model)
    slots = _num_slots(section, ModelConfig.from_folder(folder))
    runner = ModelRunner(load_model(folder, section.dtype, section.device), slots)
    return _drafter(section, StandaloneNetwork(runner))


def load_eagle(section: DraftSection, model: ModelSection) -> NeuralDrafter:
    """A drafter over the EAGLE-3 head in ``section.model`` for the target in ``model.path``. Raises ModelError."""
    head = read_head(resolve(section.model), resolve(model.path))
    network = EagleNetwork(head, section.dtype, device_of(section.device), _num_slots(section, head.config))
    return _drafter(section, network)


def _num_slots(section: DraftSection, config: ModelConfig) -> int:
    return section.slots or default_slots(config, dtype_of(section.dtype), section.max_sessions, section.max_context,
                                          device=section.device)


def _drafter(section: DraftSection, network: Network) -> NeuralDrafter:
    return NeuralDrafter(section.drafter, network, section.growth, section.max_sessions, section.max_context)
