"""Sampled verification emits the target's own draws, and makes no draw that it does not emit."""

from __future__ import annotations

import torch

from drafttree.tree import DraftTree
from drafttree.verify import verify_sampled, verify_target

# Two requests: a tree 5 -> (6 -> 8, 7 -> 9) and one that was truncated to 5 -> 6.
TREES = DraftTree(
    tokens=torch.tensor([[5, 6, 7, 8, 9], [5, 6, -1, -1, -1]], dtype=torch.int32),
    parents=torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, -1, -1, -1]], dtype=torch.int32),
    tree_size=torch.tensor([5, 2], dtype=torch.int32),
)


def test_a_child_with_the_drawn_token_is_accepted() -> None:
    script = [[7, 6], [9, 4], [3, 0]]
    nodes, living = [], []

    def draw(node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        nodes.append(node.tolist())
        living.append(alive.tolist())
        return torch.tensor(script[len(nodes) - 1], dtype=torch.int32)

    verified = verify_sampled(TREES, draw, max_depth=2)
    assert verified.emitted.tolist() == [[7, 9, 3], [6, 4, -1]]
    assert verified.path.tolist() == [[0, 2, 4], [0, 1, -1]]
    assert verified.num_emitted.tolist() == [3, 2]
    assert living == [[True, True], [True, True], [True, False]]
    assert [row[0] for row in nodes] == [0, 2, 4]


def test_no_draw_is_made_after_the_last_request_left_its_tree() -> None:
    calls = []

    def draw(node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        calls.append(alive.tolist())
        return torch.tensor([1, 1], dtype=torch.int32)

    verified = verify_sampled(TREES, draw, max_depth=2)
    assert calls == [[True, True]]
    assert verified.num_emitted.tolist() == [1, 1]


def test_greedy_verification_equals_sampled_verification_of_fixed_draws() -> None:
    target = torch.tensor([[6, 8, 0, 2, 0], [9, 3, -1, -1, -1]], dtype=torch.int32)

    def draw(node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        return target.gather(1, node[:, None].long())[:, 0]

    greedy = verify_target(TREES, target, max_depth=2)
    sampled = verify_sampled(TREES, draw, max_depth=2)
    assert greedy.emitted.tolist() == sampled.emitted.tolist() == [[6, 8, 2], [9, -1, -1]]
    assert greedy.path.tolist() == sampled.path.tolist()
    assert greedy.num_emitted.tolist() == sampled.num_emitted.tolist()
