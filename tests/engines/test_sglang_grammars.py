"""SGLang's grammars, followed along the paths of trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structured_answers import LETTERS, PATTERN, tokens_of
from tiny_models import add_byte_tokenizer

from drafttree.grammar import fill_masks, sole_token
from drafttree.tree import DraftTree, Verified

VOCABULARY = 512


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's grammar of `PATTERN`."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(add_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    return XGrammarGrammarBackend(tokenizer, VOCABULARY, [1]).dispatch_regex(PATTERN)


def some_tree(seed: int, tokens: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree, most of whose paths begin as `tokens` do."""
    draw = random.Random(seed)
    depths, chosen, parents = [0], [0], [-1]
    while len(chosen) < size:
        is_trunk = len(chosen) < 5
        parent = len(chosen) - (1 if is_trunk else draw.randint(1, 3))
        depth = depths[parent]
        token = tokens[depth] if is_trunk or draw.random() < 0.8 else draw.choice(tokens)
        chosen.append(token)
        parents.append(parent)
        depths.append(min(depth + 1, len(tokens) - 1))
    return chosen, parents


THINK_END = 300
ANSWER = tokens_of("abba-123")


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_matcher_follows_each_path(seed: int, thinks: bool, grammar: Any) -> None:
    """Each node's mask is that of a grammar that has read the node's path alone."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

    from drafttree.sglang.grammars import RequestMatcher

    ours, reads = grammar.copy(), grammar.copy()
    text = ANSWER
    if thinks:
        ours, reads = (ReasonerGrammarObject(each, [THINK_END]) for each in (ours, reads))
        for each in (ours, reads):
            each.maybe_init_reasoning(True)
        text = [7, 8, THINK_END, *ANSWER]
    tokens, parents = some_tree(seed, text, 24)
    masks = ours.allocate_vocab_mask(VOCABULARY, len(tokens), "cpu")
    allowed = fill_masks(RequestMatcher(ours), tokens, parents, masks)
    assert allowed >= 4
    for node in range(len(tokens)):
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        alone = reads.copy()
        expected = reads.allocate_vocab_mask(VOCABULARY, 1, "cpu")
        try:
            for token in path:
                alone.accept_token(token)
        except ValueError:
            pass
        else:
            alone.fill_vocab_mask(expected, 0)
        assert torch.equal(masks[node], expected[0])


def test_texts_that_end_inside_a_character(tmp_path: Path) -> None:
    """Both words begin with the same byte, of which no text can be made."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from transformers import AutoTokenizer

    from drafttree.grammar import JumpForwardTokenizer, bind_tree
    from drafttree.sglang.grammars import RequestMatcher

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    folder = add_byte_tokenizer(tmp_path, VOCABULARY, merges=[*LETTERS, ("k", "e")])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = XGrammarGrammarBackend(tokenizer, VOCABULARY, [1])
    key, byte = tokenizer("key")["input_ids"], tokenizer.convert_tokens_to_ids("Ð")
    for tree in ([0], [-1]), ([0, *key, byte], [-1, 0, 1, 2]):
        ours = backend.dispatch_regex("key(да|нет)")
        matcher = RequestMatcher(ours, JumpForwardTokenizer(tokenizer))
        masks = ours.allocate_vocab_mask(VOCABULARY, 16, "cpu")
        bound = bind_tree(*(matcher, *tree, masks), most_proposed=9, most=9, max_depth=9)
        assert bound.tokens[1 : 1 + len(key)] == key
        assert (byte in bound.tokens) == (byte in tree[0])


class CountedCopies(list[int]):
    """A text that counts how often a part of it is copied."""

    copies = 0

    def __getitem__(self, at: Any) -> Any:
        type(self).copies += isinstance(at, slice)
        found = super().__getitem__(at)
        return CountedCopies(found) if isinstance(at, slice) else found


def test_an_answer_is_not_copied_for_each_token(grammar: Any) -> None:
    from drafttree.sglang.grammars import RequestMatcher

    ours = grammar.copy()
    ours.accepted_tokens = CountedCopies()
    tokens, parents = [0, *ANSWER], [*range(-1, len(ANSWER))]
    masks = ours.allocate_vocab_mask(VOCABULARY, len(tokens), "cpu")
    assert fill_masks(RequestMatcher(ours), tokens, parents, masks) > 5
    assert CountedCopies.copies == 1


def test_a_token_that_ends_a_grammar_is_not_drafted(grammar: Any) -> None:
    from drafttree.sglang.grammars import RequestMatcher

    ours = grammar.copy()
    matcher = RequestMatcher(ours)
    words = tokens_of("abba-123 red")
    assert all(map(matcher.accept, words))
    masks = ours.allocate_vocab_mask(VOCABULARY, 2, "cpu")
    matcher.fill(masks, 0)
    assert sole_token(masks[0].numpy()) == 1
    assert not matcher.accept(1)
    matcher.fill(masks, 1)
    assert torch.equal(masks[0], masks[1])
    matcher.rollback(len(words))
    assert not ours.accepted_tokens


def test_an_outcome_tells_what_grammars_add(grammar: Any) -> None:
    """Of two forced tokens the first one was proposed too; the other request has no grammar."""
    from drafttree.sglang.grammars import bind_trees

    bound, free = SimpleNamespace(grammar=grammar.copy()), SimpleNamespace(grammar=None)
    words = tokens_of("abba-123 red")
    for token in words[:-2]:
        bound.grammar.accept_token(token)
    roots = [words[-3], 7]
    tokens = torch.tensor([[roots[0], words[-2]], [roots[1], 8]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32)
    trees = DraftTree(tokens, parents, torch.tensor([2, 2], dtype=torch.int32))
    most = torch.tensor([1, 1], dtype=torch.int32)
    step = bind_trees([bound, free], trees, most, [5, 5], 3, VOCABULARY, None, chains=False)
    assert step.trees.tokens.tolist() == [[*words[-3:], -1], [*roots[1:], 8, -1, -1]]
    path = torch.tensor([[0, 1, 2], [0, 1, -1]], dtype=torch.int32)
    emitted = torch.tensor([[*words[-2:], 1], [8, 9, -1]], dtype=torch.int32)
    verified = Verified(path, emitted, torch.tensor([3, 2], dtype=torch.int32))
    _, outcome = step.as_proposed(step.trees.truncated(2), verified)
    assert outcome.bound is not None
    assert outcome.bound.tolist() == [[2, 2], [2, 0]]
    assert outcome.rows == 6


def test_other_requests_are_served_without_drafts(grammar: Any) -> None:
    from drafttree.sglang.state import may_draft, why_undrafted

    class OutlinesGrammar:
        """As in SGLang, whose masks have a byte for each token."""

    def request(grammar: Any, processor: str | None = None, *, ignore_eos: bool = False) -> Any:
        parameters = SimpleNamespace(ignore_eos=ignore_eos, custom_params=None)
        return SimpleNamespace(
            grammar=grammar, custom_logit_processor=processor, sampling_params=parameters
        )

    for each, reason in (
        (request(None, ignore_eos=True), None),
        (request(grammar), None),
        (request(OutlinesGrammar()), "a grammar of type OutlinesGrammar"),
        (request(grammar, ignore_eos=True), "a grammar and ignore_eos"),
        (request(None, "code"), "a custom logit processor"),
    ):
        assert why_undrafted(each) == reason
        assert may_draft(each) == (reason is None)
