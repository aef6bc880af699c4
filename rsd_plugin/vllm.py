"""RSD's registration with vLLM."""


def register() -> None:
    """Make `speculative_config={"method": "rsd", "model": ...}` known to vLLM."""
    from drafttree.vllm.plugin import register_method
    from rsd_plugin import METHOD

    register_method(METHOD)
