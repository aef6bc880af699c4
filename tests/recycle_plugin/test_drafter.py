"""The drafter drafts what the target's logits last said of each token."""

from __future__ import annotations

import torch

from recycle_plugin import RecycleDrafter, RecycleOptions

VOCAB = 37


def logits_for(*best: int) -> torch.Tensor:
    """Logits whose most likely tokens are `best`, in this order."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(best):
        logits[token] = 10.0 - place
    return logits


def make_drafter(**options: object) -> RecycleDrafter:
    return RecycleDrafter(RecycleOptions.model_validate(options), VOCAB, torch.device("cpu"))


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def test_drafts_follow_the_matrix_level_by_level() -> None:
    drafter = make_drafter(tree="branch:2-1", k=2)
    best = drafter.observe(
        ids(5, 6, 7), torch.stack([logits_for(6, 7), logits_for(8, 1), logits_for(9, 2)])
    )
    assert best.tolist() == [6, 8, 9]
    tree = drafter.propose(["a"], ids(5))
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.num_nodes.tolist() == [5]


def test_nothing_is_drafted_below_a_token_never_seen() -> None:
    drafter = make_drafter(tree="branch:2-1", k=2)
    drafter.observe(ids(5, 7), torch.stack([logits_for(6, 7), logits_for(9, 2)]))
    tree = drafter.propose(["a", "b"], ids(5, 11))
    assert tree.num_nodes.tolist() == [4, 1]
    assert tree.tokens[0].tolist()[:4] == [5, 6, 7, 9]
    assert tree.parents[0].tolist()[:4] == [-1, 0, 0, 2]


def test_the_last_of_equal_tokens_wins_and_skipped_rows_write_nothing() -> None:
    drafter = make_drafter(tree="branch:1", k=1)
    drafter.observe(ids(5, 5, -1), torch.stack([logits_for(6), logits_for(7), logits_for(8)]))
    assert drafter.propose(["a"], ids(5)).tokens.tolist() == [[5, 7]]
    assert int((drafter.matrix >= 0).sum()) == 1


def test_a_hot_start_keeps_the_matrix_and_a_cold_one_empties_it() -> None:
    for hot, known in ((True, 2), (False, 1)):
        drafter = make_drafter(tree="branch:1", k=1, hot_start=hot)
        drafter.start(["a"])
        drafter.observe(ids(5), logits_for(6)[None])
        drafter.start(["b"])
        assert drafter.propose(["b"], ids(5)).num_nodes.tolist() == [2]
        drafter.release(["a", "b"])
        drafter.start(["c"])
        assert drafter.propose(["c"], ids(5)).num_nodes.tolist() == [known]
