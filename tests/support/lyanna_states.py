"""What Lyanna's layer makes of texts: in an engine, and in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "DRAFTTREE_TEST_STATES"
"""Names the file that `keep_logits` writes, in the environment of an engine's process."""


def keep_logits(file: str) -> None:
    """Write what the drafter hears and says into a file. Called in an engine's process."""
    from lyanna_plugin.drafter import LyannaTrees

    heard: list[tuple[str, Any]] = []
    forget, propose, accepted = (
        LyannaTrees.forget,
        LyannaTrees.propose,
        LyannaTrees.accepted,
    )

    def forgetting(self: Any, slots: Any) -> None:
        if len(slots):
            heard.append(("forget", None))
        forget(self, slots)

    def proposing(self: Any, slots: Any, roots: Any, logits: Any, steps: Any) -> Any:
        heard.append(("propose", (roots[0].item(), logits[0].clone(), steps[0].item())))
        return propose(self, slots, roots, logits, steps)

    def accepting(self: Any, slots: Any, drafts: Any) -> None:
        if len(drafts):
            heard.append(("accepted", drafts[0].item()))
            torch.save(heard, file)
        accepted(self, slots, drafts)

    LyannaTrees.forget = forgetting  # type: ignore[method-assign]
    LyannaTrees.propose = proposing  # type: ignore[method-assign]
    LyannaTrees.accepted = accepting  # type: ignore[method-assign]


@dataclass
class Proposal:
    """One step of a request that ran alone.

    Attributes:
        root: the last accepted token.
        logits: `[L, V]`, of which there are `steps`.
        accepted: the drafts that were accepted.
    """

    root: int
    logits: torch.Tensor
    steps: int
    accepted: int = 0


def kept(file: Path) -> list[list[Proposal]]:
    """The steps of each of the requests, which ran one after another."""
    requests: list[list[Proposal]] = []
    begins = True
    for what, value in torch.load(file):
        if what == "forget":
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
    """Each request's logits are PyTorch's on the same text, and what was accepted of its trees is
    what replaying the text accepts.

    Args:
        file: what `keep_logits` has written.
    """
    from transformers import AutoModelForCausalLM

    from lyanna_plugin.checkpoint import load
    from lyanna_plugin.config import LyannaOptions
    from lyanna_plugin.replay import LyannaReplay, Text

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    module = load(drafter, target)
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(prompt + answer)
        hidden = model.get_decoder()(tokens[None]).last_hidden_state[0]
        texts.append(Text(tokens, hidden, len(prompt)))
    replayed = LyannaReplay(texts, module, embeddings, head, 3).run(LyannaOptions(model=""))
    for text, steps, again in zip(texts, kept(file), replayed, strict=True):
        states = module.unroll(
            text.hidden[None, :-1], embeddings[text.tokens[1:]][None], len(steps[0].logits)
        )
        expected = torch.stack([each[0] for each in states], 1) @ head.T
        at, compared = text.start, 0
        for step in steps:
            # An engine may go on for a step after the end.
            if at >= len(text.tokens) - 1:
                break
            assert step.root == text.tokens[at]
            difference = (step.logits - expected[at - 1])[: step.steps].abs().max()
            assert difference < 1e-4 * expected.std()
            compared += 1
            at += 1 + step.accepted
        # Where one token is left vLLM asks for no tree.
        left = len(text.tokens) - 1 - at
        assert left in (0, 1)
        assert compared + left == again.steps
