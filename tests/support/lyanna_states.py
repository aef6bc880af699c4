"""Lyanna's logits in an engine, compared with PyTorch's on the same text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "DRAFTTREE_TEST_STATES"
"""Environment variable of an engine's process that names the file that `record_logits` writes."""


def record_logits(file: str) -> None:
    """Write the logits and outcomes of all steps to a file; called in an engine's process."""
    from lyanna_plugin.drafter import LyannaTrees

    events: list[tuple[str, Any]] = []
    propose, on_verified = LyannaTrees.propose, LyannaTrees.on_verified

    def record_proposal(self: Any, slots: Any, roots: Any, logits: Any, steps: Any) -> Any:
        events.append(("propose", (roots[0].item(), logits[0].clone(), steps[0].item())))
        return propose(self, slots, roots, logits, steps)

    def record_outcome(self: Any, slots: Any, trees: Any, verified: Any) -> None:
        if len(slots) and trees.tree_size[0] > 1:
            events.append(("accepted", verified.num_emitted[0].item() - 1))
            torch.save(events, file)
        elif len(slots):
            events.append(("undrafted", None))
        on_verified(self, slots, trees, verified)

    LyannaTrees.propose = record_proposal  # type: ignore[method-assign]
    LyannaTrees.on_verified = record_outcome  # type: ignore[method-assign]


@dataclass
class Proposal:
    """One step of a request that ran alone.

    Attributes:
        root: The last accepted token.
        logits: `[L, V]`, of which the first `steps` are valid.
        steps: Number of valid steps.
        accepted: Number of accepted draft tokens.
    """

    root: int
    logits: torch.Tensor
    steps: int
    accepted: int = 0


def recorded_steps(file: Path) -> list[list[Proposal]]:
    """The recorded steps of each request; the requests ran one after another."""
    requests: list[list[Proposal]] = []
    begins = True
    for what, value in torch.load(file):
        if what == "undrafted":
            begins = True
        elif what == "propose":
            if begins:
                requests.append([])
                begins = False
            requests[-1].append(Proposal(*value))
        else:
            requests[-1][-1].accepted = value
    return requests


@torch.no_grad()
def check_states(
    target: Path, drafter: Path, prompts: list[list[int]], answers: list[list[int]], file: Path
) -> None:
    """Check that the engine's logits are PyTorch's, and that replaying accepts the same drafts.

    Args:
        target: Folder of the target.
        drafter: Folder of the drafter.
        prompts: Token ids of the prompts.
        answers: Token ids of the engine's answers.
        file: The file that `record_logits` wrote.
    """
    from transformers import AutoModelForCausalLM

    from lyanna_plugin.checkpoint import load
    from lyanna_plugin.config import LyannaOptions
    from scripts.experiments.lyanna.lyanna_replay import LyannaReplay, Text

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    module = load(drafter, target)
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(prompt + answer)
        hidden = model.get_decoder()(tokens[None]).last_hidden_state[0]
        texts.append(Text(tokens, hidden, len(prompt)))
    replayed = LyannaReplay(texts, module, embeddings, head, 3).run(
        LyannaOptions(model="", nodes=12)
    )
    for text, steps, again in zip(texts, recorded_steps(file), replayed, strict=True):
        states = module.unroll(
            text.hidden[None, :-1], embeddings[text.tokens[1:]][None], len(steps[0].logits)
        )
        expected = torch.stack([each[0] for each in states], 1) @ head.T
        at, compared = text.start, 0
        for step in steps:
            # An engine may run one more step after the end.
            if at >= len(text.tokens) - 1:
                break
            assert step.root == text.tokens[at]
            difference = (step.logits - expected[at - 1])[: step.steps].abs().max()
            assert difference < 1e-4 * expected.std()
            compared += 1
            at += 1 + step.accepted
        # If only one token is left, vLLM does not request a tree.
        left = len(text.tokens) - 1 - at
        assert left in (0, 1)
        assert compared + left == again.steps
