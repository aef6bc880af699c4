"""The grammars of vLLM's backends follow draft trees; no engine is started."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from finite_language import tokens_of
from structured_answers import LETTERS, MERGES
from tiny_models import add_byte_tokenizer

pytest.importorskip("vllm")

VOCAB = 512
THINK, END_OF_THINKING, TOOL_CALL, END_OF_TOOL_CALL = 258, 259, 260, 261
SCHEMA = '{"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 2}'
REGEX = "(ab|ba){1,2}-[0-9](yes|no)"
BACKENDS = ("xgrammar", "guidance", "outlines")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    special = {
        THINK: "<think>",
        END_OF_THINKING: "</think>",
        TOOL_CALL: "<tool_call>",
        END_OF_TOOL_CALL: "</tool_call>",
    }
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(add_byte_tokenizer(folder, VOCAB, special))


def make_request(tokenizer: Any, backend: str, kind: str, spec: str) -> tuple[Any, Any]:
    """A request with a grammar of its own, and what the scheduler keeps grammars in."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=True, disable_additional_properties=False
        ),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        speculative_config=SimpleNamespace(num_speculative_tokens=31),
        num_speculative_tokens=31,
    )
    kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
    made: Any = kinds[backend](config, tokenizer, VOCAB)
    grammar = made.compile_grammar(StructuredOutputOptions[kind], spec)
    request = SimpleNamespace(
        request_id="a",
        use_structured_output=True,
        prompt_token_ids=[5, 6],
        all_token_ids=[5, 6],
        structured_output_request=SimpleNamespace(grammar=grammar, reasoning_ended=True),
    )
    return request, manager_of(made)


def manager_of(backend: Any, reasoner: Any = None) -> Any:
    """The engine's own manager, without the parts that an engine makes for it."""
    from vllm.v1.structured_output import StructuredOutputManager

    manager = object.__new__(StructuredOutputManager)
    manager.backend, manager.enable_in_reasoning = backend, False
    manager.reasoner_cls = None if reasoner is None else (lambda **given: reasoner)
    manager.tokenizer = None
    return manager


def some_tree(draw: random.Random, valid: list[int], size: int) -> tuple[list[int], list[int]]:
    tokens, parents = [0], [-1]
    while len(tokens) < size:
        parent, token = draw.randrange(len(tokens)), draw.choice(valid)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def replayed(request: Any, manager: Any, path: list[int]) -> set[int] | None:
    """What the engine's own masks along a chain allow after a path; None if it is not allowed."""
    grammar = request.structured_output_request.grammar
    row = manager.backend.allocate_token_bitmask(1)
    accepted = 0
    try:
        for token in path:
            if grammar.is_terminated():
                return {*range(VOCAB)}
            grammar.fill_bitmask(row, 0)
            if token not in tokens_of(row[0], VOCAB) or not grammar.accept_tokens("a", [token]):
                return None
            accepted += 1
        if grammar.is_terminated():
            return {*range(VOCAB)}
        grammar.fill_bitmask(row, 0)
        return tokens_of(row[0], VOCAB)
    finally:
        if accepted:
            grammar.rollback(accepted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "spec"), [("REGEX", REGEX), ("JSON", SCHEMA)])
def test_masks_of_a_tree_are_those_of_each_path(
    backend: str, kind: str, spec: str, tokenizer: Any
) -> None:
    """Before any token, and after each token of a text; the grammar's state stays."""
    from drafttree.grammar import bind_tree, fill_masks
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    request, manager = make_request(tokenizer, backend, kind, spec)
    draw = random.Random(0)
    letters = tokenizer('ab-0yesn["],')["input_ids"] + [tokenizer.eos_token_id]
    allowed = 0
    while True:
        root = replayed(request, manager, [])
        assert root is not None
        for _ in range(4):
            tokens, parents = some_tree(draw, letters, 24)
            masks = manager.backend.allocate_token_bitmask(64)
            allowed += fill_masks(RequestMatcher(manager, request), tokens, parents, masks)
            for node in range(24):
                known = replayed(request, manager, path_to(node, tokens, parents))
                assert tokens_of(masks[node], VOCAB) == (
                    {*range(VOCAB)} if known is None else known
                )
            bound = bind_tree(
                *(RequestMatcher(manager, request), tokens, parents, masks),
                most_proposed=12,
                most=32,
                max_depth=30,
            )
            for node in range(len(bound.tokens)):
                path = path_to(node, bound.tokens, bound.parents)
                assert tokens_of(bound.masks[node], VOCAB) == replayed(request, manager, path)
            assert replayed(request, manager, []) == root
        grammar = request.structured_output_request.grammar
        token = draw.choice(sorted(root))
        assert grammar.accept_tokens("a", [token])
        if grammar.is_terminated() or token == tokenizer.eos_token_id:
            break
    assert allowed > 8


