"""Tree verification inside SGLang; importing this needs no engine."""

from drafttree.sglang.options import set_options

__all__ = ["set_options"]
