"""Lyanna: a trained drafter that continues the target's hidden states."""