def test_each_node_finds_the_end_of_thoughts_above_it(tokenizer: Any) -> None:
    from vllm.reasoning import ReasoningParserManager

    from drafttree.grammar import bind_tree, fill_masks
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    request, manager = make_request(tokenizer, "xgrammar", "REGEX", "ab|ac")
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
    manager = manager_of(manager.backend, parser)
    request.prompt_token_ids = request.all_token_ids = [5, THINK, 7]
    structured = request.structured_output_request
    structured.reasoning_ended, structured.reasoner = None, parser
    a, b, c = tokenizer("abc")["input_ids"]
    tokens = [0, b, END_OF_THINKING, END_OF_THINKING, a, a, c, b]
    parents = [-1, 0, 0, 1, 2, 3, 5, 4]
    masks = manager.backend.allocate_token_bitmask(16)
    assert fill_masks(RequestMatcher(manager, request), tokens, parents, masks) == 7
    free, end = {*range(VOCAB)}, {tokenizer.eos_token_id}
    expected = [free, free, {a}, {a}, {b, c}, {b, c}, end, end]
    assert [tokens_of(each, VOCAB) for each in masks[:8]] == expected
    # Where the thoughts have ended, the first letter is forced.
    bound = bind_tree(
        *(RequestMatcher(manager, request), tokens[:4], parents[:4], masks),
        most_proposed=9,
        most=9,
        max_depth=9,
    )
    assert bound.tokens[1:] == [b, END_OF_THINKING, a, END_OF_THINKING, a]
    assert bound.parents == [-1, 0, 0, 2, 1, 4]
    assert structured.grammar.validate_tokens([a, c]) == [a, c]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_implicit_end_of_thoughts_that_the_grammar_rejects(backend: str, tokenizer: Any) -> None:
    """A tool call ends the thoughts and belongs to the answer, of which it is no part here."""
    from vllm.reasoning import ReasoningParserManager

    from drafttree.grammar import bind_tree, fill_masks
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    request, manager = make_request(tokenizer, backend, "REGEX", "ab|ac")
    make_parser = ReasoningParserManager.get_reasoning_parser("qwen3")
    parser: Any = make_parser(tokenizer)
    manager = manager_of(manager.backend, parser)
    request.prompt_token_ids = request.all_token_ids = [5, THINK, 7]
    structured = request.structured_output_request
    structured.reasoning_ended, structured.reasoner = False, parser
    a, b = tokenizer("ab")["input_ids"]
    assert manager.validate_tokens(request, [b, TOOL_CALL]) == [b]
    tokens, parents = [0, b, TOOL_CALL, END_OF_THINKING, a], [-1, 0, 1, 0, 3]
    masks = manager.backend.allocate_token_bitmask(16)
    fill_masks(RequestMatcher(manager, request), tokens, parents, masks)
    assert tokens_of(masks[3], VOCAB) == {a}
    bound = bind_tree(
        *(RequestMatcher(manager, request), tokens, parents, masks),
        most_proposed=9,
        most=9,
        max_depth=9,
    )
    assert TOOL_CALL not in bound.tokens
    assert b in bound.tokens
    assert END_OF_THINKING in bound.tokens
    # The grammar is as before.
    assert structured.grammar.validate_tokens([a, b]) == [a, b]


class Counted(list[int]):
    """A text that counts how often it is copied."""

    copies = 0

    def copy(self) -> list[int]:
        self.copies += 1
        return [*self]


