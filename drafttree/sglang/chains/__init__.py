"""Chains of draft tokens on SGLang's own state handling, where trees cannot be verified."""
