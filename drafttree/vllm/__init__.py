"""Tree verification inside vLLM, on its CPU backend."""
