"""SGLang's own sampler, called for nodes of draft trees.

Temperature, top-k, top-p, min-p, penalties, biases, grammars, seeds and logprobs need no second
implementation: each row of the sampler's batch is a node, with the parameters of its request.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from tree_kernels.mask import tree_mask

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.sglang.acceptance_sampler import AcceptanceSampler
from drafttree.sglang.state import Step

_ROW_BYTES = 2**27
"""Greatest size of a copy of the logits of the nodes that are sampled at once, unless one request
has more."""


def can_sample_all(batch: Any) -> bool:
    """Whether nodes can be sampled before it is known which of them are accepted.

    Logprobs are wanted of the accepted path alone. Masks of what was sampled from and watermarks
    belong to requests, and custom processors may keep a state.
    """
    info = batch.sampling_info
    # Masks and watermarks are missing in 0.5.17.
    marked = getattr(info, "has_watermark_candidates", False)
    masked = getattr(info, "sampling_mask_batch_indices", None) is not None
    return not (batch.return_logprob or info.has_custom_logit_processor or marked or masked)


class NodeSampler:
    """Samples a token after nodes of a step's trees, B requests with N columns.

    Args:
        sampler: The target runner's sampler.
        step: The step.
        logits: The target's raw logits after all nodes, `[B, N, V]`.
    """

    def __init__(self, sampler: Any, step: Step, logits: torch.Tensor) -> None:
        self._sampler = sampler
        self._step = step
        self._logits = logits
        self._requests = torch.arange(len(logits), device=logits.device)
        # SGLang's penalties count one token of the last step; `Penalties` counts all.
        self._info = dataclasses.replace(
            step.batch.sampling_info, acc_additive_penalties=None, acc_scaling_penalties=None
        )

    def of_level(
        self, rule: AcceptanceRule | None, nodes: torch.Tensor, path: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Sample a token after one node of each request, all of one level.

        Args:
            rule: Chooses the tokens in place of the sampler's draw.
            nodes: The nodes, `int32 [B]`.
            path: The tokens on the paths to them, `int32 [B, D]`, D the level.

        Returns:
            The tokens, `int32 [B]`, and the sampler's output, with the logprobs that are asked for.
        """
        info, level = self._info, path.shape[1]
        if level > 0:
            # Requests with a custom processor have no drafts, so none are left here.
            info.has_custom_logit_processor = False
        if self._step.bound is not None:
            info.grammar_mask = self._step.bound.of_nodes(self._requests, nodes)
        elif level == 0:
            info.update_regex_vocab_mask()
        else:
            # Requests whose grammars cannot follow trees have no drafts, so none are left here.
            info.grammar_mask = None
        logprobs = self._step.batch.return_logprob
        return self._sample(info, rule, self._requests, nodes, path, level, logprobs)

    def of_all(self, rule: AcceptanceRule | None) -> torch.Tensor:
        """Sample a token after every node, those behind a tree as after its last.

        Custom processors are not applied.

        Args:
            rule: As in `of_level`, with B * N rows for at most some of the requests at a time.

        Returns:
            The tokens, `int32 [B, N]`.
        """
        trees, bound = self._step.trees, self._step.bound
        count, width = trees.tokens.shape
        columns = torch.arange(width, device=trees.tokens.device)
        columns = torch.minimum(columns, trees.tree_size[:, None].clamp(min=1) - 1)
        masks = None
        if self._step.penalties is not None:
            masks = tree_mask(trees.parents, trees.tree_size)
        info = self._info
        if bound is None:
            info.update_regex_vocab_mask()
        most = max(1, _ROW_BYTES // (4 * width * self._logits.shape[-1]))
        tokens = []
        for first in range(0, count, most):
            part = self._requests[first : first + most, None].expand(-1, width).flatten()
            nodes = columns[first : first + most].flatten()
            path = trees.tokens[part, :1]
            if masks is not None:
                path = trees.tokens[part].masked_fill(~masks[part, nodes], -1)
            of_rows = _of_rows(info, part)
            if bound is not None:
                of_rows = dataclasses.replace(of_rows, grammar_mask=bound.of_nodes(part, nodes))
            depths = self._step.depths[part, nodes]
            tokens.append(
                self._sample(of_rows, rule, part, nodes, path[:, 1:], depths, logprobs=False)[0]
            )
        return torch.cat(tokens).view(count, width)

    def _sample(
        self,
        info: Any,
        rule: AcceptanceRule | None,
        requests: torch.Tensor,
        nodes: torch.Tensor,
        path: torch.Tensor,
        depths: torch.Tensor | int,
        logprobs: bool,
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Sample a token after one node for each row.

        Args:
            info: SGLang's sampling parameters of the rows.
            rule: Chooses the tokens in place of the sampler's draw.
            requests: The rows' requests, `int64 [R]`.
            nodes: The rows' nodes, integers `[R]`.
            path: The tokens on the paths to them, `int32 [R, D]`; -1 for none.
            depths: Their depths.
            logprobs: Whether to compute the logprobs that are asked for; of one row per request.
        """
        batch, penalties = self._step.batch, self._step.penalties
        # Indexing copies, as the sampler overwrites its input.
        rows = self._logits[requests, nodes.long()]
        if penalties is not None:
            penalties.apply(rows, batch.req_pool_indices[requests], path)
        info.apply_logits_bias(rows)
        output = LogitsProcessorOutput(next_token_logits=rows)
        by_rule = isinstance(self._sampler, AcceptanceSampler)
        with self._sampler.using(rule, nodes) if by_rule else nullcontext():
            tokens = self._sampler(
                output,
                info,
                logprobs,
                batch.top_logprobs_nums,
                batch.token_ids_logprobs,
                # Seeds are combined with a node's position.
                batch.seq_lens[requests] + depths,
            )
        return tokens.to(torch.int32), output


def _of_rows(info: Any, requests: torch.Tensor) -> Any:
    """SGLang's sampling parameters of rows, given those of the requests to which they belong."""
    by_request = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    rows = {name: getattr(info, name) for name in by_request}
    mask = info.grammar_mask
    return dataclasses.replace(
        info,
        **{name: None if each is None else each[requests] for name, each in rows.items()},
        grammar_mask=None if mask is None else mask._replace(vocab_mask=mask.vocab_mask[requests]),
        has_custom_logit_processor=False,
    )
