"""What is told of a running system: metrics, spans, traces, logs."""
