"""Draft trees for vLLM: the layer that all drafting methods share."""

__version__ = "0.1.0"
