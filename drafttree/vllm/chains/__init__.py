"""Chains of draft tokens on vLLM's own attention and state, where trees cannot be verified."""
