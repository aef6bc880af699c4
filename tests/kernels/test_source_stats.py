"""Acceptance statistics after verifications, compared with counting in Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import source_stats as module
from tree_kernels.candidates import NUM_SOURCES
from tree_kernels.source_stats import SourceStats, count
from verifications import verification


def expected_priors(seed):
    return torch.rand(NUM_SOURCES, generator=torch.Generator().manual_seed(seed))


def counted(expected, verifications, before=0):
    tried, hit = [before] * NUM_SOURCES, [before] * NUM_SOURCES
    for each in verifications:
        for tokens, parents, sources, path in zip(*(t.tolist() for t in each), strict=True):
            for node in range(1, len(tokens)):
                if tokens[node] >= 0 and parents[node] in path:
                    tried[sources[node]] += 1
                    hit[sources[node]] += node in path
        for source in range(NUM_SOURCES):
            if tried[source] > SourceStats.MOST_TRIED:
                tried[source], hit[source] = tried[source] // 2, hit[source] // 2
    weight = np.float32(32)
    priors = [
        float((np.float32(e) * weight + np.float32(h)) / (weight + np.float32(t)))
        for e, h, t in zip(expected.tolist(), hit, tried, strict=True)
    ]
    return [tried, hit, priors]


def lists(source_stats):
    return [part.tolist() for part in (source_stats.tried, source_stats.hit, source_stats.priors)]


@CASES
@given(st.integers(0, 99), st.lists(st.sampled_from([1, 2, 9, 40]), min_size=1, max_size=3))
def test_priors_follow_the_counts_of_each_source(cpu_path, seed, widths):
    cases = [verification(seed + i, 4, width) for i, width in enumerate(widths)]
    expected = expected_priors(seed)
    source_stats = SourceStats.of(expected)
    for case in cases:
        count(source_stats, *case)
    assert lists(source_stats) == counted(expected, cases)


@pytest.mark.parametrize("parent", [-1, 3])
def test_a_node_without_a_parent_in_the_tree_is_not_counted(cpu_path, interpreter, parent):
    tokens, parents, sources, path = (
        torch.tensor([each], dtype=torch.int32)
        for each in ([5, 6, 7], [-1, 0, parent], [0, 1, 2], [0, 1, -1])
    )
    slots = torch.zeros(1, dtype=torch.int64)
    for run in (count, module._count_triton):
        source_stats = SourceStats.of(expected_priors(0))
        run(source_stats, tokens, parents, sources, path, slots)
        assert source_stats.tried.nonzero().flatten().tolist() == [1]
        assert source_stats.hit.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("width", [1, 9, 40])
def test_kernel_counts_the_same(interpreter, width):
    cases = [verification(seed, 3, width) for seed in range(2)]
    expected = expected_priors(width)
    source_stats = SourceStats.of(expected)
    for case in cases:
        module._count_triton(source_stats, *case)
    assert lists(source_stats) == counted(expected, cases)


def test_counts_of_sources_that_were_tried_often_are_halved(cpu_path, interpreter):
    cases = [verification(seed, 3, 40) for seed in range(4)]
    expected = expected_priors(5)
    before = SourceStats.MOST_TRIED - 3
    for run in (count, module._count_triton):
        source_stats = SourceStats.of(expected)
        source_stats.tried.fill_(before)
        source_stats.hit.fill_(before)
        source_stats.refresh()
        for case in cases:
            run(source_stats, *case)
        assert lists(source_stats) == counted(expected, cases, before)
        halved = source_stats.tried < before
        assert 0 < halved.sum() < NUM_SOURCES
        assert (source_stats.hit[halved] <= source_stats.tried[halved]).all()


def test_sources_are_found_by_slot(cpu_path, interpreter):
    tokens, parents, sources, path = verification(3, 3, 9)
    slots = torch.tensor([4, 0, 2])
    kept = torch.zeros(6, sources.shape[1], dtype=torch.int32)
    kept[slots] = sources
    for run in (count, module._count_triton):
        source_stats = SourceStats.of(expected_priors(3))
        run(source_stats, tokens, parents, kept, path, slots)
        assert lists(source_stats) == counted(
            expected_priors(3), [(tokens, parents, sources, path)]
        )


def test_priors_go_from_the_expected_to_the_measured_probability(cpu_path):
    source_stats = SourceStats.of(torch.full((NUM_SOURCES,), 0.5))
    tree = [torch.tensor([line], dtype=torch.int32) for line in ([1, 2, 3], [-1, 0, 0], [0, 7, 8])]
    path = torch.tensor([[0, 1]], dtype=torch.int32)
    seen = []
    for _ in range(320):
        count(source_stats, *tree, path)
        seen.append(source_stats.priors[[7, 8]].tolist())
    better, worse = zip(*seen, strict=True)
    assert list(better) == sorted(set(better))
    assert list(worse) == sorted(set(worse), reverse=True)
    assert (better[-1], worse[-1]) == pytest.approx((336 / 352, 16 / 352))
    assert source_stats.priors[0] == 0.5
    source_stats.reset()
    assert lists(source_stats) == [[0] * NUM_SOURCES, [0] * NUM_SOURCES, [0.5] * NUM_SOURCES]
    assert source_stats.expected.tolist() == [0.5] * NUM_SOURCES


def test_the_expected_probability_stays_unchanged(cpu_path):
    expected = expected_priors(0)
    source_stats = SourceStats.of(expected)
    count(source_stats, *verification(0, 4, 9))
    assert source_stats.tried.any()
    assert torch.equal(expected, expected_priors(0))
    assert not torch.equal(source_stats.priors, expected)


def test_an_empty_batch_counts_nothing(cpu_path, interpreter):
    for run in (count, module._count_triton):
        source_stats = SourceStats.of(expected_priors(1))
        run(source_stats, *(part[:0] for part in verification(0, 1, 5)))
        assert lists(source_stats) == [
            [0] * NUM_SOURCES,
            [0] * NUM_SOURCES,
            source_stats.expected.tolist(),
        ]


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "width"), [(1, 61), (64, 61), (3, 256)])
def test_cuda_agrees_with_the_cpu(batch, width):
    here, there = SourceStats.of(expected_priors(0)), SourceStats.of(expected_priors(0).cuda())
    for seed in range(4):
        case = verification(seed, batch, width)
        count(here, *case)
        count(there, *(part.cuda() for part in case))
    assert lists(there) == lists(here)
