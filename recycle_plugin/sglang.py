"""Token Recycling's registration with SGLang."""


def register() -> None:
    """Make `--speculative-algorithm token-recycling` known to SGLang."""
    from drafttree.sglang.plugin import register_method
    from recycle_plugin import METHOD

    register_method(METHOD)
