"""Acceptance statistics of candidates by their source.

A candidate counts as tried if its parent was accepted, and as hit if it was accepted too. Its
acceptance probability is estimated as (WEIGHT * expected + hit) / (WEIGHT + tried), the mean of a
beta distribution. Both counts of a source are halved when it was tried more than MOST_TRIED times,
so they never overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl

_COUNT = CppFunction("source_stats.cpp", "count_trees", "ppppiiiippppii")
_BLOCK = 256


@dataclass(frozen=True)
class SourceStats:
    """The acceptance statistics of S sources: `candidates.NUM_SOURCES` for dynamic trees, one for
    each node of a static tree.

    Attributes:
        expected: Float32 `[S]`, the prior acceptance probability, before any candidate is tried.
        tried: Int32 `[S]`, the number of candidates whose parent was accepted.
        hit: Int32 `[S]`, the number of tried candidates that were accepted.
        priors: Float32 `[S]`, the estimated acceptance probability.
        WEIGHT: The number of tries that `expected` counts as.
        MOST_TRIED: The number of tries beyond which both counts of a source are halved.
    """

    expected: Tensor
    tried: Tensor
    hit: Tensor
    priors: Tensor

    WEIGHT = 32
    MOST_TRIED = 1 << 20

    @classmethod
    def of(cls, expected: Tensor) -> SourceStats:
        """Statistics before any candidate is tried."""
        tried = torch.zeros_like(expected, dtype=torch.int32)
        return cls(expected, tried, tried.clone(), expected.clone())

    def reset(self) -> None:
        """Set all counts to zero."""
        self.tried.zero_()
        self.hit.zero_()
        self.priors.copy_(self.expected)

    def halve(self, most_tried: int = MOST_TRIED) -> None:
        """Halve the counts of sources that were tried more often than that."""
        old = (self.tried > most_tried).int()
        for counted in (self.tried, self.hit):
            counted.bitwise_right_shift_(old)

    def refresh(self) -> None:
        """Recompute `priors` from the counts."""
        counted = self.expected * self.WEIGHT + self.hit
        torch.div(counted, self.tried + self.WEIGHT, out=self.priors)


@jit(do_not_specialize=["tokens", "parents", "sources", "width", "depth"])
def _count_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    sources: tl.tensor,
    slots: tl.tensor,
    path: tl.tensor,
    tried: tl.tensor,
    hit: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    sources_stride: tl.tensor,
    BY_SLOT: tl.constexpr,
    PAD: tl.constexpr,
    DEPTH_PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    line = request
    if BY_SLOT:
        line = tl.load(slots + request).to(tl.int64)
    node = tl.arange(0, PAD)
    step = tl.arange(0, DEPTH_PAD)
    inside = node < width
    token = tl.load(tokens + request * width + node, mask=inside, other=-1)
    parent = tl.load(parents + request * width + node, mask=inside, other=-1)
    source = tl.load(sources + line * sources_stride + node, mask=inside, other=0)
    accepted = tl.load(path + request * depth + step, mask=step < depth, other=-1)[None, :]
    here = tl.max((accepted == node[:, None]).to(tl.int32), 1)
    above = tl.max((accepted == parent[:, None]).to(tl.int32), 1)
    tries = (token >= 0) & (parent >= 0) & (above > 0)
    tl.atomic_add(tried + source, above, mask=tries, sem="relaxed")
    tl.atomic_add(hit + source, here, mask=tries, sem="relaxed")


@jit
def _priors_kernel(
    tried: tl.tensor,
    hit: tl.tensor,
    expected: tl.tensor,
    priors: tl.tensor,
    total: tl.tensor,
    WEIGHT: tl.constexpr,
    MOST_TRIED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    source = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = source < total
    hits = tl.load(hit + source, mask=inside, other=0)
    tries = tl.load(tried + source, mask=inside, other=0)
    old = tries > MOST_TRIED
    hits = tl.where(old, hits >> 1, hits)
    tries = tl.where(old, tries >> 1, tries)
    tl.store(hit + source, hits, mask=old)
    tl.store(tried + source, tries, mask=old)
    prior_hits = tl.load(expected + source, mask=inside, other=0.0) * WEIGHT
    prior = tl.div_rn(prior_hits + hits.to(tl.float32), (tries + WEIGHT).to(tl.float32))
    tl.store(priors + source, prior, mask=inside)


def _count_triton(
    source_stats: SourceStats,
    tokens: Tensor,
    parents: Tensor,
    sources: Tensor,
    path: Tensor,
    slots: Tensor | None = None,
) -> None:
    batch, width = tokens.shape
    if batch == 0:
        return
    _count_kernel[(batch,)](
        tokens,
        parents,
        sources,
        slots if slots is not None else path,
        path,
        source_stats.tried,
        source_stats.hit,
        width,
        path.shape[1],
        sources.shape[1],
        BY_SLOT=slots is not None,
        PAD=next_power_of_2(width),
        DEPTH_PAD=path_pad(path.shape[1]),
    )
    num_sources = source_stats.expected.shape[0]
    _priors_kernel[(-(-num_sources // _BLOCK),)](
        source_stats.tried,
        source_stats.hit,
        source_stats.expected,
        source_stats.priors,
        num_sources,
        WEIGHT=source_stats.WEIGHT,
        MOST_TRIED=source_stats.MOST_TRIED,
        BLOCK=_BLOCK,
    )


def _count_reference(
    source_stats: SourceStats,
    tokens: Tensor,
    parents: Tensor,
    sources: Tensor,
    path: Tensor,
    slots: Tensor | None = None,
) -> None:
    batch, width = tokens.shape
    on = torch.zeros(batch, width + 1, dtype=torch.int32, device=tokens.device)
    on.scatter_(1, torch.where(path < 0, width, path).long(), 1)
    above = torch.where(parents < 0, width, parents).long()
    on[:, width] = 0
    tried = on.gather(1, above) * (tokens >= 0)
    sources = sources if slots is None else sources[slots]
    where = sources[:, :width].flatten().long()
    source_stats.tried.scatter_add_(0, where, tried.flatten())
    source_stats.hit.scatter_add_(0, where, (tried * on[:, :width]).flatten())
    source_stats.halve()
    source_stats.refresh()


def _count_cpp(
    source_stats: SourceStats,
    tokens: Tensor,
    parents: Tensor,
    sources: Tensor,
    path: Tensor,
    slots: Tensor | None = None,
) -> None:
    sources = sources if slots is None else sources[slots]
    _COUNT.call(
        *(tokens.data_ptr(), parents.data_ptr(), sources.data_ptr(), path.data_ptr()),
        *(*tokens.shape, path.shape[1], sources.shape[1]),
        *(
            source_stats.tried.data_ptr(),
            source_stats.hit.data_ptr(),
            source_stats.expected.data_ptr(),
        ),
        *(source_stats.priors.data_ptr(), source_stats.WEIGHT, source_stats.MOST_TRIED),
    )


_COUNT_TREES = Op(
    "source_stats.count", _count_reference, triton=_count_triton, cpp=_count_cpp, needs=_COUNT
)


def count(
    source_stats: SourceStats,
    tokens: Tensor,
    parents: Tensor,
    sources: Tensor,
    path: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Add the outcome of a verification to the statistics, in place.

    Args:
        source_stats: The statistics.
        tokens: Int32 `[B, N]`, the trees as they were verified; -1 where there is no node.
        parents: Int32 `[B, N]`, the columns of the nodes' parents, -1 for a root.
        sources: Int32 `[B, N']` with N' >= N, the source of each node.
        path: Int32 `[B, D]`, the accepted nodes, the root included; padded with -1.
        slots: Integers `[B]`: the line of `sources`, which then has any number, of each tree.
    """
    tokens, parents = tokens.contiguous(), parents.contiguous()
    sources, path = sources.contiguous(), path.int().contiguous()
    _COUNT_TREES.on(tokens)(source_stats, tokens, parents, sources, path, slots)
