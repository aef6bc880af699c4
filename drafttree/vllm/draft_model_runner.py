"""vLLM's model runner with a draft model beside the target.

The draft model's layers join the engine's KV cache groups, so they share the target's block tables:
prompts are read by both, cached prefixes hold for both, and accepted paths move in both. The
scheduler grants KV slots for as many drafts as the tree has columns, and the tree is drawn at the
beginning of the step that verifies it, when the slots are there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from tree_kernels.adjacency import top_candidates
from tree_kernels.mask import tree_mask
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from drafttree.drafter import DraftTree, ModelDrafter, Rule
from drafttree.method import Method
from drafttree.verify import Verified
from drafttree.vllm.rule_sampler import RuleSampler
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import NO_TOKEN, IntArray, StepMasks, StepTrees

PREFIX = "draft_model"
"""Of the draft model's layers in the engine's list of all layers."""

PLACEHOLDER = 0
"""Stands for each node until it is drawn."""

_COLD = 1e-5  # a temperature below is greedy to the engine


class DraftModelRunner(TreeModelRunner):
    """Drafts with a `ModelDrafter`.

    Attributes:
        draft_seconds: the host's time spent in steps with drafts, until the target's forward.
    """

    def _set_up(
        self, method: Method, options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        super()._set_up(method, options, logits_processors)
        self.tree_drafter: ModelDrafter = method.make_drafter(
            method.parse(options), self.model_config.get_vocab_size(), self.device
        )
        self.draft_seconds = 0.0
        self._draft_path = str(options["model"])
        self._rule_sampler = RuleSampler(self.sampler)
        self._masks: StepMasks | None = None
        self._drawn: tuple[DraftTree, Rule] | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the target, and then the draft model with layers of its own."""
        super().load_model(load_dummy_weights)
        target = self.model_config
        config = copy.copy(self.vllm_config)
        config.quant_config = None
        config.model_config = ModelConfig(
            model=self._draft_path,
            tokenizer=target.tokenizer,
            trust_remote_code=target.trust_remote_code,
            dtype=target.dtype,
            seed=target.seed,
            max_model_len=target.max_model_len,
            enforce_eager=target.enforce_eager,
            skip_tokenizer_init=True,
        )
        with set_model_tag(PREFIX):
            self._draft_model = get_model(vllm_config=config, prefix=PREFIX)
        self._check_heads()

    def _check_heads(self) -> None:
        """Layers with KV of one shape share a metadata builder, which knows one count of heads."""
        heads: dict[tuple[int, int], set[int]] = {}
        for layer in self.compilation_config.static_forward_context.values():
            if isinstance(layer, Attention):
                shape = layer.num_kv_heads, layer.head_size
                heads.setdefault(shape, set()).add(layer.num_heads)
        for (kv_heads, size), counts in heads.items():
            if len(counts) > 1:
                raise ValueError(
                    f"model={self._draft_path!r} and the target both have {kv_heads} KV heads of "
                    f"size {size} but {sorted(counts)} query heads, which vLLM cannot serve "
                    "together: use another draft model"
                )

    def _propose(self, roots: IntArray) -> DraftTree:
        """Columns of a tree, by which the scheduler grants slots; it is drawn in the next step."""
        parents = torch.tensor(self.tree_drafter.columns, dtype=torch.int32)
        trees = parents.expand(len(roots), -1)
        sizes = torch.full((len(roots),), trees.shape[1], dtype=torch.int32)
        return DraftTree(torch.full_like(trees, PLACEHOLDER), trees.contiguous(), sizes)

    # One step: the engine calls these in this order.

    def _step_masks(self, step: StepTrees) -> StepMasks:
        # The masks are made as the trees grow; attention reads them when a layer runs.
        self._masks = super()._step_masks(step)
        return self._masks

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._step is not None:
            assert input_ids is not None
            assert positions is not None
            started = perf_counter()
            self._drawn = self._draw(self._step, input_ids, positions)
            if self._step.drafted:
                self.draft_seconds += perf_counter() - started
        return super()._model_forward(input_ids, positions, *args, **kwargs)

    def _draw(
        self, step: StepTrees, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[DraftTree, Rule]:
        """Draw the step's trees into `input_ids`, and have the draft model read all of the step."""
        names = self.input_batch.req_ids
        seeds = [self._seed(name) for name in names]
        root_rows = step.rows[torch.from_numpy(step.starts)]
        roots = input_ids[root_rows].to(torch.int32)
        lengths = (positions[root_rows]).tolist()
        if not step.drafted:
            self._draft_model(input_ids=input_ids, positions=positions)
            rule = self.tree_drafter.verify_undrafted(roots, seeds, lengths)
            return DraftTree.of_roots(roots), rule
        nodes = step.by_node(step.rows)
        width = nodes.shape[1]
        exists = torch.arange(width) < torch.from_numpy(step.sizes)[:, None]
        sampled = self._sampled(len(names))

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            last = min(trees.tokens.shape[1], width)
            if first >= width:
                return torch.zeros(len(names), trees.tokens.shape[1] - first, self._vocab_size)
            fresh = exists[:, first:last]
            tokens = trees.tokens[:, first:last].clamp(min=0)
            input_ids[nodes[:, first:last][fresh]] = tokens[fresh].to(input_ids.dtype)
            self._show(trees, last)
            hidden = self._draft_model(input_ids=input_ids, positions=positions)
            if trees.tokens.shape[1] == len(self.tree_drafter.columns):
                return hidden[:0]  # nothing is drawn below the leaves
            rows = nodes[:, first:last]
            logits = self._draft_model.compute_logits(hidden[rows.flatten()])
            logits = self._adjusted(logits.float().view(*rows.shape, -1), trees, first)
            probs = self._distributions(logits, sampled)
            missing = trees.tokens.shape[1] - last
            return torch.nn.functional.pad(probs, (0, 0, 0, missing))

        trees, drawn = self.tree_drafter.draw(roots, seeds, lengths, sampled, forward)
        kept = exists & (trees.tokens[:, :width] >= 0)
        kept[:, 0] = True
        cut = DraftTree(
            tokens=trees.tokens[:, :width].masked_fill(~kept, NO_TOKEN),
            parents=trees.parents[:, :width].masked_fill(~kept, -1),
            num_nodes=torch.from_numpy(step.sizes).to(torch.int32),
        )
        self._show(cut, width)
        return cut, self.tree_drafter.verify_with(cut, drawn)

    def _show(self, trees: DraftTree, last: int) -> None:
        """Let attention see the trees' first `last` columns."""
        assert self._masks is not None
        rows = self._masks.requests
        parents = torch.full(self._masks.masks.shape[:2], -1, dtype=torch.int32)
        parents[:, :last] = trees.parents[rows, :last]
        sizes = self._masks.nodes.to(torch.int32).clamp(max=last)
        self._masks.masks.copy_(tree_mask(parents, sizes))

    def _verify(
        self, step: StepTrees, logits: torch.Tensor
    ) -> tuple[SamplerOutput, DraftTree, Verified]:
        assert self._drawn is not None
        drafts, rule = self._drawn
        greedy = is_plain_greedy(self.input_batch.sampling_metadata)
        fixed = top_candidates(logits, 1)[:, 0] if greedy else None
        self._drawn = None
        output, verified = sample_trees(
            self, step, drafts, logits, fixed, (self._rule_sampler, rule)
        )
        return output, drafts, verified

    # What drafts are drawn from.

    @property
    def _vocab_size(self) -> int:
        return int(self.model_config.get_vocab_size())

    def _seed(self, name: str) -> int | None:
        parameters = self.requests[name].sampling_params
        return None if parameters is None else parameters.seed

    def _sampled(self, count: int) -> torch.Tensor:
        temperature = self.input_batch.sampling_metadata.temperature
        if temperature is None:
            return torch.zeros(count, dtype=torch.bool)
        return temperature >= _COLD

    def _adjusted(self, logits: torch.Tensor, trees: DraftTree, first: int) -> torch.Tensor:
        """Logits `[B, n, V]` of the nodes from `first` on, with the target's penalties, biases and
        allowed tokens, each along the node's own path.

        Processors with a state of their own and bad words are left to verification.
        """
        metadata = self.input_batch.sampling_metadata
        requests, nodes, vocab = logits.shape
        if metadata.allowed_token_ids_mask is not None:
            logits = logits.masked_fill(metadata.allowed_token_ids_mask[:, None], -torch.inf)
        for processor in metadata.logitsprocs.non_argmax_invariant:
            if type(processor) is LogitBiasLogitsProcessor and processor.biases:
                columns = [processor.apply(column) for column in logits.unbind(1)]
                logits = torch.stack(columns, 1)
        if metadata.no_penalties:
            return logits
        outputs = [
            [*output, *trees.path(row, first + node)]
            for row, output in enumerate(self.input_batch.req_output_token_ids[:requests])
            for node in range(nodes)
        ]
        penalised: torch.Tensor = apply_all_penalties(
            logits.reshape(-1, vocab),
            *(
                each.repeat_interleave(nodes, 0)
                for each in (
                    *(metadata.prompt_token_ids, metadata.presence_penalties),
                    *(metadata.frequency_penalties, metadata.repetition_penalties),
                )
            ),
            outputs,
        )
        return penalised.view(requests, nodes, vocab)

    def _distributions(self, logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """What children are drawn from, `float32 [B, n, V]`: after the target's own filters.

        Any distribution would do; the closer to the target's, the more is accepted. Requests that
        are not sampled keep all tokens.
        """
        metadata = self.input_batch.sampling_metadata
        plain = logits.softmax(-1)
        if metadata.temperature is None:
            return plain
        requests, nodes, vocab = logits.shape
        temperatures = torch.where(sampled, metadata.temperature, 1.0)
        rows = (logits / temperatures[:, None, None]).view(-1, vocab)
        for processor in metadata.logitsprocs.argmax_invariant:
            if type(processor) is MinPLogitsProcessor and processor.min_p_count:
                least = processor.min_p.view(-1).repeat_interleave(nodes)[:, None]
                probs = rows.softmax(-1)
                rows = rows.masked_fill(probs < probs.amax(1, keepdim=True) * least, -torch.inf)
        k, p = (
            None if each is None else each.repeat_interleave(nodes)
            for each in (metadata.top_k, metadata.top_p)
        )
        drawn = apply_top_k_top_p(rows, k, p).softmax(-1).view(requests, nodes, vocab)
        return torch.where(sampled[:, None, None], drawn, plain)
