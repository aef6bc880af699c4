"""Traversal verification of batches of trees: C++ and Triton choose as the reference does.

That the reference's rule leaves the target's distribution is proved by enumeration in
`tests/rsd_plugin/test_verification.py`.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import traversal
from tree_kernels.traversal import traverse_trees

KINDS = ("random", "filtered", "ties", "disjoint", "equal", "not sampled")


def distributions(kind, count, vocab, generator):
    """The target's and the draft model's distributions after some nodes, `[count, V]` each."""
    q, p = (2 * torch.randn(count, vocab, generator=generator) for _ in range(2))
    p = q + p / 2
    if kind == "filtered":
        q, p = (
            torch.full_like(x, -torch.inf).scatter(1, *reversed(x.topk(min(5, vocab))))
            for x in (q, p)
        )
    elif kind == "ties":
        q, p = q.round().clamp(0, 1), p.round().clamp(0, 1)
    elif kind == "disjoint":
        low = torch.arange(vocab) < vocab // 2
        q, p = q.masked_fill(low, -torch.inf), p.masked_fill(~low, -torch.inf)
    elif kind == "equal":
        p = q
    q, p = q.softmax(1), p.softmax(1)
    if kind == "not sampled":
        q = torch.nn.functional.one_hot(q.argmax(1), vocab).float()
    return q, p


def batch(seed, requests=6, width=9, vocab=37):
    """Trees of different shapes, sampled and not, with free columns among and after the nodes."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    tokens = torch.full((requests, width), -1, dtype=torch.int32)
    parents = tokens.clone()
    q, p = torch.zeros(2, requests, width, vocab)
    for row in range(requests):
        kind = KINDS[drawn(0, len(KINDS))]
        q[row], p[row] = distributions(kind, width, vocab, generator)
        size = drawn(1, width + 1)
        above = sorted(drawn(0, column) for column in range(1, size))
        tokens[row, 0] = drawn(0, vocab)
        for node in range(size):
            columns = [column for column, parent in enumerate(above, 1) if parent == node]
            if not columns:
                continue
            # Beyond what can be drawn, tokens that the draft model excludes.
            weights = p[row, node] + 1e-30
            order = (weights / torch.empty(vocab).exponential_(generator=generator)).argsort(
                descending=True
            )
            if kind == "not sampled":
                order = p[row, node].argsort(descending=True)
            for column, token in zip(columns, order.tolist(), strict=False):
                parents[row, column], tokens[row, column] = node, token
        if kind == "not sampled":
            p[row] = 0.0
    missing = (tokens < 0) & (torch.arange(width) > 0)
    for row, column in missing.nonzero().tolist():
        # Nodes below a missing one are missing too.
        tokens[row][parents[row] == column] = -1
    parents[tokens < 0] = -1
    shuffled = torch.randperm(requests * width, generator=generator).view(requests, width)
    target, draft = torch.empty(2, requests * width, vocab)
    target[shuffled], draft[shuffled] = q, p
    coins = torch.rand(requests, width, generator=generator)
    return target, draft, shuffled, shuffled.clone(), tokens, parents, coins


def run(implementation, case):
    """The result; the target's rows may be overwritten."""
    return implementation(case[0].clone(), *case[1:])


@CASES
@given(st.integers(0, 10**6), st.sampled_from([(5, 4), (37, 9), (700, 16)]))
def test_cpp_gives_the_same_as_the_reference(seed, sizes):
    vocab, width = sizes
    case = batch(seed, width=width, vocab=vocab)
    expected = run(traversal._traverse_reference, case)
    assert run(traversal._traverse_cpp, case).tolist() == expected.tolist()


@CASES
@given(st.integers(0, 10**6), st.sampled_from([4, 9]))
def test_the_kernel_gives_the_same(interpreter, seed, width):
    case = batch(seed, requests=3, width=width, vocab=23)
    expected = run(traversal._traverse_reference, case)
    assert run(traversal._traverse_triton, case).tolist() == expected.tolist()


def test_the_kernel_reads_more_than_one_block(interpreter):
    case = batch(3, requests=2, width=5, vocab=5000)
    expected = run(traversal._traverse_reference, case)
    assert run(traversal._traverse_triton, case).tolist() == expected.tolist()


