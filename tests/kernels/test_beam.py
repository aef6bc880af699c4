"""The best children of a beam's nodes, compared with the PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from tree_kernels import beam as module
from tree_kernels.beam import BeamLevel, best_children
from tree_kernels.gumbel_top import Perturbed

DRAWS = torch.tensor([True, False, True])
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Perturbed]


@pytest.fixture
def kernel(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._BEAM, "on_cpu", module._triton)


def level_of(nodes: int, count: int, scale: float = 1.0, missing: int = 0) -> Given:
    """A level of three requests, and the children of its nodes; the last nodes are missing."""
    generator = torch.Generator().manual_seed(nodes * count)
    log_p = (scale * torch.randn(3, nodes, count, generator=generator)).log_softmax(2)
    noise = -torch.rand(log_p.shape, generator=generator).log().neg().log()
    values = torch.where(DRAWS[:, None, None], log_p + noise, log_p)
    order = values.argsort(2, descending=True)
    children = Perturbed(
        values.gather(2, order),
        torch.randint(1000, log_p.shape, generator=generator),
        log_p.gather(2, order),
    )
    paths = -3 * torch.rand(3, nodes, generator=generator, dtype=torch.float64)
    scores = torch.where(DRAWS[:, None], paths + 0.5, paths)
    paths[:, nodes - missing :] = scores[:, nodes - missing :] = -torch.inf
    return scores, paths, DRAWS, children


def assert_same(found: BeamLevel, expected: BeamLevel) -> None:
    exists = torch.isfinite(expected.scores)
    assert torch.equal(torch.isfinite(found.scores), exists)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parents[exists], expected.parents[exists])
    for one, other in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("nodes", "count", "width"), [(1, 5, 5), (3, 3, 3), (5, 2, 4), (7, 5, 12), (2, 3, 9)]
)
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_the_kernel_takes_what_the_reference_takes(
    kernel: None, nodes: int, count: int, width: int, scale: float
) -> None:
    given = level_of(nodes, count, scale)
    expected = module._reference(*given, min(width, nodes * count))
    found = best_children(*given, width)
    assert found.tokens.shape == (3, min(width, nodes * count))
    assert_same(found, expected)


def test_nodes_and_children_that_do_not_exist(kernel: None) -> None:
    scores, paths, draws, children = level_of(4, 3, missing=2)
    children.values[0, 0, 1:] = children.log_probs[0, 0, 1:] = -torch.inf
    given = scores, paths, draws, children
    found = best_children(*given, 8)
    assert found.tokens[0].tolist().count(-1) == 4
    assert found.tokens[1].tolist().count(-1) == 2
    assert_same(found, module._reference(*given, 8))


def test_the_best_child_has_its_parents_score(kernel: None) -> None:
    scores, paths, _, children = level_of(3, 4)
    found = best_children(scores, paths, torch.ones(3, dtype=torch.bool), children, 12)
    for score, parent, below in zip(scores, found.parents, found.scores, strict=True):
        for node in range(3):
            assert below[parent == node].max() == score[node]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scores", lambda scores, *others: (scores.float(), *others)),
        ("log_probs", lambda scores, paths, *others: (scores, paths[:, :1], *others)),
        ("draws", lambda scores, paths, draws, children: (scores, paths, draws[:1], children)),
    ],
)
def test_shapes_and_types_are_checked(name: str, wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=name):
        best_children(*wrong(*level_of(2, 2)), 2)


def test_no_requests(kernel: None) -> None:
    scores, paths, draws, children = level_of(2, 3)
    none = Perturbed(*(each[:0] for each in children))
    assert best_children(scores[:0], paths[:0], draws[:0], none, 4).tokens.shape == (0, 4)


@pytest.mark.cuda
def test_the_gpu_takes_what_the_reference_takes() -> None:
    scores, paths, draws, children = level_of(5, 5, missing=1)
    on_gpu = Perturbed(*(each.cuda() for each in children))
    found = best_children(scores.cuda(), paths.cuda(), draws.cuda(), on_gpu, 5)
    expected = module._reference(scores, paths, draws, children, 5)
    assert_same(BeamLevel(*(each.cpu() for each in found)), expected)
