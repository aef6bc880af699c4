"""What `scripts/ablate_recycling.py` measures is plain greedy decoding, drafted in other ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ablate_recycling import Answer, Target, decode
from recycling_variants import SETTINGS, budget_tree, move_bigrams
from tiny_models import make_tiny_llama
from tree_kernels.growth import pair_cells

from drafttree.tree import StaticTree
from recycle_plugin import Tables
from recycle_plugin.grown import ROW_PRIORS

NODES = 15
MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=128)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (9, 40, 21)]


@pytest.fixture(scope="module")
def plain(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, each token from a forward of the whole text."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        answer: list[int] = []
        while len(answer) < MOST and answer[-1:] != [1]:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + answer])).logits
            answer.append(int(logits[0, -1].argmax()))
        answers.append(answer)
    return answers


def answers_of(target: Target, name: str, prompts: list[list[int]]) -> list[Answer]:
    setting = SETTINGS[name]
    drafter = setting.make(target.vocab, NODES)
    drafter.allot(1, 128)
    found = []
    for prompt in prompts:
        if setting.cold:
            drafter.reset()
        found.append(decode(target, drafter, setting, prompt, MOST))
    return found


@pytest.mark.parametrize(
    "name", [name for name, each in SETTINGS.items() if each.fits(NODES) and not each.primed]
)
def test_every_setting_answers_as_plain_decoding_does(
    target: Target, prompts: list[list[int]], plain: list[list[int]], name: str
) -> None:
    found = answers_of(target, name, prompts)
    assert [answer.tokens for answer in found] == plain
    # Something was accepted, and not everything.
    tokens = sum(len(answer.tokens) - 1 for answer in found)
    steps = sum(answer.steps for answer in found)
    assert steps < tokens
    assert sum(answer.nodes for answer in found) > tokens - steps


def test_a_prompt_is_remembered_as_it_was_read(target: Target, prompts: list[list[int]]) -> None:
    first, again = (answers_of(target, "grown", prompts[:1])[0] for _ in range(2))
    assert first == again


def test_settings_differ_from_their_families(target: Target, prompts: list[list[int]]) -> None:
    steps = {
        name: sum(answer.steps for answer in answers_of(target, name, prompts))
        for name in ("paper", "paper accepted only", "paper cold", "paper with prompt logits")
    }
    assert steps["paper accepted only"] > steps["paper"] > steps["paper with prompt logits"]
    assert steps["paper cold"] > steps["paper"]


def test_parts_that_are_taken_away_learn_nothing(target: Target, prompts: list[list[int]]) -> None:
    changed = {}
    for name in ("grown", "grown without pairs", "grown with fixed priors"):
        setting = SETTINGS[name]
        drafter: Any = setting.make(target.vocab, NODES)
        drafter.allot(1, 128)
        for prompt in prompts:
            decode(target, drafter, setting, prompt, MOST)
        pairs = int((drafter.tables.pairs >= 0).sum())
        changed[name] = (pairs > 0, int(drafter.tally.tried.sum()) > 0)
    assert changed == {
        "grown": (True, True),
        "grown without pairs": (False, True),
        "grown with fixed priors": (True, False),
    }


def test_a_tree_of_the_greatest_depth_is_the_best_of_its_nodes() -> None:
    assert budget_tree(80, 32) == StaticTree.from_budget(80, ROW_PRIORS)
    shallow = budget_tree(80, 4)
    assert (shallow.nodes, shallow.depth) == (80, 4)
    assert {path for path in StaticTree.from_budget(80, ROW_PRIORS).paths if len(path) <= 4} <= set(
        shallow.paths
    )


def test_bigrams_come_first_and_the_last_of_them_wins() -> None:
    tables = Tables(32, 8, torch.device("cpu"), pairs=True, hot_start=True)
    tables.matrix[5] = torch.arange(10, 18)
    move_bigrams(tables, [5, 12, 5, 20, 5, 12, 6])
    assert tables.matrix[5].tolist() == [12, 20, 10, 11, 13, 14, 15, 16]
    assert tables.matrix[12].tolist()[:3] == [6, 5, -1]
    pair = torch.tensor([5, 12])
    row = tables.pairs[pair_cells(*pair, len(tables.pairs))]
    assert row.tolist()[:5] == [5, 12, 6, 5, -1]


def test_primed_settings_are_the_others_with_a_primed_matrix() -> None:
    for name, setting in SETTINGS.items():
        if setting.primed:
            assert replace(setting, primed=False) == SETTINGS[name.removesuffix(" primed")]
