"""`ablate_recycling.py` replays greedy decoding exactly, with every drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_llama
from tree_kernels.bigrams import bigram_cells

from drafttree.tree import DraftTree, StaticTree
from drafttree.verify import verify_target
from recycle_plugin import Tables
from recycle_plugin.priors import ROW_PRIORS
from scripts.experiments.common import Replayed
from scripts.experiments.token_recycling.known_target import Known, KnownTarget
from scripts.experiments.token_recycling.recycling_variants import (
    SETTINGS,
    budget_tree,
    current_name,
    move_bigrams,
)
from scripts.experiments.token_recycling.replay import Text, Wanted, decode

VOCAB = 128
NUM_DRAFT_TOKENS = 15
MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (9, 40, 21)]


@pytest.fixture(scope="module")
def target(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> KnownTarget:
    return KnownTarget(folder, tmp_path_factory.mktemp("work"), MOST)


class Plain:
    """The target without a KV cache: each token takes a forward of the whole text."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(self, text: list[int]) -> torch.Tensor:
        """The logits after a text, `[V]`."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=torch.tensor([text])).logits[0, -1]
        return logits

    def answer(self, prompt: list[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < MOST and answer[-1:] != [1]:
            answer.append(int(self.logits(prompt + answer).argmax()))
        return answer

    def steps(self, drafter: Any, prompt: list[int], given: list[int] | None = None) -> int:
        """The number of decode steps with a drafter; the nodes are evaluated one at a time.

        With a given answer, its tokens take the place of the target's own where the text is a
        prefix of it."""
        slots, answer, steps = torch.tensor([0]), [], 0
        drafter.start(0, prompt)
        trees = DraftTree.of_roots(torch.tensor(prompt[-1:], dtype=torch.int32))
        while True:
            text = prompt + answer
            logits = torch.stack(
                [
                    self.logits(text + trees.path(0, column))
                    for column in range(trees.tokens.shape[1])
                ]
            )
            before = trees.previous_tokens(drafter.previous_tokens(slots))
            likely = drafter.observe(slots.expand(len(logits)), trees.tokens[0], before[0], logits)
            for column in range(trees.tokens.shape[1]):
                path = answer + trees.path(0, column)
                if given and path == given[: len(path)] and len(path) < len(given):
                    likely[column] = given[len(path)]
            verified = verify_target(trees, likely[None], drafter.max_depth)
            drafter.on_verified(slots, trees, verified)
            answer += verified.emitted[0, : verified.num_emitted[0]].tolist()
            if len(answer) >= len(given) if given else 1 in answer or len(answer) >= MOST:
                drafter.release([0])
                return steps
            trees = drafter.propose(slots, torch.tensor(answer[-1:], dtype=torch.int32))
            steps += 1


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain(folder)


def found_by(target: KnownTarget, name: str, prompts: list[list[int]]) -> list[Replayed]:
    setting = SETTINGS[name]
    drafter = setting.make(target.vocab, NUM_DRAFT_TOKENS)
    drafter.allocate(1, 128)
    found: list[Replayed] = []
    for prompt in prompts:
        if setting.cold:
            drafter.reset()
        known = target.begin(prompt)
        found += replayed(target, drafter, name, [known])
        target.finish(known)
    return found


def replayed(target: KnownTarget, drafter: Any, name: str, known: list[Known]) -> list[Replayed]:
    """The counts of some requests, as many at a time as the drafter has been allocated for."""
    of_text = {Text(i, each.prompt, each.answer, each.given): each for i, each in enumerate(known)}
    decoding = decode(
        drafter,
        SETTINGS[name],
        [[text] for text in of_text],
        of_text.__getitem__,
        target.vocab,
        batch=len(known),
    )
    while True:
        try:
            wanted: Wanted = next(decoding)
        except StopIteration as done:
            return [counts for _, counts in sorted(done.value, key=lambda each: int(each[0]))]
        for text, nodes in wanted:
            target.learn(of_text[text], [nodes])


def test_cached_outputs_are_the_targets(
    target: KnownTarget, plain: Plain, prompts: list[list[int]]
) -> None:
    known = target.begin(prompts[1])
    assert known.answer == plain.answer(prompts[1])
    off_answer = [known.child(known.child(3, 7), 9), known.child(0, 5), len(known.answer) - 1]
    target.learn(known, [off_answer, [known.child(off_answer[0], 2)]])
    texts = [[*known.answer[:3], 7, 9], [5], known.answer[:-1], [*known.answer[:3], 7, 9, 2]]
    for node, text in zip([*off_answer, known.child(off_answer[0], 2)], texts, strict=True):
        expected = plain.logits(prompts[1] + text).topk(8).indices.tolist()
        assert known.tops[node] == expected
    assert known.prompt_tops[4].tolist() == plain.logits(prompts[1][:5]).topk(8).indices.tolist()
    target.finish(known)
    again = target.begin(prompts[1])
    assert (again.tops, again.answer) == (known.tops, known.answer)
    assert again.child(3, 7) == known.parents[off_answer[0]]
    # A node that is not in the cache is evaluated after the cached ones.
    node = again.child(1, 11)
    target.learn(again, [[node]])
    expected = plain.logits([*prompts[1], known.answer[0], 11]).topk(8).indices.tolist()
    assert again.tops[node] == expected


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_steps_are_those_of_plain_verification(
    target: KnownTarget, plain: Plain, prompts: list[list[int]], name: str
) -> None:
    drafter = SETTINGS[name].make(target.vocab, NUM_DRAFT_TOKENS)
    drafter.allocate(1, 128)
    steps = [plain.steps(drafter, prompt) for prompt in prompts[:2]]
    assert [each.steps for each in found_by(target, name, prompts[:2])] == steps
    assert sum(steps) < 2 * (MOST - 1)


def test_steps_of_a_given_answer_are_those_of_plain_verification(
    target: KnownTarget, plain: Plain, prompts: list[list[int]]
) -> None:
    """The answer copies from the prompt, and the target would have given another."""
    given = [*prompts[1][3:20], 5, 9, *prompts[1][22:30]]
    assert plain.answer(prompts[1])[: len(given)] != given
    drafter = SETTINGS["dynamic"].make(target.vocab, NUM_DRAFT_TOKENS)
    drafter.allocate(1, 128)
    steps = plain.steps(drafter, prompts[1], given)
    drafter = SETTINGS["dynamic"].make(target.vocab, NUM_DRAFT_TOKENS)
    drafter.allocate(1, 128)
    known = target.begin(prompts[1], given)
    (counts,) = replayed(target, drafter, "dynamic", [known])
    assert (counts.steps, counts.tokens) == (steps, len(given) - 1)
    assert steps < len(given) / 2
    # What the tables learn is the target's own.
    assert known.tops[4] == plain.logits(prompts[1] + given[:4]).topk(8).indices.tolist()
    target.finish(known)
    again = target.begin(prompts[1], given)
    assert (again.tops, again.given) == (known.tops, True)
    assert target.begin(prompts[1]).answer == plain.answer(prompts[1])


def test_requests_side_by_side_learn_from_each_other(
    target: KnownTarget, prompts: list[list[int]]
) -> None:
    drafter = SETTINGS["dynamic"].make(target.vocab, NUM_DRAFT_TOKENS)
    drafter.allocate(3, 128)
    known = [target.begin(prompt) for prompt in prompts]
    found = replayed(target, drafter, "dynamic", known)
    assert [each.tokens for each in found] == [len(each.answer) - 1 for each in known]
    alone = found_by(target, "dynamic cold", prompts)
    assert [each.steps for each in found] != [each.steps for each in alone]
    assert sum(each.steps for each in found) < sum(each.tokens for each in found)


@pytest.mark.parametrize(
    "name",
    [name for name, each in SETTINGS.items() if each.fits(NUM_DRAFT_TOKENS) and not each.primed],
)
def test_every_setting_accepts_and_rejects(
    target: KnownTarget, prompts: list[list[int]], name: str
) -> None:
    found = found_by(target, name, prompts)
    steps = sum(each.steps for each in found)
    tokens = sum(each.tokens for each in found)
    assert tokens == sum(len(target.begin(prompt).answer) - 1 for prompt in prompts)
    assert steps < tokens
    assert sum(each.draft_tokens for each in found) > tokens - steps


def test_settings_differ_from_their_families(target: KnownTarget, prompts: list[list[int]]) -> None:
    steps = {
        name: sum(each.steps for each in found_by(target, name, prompts))
        for name in ("static", "static accepted only", "static cold", "static with prompt logits")
    }
    assert steps["static accepted only"] > steps["static"] > steps["static with prompt logits"]
    assert steps["static cold"] > steps["static"]


def test_ablated_parts_learn_nothing(target: KnownTarget, prompts: list[list[int]]) -> None:
    changed = {}
    for name in ("dynamic", "dynamic without bigram table", "dynamic with fixed priors"):
        drafter: Any = SETTINGS[name].make(target.vocab, NUM_DRAFT_TOKENS)
        drafter.allocate(1, 128)
        for prompt in prompts:
            replayed(target, drafter, name, [target.begin(prompt)])
        bigrams = int((drafter.tables.bigrams >= 0).sum())
        changed[name] = (bigrams > 0, int(drafter.tables.source_stats.tried.sum()) > 0)
    assert changed == {
        "dynamic": (True, True),
        "dynamic without bigram table": (False, True),
        "dynamic with fixed priors": (True, False),
    }


def test_a_tree_without_a_depth_limit_has_the_most_probable_nodes() -> None:
    assert budget_tree(80, 32) == StaticTree.from_budget(80, ROW_PRIORS)
    shallow = budget_tree(80, 4)
    assert (shallow.num_draft_tokens, shallow.depth) == (80, 4)
    assert {path for path in StaticTree.from_budget(80, ROW_PRIORS).paths if len(path) <= 4} <= set(
        shallow.paths
    )


def test_prompt_bigrams_move_to_the_front_of_their_rows_and_the_last_wins() -> None:
    tables = Tables(32, 8, torch.device("cpu"), bigrams=True, hot_start=True)
    tables.matrix[5] = torch.arange(10, 18)
    move_bigrams(tables, [5, 12, 5, 20, 5, 12, 6])
    assert tables.matrix[5].tolist() == [12, 20, 10, 11, 13, 14, 15, 16]
    assert tables.matrix[12].tolist()[:3] == [6, 5, -1]
    bigram = torch.tensor([5, 12])
    row = tables.bigrams[bigram_cells(*bigram, len(tables.bigrams))]
    assert row.tolist()[:5] == [5, 12, 6, 5, -1]


def test_primed_settings_only_differ_by_the_primed_matrix() -> None:
    for name, setting in SETTINGS.items():
        if setting.primed:
            assert replace(setting, primed=False) == SETTINGS[name.removesuffix(" primed")]


def test_committed_results_are_of_known_settings() -> None:
    files = sorted((Path(__file__).parents[2] / "results").glob("recycling_*.json"))
    assert len(files) == 2
    measured = {run["setting"] for file in files for run in json.loads(file.read_text())}
    assert {current_name(name) for name in measured} <= SETTINGS.keys()
    assert [current_name(name) for name in SETTINGS] == list(SETTINGS)
