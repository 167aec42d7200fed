"""Whether a target and a draft fit: the check of their two hellos.

A pair that does not fit is refused by name, and the target decodes plain; it is never a crash. It knows nothing about
how hellos travel.
"""

from __future__ import annotations

from slipstream.errors import PairingError
from slipstream.messages import PROTOCOL_VERSION, DraftHello, TargetHello


def check_pair(target: TargetHello, draft: DraftHello) -> None:
    """Whether the two fit. Raises PairingError naming the first field that does not."""
    rows = (
        ("protocol_version", draft.protocol_version == PROTOCOL_VERSION == target.protocol_version,
         f"draft {draft.protocol_version}, target {target.protocol_version}"),
        ("incarnation", draft.incarnation == target.incarnation, "the draft answered another stream"),
        ("vocab_size", draft.vocab_size in (0, target.vocab_size),
         f"draft {draft.vocab_size}, target {target.vocab_size}"),
        ("tokenizer_hash", draft.tokenizer_hash in ("", target.tokenizer_hash), "the vocabularies differ"),
        ("hidden_size", draft.hidden_size in (0, target.hidden_size),
         f"the head was made for {draft.hidden_size}, the target has {target.hidden_size}"),
    )
    for field, holds, message in rows:
        if not holds:
            raise PairingError(field, message)
    spec = draft.features
    if spec is None:
        return
    if not spec.layers or any(not 0 <= layer <= target.num_layers for layer in spec.layers):
        raise PairingError("features.layers", f"{spec.layers} are not layers of a target with {target.num_layers}")
    if spec.width != len(spec.layers) * target.hidden_size:
        raise PairingError("features.width", f"draft {spec.width}, target {len(spec.layers) * target.hidden_size}")
