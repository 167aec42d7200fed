"""Whether a target and a draft fit: the check of their two hellos.

A pair that does not fit is refused by name, and the target decodes plain; it is never a crash. It knows nothing about
how hellos travel, nor about protocol versions: the reader of a hello checks those first.
"""

from __future__ import annotations

from slipstream.base.errors import PairingError
from slipstream.protocol.messages import DraftHello, FeatureSpec, TargetHello


def check_pair(target: TargetHello, draft: DraftHello) -> str:
    """Raises PairingError naming the first field in which target and draft do not fit. Returns a warning about a pair
    that fits (a head made for other weights) as a sentence; "" for none."""
    # Rows of a model's vocabulary that no token of its tokenizer has are padding: sizes of one family differ by it.
    padded = draft.features is None and draft.tokenizer_hash == target.tokenizer_hash != ""
    rows = (
        ("vocab_size", padded or draft.vocab_size in (0, target.vocab_size),
         f"draft {draft.vocab_size}, target {target.vocab_size}"),
        ("tokenizer_hash", draft.tokenizer_hash in ("", target.tokenizer_hash), "the vocabularies differ"),
        ("hidden_size", draft.hidden_size in (0, target.hidden_size),
         f"the head was made for {draft.hidden_size}, the target has {target.hidden_size}"),
    )
    for field, holds, message in rows:
        if not holds:
            raise PairingError(field, message)
    _check_features(target, draft.features)
    if target.identity is not None and draft.made_for not in ("", target.identity.weights):
        return ("the head was made for other weights than the target's: it drafts, maybe less well; if few of its "
                "tokens are taken, train it anew")
    return ""


def _check_features(target: TargetHello, spec: FeatureSpec | None) -> None:
    if spec is None:
        return
    if not spec.layers or any(not 0 <= layer <= target.num_layers for layer in spec.layers):
        raise PairingError("features.layers", f"{spec.layers} are not layers of a target with {target.num_layers}")
    states, width = len(spec.layers) * target.hidden_size, spec.width
    if spec.projection is not None:
        if spec.projection.columns != states:
            raise PairingError("features.projection", f"draft {spec.projection.columns} columns, target {states}")
        if spec.projection.norm_width not in (0, target.hidden_size, states):
            raise PairingError("features.projection.norm_width", f"{spec.projection.norm_width} is neither one state "
                                                                 "of the target nor all that are read")
        states = spec.projection.rows
    if width != states:
        raise PairingError("features.width", f"draft {width}, target {states}")
