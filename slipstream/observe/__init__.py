"""Observability of a running system: metrics, spans, traces, logs."""
