"""RSD filters distributions as SGLang does with each of its sampling backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here")

from drafttree.sglang import acceptance_sampler

PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])


def info(top_k: int, top_p: float, min_p: float) -> SimpleNamespace:
    """Sampling parameters of two requests, the first of which has no min-p."""
    return SimpleNamespace(
        top_ks=torch.tensor([top_k] * 2),
        top_ps=torch.tensor([top_p] * 2),
        min_ps=torch.tensor([0.0, min_p]),
        max_top_k=top_k,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=min_p > 0,
    )


@pytest.mark.parametrize(
    ("backend", "min_p", "kept"),
    [
        # The best three have 0.9 of the probability. The first two reach 0.75 of that, not of all.
        ("flashinfer", 0.05, [2, 2]),
        ("flashinfer", 0.8, [2, 1]),
        ("flashinfer", 0.0, [3, 3]),
        ("pytorch", 0.05, [3, 3]),
    ],
)
def test_what_top_p_counts_by(
    backend: str, min_p: float, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimpleNamespace(sampling_backend=backend)
    monkeypatch.setattr(acceptance_sampler, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    for probs in (PROBS, PROBS[:, None].expand(-1, 3, -1)):
        found = acceptance_sampler.filter_probs(probs, info(3, 0.75, min_p))
        counts = torch.tensor(kept).view(-1, *[1] * (probs.dim() - 2))
        assert ((found > 0).sum(-1) == counts).all()
        torch.testing.assert_close(found.sum(-1), torch.ones(probs.shape[:-1]))
