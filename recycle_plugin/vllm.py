"""Token Recycling's registration with vLLM."""


def register() -> None:
    """Make `speculative_config={"method": "token_recycling"}` known to vLLM."""
    from drafttree.vllm.plugin import register_method
    from recycle_plugin import METHOD

    register_method(METHOD)
