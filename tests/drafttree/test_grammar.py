"""Trees under a grammar, against a language whose sequences can be enumerated."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from finite_language import END, VOCAB, FiniteLanguage, mask_of, tokens_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttree.grammar import (
    BoundTree,
    JumpForward,
    JumpForwardTokenizer,
    MaskMemory,
    allows,
    bind_tree,
    fill_masks,
    found_text,
    sole_token,
)
from drafttree.grammar.masks import count_allowed

ALPHABET = (3, 31, 32, 38)
"""Tokens at the ends of both words of a mask."""


def some_language(seed: int) -> FiniteLanguage:
    """Some sequences, many with common beginnings; a few tokens are forced."""
    draw = random.Random(seed)
    return FiniteLanguage(
        [draw.choice(ALPHABET) for _ in range(draw.randrange(1, 7))]
        for _ in range(draw.randrange(2, 12))
    )


def some_tree(seed: int, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree, no token twice under one parent."""
    draw = random.Random(1000 + seed)
    tokens, parents = [7], [-1]
    while len(tokens) < size:
        parent = draw.randrange(len(tokens))
        token = draw.choice((*ALPHABET, END, 5))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    path = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def is_allowed(language: FiniteLanguage, path: list[int]) -> bool:
    return all(path[at] in language.following(path[:at]) for at in range(len(path)))


def room(rows: int) -> torch.Tensor:
    return torch.full((rows, 2), 77, dtype=torch.int32)


@pytest.mark.parametrize("tokens", [{0}, {31}, {32}, {39}, {0, 31}, {31, 32}, set(), {5, 6, 7}])
def test_masks_are_read(tokens: set[int]) -> None:
    mask = mask_of(tokens)
    row = mask.numpy()
    # Tokens beyond the mask are not allowed.
    assert tokens_of(mask) == {each for each in range(130) if allows(row, each)} == tokens
    assert sole_token(row) == (min(tokens) if len(tokens) == 1 else None)
    assert sole_token(np.full(2, -1, np.int32)) is None
    assert count_allowed(row) == len(tokens)
    assert count_allowed(np.full(2, -1, np.int32)) == 64


@pytest.mark.parametrize("seed", range(60))
def test_each_mask_is_that_of_the_nodes_own_path(seed: int) -> None:
    language = some_language(seed)
    tokens, parents = some_tree(seed, 14)
    masks = room(14)
    count = fill_masks(language, tokens, parents, masks)
    allowed = 0
    for node in range(len(tokens)):
        path = path_to(node, tokens, parents)
        if is_allowed(language, path):
            assert tokens_of(masks[node]) & {*range(VOCAB)} == (
                language.following(path) or {*range(VOCAB)}
            )
            allowed += node > 0
        else:
            assert masks[node].tolist() == [-1, -1]
    assert count == allowed
    assert language.filled == 1 + allowed
    assert language.accepted == []


def test_columns_without_a_node_allow_everything() -> None:
    language = FiniteLanguage([[3, 32], [31]])
    masks = room(4)
    assert fill_masks(language, [0, 3, -1, 32], [-1, 0, -1, 1], masks) == 2
    assert tokens_of(masks[0]) == {3, 31}
    assert tokens_of(masks[1]) == {32}
    assert masks[2].tolist() == [-1, -1]
    assert tokens_of(masks[3]) == {END}


def bind(
    language: FiniteLanguage,
    tokens: list[int],
    parents: list[int],
    most_proposed: int = 99,
    most: int = 99,
    max_depth: int = 99,
    memory: MaskMemory | None = None,
    chain: bool = False,
) -> BoundTree:
    bound = bind_tree(
        *(language, tokens, parents, room(most)),
        most_proposed=most_proposed,
        most=most,
        max_depth=max_depth,
        memory=memory,
        chain=chain,
    )
    assert language.accepted == []
    return bound


