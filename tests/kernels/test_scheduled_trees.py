"""Trees laid out in rows scheduled for chains, compared with a loop over requests in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from random_parents import random_trees
from tree_kernels import kept_trees, scheduled_trees
from tree_kernels.kept_trees import keep_trees, next_roots
from tree_kernels.scheduled_trees import Layout, lay_out, node_tokens

STATE_ROWS = 9


def batch(seed, kinds, nodes):
    """A batch whose requests are of these kinds: decoding, at its prompt's end, or in its middle.

    Trees have up to `nodes` draft tokens, and the step schedules fewer columns of some.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    rows = torch.randperm(STATE_ROWS, generator=generator)[: len(kinds)].int()
    kept = torch.full((STATE_ROWS, 1 + nodes), -1, dtype=torch.int32)
    prompts = torch.full((STATE_ROWS,), -7, dtype=torch.int32)
    sizes, lengths, indices, positions = [], [], [], []
    for row, kind in zip(rows.tolist(), kinds, strict=True):
        kept[row] = random_trees(number(0, 999), [1 + nodes], "any")[0][0]
        kept[row, 1 + number(0, nodes) :] = -1
        before = number(0, 3) if kind == "decoding" else number(1, 4)
        size = 1 if kind == "middle" else 1 + number(0, nodes)
        start = number(0, 50)
        length = start + before + size
        prompts[row] = {
            "decoding": length - size - number(0, 1),
            "end": length - size + 1,
            "middle": length + number(1, 5),
        }[kind]
        indices += [len(positions) + before + column for column in range(size)]
        positions += range(start, length)
        sizes.append(size)
        lengths.append(length)
    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    inputs = torch.randint(0, 99, (len(positions),), generator=generator, dtype=torch.int32)
    case = (
        *(rows, ends, torch.tensor(lengths, dtype=torch.int32), prompts, kept),
        *(torch.tensor(indices), torch.tensor(positions)),
    )
    return case, max(sizes), inputs


@st.composite
def batches(draw):
    kinds = draw(st.lists(st.sampled_from(["decoding", "end", "middle"]), min_size=1, max_size=4))
    return batch(draw(st.integers(0, 99)), kinds, draw(st.sampled_from([1, 3, 7, 33])))


def copied(case):
    return [tensor.clone() for tensor in case]


@CASES
@given(batches())
def test_a_layout_is_that_of_each_request(drawn):
    case, width, inputs = drawn
    case = copied(case)
    rows, ends, lengths, prompts, kept, indices, positions = case
    chain = positions.clone()
    layout = lay_out(*case, width)
    before_roots = torch.arange(100, 100 + len(rows))
    tokens = node_tokens(inputs, ends, layout, layout.parents, before_roots)
    assert layout.width == width
    assert layout.requests.tolist() == [*range(len(rows))]
    for request, row in enumerate(rows.tolist()):
        first, last = ends[request : request + 2].tolist()
        size, length, prompt = last - first, int(lengths[request]), int(prompts[row])
        begun = length - size >= prompt
        assert layout.sizes[request] == size
        assert bool(layout.begun[request]) == begun
        assert bool(layout.partial[request]) == (length < prompt)
        assert layout.tree_sizes[request] == (0 if length < prompt else size)
        root = int(chain[indices[first]])
        for column in range(width):
            parent = int(kept[row, column]) if begun and column < size else -1
            is_node = column == 0 or parent >= 0
            assert layout.parents[request, column] == parent
            place = int(indices[first + min(column, size - 1)])
            assert layout.row_of_node[request, column] == first + min(column, size - 1)
            assert layout.place_of_node[request, column] == place
            assert tokens.nodes[request, column] == (inputs[place] if is_node else -1)
            if column >= size:
                assert not layout.masks[request, column].any()
                continue
            path, above = {column}, column
            while (above := int(layout.parents[request, above])) >= 0:
                path.add(above)
            assert positions[place] == root + len(path) - 1
            assert {*layout.masks[request, column].nonzero()[:, 0].tolist()} == path
            assert layout.request_of_row[first + column] == request
            assert tokens.rows[first + column] == inputs[place]
            assert tokens.observed[first + column] == (inputs[place] if is_node else -1)
            known = -1 if length < prompt else 100 + request
            expected = int(tokens.nodes[request, parent]) if parent >= 0 else -1
            assert tokens.previous[first + column] == (expected if column else known)


