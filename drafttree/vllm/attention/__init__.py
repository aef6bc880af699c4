"""Attention backends for vLLM that apply tree masks."""
