"""Draft trees under a grammar: which nodes it allows, and which tokens it leaves after each.

Depends on no engine and on no library of grammars: hosts adapt theirs to `Matcher`.
"""

from drafttree.grammar.binding import BoundTree, bind_tree
from drafttree.grammar.jump_forward import (
    NO_JUMP_FORWARD,
    JumpForward,
    JumpForwardTokenizer,
    found_text,
)
from drafttree.grammar.mask_memory import MaskMemory
from drafttree.grammar.masks import allows, sole_token
from drafttree.grammar.matcher import Matcher, Walk
from drafttree.grammar.node_masks import fill_masks

__all__ = [
    "NO_JUMP_FORWARD",
    "BoundTree",
    "JumpForward",
    "JumpForwardTokenizer",
    "MaskMemory",
    "Matcher",
    "Walk",
    "allows",
    "bind_tree",
    "fill_masks",
    "found_text",
    "sole_token",
]
