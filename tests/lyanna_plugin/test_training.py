"""Training on the text of a tiny target: all parts are trained, and a run can be interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import save
from lyanna_plugin.model import LyannaModel
from lyanna_plugin.training import features
from lyanna_plugin.training.acceptance import measure
from lyanna_plugin.training.batches import collate
from lyanna_plugin.training.dataset import Sample
from lyanna_plugin.training.features import Corpus, Features
from lyanna_plugin.training.initial import initialise
from lyanna_plugin.training.loss import Columns, DrafterLoss, LossWeights
from lyanna_plugin.training.trainer import (
    TrainingProgress,
    TrainingSettings,
    finish,
    has_state,
    train,
)
from scripts.experiments.lyanna.variants import EagleStyle, WithoutFirstToken, WithoutTokenInfo

CPU = torch.device("cpu")
VOCAB = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def corpus(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Greedy answers of 40 tokens to prompts of 6."""
    prompts = torch.randint(2, VOCAB, (24, 6), generator=torch.Generator().manual_seed(0))
    answered = target.generate(
        prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    answer = torch.arange(46) >= 6
    samples = [Sample(tokens.int(), answer) for tokens in answered]
    cache = Features(tmp_path_factory.mktemp("features"), samples, "tiny", torch.float32)
    cache.compute(target, CPU, lambda done, total: None)
    return Corpus.whole(samples, cache)


def loss_of(drafter: LyannaModel, target: Any) -> DrafterLoss:
    return DrafterLoss(
        drafter,
        target.get_input_embeddings().weight.detach(),
        target.get_output_embeddings().weight.detach(),
        Columns(torch.arange(100), VOCAB, sampled=100),
        LossWeights(),
    )


def test_the_top_token_is_the_targets_greedy_choice(target: Any, corpus: Corpus) -> None:
    batch = collate(corpus, [0, 1, 2])
    greedy = batch.top_tokens[..., 0][:, :-1]
    assert (greedy == batch.tokens[:, 1:])[batch.in_answer[:, :-1]].float().mean() > 0.98
    assert batch.in_answer.sum() == 3 * 40


def test_features_are_the_targets_outputs(target: Any, corpus: Corpus) -> None:
    assert corpus.cache.missing() == []
    part = corpus.part([5])
    hidden, tokens, probs = part.features(0)
    with torch.no_grad():
        outputs = target(part.samples[0].tokens.long()[None], output_hidden_states=True)
    torch.testing.assert_close(hidden, outputs.hidden_states[-1][0].bfloat16())
    best = outputs.logits[0].softmax(-1).topk(8)
    assert torch.equal(tokens, best.indices.int())
    torch.testing.assert_close(probs, best.values.bfloat16())


def test_shards_are_found_again_for_the_same_text_target_and_data_type(
    target: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_SHARD", 8)
    before = Features(tmp_path, corpus.samples[:20], "tiny", torch.float32)
    before.compute(target, CPU, lambda done, total: None)
    assert before.missing() == []
    # Added text does not invalidate complete shards.
    assert Features(tmp_path, corpus.samples, "tiny", torch.float32).missing() == [2]
    assert Features(tmp_path, corpus.samples, "another", torch.float32).missing() == [0, 1, 2]
    assert Features(tmp_path, corpus.samples, "tiny", torch.bfloat16).missing() == [0, 1, 2]
    # The same tokens, with another boundary between two texts.
    tokens = torch.cat([sample.tokens for sample in corpus.samples[:2]])
    moved = [Sample(part, torch.ones(len(part)) > 0) for part in (tokens[:40], tokens[40:])]
    moved += corpus.samples[2:8]
    assert Features(tmp_path, moved, "tiny", torch.float32).missing() == [0]


def test_two_runs_may_compute_the_same_shard(
    target: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends while the other writes leaves the other's file alone."""
    first, second = (
        Features(tmp_path, corpus.samples[:2], "tiny", torch.float32) for _ in range(2)
    )
    save = features.save_file

    def save_in_between(tensors: Any, file: Path) -> None:
        save(tensors, file)
        with monkeypatch.context() as patch:
            patch.setattr(features, "save_file", save)
            second.compute(target, CPU, lambda done, total: None)

    monkeypatch.setattr(features, "save_file", save_in_between)
    first.compute(target, CPU, lambda done, total: None)
    assert first.missing() == []
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("kept", [0, 20, -1])
def test_damaged_shards_are_computed_again(
    target: Any,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept: int,
) -> None:
    monkeypatch.setattr(features, "_SHARD", 8)
    samples = corpus.samples[:16]
    before = Features(tmp_path, samples, "tiny", torch.float32)
    before.compute(target, CPU, lambda done, total: None)
    damaged, intact = before._files
    content = damaged.read_bytes()
    written = intact.stat().st_mtime_ns
    damaged.write_bytes(content[:kept])
    again = Features(tmp_path, samples, "tiny", torch.float32)
    again.compute(target, CPU, lambda done, total: None)
    assert f"{damaged} is damaged, and is computed again" in caplog.text
    assert damaged.read_bytes() == content
    assert intact.stat().st_mtime_ns == written
    assert again.missing() == []


TOKEN_INFO = {f"drafter.token_info.{name}" for name in ("w1", "w2", "gain")}


@pytest.mark.parametrize(
    ("variant", "frozen"),
    [
        (LyannaModel, set()),
        (WithoutTokenInfo, TOKEN_INFO),
        (WithoutFirstToken, set()),
        (EagleStyle, TOKEN_INFO),
    ],
)
def test_gradients_flow_to_every_trained_part(
    folder: Path, target: Any, corpus: Corpus, variant: type[LyannaModel], frozen: set[str]
) -> None:
    model = loss_of(drafter_for(folder, model=variant), target)
    loss, _ = model(collate(corpus, [0, 1]), torch.Generator().manual_seed(0))
    loss.backward()
    parameters = dict(model.named_parameters())
    assert {name for name, each in parameters.items() if not each.requires_grad} == frozen
    untrained = {
        name
        for name, each in parameters.items()
        if each.grad is None or not each.grad.abs().sum() > 0
    }
    assert untrained == frozen


def test_the_loss_over_sampled_columns_estimates_the_full_loss(
    folder: Path, target: Any, corpus: Corpus
) -> None:
    drafter = drafter_for(folder)
    every = loss_of(drafter, target)
    every._columns = Columns(torch.arange(VOCAB), VOCAB, sampled=0)
    batch, generator = collate(corpus, [0, 1]), torch.Generator().manual_seed(0)
    batch = replace(batch, top_tokens=batch.top_tokens[..., :1], top_probs=batch.top_probs[..., :1])
    exact = every(batch, generator)[1][0]
    some = loss_of(drafter, target)
    drawn = torch.stack([some(batch, generator)[1][0] for _ in range(30)])
    assert ((drawn.mean(0) - exact).abs() < 0.02 * exact).all()
    assert (drawn.std(0) > 0).all()


def test_a_small_text_is_memorised(
    folder: Path, target: Any, corpus: Corpus, tmp_path: Path
) -> None:
    few = corpus.part(range(12))
    drafter = drafter_for(folder, hot_tokens=VOCAB, token_info_rank=64)
    model = loss_of(drafter, target)
    layer = target.get_decoder().layers[-1]
    initialise(
        drafter,
        *(few, model.embeddings, model.head),
        layer.state_dict(),
        target.get_decoder().norm.weight.detach(),
    )
    before = measure(model, few, CPU)
    settings = TrainingSettings(epochs=200, learning_rate=3e-3, positions=300)
    seen: list[TrainingProgress] = []
    train(model, few, settings, tmp_path, seen.append)
    after = measure(model, few, CPU)
    assert before.positions > 300
    assert before.mean_accepted_tokens < 3.0
    assert min(after.conditional) > 0.95
    assert seen[-1].loss < 0.5 * seen[0].loss


def test_a_run_that_diverges_ends_with_an_error(
    folder: Path, target: Any, corpus: Corpus, tmp_path: Path
) -> None:
    """It leaves no checkpoint from which it would be resumed, and no drafter is saved."""
    model = loss_of(drafter_for(folder), target)
    settings = TrainingSettings(epochs=8, learning_rate=1e30)
    with pytest.raises(
        ValueError, match=r"the loss of step \d+ is nan.*--learning-rate than 1e\+30"
    ):
        train(model, corpus, settings, tmp_path, lambda progress: None)
    assert not has_state(tmp_path)
    with pytest.raises(ValueError, match="not finite numbers: train with a lower --learning-rate"):
        save(model.drafter, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(("steps", "chains"), [(44, 2), (45, 0), (64, 0)])
def test_texts_too_short_for_the_steps_are_not_in_the_loss(
    folder: Path, target: Any, corpus: Corpus, steps: int, chains: int
) -> None:
    """A chain of 44 steps fits into a text of 46 tokens once."""
    samples = [Sample(each.tokens, torch.ones(46, dtype=torch.bool)) for each in corpus.samples[:2]]
    short = Corpus(samples, [0, 1], corpus.cache)
    model = loss_of(drafter_for(folder, steps=steps), target)
    loss, by_step = model(collate(short, [0, 1]), torch.Generator().manual_seed(0))
    loss.backward()
    assert (loss.item() > 0) == (chains > 0)
    assert by_step.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.drafter.parameters())
    found = measure(model, short, CPU)
    assert found.positions <= chains
    assert len(found.conditional) == steps


def test_a_checkpoint_that_is_half_deleted_is_not_taken_for_one(
    folder: Path, target: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_again() -> list[int]:
        steps: list[int] = []
        settings = TrainingSettings(epochs=1, positions=512)
        model = loss_of(drafter_for(folder), target)
        train(model, corpus, settings, tmp_path, lambda progress: steps.append(progress.step))
        return steps

    def interrupt(removed: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            next(removed.glob("*.bin")).unlink()
            raise KeyboardInterrupt

    steps = train_again()
    assert has_state(tmp_path)
    assert train_again() == []
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path, {"positions": 3})
    assert json.loads((tmp_path / "held_out.json").read_text()) == {"positions": 3}
    assert not has_state(tmp_path)
    assert train_again() == steps
    finish(tmp_path, {})
    assert not list(tmp_path.glob("training-state*"))


def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(
    folder: Path, target: Any, corpus: Corpus, tmp_path: Path
) -> None:
    settings = TrainingSettings(epochs=1, positions=512)

    def train_again() -> None:
        train(loss_of(drafter_for(folder), target), corpus, settings, tmp_path, lambda _: None)

    train_again()
    [state] = tmp_path.glob("training-state-*")
    for name in ("model.safetensors", "optimizer.bin"):
        file = state / name
        whole = file.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole))):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{state} cannot be read .*: delete it"):
                train_again()
        file.write_bytes(whole)
    train_again()


def test_a_resumed_run_equals_an_uninterrupted_one(
    folder: Path, target: Any, corpus: Corpus, tmp_path: Path
) -> None:
    settings = TrainingSettings(epochs=6, learning_rate=1e-3, positions=512, save_every=4)
    whole = loss_of(drafter_for(folder), target)
    train(whole, corpus, settings, tmp_path / "whole", lambda progress: None)

    def interrupt(progress: TrainingProgress) -> None:
        if progress.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(loss_of(drafter_for(folder), target), corpus, settings, tmp_path / "parts", interrupt)
    steps: list[int] = []
    resumed = loss_of(drafter_for(folder, seed=1), target)
    train(
        resumed, corpus, settings, tmp_path / "parts", lambda progress: steps.append(progress.step)
    )
    assert steps[0] == 9
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    lines = [
        (tmp_path / part / "metrics.jsonl").read_text().splitlines() for part in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    assert [json.loads(line)["step"] for line in lines[0]] == list(range(1, steps[-1] + 1))
