"""Faults that can be planted in an engine's process, to show that a test would find them."""

from __future__ import annotations

from typing import Any

VARIABLE = "TESTS_PLANTED_FAULT"
"""Environment variable of an engine's process that names the fault."""


def plant(fault: str, engine: str) -> None:
    """Plant a fault in this process.

    Args:
        fault: "most likely", "residual", "another draft", "no chains", "root's mask", "root's
            grammar" or "a chain's M-RoPE".
        engine: The engine's name.
    """
    if fault == "residual":
        keep_rejected_mass()
    elif fault == "another draft":
        _traverse_with_another_draft()
    elif fault == "no chains":
        _draft_trees_for_all()
    elif fault == "root's mask":
        _hide_ancestors()
    elif fault == "root's grammar":
        _mask_as_roots(engine)
    elif fault == "a chain's M-RoPE":
        _leave_rope_positions(engine)
    elif engine == "vllm":
        _take_most_likely_in_vllm()
    else:
        _take_most_likely_in_sglang()


def _take_most_likely_in_vllm() -> None:
    """Below the root, take the most likely token instead of sampling one."""
    from drafttree.vllm import sampling

    draw = sampling._Draw.__call__

    def faulty(self: Any, node: Any, alive: Any) -> Any:
        drawn = draw(self, node, alive)
        if self.levels == 1:
            return drawn
        most_likely = self._logits.of(self._starts + node).argmax(-1).int()
        self._last = most_likely.tolist()
        return most_likely

    sampling._Draw.__call__ = faulty  # type: ignore[method-assign]


def _draft_trees_for_all() -> None:
    """On the V2 model runner, draft trees even where logits depend on the text."""
    from drafttree.vllm.v2 import requests

    requests.depends_on_text = lambda sampler, row: False


def _hide_ancestors() -> None:
    """On the V2 model runner, let each node attend to the root and itself alone."""
    import torch

    from drafttree.vllm.v2 import in_step, step

    def of_roots(masks: torch.Tensor) -> torch.Tensor:
        masks[:] = torch.eye(masks.shape[1], dtype=torch.bool)
        masks[:, :, 0] = True
        return masks

    lay_out, tree_mask = step.lay_out, in_step.tree_mask

    def lay_out_roots(*args: Any, **kwargs: Any) -> Any:
        layout = lay_out(*args, **kwargs)
        of_roots(layout.masks)
        return layout

    step.lay_out = lay_out_roots  # type: ignore[attr-defined]
    # A drafter that drafts within the step replaces the masks.
    in_step.tree_mask = lambda *args: of_roots(tree_mask(*args))  # type: ignore[attr-defined]


def _mask_as_roots(engine: str) -> None:
    """Let grammars allow after each node what they allow after its root."""
    if engine == "sglang":
        from drafttree.sglang.grammars import BoundTrees

        of_nodes = BoundTrees.of_nodes

        def of_roots(self: BoundTrees, requests: Any, nodes: Any) -> Any:
            return of_nodes(self, requests, nodes * 0)

        BoundTrees.of_nodes = of_roots  # type: ignore[method-assign]
        return
    from drafttree.vllm.structured.grammars import TreeGrammars

    stock = TreeGrammars._masks

    def faulty(self: TreeGrammars, request: Any, scheduled: Any) -> Any:
        masks = stock(self, request, scheduled)
        return masks[:1].repeat(len(masks), 0)

    TreeGrammars._masks = faulty  # type: ignore[method-assign]


def _leave_rope_positions(engine: str) -> None:
    """In SGLang and on vLLM's V1 model runner, leave M-RoPE positions as along a chain."""
    if engine == "sglang":
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        stock = ForwardBatch.compute_spec_mrope_positions

        def faulty(self: Any, *args: Any) -> None:
            stock(self, *args)
            rows = self.mrope_positions.view(3, self.batch_size, -1)
            rows[:] = rows[..., :1] + torch.arange(rows.shape[-1])

        ForwardBatch.compute_spec_mrope_positions = faulty
        return
    from drafttree.vllm import runner

    runner.rope_positions = lambda runner: None  # type: ignore[attr-defined]


def _take_most_likely_in_sglang() -> None:
    from drafttree.sglang import sampling

    draw = sampling._Draw.__call__

    def faulty(self: Any, node: Any, alive: Any) -> Any:
        drawn = draw(self, node, alive)
        if len(self._levels) == 1:
            return drawn
        nodes = self._nodes
        return nodes._logits[nodes._requests, node.long()].argmax(-1).int()

    sampling._Draw.__call__ = faulty  # type: ignore[method-assign]


def keep_rejected_mass() -> None:
    """Where all children are rejected, sample from the target's distribution, not its residual."""
    import torch

    from rsd_plugin import rules

    reject_step = rules.reject_step

    def faulty(
        target: Any, draft: Any, target_rows: Any, draft_rows: Any, children: Any, coins: Any
    ) -> Any:
        accepted, tokens = reject_step(target, draft, target_rows, draft_rows, children, coins)
        childless = torch.full_like(draft_rows, -1)
        _, drawn = reject_step(target, draft, target_rows, childless, children, coins)
        return accepted, torch.where(accepted >= 0, tokens, drawn)

    rules.reject_step = faulty  # type: ignore[attr-defined]


def _traverse_with_another_draft() -> None:
    """In traversal verification, take other distributions than the drafts were sampled from."""
    from rsd_plugin import rules

    traverse_trees = rules.traverse_trees

    def faulty(target: Any, draft: Any, *given: Any) -> Any:
        return traverse_trees(target, draft.roll(1, 1), *given)

    rules.traverse_trees = faulty  # type: ignore[attr-defined]
