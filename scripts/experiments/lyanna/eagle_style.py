"""EAGLE's way of drafting with the same layer, for comparison.

Every token is fed back, so each level of the tree takes a forward of its expanded nodes, and the
head is applied to each of them. n is the number of trees, w the number of nodes of a level, d the
hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tree_kernels.expansion import ExpandedTrees

from drafttree.tree import DraftTree
from lyanna_plugin.model import AttendBatch, LyannaModel
from lyanna_plugin.tree import prune
from scripts.experiments.common import Replayed
from scripts.experiments.lyanna.lyanna_replay import Text, replay


class TreeKV:
    """The layer's KV for texts, and for the nodes of trees at positions in them.

    Args:
        keys: `[n, S, Hkv, D]`, the texts' keys.
        values: `[n, S, Hkv, D]`, the texts' values.
        positions: `int64 [n]`, the trees' positions; a tree attends to the text before it.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self._keys, self._values = [keys], [values]
        columns = torch.arange(keys.shape[1], device=keys.device)
        self._seen = (columns < positions[:, None])[:, None]

    def attend(self, parents: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the expanded nodes of one level.

        Args:
            parents: `int64 [n, w]`, each node's parent among the nodes of the level above.
            q: `[n, w, Hq, D]`, queries.
            k: `[n, w, Hkv, D]`, keys.
            v: `[n, w, Hkv, D]`, values.

        Returns:
            `[n, w, Hq, D]`.
        """
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


def text_kv(
    drafter: LyannaModel, hidden: Tensor, embedded: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The first states `[S, d]` at all positions of a text, and the layer's keys and values."""
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
    layer: Callable[[Tensor, Tensor, Tensor, AttendBatch], Tensor],
    head: Callable[[Tensor], Tensor],
    first: Tensor,
    cache: TreeKV,
    positions: Tensor,
    roots: Tensor,
    *,
    depth: int,
    width: int,
    num_draft_tokens: int,
) -> DraftTree:
    """Draft one tree per root.

    As in Lyanna, each expanded node gets its `width` most likely children, and in each level the
    `width` most likely paths are expanded.

    Args:
        layer: `(states [n, w, d], tokens int64 [n, w], positions [n, w], attend) -> [n, w, d]`, the
            next states.
        head: Maps states to logits.
        first: `[n, d]`, the states that predict the children of the roots.
        cache: The layer's KV.
        positions: `int64 [n]`, the roots' positions.
        roots: `int32 [n]`, the roots.
        depth: Depth of the trees.
        width: Number of children of a node, and of expanded nodes in a level.
        num_draft_tokens: Maximum number of nodes, excluding the root.
    """
    states, joint = first[:, None], torch.zeros(len(roots), 1, device=first.device)
    columns = torch.zeros_like(roots)[:, None]
    tokens, parents, scores, num_found = [roots[:, None]], [columns - 1], [joint], 1
    for level in range(depth):
        top = head(states).log_softmax(-1).topk(width)
        joined = (joint[:, :, None] + top.values).flatten(1)
        tokens.append(top.indices.int().flatten(1))
        parents.append(columns[:, :, None].expand_as(top.indices).flatten(1))
        scores.append(joined)
        if level + 1 == depth:
            break
        joint, best = joined.topk(width)
        columns = (num_found + best).int()
        num_found += joined.shape[1]
        rows = best // width
        token = tokens[-1].gather(1, best).long()
        parent_states = states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[2]))
        at = (positions + level)[:, None].expand_as(token)
        states = layer(parent_states, token, at, functools.partial(cache.attend, rows))
    nodes = torch.cat(tokens, 1)
    expanded = ExpandedTrees(
        nodes, torch.cat(parents, 1), torch.zeros_like(nodes), torch.cat(scores, 1).exp()
    )
    return prune(expanded, num_draft_tokens)


def replay_eagle(
    texts: Sequence[Text],
    drafter: LyannaModel,
    embeddings: Tensor,
    head: Tensor,
    *,
    depth: int,
    width: int,
    num_draft_tokens: int,
) -> list[Replayed]:
    """Replay the decoding of texts with EAGLE-style trees."""
    with torch.inference_mode():
        kept = [text_kv(drafter, text.hidden[:-1], embeddings[text.tokens[1:]]) for text in texts]
    states, keys, values = (pad_sequence(list(each), True) for each in zip(*kept, strict=True))

    def layer(parents: Tensor, tokens: Tensor, at: Tensor, attend: AttendBatch) -> Tensor:
        result: Tensor = drafter(drafter.fuse(parents, embeddings[tokens]), at, attend)
        return result

    def propose(rows: Tensor, positions: Tensor, roots: Tensor) -> DraftTree:
        return draft_tree(
            layer,
            lambda states: states @ head.T,
            states[rows, positions - 1],
            TreeKV(keys[rows], values[rows], positions),
            positions,
            roots,
            depth=depth,
            width=width,
            num_draft_tokens=num_draft_tokens,
        )

    return replay(texts, depth, propose)
