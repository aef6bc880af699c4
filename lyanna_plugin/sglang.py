"""Lyanna's registration with SGLang."""


def register() -> None:
    """Make `--speculative-algorithm lyanna` known to SGLang."""
    from drafttree.sglang.plugin import register_method
    from lyanna_plugin import METHOD

    register_method(METHOD)
