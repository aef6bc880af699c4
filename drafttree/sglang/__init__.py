"""Tree verification inside SGLang."""
