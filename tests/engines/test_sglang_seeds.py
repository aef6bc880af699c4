"""A request with a seed draws the same tokens along a tree as without speculation.

SGLang uses seeds in its deterministic mode only, which it refuses on a CPU. So this tests the
sampler alone: SGLang's seeded draw, its Triton kernel interpreted, for a chain and for trees.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sglang_runs import environment

PROGRAM = """
import sys
from types import SimpleNamespace
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang.srt.layers import sampler as host_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as host_draw
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from tree_kernels.mask import depths
from drafttree.sglang import sampling
from drafttree.tree import DraftTree
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.state import Step

def murmur_hash32(seed, positions, columns):
    rows, width = len(seed), len(columns)
    hashed = torch.empty(rows, width, dtype=torch.uint32)
    murmur_hash32_kernel[(rows, 1)](seed, positions, columns, hashed, rows, width, BLOCK_SIZE=16)
    return hashed

sampling.draws_ahead = lambda logits: sys.argv[1] == "all nodes at once"
host_sampler.murmur_hash32 = murmur_hash32  # SGLang's kernel for CPUs needs AMX

VOCAB, STEPS = 16, 40
torch.manual_seed(0)
table = torch.randn(VOCAB, VOCAB)  # the next token's logits, by the last token
seeds = torch.tensor([7, 7, 1234, 5])
starts = torch.tensor([11, 11, 30, 2])  # positions of the roots
info = SamplingBatchInfo(
    temperatures=torch.full((4, 1), 0.9), top_ps=torch.full((4,), 0.95),
    top_ks=torch.tensor([16, 16, 6, 10]), min_ps=torch.zeros(4), is_all_greedy=False,
    is_any_greedy=False, need_top_p_sampling=True, need_top_k_sampling=True,
    need_min_p_sampling=False, vocab_size=VOCAB, sampling_seed=seeds, device="cpu",
)

def sampler(output, info, return_logprob, top, ids, positions):
    probabilities = (output.next_token_logits / info.temperatures).softmax(-1)
    return host_draw(probabilities, info.top_ks, info.top_ps, info.min_ps, False,
                     info.sampling_seed, positions)

def plain():
    tokens, written = torch.tensor([0, 0, 3, 9]), [[], [], [], []]
    for step in range(STEPS):
        output = LogitsProcessorOutput(next_token_logits=table[tokens].clone())
        tokens = sampler(output, info, False, None, None, starts + step).long()
        for row, token in zip(written, tokens.tolist()):
            row.append(token)
    return written

def drafted():
    roots, written, accepted = torch.tensor([0, 0, 3, 9]), [[], [], [], []], 0
    best = table.topk(4).indices
    parents = torch.tensor([-1, 0, 0, 0, 0, 1, 1, 2, 2]).int().expand(4, -1)
    while min(map(len, written)) < STEPS:
        children = best[roots]
        tokens = torch.cat([roots[:, None], children, best[children[:, 0], :2],
                            best[children[:, 1], :2]], 1)
        trees = DraftTree(tokens.int(), parents, torch.full((4,), 9).int())
        output = LogitsProcessorOutput(next_token_logits=table[tokens].flatten(0, 1))
        lengths = starts + torch.tensor([len(row) for row in written])
        batch = SimpleNamespace(sampling_info=info, seq_lens=lengths, return_logprob=False,
                                has_grammar=False, top_logprobs_nums=None, token_ids_logprobs=None)
        depth = depths(trees.parents, trees.tree_size)
        verified = verify_trees(sampler, Step.of(batch, trees, depth, None, None), 2, output)
        for row, emitted, count in zip(written, verified.emitted, verified.num_emitted):
            row.extend(emitted[:count].tolist())
        accepted += int(verified.num_emitted.sum()) - 4
        roots = torch.tensor([row[-1] for row in written])
    return [row[:STEPS] for row in written], accepted

expected, (found, accepted) = plain(), drafted()
assert found == expected, (found, expected)
assert expected[0] == expected[1] != expected[3]
print("accepted", accepted)
"""


@pytest.mark.parametrize("order", ["level by level", "all nodes at once"])
def test_seeded_draws_equal_those_of_a_chain(order: str) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, order],
        env=os.environ | environment() | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout.split()[-1]) > 20
