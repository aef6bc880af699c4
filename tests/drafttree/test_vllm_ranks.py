"""Tensor-parallel ranks: shapes, rules, proposals, and the heads of a drafter's layer."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_threads import RANKS, Ranks, on_ranks

pytest.importorskip("vllm")

from drafttree.acceptance_rules import TreeRule
from drafttree.tensor_parallel import rule_of_first_rank, shape_of_first_rank
from drafttree.tree_shape import TreeShape
from drafttree.vllm.drafters import draft_layer, model_free
from drafttree.vllm.drafters.draft_layer import DraftLayer

SIZE = 8


def test_the_first_rank_chooses_shapes() -> None:
    def run(group: Ranks) -> TreeShape:
        def choose() -> TreeShape:
            assert not group.rank_in_group
            return TreeShape(2, 3, 6)

        return shape_of_first_rank(choose, group)

    assert on_ranks(run) == [TreeShape(2, 3, 6)] * RANKS


class RankRule(TreeRule):
    """Chooses 7 everywhere, and may be asked on the first rank alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        assert not self.rank
        return torch.full_like(nodes, 7)

    def of_trees(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert not self.rank
        return torch.full_like(rows, 7, dtype=torch.int32).t().contiguous().t()


def test_the_first_ranks_rule_counts() -> None:
    def run(group: Ranks) -> list[Any]:
        rule = RankRule(group.rank_in_group)
        whole, by_level = rule_of_first_rank(rule, group), rule_of_first_rank(rule.__call__, group)
        assert isinstance(whole, TreeRule)
        assert not isinstance(by_level, TreeRule)
        assert by_level is not None
        nodes = torch.zeros(2, dtype=torch.int32)
        chosen = [each(torch.zeros(2, 4), nodes) for each in (whole, by_level)]
        chosen.append(whole.of_trees(torch.zeros(6, 4), torch.arange(6).view(2, 3)))
        return [tokens.flatten().tolist() for tokens in chosen]

    assert on_ranks(run) == [[[7] * 2, [7] * 2, [7] * 6]] * RANKS
    assert rule_of_first_rank(None, SimpleNamespace(world_size=2, rank_in_group=0)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [True, False])
def test_all_ranks_give_their_schedulers_the_same_proposals(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `external_launcher` each rank has a scheduler, and only the first one drafts."""

    def drafter(options: Any, target: Any) -> Any:
        return SimpleNamespace(shares_texts=shares, allocate=lambda *sizes: None)

    method: Any = SimpleNamespace(parse=lambda options: SimpleNamespace(depth=4), drafter=drafter)

    class Runner(model_free.ModelFreeRunner):
        device = torch.device("cpu")
        max_num_reqs, max_model_len = 2, 64

        def _target(self, *args: Any, **kwargs: Any) -> Any:
            return None

    groups = threading.local()
    monkeypatch.setattr(model_free, "get_tp_group", lambda: groups.own)

    def run(group: Ranks) -> bool:
        groups.own = group
        runner = Runner.__new__(Runner)
        runner._set_up_drafter(method, {})
        return runner._drafter.shares_texts

    assert on_ranks(run) == [shares] * RANKS


class _Attention:
    """Attention of each row to all rows."""

    def __init__(
        self, heads: int, size: int, scale: float, *, num_kv_heads: int, **_: object
    ) -> None:
        self.heads, self.size, self.scale, self.kv_heads = heads, size, scale, num_kv_heads

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(len(q), self.heads, self.size)
        groups = self.heads // self.kv_heads
        k, v = (
            each.view(len(each), self.kv_heads, self.size).repeat_interleave(groups, 1)
            for each in (k, v)
        )
        weights = (torch.einsum("qhd,khd->hqk", q, k) * self.scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


class GatheringRanks:
    """Ranks whose tensors can be gathered."""

    world_size = RANKS

    def __init__(self, ranks: Ranks) -> None:
        self.rank_in_group = ranks.rank_in_group
        self._group = ranks._group

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        gathered = [torch.empty_like(input_) for _ in range(RANKS)]
        self._group.allgather([gathered], [input_]).wait()
        return torch.cat(gathered, dim)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ranks_share_the_heads_of_a_layer(kv_heads: int) -> None:
    """Each has as many KV heads as of a layer of the target; there may be fewer than ranks."""
    heads, rows = 4, 5
    generator = torch.Generator().manual_seed(2)
    given = [
        torch.randn(rows, each, SIZE, generator=generator) for each in (heads, *[kv_heads] * 2)
    ]
    drafter: Any = SimpleNamespace(heads=(heads, kv_heads, SIZE), read_head=lambda head: None)
    model = SimpleNamespace(get_hidden_size=lambda: SIZE, dtype=torch.float32)
    config = SimpleNamespace(cache_config=None, model_config=model)

    def attended(group: Any) -> torch.Tensor:
        layer = DraftLayer(drafter, config, 1, torch.device("cpu"), group, torch.zeros_like)
        assert layer._attention.kv_heads == max(kv_heads // group.world_size, 1)
        return layer.attend(*given)

    with (
        mock.patch.object(draft_layer, "Attention", _Attention),
        mock.patch.object(draft_layer, "set_current_vllm_config", return_value=nullcontext()),
    ):
        whole = attended(SimpleNamespace(world_size=1, rank_in_group=0))
        for shared in on_ranks(lambda ranks: attended(GatheringRanks(ranks))):
            torch.testing.assert_close(shared, whole)
