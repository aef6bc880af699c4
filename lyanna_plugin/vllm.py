"""Lyanna's registration with vLLM."""


def register() -> None:
    """Make `speculative_config={"method": "lyanna", "model": ...}` known to vLLM."""
    from drafttree.vllm.plugin import register_method
    from lyanna_plugin import METHOD

    register_method(METHOD)
