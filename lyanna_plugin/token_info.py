"""Token info (Lyanna, section 4.2): what a token adds to the logits of the token after it.

Token t adds `RMSNorm(E(t) W1 W2)`. Only the most frequent tokens of the training text, the hot
tokens, have rows and columns: a cold token adds nothing, and nothing is added to its logit. In
training the low-rank form is used; for serving it is collapsed into a table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_EPS = 1e-6


class TokenInfo(nn.Module):
    """The low-rank form of token info.

    H is the number of hot tokens, V the vocabulary size, d the hidden size.

    Args:
        hidden_size: Size of the target's embeddings.
        rank: Rank of the low-rank form.
        hot_tokens: `int [H]`, ids of the hot tokens.
        vocab_size: Vocabulary size of the target.

    Attributes:
        hot_tokens: `int32 [H]`, ids of the hot tokens.
        row_of: `int32 [V]`, the row of each token; -1 for cold tokens.
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

        The squared norm of `z W2` is computed as `z (W2 W2^T) z^T`, without forming `z W2`.

        Args:
            tokens: `int [N]`, the tokens.
            embedded: `[N, d]`, the target's embeddings of the tokens.

        Returns:
            `[N, rank]`; zeros for cold tokens.
        """
        z = embedded @ self.w1
        gram = (self.w2 @ self.w2.T) / self.w2.shape[1]
        square = ((z @ gram) * z).sum(-1, keepdim=True)
        return z * torch.rsqrt(square + _EPS) * (self.row_of[tokens] >= 0)[:, None]

    def columns(self) -> Tensor:
        """The matrix that codes are multiplied by, `[rank, H]`."""
        return self.w2 * self.gain

    def collapse(self, embedded: Tensor, dtype: torch.dtype) -> Tensor:
        """The table of token info, `[H, H]`: row i is added to the logits after hot token i.

        Args:
            embedded: `[H, d]`, the target's embeddings of the hot tokens.
            dtype: Data type of the table.
        """
        size = len(self.hot_tokens)
        table = torch.empty(size, size, dtype=dtype, device=embedded.device)
        self.collapse_into(table, embedded)
        return table

    def collapse_into(self, table: Tensor, embedded: Tensor) -> None:
        """Write the table of token info over one that was made by `collapse`."""
        columns = self.columns()
        limit = torch.finfo(table.dtype).max
        # Converted in pieces, since the whole in float32 would take twice the table's memory.
        pieces = (torch.split(each, 1024) for each in (self.hot_tokens.long(), embedded, table))
        with torch.no_grad():
            for tokens, part, rows in zip(*pieces, strict=True):
                values = self.codes(tokens, part.to(columns.dtype)) @ columns
                rows.copy_(values.clamp(-limit, limit))

    def add_to(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Add `rows [..., H]` to the logits of the hot tokens in `logits [..., V]`."""
        return logits.index_add(-1, self.hot_tokens.long(), rows.to(logits.dtype))