class Reasoner:
    """A parser that looks at the whole text."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def is_reasoning_end(self, text: list[int]) -> bool:
        return False

    def is_reasoning_end_streaming(self, text: list[int], added: list[int]) -> bool:
        self.seen.append([*text])
        assert text[-len(added) :] == added
        return END_OF_THINKING in added


def test_long_thoughts_are_not_copied_for_each_node(tokenizer: Any) -> None:
    from drafttree.grammar import fill_masks
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    request, manager = make_request(tokenizer, "xgrammar", "REGEX", "ab|ac")
    reasoner = Reasoner()
    manager = manager_of(manager.backend, reasoner)
    text = request.prompt_token_ids = request.all_token_ids = Counted([5, THINK, 7])
    structured = request.structured_output_request
    structured.reasoning_ended, structured.reasoner = None, reasoner
    a, b, c = tokenizer("abc")["input_ids"]
    tokens, parents = [0, b, END_OF_THINKING, c, b, END_OF_THINKING], [-1, 0, 1, 0, 3, 4]
    masks = manager.backend.allocate_token_bitmask(16)
    assert fill_masks(RequestMatcher(manager, request), tokens, parents, masks) == 5
    free = {*range(VOCAB)}
    expected = [free, free, {a}, free, free, {a}]
    assert [tokens_of(each, VOCAB) for each in masks[:6]] == expected
    for path in ([b], [b, END_OF_THINKING], [c], [c, b], [c, b, END_OF_THINKING]):
        assert [*text, *path] in reasoner.seen
    assert text.copies == 0
    assert text == [5, THINK, 7]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_jump_forward_strings_have_the_tokens_of_the_tokenizer(
    backend: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from drafttree.grammar import JumpForwardTokenizer, bind_tree
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    add_byte_tokenizer(tmp_path, VOCAB, merges=MERGES)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    green, a, b = (tokenizer(text)["input_ids"] for text in ("green", "a", "b"))
    assert len(green) == 1
    request, manager = make_request(tokenizer, backend, "REGEX", "(a|b)green(a|b)")
    masks = manager.backend.allocate_token_bitmask(16)
    matcher = RequestMatcher(manager, request, JumpForwardTokenizer(tokenizer))
    bound = bind_tree(
        *(matcher, [0, *a, *b], [-1, 0, 0], masks), most_proposed=9, most=9, max_depth=9
    )
    assert bound.tokens[1:] == [*a, *green, *b, *green]
    assert bound.parents == [-1, 0, 1, 0, 3]
    assert bound.columns == [0, 1, -1, 2, -1]
    assert any(bound.forced) == (backend == "guidance")  # it allows no other tokens
    assert request.structured_output_request.grammar.validate_tokens(a + green + b) == a + green + b


def test_texts_that_end_inside_a_character(tmp_path: Path) -> None:
    """Both words begin with the same byte, of which no text can be made."""
    from transformers import AutoTokenizer

    from drafttree.grammar import JumpForwardTokenizer, bind_tree
    from drafttree.vllm.structured.request_matcher import RequestMatcher

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    add_byte_tokenizer(tmp_path, VOCAB, merges=[*LETTERS, ("k", "e")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    request, manager = make_request(tokenizer, "xgrammar", "REGEX", "key(да|нет)")
    matcher = RequestMatcher(manager, request, JumpForwardTokenizer(tokenizer))
    masks = manager.backend.allocate_token_bitmask(16)
    key, byte = tokenizer("key")["input_ids"], tokenizer.convert_tokens_to_ids("Ð")
    tree = [0, *key, byte], [-1, 0, 1, 2]
    bound = bind_tree(*(matcher, *tree, masks), most_proposed=9, most=9, max_depth=9)
    # A byte is followed by others that are not characters either.
    assert bound.tokens[1:4] == [*key, byte]
    # What comes before the words is drafted all the same.
    matcher = RequestMatcher(manager, request, JumpForwardTokenizer(tokenizer))
    bound = bind_tree(*(matcher, [0], [-1], masks), most_proposed=9, most=9, max_depth=9)
    assert bound.tokens[1:] == key


def test_what_followed_a_mask_is_remembered(tokenizer: Any) -> None:
    """For other requests too, until the version of the memory changes."""
    from drafttree.vllm.structured.grammars import TreeGrammars
    from drafttree.vllm.structured.shapes import Proposal

    first, manager = make_request(tokenizer, "xgrammar", "REGEX", "a(b|c)a")
    a, b = tokenizer("ab")["input_ids"]
    ours = TreeGrammars(manager, 7)

    def drafts(request: Any, version: int | None) -> list[int]:
        ours.propose({"a": Proposal([-1], 0, 8, 9, version)})
        return ours.validate_tokens(request, [])

    assert drafts(first, 0) == [a]
    first.all_token_ids += [a, b]
    first.structured_output_request.grammar.accept_tokens("a", [a, b])
    assert drafts(first, 0) == [a, tokenizer.eos_token_id]
    ours.forget(["a"])
    second, _ = make_request(tokenizer, "xgrammar", "REGEX", "a(b|c)a")
    assert drafts(second, 0) == [a, b, a, tokenizer.eos_token_id]
    assert drafts(second, None) == drafts(second, 1) == [a]


def test_a_backend_that_cannot_follow_trees_serves_without_drafts(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.vllm.structured import grammars
    from drafttree.vllm.structured.shapes import Proposal

    request, manager = make_request(tokenizer, "xgrammar", "REGEX", "ab|ac")
    said: list[str] = []
    monkeypatch.setattr(grammars.logger, "warning_once", lambda text, *_: said.append(text))
    ours = grammars.TreeGrammars(manager, 7)
    a, b = tokenizer("ab")["input_ids"]
    ours.propose({"a": Proposal([-1, 0, 1], 2, 8, 9)})
    # The end is forced after the letters.
    assert ours.validate_tokens(request, [a, b]) == [a, b, tokenizer.eos_token_id]
    assert ours.bound({"a": [a]})["a"].parents == [-1, 0]
    masks = ours.grammar_bitmask({"a": request}, ["a"], {"a": [a]})
    assert masks is not None
    assert masks.shape == (2, VOCAB // 32)
    manager.backend = SimpleNamespace()
    assert ours.validate_tokens(request, [a, b]) == []
    assert ours.bound({"a": [a]}) == {}
    assert len(said) == 1
    assert "served without drafts" in said[0]
