"""Random inputs of `expand_trees`: texts and tables with equal tokens, scores and cells."""

from dataclasses import dataclass

import torch
from plain_texts import ALONE, PlainText, cell
from tree_kernels.candidates import NUM_SOURCES, TOP
from tree_kernels.ngrams import NgramIndex, extend_ngrams

SLOTS = 4


@dataclass
class World:
    """The arguments of `expand_trees`, and its texts again in plain Python."""

    matrix: torch.Tensor
    bigrams: torch.Tensor
    ngrams: NgramIndex
    priors: torch.Tensor
    slots: torch.Tensor
    roots: torch.Tensor
    texts: list[PlainText]

    def tables(self, row):
        """The adjacency matrix and the bigram table of a row of the batch, as lists."""
        table = int(self.slots[row]) if len(self.bigrams) > 1 else 0
        return self.matrix.tolist(), self.bigrams[table].tolist()

    def tensors(self):
        return self.matrix, self.bigrams, self.ngrams, self.priors, self.slots, self.roots

    def on(self, device):
        """The arguments of `expand_trees` on a device."""
        ngrams = self.ngrams
        moved = NgramIndex(
            *(t.to(device) for t in (ngrams.history, ngrams.lengths)), ngrams.index.to(device)
        )
        return [moved if each is ngrams else each.to(device) for each in self.tensors()]


def added_tokens(generator, batch, columns, vocab):
    """Random tokens `int32 [batch, columns]`, of which about one in six is -1."""
    tokens = torch.randint(0, vocab, (batch, columns), dtype=torch.int32, generator=generator)
    return tokens.masked_fill(torch.rand(batch, columns, generator=generator) < 1 / 6, -1)


def world(
    seed, batch=3, vocab=12, bigram_cells=64, length=60, cells=128, added=(50, 3, 9), own=False
):
    """Random inputs: some tokens are beyond the vocabulary, and rows may contain a token twice.

    Args:
        own: Whether each slot has its own bigram table, which has rows of single tokens too.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randint(0, vocab + 2, shape, dtype=torch.int32, generator=generator)

    matrix = drawn(vocab, TOP)
    matrix[torch.rand(vocab, generator=generator) < 0.3] = -1
    bigrams = torch.full((SLOTS if own else 1, bigram_cells, TOP + 2), -1, dtype=torch.int32)
    for table in bigrams:
        for number, (previous, token) in enumerate(drawn(min(40, bigram_cells - 1), 2).tolist()):
            key = [ALONE if own and number % 3 == 0 else previous, token]
            row = torch.tensor(key, dtype=torch.int32)
            table[cell(key, bigram_cells)] = torch.cat((row, drawn(TOP)))
    priors = (torch.rand(NUM_SOURCES, generator=generator) * 8).round() / 8 * 0.95
    ngrams = NgramIndex.of(SLOTS, length, cells, torch.device("cpu"))
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    texts = [PlainText(length, cells) for _ in range(batch)]
    for columns in added:
        tokens = added_tokens(generator, batch, columns, vocab + 2)
        extend_ngrams(ngrams, slots, tokens)
        for text, line in zip(texts, tokens.tolist(), strict=True):
            text.extend(line)
    ends = [text.tokens[-1] if text.tokens else 0 for text in texts]
    roots = torch.tensor(ends, dtype=torch.int32)
    return World(matrix, bigrams, ngrams, priors, slots, roots, texts)
