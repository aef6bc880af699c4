"""Where training starts: linear maps fitted to the features, and the target's own last layer.

Each is a ridge regression over the answers' positions, which saves the first thousands of steps:
the fusion predicts the next hidden state from this one and the next token; the map between steps
does it without the token; the token info is the low-rank best of what the token alone says of the
next logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lyanna_plugin.model import Drafter
from lyanna_plugin.training.features import Corpus

_POSITIONS = 100_000


def initialise(
    drafter: Drafter,
    corpus: Corpus,
    embeddings: Tensor,
    head: Tensor,
    last_layer: dict[str, Tensor],
    final_norm: Tensor,
) -> None:
    """Set a drafter's first weights.

    Args:
        embeddings, head: `[V, d]`, the target's.
        last_layer: the target's, by the names that they have in the layer.
        final_norm: `[d]`, the target's.
    """
    before, token, after = _positions(corpus)
    embedded = embeddings[token]
    scaled = drafter.config.embedding_scale * embedded
    if not drafter.config.first_token:
        scaled = torch.zeros_like(scaled)
    mean = after.mean(0)
    with torch.no_grad():
        drafter.load_state_dict(last_layer, strict=False)
        drafter.fuse_proj.weight.copy_(_ridge(torch.cat([before, scaled], 1), after).T)
        if isinstance(drafter.between, torch.nn.Linear):
            drafter.between.weight.copy_(_ridge(before, after).T)
        if drafter.config.output_norm:
            assert not isinstance(drafter.norm, torch.nn.Identity)
            drafter.norm.weight.copy_(final_norm)
        info = drafter.token_info
        if info is not None:
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
        if count >= _POSITIONS:
            break
    return torch.cat(before), torch.cat(token), torch.cat(after)


def _ridge(inputs: Tensor, outputs: Tensor, strength: float = 1e-3) -> Tensor:
    """`[n, m]` that maps inputs `[N, n]` to outputs `[N, m]` with the least squared error."""
    gram = inputs.T @ inputs
    damping = strength * gram.diag() + 1e-4
    weights: Tensor = torch.linalg.solve(gram + torch.diag(damping), inputs.T @ outputs)
    return weights


def _low_rank(matrix: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors `[n, rank]`, `[rank, m]` of the `matrix` `[n, m]`, best for such inputs `[N, n]`."""
    moment = (inputs.T @ inputs / len(inputs)).double()
    values, vectors = torch.linalg.eigh(moment)
    # Few inputs span few directions: in the others nothing is known.
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
