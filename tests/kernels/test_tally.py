"""What candidates are worth after verifications, against counting in Python."""

import numpy as np
import pytest
import torch
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from tree_kernels import tally as module
from tree_kernels.offers import ORIGINS
from tree_kernels.tally import Tally, count
from verifications import verification


def expected_priors(seed):
    return torch.rand(ORIGINS, generator=torch.Generator().manual_seed(seed))


def counted(expected, verifications):
    tried, hit = [0] * ORIGINS, [0] * ORIGINS
    for each in verifications:
        for tokens, parents, origins, path in zip(*(t.tolist() for t in each), strict=True):
            for node in range(1, len(tokens)):
                if tokens[node] >= 0 and parents[node] in path:
                    tried[origins[node]] += 1
                    hit[origins[node]] += node in path
    weight = np.float32(32)
    priors = [
        float((np.float32(e) * weight + np.float32(h)) / (weight + np.float32(t)))
        for e, h, t in zip(expected.tolist(), hit, tried, strict=True)
    ]
    return [tried, hit, priors]


def lists(tally):
    return [part.tolist() for part in (tally.tried, tally.hit, tally.priors)]


@CASES
@given(st.integers(0, 99), st.lists(st.sampled_from([1, 2, 9, 40]), min_size=1, max_size=3))
def test_each_origin_is_worth_what_it_was(cpu_path, seed, sizes):
    cases = [verification(seed + i, 4, nodes) for i, nodes in enumerate(sizes)]
    expected = expected_priors(seed)
    tally = Tally.of(expected)
    for case in cases:
        count(tally, *case)
    assert lists(tally) == counted(expected, cases)


@pytest.mark.parametrize("nodes", [1, 9, 40])
def test_kernel_counts_the_same(interpreter, nodes):
    cases = [verification(seed, 3, nodes) for seed in range(2)]
    expected = expected_priors(nodes)
    tally = Tally.of(expected)
    for case in cases:
        module._count_triton(tally, *case)
    assert lists(tally) == counted(expected, cases)


def test_priors_go_from_what_was_expected_to_what_is(cpu_path):
    tally = Tally.of(torch.full((ORIGINS,), 0.5))
    tree = [torch.tensor([line], dtype=torch.int32) for line in ([1, 2, 3], [-1, 0, 0], [0, 7, 8])]
    path = torch.tensor([[0, 1]], dtype=torch.int32)
    seen = []
    for _ in range(320):
        count(tally, *tree, path)
        seen.append(tally.priors[[7, 8]].tolist())
    better, worse = zip(*seen, strict=True)
    assert list(better) == sorted(set(better))
    assert list(worse) == sorted(set(worse), reverse=True)
    assert (better[-1], worse[-1]) == pytest.approx((336 / 352, 16 / 352))
    assert tally.priors[0] == 0.5
    tally.reset()
    assert lists(tally) == [[0] * ORIGINS, [0] * ORIGINS, [0.5] * ORIGINS]
    assert tally.expected.tolist() == [0.5] * ORIGINS


def test_what_was_expected_is_not_written_to(cpu_path):
    expected = expected_priors(0)
    tally = Tally.of(expected)
    count(tally, *verification(0, 4, 9))
    assert tally.tried.any()
    assert torch.equal(expected, expected_priors(0))
    assert not torch.equal(tally.priors, expected)


def test_no_trees_count_nothing(cpu_path, interpreter):
    for run in (count, module._count_triton):
        tally = Tally.of(expected_priors(1))
        run(tally, *(part[:0] for part in verification(0, 1, 5)))
        assert lists(tally) == [[0] * ORIGINS, [0] * ORIGINS, tally.expected.tolist()]


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "nodes"), [(1, 61), (64, 61), (3, 256)])
def test_cuda_agrees_with_the_cpu(batch, nodes):
    here, there = Tally.of(expected_priors(0)), Tally.of(expected_priors(0).cuda())
    for seed in range(4):
        case = verification(seed, batch, nodes)
        count(here, *case)
        count(there, *(part.cuda() for part in case))
    assert lists(there) == lists(here)
