"""What a parent token says about its child (Lyanna, section 4.2): an addition to the logits.

`RMSNorm(E(t) W1 W2)`, of which only the most frequent tokens of the text, the hot ones, have rows
and columns: a cold token adds nothing, and nothing is added to a cold token's logit. In training it
is kept low-rank; for serving it is collapsed into a table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_EPS = 1e-6


class TokenInfo(nn.Module):
    """The low-rank form.

    Args:
        hidden_size: of the target's embeddings.
        rank: of the form.
        hot_tokens: `int [H]`, ids.
        vocab_size: of the target.
    """

    hot_tokens: Tensor
    row_of: Tensor

    def __init__(self, hidden_size: int, rank: int, hot_tokens: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(hidden_size, rank) / hidden_size**0.5)
        self.w2 = nn.Parameter(torch.randn(rank, len(hot_tokens)) / rank**0.5)
        self.gain = nn.Parameter(torch.ones(len(hot_tokens)))
        self.register_buffer("hot_tokens", hot_tokens.int())
        row_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        row_of[hot_tokens.long()] = torch.arange(len(hot_tokens), dtype=torch.int32)
        self.register_buffer("row_of", row_of, persistent=False)

    def codes(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Normalised codes whose product with `columns()` is the token info.

        The norm of `z W2` is that of `z (W2 W2^T) z^T`, so no row as wide as the table is formed.

        Args:
            tokens: int `[N]`, the parents.
            embedded: `[N, d]`, the target's embeddings of them.

        Returns:
            `[N, rank]`; zeros for cold tokens.
        """
        z = embedded @ self.w1
        gram = (self.w2 @ self.w2.T) / self.w2.shape[1]
        square = ((z @ gram) * z).sum(-1, keepdim=True)
        return z * torch.rsqrt(square + _EPS) * (self.row_of[tokens] >= 0)[:, None]

    def columns(self) -> Tensor:
        """`[rank, H]`: what a code is multiplied with."""
        return self.w2 * self.gain

    def collapse(self, embedded: Tensor, dtype: torch.dtype) -> Tensor:
        """The table `[H, H]`: row i is what hot token i adds to the logits of the hot tokens.

        Args:
            embedded: `[H, d]`, the target's embeddings of the hot tokens.
        """
        hot = self.hot_tokens.long()
        columns = self.columns()
        most = torch.finfo(dtype).max
        # In pieces: in float32 the whole would be twice the table.
        pieces = [
            (self.codes(tokens, part.to(columns.dtype)) @ columns).clamp(-most, most).to(dtype)
            for tokens, part in zip(
                torch.split(hot, 1024), torch.split(embedded, 1024), strict=True
            )
        ]
        return torch.cat(pieces)

    def add_to(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Add rows over the hot tokens `[..., H]` to logits over all `[..., V]`."""
        return logits.index_add(-1, self.hot_tokens.long(), rows.to(logits.dtype))
