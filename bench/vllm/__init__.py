"""vLLM with our drafts, measured: ``make bench-vllm``."""