@pytest.mark.parametrize("seed", range(60))
def test_a_bound_tree_is_what_the_grammar_leaves_of_the_proposal(seed: int) -> None:
    language = some_language(seed)
    tokens, parents = some_tree(seed, 14)
    bound = bind(language, tokens, parents)
    paths = [path_to(node, bound.tokens, bound.parents) for node in range(len(bound.tokens))]
    # Each proposed node whose path is allowed is in the tree once, with its column.
    proposed = {
        column: path
        for column in range(len(tokens))
        if is_allowed(language, path := path_to(column, tokens, parents))
    }
    found = {column: path for column, path in zip(bound.columns, paths, strict=True) if column >= 0}
    assert found == proposed
    # The others are those that follow with certainty from one in the tree.
    assert all(
        forced for forced, column in zip(bound.forced, bound.columns, strict=True) if column < 0
    )
    for node in range(1, len(paths)):
        assert bound.forced[node] == (len(language.following(paths[node][:-1])) == 1)
    assert bound.given == bound.forced
    for node, path in enumerate(paths):
        assert bound.parents[node] < node
        following = language.following(path)
        assert tokens_of(bound.masks[node]) & {*range(VOCAB)} == (following or {*range(VOCAB)})
        if len(following) == 1:
            assert [*path, *following] in paths
    assert len({*map(tuple, paths)}) == len(paths)
    assert language.filled == len(paths)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_nodes_that_are_allowed_are_kept(seed: int) -> None:
    """The most probable ones come first, so that what forbidden ones leave goes to the next."""
    language = some_language(seed)
    tokens, parents = some_tree(seed, 20)
    whole = bind(language, tokens, parents)
    few = bind(language, tokens, parents, most_proposed=3)
    kept = [column for column in few.columns if column > 0]
    assert few.columns == whole.columns[: len(few.columns)]
    assert len(kept) >= min(3, sum(column > 0 for column in whole.columns))
    small = bind(language, tokens, parents, most=4)
    assert len(small.tokens) == min(4, len(whole.tokens))
    assert (small.tokens, small.parents) == (whole.tokens[:4], whole.parents[:4])
    flat = bind(language, tokens, parents, max_depth=1)
    assert all(parent <= 0 for parent in flat.parents)


def test_forced_tokens_come_first() -> None:
    """Before anything is proposed, and after each node that was."""
    language = FiniteLanguage([[3, 31, 32], [3, 31, 38, 38]])
    bound = bind(language, [7], [-1])
    assert (bound.tokens[1:], bound.parents, bound.columns) == ([3, 31], [-1, 0, 1], [0, -1, -1])
    # The first forced token was proposed too, and so was one of the two that may follow.
    bound = bind(language, [7, 5, 3, 31, 38], [-1, 0, 0, 2, 3])
    assert bound.tokens[1:] == [3, 31, 38, 38, END]
    assert bound.columns == [0, 2, 3, 4, -1, -1]
    assert bound.forced == [False, True, True, False, True, True]
    assert bound.parents == [-1, 0, 1, 2, 3, 4]


def test_a_token_that_the_grammar_refuses_after_all_is_left_out() -> None:
    class Stubborn(FiniteLanguage):
        def accept(self, token: int) -> bool:
            return token != 31 and super().accept(token)

    language = Stubborn([[3, 31], [31, 3], [38]])
    bound = bind(language, [7, 31, 3, 38], [-1, 0, 0, 0])
    assert bound.tokens[1:] == [3, 38, END]
    assert bound.columns == [0, 2, 3, -1]
    assert bound.given == [False, False, False, True]
    masks = room(4)
    assert fill_masks(language, [7, 31, 3, 3], [-1, 0, 0, 1], masks) == 1


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    """A prompt may have tokens that the target does not know, and drafters copy them."""
    language = FiniteLanguage([[3, 31], [38, 3], [38, 31]])
    tokens, parents = [7, 64, 38, 1000, 3], [-1, 0, 0, 2, 2]
    masks = room(5)
    assert fill_masks(language, tokens, parents, masks) == 2
    assert masks[1].tolist() == masks[3].tolist() == [-1, -1]
    bound = bind(language, tokens, parents)
    assert (bound.tokens[1:], bound.columns[1:]) == ([38, 3, END], [2, 4, -1])


