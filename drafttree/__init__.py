"""Draft trees for vLLM and SGLang: what a drafting method is built from.

The names below are the public API; everything else may change between minor versions.
"""

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.method import (
    DRAFT_MODEL,
    HIDDEN_STATE,
    MODEL_FREE,
    DrafterKind,
    HostSupport,
    Method,
    MethodOptions,
    find_method,
    installed_methods,
)
from drafttree.model_drafters import (
    Attend,
    DraftForward,
    DraftModelDrafter,
    HiddenStateDrafter,
    ModelDrafter,
)
from drafttree.target import Target
from drafttree.tree import DraftTree, StaticTree, Verified

__version__ = "0.2.0"

__all__ = [
    "DRAFT_MODEL",
    "HIDDEN_STATE",
    "MODEL_FREE",
    "AcceptanceRule",
    "Attend",
    "DraftForward",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "DrafterKind",
    "HiddenStateDrafter",
    "HostSupport",
    "Method",
    "MethodOptions",
    "ModelDrafter",
    "ModelFreeDrafter",
    "StaticTree",
    "Target",
    "TreeRule",
    "Verified",
    "find_method",
    "installed_methods",
]
