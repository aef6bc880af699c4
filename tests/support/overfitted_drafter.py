"""A drafter that is overfitted to a tiny target's answers: nearly all its drafts are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lyanna_parts import drafter_for

from drafttree.model_files import first_rows_fingerprint
from lyanna_plugin.checkpoint import save
from lyanna_plugin.training.acceptance import Acceptance, measure
from lyanna_plugin.training.dataset import Sample
from lyanna_plugin.training.features import Corpus, Features
from lyanna_plugin.training.initial import initialise
from lyanna_plugin.training.loss import Columns, DrafterLoss, LossWeights
from lyanna_plugin.training.trainer import TrainingSettings, train

LENGTH = 40
VOCAB = 512
PROMPTS = torch.randint(2, VOCAB, (12, 6), generator=torch.Generator().manual_seed(0)).tolist()


def answer(target: Any) -> torch.Tensor:
    """`PROMPTS` with a model's greedy answers, `int64 [12, 6 + LENGTH]`."""
    answered: torch.Tensor = target.generate(
        torch.tensor(PROMPTS),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answered


def make_overfitted(folder: Path, out: Path) -> Acceptance:
    """Train a drafter for the target in `folder` on its greedy answers to `PROMPTS`."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answered = answer(target)
    trained = torch.arange(answered.shape[1]) >= len(PROMPTS[0])
    samples = [Sample(tokens.int(), trained) for tokens in answered]
    features = Features(out / "features", samples, "tiny", torch.float32)
    features.compute(target, torch.device("cpu"), lambda done, total: None)
    corpus = Corpus.whole(samples, features)
    drafter = drafter_for(folder, hot_tokens=VOCAB, token_info_rank=64)
    model = DrafterLoss(
        drafter,
        target.get_input_embeddings().weight.detach(),
        target.get_output_embeddings().weight.detach(),
        Columns(torch.arange(100), VOCAB, sampled=100),
        LossWeights(),
    )
    decoder = target.get_decoder()
    initialise(
        drafter,
        *(corpus, model.embeddings, model.head),
        decoder.layers[-1].state_dict(),
        decoder.norm.weight.detach(),
    )
    settings = TrainingSettings(epochs=150, learning_rate=3e-3, positions=300)
    train(model, corpus, settings, out, lambda progress: None)
    save(drafter, out)
    return measure(model, corpus, torch.device("cpu"))


def make_overfitted_to_adapter(target: Path, merged: Path, out: Path) -> Path:
    """Train a drafter for a target on the greedy answers that it gives with a LoRA adapter.

    Args:
        target: The target's folder.
        merged: What the target is with the adapter, with the same embeddings and head.
        out: The drafter's folder.
    """
    assert make_overfitted(merged, out).mean_accepted_tokens > 2.5
    file = out / "config.json"
    config = json.loads(file.read_text())
    config["lyanna"]["fingerprint"] = first_rows_fingerprint(target)
    file.write_text(json.dumps(config))
    return out
