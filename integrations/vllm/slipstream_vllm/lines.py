"""Lines: our log in vLLM's process goes where vLLM's own goes, in its form.

It configures nothing where structlog is configured already: then the process is one of ours.
"""

from __future__ import annotations

import logging

import structlog

from slipstream.observe.log import refuse_private

NAME = "vllm.slipstream"  # below vLLM's own logger, so that its level, its form and its stream count


def adopt() -> None:
    """Once a process."""
    if structlog.is_configured():
        return
    lines = logging.getLogger(NAME)
    structlog.configure(
        processors=[refuse_private, structlog.processors.format_exc_info,
                    structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)],
        wrapper_class=structlog.make_filtering_bound_logger(lines.getEffectiveLevel()),
        logger_factory=lambda *_: lines,
    )
