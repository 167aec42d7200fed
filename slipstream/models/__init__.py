"""Model folders: found by name, converted from GGUF, and the heads that come with Slipstream."""
