"""Replayed decoding, compared with a loop over one text at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lyanna_parts import drafter_for
from overfitted_drafter import PROMPTS, answer, make_overfitted
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import load
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.tree import TokenTable, sample_tree
from scripts.experiments.lyanna.lyanna_replay import LyannaReplay, Text


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    target = make_tiny_llama(tmp_path_factory.mktemp("target"))
    out = tmp_path_factory.mktemp("drafter")
    return target, out, make_overfitted(target, out).mean_accepted_tokens


def texts_of(target: Path) -> tuple[list[Text], torch.Tensor, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    written = answer(model)
    with torch.no_grad():
        hidden = model.get_decoder()(written).last_hidden_state
    texts = [
        Text(tokens, states, len(PROMPTS[0]))
        for tokens, states in zip(written, hidden, strict=True)
    ]
    # Answers differ in length.
    texts[1] = Text(texts[1].tokens[:20], texts[1].hidden[:20], texts[1].start)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return texts, embeddings.weight.detach(), head.weight.detach()


def test_replay_equals_decoding_one_text_at_a_time(learned: tuple[Path, Path, float]) -> None:
    """Without second trees, compared with a loop that calls `sample_tree` directly."""
    target, _, _ = learned
    texts, embeddings, head = texts_of(target)
    drafter = drafter_for(target)
    options = LyannaOptions(model="", resample=False, nodes=7)
    found = LyannaReplay(texts, drafter, embeddings, head, options.steps).run(options)
    hot = embeddings[drafter.token_info.hot_tokens.long()]
    with torch.no_grad():
        table = TokenTable.of(drafter.token_info, hot, torch.float32)
    for text, replayed in zip(texts, found, strict=True):
        with torch.no_grad():
            embedded = embeddings[text.tokens[1:]][None]
            states = drafter.unroll(text.hidden[None, :-1], embedded, 3)
            logits = torch.stack([state[0] for state in states], 1) @ head.T
        at, steps, nodes = text.start, 0, 0
        while at < len(text.tokens) - 1:
            tree = sample_tree(
                logits[at - 1][None], torch.tensor([3]), text.tokens[at][None].int(), table, 4, 7
            )
            paths = [tree.path(0, column) for column in range(1, int(tree.tree_size[0]))]
            follows = text.tokens[at + 1 :].tolist()
            best = max((len(p) for p in paths if p == follows[: len(p)]), default=0)
            at += best + 1
            steps += 1
            nodes += len(paths)
        assert replayed.steps == steps
        assert replayed.draft_tokens == nodes
        assert replayed.tokens == len(text.tokens) - 1 - text.start


def test_fusion_accepts_no_less_and_learned_text_is_accepted(
    learned: tuple[Path, Path, float],
) -> None:
    target, out, expected = learned
    texts, embeddings, head = texts_of(target)
    drafter = load(out, target)
    steps, replay = [], LyannaReplay(texts, drafter, embeddings, head, steps=3)
    for resample in (False, True):
        options = LyannaOptions(model="", nodes=12, resample=resample)
        found = replay.run(options)
        steps.append(sum(each.steps for each in found))
    mean = sum(each.tokens for each in found) / steps[0]
    assert mean > 0.9 * expected
    assert steps[1] <= steps[0]