@CASES
@given(batches())
def test_kernels_give_the_same(interpreter, drawn):
    case, width, inputs = drawn
    ours, theirs = copied(case), copied(case)
    found = Layout.empty(len(case[0]), width, len(case[5]), case[0].device)
    scheduled_trees._lay_out_triton(*ours, found)
    expected = lay_out(*theirs, width)
    for mine, others in zip((*found, *ours), (*expected, *theirs), strict=True):
        assert mine.dtype == others.dtype
        assert mine.tolist() == others.tolist()
    before = torch.arange(100, 100 + len(case[0]))
    arguments = inputs, case[1], expected, expected.parents, before
    for mine, others in zip(
        scheduled_trees._tokens_triton(*arguments), node_tokens(*arguments), strict=True
    ):
        assert mine.dtype == others.dtype
        assert mine.tolist() == others.tolist()


@pytest.mark.parametrize("width", [1, 3, 8])
def test_trees_are_kept_with_tokens_in_every_place(interpreter, width):
    rows, last = torch.tensor([4, 1]), torch.tensor([50, 60], dtype=torch.int32)
    parents, sizes = random_trees(3, [width, max(width - 1, 1)], "any")
    tokens = torch.arange(parents.numel(), dtype=torch.int32).view_as(parents)
    tokens[torch.arange(width) >= sizes[:, None]] = -1
    kept = torch.full((6, 8), 7, dtype=torch.int32)
    mine = kept.clone()
    drafts = keep_trees(kept, rows, tokens, parents, last)
    found = kept_trees._keep_triton(mine, rows, tokens, parents, last)
    assert found.dtype == drafts.dtype == torch.int64
    assert found.tolist() == drafts.tolist()
    assert mine.tolist() == kept.tolist()
    assert kept[[0, 2, 3, 5]].eq(7).all()
    for request, row in enumerate(rows.tolist()):
        for column in range(8):
            given_token = int(tokens[request, column]) if column < width else -1
            parent = int(parents[request, column]) if column < width else -1
            assert kept[row, column] == parent
            if column:
                expected = given_token if given_token >= 0 else last[request]
                assert drafts[request, column - 1] == expected


def test_roots_are_the_last_tokens_of_requests_that_emitted_some(interpreter):
    sampled = torch.tensor([[5], [6], [7]])
    rows, counts = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 3])
    for function in (next_roots, kept_trees._roots_triton):
        last, roots = function(sampled, rows, counts)
        assert last.dtype == roots.dtype == torch.int32
        assert (last.tolist(), roots.tolist()) == ([7, 5], [-1, 5])


def test_memory_can_be_used_again():
    case, width, _ = batch(0, ["decoding", "end"], 3)
    memory = Layout.empty(len(case[0]), width, len(case[5]), case[0].device)
    for kept in (case[4], case[4].clamp(max=0)):
        ours, theirs = ([*copied(case[:4]), kept.clone(), *copied(case[5:])] for _ in range(2))
        found, expected = lay_out(*ours, width, memory), lay_out(*theirs, width)
        assert found is memory
        for mine, others in zip(found, expected, strict=True):
            assert mine.tolist() == others.tolist()


def test_shapes_that_do_not_fit_are_errors():
    case, width, _ = batch(0, ["decoding", "end"], 3)
    with pytest.raises(ValueError, match="memory is for trees"):
        lay_out(*case, width, Layout.empty(2, width, 1, case[0].device))
    with pytest.raises(ValueError, match="2 requests have ends"):
        lay_out(case[0], case[1][:-1], *case[2:], width)
    with pytest.raises(ValueError, match="width=5 must be 1 to 4"):
        lay_out(*case, 5)
    with pytest.raises(ValueError, match="at most 4"):
        keep_trees(case[4], case[0], *torch.zeros(2, 2, 5, dtype=torch.int32), case[0])


@pytest.mark.cuda
@pytest.mark.parametrize("nodes", [1, 15, 63])
def test_cuda_agrees_with_the_cpu(nodes):
    case, width, inputs = batch(1, ["decoding", "end", "middle", "decoding"], nodes)
    ours, theirs = [tensor.cuda() for tensor in case], copied(case)
    found, expected = lay_out(*ours, width), lay_out(*theirs, width)
    for mine, others in zip((*found, *ours), (*expected, *theirs), strict=True):
        assert torch.equal(mine.cpu(), others)
    before = torch.arange(4, dtype=torch.int32)
    on_gpu = node_tokens(inputs.cuda(), ours[1], found, found.parents, before.cuda())
    on_cpu = node_tokens(inputs, theirs[1], expected, expected.parents, before)
    for mine, others in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(mine.cpu(), others)
