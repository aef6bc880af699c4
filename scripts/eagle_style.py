"""EAGLE's way of drafting with the same layer, to compare with: every token is fed back, so that
every level of the tree is a forward of its live nodes, and the head is applied to each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from drafttree.drafter import DraftTree
from lyanna_plugin.model import Attend, Drafter
from lyanna_plugin.replay import Replayed, Text, replay
from lyanna_plugin.tree import cut


class TreeKV:
    """The layer's KV of texts, and of the nodes of the trees below places in them.

    Args:
        keys, values: `[n, S, Hkv, D]`, the texts'.
        places: int64 `[n]`: a tree sees the text's rows before its own.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        self._keys, self._values = [keys], [values]
        here = torch.arange(keys.shape[1], device=keys.device)
        self._seen = (here < places[:, None])[:, None]

    def attend(self, parents: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one level's live nodes, `[n, w, H, D]`; `parents` says which of the level
        before each belongs to, int64 `[n, w]`."""
        seen = self._seen.gather(1, parents[:, :, None].expand(-1, -1, self._seen.shape[2]))
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=seen.device)
        own = own.expand(len(parents), -1, -1)
        self._seen = torch.cat([seen, own], 2)
        self._keys.append(k)
        self._values.append(v)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            torch.cat(self._keys, 1).transpose(1, 2),
            torch.cat(self._values, 1).transpose(1, 2),
            attn_mask=self._seen[:, None],
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


def text_kv(drafter: Drafter, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first states `[S, d]` at every place of a text, and the layer's keys and values."""
    kept: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.extend((k[0], v[0]))
        attended = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2)

    positions = torch.arange(len(hidden))[None]
    states = drafter(drafter.fuse(hidden, embedded)[None], positions, attend)
    return states[0], kept[0], kept[1]


def draft_tree(
    layer: Callable[[Tensor, Tensor, Tensor, Attend], Tensor],
    head: Callable[[Tensor], Tensor],
    first: Tensor,
    cache: TreeKV,
    places: Tensor,
    roots: Tensor,
    *,
    depth: int,
    width: int,
    nodes: int,
) -> DraftTree:
    """Trees under `roots`, int32 `[n]`, whose first states `[n, d]` are known.

    Each live node has its `width` likeliest children; the `width` likeliest paths of a level live
    on, as in Lyanna's.

    Args:
        layer: `(states [n, w, d], tokens int64 [n, w], positions [n, w], attend)` to the next
            states.
        head: from states to logits.
    """
    states, joint = first[:, None], torch.zeros(len(roots), 1, device=first.device)
    columns = torch.zeros_like(roots)[:, None]
    tokens, parents, scores, known = [], [], [], 1
    for level in range(depth):
        best = head(states).log_softmax(-1).topk(width)
        joined = (joint[:, :, None] + best.values).flatten(1)
        tokens.append(best.indices.int().flatten(1))
        parents.append(columns[:, :, None].expand_as(best.indices).flatten(1))
        scores.append(joined)
        if level + 1 == depth:
            break
        joint, live = joined.topk(width)
        columns = (known + live).int()
        known += joined.shape[1]
        rows = live // width
        token = tokens[-1].gather(1, live).long()
        before = states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[2]))
        positions = (places + level)[:, None].expand_as(token)
        states = layer(before, token, positions, functools.partial(cache.attend, rows))
    return cut(roots, *(torch.cat(each, 1) for each in (tokens, parents, scores)), nodes)


def replay_eagle(
    texts: Sequence[Text],
    drafter: Drafter,
    embeddings: Tensor,
    head: Tensor,
    *,
    depth: int,
    width: int,
    nodes: int,
) -> list[Replayed]:
    """Decode texts with such trees."""
    with torch.inference_mode():
        kept = [text_kv(drafter, text.hidden[:-1], embeddings[text.tokens[1:]]) for text in texts]
    states, keys, values = (pad_sequence(list(each), True) for each in zip(*kept, strict=True))

    def layer(before: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        result: Tensor = drafter(drafter.fuse(before, embeddings[tokens]), positions, attend)
        return result

    def propose(rows: Tensor, places: Tensor, roots: Tensor) -> DraftTree:
        cache = TreeKV(keys[rows], values[rows], places)
        first = states[rows, places - 1]
        return draft_tree(
            *(layer, lambda states: states @ head.T, first, cache, places, roots),
            **{"depth": depth, "width": width, "nodes": nodes},
        )

    return replay(texts, depth, propose)
