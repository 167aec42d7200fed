"""Whether a target and a draft fit: the check of their two hellos, and of how often they agree.

A pair that does not fit is refused by name, and the target decodes plain; it is never a crash. A head whose shapes fit
may still have been made for another model: it then agrees no more often than chance explains, which ``Agreement`` sees.
It knows nothing about how hellos travel or trees are verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from slipstream.base.errors import PairingError
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftHello, FeatureSpec, TargetHello

# A head that learned nothing but which tokens are frequent is right in some 5 % of all rounds, one with random weights
# in hardly any; the worst that are published, on the text that they are worst at, in 30 % and more.
SUSPECT_BELOW = 0.10
SUSPECT_ROUNDS = 32  # before any judgement
FORGET_ROUNDS = 1024  # at so many, all counts are halved: a draft model may be exchanged behind its address
ONE_SIDED_95 = 1.645  # standard deviations


@dataclass(slots=True)
class Agreement:
    """How often the target took one of the tokens that a drafter proposed right below the root. It costs no round of
    its own: the answers that are made anyway are what is counted."""

    rounds: int = 0
    agreed: int = 0

    def add(self, agreed: int, rounds: int = 1) -> None:
        """Rounds in which something was drafted, and in how many of them they agreed."""
        if self.rounds >= FORGET_ROUNDS:
            self.rounds, self.agreed = self.rounds // 2, self.agreed // 2
        self.rounds += rounds
        self.agreed += agreed

    @property
    def at_most(self) -> float:
        """What the true share stays below with 95 % confidence (Wilson's score interval)."""
        if not self.rounds:
            return 1.0
        n, z = self.rounds, ONE_SIDED_95
        share = self.agreed / n
        middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return (middle + spread) / (1 + z * z / n)

    @property
    def suspect(self) -> bool:
        """Whether chance explains it better than a head that was made for this target."""
        return self.rounds >= SUSPECT_ROUNDS and self.at_most < SUSPECT_BELOW

    def problem(self) -> str:
        """In a sentence, with what to do; "" when there is none."""
        if not self.suspect:
            return ""
        return (f"only {self.agreed} of {self.rounds} first draft tokens were right: the head or draft model was "
                "probably made for another target; check draft.model")


def check_pair(target: TargetHello, draft: DraftHello) -> str:
    """Whether the two fit. Raises PairingError naming the first field that does not. Returns what is doubtful all the
    same, in a sentence; "" for nothing."""
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
