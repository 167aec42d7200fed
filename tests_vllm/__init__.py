"""vLLM's own engine with drafts from a draft service: ``make test-vllm``."""
