"""Recursive rejection sampling: the token that follows a node is distributed as the target.

The tests measure the distribution of `reject_step` and do not repeat its formulas: the result is a
step function of each coin, so bisection finds each probability to about 1e-7.
"""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import rejection
from tree_kernels.rejection import reject_step

ROUNDS = 26


def ask(q, p, children, coins):
    """The results of `reject_step` for each row of coins."""
    rows = torch.zeros(len(coins), dtype=torch.int64)
    given = torch.tensor([children] * len(coins), dtype=torch.int32).view(len(coins), -1)
    return reject_step(q[None], p[None], rows, rows, given, coins.float())


def threshold(answer):
    """The coin at which `answer(coin)` changes from true to false."""
    low, high = 0.0, 1.0
    if not answer(high - 2**-24):
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if answer(middle) else (low, middle)
        return low
    return 1.0


def law(q, p, children):
    """The distribution of the token after a node with these children."""
    found = torch.zeros(len(q), dtype=torch.float64)
    reaching = 1.0
    refused = []
    for place, token in enumerate(children):

        def accepted(coin, place=place):
            coins = torch.tensor([[*refused, coin] + [0.0] * (len(children) - place)])
            return int(ask(q, p, children, coins)[0]) == place

        rate = threshold(accepted)
        found[token] += reaching * rate
        reaching *= 1 - rate
        refused.append(1 - 2**-24)
        if rate == 1.0:
            return found
    below = 0.0
    for token in range(len(q)):

        def at_most(coin, token=token):
            coins = torch.tensor([[*refused, coin]])
            return int(ask(q, p, children, coins)[1]) <= token

        share = threshold(at_most)
        found[token] += reaching * (share - below)
        below = share
    return found


def orders(p, count):
    """All draws of `count` tokens without replacement, in order, with their probabilities."""
    possible = [token for token in range(len(p)) if p[token] > 0]
    for order in permutations(possible, min(count, len(possible))):
        probability, left = 1.0, 1.0
        for token in order:
            probability *= float(p[token]) / left
            left -= float(p[token])
        yield list(order), probability


def normed(weights):
    return torch.tensor(weights, dtype=torch.float32) / sum(weights)


weights = st.lists(st.sampled_from([0, 1, 1, 2, 5, 40]), min_size=4, max_size=4).filter(any)


@CASES
@given(weights, weights, st.integers(1, 3))
def test_the_token_is_distributed_as_the_target(cpu_path, first, second, count):
    q, p = normed(first), normed(second)
    found = sum(
        probability * law(q, p, children) for children, probability in orders(p.double(), count)
    )
    assert torch.allclose(found, q.double(), atol=2e-6)


def test_another_order_of_children_changes_the_distribution():
    """Control: children in token order instead of sampling order."""
    q, p = normed([5, 1, 2, 2]), normed([1, 2, 40, 5])
    found = sum(
        probability * law(q, p, sorted(children)) for children, probability in orders(p.double(), 2)
    )
    assert not torch.allclose(found, q.double(), atol=1e-2)


@CASES
@given(weights, weights)
def test_one_child_is_ordinary_speculative_sampling(cpu_path, first, second):
    q, p = normed(first), normed(second)
    rate = 0.0
    for children, probability in orders(p.double(), 1):

        def accepted(coin, children=children):
            return int(ask(q, p, children, torch.tensor([[coin, 0.0]]))[0]) == 0

        rate += probability * threshold(accepted)
    assert rate == pytest.approx(float(torch.minimum(q, p).sum()), abs=1e-6)


@CASES
@given(st.integers(0, 64), st.integers(1, 63), st.floats(0, 0.999), st.floats(0, 0.999))
def test_with_two_tokens_one_of_two_children_is_always_accepted(cpu_path, a, b, first, second):
    q, p = torch.tensor([a / 64, 1 - a / 64]), torch.tensor([b / 64, 1 - b / 64])
    for children in ([0, 1], [1, 0]):
        accepted, token = ask(q, p, children, torch.tensor([[first, second, 0.5]]))
        assert int(accepted) >= 0
        assert int(token) == children[int(accepted)]


@pytest.mark.parametrize("winner", range(3))
def test_without_a_draft_distribution_a_one_hot_target_takes_its_token(cpu_path, winner):
    """Verification of greedy requests, whose children are not sampled."""
    q = torch.zeros(3)
    q[winner] = 1.0
    coins = torch.tensor([[0.999, 0.999, 0.5]])
    accepted, token = ask(q, torch.zeros(3), [2, 0], coins)
    assert int(token) == winner
    assert int(accepted) == {2: 0, 0: 1, 1: -1}[winner]