def test_batches_end_in_all_ways():
    """Roots, inner nodes and leaves are accepted, first children and later ones."""
    lengths, later = set(), 0
    for seed in range(40):
        case = batch(seed)
        tokens, parents = case[4:6]
        found = traverse_trees(*case)
        for row in range(len(found)):
            node, length = 0, 1
            while True:
                below = (parents[row] == node) & (tokens[row] == found[row, node])
                columns = below.nonzero()[:, 0].tolist()
                if not columns:
                    break
                siblings = ((parents[row] == node) & (tokens[row] >= 0)).nonzero()[:, 0]
                later += columns[0] != int(siblings[0])
                node, length = columns[0], length + 1
            assert int((found[row] >= 0).sum()) == length
            lengths.add(length)
    assert {1, 2, 3, 4} <= lengths
    assert later > 10


@CASES
@given(st.integers(0, 10**6))
def test_requests_that_are_not_sampled_follow_the_likeliest_tokens(cpu_path, seed):
    vocab = 12
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(0, 3, (7,), generator=generator)
    target = torch.nn.functional.one_hot(best, vocab).float()
    tokens = torch.tensor([[5, 1, 0, 2, 0, 1, 2]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 0, 1, 1, 2]], dtype=torch.int32)
    rows = torch.arange(7)[None]
    coins = torch.rand(1, 7, generator=generator)
    found = traverse_trees(target, torch.zeros(7, vocab), rows, rows, tokens, parents, coins)
    expected, node = [-1] * 7, 0
    while node >= 0:
        expected[node] = int(best[node])
        below = (parents[0] == node) & (tokens[0] == int(best[node]))
        node = int(below.int().argmax()) if below.any() else -1
    assert found.tolist() == [expected]


def test_a_request_gets_the_same_alone_and_in_a_batch(cpu_path):
    case = batch(11, requests=8)
    together = run(traverse_trees, case)
    for row in range(8):
        alone = run(traverse_trees, (*case[:2], *(each[row : row + 1] for each in case[2:])))
        assert alone.tolist() == together[row : row + 1].tolist()


def test_a_target_equal_to_the_draft_accepts_the_first_leaf(cpu_path):
    """Weights are 1 to the end, even for a coin at its end."""
    q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    tokens = torch.tensor([[0, 1, 0]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    rows = torch.arange(3)[None]
    found = traverse_trees(
        q.clone(), q, rows, rows, tokens, parents, torch.full((1, 3), 1 - 2**-24)
    )
    assert found.tolist() == [[1, 0, 0]]


def test_nodes_without_a_row_have_no_children(cpu_path):
    case = batch(5, requests=4)
    without = torch.full_like(case[3], -1)
    found = traverse_trees(case[0].clone(), case[1], case[2], without, *case[4:])
    assert bool((found[:, 1:] == -1).all())
    roots = traverse_trees(*case[:2], *(each[:, :1] for each in case[2:]))
    assert found[:, :1].tolist() == roots.tolist()


IMPLEMENTATIONS = ("_traverse_reference", "_traverse_cpp", "_traverse_triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("weight", [0.0, torch.nan])
def test_a_target_without_mass_accepts_no_child(interpreter, implementation, weight):
    """The first request's root, the second's inner node, and the third's root without children."""
    target = torch.full((9, 4), 0.25)
    draft = target.clone()
    target[[0, 4, 6]] = weight
    rows = torch.arange(9).view(3, 3)
    tokens = torch.tensor([[0, 0, 1], [0, 2, 0], [0, -1, -1]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, -1, -1]], dtype=torch.int32)
    case = target, draft, rows, rows, tokens, parents, torch.full((3, 3), 0.5)
    found = run(getattr(traversal, implementation), case)
    assert found.tolist() == [[2, -1, -1], [2, 1, -1], [0, -1, -1]]


def test_an_empty_batch_gives_nothing(cpu_path):
    case = batch(0)
    assert traverse_trees(*case[:2], *(each[:0] for each in case[2:])).shape == (0, 9)


def test_shapes_that_do_not_fit_are_errors():
    case = batch(0)
    with pytest.raises(ValueError, match="expected"):
        traverse_trees(*case[:6], case[6][:, 1:])
    with pytest.raises(ValueError, match="contiguous"):
        traverse_trees(case[0].t().contiguous().t(), *case[1:])


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "vocab"), [(1, 512), (8, 49152), (64, 32000)])
def test_cuda_agrees_with_the_cpu(requests, vocab):
    case = batch(0, requests, 16, vocab)
    found = traverse_trees(*(each.cuda() for each in case))
    assert (found.cpu() == run(traverse_trees, case)).all(1).float().mean() > 0.9