def test_a_jump_forward_string_is_drafted() -> None:
    """After the root and after each node, whether or not it was proposed."""
    # 3 31 and 5 are tokens of one text; 38 goes on beyond it.
    language = FiniteLanguage([[3, 31, 32], [5, 32], [3, 38], [38]])
    language.jumps = {(): JumpForward([3, 31], 9), (38,): JumpForward([9], 9)}
    bound = bind(language, [7, 38, 3], [-1, 0, 0])
    assert bound.tokens[1:] == [3, 31, 32, END, 38, END]
    assert bound.parents == [-1, 0, 1, 2, 3, 0, 5]
    assert bound.columns == [0, 2, -1, -1, -1, 1, -1]
    assert bound.forced == [False, False, False, True, True, False, True]
    # The text's first token is in the tree whether or not it was proposed.
    assert bound.given == [False, True, True, True, True, False, True]
    # What is proposed below a node of the text is in the tree too.
    bound = bind(language, [7, 3, 38], [-1, 0, 1])
    assert (bound.tokens[1:], bound.parents[1:]) == ([3, 31, 32, END, 38, END], [0, 1, 2, 3, 1, 5])
    # A grammar that refuses the tokens is left as it is.
    language.jumps = {(): JumpForward([4, 31], 9)}
    assert bind(language, [7], [-1]).tokens == [0]
    language.jumps = {(): JumpForward([3, 31], 9)}
    assert bind(language, [7], [-1], max_depth=1).tokens[1:] == [3]
    assert bind(language, [7], [-1], most=3).tokens[1:] == [3, 31]


@pytest.mark.parametrize(("last_bytes", "drafted"), [(1, [3]), (2, [3, 31, 32, END])])
def test_a_last_token_is_left_out_if_longer_ones_are_allowed(
    last_bytes: int, drafted: list[int]
) -> None:
    """A token of one byte has one beginning, and here two tokens are allowed."""
    language = FiniteLanguage([[3, 31, 32], [5, 32], [3, 38]])
    language.jumps = {(): JumpForward([3, 31], last_bytes)}
    assert bind(language, [7], [-1]).tokens[1:] == drafted


def test_jump_forward_strings_are_tokenized() -> None:
    class Pairs:
        """A token is two characters."""

        calls = 0

        def encode(self, text: str, add_special_tokens: bool) -> list[str]:
            assert not add_special_tokens
            self.calls += 1
            return [text[at : at + 2] for at in range(0, len(text), 2)]

        def decode(self, tokens: list[str]) -> str:
            return "".join(tokens)

    pairs = Pairs()
    encode = JumpForwardTokenizer(pairs).encode
    calls = pairs.calls
    assert encode("abcdä") == encode("abcdä") == (("ab", "cd", "ä"), 2)
    assert pairs.calls == calls + 1
    assert encode("") == ((), 0)


