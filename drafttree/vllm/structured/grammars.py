"""The scheduler's structured output, with the masks of trees in place of those of chains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.structured_output import StructuredOutputManager

from drafttree.grammar import BoundTree, JumpForwardTokenizer, MaskMemory, bind_tree, fill_masks
from drafttree.patches import check_first_parameters
from drafttree.vllm.structured.request_matcher import RequestMatcher
from drafttree.vllm.structured.shapes import Bound, Drafted, DraftedTrees, Proposal, Proposals
from drafttree.vllm.versions import unknown

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

WALKS = {
    "XgrammarBackend": "xgrammar",
    "GuidanceBackend": "guidance",
    "OutlinesBackend": "outlines",
}
"""The backends of grammars that can undo tokens, and their names."""


def why_not() -> str | None:
    """Why trees cannot be bound to grammars in this version of vLLM; None if they can be."""
    try:
        for name, parameters in (
            ("validate_tokens", "self request spec_tokens"),
            (
                "grammar_bitmask",
                "self requests structured_output_request_ids scheduled_spec_decode_tokens",
            ),
            ("_get_constraint_bounds", "self request spec_tokens"),
        ):
            check_first_parameters(
                f"StructuredOutputManager.{name}",
                getattr(StructuredOutputManager, name, None),
                parameters.split(),
                unknown,
            )
    except RuntimeError as error:
        return str(error)
    return None


class TreeGrammars:
    """Takes the place of the engine's `StructuredOutputManager` in a scheduler.

    Everything that has nothing to do with draft tokens is the engine's own.

    Args:
        manager: The engine's.
        num_draft_tokens: Greatest number of draft tokens of a request.
    """

    def __init__(self, manager: StructuredOutputManager, num_draft_tokens: int) -> None:
        self._manager = manager
        self._rows = 1 + num_draft_tokens
        self._buffers: dict[str, torch.Tensor] = {}
        self._proposals: Proposals = {}
        self._drafted: DraftedTrees = {}
        self._bound: dict[str, BoundTree] = {}
        # How many tokens each request had when its tree was bound.
        self._lengths: dict[str, int] = {}
        self._memory, self._memory_version = MaskMemory(), 0
        # Without a tokenizer vLLM serves no request with structured output.
        tokenizer = getattr(manager, "tokenizer", None)
        self._tokenizer = None if tokenizer is None else JumpForwardTokenizer(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def propose(self, proposals: Proposals) -> None:
        """Take the shapes of the trees that are validated next."""
        self._proposals = proposals

    def draft(self, drafted: DraftedTrees) -> None:
        """Take the trees of the step whose masks are asked for next."""
        self._drafted = drafted

    def bound(self, scheduled: Mapping[str, Sequence[int]]) -> dict[str, Bound]:
        """The shapes of those scheduled trees that were bound to a grammar."""
        shapes = {}
        for name, tokens in scheduled.items():
            if (tree := self._bound.get(name)) is not None:
                size = 1 + len(tokens)
                shapes[name] = Bound(
                    tree.parents[:size], tree.columns[:size], tree.forced[:size], tree.given[:size]
                )
        return shapes

    def forget(self, names: Iterable[str]) -> None:
        """Requests have ended."""
        for name in names:
            self._bound.pop(name, None)
            self._buffers.pop(name, None)
            self._lengths.pop(name, None)

    def validate_tokens(self, request: Any, spec_tokens: list[int]) -> list[int]:
        """The draft tokens to verify, from the most to the least probable one.

        They are those of a tree that the grammar allows, if its shape was proposed.
        """
        name = request.request_id
        before = self._bound.pop(name, None)
        if not request.use_structured_output or name not in self._proposals:
            validated: list[int] = self._manager.validate_tokens(request, spec_tokens)
            return validated
        if not self._can_walk():
            return []
        proposal = self._proposals[name]
        if proposal is None:
            return spec_tokens
        memory = self._memory_of(proposal)
        if memory is not None and before is not None:
            text = request.all_token_ids[self._lengths[name] :]
            memory.learn_path(before.masks.numpy(), before.tokens, before.parents, text)
        self._lengths[name] = len(request.all_token_ids)
        self._bound[name] = tree = bind_tree(
            RequestMatcher(self._manager, request, self._tokenizer),
            [0, *spec_tokens],
            proposal.parents,
            self._buffer(name),
            most_proposed=proposal.most_proposed,
            most=min(proposal.most, self._rows),
            max_depth=proposal.max_depth,
            memory=memory,
            chain=proposal.chain,
        )
        return tree.tokens[1:]

    def _memory_of(self, proposal: Proposal) -> MaskMemory | None:
        """The memory of masks that a request's tree may use."""
        if proposal.memory_version is None:
            return None
        if proposal.memory_version != self._memory_version:
            self._memory, self._memory_version = MaskMemory(), proposal.memory_version
        return self._memory

    def grammar_bitmask(
        self,
        requests: Mapping[str, Any],
        structured_output_request_ids: Sequence[str],
        scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
    ) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """The masks of all nodes of all requests, `int32 [rows, W]`, request by request."""
        masks = [
            self._masks(requests[name], scheduled_spec_decode_tokens.get(name, ()))
            for name in structured_output_request_ids
        ]
        return np.concatenate(masks) if masks else None

    def _masks(self, request: Any, scheduled: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        name, size = request.request_id, 1 + len(scheduled)
        tree = self._bound.get(name)
        masks = self._buffer(name)[:size]
        if size == 1 or tree is None:
            shape = self._drafted.get(name, Drafted([0], [-1]))
            tokens = [*shape.tokens[:size], *[-1] * (size - len(shape.tokens))]
            parents = [*shape.parents[:size], *[-1] * (size - len(shape.parents))]
            fill_masks(RequestMatcher(self._manager, request), tokens, parents, masks)
        return masks.numpy()

    def _buffer(self, name: str) -> torch.Tensor:
        """Room for the masks of a request's tree."""
        if name not in self._buffers:
            assert self._manager.backend is not None
            self._buffers[name] = self._manager.backend.allocate_token_bitmask(self._rows)
        return self._buffers[name]

    def _can_walk(self) -> bool:
        # All requests of an engine have the backend of the first one.
        backend = type(self._manager.backend).__name__
        if backend in WALKS:
            return True
        logger.warning_once(
            "Requests with structured output are served without drafts: their backend %s does not "
            "follow trees, as those called %s do",
            backend,
            ", ".join(WALKS.values()),
        )
        return False
