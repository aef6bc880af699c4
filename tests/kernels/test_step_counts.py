"""The counters of a step, compared with counting in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import step_counts as module
from tree_kernels.step_counts import COUNTS, count_step
from verifications import verification


def step(seed, batch, width):
    tokens, parents, _, path = verification(seed, batch, width)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, generator=generator) < 0.7, tokens, parents, path


def counted(which, tokens, parents, path):
    sums = dict.fromkeys(COUNTS, 0)
    for counts, *row in zip(*(t.tolist() for t in (which, tokens, parents, path)), strict=True):
        if not counts:
            continue
        line, above, accepted = row
        accepted = [node for node in accepted if node >= 0]
        drafts = sum(token >= 0 for token in line) - 1
        sums["steps"] += 1
        sums["emitted"] += len(accepted)
        sums["drafted_steps"] += drafts > 0
        sums["draft_tokens"] += drafts
        sums["accepted_tokens"] += len(accepted) - 1
        for depth, node in enumerate(accepted):
            siblings = [other for other, parent in enumerate(above) if parent == above[node]]
            sums["non_first_child_accepted"] += depth > 0 and node != siblings[0]
            sums["kv_rows_moved"] += node != depth
    return list(sums.values())


@CASES
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 40))
def test_sums_are_those_of_counting_by_hand(cpu_path, seed, batch, width):
    given_ = step(seed, batch, width)
    sums = torch.arange(7)
    count_step(sums, *given_)
    assert (sums - torch.arange(7)).tolist() == counted(*given_)


@CASES
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 40))
def test_kernel_counts_the_same(interpreter, seed, batch, width):
    given_ = step(seed, batch, width)
    sums = torch.arange(7)
    module._count_triton(sums, *given_)
    assert (sums - torch.arange(7)).tolist() == counted(*given_)


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "width"), [(1, 81), (64, 81), (3, 16)])
def test_cuda_agrees_with_the_cpu(batch, width):
    given_ = step(1, batch, width)
    sums = torch.zeros(7, dtype=torch.int64)
    on_device = sums.cuda()
    count_step(on_device, *(tensor.cuda() for tensor in given_))
    count_step(sums, *given_)
    assert torch.equal(on_device.cpu(), sums)
