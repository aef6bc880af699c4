"""Draft trees for vLLM and SGLang: the layer that all drafting methods share."""

__version__ = "0.1.0"
