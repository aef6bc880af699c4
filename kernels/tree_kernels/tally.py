"""What candidates of each origin turned out to be worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl, use_triton

_COUNT = NativeFunction("tally.cpp", "count_trees", "ppppiiiippppi")
_BLOCK = 256


@dataclass(frozen=True)
class Tally:
    """What became of the candidates of each origin, and what they are worth after it.

    There are O of them: `ORIGINS` for trees that are grown, for others as many as the caller tells
    apart.

    Attributes:
        expected: `float32 [O]`, what they were thought to be worth before any was tried.
        tried: `int32 [O]`, those whose parent was accepted.
        hit: `int32 [O]`, those that were accepted too.
        priors: `float32 [O]`: `hit` of `tried`, and `expected` as if of `WEIGHT` more.
    """

    expected: Tensor
    tried: Tensor
    hit: Tensor
    priors: Tensor

    WEIGHT = 32

    @classmethod
    def of(cls, expected: Tensor) -> Tally:
        """Nothing tried yet."""
        tried = torch.zeros_like(expected, dtype=torch.int32)
        return cls(expected, tried, tried.clone(), expected.clone())

    def reset(self) -> None:
        """Forget what was tried."""
        self.tried.zero_()
        self.hit.zero_()
        self.priors.copy_(self.expected)

    def refresh(self) -> None:
        """Set `priors` by what is counted."""
        counted = self.expected * self.WEIGHT + self.hit
        torch.div(counted, self.tried + self.WEIGHT, out=self.priors)


@jit(do_not_specialize=["tokens", "parents", "origins", "nodes", "depth"])
def _count_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    origins: tl.tensor,
    path: tl.tensor,
    tried: tl.tensor,
    hit: tl.tensor,
    nodes: tl.tensor,
    depth: tl.tensor,
    origins_stride: tl.tensor,
    PAD: tl.constexpr,
    DEPTH_PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PAD)
    step = tl.arange(0, DEPTH_PAD)
    inside = node < nodes
    token = tl.load(tokens + request * nodes + node, mask=inside, other=-1)
    parent = tl.load(parents + request * nodes + node, mask=inside, other=-1)
    origin = tl.load(origins + request * origins_stride + node, mask=inside, other=0)
    accepted = tl.load(path + request * depth + step, mask=step < depth, other=-1)[None, :]
    here = tl.max((accepted == node[:, None]).to(tl.int32), 1)
    above = tl.max((accepted == parent[:, None]).to(tl.int32), 1)
    tries = (token >= 0) & (parent >= 0) & (above > 0)
    tl.atomic_add(tried + origin, above, mask=tries, sem="relaxed")
    tl.atomic_add(hit + origin, here, mask=tries, sem="relaxed")


@jit
def _priors_kernel(
    tried: tl.tensor,
    hit: tl.tensor,
    expected: tl.tensor,
    priors: tl.tensor,
    total: tl.tensor,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    origin = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = origin < total
    hits = tl.load(hit + origin, mask=inside, other=0).to(tl.float32)
    tries = tl.load(tried + origin, mask=inside, other=0) + WEIGHT
    thought = tl.load(expected + origin, mask=inside, other=0.0) * WEIGHT
    tl.store(priors + origin, tl.div_rn(thought + hits, tries.to(tl.float32)), mask=inside)


def _count_triton(
    tally: Tally, tokens: Tensor, parents: Tensor, origins: Tensor, path: Tensor
) -> None:
    batch, nodes = tokens.shape
    if batch == 0:
        return
    _count_kernel[(batch,)](
        tokens,
        parents,
        origins,
        path,
        tally.tried,
        tally.hit,
        nodes,
        path.shape[1],
        origins.shape[1],
        PAD=next_power_of_2(nodes),
        DEPTH_PAD=path_pad(path.shape[1]),
    )
    origins_counted = len(tally.expected)
    _priors_kernel[(-(-origins_counted // _BLOCK),)](
        tally.tried,
        tally.hit,
        tally.expected,
        tally.priors,
        origins_counted,
        WEIGHT=tally.WEIGHT,
        BLOCK=_BLOCK,
    )


def _count_reference(
    tally: Tally, tokens: Tensor, parents: Tensor, origins: Tensor, path: Tensor
) -> None:
    batch, nodes = tokens.shape
    on = torch.zeros(batch, nodes + 1, dtype=torch.int32)
    on.scatter_(1, torch.where(path < 0, nodes, path).long(), 1)
    above = torch.where(parents < 0, nodes, parents).long()
    on[:, nodes] = 0
    tried = on.gather(1, above) * (tokens >= 0)
    where = origins[:, :nodes].flatten().long()
    tally.tried.scatter_add_(0, where, tried.flatten())
    tally.hit.scatter_add_(0, where, (tried * on[:, :nodes]).flatten())
    tally.refresh()


def count(tally: Tally, tokens: Tensor, parents: Tensor, origins: Tensor, path: Tensor) -> None:
    """Count a verification in, in place.

    tokens, parents: int32 [B, N] of the trees as they were verified; origins: int32 [B, N' >= N];
    path: int32 [B, D], the accepted nodes, the root among them, -1 for none.
    """
    tokens, parents = tokens.contiguous(), parents.contiguous()
    origins, path = origins.contiguous(), path.int().contiguous()
    if use_triton(tokens):
        _count_triton(tally, tokens, parents, origins, path)
        return
    run = _COUNT.on(tokens)
    if run is None:
        _count_reference(tally, tokens, parents, origins, path)
        return
    run(
        *(tokens.data_ptr(), parents.data_ptr(), origins.data_ptr(), path.data_ptr()),
        *(*tokens.shape, path.shape[1], origins.shape[1]),
        *(tally.tried.data_ptr(), tally.hit.data_ptr(), tally.expected.data_ptr()),
        *(tally.priors.data_ptr(), tally.WEIGHT),
    )
