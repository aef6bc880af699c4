"""With several tensor-parallel ranks, the first one's tables offer candidates to all of them."""

from __future__ import annotations

import logging

import torch
from rank_threads import Ranks, on_ranks

from drafttree.target import Target
from drafttree.tree import Verified
from drafttree.tree_union import Candidates
from recycle_plugin.config import RecycleOptions
from recycle_plugin.dynamic import DynamicTreeDrafter
from recycle_plugin.shared_ranks import TablesOfFirstRank
from recycle_plugin.shared_trees import SharedTrees
from recycle_plugin.sharing import make_tables

CPU = torch.device("cpu")
NODES = 6
SLOTS = torch.tensor([2])


def integers(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens], dtype=torch.int32)


def test_all_ranks_choose_the_same_nodes() -> None:
    """Of the model's candidates and of the tables', which copy the request's own text."""

    def run(group: Ranks) -> list[object]:
        options = RecycleOptions(nodes=NODES, prime=False)
        described = Target("t", 50, CPU, torch.float32, logging.getLogger("t"), group=group)
        tables = make_tables(options, described)
        assert type(tables) is (TablesOfFirstRank if group.rank_in_group else DynamicTreeDrafter)
        shared = SharedTrees(tables, NODES, 1, "model", learns=True, group=group)
        shared.allocate(4, 64)
        tables.start(2, [4, 5, 6, 7, 8, 4, 5])
        own = Candidates(integers(5, 9), integers(-1, 0), torch.tensor([[1.0, 0.4]]))
        found: list[object] = [shared.max_depth]
        for _ in range(2):
            trees, columns = shared.choose_first(SLOTS, own, torch.tensor([True]), NODES)
            found += [each.tolist() for each in (trees.tokens, trees.parents, columns)]
            none = torch.zeros(1, 1, dtype=torch.int32)
            shared.on_verified(SLOTS, trees, Verified(none, none - 1, none[0] + 1))
        return found

    first, second = on_ranks(run)
    assert first == second
    tokens, parents = first[1][0], first[2][0]  # type: ignore[index]
    assert tokens[:2] == [5, 9]
    six = tokens.index(6)
    assert parents[six] == 0
    assert parents[tokens.index(7)] == six
