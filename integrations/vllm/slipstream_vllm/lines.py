"""Lines: sends our log lines in vLLM's process to vLLM's log, in its form.

If structlog is configured already, it changes nothing: then the process is one of ours.
"""

from __future__ import annotations

import logging

import structlog

from slipstream.observe.log import refuse_private

NAME = "vllm.slipstream"  # a child of vLLM's own logger: it has its level, form and stream


def configure_logging() -> None:
    """Configure structlog for vLLM; once a process."""
    if structlog.is_configured():
        return
    lines = logging.getLogger(NAME)
    structlog.configure(
        processors=[refuse_private, structlog.processors.format_exc_info,
                    structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)],
        wrapper_class=structlog.make_filtering_bound_logger(lines.getEffectiveLevel()),
        logger_factory=lambda *_: lines,
    )
