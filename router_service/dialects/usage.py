"""The usage object of whole answers and of the usage chunk.

``usage.completion_tokens_details`` says what speculation did, in the fields that the API has for predicted tokens.

Format: the OpenAI API's ``usage``, vLLM's ``metrics`` and an object of our own, ``slipstream``, which other clients
skip. It knows nothing about answers.
"""

from __future__ import annotations

from router_service.dialects.tools import Json
from slipstream.protocol.chat import Usage


def usage_fields(usage: Usage, reasoning: int | None = None) -> Json:
    """The usage object of answers and of the usage chunk. ``reasoning``: reasoning tokens, if counted."""
    drafted = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.accepted_prediction_tokens,
                "rejected_prediction_tokens": usage.rejected_prediction_tokens,
                **({} if reasoning is None else {"reasoning_tokens": reasoning}),
            },
        },
        "metrics": {"speculative_decoding": _drafts(usage, drafted)},
        "slipstream": {"rounds": usage.rounds, "acceptance_length": round(usage.acceptance_length, 4),
                       "drafted_tokens": drafted, "lossy": usage.lossy},
    }


def _drafts(usage: Usage, drafted: int) -> Json:
    """As vLLM tells it: of the steps that verified draft tokens alone."""
    steps, accepted = sum(usage.reached), sum(length * count for length, count in enumerate(usage.reached))
    return {"mean_acceptance_length": round(1 + accepted / steps, 4) if steps else 1.0,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "acceptance_histogram": list(usage.reached) or [0], "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
            "num_spec_tokens": max(len(usage.reached) - 1, 0)}
