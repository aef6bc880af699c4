"""Initial weights: linear maps fitted to the features, and the target's own last layer.

The maps are ridge regressions over the positions of answers, which save thousands of training
steps. The fusion is fitted to predict the next hidden state from the current one and the next
token, and the map between steps to predict it without the token. The token info is the best
low-rank approximation of the linear map from the token's embedding to the next logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lyanna_plugin.model import LyannaModel
from lyanna_plugin.training.features import Corpus

_MAX_POSITIONS = 100_000


def initialise(
    drafter: LyannaModel,
    corpus: Corpus,
    embeddings: Tensor,
    head: Tensor,
    last_layer: dict[str, Tensor],
    final_norm: Tensor,
) -> None:
    """Set the initial weights of a draft model.

    Args:
        drafter: The draft model.
        corpus: Text with the target's features.
        embeddings: `[V, d]`, the target's embeddings.
        head: `[V, d]`, the target's output head.
        last_layer: The weights of the target's last layer, by their names in the layer.
        final_norm: `[d]`, the weight of the target's final norm.
    """
    before, token, after = _positions(corpus)
    embedded = embeddings[token]
    mean = after.mean(0)
    with torch.no_grad():
        drafter.load_state_dict(last_layer, strict=False)
        fused = _ridge(drafter.fusion_input(before, embedded), after)
        drafter.fuse_proj.weight.copy_(fused.T)
        if isinstance(drafter.between, torch.nn.Linear):
            drafter.between.weight.copy_(_ridge(before, after).T)
        drafter.norm.weight.copy_(final_norm)
        info = drafter.token_info
        to_logits = _ridge(embedded, after - mean) @ head[info.hot_tokens.long()].T
        w1, w2 = _low_rank(to_logits, embedded, info.w1.shape[1])
        info.w1.copy_(w1)
        info.w2.copy_(w2)


def _positions(corpus: Corpus) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states in answers, the tokens after them, and the hidden states after those."""
    before, token, after = [], [], []
    count = 0
    for index, sample in enumerate(corpus.samples):
        hidden = corpus.features(index)[0].float()
        rows = sample.answer[1:].nonzero()[:, 0]
        before.append(hidden[rows])
        token.append(sample.tokens[rows + 1].long())
        after.append(hidden[rows + 1])
        count += len(rows)
        if count >= _MAX_POSITIONS:
            break
    return torch.cat(before), torch.cat(token), torch.cat(after)


def _ridge(inputs: Tensor, outputs: Tensor, strength: float = 1e-3) -> Tensor:
    """Ridge regression: the map `[n, m]` from `inputs [N, n]` to `outputs [N, m]`."""
    gram = inputs.T @ inputs
    damping = strength * gram.diag() + 1e-4
    weights: Tensor = torch.linalg.solve(gram + torch.diag(damping), inputs.T @ outputs)
    return weights


def _low_rank(matrix: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors `[n, rank]`, `[rank, m]` that best approximate a matrix on given inputs.

    Args:
        matrix: `[n, m]`, the matrix to approximate.
        inputs: `[N, n]`, the inputs it is applied to.
        rank: Rank of the approximation.
    """
    moment = (inputs.T @ inputs / len(inputs)).double()
    values, vectors = torch.linalg.eigh(moment)
    # Directions that the inputs do not span would have an eigenvalue of zero.
    scales = values.clamp(min=1e-6 * float(values[-1])).sqrt()
    root = (vectors * scales) @ vectors.T
    u, s, v = torch.linalg.svd(root @ matrix.double(), full_matrices=False)
    kept = min(rank, len(s))
    left = (vectors / scales) @ vectors.T @ u[:, :kept] * s[:kept].sqrt()
    right = s[:kept, None].sqrt() * v[:kept]
    left, right = left.to(matrix.dtype), right.to(matrix.dtype)
    missing = rank - left.shape[1]
    pad = torch.nn.functional.pad
    return pad(left, (0, missing)), pad(right, (0, 0, 0, missing))
