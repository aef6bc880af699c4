"""The flat mask of a batch, compared with writing it row by row in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import full_mask as module
from tree_kernels.full_mask import full_mask


def random_case(seed, contexts, width):
    generator = torch.Generator().manual_seed(seed)
    masks = torch.rand(len(contexts), width, width, generator=generator) < 0.5
    size = width * (sum(contexts) + width * len(contexts))
    return masks, torch.tensor(contexts), size


@st.composite
def cases(draw):
    contexts = draw(st.lists(st.integers(0, 40) | st.just(1500), min_size=1, max_size=4))
    return random_case(draw(st.integers(0, 99)), contexts, draw(st.integers(1, 35)))


def by_hand(masks, contexts, _):
    return [
        seen
        for mask, context in zip(masks.tolist(), contexts.tolist(), strict=True)
        for row in mask
        for seen in [True] * context + row
    ]


@CASES
@given(cases())
def test_rows_see_their_context_and_their_tree(case):
    found = full_mask(*case)
    assert found.dtype == torch.bool
    assert found.tolist() == by_hand(*case)


@CASES
@given(cases())
def test_the_kernel_gives_the_same(interpreter, case):
    assert torch.equal(module._full_mask_triton(*case), full_mask(*case))


def test_shapes_that_do_not_fit_are_errors():
    masks, contexts, size = random_case(0, [3, 4], 5)
    with pytest.raises(ValueError, match="must be"):
        full_mask(masks, contexts[:1], size)
    with pytest.raises(ValueError, match="must be"):
        full_mask(masks[:, :4], contexts, size)


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "width"), [(1, 16), (8, 81), (64, 81)])
def test_cuda_agrees_with_the_cpu(requests, width):
    masks, contexts, size = random_case(0, [37 * i % 4000 for i in range(requests)], width)
    assert torch.equal(
        full_mask(masks.cuda(), contexts.cuda(), size).cpu(), full_mask(masks, contexts, size)
    )
