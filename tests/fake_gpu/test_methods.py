"""The methods draft on the fake GPU what they draft on the CPU, and the host never waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fake_gpu.record import Record
from fake_gpu.tensors import DeviceTensor, Gpu

from drafttree.acceptance_rules import TreeRule
from drafttree.seeds import Seeds
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_sampled, verify_target
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.tree import TokenTable
from recycle_plugin import texts
from recycle_plugin.dynamic import DynamicTreeDrafter
from recycle_plugin.tables import Tables
from recycle_plugin.texts import Texts
from rsd_plugin import RsdDrafter, RsdOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB = 32


def values(tensor: torch.Tensor) -> list[Any]:
    """The values of a tensor, whatever its device."""
    return (tensor.host if isinstance(tensor, DeviceTensor) else tensor).tolist()


def tensor(array: Any, device: torch.device, dtype: Any = np.int64) -> torch.Tensor:
    return on_device(np.array(array, dtype), device)


def drawn_by_rsd(options: RsdOptions, gpu: Gpu | None) -> tuple[list[Any], Record]:
    """Trees of three requests, one of which is greedy, and their outcome; in three steps."""
    device = CPU if gpu is None else CUDA
    generator = torch.Generator().manual_seed(2)
    target, draft = (
        table.softmax(-1).to(device)
        for table in (1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator)).unbind()
    )
    drafter = RsdDrafter(options, VOCAB)
    drafter.allocate(4, 64)
    seeds = Seeds(device)
    slots, sampled = tensor([2, 0, 1], device), tensor([True, False, True], device, np.bool_)

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    found = []
    with nullcontext() if gpu is None else gpu.no_waiting():
        for length in (5, 8, 9):
            roots = tensor([3, 1, length], device, np.int32)
            lengths = tensor([length, 7, length + 1], device)
            with nullcontext(Record()) if gpu is None else gpu.recording() as record:
                trees, drawn = drafter.propose(
                    slots, roots, seeds.of([None, 4, 5]), lengths, sampled, forward
                )
                rule = drafter.acceptance_rule(trees, drawn)

                def after(tokens: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
                    probs = target[tokens.clamp(min=0).long()]
                    sure = torch.zeros_like(probs).scatter_(1, probs.argmax(1, keepdim=True), 1.0)
                    return torch.where(sampled[:, None], probs, sure)

                def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
                    tokens = trees.tokens.gather(1, nodes.long()[:, None])[:, 0]  # noqa: B023
                    return rule(after(tokens, sampled), nodes)  # noqa: B023

                if isinstance(rule, TreeRule):
                    count, width = trees.tokens.shape
                    of_rows = sampled[:, None].expand(count, width).reshape(-1)
                    rows = torch.arange(count * width, device=device).view(count, width)
                    chosen = rule.of_trees(after(trees.tokens.flatten(), of_rows), rows)
                    verified = verify_target(trees, chosen, drafter.max_depth)
                else:
                    verified = verify_sampled(trees, draw, drafter.max_depth)
            found += [trees.tokens, trees.parents, verified.path, verified.emitted]
    return [values(each) for each in found], record


@pytest.mark.parametrize("verify", ["recursive", "traversal"])
@pytest.mark.parametrize("tree", ["beam:3x2", "branch:3-2"])
def test_rsd(gpu: Gpu, tree: str, verify: Literal["recursive", "traversal"]) -> None:
    options = RsdOptions(model="", tree=tree, verify=verify)
    expected, _ = drawn_by_rsd(options, None)
    found, record = drawn_by_rsd(options, gpu)
    assert found == expected
    assert any(node > 0 for path in found[2::4] for row in path for node in row)
    if verify == "recursive":
        # One for each child that a node of the level may have, and one below the leaves.
        assert (
            record.kernels["_try_kernel"] == {"beam:3x2": 3 + 3 + 1, "branch:3-2": 3 + 2 + 1}[tree]
        )
        assert record.kernels["_take_kernel"] == 3


def drafted_by_lyanna(options: LyannaOptions, gpu: Gpu | None) -> tuple[list[Any], Record]:
    """Trees of two requests in three steps, with second trees after rejections."""
    device = CPU if gpu is None else CUDA
    generator = torch.Generator().manual_seed(3)
    hot = torch.randperm(VOCAB, generator=generator)[:24].int()
    row_of = torch.full((VOCAB,), -1, dtype=torch.int32)
    row_of[hot.long()] = torch.arange(len(hot), dtype=torch.int32)
    table = torch.randn(len(hot), len(hot), generator=generator)
    info = TokenTable(table.to(device), row_of.to(device), hot.to(device))
    if options.head == "hot":
        info = info.hot_alone()
    drafter = LyannaTrees(options, info, torch.float32)
    if options.of_tables is not None:
        tables = Tables(VOCAB, 8, device, bigrams=True, hot_start=True, memory=64)
        nodes = options.num_draft_tokens
        drafter.share_trees(DynamicTreeDrafter(tables, nodes, auto=False, private=False))
    drafter.allocate(4, 64)
    if drafter.tables is not None:
        for slot in (1, 2):
            drafter.tables.start(slot, [5, 6, 0, 7, 1, 0, 7])
    slots, steps = tensor([2, 1], device), tensor([options.steps] * 2, device)
    everything = torch.randn(3, 2, options.steps, len(info.row_of), generator=generator).to(device)
    found = []
    with nullcontext() if gpu is None else gpu.no_waiting():
        for step, logits in enumerate(everything.unbind()):
            roots = tensor([step, 7], device, np.int32)
            with nullcontext(Record()) if gpu is None else gpu.recording() as record:
                trees = drafter.propose(slots, roots, logits, steps)
                accepted = tensor([1, step], device, np.int32)
                emitted = torch.zeros(2, drafter.max_depth + 1, dtype=torch.int32, device=device)
                drafter.on_verified(slots, trees, Verified(emitted, emitted, accepted + 1))
            found += [trees.tokens, trees.parents, trees.tree_size]
            found.append(drafter.max_draft_tokens(slots))
        drafter.release([1])
        found.append(drafter.max_draft_tokens(slots))
    return [values(each) for each in found], record


@pytest.mark.parametrize(
    "given", [{}, {"fusion": False}, {"tables": True}, {"head": "whole"}], ids=str
)
def test_lyanna(gpu: Gpu, given: dict[str, Any]) -> None:
    options = LyannaOptions(model="", width=3, nodes=6, resample_nodes=4, **given)
    expected, _ = drafted_by_lyanna(options, None)
    found, _ = drafted_by_lyanna(options, gpu)
    assert found == expected


def lives_of_requests(max_model_len: int, gpu: Gpu | None) -> list[Any]:
    """What Token Recycling drafts for requests that start, end and start again."""
    device = CPU if gpu is None else CUDA
    tables = Tables(VOCAB, 8, device, bigrams=True, hot_start=True, memory=64)
    drafter = DynamicTreeDrafter(tables, 7, auto=False, private=False)
    drafter.allocate(2, max_model_len)

    def steps() -> Iterator[DraftTree]:
        slots = tensor([1, 0], device)
        for start in (0, 3):
            drafter.start(0, [start, *range(9)])
            drafter.start(1, [5, 6, 5, 6, 5])
            drafter.extend(slots, tensor([[6, 7], [1, -1]], device, np.int32))
            yield drafter.propose(slots, tensor([7, 1], device, np.int32))
            drafter.release([1, 0])

    with nullcontext() if gpu is None else gpu.no_waiting():
        return [values(each) for tree in steps() for each in (tree.tokens, tree.parents)]


def test_requests_start_and_end_without_a_wait(gpu: Gpu) -> None:
    expected = lives_of_requests(64, None)
    assert lives_of_requests(64, gpu) == expected
    assert any(token >= 0 for row in expected[0] for token in row[1:])


def test_texts_that_are_too_long_are_shortened_without_waiting(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lengths are known on the device alone, and some steps later on the host."""
    monkeypatch.setattr(texts, "MAX_BYTES", 2 * 4 * 192)
    kept = Texts(2, 10_000, CUDA)
    draw, slots = random.Random(0), tensor([1, 0], CUDA)
    whole = [[draw.randrange(1000) for _ in range(length)] for length in (90, 300)]
    with gpu.no_waiting():
        for slot, text in enumerate(whole):
            kept.start(slot, text)
    shortest = [kept.room, kept.room]
    for step in range(200):
        # One is always accepted in full, the other never.
        rows = [[draw.randrange(1000) for _ in range(count)] for count in (1, 4)]
        padded = tensor([rows[1], rows[0] + [-1] * 3], CUDA, np.int32)
        with gpu.no_waiting():
            kept.extend(slots, padded)
            if step == 150:
                whole[0] = [draw.randrange(1000) for _ in range(300)]
                kept.start(0, whole[0])
                rows[0] = []
        gpu.copies.wait()  # as hosts do for the tokens of a step
        for slot, text in enumerate(whole):
            text += rows[slot]
            length = values(kept.ngrams.lengths)[slot]
            assert values(kept.ngrams.history)[slot][:length] == text[-length:]
            assert min(len(text), kept.room // 2) <= length <= kept.room
            shortest[slot] = min(shortest[slot], length)
    assert max(shortest) <= kept.room // 2 + 4
