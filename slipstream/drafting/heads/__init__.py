"""Draft heads: networks of one or a few layers that read the target's states, and readers of their checkpoints."""