def test_the_last_token_may_complete_a_character() -> None:
    """What comes before it cannot be decoded as a whole then."""
    letters = {letter: at for at, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    encode = JumpForwardTokenizer(PreTrainedTokenizerFast(tokenizer_object=made)).encode
    for text in ("ä", '"д', "中"):
        found = encode(text)
        assert len(found.tokens) == len(text.encode())
        assert found.last_bytes == 1


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_jump_forward_strings_are_no_beginnings_of_texts(scheme: str) -> None:
    """SentencePiece's tokenizers put a space before what they take for one."""
    pieces = ["\n", "▁", '"', ":", *"aemn", "name", "▁name", '":']
    scores = [("<unk>", 0.0), *((each, len(each) - 9.0) for each in pieces)]
    made = Tokenizer(models.Unigram(scores, 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    found = JumpForwardTokenizer(tokenizer).encode('name":')
    assert tokenizer.convert_ids_to_tokens(found.tokens) == ["name", '":']
    assert found.last_bytes == 2
    found = JumpForwardTokenizer(tokenizer).encode('": name')
    assert tokenizer.convert_ids_to_tokens(found.tokens) == ['":', "▁name"]
    assert found.last_bytes == 5


def test_texts_that_begin_or_end_inside_a_character() -> None:
    def found(text: bytes) -> str:
        return found_text(lambda: text.decode())

    assert found("дa".encode()) == "дa"
    assert found('"key": д'.encode()[:-1]) == '"key": '
    assert found("д".encode()[1:] + b"a") == ""


def test_what_was_taken_under_a_mask_is_drafted_again() -> None:
    memory = MaskMemory()
    language = FiniteLanguage([[3, 31, 32], [5, 32, 38], [5, 31, 3]])
    before = bind(language, [7, 5, 31], [-1, 0, 1])
    assert before.tokens[1:] == [5, 31, 3, END]
    masks = before.masks.numpy()
    memory.learn_path(masks, before.tokens, before.parents, [5, 32, 38])
    assert memory.guess(masks[0]) == (5, 0, 0)
    assert memory.guess(masks[1]) == (32, 0, 0)  # the path leaves the tree after it
    bound = bind(language, [7], [-1], memory=memory)
    # Nothing is as probable as 0.3 after two tokens of one half each.
    assert bound.tokens == [0, 5]
    assert bound.forced == [False, False]
    assert bound.given == [False, True]
    assert bind(language, [7, 5], [-1, 0], memory=memory).given == [False, True]
    for _ in range(3):
        memory.learn_path(masks, before.tokens, before.parents, [5, 32, 38])
    assert memory.guess(masks[0]) == (5, 3, 3)
    assert bind(language, [7], [-1], memory=memory).tokens[1:] == [5, 32, 38, END]
    for token in (3, 5, 3):
        memory.learn(masks[0], token)
    assert memory.guess(masks[0]) == (3, 6, 3)
    assert bind(language, [7], [-1], memory=memory).tokens[1:] == [3, 31, 32, END]


def test_a_chain_stays_one() -> None:
    """Nothing is drafted beside what is certain or likely."""
    memory, language = MaskMemory(), FiniteLanguage([[3, 31, 32], [5, 32, 38], [5, 31, 3]])
    masks = bind(language, [7, 5, 31], [-1, 0, 1]).masks.numpy()
    for _ in range(3):
        memory.learn(masks[0], 5)
    proposal = [7, 3, 31, 32], [-1, 0, 1, 2]
    assert bind(language, *proposal, memory=memory).parents == [-1, 0, 0, 2, 3, 4]
    bound = bind(language, *proposal, memory=memory, chain=True)
    assert (bound.tokens, bound.parents) == ([0, 5], [-1, 0])
    assert bind(language, *proposal, chain=True).tokens[1:] == [3, 31, 32, END]


def test_masks_of_free_text_are_not_remembered() -> None:
    """Those that allow more than one token in 32."""
    memory = MaskMemory()
    for tokens in ({3, 5}, {3, 5, 38}):
        mask = mask_of(tokens).numpy()
        memory.learn(mask, 3)
        assert (memory.guess(mask) is None) == (len(tokens) > 2)


def test_the_oldest_mask_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttree.grammar.mask_memory.MOST_MASKS", 2)
    memory = MaskMemory()
    masks = [mask_of({token}).numpy() for token in (3, 5, 7)]
    for mask in (masks[0], masks[1], masks[0], masks[2]):
        memory.learn(mask, 3)
    assert [memory.guess(mask) is None for mask in masks] == [False, True, False]
