"""RSD samples from the distributions from which SGLang does with `rl_on_policy_target`.

The option is refused on a CPU, as is the deterministic mode that it implies, so this tests the
sampler alone.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here")

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from drafttree.sglang.acceptance_sampler import AcceptanceSampler


def test_rules_get_the_distributions_of_the_log_probabilities() -> None:
    """They are those of logits in bfloat16, divided by the temperatures in bfloat16."""
    logits = torch.randn(3, 50, generator=torch.manual_seed(0))
    temperatures = torch.tensor([[0.7], [1.0], [1.3]])
    info = SamplingBatchInfo(
        temperatures=temperatures,
        top_ps=torch.ones(3),
        top_ks=torch.full((3,), 50),
        min_ps=torch.zeros(3),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=50,
        sampling_seed=torch.tensor([1, 2, 3]),
        device="cpu",
    )
    sampler = _on_policy_sampler()
    nodes = torch.tensor([0, 4, 2], dtype=torch.int32)
    seen: list[torch.Tensor] = []

    def rule(target: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        assert at is nodes
        seen.append(target)
        return torch.tensor([5, 6, 7], dtype=torch.int32)

    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    with sampler.using(rule, nodes):
        tokens = sampler(output, info, False, [0] * 3, [None] * 3, torch.arange(3))
    assert tokens.tolist() == [5, 6, 7]
    expected = (logits.bfloat16() / temperatures).bfloat16().float().softmax(-1)
    torch.testing.assert_close(seen[0], expected, atol=2e-3, rtol=0.02)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(3))


def _on_policy_sampler() -> AcceptanceSampler:
    """A sampler as SGLang makes it with the option, which needs a server's state otherwise."""
    sampler = AcceptanceSampler.__new__(AcceptanceSampler)
    torch.nn.Module.__init__(sampler)
    sampler.__dict__.update(
        tp_sync_group=None,
        cp_sync_group=None,
        rl_on_policy_target="fsdp",
        enable_deterministic=True,
        use_log_softmax_logprob=True,
        use_ascend_backend=False,
        sampling_mask_max_tokens=None,
        output_logprob_processor=SimpleNamespace(),
    )
    return sampler
