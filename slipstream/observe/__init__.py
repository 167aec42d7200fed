"""Observing a running system: metrics, spans, traces, logs."""
