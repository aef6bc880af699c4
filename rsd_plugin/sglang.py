"""RSD's registration with SGLang."""


def register() -> None:
    """Make `--speculative-algorithm rsd` known to SGLang."""
    from drafttree.sglang.plugin import register_method
    from rsd_plugin import METHOD

    register_method(METHOD)