def random_case(seed, requests=5, vocab=37, num_children=3):
    generator = torch.Generator().manual_seed(seed)
    q, p = (
        torch.softmax(3 * torch.randn(requests + 2, vocab, generator=generator), 1)
        for _ in range(2)
    )
    target_rows = torch.randint(0, len(q), (requests,), generator=generator)
    draft_rows = torch.randint(-1, len(p), (requests,), generator=generator)
    children = torch.stack(
        [torch.randperm(vocab, generator=generator)[:num_children] for _ in range(requests)]
    ).int()
    lengths = torch.randint(0, num_children + 1, (requests, 1), generator=generator)
    children[torch.arange(num_children) >= lengths] = -1
    coins = torch.rand(requests, num_children + 1, generator=generator)
    return q, p, target_rows, draft_rows, children, coins


def filtered_case(seed, kept, requests=4, vocab=3001, num_children=4):
    """Distributions in which only `kept` tokens of a row have mass, as after top-k."""
    q, p, target_rows, draft_rows, _, coins = random_case(seed, requests, vocab, num_children)
    q, p = (torch.zeros_like(x).scatter(1, *reversed(x.topk(kept))) for x in (q, p))
    q, p = (x / x.sum(1, keepdim=True) for x in (q, p))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(p[draft_rows.clamp(min=0)], num_children, generator=generator)
    return q, p, target_rows, draft_rows, drawn.int(), coins


def test_a_one_hot_target_takes_its_token_after_other_targets(cpu_path):
    """Greedy requests among sampled ones: what a request leaves behind reaches no other."""
    vocab, children = 3000, [2, 1000, 2000, 300]
    first = torch.zeros(2, vocab)
    first[0], first[1, 5] = 1 / vocab, 1.0
    # Rejecting token 5 leaves all others with mass.
    accepted, _ = ask(*first, [5], torch.tensor([[0.5, 0.5]]))
    assert int(accepted) == -1
    one_hot = torch.zeros(vocab)
    one_hot[700] = 1.0
    coins = torch.full((1, 5), 1 - 2**-24)
    accepted, token = ask(one_hot, torch.zeros(vocab), children, coins)
    assert (int(accepted), int(token)) == (-1, 700)


@CASES
@given(st.integers(0, 10**6), st.sampled_from([4, 40, 2500]))
def test_cpp_gives_the_same_as_the_reference(seed, kept):
    for case in (random_case(seed), filtered_case(seed, kept)):
        expected = rejection._reject_reference(*case)
        for ours, other in zip(rejection._reject_cpp(*case), expected, strict=True):
            assert ours.dtype == other.dtype
            assert ours.tolist() == other.tolist()


def test_a_target_equal_to_the_draft_accepts_even_what_rounding_rejects(cpu_path):
    q = torch.tensor([0.25, 0.75])
    accepted, token = ask(q, q, [1], torch.tensor([[1.0, 0.5]]))
    assert (int(accepted), int(token)) == (0, 1)


def test_coins_at_their_ends_draw_the_first_and_the_last_token_with_mass(cpu_path):
    q, p = torch.zeros(2, 700)
    q[[3, 300, 650]] = torch.tensor([0.1, 0.3, 0.6])
    p[5] = 1.0
    for coin, expected in ((0.0, 3), (0.2, 300), (1.0 - 2**-24, 650), (1.0, 650)):
        accepted, token = ask(q, p, [5], torch.tensor([[0.0, coin]]))
        assert (int(accepted), int(token)) == (-1, expected)


@pytest.mark.parametrize("num_children", [0, 2])
def test_without_any_draft_distribution_the_target_is_sampled(cpu_path, num_children):
    q = torch.tensor([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]])
    rows, without = torch.tensor([0, 1, 0]), torch.full((3,), -1)
    children = torch.full((3, num_children), -1, dtype=torch.int32)
    coins = torch.zeros(3, num_children + 1)
    coins[:, -1] = torch.tensor([0.2, 0.9, 0.3])
    accepted, tokens = reject_step(q, torch.zeros(0, 3), rows, without, children, coins)
    assert accepted.tolist() == [-1, -1, -1]
    assert tokens.tolist() == [0, 0, 2]


def test_an_empty_batch_gives_no_tokens(cpu_path):
    q, p, rows, _, children, coins = random_case(0)
    none = rows[:0]
    accepted, tokens = reject_step(q, p, none, none, children[:0], coins[:0])
    assert accepted.shape == tokens.shape == (0,)


def test_a_request_gets_the_same_alone_and_in_a_batch(cpu_path):
    case = filtered_case(3, 40, requests=8)
    accepted, tokens = reject_step(*case)
    for row in range(8):
        alone = reject_step(*case[:2], *(tensor[row : row + 1] for tensor in case[2:]))
        assert [int(each) for each in alone] == [int(accepted[row]), int(tokens[row])]


@pytest.fixture(params=["one share", "several shares"])
def shares(request, monkeypatch):
    """Let kernels read tens of tokens in one share, or in several."""
    if request.param == "several shares":
        monkeypatch.setattr(rejection, "_BLOCK", 4)


