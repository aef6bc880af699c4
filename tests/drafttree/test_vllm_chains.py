"""Parts of chains in vLLM that need no engine."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, silu

from drafttree.chains import as_chains
from drafttree.tree import DraftTree
from drafttree.vllm.chains.cpu_gdn import convolve


def test_trees_are_cut_to_first_children() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, -1, -1], [-1, -1, -1, -1, -1]]).int()
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 0, -1, -1], [-1, -1, -1, -1, -1]]).int()
    chains = as_chains(DraftTree(tokens, parents, torch.tensor([5, 3, 1], dtype=torch.int32)))
    assert chains.tokens.tolist() == [[5, 6, 8, 9, -1], [5, 6, -1, -1, -1], [-1] * 5]
    assert chains.parents[:2].tolist() == [[-1, 0, 1, 2, -1], [-1, 0, -1, -1, -1]]
    assert chains.tree_size.tolist() == [4, 2, 1]
    again = as_chains(chains)
    assert torch.equal(again.tokens, chains.tokens)
    assert torch.equal(again.tree_size, chains.tree_size)


def test_convolutions_over_any_number_of_drafts() -> None:
    """Two texts grow by what is accepted of each step, of fewer and of more rows than the last."""
    generator = torch.Generator().manual_seed(2)
    width, columns, most = 4, 3, 5
    weight = torch.randn(columns, width, generator=generator)
    bias = torch.randn(columns, generator=generator)
    state = torch.zeros(3, columns, width - 1 + most)
    slots, accepted = torch.tensor([2, 0]), torch.ones(2, dtype=torch.int32)
    texts = [torch.zeros(width - 1, columns) for _ in slots]
    for counts, keep in (([6, 1], [5, 1]), ([1, 6], [1, 6]), ([2, 3], [1, 2]), ([6, 2], [6, 1])):
        drafts = [torch.randn(count, columns, generator=generator) for count in counts]
        starts = torch.tensor([0, counts[0], sum(counts)])
        rows = torch.cat(drafts)
        out = convolve(rows, starts, weight, bias, state, slots, accepted, activated=True)
        for request, text in enumerate(texts):
            whole = torch.cat((text[1 - width :], drafts[request]))
            right = silu(conv1d(whole.T[None], weight[:, None], bias, groups=columns))[0].T
            first, end = starts[request : request + 2].tolist()
            torch.testing.assert_close(out[first:end], right)
            texts[request] = torch.cat((text, drafts[request][: keep[request]]))
        accepted = torch.tensor(keep)
    assert not state[1].any()