def assert_the_kernel_gives_the_same(case):
    found = rejection._reject_triton(*case)
    for mine, theirs in zip(found, reject_step(*case), strict=True):
        assert mine.tolist() == theirs.tolist()
    return found


NO_MASS = pytest.mark.parametrize("weight", [0.0, torch.nan])
CHILDREN = pytest.mark.parametrize("num_children", [0, 1, 3])


def case_without_mass(weight, num_children):
    """A target that allows no token, alone and beside another."""
    q, p, _, _, _, coins = random_case(7)
    q[0] = weight
    rows = torch.tensor([0, 1, 0])
    children = torch.tensor([[5, 0, 9]] * 3, dtype=torch.int32)[:, :num_children]
    return q, p, rows, rows, children, coins[:3, : num_children + 1]


@NO_MASS
@CHILDREN
def test_a_target_without_mass_accepts_no_child(cpu_path, weight, num_children):
    case = case_without_mass(weight, num_children)
    accepted, tokens = reject_step(*case)
    assert accepted[[0, 2]].tolist() == [-1, -1]
    assert tokens[[0, 2]].tolist() == [0, 0]
    alone = reject_step(*case[:2], *(each[1:2] for each in case[2:]))
    assert [int(each) for each in alone] == [int(accepted[1]), int(tokens[1])]


@NO_MASS
@CHILDREN
def test_the_kernel_accepts_no_child_of_a_target_without_mass(
    interpreter, shares, weight, num_children
):
    assert_the_kernel_gives_the_same(case_without_mass(weight, num_children))


@CASES
@given(st.integers(0, 10**6))
def test_the_kernel_gives_the_same(interpreter, shares, seed):
    assert_the_kernel_gives_the_same(random_case(seed))


def test_the_kernel_tries_all_children_and_draws_from_all_shares(interpreter, shares):
    requests, vocab = 60, 71
    generator = torch.Generator().manual_seed(5)
    logits, noise = 2 * torch.randn(2, requests, vocab, generator=generator)
    q, p = logits.softmax(1), (logits + noise).softmax(1)
    children = torch.multinomial(p, 4, generator=generator).int()
    coins, rows = torch.rand(requests, 5, generator=generator), torch.arange(requests)
    accepted, tokens = assert_the_kernel_gives_the_same((q, p, rows, rows, children, coins))
    assert {*accepted.tolist()} == {-1, 0, 1, 2, 3}
    assert len({token // 8 for token in tokens[accepted < 0].tolist()}) > 1


def test_the_kernel_draws_at_the_ends_of_coins(interpreter, shares):
    q, p = torch.zeros(2, 90)
    q[[3, 30, 65]] = torch.tensor([0.1, 0.3, 0.6])
    p[5] = 1.0
    coins = torch.tensor([[0.0, coin] for coin in (0.0, 0.2, 1.0 - 2**-24, 1.0)])
    rows, children = torch.zeros(4, dtype=torch.int64), torch.full((4, 1), 5, dtype=torch.int32)
    accepted, tokens = rejection._reject_triton(q[None], p[None], rows, rows, children, coins)
    assert accepted.tolist() == [-1] * 4
    assert tokens.tolist() == [3, 30, 65, 65]


def test_the_kernel_accepts_what_rounding_rejects(interpreter, shares):
    q = torch.full((40,), 1 / 40)
    rows, children = torch.zeros(1, dtype=torch.int64), torch.tensor([[7, 9]], dtype=torch.int32)
    coins = torch.tensor([[1.0, 0.0, 0.5]])
    accepted, tokens = rejection._reject_triton(q[None], q[None], rows, rows, children, coins)
    assert (accepted.tolist(), tokens.tolist()) == ([0], [7])


@pytest.mark.parametrize("num_children", [0, 2])
def test_the_kernel_samples_the_target_without_any_draft(interpreter, shares, num_children):
    q = normed([1, 0, 2, 0, 3, 4])[None]
    rows, without = torch.zeros(5, dtype=torch.int64), torch.full((5,), -1)
    children = torch.full((5, num_children), -1, dtype=torch.int32)
    coins = torch.linspace(0.05, 0.95, 5)[:, None].repeat(1, num_children + 1)
    given = q, torch.zeros(0, 6), rows, without, children, coins
    assert_the_kernel_gives_the_same(given)


def test_shapes_that_do_not_fit_are_errors():
    case = random_case(0)
    with pytest.raises(ValueError, match="expected"):
        reject_step(*case[:5], case[5][:, 1:])


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "vocab"), [(1, 512), (8, 49152), (64, 151936)])
def test_cuda_agrees_with_the_cpu(requests, vocab):
    case = random_case(0, requests, vocab, 5)
    found = reject_step(*(tensor.cuda() for tensor in case))
    for mine, theirs in zip(found, reject_step(*case), strict=True):
        assert (mine.cpu() == theirs).float().mean() > 0.98
